"""Training rows of a table in its global order, read by the workers of a fit together.

Each worker has read a part of the table.  Any number of workers on any machines read the table in
the order of a :class:`~bigdl.data.TableLoader` (:mod:`bigdl.runtime.shards.table_batches`).  The
source of the rows of a step depends on the machines:

* All workers map the parts of each other, if they are on one machine.
* Otherwise the rows of a step are divided by location, if the order spreads them over all parts:
  each machine takes those rows that it has, so that none is sent.
* Otherwise, and in a short last step, the workers fetch their rows of the epoch from the workers
  that have them, when it starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.joined import JoinedShard, common_leaves, machine_of, widen_spool
from bigdl.runtime.shards.shard import Shard, Spool, SpoolWriter, remove_spool
from bigdl.runtime.shards.table_batches import EpochRows, OrderFacts, PartRows, TablePlan
from bigdl.training.batches import BatchSettings, BatchSource, Pass, TensorShard, all_gather_json
from bigdl.training.position import RunSettings

if TYPE_CHECKING:
    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.training.batches import RowOrder
    from bigdl.training.slices import SavedSlices

_FETCHED_BYTES = 16 << 20  # of the rows of a worker that are fetched at a time


def in_table_order(
    source: BatchSource, shard: object, settings: BatchSettings, sync: GradientSync
) -> BatchSource:
    """Return a source that reads a table's rows in its global order; a collective operation.

    Parameters
    ----------
    source : BatchSource
        Source of this worker's part.
    shard : Shard or LoaderShard
        The part.
    settings : BatchSettings
        Settings with which `source` was opened.
    sync : GradientSync

    Returns
    -------
    BatchSource
        `source` itself if its rows have no numbers.
    """
    if not isinstance(source, TensorShard) or not isinstance(shard, Shard):
        return source
    if shard.spool.table is None:
        return source
    everyone = all_gather_json(sync, shard.spool.to_json())
    spools = [Spool.from_json(each) for each in everyone]
    leaves = common_leaves(spools)
    if leaves is None or not _are_consecutive(spools):  # a file was replaced while it was read
        return source
    of_parts = [each.table for each in spools if each.table is not None]
    fingerprint = sum(int(each["digest"]) for each in of_parts) % (1 << 64)
    name, rows = of_parts[0]["name"], of_parts[0]["rows"]
    table = {"table": name, "table_rows": rows, "fingerprint": f"{fingerprint:016x}"}
    return TableRows(source, table, TableParts(shard.spool, spools, leaves, sync), settings)


def _are_consecutive(spools: Sequence[Spool]) -> bool:
    """Return True if the spools together hold all rows of their table."""
    end = 0
    for spool in spools:
        if spool.table is None or spool.table["first"] != end:
            return False
        end += spool.rows
    return spools[0].table is not None and spools[0].table["rows"] == end


class TableParts:
    """Parts of a table on the machines of its workers; created by a collective operation.

    Parameters
    ----------
    spool : Spool
        Part of this worker.
    spools : sequence of Spool
        Parts of all workers, which together are the table.
    leaves : sequence of ArraySpec
        Array specs of all parts.
    sync : GradientSync

    Attributes
    ----------
    machine : list of int
        Ranks on this machine that share their parts.
    is_whole : bool
        Whether this machine has all parts.
    shard : JoinedShard or None
        Parts of this machine; None if they have no rows.
    """

    def __init__(
        self,
        spool: Spool,
        spools: Sequence[Spool],
        leaves: Sequence[ArraySpec],
        sync: GradientSync,
    ):
        self._spool, self._leaves, self._sync = spool, leaves, sync
        widen_spool(spool, leaves)
        views = all_gather_json(sync, [int(each.is_here()) for each in spools])
        self.machine = machine_of(sync.rank, views)
        self.is_whole = len(self.machine) == sync.world_size
        here = [spools[rank] for rank in self.machine]
        self.shard = JoinedShard(here, leaves) if any(each.rows for each in here) else None
        self._ends = np.cumsum([each.rows for each in spools])
        self._have_all_rows = all(each.rows for each in spools)
        self._fetched: Spool | None = None

    def ranges(self) -> list[tuple[int, int]]:
        """Return the row numbers of the parts of this machine."""
        ends = self._ends.tolist()
        starts = [0, *ends]
        return [(starts[rank], ends[rank]) for rank in self.machine]

    def in_pass(
        self, plan: TablePlan, facts: OrderFacts, seed: int, epoch: int
    ) -> tuple[EpochRows | None, int]:
        """Return the rows of this worker in a pass, and the position from which it fetches rows.

        The rows are None if all rows are fetched.
        """
        rank, total = self._sync.rank, plan.total
        if self.is_whole and self.shard is not None:
            return EpochRows(plan, facts, seed, epoch, rank, self.shard.stored_rows), total
        if self.shard is None or not (self._have_all_rows and plan.are_spread):
            return None, 0
        ranks = self.machine
        members = ranks.index(rank), len(ranks)
        stored_rows = self.shard.stored_rows
        rows = PartRows(plan, facts, seed, epoch, stored_rows, self.ranges(), *members)
        return rows, plan.end_of_full_steps

    def fetch(
        self, plan: TablePlan, facts: OrderFacts, seed: int, epoch: int, first_step: int
    ) -> Shard:
        """Fetch this worker's rows of the steps from `first_step` on; a collective operation.

        They replace the previously fetched rows.
        """
        if self._fetched is not None:
            remove_spool(self._fetched.path)
        writer = SpoolWriter(self._spool.path, 0, "epoch", [])
        try:
            writer.append(0, 0, 0, list(self._leaves), [])
            rows = EpochRows(plan, facts, seed, epoch, self._sync.rank, _unchanged)
            for number, wanted in enumerate(self._blocks(plan, rows, first_step)):
                arrays = self._rows_of_owners(wanted)
                writer.append(0, number, len(wanted), list(self._leaves), arrays)
            self._fetched = writer.finish()
        except BaseException:
            writer.discard()
            raise
        return Shard(self._fetched)

    def _blocks(self, plan: TablePlan, rows: EpochRows, first_step: int) -> Iterator[np.ndarray]:
        """Yield row numbers of this rank, of the same steps on all ranks."""
        width = sum(_width(leaf) for leaf in self._leaves)
        of_worker = max(1, plan.batch_size // plan.workers)
        count = max(1, _FETCHED_BYTES // max(1, width * of_worker))
        for low in range(first_step, plan.steps, count):
            pieces = [np.empty(0, np.int64)]
            for step in range(low, min(low + count, plan.steps)):
                start, stop, _ = plan.range_of_positions(step, self._sync.rank)
                if start < stop:
                    pieces.append(rows[start:stop])
            yield np.concatenate(pieces)

    def _rows_of_owners(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of some rows of the table, from all workers; a collective operation."""
        import torch

        sync, size, leaves = self._sync, self._sync.world_size, self._leaves
        owners = np.searchsorted(self._ends, numbers, side="right")
        by_owner = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=size).tolist()
        wanted = [int(row[sync.rank]) for row in sync.all_gather([float(each) for each in counts])]
        requests = torch.from_numpy(numbers[by_owner])
        requested = sync.all_to_all(requests, counts, wanted).numpy()
        sent = []
        for low, high in itertools.pairwise(np.cumsum([0, *wanted]).tolist()):
            if low < high and self.shard is not None:
                stored = self.shard.stored_rows(requested[low:high])
                sent += [_bytes(array[stored]) for array in self.shard.arrays]
        width = sum(_width(leaf) for leaf in leaves)
        received = sync.all_to_all(
            torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *sent])),
            [each * width for each in wanted],
            [each * width for each in counts],
        ).numpy()
        arrays = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in leaves]
        start = row = 0
        for count in counts:
            rows = by_owner[row : row + count]
            for array, leaf in zip(arrays, leaves, strict=True):
                stop = start + count * _width(leaf)
                array[rows] = received[start:stop].view(leaf.dtype).reshape(count, *leaf.shape)
                start = stop
            row += count
        return arrays


