"""Values replaced by what a table says about them: numbers of a vocabulary, categories of items.

Single values are joined.  Up to ``DRIVER_KEYS`` keys the table is made unique on the driver and
broadcast.  Values in arrays go through Arrow batches, with one look-up for each distinct value of a
batch, since a join would have to take the arrays apart and put them together again.
``benchmarks/friesian_feature.py`` measures both for single values: the join took 0.4 to 1.3 times
the CPU time of Arrow, and less in most cases, with vocabularies of 1,000 to a million strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.columns import (
    col,
    kind_of,
    replace,
    temporary,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

__all__ = [
    "DRIVER_KEYS",
    "Dictionary",
    "check_single",
    "encode",
    "encode_tokens",
    "numbered",
    "shared",
    "value_features",
]

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
    def key_type(self) -> str:
        return kind_of(self.df, self.key)

    @property
    def value_type(self) -> str:
        return kind_of(self.df, self.value)

    def entries(self, kind: str) -> DataFrame:
        """Columns ``key``, cast to a type, and ``value``, with every key once."""

        table = self._table(kind)
        if table is None:
            return self.joined(kind)
        if kind not in self._frames:
            schema = self._pairs(kind).schema
            self._frames[kind] = self.df.sparkSession.createDataFrame(table, schema)
        return F.broadcast(self._frames[kind])

    def shipped(self, kind: str, limited: bool = True) -> Shipped | None:
        """Return the entries for an Arrow function, or None if there are too many keys."""
        if kind not in self._shipped:
            table = self._table(kind)
            if table is None and limited:
                return None
            table = _unique(self._pairs(kind).toArrow()) if table is None else table
            self._shipped[kind] = Shipped(table, self.df.sparkSession)
        return self._shipped[kind]

    def joined(self, kind: str) -> DataFrame:
        """As :meth:`entries`, with nothing collected or broadcast."""

        return self._pairs(kind).groupBy("key").agg(F.min("value").alias("value"))

    def largest(self) -> int:
        """The largest value, 0 if there is none."""

        row = cast("Row", self.df.agg(F.max(col(self.value))).first())
        return row[0] or 0

    def _pairs(self, kind: str) -> DataFrame:
        pairs = self.df.select(
            col(self.key).try_cast(kind).alias("key"), col(self.value).alias("value")
        )
        pairs = pairs.filter(F.col("key").isNotNull() & F.col("value").isNotNull())
        if kinds.is_fractional(kind_of(pairs, "key")):
            pairs = pairs.filter(~F.isnan("key"))
        return pairs

    def _table(self, kind: str) -> pa.Table | None:
        """The entries, sorted by key, or None if there are too many to collect."""
        if kind not in self._tables:
            table = self._pairs(kind).limit(DRIVER_KEYS + 1).toArrow()
            self._tables[kind] = _unique(table) if table.num_rows <= DRIVER_KEYS else None
        return self._tables[kind]


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


def numbered(spark: SparkSession, vocabulary: pa.Table) -> _Learned:
    """Return the dictionary of a vocabulary, the values of which are numbered by their places."""

    numbers = pa.array(range(1, len(vocabulary) + 1), pa.int32())
    entries = pa.table({"key": vocabulary["value"], "value": numbers})
    entries = entries.sort_by("key").combine_chunks()
    kind = kinds.of_arrow(entries["key"].type)
    return _Learned(spark.createDataFrame(entries, f"key {kind}, value int"), entries)


def _unique(pairs: pa.Table) -> pa.Table:
    """Pairs sorted by key, of each key the one with the smallest value."""

    pairs = pairs.sort_by([("key", "ascending"), ("value", "ascending")]).combine_chunks()
    if pairs.num_rows < 2:
        return pairs
    keys = pairs["key"]
    is_new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return pairs.filter(pa.concat_arrays([pa.array([True]), is_new.combine_chunks()]))


class Shipped:
    """A dictionary in a worker: sent there once, unpacked once by each Python process."""

    def __init__(self, table: pa.Table, spark: Any):
        self.key_type = table.schema.field("key").type
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self._data = shared(sink.getvalue().to_pybytes(), spark)

    def find(self, keys: pa.Array) -> pa.Array:
        """The value of every key; null where there is none."""

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
    """A value that travels with a function, in the place of a broadcast."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self):
        return _Carried, (self.value,)


