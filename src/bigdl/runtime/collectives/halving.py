"""All-reduce by recursive halving and doubling, for many workers.

A ring all-reduce, as in gloo, needs 2N sequential rounds for N workers, each with the latency of
the network and the cost of a message. Recursive halving and doubling sends the same number of bytes
in O(log N) rounds (R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004).
If the number of workers is no power of two, its prime factors replace the twos.

The order of additions is a tree over the ranks, the same for every element. So sums are bitwise
equal for any placement of the ranks and any split of a vector.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

HALVING_MIN_WORLD_SIZE = 8
"""Minimum number of workers; with fewer a ring has about as few rounds."""

_TAG = 7  # message tag, different from other messages between two ranks
_AT_ONCE = 2  # concurrent sums: one is added while another is transferred

Number = TypeVar("Number")


def factors(number: int) -> list[int]:
    """Return the prime factors of a number in ascending order."""
    primes, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return [*primes, number] if number > 1 else primes


def tree_sum(values: Sequence[Number]) -> Number:
    """Add the ranks' values in the same order as :class:`HalvingDoubling`."""
    for factor in factors(len(values)):
        values = [_sum(values[i : i + factor]) for i in range(0, len(values), factor)]
    return values[0]


class HalvingDoubling:
    """In-place all-reduce of tensors by recursive halving and doubling.

    Consecutive ranks exchange the largest pieces, so they should be on one host.

    Parameters
    ----------
    library : module
        ``torch.distributed``.
    rank, world_size : int
    group : torch.distributed.ProcessGroup, optional
        A gloo group of all ranks; default: the group of the process. Messages of an old group never
        reach a later one.
    """

    def __init__(self, library: Any, rank: int, world_size: int, group: object = None):
        self._library, self._group = library, group
        self.ranks_by_stride: dict[
            int, list[int]
        ] = {}  # ranks that exchange pieces, by their stride
        stride = 1
        for factor in factors(world_size):
            first = rank - rank // stride % factor * stride
            self.ranks_by_stride[stride] = [first + i * stride for i in range(factor)]
            stride *= factor
        self._rank = rank
        self._buffers: dict[tuple[Any, ...], Any] = {}  # receive memory by turn and dtype
        self._pools = [ThreadPool(1) for _ in range(_AT_ONCE)]
        self._started = 0

    def start(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start summing a tensor in the background; all ranks must start sums in the same order.

        Parameters
        ----------
        tensor : torch.Tensor
            One-dimensional contiguous CPU tensor.

        Returns
        -------
        callable
            Waits for the sum; raises RuntimeError if a rank is lost.
        """
        return self.begin(functools.partial(self.sum, tensor))

    def begin(self, work: Callable[[int], None]) -> Callable[[], None]:
        """Run a tensor-exchanging function in a background thread.

        Parameters
        ----------
        work : callable
            ``work(turn)`` runs in a background thread; pass its turn to :meth:`sum` and
            :meth:`barrier`. All ranks begin work in one order.

        Returns
        -------
        callable
            Waits for the end, and raises the exception of `work`.
        """
        turn = self._started % _AT_ONCE
        self._started += 1
        return self._pools[turn].apply_async(work, (turn,)).get

    def close(self) -> None:
        """Stop the background threads that compute sums."""
        for pool in self._pools:
            pool.close()

    def sum(self, tensor: torch.Tensor, turn: int, block: int = 1) -> None:
        """Sum a tensor over the ranks in place; unlike :meth:`start`, wait for the result.

        Parameters
        ----------
        tensor : torch.Tensor
            See :meth:`start`.
        turn : int
        block : int, optional
            Number of consecutive ranks whose values are already summed. The sum is over the ranks
            with the same index in their blocks.
        """
        begin, end = 0, tensor.numel()
        tag, done = _TAG + turn, []
        for group in [group for stride, group in self.ranks_by_stride.items() if stride >= block]:
            bounds = cut(begin, end, len(group))
            pieces = {
                rank: tensor[low:high] for rank, (low, high) in zip(group, bounds, strict=True)
            }
            local, others = pieces[self._rank], [rank for rank in group if rank != self._rank]
            buffers = self._receive_buffers(turn, local, len(others))
            terms = dict(zip(others, buffers, strict=True))
            self._exchange(pieces, terms, tag)
            terms[self._rank] = local
            local.copy_(_sum([terms[rank] for rank in group]))
            done.append(pieces)
            begin, end = bounds[group.index(self._rank)]
        for pieces in reversed(done):
            local = pieces.pop(self._rank)
            self._exchange(dict.fromkeys(pieces, local), pieces, tag)

    def barrier(self, ranks: Sequence[int], turn: int = _AT_ONCE) -> None:
        """Wait until all given ranks, a subgroup of the workers, have called this method."""
        import torch

        others, token = [r for r in ranks if r != self._rank], torch.zeros(1, dtype=torch.uint8)
        self._exchange(
            dict.fromkeys(others, token),
            {rank: torch.empty_like(token) for rank in others},
            _TAG + turn,
        )

    def _receive_buffers(self, turn: int, like: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return `count` receive buffers shaped like a tensor, in reused memory."""
        size = count * len(like)
        buffers = self._buffers.get((turn, like.dtype))
        if buffers is None or len(buffers) < size:
            buffers = self._buffers[turn, like.dtype] = like.new_empty(size)
        return list(buffers[:size].view(count, len(like)))

    def _exchange(self, sent: dict[int, Any], received: dict[int, Any], tag: int) -> None:
        """Send a tensor to each peer rank and receive a tensor from each peer."""
        works = []
        for rank, tensor in received.items():
            if len(tensor):
                works.append(self._library.irecv(tensor, rank, self._group, tag))
            if len(sent[rank]):
                works.append(self._library.isend(sent[rank], rank, self._group, tag))
        for work in works:
            work.wait()


def _sum(values: Sequence[Number]) -> Number:
    """Return the sum of tensors, added from left to right."""
    return functools.reduce(operator.add, values)


def cut(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    """Split a range into `parts` consecutive ranges of nearly equal length."""
    bounds = [begin + (end - begin) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))