def _width(leaf: ArraySpec) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(values), np.uint8)


def _unchanged(rows: np.ndarray) -> np.ndarray:
    return rows


class PassRows:
    """Rows of a worker in one pass over a table.

    Parameters
    ----------
    plan : TablePlan
    rank : int
    rows : EpochRows or None
        Rows on this machine; None if all rows are fetched.
    fetched : TensorShard or None
        Rows of the steps from `first_step` on, in the order of the pass.
    first_step : int
    """

    def __init__(
        self,
        plan: TablePlan,
        rank: int,
        rows: EpochRows | None,
        fetched: TensorShard | None,
        first_step: int,
    ):
        self.rows, self.fetched, self.first_step = rows, fetched, first_step
        self._batch_size = size = plan.batch_size
        self._of_step = size * (rank + 1) // plan.workers - size * rank // plan.workers

    def index_of(self, start: int) -> int | None:
        """Return the index in :attr:`fetched` of the position at which a step's rows start."""
        step = start // self._batch_size - self.first_step
        return None if self.fetched is None or step < 0 else step * self._of_step


class TableRows(BatchSource):
    """Rows of a table, read in its global order.

    Parameters
    ----------
    part : TensorShard
        Rows that this worker has read from the table.
    table : dict
        ``table``, its name, ``table_rows`` and ``fingerprint``.
    parts : TableParts
    settings : BatchSettings
        Settings with which `part` was opened.

    Attributes
    ----------
    rows : int
        Number of rows of the part.
    """

    def __init__(
        self, part: TensorShard, table: OrderFacts, parts: TableParts, settings: BatchSettings
    ):
        self._part, self._table, self._parts = part, table, parts
        self._open = settings.open_columns
        self._whole = part if parts.shard is None else self._open(parts.shard)
        self.rows, self.fingerprint, self.types = part.rows, part.fingerprint, self._whole.types
        self._resumed: OrderFacts | None = None
        self._last_pass: PassRows | None = None  # newest pass whose rows were fetched
        self._types_to_take: tuple[list[object] | None, BatchSource] | None = None

    @property
    def fetches_rows(self) -> bool:
        return not self._parts.is_whole

    def use_order(self, facts: OrderFacts) -> None:
        """Read in the order of a checkpoint, whose window may differ."""
        self._resumed = facts

    def check_table(self, order: OrderFacts) -> None:
        """Raise an error if the order of a checkpoint is that of other rows."""
        table = self._table
        if all(order[key] == table[key] for key in ("table_rows", "fingerprint")):
            return
        saved, current = (
            f"{each['table']} ({each['table_rows']:,} rows, fingerprint {each['fingerprint']})"
            for each in (order, table)
        )
        raise UsageError(
            f"The checkpoint was taken in the middle of an epoch over {saved}, and the data is now "
            f"{current}; resume with the same rows, or from a checkpoint at the end of an epoch",
            code="checkpoint-mismatch",
            path=str(table["table"]),
        )

    def facts(self, window: int) -> dict[str, object]:
        return {**super().facts(window), "table": self._table}

    def order_of_pass(
        self, plan: BatchPlan, settings: RunSettings, number: int, rank: int, window: int, step: int
    ) -> object:
        """Return the row order of a pass; a collective operation if rows are fetched."""
        if not isinstance(plan, TablePlan):
            return self._part.order_of_pass(plan, settings, number, rank, window, step)
        facts = self._resumed or plan.facts
        rows, fetched_from = self._parts.in_pass(plan, facts, settings.seed, number)
        plan.pass_rows = rows if isinstance(rows, PartRows) else None
        first = max(step, fetched_from // plan.batch_size)
        if fetched_from >= plan.total or first >= plan.steps:
            return PassRows(plan, rank, rows, None, first)
        last = self._last_pass
        if last is None or facts["kind"] != "table" or first < last.first_step:
            shard = self._parts.fetch(plan, facts, settings.seed, number, first)
            fetched = self._open(shard)
            if self._types_to_take is not None:
                fetched.take_types(*self._types_to_take)
            last = self._last_pass = PassRows(plan, rank, rows, fetched, first)
        return last

    def batch(self, start: int, stop: int, order: RowOrder | PassRows | None = None) -> object:
        if not isinstance(order, PassRows):
            return self._part.batch(start, stop, order)
        index = order.index_of(start)
        if index is None or order.fetched is None:
            return self._whole.batch(start, stop, order.rows)
        return order.fetched.batch(index, index + stop - start)

    def ids_from(self, order: RowOrder | PassRows | None, start: int) -> np.ndarray | None:
        """Return None in the global order, in which the next position identifies the rows."""
        return None if isinstance(order, PassRows) else self._part.ids_from(order, start)

    def take_types(self, types: list[object] | None, training: BatchSource) -> None:
        self._types_to_take = types, training
        for source in {id(each): each for each in (self._part, self._whole)}.values():
            source.take_types(types, training)

    def window(self, memory: int) -> int:
        return self._part.window(memory)

    def order(self, of: Pass) -> object:
        return self._part.order(of)

    def share_of_remaining(self, left: SavedSlices, sync: GradientSync) -> tuple[int, np.ndarray]:
        return self._part.share_of_remaining(left, sync)

    def order_of_share(self, share: np.ndarray, of: Pass) -> object:
        return self._part.order_of_share(share, of)

    def in_order(self, batch_size: int) -> None:
        return self._part.in_order(batch_size)

    @property
    def can_read_ahead(self) -> bool:
        return True

    def has_label(self, value: float) -> bool:
        return self._part.has_label(value)
