"""The barrier transport: a group of steps in one barrier stage, whose ranks talk to each other.

Inside the stage pieces go from peer to peer by gloo: gradients to the owners of the slices (a
reduce-scatter whose sum is made in the order of the ranks), weights to everybody (an all-gather).
After a group the executors keep the state (:class:`StateFiles`), and a group that fails is run
again.
"""

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
    from bigdl.orca.engines.spark import SparkEngine

_DESCRIBE, _RUN, _GIVE = "describe", "run", "give"  # what a stage is for
_LETTER = 1 << 12  # bytes that every rank gets from every other in an exchange
_LARGE = 1 << 20  # bytes of a message from which on a part of it goes by itself, and of its blocks
_AHEAD = 4  # blocks that a rank sends before it has what others send it meanwhile
_LOST = "lost"  # the answer of ranks where the state of one is gone


class BarrierTransport(Transport):
    """A barrier stage for every group.

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
        engine: "SparkEngine",
        plan: LayerPlan,
        program: Callable[[int, dict], Replica],
        feed: FeedGroup,
        *,
        threads: int | None = None,
    ):
        with contextlib.ExitStack() as opened:
            # again for each group takes its time
            opened.enter_context(engine.cluster.quiet())
            number = opened.enter_context(job_number())
            group = GroupProgram(secrets.token_hex(8), number, plan, program)
            self.job = engine.open(group, feed, plan.ranks, threads=threads, keep_spools=True)
            opened.callback(self.job.close)
            self._resources = opened.pop_all()
        self._given: list[RankState] = []  # by `start`, and not with the executors yet
        self._name: str | None = None  # of the states that the executors keep
        self._folders: set[str] = set()  # where states are, perhaps on other machines

    def rows(self) -> list[dict]:
        return self._ask({"stage": _DESCRIBE})

    def start(self, states: Sequence[RankState]) -> None:
        self._given, self._name, self.keeps_state = list(states), None, True

    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        data = [cloudpickle.dumps(list(steps)), *(state.pack() for state in self._given)]
        following = secrets.token_hex(8)
        records = self._ask({"stage": _RUN, "next": following}, pack(data))
        self._given, self._name = [], following
        return records

    def states(self) -> list[RankState]:
        return [RankState.unpack(packed) for packed in self._ask({"stage": _GIVE})]

    def _ask(self, options, data=None):
        """Return the answers of the ranks."""
        pairs = map(unpack, self.job.attempt({**options, "name": self._name}, data))
        folders, answers = zip(*pairs, strict=True)
        self._folders.update(folders)
        if any(isinstance(doc, str) for doc in answers):  # _LOST
            self.keeps_state = False
            raise WorkerLost("The weights were lost with all executors that had them")
        return list(answers)

    def close(self) -> None:
        self._resources.close()
        for folder in self._folders:  # those of other machines go when the next job begins there
            remove_spool(folder)


@dataclass
class GroupProgram:
    """Program of a worker for one group; shipped by the engine."""

    training: str
    job: int
    plan: LayerPlan
    program: Callable[[int, dict], Any]

    def __call__(self, worker: Worker) -> bytes:
        # by its name a spool, so what is left there is removed when another job begins
        folder = os.path.join(worker.local_dir, f"bigdl-spool-{self.job}-state-{self.training}")
        return pack([folder, self._answer(worker, folder)])

    def _answer(self, worker, folder):
        """A document for the driver."""
        options = worker.options
        if options["stage"] == _DESCRIBE:
            return self._replica(worker).describe()
        sync = TorchDistributedSync(worker)
        sync.start()
        states = StateFiles(sync, folder)
        states.keep_only(options["name"])
        data = sync.broadcast(worker.state())  # the steps, and perhaps all states
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
            for step in pickle.loads(steps):  # from the driver, not from a worker
                self._step(step, rank, replica, state, exchange)
            sync.all_gather([0.0])  # all have read what they were given
        states.write(options["next"], state.message())
        return state.records

    def _replica(self, worker):
        version = tuple(shard.spool.nonce for shard in worker.shards.values())
        shards = dict(worker.shards)  # the engine lets go of its own
        make = functools.partial(self.program, worker.rank, shards)
        return replica_of(self.training, worker.rank, version, make)

    def _step(self, step: LayerStep, rank, replica, state, exchange):
        with rank.sending(state):
            own = rank.weights(state)
        vector, parts = rank.vector()
        with rank.reading():
            weights = exchange([own] * self.plan.ranks, parts)
        pieces, state.residual = rank.gradients(replica, step, weights, state.residual, vector)
        with rank.reading():
            pieces, coming = exchange.begin(pieces)
        summed = rank.reduce(pieces, coming)
        statistics = None
        if self.plan.needs_statistics:
            own = rank.statistics(summed, state)
            with rank.reading():
                statistics = exchange([own] * self.plan.ranks)
        rank.update(step, summed, state, statistics)


class MessageExchange:
    """Gives messages to every rank; to call it is a collective.

    Parameters
    ----------
    sync : TorchDistributedSync
    near : HostExchange, optional
        Its neighbours read messages in each other's memory; by default there are none.
    """

    def __init__(self, sync: GradientSync, near: HostExchange | None = None):
        self._sync, self._near = sync, near or HostExchange({})
        self._memory: dict[int, Any] = {}  # for large messages, by the rank that they are from

    def __call__(
        self, messages: Sequence[ArrayMessage], into: Sequence[np.ndarray] | None = None
    ) -> list:
        """Give a message to every rank.

        Parameters
        ----------
        messages : sequence of ArrayMessage
            One for each rank; the same one may go to several.
        into : sequence of ndarray, optional
            For each rank an array where the large part of its message may be put, if it is as long
            and comes by a socket.

        Returns
        -------
        list of bytes-like, ArrayMessage or ReceivedMessage
            What the ranks gave, in their order, the own one as it was. They stay as they are until
            the next call.

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
        """Begin the same; the largest arrays are still to come.

        Returns
        -------
        list of bytes-like, ArrayMessage or ReceivedMessage
            What the ranks gave, but for what is to come.
        iterator of int
            To go through it carries them: so many bytes of each have come. When it ends, all have.
        """
        sync, peers = self._sync, self._near.neighbours
        if sync.world_size == 1:
            return list(messages), iter(())
        import torch
        import torch.distributed as dist

        by_gloo = [rank for rank in range(sync.world_size) if rank not in {*peers, sync.rank}]
        distinct = {id(messages[rank]): messages[rank] for rank in by_gloo}
        parcels = {number: SplitMessage.of(message) for number, message in distinct.items()}
        sent = {rank: parcels[id(messages[rank])] for rank in by_gloo}
        can_ring = not peers and len(distinct) == 1 and sync.world_size > 2  # two are one anyway
        letters = np.zeros((sync.world_size, _LETTER), np.uint8)
        for rank, place in enumerate(self._placed(messages)):
            parcel = sent.get(rank, _NOTHING)
            fields, room = _opened(letters[rank])
            fields[:] = can_ring, *parcel.sizes, *place
            if not parcel.is_long:
                room[: len(parcel.rest)] = np.frombuffer(parcel.rest, np.uint8)
        incoming = np.empty_like(letters)
        with as_peer_lost():  # a gather in a ring would take as many latencies as there are ranks
            dist.all_to_all_single(torch.from_numpy(incoming), torch.from_numpy(letters))
        exchanged: list = [None] * sync.world_size
        coming: Iterator[int] = iter(())
        if by_gloo:
            came = {rank: incoming[rank] for rank in by_gloo}
            received, coming = self._by_gloo(sent, came, into, can_ring)
            for rank, message in received.items():
                exchanged[rank] = message
        for rank in peers:
            fields, _ = _opened(incoming[rank])
            exchanged[rank] = self._near.read(rank, fields[-HostExchange.FIELDS :].tolist())
        exchanged[sync.rank] = messages[sync.rank]
        return exchanged, coming

    def _placed(self, messages: Sequence[ArrayMessage]) -> list[tuple[int, ...]]:
        """Where peers on this machine read the messages; zeros for all others."""
        distinct = {id(messages[rank]): messages[rank].parts for rank in self._near.neighbours}
        written = self._near.write(list(distinct.values())) if distinct else []
        places = dict(zip(distinct, written, strict=True))
        nowhere = (0,) * HostExchange.FIELDS
        return [places.get(id(message), nowhere) for message in messages]

    def _by_gloo(
        self,
        sent: "dict[int, SplitMessage]",
        letters: dict[int, np.ndarray],
        into: Sequence[np.ndarray] | None,
        is_ring: bool,
    ) -> tuple[dict, Iterator[int]]:
        """Return what ranks gave, given their letters, and what carries the parts still to come.

        Where every rank gives all others the same, large parts go around a ring, so that a link
        carries one stream each way; else they go to every rank in turn.
        """
        import torch
        import torch.distributed as dist

        works: list[Any] = []
        arriving: dict[int, list] = {}  # blocks of large parts, by the rank that they are from
        messages: dict[int, Any] = {}
        has_array = True
        with as_peer_lost():
            for source, letter in letters.items():
                fields, rest = _opened(letter)
                can_ring, head, size, tail = fields[: -HostExchange.FIELDS].tolist()
                is_ring = is_ring and bool(can_ring)
                if head + tail > len(rest):
                    rest = np.empty(head + tail, np.uint8)
                    works.append(dist.irecv(torch.from_numpy(rest), source))
                rest = rest[: head + tail]
                if not size:
                    messages[source] = rest
                    continue
                has_array = has_array and head > 0  # else the large part is all of the message
                if into is not None and into[source].nbytes == size:
                    memory = torch.from_numpy(into[source].view(np.uint8))
                else:
                    memory = self._room(source, size)
                arriving[source] = list(memory.split(_LARGE))
                messages[source] = ReceivedMessage(rest[:head], memory.numpy(), rest[head:])
            for rank, parcel in sent.items():
                if parcel.is_long:
                    works.append(dist.isend(parcel.rest_alone, rank))
            for work in works:
                work.wait()
            blocks = {rank: parcel.blocks for rank, parcel in sent.items()}
            coming: Iterator[int] = iter(())
            if is_ring:
                self._around(blocks, arriving)
            else:
                coming = self._one_to_each(blocks, arriving)
            if not has_array:
                read_to_end(coming)
        return messages, coming

    def _around(self, blocks: dict[int, list], arriving: dict[int, list]) -> None:
        """Send the own blocks, the same for all, and others' as they come, to the next rank."""
        import torch.distributed as dist

        world, own = self._sync.world_size, self._sync.rank
        following, *others = ((own + distance) % world for distance in range(1, world))
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
        """Send a block to every rank in turn, never far ahead of what they send.

        What is too much at a time for a link would be lost there, and sent again.
        """
        import torch.distributed as dist

        turn = self._sync.world_size - 1
        sent: list[Any] = []
        with as_peer_lost():
            received: deque[tuple[int, Any]] = deque(
                (place, dist.irecv(block, source))
                for place, source, block in self._in_turn(arriving, -1)
            )
            for place, target, block in self._in_turn(blocks, 1):
                while received and received[0][0] <= place - _AHEAD:
                    received.popleft()[1].wait()
                sent.append(dist.isend(block, target))
                yield max(place - _AHEAD + 1, 0) // turn * _LARGE
            for place, work in received:
                work.wait()
                yield (place + 1) // turn * _LARGE
            for work in sent:
                work.wait()

    def _in_turn(self, blocks: dict[int, list], step: int) -> Iterator[tuple[int, int, Any]]:
        """Blocks of each rank, one of each in turn from the next one on (or, with -1, back).

        With their places, which are the same where a block is sent and where it arrives.
        """
        world, own = self._sync.world_size, self._sync.rank
        ranks = [(own + step * distance) % world for distance in range(1, world)]
        turns = itertools.zip_longest(*(blocks.get(rank, ()) for rank in ranks))
        for place, block in enumerate(itertools.chain.from_iterable(turns)):
            if block is not None:
                yield place, ranks[place % len(ranks)], block

    def _room(self, rank: int, size: int):
        """Memory for the large part of a message of a rank, over that of its last one."""
        import torch

        memory = self._memory.get(rank)
        if memory is None or len(memory) < size:
            memory = self._memory[rank] = torch.empty(size, dtype=torch.uint8)
        return memory[:size]


