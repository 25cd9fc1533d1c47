"""Batch plans: the assignment of each shard's rows to global batches.

The rows of all shards are interleaved in proportion to the shards' sizes and cut into batches of
exactly `batch_size` rows.  So the number of steps is that of a single process,
``ceil(rows / batch_size)``, even with uneven shards, and all shards end in the same step.  With
equal shards every worker has ``batch_size / N`` rows of each batch.  A worker may have no row of a
batch (always with an empty shard).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bigdl.common.checks import check_positive

_BLOCKS = 64  # contiguous blocks per window


class BatchPlan:
    """Plan that divides the rows of N shards into global batches.

    Parameters
    ----------
    rows : sequence of int
        Rows of each shard, in rank order.
    batch_size : int
        Rows of a global batch.
    drop_last : bool
        Skip the last batch if it is not full.

    Attributes
    ----------
    steps : int
        Number of global batches in an epoch.
    total : int
        Number of rows of an epoch.
    share : ndarray or None
        Selected rows of this shard; None for all.
    """

    share: np.ndarray | None = None

    def __init__(self, rows: Sequence[int], batch_size: int, drop_last: bool = False):
        self.batch_size = check_positive("batch_size", batch_size)
        self._rows = np.asarray(rows, dtype=np.int64)
        everything = int(self._rows.sum())
        full = everything // self.batch_size
        self.steps = full if drop_last else -(-everything // self.batch_size)
        self.total = min(self.steps * self.batch_size, everything)
        is_short = everything - self.total + self.total % self.batch_size > 0 and not drop_last
        self._short = self.steps - 1 if is_short else 0  # a last batch that is not full
        self._last: dict[int, np.ndarray] = {}  # of the last batch's two ends

    def batch(self, step: int, rank: int) -> tuple[int, int, int]:
        """Return a shard's range of rows in a global batch, and the batch's total number of rows.

        Returns
        -------
        start, stop : int
            Range of positions in the shard's order of the epoch; empty without rows.
        batch_rows : int
            Rows of the whole global batch.
        """
        low, high = self._taken(step), self._taken(step + 1)
        self._last = {step: low, step + 1: high}
        return int(low[rank]), int(high[rank]), int((high - low).sum())

    def _taken(self, step: int) -> np.ndarray:
        """Return the number of rows of each shard in the first `step` batches.

        Row i of a shard of n rows has the position ``(i + 1/2) / n``. The epoch's order sorts the
        rows of all shards by position, then by rank.
        """
        if step in self._last:
            return self._last[step]
        rows, count = self._rows, min(step * self.batch_size, self.total)
        everything = int(rows.sum())
        if count >= everything:
            return rows
        if everything >= 2**30:  # the products below would not fit in 64 bits
            rows = rows.astype(object)
        # rows with a position below count / everything: about `count` rows
        taken = (2 * count * rows + everything - 1) // (2 * everything)
        excess = int(taken.sum()) - count
        if excess:
            _move(taken, rows, excess)
        taken = taken.astype(np.int64)
        if step and step == self._short:
            before = BatchPlan._taken(self, step - 1)
            _avoid_single_rows(taken, self._rows, before)
        return taken


def _avoid_single_rows(
    taken: npt.NDArray[Any], rows: npt.NDArray[Any], before: npt.NDArray[Any]
) -> None:
    """Move the start of the last batch so that, if possible, no shard has only one row in it.

    Layers such as batch normalisation need two rows. The single row moves to the previous batch,
    and a row of another shard moves to the last batch in exchange.

    Parameters
    ----------
    taken : ndarray
        Number of rows of each shard before the last batch; changed in place.
    rows, before : ndarray
        Number of rows of each shard, and before the second-to-last batch.
    """

    def can_give(rank: int) -> bool:
        left = int(taken[rank] - 1 - before[rank])
        return left >= 0 and left != 1

    for rank in range(len(rows)):
        if rows[rank] - taken[rank] != 1:
            continue
        others = [r for r in range(len(rows)) if r != rank and rows[r] > taken[r] and can_give(r)]
        # prefer shards that have a single row, too
        others.sort(key=lambda r: (rows[r] - taken[r] != 1, r))
        if others:
            taken[others[0]] -= 1
            taken[rank] += 1


def _move(taken: npt.NDArray[Any], rows: npt.NDArray[Any], excess: int) -> None:
    """Remove the last `excess` rows in epoch order from `taken`; if negative, add the next rows."""
    step = -1 if excess > 0 else 1

    def positions(rank: int) -> Iterator[tuple[Fraction, int]]:
        """Yield the positions of a shard's rows in the order in which they move."""
        count, used = int(rows[rank]), int(taken[rank])
        indices = range(used, count) if step > 0 else reversed(range(used))
        return ((Fraction(2 * index + 1, 2 * count), rank) for index in indices)

    in_order = heapq.merge(*map(positions, range(len(rows))), reverse=step < 0)
    for _, rank in itertools.islice(in_order, abs(excess)):
        taken[rank] += step


def permutation(rows: int, seed: int, epoch: int, shard: int = 0) -> np.ndarray:
    """Return the row order of a shard in one epoch, determined by (seed, epoch, shard).

    Returns
    -------
    ndarray of int32 or int64, shape (rows,)
    """
    order = np.arange(rows, dtype=np.int32 if rows < 2**31 else np.int64)
    np.random.default_rng([seed, epoch, shard]).shuffle(order)
    return order


class WindowedOrder:
    """Row order of a shard larger than memory: random within windows that fit in memory.

    The shard is cut into contiguous blocks in random order; several blocks form a window, and the
    rows of a window are shuffled. So only the pages of one window are needed at a time. Like
    :func:`permutation` it depends on (seed, epoch, shard) only.

    Parameters
    ----------
    rows : int
    window : int
        Approximate number of rows of a window.
    seed, epoch, shard : int
    """

    def __init__(self, rows: int, window: int, seed: int, epoch: int, shard: int = 0):
        self._rows, self._key = rows, (seed, epoch, shard)
        self._block = max(1, window // _BLOCKS)
        starts = np.arange(0, rows, self._block)
        np.random.default_rng(self._key).shuffle(starts)
        self._windows = [starts[i : i + _BLOCKS] for i in range(0, len(starts), _BLOCKS)]
        sizes = [int((self._ends(w) - w).sum()) for w in self._windows]
        self._offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._current: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Return the rows at consecutive positions of the order."""
        start, stop, _ = positions.indices(self._rows)
        pieces = []
        while start < stop:
            number = int(np.searchsorted(self._offsets, start, side="right")) - 1
            offset = int(self._offsets[number])
            piece = self._window(number)[start - offset : stop - offset]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _ends(self, starts: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return cast("npt.NDArray[Any]", np.minimum(starts + self._block, self._rows))

    def _window(self, number: int) -> np.ndarray:
        if self._current is None or self._current[0] != number:
            starts = self._windows[number]
            blocks = [np.arange(*bounds) for bounds in zip(starts, self._ends(starts), strict=True)]
            order = np.concatenate(blocks)
            np.random.default_rng([*self._key, number]).shuffle(order)
            self._current = number, order
        return self._current[1]
