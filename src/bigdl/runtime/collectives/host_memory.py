"""Memory that the workers of one machine share, for what they would copy through sockets.

A worker writes what it gives to an anonymous file of its own in memory, and the others of its
machine map that file: no name remains, whatever ends a process, and its last user frees it.
Workers in containers or network namespaces of their own, and those of other users, go on by
sockets, as those of other machines do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import operator
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.runtime.collectives.base import GradientSync, as_peer_lost
from bigdl.runtime.collectives.buckets import SumBuffer
from bigdl.runtime.collectives.halving import HalvingDoubling, cut, factors, tree_sum
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    import torch

_NAME = "bigdl"
_TOKEN = 4  # numbers of 32 bits that tell a file from any other
_ALIGNED = 64  # bytes
SMALL_BYTES = 1 << 16  # bytes that are summed by the library, in fewer turns
_BLOCK = 1 << 15  # numbers that are added up at a time, which stay in the cache
_SEGMENT = 1 << 20  # bytes of gloo's largest segment


class SharedMemory:
    """Bytes that other processes of this machine can map, as long as this object is there.

    Parameters
    ----------
    size : int
        In bytes.

    Raises
    ------
    OSError
        If there is no such memory.

    Attributes
    ----------
    array : ndarray of uint8
        It stays valid without the object.
    fd : int
        The file in this process.
    """

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("This system has no anonymous files in memory")
        self.fd = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size)
        self.array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)


def mapped(process: int, fd: int) -> np.ndarray:
    """The :class:`SharedMemory` of a process of this machine, not to be written to.

    Raises
    ------
    OSError
        If it cannot be seen from here.
    """
    path = f"/proc/{process}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # of another process of this number
        raise FileNotFoundError(f"{path} is not shared memory")
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


def local_peers(sync: GradientSync) -> dict[int, int]:
    """The other ranks that can be read here and can read what is here; a collective.

    Parameters
    ----------
    sync : GradientSync
        Of at least two workers.

    Returns
    -------
    dict of int to int
        The process of each of these ranks.
    """
    token = [secrets.randbits(32) for _ in range(_TOKEN)]
    shown = _shared(token)
    network = os.stat("/proc/self/ns/net").st_ino if shown else 0
    rows = sync.all_gather([network, os.getpid(), shown.fd if shown else -1, *token])
    ranks = range(sync.world_size)
    is_seen = [
        rank != sync.rank and rows[rank][0] == network and _sees(*map(int, rows[rank][1:]))
        for rank in ranks
    ]
    seen_by = sync.all_gather([float(each) for each in is_seen])
    del shown  # all have seen it
    return {r: int(rows[r][1]) for r in ranks if is_seen[r] and seen_by[r][sync.rank]}


def _shared(token: Sequence[int]) -> SharedMemory | None:
    """Memory with a token in it; None if there is none to be shared."""
    try:
        memory = SharedMemory(4 * _TOKEN)
    except OSError:
        return None
    memory.array.view(np.uint32)[:] = token
    return memory


def _sees(process: int, fd: int, *token: int) -> bool:
    try:
        return fd >= 0 and mapped(process, fd).view(np.uint32).tolist() == list(token)
    except (OSError, ValueError):  # no such file, or another one
        return False


def memory_of(neighbours: Mapping[int, int], rank: int, fd: int) -> np.ndarray:
    """The memory of a neighbour.

    Raises
    ------
    PeerLost
        If the neighbour is gone.
    """
    try:
        return mapped(neighbours[rank], fd)
    except (OSError, ValueError) as error:
        raise PeerLost(f"The memory of rank {rank} cannot be read: {error}") from error


class HostExchange:
    """Messages between the workers of one machine, with no copy where they arrive.

    Every worker writes to memory of its own, then comes to a collective of all, and then reads what
    the others wrote.

    Parameters
    ----------
    neighbours : dict of int to int
        See :func:`local_peers`.

    Notes
    -----
    There are two pieces of memory, which take turns. So what was read stays as it is until the
    next collective: a worker writes over it only when all have come to that one.
    """

    FIELDS = 4
    """How many numbers say where a message lies."""

    def __init__(self, neighbours: Mapping[int, int]):
        self.neighbours = neighbours
        self._writes = 0
        self._own: dict[int, tuple[int, SharedMemory]] = {}  # by turn: number and memory
        self._mapped: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def write(self, messages: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
        """Write messages to own memory, over those of the write before the last.

        Parameters
        ----------
        messages : sequence of sequence of bytes-like
            The parts of each.

        Returns
        -------
        list of tuple of int
            Where each message lies: :attr:`FIELDS` numbers for :meth:`read` on a peer.
        """
        sizes = [sum(map(len, parts)) for parts in messages]
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        number, memory = self._room(starts[-1])
        for start, parts in zip(starts, messages, strict=False):
            for part in parts:
                memory.array.data[start : start + len(part)] = part
                start += len(part)
        return [(number, memory.fd, *place) for place in zip(starts, sizes, strict=False)]

    def _room(self, size: int) -> tuple[int, SharedMemory]:
        """Memory whose turn it is, and its number: that of the first write to it."""
        self._writes += 1
        turn = self._writes % 2
        if turn not in self._own or len(self._own[turn][1].array) < size:
            self._own[turn] = self._writes, SharedMemory(max(size, mmap.PAGESIZE))
        return self._own[turn]

    def read(self, rank: int, place: Sequence[int]) -> np.ndarray:
        """A message of a peer, not to be written to.

        Parameters
        ----------
        rank : int
        place : sequence of int
            What :meth:`write` returned for it there, before the collective.

        Returns
        -------
        ndarray of uint8

        Raises
        ------
        PeerLost
            If the peer is gone.
        """
        number, fd, start, size = place
        turn = rank, number % 2
        if turn not in self._mapped or self._mapped[turn][0] != number:
            self._mapped[turn] = number, memory_of(self.neighbours, rank, fd)
        return self._mapped[turn][1][start : start + size]

    def close(self) -> None:
        """Let go of the memory; what was read stays valid as long as it is in use."""
        self._own.clear()
        self._mapped.clear()


class SharedBuffer(SumBuffer):
    """A flat tensor in shared memory, which ranks of one machine read from each other.

    Parameters
    ----------
    sync : GradientSync
        By ``torch.distributed``.
    neighbours : dict of int to int
        See :func:`local_peers`.
    size : int
    dtype : torch.dtype
        float32 or float64.
    """

    def __init__(self, sync: GradientSync, neighbours: Mapping[int, int], size: int, dtype: Any):
        import torch

        self._memory: SharedMemory | None = None
        with contextlib.suppress(OSError):
            self._memory = SharedMemory(max(size * dtype.itemsize, mmap.PAGESIZE))
        if self._memory is None:
            tensor = torch.zeros(size, dtype=dtype)
        else:
            tensor = torch.from_numpy(self._memory.array[: size * dtype.itemsize]).view(dtype)
        super().__init__(tensor, sync._begin)
        self._rank, self._world, self._neighbours = sync.rank, sync.world_size, neighbours
        self._sums_in_tree = sync.sums_in_tree
        self._near = sorted([sync.rank, *neighbours])
        self._place = self._near.index(sync.rank)
        self._arrays: list[np.ndarray] = []  # theirs
        self._is_shared: bool | None = None  # by all ranks, once that is known
        self._is_read = False  # by others, perhaps still

    def fresh(self, size: int) -> Any:
        return self.tensor.new_empty(size)

    def _by_library(self, begin: int, end: int, out: torch.Tensor | None) -> Callable[[], None]:
        wait = super().start(begin, end)

        def finish() -> None:
            wait()
            if out is not None:
                out[begin:end] = self.tensor[begin:end]

        return finish

    @property
    def _file(self) -> int:
        return -1 if self._memory is None else self._memory.fd

    def _open(self, files: Sequence[int]) -> None:
        """Map what neighbours share, where all ranks share; `files` are everyone's."""
        own, self._is_shared = self.tensor.numpy(), min(files) >= 0
        for rank in self._near if self._is_shared else ():
            if rank == self._rank:
                self._arrays.append(own)
            else:
                memory = memory_of(self._neighbours, rank, files[rank])
                self._arrays.append(memory[: own.nbytes].view(own.dtype))

    def _add_up_tree(self, start: int, stop: int) -> None:
        """Put the sum of a part over the neighbours where the own numbers were."""
        own = self._arrays[self._place]
        for low in range(start, stop, _BLOCK):
            here = slice(low, min(low + _BLOCK, stop))
            own[here] = tree_sum([array[here] for array in self._arrays])

    def _take(self, bounds: Sequence[tuple[int, int]], out: Any) -> None:
        """Copy the parts that the neighbours have summed."""
        self._is_read = True
        target = self._arrays[self._place] if out is None else out.numpy()
        for (start, stop), array in zip(bounds, self._arrays, strict=True):
            if array is not target:
                target[start:stop] = array[start:stop]


