"""Values of many columns of text, counted in Arrow batches.

Spark counts rows of (column, value), which are as many as rows times columns.  Batches are counted
by pyarrow instead, and Spark adds up the counts of the different values of each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.columns import col, type_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from bigdl.friesian.feature.operators.vocabulary import Source

__all__ = ["count_texts", "gathered", "pays"]

_COLUMNS = 8  # from which it is faster than rows of Spark
_ROWS, _BYTES = 1 << 18, 1 << 28  # from which batches are enough to be worked on together


def pays(df: DataFrame, sources: Sequence[Source]) -> bool:
    """Whether all columns are text, and many."""
    columns = [name for source in sources for name in source.columns]
    return len(columns) >= _COLUMNS and all(
        type_of(df, name).simpleString() == "string" for name in columns
    )


def count_texts(df: DataFrame, sources: Sequence[Source]) -> DataFrame:
    """Count the values of each source, without nulls.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    sources : list of Source
        Of columns of text.

    Returns
    -------
    pyspark.sql.DataFrame
        Columns ``source`` (int), its place among all, ``value`` and ``count``; values that occur
        too rarely are left out.
    """
    from pyspark.sql import functions as F

    names = list(dict.fromkeys(name for source in sources for name in source.columns))
    places = [(i, names.index(name)) for i, source in enumerate(sources) for name in source.columns]

    def partial(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in gathered(batches):
            yield from _counted(table, places)

    found = df.select(*(col(name).alias(f"c{i}") for i, name in enumerate(names)))
    found = found.mapInArrow(partial, "source int, value string, count bigint")
    found = found.groupBy("source", "value").agg(F.sum("count").alias("count"))
    limits = F.lit(True)
    for i, source in enumerate(sources):
        if source.at_least > 1:
            limits = limits & ((F.col("source") != i) | (F.col("count") >= source.at_least))
    return found.filter(limits)


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches together, so that a value that occurs in several is looked at once."""
    import pyarrow as pa

    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(each.num_rows for each in kept) >= _ROWS or sum(b.nbytes for b in kept) >= _BYTES:
            yield pa.Table.from_batches(kept)
            kept = []
    if kept:
        yield pa.Table.from_batches(kept)


def _counted(table: pa.Table, places: Sequence[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.compute as pc

    for source, column in places:
        counts = pc.value_counts(table.column(column).drop_null())
        values, numbers = counts.flatten()
        sources = pa.repeat(pa.scalar(source, pa.int32()), len(values))
        yield pa.record_batch([sources, values, numbers], names=["source", "value", "count"])
