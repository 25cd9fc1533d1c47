"""Values of many columns of text, counted in batches.

Spark counts rows of (column, value), which are as many as rows times columns.  Batches are counted
by their different values instead, and Spark adds up the counts of all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.columns import col, type_of
from bigdl.friesian.feature.pipeline.tallies import tally

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from bigdl.friesian.feature.pipeline.batches import Batch
    from bigdl.friesian.feature.pipeline.requests import Counts

__all__ = ["count_texts", "pays"]

_COLUMNS = 8  # from which it is faster than rows of Spark


def pays(df: DataFrame, requests: Sequence[Counts]) -> bool:
    """Whether all columns are text, and many."""
    columns = [name for request in requests for name in request.columns]
    return len(columns) >= _COLUMNS and all(
        type_of(df, name).simpleString() == "string" for name in columns
    )


def count_texts(
    df: DataFrame, requests: Sequence[Counts], way: Callable[..., DataFrame | None]
) -> DataFrame | None:
    """Count the values of columns of text, without nulls.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    requests : list of Counts
        Without separators.
    way : callable
        A function of :mod:`~bigdl.friesian.feature.pipeline.scans`.

    Returns
    -------
    pyspark.sql.DataFrame or None
        Columns ``source`` (int), the place of the request, ``value`` and ``count``; values that
        occur too rarely are left out.  None if the way is none for this DataFrame.
    """
    from pyspark.sql import functions as F

    def count(batch: Batch) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for place, request in enumerate(requests):
            counts = tally(request, batch)
            places = pa.repeat(pa.scalar(place, pa.int32()), len(counts))
            yield from counts.add_column(0, "source", places).to_batches()

    names = dict.fromkeys(name for request in requests for name in request.columns)
    found = way(df.select(*map(col, names)), count, "source int, value string, count bigint")
    if found is None:
        return None
    found = found.groupBy("source", "value").agg(F.sum("count").alias("count"))
    limits = F.lit(True)
    for place, request in enumerate(requests):
        if request.at_least > 1:
            limits = limits & ((F.col("source") != place) | (F.col("count") >= request.at_least))
    return found.filter(limits)