class HostBuffer(SharedBuffer):
    """A flat tensor in shared memory, of which pieces are summed over the ranks of one machine.

    Every rank owns a part of each piece: it adds up what all ranks have there, and the others copy
    the sum. The parts, and the order in which they are added up, are those of gloo's ring, with
    many ranks those of :mod:`~bigdl.runtime.collectives.halving`, so the sums are the same to the
    last bit, wherever ranks run.  All ranks are neighbours.
    """

    def start(self, begin: int, end: int, out: Any = None) -> Callable[[], None]:
        import torch
        import torch.distributed as dist

        if (end - begin) * self.tensor.itemsize < SMALL_BYTES:
            return self._by_library(begin, end, out)
        own = torch.tensor([self._file])
        files = [torch.empty_like(own) for _ in range(self._world)]
        with as_peer_lost():
            work = dist.all_gather(files, own, async_op=True)

        def finish() -> None:
            with as_peer_lost():
                work.wait()
            if self._is_shared is None:
                self._open([int(file) for file in files])
            if not self._is_shared:
                self._by_library(begin, end, out)()
                return
            parts = ring_parts(end - begin, self.tensor.itemsize, self._world)
            bounds = [(begin + start, begin + stop) for start, stop in parts]
            self._add_up(*bounds[self._rank])
            with as_peer_lost():
                dist.barrier()
            self._take(bounds, out)

        return finish

    def _add_up(self, start: int, stop: int) -> None:
        """Put the sum of a part where the own numbers were."""
        if self._sums_in_tree:
            self._add_up_tree(start, stop)
            return
        # as in gloo's ring the own numbers come last
        order = [(self._rank - distance) % self._world for distance in range(1, self._world)]
        own, (first, *others) = self._arrays[self._rank], [self._arrays[rank] for rank in order]
        scratch = np.empty(_BLOCK, first.dtype)
        for low in range(start, stop, _BLOCK):
            here = slice(low, min(low + _BLOCK, stop))
            total = first[here]
            for other in others:
                total = np.add(total, other[here], out=scratch[: len(total)])
            np.add(total, own[here], out=own[here])

    def settle(self) -> None:
        if self._is_read:
            import torch.distributed as dist

            with as_peer_lost():
                dist.barrier()
            self._is_read = False