@dataclass(frozen=True)
class SplitMessage:
    """A message for a socket, of which a large part is sent from where it lies.

    Attributes
    ----------
    sizes : tuple of int
        Bytes before the large part, of it, and behind it.
    rest : bytes-like
        What is before and behind it.
    large : torch.Tensor or None
    """

    sizes: tuple[int, int, int]
    rest: bytes | bytearray = b""
    large: Any = None

    @property
    def is_long(self) -> bool:
        """True if what is beside the large part does not fit into a letter."""
        return len(self.rest) > _LETTER - _FIELDS

    @property
    def rest_alone(self) -> Any:
        """The bytes beside the large part, as a tensor."""
        import torch

        return torch.from_numpy(np.frombuffer(bytearray(self.rest), np.uint8))

    @property
    def blocks(self) -> list:
        """The large part in tensors."""
        return [] if self.large is None else list(self.large.split(_LARGE))

    @classmethod
    def of(cls, message: ArrayMessage) -> "SplitMessage":
        """The parcel of a message; with several large parts all of it is one."""
        import torch

        parts, size = message.parts, len(message)
        if size < _LARGE:
            return cls((size, 0, 0), bytes(message))
        largest = max(range(len(parts)), key=lambda place: len(parts[place]))
        if size - len(parts[largest]) >= _LARGE:
            parts, largest = [bytearray(b"").join(parts)], 0
        array = np.frombuffer(parts[largest], np.uint8)
        if not array.flags.writeable:  # torch warns of those
            array = array.copy()
        head, tail = (bytearray(b"").join(p) for p in (parts[:largest], parts[largest + 1 :]))
        return cls((len(head), len(array), len(tail)), head + tail, torch.from_numpy(array))


