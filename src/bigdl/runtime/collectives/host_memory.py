"""Shared memory between workers on one host, which replaces socket copies.

A worker writes its data to memory that other workers on the host map
(:mod:`bigdl.common.platform.shared_memory`).  Nothing of it remains if a process is killed.
Workers in separate containers or network namespaces, and workers of other users, use sockets like
workers on other hosts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import operator
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.platform.network import network_id
from bigdl.common.platform.shared_memory import SharedPages, map_shared_pages
from bigdl.common.private_folders import private_root, process_folder
from bigdl.runtime.collectives.base import GradientSync, as_peer_lost
from bigdl.runtime.collectives.buckets import SumBuffer
from bigdl.runtime.collectives.halving import HalvingDoubling, cut, factors, tree_sum
from bigdl.runtime.engine import PeerLost

if TYPE_CHECKING:
    import torch

_TOKEN = 4  # 32-bit numbers of a token that identifies a file
_ALIGNED = 64  # bytes
SMALL_BYTES = 1 << 16  # smaller tensors are summed by the library in fewer rounds
_BLOCK = 1 << 15  # elements that are added at a time and fit in the cache
_SEGMENT = 1 << 20  # bytes of gloo's largest segment


class SharedMemory:
    """An array in memory that local processes can map while this object exists.

    Parameters
    ----------
    size : int
        Size in bytes.

    Raises
    ------
    OSError
        If the system has no such memory.

    Attributes
    ----------
    array : ndarray of uint8
        The memory; it stays valid without this object.
    number : int
        Number of the memory for :func:`map_shared_memory`.
    """

    def __init__(self, size: int):
        self._pages = SharedPages(size, process_folder)
        self.number = self._pages.number
        self.array = np.frombuffer(self._pages.pages, np.uint8)


def map_shared_memory(process: int, number: int) -> np.ndarray:
    """Map the :class:`SharedMemory` of a local process, read-only.

    Raises
    ------
    OSError
        If this process cannot read it.
    """
    return np.frombuffer(map_shared_pages(process, number, private_root), np.uint8)


def local_peers(sync: GradientSync) -> dict[int, int]:
    """Return the ranks that share memory with this rank on its host; call on all ranks.

    Parameters
    ----------
    sync : GradientSync
        A sync of at least two workers.

    Returns
    -------
    dict of int to int
        Process id of each of these ranks.
    """
    token = [secrets.randbits(32) for _ in range(_TOKEN)]
    memory = _create_token_memory(token)
    network = network_id() if memory else 0
    rows = sync.all_gather([network, os.getpid(), memory.number if memory else -1, *token])
    ranks = range(sync.world_size)
    is_seen = [
        rank != sync.rank and rows[rank][0] == network and _can_read(*map(int, rows[rank][1:]))
        for rank in ranks
    ]
    seen_by = sync.all_gather([float(each) for each in is_seen])
    del memory  # all ranks have read it
    return {r: int(rows[r][1]) for r in ranks if is_seen[r] and seen_by[r][sync.rank]}


def _create_token_memory(token: Sequence[int]) -> SharedMemory | None:
    """Create shared memory that contains a token; return None if that is impossible."""
    try:
        memory = SharedMemory(4 * _TOKEN)
    except OSError:
        return None
    memory.array.view(np.uint32)[:] = token
    return memory


def _can_read(process: int, number: int, *token: int) -> bool:
    """Return True if this process can read the token in another process's shared memory."""
    try:
        return number >= 0 and map_shared_memory(process, number).view(np.uint32).tolist() == list(
            token
        )
    except (OSError, ValueError):  # no such file, or another one
        return False


def map_peer_memory(neighbours: Mapping[int, int], rank: int, number: int) -> np.ndarray:
    """Map the shared memory of a local peer.

    Raises
    ------
    PeerLost
        If the peer has ended.
    """
    try:
        return map_shared_memory(neighbours[rank], number)
    except (OSError, ValueError) as error:
        raise PeerLost(f"The memory of rank {rank} cannot be read: {error}") from error


