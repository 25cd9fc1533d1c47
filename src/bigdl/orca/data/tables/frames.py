"""Whole tables as frames of pandas, Spark and Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import require
from bigdl.orca.data.feeds.arrow_types import spark_readable, spark_type
from bigdl.orca.data.tables.table import Columns, RowRange, Table, cut, read_ranges

require("pyarrow", "orca")
import pyarrow as pa  # noqa: E402

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 16 << 10
_PARTITION_ROWS = 1 << 20  # of a partition, about


def pandas_frame(table: Table, names: Sequence[str] | None = None) -> pandas.DataFrame:
    """Return all rows, in the order in which workers read them."""
    return arrow_table(table, names).to_pandas()


def arrow_table(table: Table, names: Sequence[str] | None = None) -> pa.Table:
    """Return all rows, in the order in which workers read them."""
    columns, (ranges,) = _parts(table, names, lambda ranges: 1)
    return _table_of(columns, ranges, columns.fields)


def spark_frame(
    table: Table, session: SparkSession, names: Sequence[str] | None = None
) -> DataFrame:
    """Return a DataFrame whose tasks read the files; its rows are in the order of the table."""
    from pyspark.sql import types as T

    slots = _default_parallelism(session)
    columns, shards = _parts(table, names, lambda ranges: _number_of_parts(ranges, slots))
    fields = tuple(pa.field(f.name, spark_readable(f.type)) for f in columns.fields)
    schema = T.StructType(
        [T.StructField(f.name, spark_type(f.name, f.type)) for f in columns.fields]
    )

    def read(batches: Any) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column("id").to_pylist():
                yield from _batches(columns, shards[part], fields)

    return session.range(0, len(shards), 1, len(shards)).mapInArrow(read, schema)


def ray_dataset(table: Table, slots: int) -> Any:
    """Return a ``ray.data.Dataset`` whose tasks, `slots` at least, read the files."""
    data = require("ray.data", "ray")
    columns, shards = _parts(table, None, lambda ranges: _number_of_parts(ranges, slots))

    def read(block: Any) -> pa.Table:
        ranges = [each for part in block["id"].tolist() for each in shards[part]]
        return _table_of(columns, ranges, columns.fields)

    numbers = data.range(len(shards), override_num_blocks=len(shards))
    return numbers.map_batches(read, batch_size=1)


def _number_of_parts(ranges: Sequence[RowRange], slots: int) -> int:
    rows = sum(each.rows for each in ranges)
    return max(1, min(rows, max(slots, -(-rows // _PARTITION_ROWS))))


def _default_parallelism(session: SparkSession) -> int:
    try:
        return session.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no SparkContext
        return 8


def _parts(
    table: Table, names: Sequence[str] | None, parts: Callable[[Sequence[RowRange]], int]
) -> tuple[Columns, list[list[RowRange]]]:
    names = table.schema.names if names is None else names
    ranges = table.row_groups(names)
    return table.columns(names), cut(ranges, parts(ranges))


def _batches(
    columns: Columns, ranges: Sequence[RowRange], fields: Sequence[pa.Field]
) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([field.remove_metadata() for field in fields])
    for arrays in read_ranges(columns, ranges, _BATCH_ROWS):
        cast = [a if a.type == f.type else a.cast(f.type) for a, f in zip(arrays, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(cast, schema=schema)


def _table_of(columns: Columns, ranges: Sequence[RowRange], fields: Sequence[pa.Field]) -> pa.Table:
    schema = pa.schema([field.remove_metadata() for field in fields])
    return pa.Table.from_batches(_batches(columns, ranges, fields), schema)
