"""Vocabularies on Spark, as tables to join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigdl.friesian.feature.operators.dictionary import DRIVER_KEYS, Dictionary
from bigdl.friesian.feature.pipeline import kinds

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["learned"]


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
