"""Values replaced by what a table says about them: numbers of a vocabulary, codes of categories.

Single values are joined.  Up to ``DRIVER_KEYS`` keys the table is made unique on the driver and
broadcast.  Values in arrays go through Arrow batches, with one look-up for each distinct value of a
batch, since a join would have to take the arrays apart and put them together again.
``benchmarks/friesian_feature.py`` measures both for single values: the join took 0.4 to 1.3 times
the CPU time of Arrow, and less in most cases, with vocabularies of 1,000 to a million strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.hashing import fast_bucket
from bigdl.friesian.ops.spark import (
    F,
    all_of,
    arrow_function,
    col,
    is_missing,
    kind_of,
    replace,
    shared,
    temporary,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

# Keys that are collected, which is some 30 MB of short strings.  In a Python worker they take about
# ten times as much.
DRIVER_KEYS = 1_000_000


class Vocabulary:
    """Different keys, and what each stands for.

    Parameters
    ----------
    keys : pyarrow.Array
    values : pyarrow.Array, optional
        Default: the numbers from 1 on.
    """

    def __init__(self, keys: pa.Array, values: pa.Array | None = None):
        self.keys = keys
        self.values = pa.array(range(1, len(keys) + 1), pa.int32()) if values is None else values

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def by_key(self) -> dict[Any, Any]:
        """The values by their keys."""
        return dict(zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True))

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The places of whole numbers by their values, and these in order."""
        numbers = self.keys.to_numpy(zero_copy_only=False)
        places = np.argsort(numbers, kind="stable")
        return places, numbers[places]

    def find(self, keys: pa.Array) -> pa.Array:
        """The values of keys, null for a null or an unknown one."""
        if len(self) and pa.types.is_integer(keys.type):
            places, ordered = self._order
            wanted = keys.fill_null(0).to_numpy(zero_copy_only=False)
            at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            is_unknown = (ordered[at] != wanted) | keys.is_null().to_numpy(zero_copy_only=False)
            return self.values.take(pa.array(places[at], mask=is_unknown))
        if len(self) < 4 * len(keys):  # it builds a table of its own of the whole vocabulary
            return self.values.take(pc.index_in(keys, value_set=self.keys))
        return pa.array(map(self.by_key.get, keys.to_pylist()), self.values.type)


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
    def value_type(self) -> str:
        return kind_of(self.df, self.value)

    def meeting_type(self, kind: str) -> str:
        """The type in which values of a kind and keys are equal if they mean the same."""
        key = kind_of(self.df, self.key)
        if kind != key and kinds.is_integral(kind) and kinds.is_integral(key):
            return "bigint"
        if kind != key and kinds.is_number(kind) and kinds.is_number(key):
            return "double"
        return key

    def look_up(
        self, df: DataFrame, name: str, output: str, default: Column, broadcast: bool = True
    ) -> LookUp:
        """Return the look-up of the values of a column, which are compared in a type that fits."""
        kind = self.meeting_type(kind_of(df, name))
        entries = self.entries(kind) if broadcast else self.joined(kind)
        return LookUp(entries, {"key": col(name).try_cast(kind)}, {output: ("value", default)})

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
        is_known = ~is_missing(F.col("key"), kind_of(pairs, "key"))
        return pairs.filter(is_known & F.col("value").isNotNull())

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
        self._entries = entries
        if len(entries) <= DRIVER_KEYS:
            self._tables[kinds.of_arrow(entries["key"].type)] = entries

    def largest(self) -> int:
        return len(self._entries)


def numbered(spark: SparkSession, vocabulary: pa.Table) -> Dictionary:
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
        if not hasattr(self._data, "_bigdl_unpacked"):  # lives as long as Spark keeps the bytes
            table = pa.ipc.open_stream(self._data.value).read_all()
            columns = (column.combine_chunks() for column in table.columns)
            self._data._bigdl_unpacked = Vocabulary(*columns)
        codes = keys.cast(self.key_type).dictionary_encode()
        return self._data._bigdl_unpacked.find(codes.dictionary).take(codes.indices)


# -- joins -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookUp:
    """A table, and the columns that rows take out of it.

    Attributes
    ----------
    table : pyspark.sql.DataFrame
        One row for each combination of keys.
    at : dict of str to Column
        By the columns of its keys what the rows have in their place.
    outputs : dict of str to (str, Column)
        By the name of the result the column of the table, and what stands in for a combination that
        it has not.
    """

    table: DataFrame
    at: Mapping[str, Column]
    outputs: Mapping[str, tuple[str, Column]]


