"""Training rows of a table in its global order, shared by the workers of one machine.

Each worker has read a part of the table.  If all parts are on one machine, every worker maps all of
them, and the workers read the table in the order of a :class:`~bigdl.data.TableLoader`
(:mod:`bigdl.runtime.shards.table_batches`).  Otherwise each worker reads its part only, in the
order of :class:`~bigdl.runtime.shards.batches.BatchPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.joined import JoinedShard, common_leaves, widen_spool
from bigdl.runtime.shards.shard import Shard, Spool
from bigdl.runtime.shards.table_batches import EpochRows, OrderFacts, TablePlan, rows_from
from bigdl.training.batches import BatchSettings, BatchSource, Pass, TensorShard, all_gather_json
from bigdl.training.position import RunSettings

if TYPE_CHECKING:
    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.training.batches import RowOrder
    from bigdl.training.slices import SavedSlices

_SAMPLE = 1024  # rows of the table that the fingerprint covers


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
    name, rows, first = (shard.spool.table[each] for each in ("name", "rows", "first"))
    part = range(int(first), int(first) + source.rows)
    known = {"spool": shard.spool.to_json(), "sample": _sample_of(source, part, int(rows))}
    everyone = all_gather_json(sync, known)
    fingerprint = sum(each["sample"] for each in everyone) % (1 << 64)
    table = {"table": name, "table_rows": rows, "fingerprint": f"{fingerprint:016x}"}
    spools = [Spool.from_json(each["spool"]) for each in everyone]
    if not _are_consecutive(spools):  # a file was replaced while the workers read it
        return source
    if len(spools) == 1:
        return TableRows(source, part, table, source, _unchanged)
    leaves = common_leaves(spools)
    if leaves is None:  # the same on all ranks
        return TableRows(source, part, table)
    are_here = all(spool.is_here() for spool in spools)
    if are_here:
        widen_spool(shard.spool, leaves)
    if not all(row[0] for row in sync.all_gather([float(are_here)])):
        return TableRows(source, part, table)
    joined = JoinedShard(spools, leaves)
    return TableRows(source, part, table, settings.open_columns(joined), joined.stored_rows)


def _sample_of(source: TensorShard, part: range, table_rows: int) -> int:
    """Hash the part's rows among rows at fixed numbers of the table."""
    numbers = np.unique(np.arange(_SAMPLE) * table_rows // _SAMPLE)
    low, high = np.searchsorted(numbers, [part.start, part.stop])
    return source.checksum_of(numbers[low:high] - part.start)


def _are_consecutive(spools: Sequence[Spool]) -> bool:
    """Return True if the spools together hold all rows of their table."""
    end = 0
    for spool in spools:
        if spool.table is None or spool.table["first"] != end:
            return False
        end += spool.rows
    return spools[0].table is not None and spools[0].table["rows"] == end


def _unchanged(rows: np.ndarray) -> np.ndarray:
    return rows


class TableRows(BatchSource):
    """Rows of a table, read in its global order, or of this worker's part of it.

    Parameters
    ----------
    part : TensorShard
        Rows that this worker has read from the table.
    numbers : range
        Their numbers in the table.
    table : dict
        ``table``, its name, ``table_rows`` and ``fingerprint``.
    whole : TensorShard, optional
        All rows of the table; None if they are on several machines, so that only the order of the
        parts is available.
    stored_rows : callable, optional
        Converts row numbers of the table to indices in `whole`.

    Attributes
    ----------
    rows : int
        Number of rows of the part.
    """

    def __init__(
        self,
        part: TensorShard,
        numbers: range,
        table: OrderFacts,
        whole: TensorShard | None = None,
        stored_rows: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self._part, self._whole, self._stored_rows = part, whole, stored_rows
        self.rows, self.fingerprint = part.rows, part.fingerprint
        self.types = part.types if whole is None else whole.types
        self._numbers, self._table = numbers, table
        self._resumed: OrderFacts | None = None

    def use_order(self, facts: OrderFacts) -> None:
        """Read in the order of a checkpoint, whose window may differ."""
        self._resumed = facts

    def remaining_in(self, order: OrderFacts, seed: int, epoch: int, start: int) -> np.ndarray:
        """Return the mask of the part's rows that an order reads at position `start` or later.

        Parameters
        ----------
        order : dict
            Order of a checkpoint.
        seed, epoch, start : int
        """
        return rows_from(order, seed, epoch, start, self._numbers)

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
        table = {} if self._whole is None else {"table": self._table}
        return {**super().facts(window), **table}

    def order_of_pass(
        self, plan: BatchPlan, settings: RunSettings, number: int, rank: int, window: int, step: int
    ) -> object:
        if not isinstance(plan, TablePlan):
            return self._part.order_of_pass(plan, settings, number, rank, window, step)
        stored_rows = cast("Callable[[np.ndarray], np.ndarray]", self._stored_rows)
        facts = self._resumed or plan.facts
        return EpochRows(plan, facts, settings.seed, number, rank, stored_rows)

    def batch(self, start: int, stop: int, order: RowOrder | EpochRows | None = None) -> object:
        whole = self._whole if isinstance(order, EpochRows) else None
        return (self._part if whole is None else whole).batch(start, stop, order)

    def ids_from(self, order: RowOrder | EpochRows | None, start: int) -> np.ndarray | None:
        """Return None in the global order, in which the next position identifies the rows."""
        return None if isinstance(order, EpochRows) else self._part.ids_from(order, start)

    def take_types(self, types: list[object] | None, training: BatchSource) -> None:
        for source in {id(each): each for each in (self._part, self._whole) if each}.values():
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
