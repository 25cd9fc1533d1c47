"""What a program sees of the worker that it runs in."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Worker"]


class Worker:
    """What a program knows of the worker that it runs in.

    Attributes
    ----------
    rank : int
        0 ... `world_size` - 1.
    world_size : int
        Number of workers.
    threads : int
        Threads that this worker may use; already set in torch and OpenMP.
    shards : dict of str to Shard
        The worker's rows of every feed, by the feed's name.
    options : dict
        What the driver said of this attempt.
    host : str
        Address of this worker towards its rendezvous.
    local_dir : str
        A directory on this machine that goes with the application.
    timeout : float
        Seconds after which a collective that makes no progress fails.
    line : bigdl.runtime.channel.Line
        Keys that all workers of this attempt share.
    """

    def __init__(
        self, rank, world_size, *, threads, shards, line, uplink, host, local_dir, timeout
    ):
        self.rank = rank
        self.world_size = world_size
        self.threads = threads
        self.shards = shards
        self.options = uplink.options()
        self.host = host
        self.local_dir = local_dir
        self.timeout = timeout
        self.line = line
        self._uplink = uplink
        self._cleanups: list[Callable[[], None]] = []
        self._cleaner: threading.Thread | None = None

    @property
    def shard(self):
        """The shard of the only feed, or None."""
        return next(iter(self.shards.values()), None)

    def state(self) -> bytes | None:
        """What the driver gave as `state` of the attempt; for rank 0 only."""
        return self._uplink.state()

    def progress(self, **values: Any) -> None:
        """Tell the driver how far this worker is; cheap, the heartbeat takes it along."""
        self._uplink.progress = values

    def send(self, topic: str, doc: dict, data: bytes) -> None:
        """Send a message to the driver's ``on_event``; returns when it is on its way."""
        self._uplink.send({"topic": topic, "rank": self.rank, **doc}, data)

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Run `cleanup` when the program ends, however it ends, before anything is reported.

        A process group must be destroyed here: as long as it is open, the peers of a failed worker
        stay blocked in their collective.
        """
        self._cleanups.append(cleanup)

    def clean_up(self, patience: float | None = None) -> None:
        """Run what :meth:`at_exit` was given; go on after `patience` seconds if it hangs.

        Destroying a process group waits for collectives under way, which may wait for a peer.
        """
        if self._cleaner is None:
            self._cleaner = threading.Thread(target=self._clean_up, daemon=True)
            self._cleaner.start()
        self._cleaner.join(patience)

    def _clean_up(self):
        while self._cleanups:
            with contextlib.suppress(Exception):
                self._cleanups.pop()()
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available():
            with contextlib.suppress(Exception):
                if distributed.is_initialized():  # one that the program made and left open
                    distributed.destroy_process_group()
