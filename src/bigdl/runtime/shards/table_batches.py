"""Batches of a table in one global order, which the workers of a fit read together.

The order is that of a :class:`~bigdl.data.TableLoader` with the same table and seed
(:mod:`bigdl.runtime.shards.order`).  In each step the workers together have the next `batch_size`
rows of it, whatever their number.  So the number of finished steps is the whole state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.order import make_order, order_facts

OrderFacts = dict[str, int | str]
"""JSON facts of an order, with ``table``, ``table_rows`` and ``fingerprint`` of the table."""

_BLOCK = 1 << 16  # positions whose rows are computed together


def table_order(
    table: OrderFacts, shuffle: bool, windows: Sequence[int], parts: Sequence[int]
) -> OrderFacts:
    """Return the facts of a table's order in a fit.

    Parameters
    ----------
    table : dict
        ``table``, ``table_rows`` and ``fingerprint``.
    shuffle : bool
    windows : sequence of int
        Rows of each worker's part that fit in its memory; 0 if all do.
    parts : sequence of int
        Rows of each worker's part.
    """
    window = None
    if any(windows):
        window = sum(each or of_part for each, of_part in zip(windows, parts, strict=True))
    facts = order_facts(int(table["table_rows"]), shuffle, window if shuffle else None)
    return {**facts, **table}


def resumed_order(order: OrderFacts, saved: OrderFacts) -> OrderFacts:
    """Return an order with the window of a saved order of the same table, if it has one."""
    if order["kind"] == "table" or order["table_rows"] != saved["table_rows"]:
        return order
    return {**saved, **{name: order[name] for name in ("table", "fingerprint")}}


class TablePlan(BatchPlan):
    """Batch plan whose ranges are positions in the global order of a table.

    Parameters
    ----------
    parts : sequence of int
        Rows that each worker has read from the table.
    batch_size : int
    drop_last : bool
    facts : dict
        See :func:`table_order`.

    Attributes
    ----------
    facts : dict
    """

    def __init__(self, parts: Sequence[int], batch_size: int, drop_last: bool, facts: OrderFacts):
        super().__init__(parts, batch_size, drop_last)
        self.facts, self._workers = facts, len(parts)

    def batch(self, step: int, rank: int) -> tuple[int, int, int]:
        """Return a rank's range of positions in a step, and the step's total number of rows."""
        first = step * self.batch_size
        count = min(self.batch_size, self.total - first)
        workers = self._workers
        if count < self.batch_size:
            # layers such as batch normalization need two rows in each worker that has any
            workers = min(workers, max(1, count // 2))
        low, high = (count * min(each, workers) // workers for each in (rank, rank + 1))
        return first + low, first + high, count


class EpochRows:
    """Table rows of a worker's positions in one epoch; slices of it are arrays of row indices.

    Parameters
    ----------
    plan : TablePlan
    facts : dict
        See :func:`table_order`.
    seed, epoch, rank : int
    stored_rows : callable
        Converts row numbers of the table to the indices of stored rows.
    """

    def __init__(
        self,
        plan: TablePlan,
        facts: OrderFacts,
        seed: int,
        epoch: int,
        rank: int,
        stored_rows: Callable[[np.ndarray], np.ndarray],
    ):
        self._plan, self._rank, self._stored_rows = plan, rank, stored_rows
        self._order = make_order(facts, int(facts["table_rows"]), seed, epoch)
        self._block: dict[int, np.ndarray] = {}  # rows by their first position

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Return the stored rows at the positions of this rank in one step."""
        start = int(positions.start)
        if start not in self._block:
            self._block = self._block_from(start // self._plan.batch_size)
        return self._block[start]

    def _block_from(self, step: int) -> dict[int, np.ndarray]:
        """Compute the rows of the steps from `step`; one call for several steps is much faster."""
        plan, rank = self._plan, self._rank
        start, stop, _ = plan.batch(step, rank)
        steps = range(step, min(plan.steps, step + max(1, _BLOCK // max(1, stop - start))))
        ranges = [plan.batch(each, rank)[:2] for each in steps]
        positions = np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges])
        rows = self._stored_rows(self._order.rows_at(positions))
        ends = np.cumsum([0, *(high - low for low, high in ranges)]).tolist()
        return {
            first: rows[low:high]
            for (first, last), (low, high) in zip(ranges, itertools.pairwise(ends), strict=True)
            if first < last
        }


def rows_from(facts: OrderFacts, seed: int, epoch: int, start: int, part: range) -> np.ndarray:
    """Return the mask of a part of a table's rows that an epoch reads at position `start` or later.

    Parameters
    ----------
    facts : dict
        See :func:`table_order`.
    seed, epoch, start : int
    part : range
        Row numbers.
    """
    rows = int(facts["table_rows"])
    order = make_order(facts, rows, seed, epoch)
    mask = np.zeros(len(part), bool)
    for low in range(start, rows, _BLOCK):
        numbers = order.rows_at(np.arange(low, min(low + _BLOCK, rows), dtype=np.int64))
        mask[numbers[(numbers >= part.start) & (numbers < part.stop)] - part.start] = True
    return mask
