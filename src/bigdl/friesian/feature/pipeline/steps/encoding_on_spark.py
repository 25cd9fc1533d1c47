"""Vocabularies on Spark: joined, or for many columns looked up in Arrow batches.

A join for each of 26 columns took 27 to 31 seconds of CPU time for a million rows, one way through
Arrow for all of them 11 to 15; of 4 columns the joins took less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.columns import col, replace
from bigdl.friesian.feature.operators.dictionary import DRIVER_KEYS, Dictionary
from bigdl.friesian.feature.pipeline import kinds

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from bigdl.friesian.feature.operators.dictionary import Shipped

__all__ = ["JOINED_COLUMNS", "encoded", "learned"]

JOINED_COLUMNS = 6


class _Learned(Dictionary):
    """A dictionary whose entries are on the driver already, sorted by key."""

    def __init__(self, df: DataFrame, entries: pa.Table):
        super().__init__(df, "key", "value")
        self._entries, self._kind = entries, kinds.of_arrow(entries["key"].type)

    def __len__(self) -> int:
        return len(self._entries)

    def largest(self) -> int:
        return len(self)

    def _table(self, kind: str) -> pa.Table | None:
        if kind == self._kind and len(self) <= DRIVER_KEYS:
            return self._entries
        return super()._table(kind)


def learned(spark: SparkSession, vocabulary: pa.Table) -> _Learned:
    """The dictionary of a vocabulary, the values of which are numbered by their places."""
    import pyarrow as pa

    numbers = pa.array(range(1, len(vocabulary) + 1), pa.int32())
    entries = pa.table({"key": vocabulary["value"], "value": numbers})
    entries = entries.sort_by("key").combine_chunks()
    kind = kinds.of_arrow(entries["key"].type)
    return _Learned(spark.createDataFrame(entries, f"key {kind}, value int"), entries)


def encoded(
    df: DataFrame, dictionaries: Mapping[str, _Learned], oov_buckets: int
) -> tuple[DataFrame, dict[str, _Learned]]:
    """Encode the columns whose vocabularies fit into Python workers, by one way through Arrow.

    Returns
    -------
    df : pyspark.sql.DataFrame
    rest : dict of str to Dictionary
        Of the columns that are left.
    """
    functions, rest = {}, {}
    for name, dictionary in dictionaries.items():
        shipped = dictionary.shipped(dictionary.key_type.simpleString())
        if shipped is None:
            rest[name] = dictionary
        else:
            functions[name] = _look_up(shipped, len(dictionary) + 1, oov_buckets)(col(name))
    return replace(df, functions), rest


def _look_up(shipped: Shipped, first: int, oov_buckets: int) -> Callable:
    from pyspark.sql.functions import arrow_udf

    # without annotations: those of this module are text, which arrow_udf does not read
    def apply(values):
        from bigdl.friesian.feature.pipeline.steps.encoding import with_buckets

        return with_buckets(values, shipped.find(values), first, oov_buckets)

    return arrow_udf(apply, "int")