class HostExchange:
    """Message exchange on one host through shared memory, without copies by the receiver.

    Every worker writes to its memory, then all take part in a collective, and then each reads the
    messages of the others.

    Parameters
    ----------
    neighbours : dict of int to int
        See :func:`local_peers`.

    Notes
    -----
    Two memories alternate. So a read message stays unchanged until the next collective: a worker
    overwrites it only after all workers have entered that collective.
    """

    FIELDS = 4
    """Number of integers that describe a message's position."""

    def __init__(self, neighbours: Mapping[int, int]):
        self.neighbours = neighbours
        self._writes = 0
        self._memories: dict[int, tuple[int, SharedMemory]] = {}  # number and memory by turn
        self._mapped: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def write(self, messages: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
        """Write messages to local memory; overwrite the messages of the second-to-last write.

        Parameters
        ----------
        messages : sequence of sequence of bytes-like
            Parts of each message.

        Returns
        -------
        list of tuple of int
            Position of each message: :attr:`FIELDS` integers for :meth:`read` on a peer.
        """
        sizes = [sum(map(len, parts)) for parts in messages]
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        number, memory = self._next_memory(starts[-1])
        for start, parts in zip(starts, messages, strict=False):
            for part in parts:
                memory.array.data[start : start + len(part)] = part
                start += len(part)
        return [(number, memory.number, *span) for span in zip(starts, sizes, strict=False)]

    def _next_memory(self, size: int) -> tuple[int, SharedMemory]:
        """Return the memory for the next write and the number of the write that allocated it."""
        self._writes += 1
        turn = self._writes % 2
        if turn not in self._memories or len(self._memories[turn][1].array) < size:
            self._memories[turn] = self._writes, SharedMemory(max(size, mmap.PAGESIZE))
        return self._memories[turn]

    def read(self, rank: int, position: Sequence[int]) -> np.ndarray:
        """Return a peer's message as a read-only view.

        Parameters
        ----------
        rank : int
        position : sequence of int
            Result of :meth:`write` on the peer, before the collective.

        Returns
        -------
        ndarray of uint8

        Raises
        ------
        PeerLost
            If the peer has ended.
        """
        number, fd, start, size = position
        turn = rank, number % 2
        if turn not in self._mapped or self._mapped[turn][0] != number:
            self._mapped[turn] = number, map_peer_memory(self.neighbours, rank, fd)
        return self._mapped[turn][1][start : start + size]

    def close(self) -> None:
        """Release the memory; views of read messages stay valid."""
        self._memories.clear()
        self._mapped.clear()


class SharedBuffer(SumBuffer):
    """A flat tensor in shared memory that ranks of one host read from each other.

    Parameters
    ----------
    sync : GradientSync
        A sync with ``torch.distributed``.
    neighbours : dict of int to int
        See :func:`local_peers`.
    size : int
    dtype : torch.dtype
        float32 or float64.
    """

    def __init__(
        self, sync: GradientSync, neighbours: Mapping[int, int], size: int, dtype: torch.dtype
    ):
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
        self._index = self._near.index(sync.rank)
        self._arrays: list[np.ndarray] = []  # memory of the local ranks
        self._is_shared: bool | None = None  # by all ranks; None until that is known
        self._is_read = False  # peers may still read it

    def fresh(self, size: int) -> torch.Tensor:
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
        """File descriptor of the shared memory, or -1 if there is none."""
        return -1 if self._memory is None else self._memory.number

    def _open(self, files: Sequence[int]) -> None:
        """Map the peers' memory if all ranks share theirs; `files` are the ranks' descriptors."""
        local, self._is_shared = self.tensor.numpy(), min(files) >= 0
        for rank in self._near if self._is_shared else ():
            if rank == self._rank:
                self._arrays.append(local)
            else:
                memory = map_peer_memory(self._neighbours, rank, files[rank])
                self._arrays.append(memory[: local.nbytes].view(local.dtype))

    def _add_up_tree(self, start: int, stop: int) -> None:
        """Replace local values of a range with their tree sum over the local peers."""
        local = self._arrays[self._index]
        for low in range(start, stop, _BLOCK):
            block = slice(low, min(low + _BLOCK, stop))
            local[block] = tree_sum([array[block] for array in self._arrays])

    def _copy_sums(self, bounds: Sequence[tuple[int, int]], out: torch.Tensor | None) -> None:
        """Copy each range from the memory of the local peer that has summed it."""
        self._is_read = True
        target = self._arrays[self._index] if out is None else out.numpy()
        for (start, stop), array in zip(bounds, self._arrays, strict=True):
            if array is not target:
                target[start:stop] = array[start:stop]


class HostBuffer(SharedBuffer):
    """A flat tensor in shared memory that is all-reduced among ranks of one host.

    Every rank owns a range of each piece: it sums that range over all ranks, and the others copy
    the sum. Ranges and order of additions equal those of gloo's ring, or with many ranks those of
    :mod:`~bigdl.runtime.collectives.halving`, so sums are bitwise equal for any placement of the
    ranks.  All ranks are on this host.
    """

    def start(self, begin: int, end: int, out: torch.Tensor | None = None) -> Callable[[], None]:
        import torch
        import torch.distributed as dist

        if (end - begin) * self.tensor.itemsize < SMALL_BYTES:
            return self._by_library(begin, end, out)
        local_file = torch.tensor([self._file])
        files = [torch.empty_like(local_file) for _ in range(self._world)]
        with as_peer_lost():
            work = dist.all_gather(files, local_file, async_op=True)

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
            self._copy_sums(bounds, out)

        return finish

    def _add_up(self, start: int, stop: int) -> None:
        """Replace local values of a range with their sum over the ranks."""
        if self._sums_in_tree:
            self._add_up_tree(start, stop)
            return
        # as in gloo's ring, local values are added last
        order = [(self._rank - distance) % self._world for distance in range(1, self._world)]
        local, (first, *others) = self._arrays[self._rank], [self._arrays[rank] for rank in order]
        scratch = np.empty(_BLOCK, first.dtype)
        for low in range(start, stop, _BLOCK):
            block = slice(low, min(low + _BLOCK, stop))
            total = first[block]
            for other in others:
                total = np.add(total, other[block], out=scratch[: len(total)])
            np.add(total, local[block], out=local[block])

    def settle(self) -> None:
        if self._is_read:
            import torch.distributed as dist

            with as_peer_lost():
                dist.barrier()
            self._is_read = False


class BlockBuffer(SharedBuffer):
    """A flat tensor in shared memory that is summed per host, then between hosts.

    Every rank owns a range of each piece.  It sums that range over the ranks of its block, then
    over the ranks with the same index in other blocks, and the ranks of the block copy the result.
    So a host that is one block sends as much as a single rank.  The order of additions is that of
    :mod:`~bigdl.runtime.collectives.halving`.

    Parameters
    ----------
    sync, neighbours, size, dtype
        See :class:`SharedBuffer`.
    block : int
        Number of ranks that are summed first; see :func:`block_of`.
    halving : HalvingDoubling
        The all-reduce among the ranks of `sync`.
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

    def start(self, begin: int, end: int, out: torch.Tensor | None = None) -> Callable[[], None]:
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

    def _sum(self, begin: int, end: int, out: torch.Tensor | None, turn: int) -> None:
        bounds = cut(begin, end, len(self._near))
        start, stop = bounds[self._index]
        self._halving.barrier(self._near, turn)  # all ranks have written the piece
        self._add_up_tree(start, stop)
        self._halving.sum(self.tensor[start:stop], turn, len(self._near))
        self._halving.barrier(self._near, turn)
        self._copy_sums(bounds, out)

    def settle(self) -> None:
        if self._is_read:
            with as_peer_lost():
                self._halving.barrier(self._near)
            self._is_read = False


def block_of(sync: GradientSync, neighbours: Mapping[int, int]) -> int:
    """Return how many ranks per host sum values before hosts exchange sums; call on all ranks.

    Parameters
    ----------
    sync, neighbours
        See :func:`local_peers`.

    Returns
    -------
    int
        The largest divisor of the ranks per host whose sums match the tree of
        :mod:`~bigdl.runtime.collectives.halving`; 1 if hosts have different numbers of ranks.
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
    """Return the ranges of a vector that gloo's ring assigns to each rank.

    The range of rank r is summed on rank r. The ring splits a vector into segments of at most 1
    MiB, an equal number of at least two per rank.

    Parameters
    ----------
    size : int
        Number of elements of the vector.
    itemsize : int
        Bytes of an element.
    ranks : int

    Returns
    -------
    list of (int, int)
        First element and end of each range; the last ranges may be shorter, or empty.
    """
    needed = max(-(-size * itemsize // _SEGMENT), 2 * ranks)
    of_rank = -(-needed // ranks)
    segment = -(-size * itemsize // (of_rank * ranks))
    length = of_rank * -(-segment // itemsize)
    return [(min(r * length, size), min((r + 1) * length, size)) for r in range(ranks)]


def _aligned(size: int) -> int:
    """Round a size up to a multiple of the alignment."""
    return -(-size // _ALIGNED) * _ALIGNED
