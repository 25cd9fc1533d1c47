"""Whole tables as frames of pandas, Spark and Ray, whose tasks read the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import require
from bigdl.data.lake_tables.table import LakeTable, RowRange, TableColumns, cut, read_ranges
from bigdl.orca.data.arrow_types import spark_readable, spark_type

require("pyarrow", "orca")
import pyarrow as pa  # noqa: E402

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 16 << 10
_PART_ROWS = 1 << 20  # of a task, about


def arrow_table(table: LakeTable, names: Sequence[str] | None = None) -> pa.Table:
    """Return all rows, in the order in which workers read them."""
    columns, ranges = _of_table(table, names)
    return _joined(columns, ranges)


def pandas_frame(table: LakeTable) -> pandas.DataFrame:
    """Return all rows, in the order in which workers read them."""
    return arrow_table(table).to_pandas()


def parts(
    table: LakeTable, slots: int, names: Sequence[str] | None = None
) -> tuple[Callable[[Sequence[RowRange]], pa.Table], list[list[RowRange]]]:
    """Cut a table in parts for tasks.

    Parameters
    ----------
    table : LakeTable
    slots : int
        How many tasks run at once.
    names : sequence of str, optional
        Columns; default all.

    Returns
    -------
    read : callable
        Returns the rows of a part; it can be pickled.
    parts : list of list of RowRange
        One at least.
    """
    columns, ranges = _of_table(table, names)
    return lambda part: _joined(columns, part), _cut(ranges, slots)


def spark_frame(
    table: LakeTable, session: SparkSession, names: Sequence[str] | None = None
) -> DataFrame:
    """Return a DataFrame whose rows are in the order of the table.

    Parameters
    ----------
    table : LakeTable
    session : pyspark.sql.SparkSession
        Classic or of Spark Connect.
    names : sequence of str, optional
        Columns; default all.
    """
    from pyspark.sql import types as T

    columns, ranges = _of_table(table, names)
    shards = _cut(ranges, _parallelism(session))
    arrow = pa.schema([pa.field(f.name, spark_readable(f.type)) for f in columns.fields])
    schema = T.StructType(
        [T.StructField(f.name, spark_type(f.name, f.type)) for f in columns.fields]
    )

    def read(batches: Any) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from _batches(columns, shards[number], arrow)

    return session.range(0, len(shards), 1, len(shards)).mapInArrow(read, schema)


def ray_dataset(table: LakeTable, slots: int) -> Any:
    """Return a ``ray.data.Dataset`` that as many tasks read as `slots`, at least."""
    data = require("ray.data", "ray")
    read, shards = parts(table, slots)

    def read_block(block: Any) -> pa.Table:
        return read([each for number in block["id"].tolist() for each in shards[number]])

    numbers = data.range(len(shards), override_num_blocks=len(shards))
    return numbers.map_batches(read_block, batch_size=1)


def _of_table(table: LakeTable, names: Sequence[str] | None) -> tuple[TableColumns, list[RowRange]]:
    names = table.schema.names if names is None else names
    return table.columns(names), table.row_groups(names)


def _cut(ranges: Sequence[RowRange], slots: int) -> list[list[RowRange]]:
    rows = sum(each.rows for each in ranges)
    return cut(ranges, max(1, min(rows, max(slots, -(-rows // _PART_ROWS)))))


def _parallelism(session: SparkSession) -> int:
    """Return how many tasks of a session run at once, as far as it tells."""
    context = getattr(session, "_sc", None)  # which a session of Spark Connect does not have
    return 8 if context is None else context.defaultParallelism


def _batches(
    columns: TableColumns, ranges: Sequence[RowRange], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for arrays in read_ranges(columns, ranges, _BATCH_ROWS):
        cast = [a if a.type == t else a.cast(t) for a, t in zip(arrays, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(cast, schema=schema)


def _joined(columns: TableColumns, ranges: Sequence[RowRange]) -> pa.Table:
    schema = pa.schema([field.remove_metadata() for field in columns.fields])
    return pa.Table.from_batches(_batches(columns, ranges, schema), schema)
