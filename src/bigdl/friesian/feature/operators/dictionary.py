"""Dictionaries: keys with their values, as a frame to join or as bytes for Arrow functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.friesian.feature.operators.columns import col, is_fractional, type_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

__all__ = ["DRIVER_KEYS", "Dictionary", "Shipped", "shared"]

# Keys that are collected, which is some 30 MB of short strings.  In a Python worker they take about
# ten times as much.
DRIVER_KEYS = 1_000_000


class Dictionary:
    """Keys with their values.

    Rows with a null in either, or NaN as the key, are left out; of the rows of one key the one with
    the smallest value counts.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    key, value : str
        Names of its columns.
    """

    def __init__(self, df: DataFrame, key: str, value: str):
        self.df, self.key, self.value = df, key, value
        self._tables: dict[str, pa.Table | None] = {}
        self._frames: dict[str, DataFrame] = {}
        self._shipped: dict[str, Shipped] = {}

    @property
    def key_type(self) -> DataType:
        return type_of(self.df, self.key)

    @property
    def value_type(self) -> DataType:
        return type_of(self.df, self.value)

    def entries(self, kind: str) -> DataFrame:
        """Columns ``key``, cast to a type, and ``value``, with every key once."""
        from pyspark.sql import functions as F

        table = self._table(kind)
        if table is None:
            return self.joined(kind)
        if kind not in self._frames:
            schema = self._pairs(kind).schema
            self._frames[kind] = self.df.sparkSession.createDataFrame(table, schema)
        return F.broadcast(self._frames[kind])

    def shipped(self, kind: str, limited: bool = True) -> Shipped | None:
        """What an Arrow function needs, or None if there are more than ``DRIVER_KEYS`` keys."""
        if kind not in self._shipped:
            table = self._table(kind)
            if table is None and limited:
                return None
            table = _unique(self._pairs(kind).toArrow()) if table is None else table
            self._shipped[kind] = Shipped(table, self.df.sparkSession)
        return self._shipped[kind]

    def joined(self, kind: str) -> DataFrame:
        """As :meth:`entries`, with nothing collected or broadcast."""
        from pyspark.sql import functions as F

        return self._pairs(kind).groupBy("key").agg(F.min("value").alias("value"))

    def largest(self) -> int:
        """The largest value, 0 if there is none."""
        from pyspark.sql import functions as F

        return self.df.agg(F.max(col(self.value))).first()[0] or 0

    def _pairs(self, kind: str) -> DataFrame:
        from pyspark.sql import functions as F

        pairs = self.df.select(
            col(self.key).try_cast(kind).alias("key"), col(self.value).alias("value")
        )
        pairs = pairs.filter(F.col("key").isNotNull() & F.col("value").isNotNull())
        if is_fractional(type_of(pairs, "key")):
            pairs = pairs.filter(~F.isnan("key"))
        return pairs

    def _table(self, kind: str) -> pa.Table | None:
        """The entries, sorted by key, or None if there are too many to collect."""
        if kind not in self._tables:
            table = self._pairs(kind).limit(DRIVER_KEYS + 1).toArrow()
            self._tables[kind] = _unique(table) if table.num_rows <= DRIVER_KEYS else None
        return self._tables[kind]


def _unique(pairs: pa.Table) -> pa.Table:
    """Pairs sorted by key, of each key the one with the smallest value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pairs = pairs.sort_by([("key", "ascending"), ("value", "ascending")]).combine_chunks()
    if pairs.num_rows < 2:
        return pairs
    keys = pairs["key"]
    is_new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return pairs.filter(pa.concat_arrays([pa.array([True]), is_new.combine_chunks()]))


class Shipped:
    """A dictionary in a worker: sent there once, unpacked once by each Python process."""

    def __init__(self, table: pa.Table, spark: Any):
        import pyarrow as pa

        self.key_type = table.schema.field("key").type
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self._data = shared(sink.getvalue().to_pybytes(), spark)

    def find(self, keys: pa.Array) -> pa.Array:
        """The value of every key; null where there is none."""
        import pyarrow as pa

        places, values = self._unpacked()
        codes = keys.cast(self.key_type).dictionary_encode()
        return values.take(pa.array(places(codes.dictionary)).take(codes.indices))

    def _unpacked(self) -> tuple[Callable, pa.Array]:
        if not hasattr(self._data, "_bigdl_unpacked"):  # lives as long as Spark keeps the bytes
            self._data._bigdl_unpacked = _unpack(self._data.value)
        return self._data._bigdl_unpacked


def shared(value: Any, spark: Any) -> Any:
    """A broadcast: Spark sends the value to each worker once, whose process unpacks it once."""
    context = getattr(spark, "_sc", None)
    # Spark Connect has no broadcasts: there it travels with the function.
    return _Carried(value) if context is None else context.broadcast(value)


class _Carried:
    """What is in the place of a broadcast."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self):
        return _Carried, (self.value,)


def _unpack(data: bytes) -> tuple[Callable, pa.Array]:
    """A function from keys to their places, and the values at the places."""
    import pyarrow as pa

    table = pa.ipc.open_stream(data).read_all()
    keys, values = table["key"], table["value"].combine_chunks()
    if pa.types.is_integer(keys.type):
        return _places_by_search(keys.to_numpy()), values
    keys = keys.to_pylist()
    return _places_by_hash(dict(zip(keys, range(len(keys)), strict=True))), values


def _places_by_search(sorted_keys: np.ndarray) -> Callable:
    import numpy as np

    def places(keys: pa.Array) -> np.ma.MaskedArray:
        wanted = keys.to_numpy(zero_copy_only=False)
        found = np.searchsorted(sorted_keys, wanted)
        if not len(sorted_keys):
            return np.ma.masked_all(len(wanted), np.int64)
        there = sorted_keys[np.minimum(found, len(sorted_keys) - 1)] == wanted
        return np.ma.MaskedArray(found, mask=~there)

    return places


def _places_by_hash(table: dict) -> Callable:
    import pyarrow as pa

    def places(keys: pa.Array) -> pa.Array:
        return pa.array([table.get(key) for key in keys.to_pylist()], pa.int64())

    return places
