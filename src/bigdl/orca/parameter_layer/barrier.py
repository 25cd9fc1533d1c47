"""Barrier transport: a barrier stage runs each group of steps; its ranks communicate with gloo.

Inside the stage, gradients are sent to the owners of the slices (a reduce-scatter that sums in rank
order), and weights to all ranks (an all-gather).  After a group the executors keep the state
(:class:`StateFiles`).  A failed group is run again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from bigdl.common.errors import WorkerLost
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.parameter_layer.messages import (
    ArrayMessage,
    RankState,
    ReceivedMessage,
    pack,
    unpack,
)
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep, Transport
from bigdl.orca.parameter_layer.rank import Rank, Replica, replica_of
from bigdl.runtime.collectives.base import GradientSync, as_peer_lost
from bigdl.runtime.collectives.host_memory import HostExchange
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.jobs import job_number
from bigdl.runtime.shards.shard import remove_spool
from bigdl.runtime.task import read_to_end
from bigdl.runtime.worker import Worker

if TYPE_CHECKING:
    import torch

    from bigdl.orca.engines.spark import SparkEngine

_DESCRIBE, _RUN, _GIVE = "describe", "run", "give"  # purposes of a stage
_HEADER = 1 << 12  # bytes of the header that each rank sends to each other rank in an exchange
_LARGE = 1 << 20  # bytes from which on a part of a message is sent separately, and of its blocks
_AHEAD = 4  # blocks that a rank may send ahead of the blocks that it receives
_LOST = "lost"  # answer of all ranks if the state of one is lost


class BarrierTransport(Transport):
    """Transport that runs a barrier stage for every group of steps.

    Parameters
    ----------
    engine : SparkEngine
    plan : LayerPlan
    program, feed, threads
        See :class:`~.shuffle.ShuffleTransport`.
    """

    group_size = 100

    def __init__(
        self,
        engine: SparkEngine,
        plan: LayerPlan,
        program: Callable[[int, dict], Replica],
        feed: FeedGroup,
        *,
        threads: int | None = None,
    ):
        with contextlib.ExitStack() as opened:
            # entering it for each group would cost time
            opened.enter_context(engine.cluster.quiet())
            number = opened.enter_context(job_number())
            group = GroupProgram(secrets.token_hex(8), number, plan, program)
            self.job = engine.open(group, feed, plan.ranks, threads=threads, keep_spools=True)
            opened.callback(self.job.close)
            self._resources = opened.pop_all()
        self._unsent: list[RankState] = []  # states of `start` that executors do not have yet
        self._name: str | None = None  # name of the states that the executors keep
        self._folders: set[str] = set()  # folders of states, maybe on other machines

    def rows(self) -> list[dict]:
        return self._ask({"stage": _DESCRIBE})

    def start(self, states: Sequence[RankState]) -> None:
        self._unsent, self._name, self.keeps_state = list(states), None, True

    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        data = [cloudpickle.dumps(list(steps)), *(state.pack() for state in self._unsent)]
        following = secrets.token_hex(8)
        records = self._ask({"stage": _RUN, "next": following}, pack(data))
        self._unsent, self._name = [], following
        return records

    def states(self) -> list[RankState]:
        return [RankState.unpack(packed) for packed in self._ask({"stage": _GIVE})]

    def _ask(self, options, data=None):
        """Run a stage and return the answers of its ranks."""
        pairs = map(unpack, self.job.attempt({**options, "name": self._name}, data))
        folders, answers = zip(*pairs, strict=True)
        self._folders.update(folders)
        if any(isinstance(doc, str) for doc in answers):  # _LOST
            self.keeps_state = False
            raise WorkerLost("The weights were lost with all executors that had them")
        return list(answers)

    def close(self) -> None:
        self._resources.close()
        for folder in self._folders:  # on other machines the next job removes them
            remove_spool(folder)


@dataclass
class GroupProgram:
    """Program that a worker runs for one stage."""

    training: str
    job: int
    plan: LayerPlan
    program: Callable[[int, dict], Any]

    def __call__(self, worker: Worker) -> bytes:
        # named like a spool, so that the next job removes remaining files
        folder = os.path.join(worker.local_dir, f"bigdl-spool-{self.job}-state-{self.training}")
        return pack([folder, self._answer(worker, folder)])

    def _answer(self, worker, folder):
        """Run the stage; return the result document for the driver."""
        options = worker.options
        if options["stage"] == _DESCRIBE:
            return self._replica(worker).describe()
        sync = TorchDistributedSync(worker)
        sync.start()
        states = StateFiles(sync, folder)
        states.keep_only(options["name"])
        data = sync.broadcast(worker.state())  # the steps, and maybe all states
        steps, *states_of_ranks = [None] if data is None else unpack(data)
        packed = states_of_ranks[worker.rank] if states_of_ranks else states.read(options["name"])
        if packed is None:
            return _LOST
        if options["stage"] == _GIVE:
            return packed
        state = RankState.unpack(packed)
        state.begin_group()
        replica, rank = self._replica(worker), Rank(self.plan, worker.rank, stays=True)
        with contextlib.closing(HostExchange(sync.neighbours)) as near:
            exchange = MessageExchange(sync, near)
            for step in pickle.loads(steps):  # sent by the driver, not by a worker
                self._step(step, rank, replica, state, exchange)
            sync.all_gather([0.0])  # all ranks have read their messages
        states.write(options["next"], state.message())
        return state.records

    def _replica(self, worker):
        version = tuple(shard.spool.nonce for shard in worker.shards.values())
        shards = dict(worker.shards)  # the engine releases its references
        make = functools.partial(self.program, worker.rank, shards)
        return replica_of(self.training, worker.rank, version, make)

    def _step(self, step: LayerStep, rank, replica, state, exchange):
        with rank.sending(state):
            message = rank.weights(state)
        vector, parts = rank.vector()
        with rank.reading():
            weights = exchange([message] * self.plan.ranks, parts)
        pieces, state.residual = rank.gradients(replica, step, weights, state.residual, vector)
        with rank.reading():
            pieces, coming = exchange.begin(pieces)
        summed = rank.reduce(pieces, coming)
        statistics = None
        if self.plan.needs_statistics:
            message = rank.statistics(summed, state)
            with rank.reading():
                statistics = exchange([message] * self.plan.ranks)
        rank.update(step, summed, state, statistics)


class MessageExchange:
    """All-to-all exchange of messages between ranks; each call is a collective operation.

    Parameters
    ----------
    sync : TorchDistributedSync
    near : HostExchange, optional
        Shared-memory exchange with ranks on the same host; by default there is none.
    """

    def __init__(self, sync: GradientSync, near: HostExchange | None = None):
        self._sync, self._near = sync, near or HostExchange({})
        self._memory: dict[int, Any] = {}  # memory for large messages, by sender

    def __call__(
        self, messages: Sequence[ArrayMessage], into: Sequence[np.ndarray] | None = None
    ) -> list:
        """Send one message to every rank and return the received messages.

        Parameters
        ----------
        messages : sequence of ArrayMessage
            One message for each rank; one object may be sent to several ranks.
        into : sequence of ndarray, optional
            For each sender an array that may receive the large part of its message, if the sizes
            agree and the message is sent by a socket.

        Returns
        -------
        list of bytes-like, ArrayMessage or ReceivedMessage
            Received messages, in rank order; the local one is returned as passed. They are valid
            until the next call.

        Raises
        ------
        PeerLost
        """
        exchanged, coming = self.begin(messages, into)
        read_to_end(coming)
        return exchanged

    def begin(
        self, messages: Sequence[ArrayMessage], into: Sequence[np.ndarray] | None = None
    ) -> tuple[list, Iterator[int]]:
        """Start an exchange; large arrays arrive while the returned iterator is consumed.

        Returns
        -------
        list of bytes-like, ArrayMessage or ReceivedMessage
            Received messages, whose large arrays may be incomplete.
        iterator of int
            Receives the large arrays when consumed; yields the number of bytes of each that have
            arrived. At its end all are complete.
        """
        sync, peers = self._sync, self._near.neighbours
        if sync.world_size == 1:
            return list(messages), iter(())
        import torch
        import torch.distributed as dist

        by_gloo = [rank for rank in range(sync.world_size) if rank not in {*peers, sync.rank}]
        distinct = {id(messages[rank]): messages[rank] for rank in by_gloo}
        split = {number: SplitMessage.of(message) for number, message in distinct.items()}
        sent = {rank: split[id(messages[rank])] for rank in by_gloo}
        can_ring = not peers and len(distinct) == 1 and sync.world_size > 2  # two ranks need none
        headers = np.zeros((sync.world_size, _HEADER), np.uint8)
        for rank, position in enumerate(self._write_near(messages)):
            message = sent.get(rank, _NOTHING)
            fields, room = _opened(headers[rank])
            fields[:] = can_ring, *message.sizes, *position
            if not message.is_long:
                room[: len(message.rest)] = np.frombuffer(message.rest, np.uint8)
        incoming = np.empty_like(headers)
        with as_peer_lost():  # a ring gather would need one latency per rank
            dist.all_to_all_single(torch.from_numpy(incoming), torch.from_numpy(headers))
        exchanged: list = [None] * sync.world_size
        coming: Iterator[int] = iter(())
        if by_gloo:
            from_gloo = {rank: incoming[rank] for rank in by_gloo}
            received, coming = self._by_gloo(sent, from_gloo, into, can_ring)
            for rank, received_message in received.items():
                exchanged[rank] = received_message
        for rank in peers:
            fields, _ = _opened(incoming[rank])
            exchanged[rank] = self._near.read(rank, fields[-HostExchange.FIELDS :].tolist())
        exchanged[sync.rank] = messages[sync.rank]
        return exchanged, coming

    def _write_near(self, messages: Sequence[ArrayMessage]) -> list[tuple[int, ...]]:
        """Write the messages for local peers to shared memory; return their positions."""
        distinct = {id(messages[rank]): messages[rank].parts for rank in self._near.neighbours}
        written = self._near.write(list(distinct.values())) if distinct else []
        positions = dict(zip(distinct, written, strict=True))
        empty = (0,) * HostExchange.FIELDS  # for ranks on other hosts
        return [positions.get(id(message), empty) for message in messages]

    def _by_gloo(
        self,
        sent: dict[int, SplitMessage],
        headers: dict[int, np.ndarray],
        into: Sequence[np.ndarray] | None,
        is_ring: bool,
    ) -> tuple[dict, Iterator[int]]:
        """Exchange messages with other hosts; return them and an iterator that gets large parts.

        If every rank sends the same message to all others, large parts go around a ring, so that a
        link carries one stream per direction. Otherwise they are sent to every rank in turn.
        """
        import torch
        import torch.distributed as dist

        works: list[Any] = []
        arriving: dict[int, list] = {}  # blocks of large parts, by sender
        messages: dict[int, Any] = {}
        has_array = True
        with as_peer_lost():
            for source, header in headers.items():
                fields, rest = _opened(header)
                can_ring, head, size, tail = fields[: -HostExchange.FIELDS].tolist()
                is_ring = is_ring and bool(can_ring)
                if head + tail > len(rest):
                    rest = np.empty(head + tail, np.uint8)
                    works.append(dist.irecv(torch.from_numpy(rest), source))
                rest = rest[: head + tail]
                if not size:
                    messages[source] = rest
                    continue
                has_array = has_array and head > 0  # else the large part is the whole message
                if into is not None and into[source].nbytes == size:
                    memory = torch.from_numpy(into[source].view(np.uint8))
                else:
                    memory = self._room(source, size)
                arriving[source] = list(memory.split(_LARGE))
                messages[source] = ReceivedMessage(rest[:head], memory.numpy(), rest[head:])
            for rank, message in sent.items():
                if message.is_long:
                    works.append(dist.isend(message.rest_alone, rank))
            for work in works:
                work.wait()
            blocks = {rank: message.blocks for rank, message in sent.items()}
            coming: Iterator[int] = iter(())
            if is_ring:
                self._around(blocks, arriving)
            else:
                coming = self._one_to_each(blocks, arriving)
            if not has_array:
                read_to_end(coming)
        return messages, coming

    def _around(self, blocks: dict[int, list], arriving: dict[int, list]) -> None:
        """Send large parts around a ring of ranks: first local blocks, then received blocks."""
        import torch.distributed as dist

        world, this = self._sync.world_size, self._sync.rank
        following, *others = ((this + distance) % world for distance in range(1, world))
        sources = [*reversed(others), following]
        incoming = [(source, block) for source in sources for block in arriving.get(source, ())]
        received: list[Any] = [dist.irecv(block, sources[0]) for _, block in incoming]
        sent: list[Any] = [dist.isend(block, following) for block in blocks[following]]
        for (source, block), work in zip(incoming, received, strict=True):
            work.wait()
            if source != following:
                sent.append(dist.isend(block, following))
        for work in sent:
            work.wait()

    def _one_to_each(self, blocks: dict[int, list], arriving: dict[int, list]) -> Iterator[int]:
        """Send blocks to all ranks in turn, at most `_AHEAD` blocks ahead of the received ones.

        More blocks in flight would overload a link, whose losses must be sent again.
        """
        import torch.distributed as dist

        turn = self._sync.world_size - 1
        sent: list[Any] = []
        with as_peer_lost():
            received: deque[tuple[int, Any]] = deque(
                (index, dist.irecv(block, source))
                for index, source, block in self._in_turn(arriving, -1)
            )
            for index, target, block in self._in_turn(blocks, 1):
                while received and received[0][0] <= index - _AHEAD:
                    received.popleft()[1].wait()
                sent.append(dist.isend(block, target))
                yield max(index - _AHEAD + 1, 0) // turn * _LARGE
            for index, work in received:
                work.wait()
                yield (index + 1) // turn * _LARGE
            for work in sent:
                work.wait()

    def _in_turn(self, blocks: dict[int, list], step: int) -> Iterator[tuple[int, int, Any]]:
        """Yield each block with its index and rank, one block from each rank in turn.

        The ranks follow this rank in ascending order, or in descending order with step -1. A block
        has the same index on its sender and its receiver.
        """
        world, this = self._sync.world_size, self._sync.rank
        ranks = [(this + step * distance) % world for distance in range(1, world)]
        turns = itertools.zip_longest(*(blocks.get(rank, ()) for rank in ranks))
        for index, block in enumerate(itertools.chain.from_iterable(turns)):
            if block is not None:
                yield index, ranks[index % len(ranks)], block

    def _room(self, rank: int, size: int):
        """Return a buffer for the large part of a rank's message; later messages reuse it."""
        import torch

        memory = self._memory.get(rank)
        if memory is None or len(memory) < size:
            memory = self._memory[rank] = torch.empty(size, dtype=torch.uint8)
        return memory[:size]


