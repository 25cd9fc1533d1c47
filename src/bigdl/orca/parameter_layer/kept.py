"""States of ranks in files of the executors, for a transport whose tasks end after every group.

A rank writes its state to the directory of its executor, and a copy to that of another executor, if
the ranks run on several. So the driver never has it, and the loss of an executor loses nothing. A
rank that runs elsewhere next time is given its state by one that has it.

The state after a group has a name of its own, which the driver makes up before the group and
believes in once all ranks have ended the group. What a group that failed has written is never read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import zlib

import numpy as np

from bigdl.orca.parameter_layer.messages import Message, unpack
from bigdl.orca.parameter_layer.peers import exchanged

__all__ = ["KeptStates", "folder_of"]


def folder_of(directory: str, job: int, training: str) -> str:
    """Where the states of a training are below an executor's directory.

    Its name is that of a spool, so what is left there is removed when another job begins.
    """
    return os.path.join(directory, f"bigdl-spool-{job}-state-{training}")


class KeptStates:
    """The states of one training, as a rank sees them. All methods are collectives.

    Parameters
    ----------
    sync : TorchDistributedSync
    folder : str
        See :func:`folder_of`.
    """

    def __init__(self, sync, folder: str):
        self._sync, self._folder = sync, folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        place = f"{socket.gethostname()}:{os.path.realpath(folder)}".encode()
        self._places = [row[0] for row in sync.all_gather([float(zlib.crc32(place))])]

    def keep_only(self, name: str | None) -> None:
        """Remove all states but those of this name."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if name is None or not entry.name.startswith(f"{name}-"):
                    with contextlib.suppress(FileNotFoundError):  # others do the same
                        os.unlink(entry.path)

    def read(self, name: str):
        """The own state, bytes-like; None if that of any rank is lost."""
        ranks, own = range(self._sync.world_size), self._sync.rank
        here = [float(os.path.exists(self._path(name, rank))) for rank in ranks]
        table = self._sync.all_gather(here)
        givers = [_giver(table, rank) for rank in ranks]
        if None in givers:
            return None
        if givers != list(ranks):
            messages = [
                self._message(name, rank) if givers[rank] == own != rank else Message(None)
                for rank in ranks
            ]
            given = exchanged(self._sync, messages)
            if givers[own] != own:
                return unpack(given[givers[own]])[1][0]
        return self._map(name, own)

    def write(self, name: str, state: Message) -> None:
        """Keep the own state, and the copies of others' that belong here."""
        ranks, own = range(self._sync.world_size), self._sync.rank
        state.written().tofile(self._path(name, own))
        keepers = [self._keeper(rank) for rank in ranks]
        if keepers == list(ranks):
            return
        messages = [state if rank == keepers[own] else Message(None) for rank in ranks]
        for rank, data in enumerate(exchanged(self._sync, messages)):
            if keepers[rank] == own != rank:
                data.tofile(self._path(name, rank))

    def _keeper(self, rank):
        """Who has the copy: the next one in another place, or the rank itself."""
        ranks = self._sync.world_size
        following = [(rank + distance) % ranks for distance in range(1, ranks)]
        return next((r for r in following if self._places[r] != self._places[rank]), rank)

    def _message(self, name, rank):
        return Message(None, [self._map(name, rank)])

    def _map(self, name, rank):
        return np.memmap(self._path(name, rank), np.uint8, mode="r")

    def _path(self, name, rank):
        return os.path.join(self._folder, f"{name}-{rank}")


def _giver(table, rank):
    """Who gives a rank its state: itself, or the first one that has it."""
    candidates = [rank, *range(len(table))]
    return next((r for r in candidates if table[r][rank]), None)