def _unpack(data: bytes) -> tuple[Callable, pa.Array]:
    """A function from keys to their places, and the values at the places."""

    table = pa.ipc.open_stream(data).read_all()
    keys, values = table["key"], table["value"].combine_chunks()
    if pa.types.is_integer(keys.type):
        return _places_by_search(keys.to_numpy()), values
    keys = keys.to_pylist()
    return _places_by_hash(dict(zip(keys, range(len(keys)), strict=True))), values


def _places_by_search(sorted_keys: np.ndarray) -> Callable:

    def places(keys: pa.Array) -> np.ma.MaskedArray:
        wanted = keys.to_numpy(zero_copy_only=False)
        found = np.searchsorted(sorted_keys, wanted)
        if not len(sorted_keys):
            return np.ma.masked_all(len(wanted), np.int64)
        there = sorted_keys[np.minimum(found, len(sorted_keys) - 1)] == wanted
        return np.ma.MaskedArray(found, mask=~there)

    return places


def _places_by_hash(table: dict) -> Callable:

    def places(keys: pa.Array) -> pa.Array:
        return pa.array([table.get(key) for key in keys.to_pylist()], pa.int64())

    return places


# -- look-ups --------------------------------------------------------------------------------------


def _meeting_type(kind: str, key_type: str) -> str:
    """The type in which values and keys are equal if they mean the same."""
    if kind == key_type or kinds.is_text(key_type):
        return key_type
    if kinds.is_integral(kind) and kinds.is_integral(key_type):
        return "bigint"
    if kinds.is_number(kind) and kinds.is_number(key_type):
        return "double"
    return key_type


def check_single(name: str, kind: str) -> None:
    """Check that the cells of a column are single values."""
    if not kinds.is_atomic(kind):
        raise UsageError(
            f"The column {name} of type {kind} cannot be encoded: its cells should "
            "be single values, or with do_split their text; explode it, or use add_value_features"
        )


def encode(
    df: DataFrame, dictionaries: Mapping[str, Dictionary], broadcast: bool, oov_buckets: int = 0
) -> DataFrame:
    """Replace single values of columns; a value without an entry becomes null.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    dictionaries : dict of str to Dictionary
        By column.
    broadcast : bool
        False for joins that shuffle, unless Spark knows better.
    oov_buckets : int, default 0
        So many numbers behind the largest one are given to values without an entry, by their hash.
    """

    for name, dictionary in dictionaries.items():
        if not oov_buckets:
            df = _join(df, name, dictionary, broadcast)
            continue
        source = temporary(df, "source")
        found = _join(df.withColumn(source, col(name)), name, dictionary, broadcast)
        bucket = _bucket(col(source), dictionary.largest() + 1, oov_buckets)
        df = replace(found, {name: F.coalesce(col(name), bucket)}).drop(source)
    return df


def _bucket(value: Column, first: int, buckets: int) -> Column:
    """A number from `first` on for a value that is not missing."""

    number = F.pmod(F.xxhash64(value.cast("string")), F.lit(buckets)) + first
    return F.when(value.isNotNull(), number.cast("int"))


def _join(df: DataFrame, name: str, dictionary: Dictionary, broadcast: bool) -> DataFrame:
    kind = _meeting_type(kind_of(df, name), dictionary.key_type)
    key, value = temporary(df, "key"), temporary(df, "value")
    entries = dictionary.entries(kind) if broadcast else dictionary.joined(kind)
    entries = entries.withColumnsRenamed({"key": key, "value": value})
    joined = df.join(entries, col(name).try_cast(kind) == col(key), "left")
    return replace(joined, {name: col(value)}).drop(key, value)


def encode_tokens(
    df: DataFrame,
    dictionaries: Mapping[str, Dictionary],
    separator: str,
    broadcast: bool,
    sort: bool,
    smallest: bool,
) -> DataFrame:
    """Replace cells of several values by arrays of numbers, in the order of the values.

    Values without an entry are left out; a cell with none that has one becomes null.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    dictionaries : dict of str to Dictionary
    separator : str
        Regular expression.
    broadcast : bool
        False for joins, whatever the size.
    sort : bool
        Order the numbers.
    smallest : bool
        Only the smallest number of each cell.
    """

    for name, dictionary in dictionaries.items():
        kind = _meeting_type("string", dictionary.key_type)
        shipped = dictionary.shipped(kind) if broadcast else None
        if shipped is None:
            df = _join_tokens(df, name, dictionary, kind, separator)
        else:
            tokens = F.split(col(name).cast("string"), separator)
            function = _arrow_function(_Known(shipped), f"array<{dictionary.value_type}>")
            df = replace(df, {name: function(tokens.try_cast(f"array<{kind}>"))})
        if smallest:
            df = replace(df, {name: F.array_min(col(name))})
        elif sort:
            df = replace(df, {name: F.sort_array(col(name))})
    return df


