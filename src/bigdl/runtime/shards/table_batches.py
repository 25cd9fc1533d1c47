"""Batches of a table in one global order, which the workers of a fit read together.

The order is that of a :class:`~bigdl.data.TableLoader` with the same table and seed
(:mod:`bigdl.runtime.shards.order`).  In each step the workers together have the next `batch_size`
rows of it, whatever their number and wherever they run.  So the number of finished steps is the
whole state.

The rows of a step are divided among the workers in one of two ways.  By position, each worker has a
range of the step's positions (:class:`EpochRows`).  By location, each worker has those rows of its
machine's range that its machine has read from the table (:class:`PartRows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.order import ShardOrder, make_order, order_facts

OrderFacts = dict[str, int | str]
"""JSON facts of an order, with ``table``, ``table_rows`` and ``fingerprint`` of the table."""

_BLOCK = 1 << 16  # positions whose rows are computed together
_FEWEST_ROWS = 16  # of a worker in a step that is divided by location; their number varies by 2


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
    window = window if shuffle else None
    facts = order_facts(int(table["table_rows"]), shuffle, window, by_shard=True)
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
    workers : int
    pass_rows : PartRows or None
        Rows of this worker in the current pass, if rows are divided by location.
    """

    pass_rows: PartRows | None = None

    def __init__(self, parts: Sequence[int], batch_size: int, drop_last: bool, facts: OrderFacts):
        super().__init__(parts, batch_size, drop_last)
        self.facts, self.workers = facts, len(parts)

    @property
    def are_spread(self) -> bool:
        """True if each part of the table has about its share of the rows of each step.

        A worker then has enough rows of each step for layers such as batch normalization.
        """
        rows = min(self.batch_size, self.total) // self.workers
        return int(self.facts.get("shards", 1)) > 1 and rows >= _FEWEST_ROWS

    @property
    def end_of_full_steps(self) -> int:
        """Position after the last step of `batch_size` rows."""
        return self.total // self.batch_size * self.batch_size

    def batch(self, step: int, rank: int) -> tuple[int, int, int]:
        """Return a rank's range of positions in a step, and the step's total number of rows.

        If rows are divided by location, the range has the number of this worker's rows.
        """
        first = step * self.batch_size
        if self.pass_rows is not None and first < self.end_of_full_steps:
            return first, first + self.pass_rows.count(step), self.batch_size
        return self.range_of_positions(step, rank)

    def range_of_positions(self, step: int, rank: int) -> tuple[int, int, int]:
        """Return a rank's range of positions in a step that is divided by position."""
        first = step * self.batch_size
        count = max(0, min(self.batch_size, self.total - first))
        workers = self.workers
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
        start, block = int(positions.start), self._block
        if start not in block:
            block = self._block = self._block_from(start // self._plan.batch_size)
        return block[start]

    def _block_from(self, step: int) -> dict[int, np.ndarray]:
        """Compute the rows of the steps from `step`; one call for several steps is much faster."""
        plan, rank = self._plan, self._rank
        start, stop, _ = plan.range_of_positions(step, rank)
        steps = range(step, min(plan.steps, step + max(1, _BLOCK // max(1, stop - start))))
        ranges = [plan.range_of_positions(each, rank)[:2] for each in steps]
        positions = np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges])
        rows = self._stored_rows(self._order.rows_at(positions))
        ends = np.cumsum([0, *(high - low for low, high in ranges)]).tolist()
        return {
            first: rows[low:high]
            for (first, last), (low, high) in zip(ranges, itertools.pairwise(ends), strict=True)
            if first < last
        }


class PartRows(EpochRows):
    """Table rows of a worker in one epoch: rows that its machine has read from the table.

    In each step, a worker has the rows of its machine at its machine's range of positions: the
    workers of a machine divide the positions of the step among them.

    Parameters
    ----------
    plan, facts, seed, epoch, stored_rows
        See :class:`EpochRows`.
    parts : sequence of (int, int)
        Row numbers that the machine has read.
    member, members : int
        Number of this worker among the workers of its machine, and their number.
    """

    def __init__(
        self,
        plan: TablePlan,
        facts: OrderFacts,
        seed: int,
        epoch: int,
        stored_rows: Callable[[np.ndarray], np.ndarray],
        parts: Sequence[tuple[int, int]],
        member: int,
        members: int,
    ):
        super().__init__(plan, facts, seed, epoch, member, stored_rows)
        self._parts, self._members = parts, members

    def count(self, step: int) -> int:
        """Return the number of this worker's rows in a step."""
        return len(self[slice(step * self._plan.batch_size, None)])

    def _block_from(self, step: int) -> dict[int, np.ndarray]:
        size, member, members = self._plan.batch_size, self._rank, self._members
        low, high = size * member // members, size * (member + 1) // members
        share = sum(stop - start for start, stop in self._parts) / self._order.rows
        steps = max(1, int(_BLOCK / max(1.0, (high - low) * share)))
        full = self._plan.end_of_full_steps // size
        firsts = range(step * size, min(step + steps, full) * size, size)
        intervals = [(first + low, first + high) for first in firsts]
        rows, counts = cast("ShardOrder", self._order).rows_in(intervals, self._parts)
        ends = np.cumsum([0, *counts.tolist()]).tolist()
        stored = self._stored_rows(rows)
        return {
            first: stored[start:stop]
            for first, (start, stop) in zip(firsts, itertools.pairwise(ends), strict=True)
        }