@dataclass(frozen=True)
class SplitMessage:
    """Message for a socket, split into a large part that is not copied and the remaining bytes.

    Attributes
    ----------
    sizes : tuple of int
        Bytes before, of, and after the large part.
    rest : bytes-like
        Bytes before and after the large part.
    large : torch.Tensor or None
    """

    sizes: tuple[int, int, int]
    rest: bytes | bytearray = b""
    large: Any = None

    @property
    def is_long(self) -> bool:
        """True if the remaining bytes do not fit into a header."""
        return len(self.rest) > _HEADER - _FIELDS

    @property
    def rest_alone(self) -> torch.Tensor:
        """Remaining bytes as a tensor."""
        import torch

        return torch.from_numpy(np.frombuffer(bytearray(self.rest), np.uint8))

    @property
    def blocks(self) -> list:
        """Large part as a list of tensors."""
        return [] if self.large is None else list(self.large.split(_LARGE))

    @classmethod
    def of(cls, message: ArrayMessage) -> SplitMessage:
        """Split a message; join several large parts into one."""
        import torch

        parts, size = message.parts, len(message)
        if size < _LARGE:
            return cls((size, 0, 0), bytes(message))
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        if size - len(parts[largest]) >= _LARGE:
            parts, largest = [bytearray(b"").join(parts)], 0
        array = np.frombuffer(parts[largest], np.uint8)
        if not array.flags.writeable:  # torch warns about read-only arrays
            array = array.copy()
        head, tail = (bytearray(b"").join(p) for p in (parts[:largest], parts[largest + 1 :]))
        return cls((len(head), len(array), len(tail)), head + tail, torch.from_numpy(array))


