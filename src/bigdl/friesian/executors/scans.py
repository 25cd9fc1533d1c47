"""Spark tasks that pass the rows of a DataFrame to a function in Arrow batches.

Spark reads Parquet columns into Java vectors and rows before Arrow gets them, and strings as
separate objects. For ten million rows with 26 string columns this took most of the time of fitting
and transforming. Where a DataFrame only selects columns of files, its tasks read them by pyarrow
instead: the same rows in the same partitions, with dictionary-encoded strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.friesian.executors.arrow import Piece
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import LazyBatch, lazy_batch
from bigdl.friesian.ops.column_types import Field
from bigdl.orca.cluster.scan import scan_of
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.data.lake_tables.scans import (
    has_columns,
    has_modern_dates,
    map_items,
    missing_file_explained,
    row_groups_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_ROWS, _BYTES = 1 << 18, 1 << 28  # minimum size of merged batches
MOST_BYTES = 1 << 29  # maximum size of a row group, which is held in memory

Work = Callable[[LazyBatch], "Iterator[pa.RecordBatch]"]


def map_batches(df: DataFrame, function: Work, schema: str | StructType) -> DataFrame:
    """Apply a function to the batches of a DataFrame in Spark tasks.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    function : callable
        Called in tasks with a :class:`LazyBatch`; returns record batches.
    schema : pyspark.sql.types.StructType or str
        Schema of the result.
    """
    batches = from_files(df, function, schema)
    return from_rows(df, function, schema) if batches is None else batches


def from_rows(df: DataFrame, function: Work, schema: str | StructType) -> DataFrame:
    """Apply a function to the Arrow batches of a DataFrame; Spark reads the rows."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in _gathered(batches):
            yield from function(lazy_batch({name: table[name] for name in table.column_names}))

    return df.mapInArrow(silent_when_closed(work), schema)


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Merge small batches, so that a function runs once per distinct value of a merged batch."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(each.num_rows for each in kept) >= _ROWS or sum(b.nbytes for b in kept) >= _BYTES:
            yield pa.Table.from_batches(kept)
            kept = []
    if kept:
        yield pa.Table.from_batches(kept)


# -- files -----------------------------------------------------------------------------------------


def from_files(df: DataFrame, function: Work, schema: str | StructType) -> DataFrame | None:
    """Apply a function to the Arrow batches of a DataFrame; pyarrow reads its Parquet files.

    Partitions and row order are those of Spark's scan. The footers are read now, the data when the
    result is computed.

    Returns
    -------
    pyspark.sql.DataFrame or None
        None if the DataFrame is not just columns of files, or if pyarrow would read other values or
        types than Spark, or cannot read all files from every worker.
    """
    types = {each.name: each.dataType.simpleString() for each in df.schema}
    if not set(column_types.PLAIN) >= set(types.values()):
        return None
    scan = scan_of(df)
    columns = None if scan is None else scan.names_in_files
    if scan is None or columns is None:
        return None
    fields = {inside: Field(types[name]) for name, inside in columns.items()}
    accepts = partial(_is_read_alike, {n: f.kind for n, f in fields.items()}, scan.rebase_mode)
    groups = row_groups_of(scan, df.sparkSession, accepts)
    if groups is None:
        return None
    pieces = [
        [Piece(index, fields, each.path, each.groups, each.count, {}) for each in task]
        for index, task in enumerate(groups)
    ]

    def work(pieces: list[Piece]) -> Iterator[pa.RecordBatch]:
        for piece in pieces:
            with missing_file_explained(piece.path):
                for batch in piece.batches():
                    named = {name: partial(batch.__getitem__, columns[name]) for name in columns}
                    yield from function(LazyBatch(named, batch.rows))

    return map_items(df.sparkSession, pieces, work, schema)


def _is_read_alike(columns: dict[str, str], rebase_mode: str, file: pq.ParquetFile) -> bool:
    """Return True if pyarrow reads a file as Spark does and all row groups are small enough.

    Parameters
    ----------
    columns : dict of str to str
        Types of the needed columns, by their names in the file.
    rebase_mode : str
        See :class:`~bigdl.orca.cluster.scan.Scan`.
    file : pyarrow.parquet.ParquetFile
    """
    parts = map(file.metadata.row_group, range(file.num_row_groups))
    days = [name for name, dtype in columns.items() if dtype == "date"]
    file_types = [(each.name, column_types.of_arrow(each.type)) for each in file.schema_arrow]
    return (
        has_modern_dates(file, days, rebase_mode)
        and all(_size(part, columns) <= MOST_BYTES for part in parts)
        and has_columns(file_types, columns)
    )


def _size(group: pq.RowGroupMetaData, columns: dict[str, str]) -> int:
    parts = map(group.column, range(group.num_columns))
    texts = (each for each in parts if columns.get(each.path_in_schema) == "string")
    rows = group.num_rows * sum(map(_width, columns.values()))
    return rows + sum(each.total_uncompressed_size for each in texts)


def _width(dtype: str) -> int:
    """Return the bytes per value of a type; a string counts as its 4-byte dictionary code."""
    return 4 if dtype == "string" else -(-column_types.to_arrow(dtype).bit_width // 8)
