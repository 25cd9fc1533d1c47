"""Input plan of rows that the workers read from Parquet files themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bigdl.data.lake_tables.table import RowRange, TableColumns, cut, read_ranges
from bigdl.orca.data.arrow_types import cast_to_spec
from bigdl.runtime.shards.columns import ColumnSpec, decode
from bigdl.runtime.shards.feed import InputPlan
from bigdl.runtime.shards.shard import Shard
from bigdl.runtime.shards.values import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from bigdl.runtime.shards.shard import SpoolWriter

_BATCH_BYTES = 512 << 10  # approximate size of a record batch


def plan_of_ranges(
    columns: TableColumns,
    row_ranges: Sequence[RowRange],
    specs: Sequence[ColumnSpec],
    num_workers: int,
    name: str,
    table: str,
) -> InputPlan:
    """Return an input plan in which each worker reads a contiguous range of the rows.

    Parameters
    ----------
    columns : TableColumns
        Columns of the files, in the order of `specs`.
    row_ranges : sequence of RowRange
        All rows, in their order.
    specs : sequence of ColumnSpec
        Conversions of the columns.
    num_workers : int
    name : str
        Name of the input's shards.
    table : str
        Name of the table, for messages.
    """
    ranges = cut(row_ranges, num_workers)
    firsts = list(itertools.accumulate((_rows(each) for each in ranges), initial=0))
    batch_rows = _batch_rows(specs)

    def read(
        batches: Iterator[pa.RecordBatch], open_spool: Callable[..., SpoolWriter]
    ) -> dict[str, Shard]:
        writer = open_spool(name, specs)
        rank = open_spool.rank  # type: ignore[attr-defined]
        worker_ranges = ranges[rank]
        writer.number_rows(table, firsts[rank], firsts[-1])
        writer.expect(_rows(worker_ranges))
        for sequence, arrays in enumerate(read_ranges(columns, worker_ranges, batch_rows)):
            values_of_columns = [
                (spec.name, key, values)
                for spec, array in zip(specs, arrays, strict=True)
                for key, values in decode(spec, cast_to_spec(spec, array))
            ]
            # a batch is small enough to be transposed to rows in the CPU cache
            leaves, values = grouped(values_of_columns)
            contiguous = [np.ascontiguousarray(each) for each in values]
            writer.append(0, sequence, len(arrays[0]), leaves, contiguous)
        return {name: Shard(writer.finish())}

    return InputPlan(None, read)


def _rows(ranges: Sequence[RowRange]) -> int:
    return sum(each.rows for each in ranges)


def _batch_rows(specs: Sequence[ColumnSpec]) -> int:
    scalars = sum(spec.ndim == 0 and spec.kind == "plain" for spec in specs)
    # rows with arrays may be long, because their lengths are unknown
    return max(1024, _BATCH_BYTES // (8 * max(1, scalars))) if scalars == len(specs) else 4096