_NOTHING = SplitMessage((0, 0, 0))
# bytes of a letter's fields: if the message may go around, its sizes, where a neighbour reads it
_FIELDS = np.dtype(np.int64).itemsize * (1 + len(_NOTHING.sizes) + HostExchange.FIELDS)


def _opened(letter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fields of a letter, and its room for a small message or what is beside a large part."""
    return letter[:_FIELDS].view(np.int64), letter[_FIELDS:]


class StateFiles:
    """The states of one training, as a rank sees them. All methods are collectives.

    Parameters
    ----------
    sync : TorchDistributedSync
    folder : str
        Of this training, below the executor's directory.
    """

    def __init__(self, sync: GradientSync, folder: str):
        self._sync, self._folder, self._exchange = sync, folder, MessageExchange(sync)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        place = f"{socket.gethostname()}:{os.path.realpath(folder)}".encode()
        self._places = [row[0] for row in sync.all_gather([float(zlib.crc32(place))])]

    def keep_only(self, name: str | None) -> None:
        """Remove all states but those of this name."""
        for path in list(Path(self._folder).iterdir()):
            if name is None or not path.name.startswith(f"{name}-"):
                path.unlink(missing_ok=True)  # others do the same

    def read(self, name: str) -> np.ndarray | None:
        """The own state, bytes-like; None if that of any rank is lost."""
        ranks, own = range(self._sync.world_size), self._sync.rank
        here = [float(os.path.exists(self._path(name, rank))) for rank in ranks]
        table = self._sync.all_gather(here)
        # itself, or the first one that has it
        holders = [[r for r in (rank, *ranks) if table[r][rank]] for rank in ranks]
        if not all(holders):
            return None
        senders = [held_by[0] for held_by in holders]
        messages = [
            ArrayMessage(
                np.memmap(self._path(name, rank), np.uint8, "r") if sender == own else None
            )
            for rank, sender in enumerate(senders)
        ]
        return unpack(self._exchange(messages)[senders[own]])

    def write(self, name: str, state: ArrayMessage) -> None:
        """Keep the own state, and the copies of others' that belong here."""
        ranks, own = range(self._sync.world_size), self._sync.rank
        with open(self._path(name, own), "wb") as file:
            file.writelines(state.parts)
        copy_holders = [self._copy_holder(rank) for rank in ranks]
        messages = [state if rank == copy_holders[own] else ArrayMessage(None) for rank in ranks]
        for rank, data in enumerate(self._exchange(messages)):
            if copy_holders[rank] == own != rank:
                with open(self._path(name, rank), "wb") as file:
                    file.writelines(data.parts if isinstance(data, ReceivedMessage) else [data])

    def _copy_holder(self, rank):
        """Return the rank that has the copy: the next one in another place, or the rank itself."""
        ranks = self._sync.world_size
        following = [(rank + distance) % ranks for distance in range(1, ranks)]
        return next((r for r in following if self._places[r] != self._places[rank]), rank)

    def _path(self, name, rank):
        return os.path.join(self._folder, f"{name}-{rank}")