class BlockBuffer(SharedBuffer):
    """A flat tensor in shared memory, summed on each machine first and then between machines.

    Every rank owns a part of each piece.  It adds up what the ranks of its block have there, sums
    that over the ranks that have the same place in other blocks, and the ranks of the block copy
    it: where a machine is a block, numbers leave it as if it had one rank.  The order in which they
    are added up is that of :mod:`~bigdl.runtime.collectives.halving`.

    Parameters
    ----------
    sync, neighbours, size, dtype
        See :class:`SharedBuffer`.
    block : int
        How many ranks add up first; see :func:`block_of`.
    halving : HalvingDoubling
        Of the ranks of `sync`.
    """

    def __init__(
        self,
        sync: GradientSync,
        neighbours: Mapping[int, int],
        size: int,
        dtype: torch.dtype,
        block: int,
        halving: HalvingDoubling,
    ):
        near = {r: process for r, process in neighbours.items() if r // block == sync.rank // block}
        super().__init__(sync, near, size, dtype)
        self._files_of = sync.all_gather
        self._halving = halving

    def start(self, begin: int, end: int, out: Any = None) -> Callable[[], None]:
        if (end - begin) * self.tensor.itemsize < SMALL_BYTES:
            return self._by_library(begin, end, out)
        if self._is_shared is None:
            self._open([int(file) for (file,) in self._files_of([self._file])])
        if not self._is_shared:
            return self._by_library(begin, end, out)
        wait = self._halving.begin(functools.partial(self._sum, begin, end, out))

        def finish() -> None:
            with as_peer_lost():
                wait()

        return finish

    def _sum(self, begin: int, end: int, out: Any, turn: int) -> None:
        bounds = cut(begin, end, len(self._near))
        start, stop = bounds[self._place]
        self._halving.meet(self._near, turn)  # all have written the piece
        self._add_up_tree(start, stop)
        self._halving.sum(self.tensor[start:stop], turn, len(self._near))
        self._halving.meet(self._near, turn)
        self._take(bounds, out)

    def settle(self) -> None:
        if self._is_read:
            with as_peer_lost():
                self._halving.meet(self._near)
            self._is_read = False


def block_of(sync: GradientSync, neighbours: Mapping[int, int]) -> int:
    """The number of ranks of each machine that add up first; a collective.

    Parameters
    ----------
    sync, neighbours
        See :func:`local_peers`.

    Returns
    -------
    int
        A part of what each machine has, if all have as many: the largest whose sums are in the tree
        of :mod:`~bigdl.runtime.collectives.halving`; 1 where there is none.
    """
    near = sorted([sync.rank, *neighbours])
    size = len(near)
    is_block = near[0] % size == 0 and near[-1] - near[0] == size - 1
    sizes = {int(each) for (each,) in sync.all_gather([size if is_block else 1])}
    if sizes != {size}:
        return 1
    in_tree = itertools.accumulate(factors(sync.world_size), operator.mul)
    return max((part for part in in_tree if size % part == 0), default=1)


def ring_parts(size: int, itemsize: int, ranks: int) -> list[tuple[int, int]]:
    """The parts of a vector that gloo's ring adds up, part r at the end on rank r.

    It cuts a vector in segments of at most a megabyte, at least two and as many for each rank.

    Parameters
    ----------
    size : int
        Elements of the vector.
    itemsize : int
        Bytes of one.
    ranks : int

    Returns
    -------
    list of (int, int)
        First element and end of each part; the last ones may be shorter, or empty.
    """
    needed = max(-(-size * itemsize // _SEGMENT), 2 * ranks)
    of_rank = -(-needed // ranks)
    segment = -(-size * itemsize // (of_rank * ranks))
    length = of_rank * -(-segment // itemsize)
    return [(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