_NOTHING = SplitMessage((0, 0, 0))
# bytes of a header's fields: whether a ring is possible, the sizes, the shared-memory position
_FIELDS = np.dtype(np.int64).itemsize * (1 + len(_NOTHING.sizes) + HostExchange.FIELDS)


def _opened(header: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a header into its fields and its space for inline bytes."""
    return header[:_FIELDS].view(np.int64), header[_FIELDS:]


class StateFiles:
    """Files that store the ranks' states in a training run; all methods are collective operations.

    Parameters
    ----------
    sync : TorchDistributedSync
    folder : str
        Folder of this training, below the executor's directory.
    """

    def __init__(self, sync: GradientSync, folder: str):
        self._sync, self._folder, self._exchange = sync, folder, MessageExchange(sync)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        location = f"{socket.gethostname()}:{os.path.realpath(folder)}".encode()
        self._locations = [row[0] for row in sync.all_gather([float(zlib.crc32(location))])]

    def keep_only(self, name: str | None) -> None:
        """Remove the files of all states except the state `name`."""
        for path in list(Path(self._folder).iterdir()):
            if name is None or not path.name.startswith(f"{name}-"):
                path.unlink(missing_ok=True)  # other ranks do the same

    def read(self, name: str) -> np.ndarray | None:
        """Return this rank's state as bytes; None if the state of any rank is lost."""
        ranks, this = range(self._sync.world_size), self._sync.rank
        here = [float(os.path.exists(self._path(name, rank))) for rank in ranks]
        table = self._sync.all_gather(here)
        # the rank itself, or the first rank that has its state
        holders = [[r for r in (rank, *ranks) if table[r][rank]] for rank in ranks]
        if not all(holders):
            return None
        senders = [held_by[0] for held_by in holders]
        messages = [
            ArrayMessage(
                np.memmap(self._path(name, rank), np.uint8, "r") if sender == this else None
            )
            for rank, sender in enumerate(senders)
        ]
        return unpack(self._exchange(messages)[senders[this]])

    def write(self, name: str, state: ArrayMessage) -> None:
        """Write this rank's state, and the copies of other ranks' states that this rank keeps."""
        ranks, this = range(self._sync.world_size), self._sync.rank
        with open(self._path(name, this), "wb") as file:
            file.writelines(state.parts)
        copy_holders = [self._copy_holder(rank) for rank in ranks]
        messages = [state if rank == copy_holders[this] else ArrayMessage(None) for rank in ranks]
        for rank, data in enumerate(self._exchange(messages)):
            if copy_holders[rank] == this != rank:
                with open(self._path(name, rank), "wb") as file:
                    file.writelines(data.parts if isinstance(data, ReceivedMessage) else [data])

    def _copy_holder(self, rank):
        """Return the next rank that stores its files in another folder, or `rank` if none does."""
        ranks = self._sync.world_size
        following = [(rank + distance) % ranks for distance in range(1, ranks)]
        return next((r for r in following if self._locations[r] != self._locations[rank]), rank)

    def _path(self, name, rank):
        return os.path.join(self._folder, f"{name}-{rank}")