def _join_tokens(
    df: DataFrame, name: str, dictionary: Dictionary, kind: str, separator: str
) -> DataFrame:
    """Each different cell is split and joined once, then the cells are joined with the rows."""

    cells = df.select(col(name).alias("cell")).dropna().distinct()
    tokens = F.split(F.col("cell").cast("string"), separator)
    rows = cells.select("cell", F.posexplode(tokens).alias("place", "token"))
    entries = dictionary.joined(kind)
    found = rows.join(entries, F.col("token").try_cast(kind) == F.col("key"))
    both = F.sort_array(F.collect_list(F.struct("place", "value")))
    cell, numbers = temporary(df, "cell"), temporary(df, "numbers")
    encoded = found.groupBy(F.col("cell").alias(cell)).agg(both["value"].alias(numbers))
    joined = df.join(encoded, col(name) == col(cell), "left")
    return replace(joined, {name: col(numbers)}).drop(cell, numbers)


def value_features(
    df: DataFrame, column: str, output: str, dictionary: Dictionary, default: Any
) -> DataFrame:
    """A column of what a dictionary says about the values of another, or of its nested arrays.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    column, output : str
        They may be the same.
    dictionary : Dictionary
    default : object
        For values that it does not have.
    """

    depth, kind, wanted = 0, kind_of(df, column), dictionary.value_type
    while kinds.is_array(kind):
        depth, kind, wanted = depth + 1, kinds.element_of(kind), f"array<{wanted}>"
    if not depth:
        source = temporary(df, "source")
        found = _join(df.withColumn(source, col(column)), source, dictionary, True)
        value = F.coalesce(col(source), F.lit(default).cast(wanted))
        return replace(found, {output: value}).drop(source)
    meeting = _meeting_type(kind, dictionary.key_type)
    shipped = cast("Shipped", dictionary.shipped(meeting, limited=False))
    function = _arrow_function(_Values(shipped, depth, default), wanted)
    nested = "array<" * depth + meeting + ">" * depth
    return replace(df, {output: function(col(column).try_cast(nested))})


def _arrow_function(function: Callable, kind: str) -> Callable:
    from pyspark.sql.functions import arrow_udf

    def apply(values):
        return function(values)

    return arrow_udf(apply, kind)  # type: ignore[call-overload]  # pyspark's stubs lack a default


class _Values:
    """The values of keys, which may be in nested lists; a default for unknown ones."""

    def __init__(self, shipped: Shipped, depth: int = 0, default: Any = None):
        self.shipped, self.depth, self.default = shipped, depth, default

    def __call__(self, keys: pa.Array) -> pa.Array:
        return self._nested(keys, self.depth)

    def _nested(self, keys: pa.Array, depth: int) -> pa.Array:
        if not depth:
            found = self.shipped.find(keys)
            return found if self.default is None else found.fill_null(self.default)
        inner = self._nested(keys.flatten(), depth - 1)
        return pa.ListArray.from_arrays(_offsets(keys), inner, mask=keys.is_null())


class _Known:
    """The values of the keys in a list, without those of unknown ones; null if there are none."""

    def __init__(self, shipped: Shipped):
        self.shipped = shipped

    def __call__(self, keys: pa.Array) -> pa.Array:
        found = self.shipped.find(keys.flatten())
        known = np.concatenate([[0], np.cumsum(found.is_valid().to_numpy(zero_copy_only=False))])
        offsets = known[_offsets(keys).to_numpy()].astype(np.int32)
        empty = pa.array(offsets[1:] == offsets[:-1])
        return pa.ListArray.from_arrays(pa.array(offsets), found.drop_null(), mask=empty)


def _offsets(lists: pa.Array) -> pa.Array:
    """Where the lists begin in ``lists.flatten()``, which has nothing of null lists."""

    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
