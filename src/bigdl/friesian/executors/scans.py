"""Rows of a DataFrame as batches for a function, in tasks of Spark.

Columns of Parquet files went through vectors and rows of Java before Arrow had them, texts as
strings of their own.  Of ten million rows with 26 columns of text that was most of the time that
learning and transforming took.  Where a DataFrame is nothing but columns of files, its tasks read
them by pyarrow instead: the same rows in the same partitions, and texts stay dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.friesian.executors.arrow import Piece
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import LazyBatch, batch_of
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

_ROWS, _BYTES = 1 << 18, 1 << 28  # from which batches are enough to be worked on together
MOST_BYTES = 1 << 29  # of the columns of a row group, which are in memory together

Work = Callable[[LazyBatch], "Iterator[pa.RecordBatch]"]


def map_batches(df: DataFrame, function: Work, schema: Any) -> DataFrame:
    """The batches that a function makes of those of a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    function : callable
        Called in tasks with a :class:`LazyBatch`, returns record batches.
    schema : pyspark.sql.types.StructType or str
        Of what it returns.
    """
    batches = from_files(df, function, schema)
    return from_rows(df, function, schema) if batches is None else batches


def from_rows(df: DataFrame, function: Work, schema: Any) -> DataFrame:
    """As :func:`map_batches`, from rows of Spark."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in _gathered(batches):
            yield from function(batch_of({name: table[name] for name in table.column_names}))

    return df.mapInArrow(silent_when_closed(work), schema)


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches together, so that a value that occurs in several is looked at once."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(each.num_rows for each in kept) >= _ROWS or sum(b.nbytes for b in kept) >= _BYTES:
            yield pa.Table.from_batches(kept)
            kept = []
    if kept:
        yield pa.Table.from_batches(kept)


# -- files -----------------------------------------------------------------------------------------


def from_files(df: DataFrame, function: Work, schema: Any) -> DataFrame | None:
    """As :func:`map_batches`, from Parquet files without rows of Spark.

    Partitions and the order of rows are those of Spark's scan.  The files are looked into now, and
    read when the result is computed.

    Returns
    -------
    pyspark.sql.DataFrame or None
        None if the DataFrame is not just columns of files, or pyarrow would not read all of them
        from everywhere with the values and the types of Spark.
    """
    types = {each.name: each.dataType.simpleString() for each in df.schema}
    if not set(column_types.PLAIN) >= set(types.values()):
        return None
    scan = scan_of(df)
    if scan is None:
        return None
    columns = scan.columns
    fields = {inside: Field(types[name]) for name, inside in columns.items()}
    accepts = partial(_is_read_alike, {n: f.kind for n, f in fields.items()}, scan.rebase_mode)
    groups = row_groups_of(scan, df.sparkSession, accepts)
    if groups is None:
        return None
    pieces = [
        [Piece(place, fields, each.path, each.groups, each.count, {}) for each in task]
        for place, task in enumerate(groups)
    ]

    def work(pieces: list[Piece]) -> Iterator[pa.RecordBatch]:
        for piece in pieces:
            with missing_file_explained(piece.path):
                for batch in piece.batches():
                    named = {name: partial(batch.__getitem__, columns[name]) for name in columns}
                    yield from function(LazyBatch(named, batch.rows))

    return map_items(df.sparkSession, pieces, work, schema)


def _is_read_alike(columns: dict[str, str], rebase_mode: str, file: pq.ParquetFile) -> bool:
    """Return True if pyarrow reads what Spark would from a file, and no row group is too large.

    Parameters
    ----------
    columns : dict of str to str
        Kinds of the columns that are needed, by their names in the file.
    rebase_mode : str
        See :class:`~bigdl.orca.cluster.scan.Scan`.
    file : pyarrow.parquet.ParquetFile
    """
    parts = map(file.metadata.row_group, range(file.num_row_groups))
    days = [name for name, kind in columns.items() if kind == "date"]
    found = [(each.name, column_types.of_arrow(each.type)) for each in file.schema_arrow]
    return (
        has_modern_dates(file, days, rebase_mode)
        and all(_size(part, columns) <= MOST_BYTES for part in parts)
        and has_columns(found, columns)
    )


def _size(group: Any, columns: dict[str, str]) -> int:
    parts = map(group.column, range(group.num_columns))
    texts = (each for each in parts if columns.get(each.path_in_schema) == "string")
    rows = group.num_rows * sum(map(_width, columns.values()))
    return rows + sum(each.total_uncompressed_size for each in texts)


def _width(kind: str) -> int:
    """Bytes of a value; that of a text is its code."""
    return 4 if kind == "string" else -(-column_types.to_arrow(kind).bit_width // 8)
