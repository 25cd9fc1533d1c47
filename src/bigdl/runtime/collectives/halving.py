"""Sums over many workers in few rounds.

A ring, as gloo has it, takes twice as many rounds as there are workers, one after another, and each
has the latency of the network and the cost of a message. Recursive halving and doubling sends as
many bytes in a number of rounds that grows with the logarithm (R. Rabenseifner, "Optimization of
collective reduction operations", ICCS 2004). Where the number of workers is no power of two, its
prime factors take the place of the twos.

The order in which numbers are added up is a tree over the ranks, the same for every number, so
sums are the same to the last bit wherever a rank runs and however a vector is cut.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

HALVING_MIN_WORLD_SIZE = 8
"""From so many workers on; with fewer a ring has hardly more rounds."""

_TAG = 7  # of messages; not that of the others between two ranks
_AT_ONCE = 2  # sums on their way: one is added up while another one travels

Number = TypeVar("Number")


def factors(number: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found


def tree_sum(values: Sequence[Number]) -> Number:
    """The sum of what all ranks have, in the order of :class:`HalvingDoubling`."""
    for factor in factors(len(values)):
        values = [_sum(values[i : i + factor]) for i in range(0, len(values), factor)]
    return values[0]


class HalvingDoubling:
    """Sums of tensors over all ranks, in place.

    Ranks that lie side by side exchange the largest pieces: they should be those of one host.

    Parameters
    ----------
    library : module
        ``torch.distributed``.
    rank, world_size : int
    group : torch.distributed.ProcessGroup, optional
        Of gloo, with all ranks; default the one of the process. What still runs when it is left
        fails, and never reaches a later one.
    """

    def __init__(self, library: Any, rank: int, world_size: int, group: Any = None):
        self._library, self._group = library, group
        self.ranks_by_stride: dict[
            int, list[int]
        ] = {}  # by their stride: the ranks that exchange pieces
        stride = 1
        for factor in factors(world_size):
            first = rank - rank // stride % factor * stride
            self.ranks_by_stride[stride] = [first + i * stride for i in range(factor)]
            stride *= factor
        self._rank = rank
        self._rooms: dict[tuple[Any, ...], Any] = {}  # memory by turn and dtype
        self._pools = [ThreadPool(1) for _ in range(_AT_ONCE)]
        self._started = 0

    def start(self, tensor: Any) -> Callable[[], None]:
        """Begin to sum; all ranks do so in one order.

        Parameters
        ----------
        tensor : torch.Tensor
            Of one dimension, contiguous, on the CPU.

        Returns
        -------
        callable
            Waits for the sum; a RuntimeError says that a rank is lost.
        """
        return self.begin(functools.partial(self.sum, tensor))

    def begin(self, work: Callable[[int], None]) -> Callable[[], None]:
        """Begin something that exchanges; all ranks do so in one order.

        Parameters
        ----------
        work : callable
            ``work(turn)`` runs in a thread of its own, with the turn that :meth:`sum` and
            :meth:`meet` ask for.

        Returns
        -------
        callable
            Waits for the end, and raises what was raised.
        """
        turn = self._started % _AT_ONCE
        self._started += 1
        return self._pools[turn].apply_async(work, (turn,)).get

    def close(self) -> None:
        """Begin no more."""
        for pool in self._pools:
            pool.close()

    def sum(self, tensor: Any, turn: int, block: int = 1) -> None:
        """Sum a tensor, in place; :meth:`start` does it in the background.

        Parameters
        ----------
        tensor : torch.Tensor
            As for :meth:`start`.
        turn : int
        block : int, optional
            Over so many ranks, that lie side by side, the numbers are summed up already, and the
            sum is over the ranks that have the same place in their blocks.
        """
        begin, end = 0, tensor.numel()
        tag, done = _TAG + turn, []
        for group in [group for stride, group in self.ranks_by_stride.items() if stride >= block]:
            bounds = cut(begin, end, len(group))
            pieces = {
                rank: tensor[low:high] for rank, (low, high) in zip(group, bounds, strict=True)
            }
            own, others = pieces[self._rank], [rank for rank in group if rank != self._rank]
            room = self._room(turn, own, len(others))
            terms = dict(zip(others, room, strict=True))
            self._exchange(pieces, terms, tag)
            terms[self._rank] = own
            own.copy_(_sum([terms[rank] for rank in group]))
            done.append(pieces)
            begin, end = bounds[group.index(self._rank)]
        for pieces in reversed(done):
            own = pieces.pop(self._rank)
            self._exchange(dict.fromkeys(pieces, own), pieces, tag)

    def meet(self, ranks: Sequence[int], turn: int = _AT_ONCE) -> None:
        """Return when all of these ranks are here; without a turn, outside of :meth:`begin`."""
        import torch

        others, token = [r for r in ranks if r != self._rank], torch.zeros(1, dtype=torch.uint8)
        self._exchange(
            dict.fromkeys(others, token),
            {rank: torch.empty_like(token) for rank in others},
            _TAG + turn,
        )

    def _room(self, turn: int, like: Any, count: int) -> list[Any]:
        """So many tensors for what comes in, over those of the round before."""
        size = count * len(like)
        room = self._rooms.get((turn, like.dtype))
        if room is None or len(room) < size:
            room = self._rooms[turn, like.dtype] = like.new_empty(size)
        return list(room[:size].view(count, len(like)))

    def _exchange(self, sent: dict[int, Any], received: dict[int, Any], tag: int) -> None:
        """Send each other rank its tensor and fill one of each."""
        works = []
        for rank, tensor in received.items():
            if len(tensor):
                works.append(self._library.irecv(tensor, rank, self._group, tag))
            if len(sent[rank]):
                works.append(self._library.isend(sent[rank], rank, self._group, tag))
        for work in works:
            work.wait()


def _sum(values: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, values)


def cut(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges of nearly one length."""
    bounds = [begin + (end - begin) * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(bounds))
