"""Conversion of lake tables to pandas frames, Spark DataFrames and Ray Datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bigdl.common.errors import require
from bigdl.data.lake_tables.table import LakeTable, RowRange, TableColumns, cut, read_ranges
from bigdl.orca.data.arrow_types import spark_readable, spark_type

require("pyarrow", "orca")
import pyarrow as pa  # noqa: E402

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import ray.data
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 16 << 10
_PART_ROWS = 1 << 20  # approximate rows per task


def arrow_table(table: LakeTable, names: Sequence[str] | None = None) -> pa.Table:
    """Return all rows as an Arrow table, in the order in which workers read them."""
    columns, ranges = _columns_and_ranges(table, names)
    return _read_table(columns, ranges)


def pandas_frame(table: LakeTable) -> pandas.DataFrame:
    """Return all rows as a pandas frame, in the order in which workers read them."""
    return arrow_table(table).to_pandas()


def parts(
    table: LakeTable, slots: int, names: Sequence[str] | None = None
) -> tuple[Callable[[Sequence[RowRange]], pa.Table], list[list[RowRange]]]:
    """Split a table into row ranges for tasks; return a reader function and the row ranges.

    Parameters
    ----------
    table : LakeTable
    slots : int
        Number of concurrent tasks.
    names : sequence of str, optional
        Columns, by default all.

    Returns
    -------
    read : callable
        Picklable function that returns the rows of a part.
    parts : list of list of RowRange
        At least one part.
    """
    columns, ranges = _columns_and_ranges(table, names)
    return lambda part: _read_table(columns, part), _split_for_tasks(ranges, slots)


def spark_frame(
    table: LakeTable, session: SparkSession, names: Sequence[str] | None = None
) -> DataFrame:
    """Return a Spark DataFrame with the rows in the table's order.

    Parameters
    ----------
    table : LakeTable
    session : pyspark.sql.SparkSession
        Classic or Spark Connect session.
    names : sequence of str, optional
        Columns, by default all.
    """
    from pyspark.sql import types as T

    columns, ranges = _columns_and_ranges(table, names)
    shards = _split_for_tasks(ranges, _parallelism(session))
    arrow = pa.schema([pa.field(f.name, spark_readable(f.type)) for f in columns.fields])
    schema = T.StructType(
        [T.StructField(f.name, spark_type(f.name, f.type)) for f in columns.fields]
    )

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from _batches(columns, shards[number], arrow)

    return session.range(0, len(shards), 1, len(shards)).mapInArrow(read, schema)


def ray_dataset(table: LakeTable, slots: int) -> ray.data.Dataset:
    """Return a ``ray.data.Dataset`` that is read by at least `slots` tasks."""
    data = require("ray.data", "ray")
    read, shards = parts(table, slots)

    def read_block(block: dict[str, np.ndarray]) -> pa.Table:
        return read([each for number in block["id"].tolist() for each in shards[number]])

    numbers = data.range(len(shards), override_num_blocks=len(shards))
    return numbers.map_batches(read_block, batch_size=1)


def _columns_and_ranges(
    table: LakeTable, names: Sequence[str] | None
) -> tuple[TableColumns, list[RowRange]]:
    names = table.schema.names if names is None else names
    return table.columns(names), table.row_groups(names)


def _split_for_tasks(ranges: Sequence[RowRange], slots: int) -> list[list[RowRange]]:
    rows = sum(each.rows for each in ranges)
    return cut(ranges, max(1, min(rows, max(slots, -(-rows // _PART_ROWS)))))


def _parallelism(session: SparkSession) -> int:
    """Return the number of concurrent tasks of a session, or 8 if it is unknown."""
    context = getattr(session, "_sc", None)  # missing in Spark Connect sessions
    return 8 if context is None else context.defaultParallelism


def _batches(
    columns: TableColumns, ranges: Sequence[RowRange], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for arrays in read_ranges(columns, ranges, _BATCH_ROWS):
        cast = [a if a.type == t else a.cast(t) for a, t in zip(arrays, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(cast, schema=schema)


def _read_table(columns: TableColumns, ranges: Sequence[RowRange]) -> pa.Table:
    schema = pa.schema([field.remove_metadata() for field in columns.fields])
    return pa.Table.from_batches(_batches(columns, ranges, schema), schema)