def join(
    df: DataFrame, look_ups: Sequence[LookUp], others: Mapping[str, Column | None] | None = None
) -> DataFrame:
    """`df` with what some tables say about its rows.

    With `others` there are other columns too: they are in its order, and None in it stands for a
    result of the look-ups.  No result takes the place of a column before all are there, since the
    column may be a key of this or another table.
    """
    rows, results = df, dict(others or {})
    gone: list[str] = []
    for i, each in enumerate(look_ups):
        if not each.outputs:
            continue
        wanted = [*each.at, *dict.fromkeys(column for column, _ in each.outputs.values())]
        hidden = {name: temporary(rows, f"found{i}_{j}") for j, name in enumerate(wanted)}
        table = each.table.select(*(col(name).alias(other) for name, other in hidden.items()))
        same = all_of(value == col(hidden[name]) for name, value in each.at.items())
        rows = rows.join(table, same, "left")
        for output, (column, default) in each.outputs.items():
            results[output] = F.coalesce(col(hidden[column]), default)
        gone += hidden.values()
    return replace(rows, cast("dict[str, Column]", results)).drop(*gone)


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
    look_ups = []
    for name, dictionary in dictionaries.items():
        default = F.lit(None)
        if oov_buckets:
            number = fast_bucket(col(name), oov_buckets) + (dictionary.largest() + 1)
            default = F.when(col(name).isNotNull(), number)
        look_ups.append(dictionary.look_up(df, name, name, default, broadcast))
    return join(df, look_ups)


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
        kind = dictionary.meeting_type("string")
        shipped = dictionary.shipped(kind) if broadcast else None
        if shipped is None:
            df = _join_tokens(df, name, dictionary, kind, separator)
        else:
            tokens = F.split(col(name).cast("string"), separator)
            known = partial(_known, shipped)
            function = arrow_function(known, f"array<{dictionary.value_type}>")
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
    known = rows.join(entries, F.col("token").try_cast(kind) == F.col("key"))
    both = F.sort_array(F.collect_list(F.struct("place", "value")))
    encoded = known.groupBy("cell").agg(both["value"].alias("numbers"))
    return join(df, [LookUp(encoded, {"cell": col(name)}, {name: ("numbers", F.lit(None))})])


def value_features(
    df: DataFrame, outputs: Mapping[str, str], dictionary: Dictionary, default: Any
) -> DataFrame:
    """Columns of what a dictionary says about the values of others, or of their nested arrays.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    outputs : dict of str to str
        By the column of values the result; they may be the same.
    dictionary : Dictionary
    default : object
        For values that it does not have.
    """
    wanted = dictionary.value_type
    look_ups: list[LookUp] = []
    results: dict[str, Column | None] = dict.fromkeys(outputs.values())
    for name, output in outputs.items():
        inner, depth = kinds.innermost(kind_of(df, name))
        if not depth:
            known = F.lit(default).cast(wanted)
            look_ups.append(dictionary.look_up(df, name, output, known))
            continue
        kind = dictionary.meeting_type(inner)
        shipped = cast("Shipped", dictionary.shipped(kind, limited=False))
        begin, end = "array<" * depth, ">" * depth
        values = partial(_values, shipped, depth, default)
        function = arrow_function(values, f"{begin}{wanted}{end}")
        results[output] = function(col(name).try_cast(f"{begin}{kind}{end}"))
    return join(df, look_ups, results)


def _values(shipped: Shipped, depth: int, default: Any, keys: pa.Array) -> pa.Array:
    """The values of keys, which may be in nested lists; a default for unknown ones."""
    if not depth:
        values = shipped.find(keys)
        return values if default is None else values.fill_null(default)
    inner = _values(shipped, depth - 1, default, keys.flatten())
    return pa.ListArray.from_arrays(_offsets(keys), inner, mask=keys.is_null())


def _known(shipped: Shipped, keys: pa.Array) -> pa.Array:
    """The values of the keys in a list, without those of unknown ones; null if there are none."""
    values = shipped.find(keys.flatten())
    known = np.concatenate([[0], np.cumsum(values.is_valid().to_numpy(zero_copy_only=False))])
    offsets = known[_offsets(keys).to_numpy()].astype(np.int32)
    empty = pa.array(offsets[1:] == offsets[:-1])
    return pa.ListArray.from_arrays(pa.array(offsets), values.drop_null(), mask=empty)


def _offsets(lists: pa.Array) -> pa.Array:
    """Where the lists begin in ``lists.flatten()``, which has nothing of null lists."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
