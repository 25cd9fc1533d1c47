"""Vocabularies of categories, and look-ups that replace values by ids or other values.

Learning turns the rows into (vocabulary, value) pairs by one ``explode``; one aggregation counts
them. The ids of a vocabulary depend only on the values and their counts. Few values are ranked on
the driver, many by Spark, with one task per vocabulary.

Single values are joined. A table of up to ``DRIVER_KEYS`` keys is made unique on the driver and
broadcast. Values in arrays go through Arrow batches, with one look-up per distinct value of a
batch, because a join would have to explode and collect the arrays again.
``benchmarks/friesian_feature.py`` measures both for single values. The join took 0.4 to 1.3 times
the CPU time of Arrow, and less in most cases, with vocabularies of 1,000 to a million strings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.batches import Counts, list_lengths, make_lists, to_strings
from bigdl.friesian.ops.column_types import Field, Schema, check_types
from bigdl.friesian.ops.hashing import FAST, buckets, fast_bucket
from bigdl.friesian.ops.operator import (
    Function,
    Operator,
    OutputColumn,
    State,
    Statistic,
    register_operator,
)
from bigdl.friesian.ops.spark import F, check_string, col, dtype_of, replace, schema_of
from bigdl.orca.cluster.versions import computed, frame_of_arrow, to_arrow, try_cast
from bigdl.orca.data.transformer.encoding import VocabularySource, sources_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bigdl.friesian.ops.spark import BroadcastValue

# Maximum number of keys to collect: about 30 MB of short strings, and about ten times as much in a
# Python worker.
DRIVER_KEYS = 1_000_000


class Vocabulary:
    """Mapping from distinct keys to values, by default to ids from 1.

    Parameters
    ----------
    keys : pyarrow.Array
    values : pyarrow.Array, optional
        Default: the integers from 1.
    """

    def __init__(self, keys: pa.Array, values: pa.Array | None = None):
        self.keys = keys
        self.values = pa.array(range(1, len(keys) + 1), pa.int32()) if values is None else values

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def by_key(self) -> dict[Any, Any]:
        """Dict from keys to values."""
        return dict(zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True))

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices that sort the integer keys in ascending order, and the sorted keys."""
        numbers = self.keys.to_numpy(zero_copy_only=False)
        positions = np.argsort(numbers, kind="stable")
        return positions, numbers[positions]

    def find(self, keys: pa.Array) -> pa.Array:
        """Return the value of each key; null keys and unknown keys become null."""
        if len(self) and pa.types.is_integer(keys.type):
            positions, ordered = self._order
            wanted = keys.fill_null(0).to_numpy(zero_copy_only=False)
            at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
            is_unknown = (ordered[at] != wanted) | keys.is_null().to_numpy(zero_copy_only=False)
            return self.values.take(pa.array(positions[at], mask=is_unknown))
        if len(self) < 4 * len(keys):  # index_in hashes the whole vocabulary on each call
            return self.values.take(pc.index_in(keys, value_set=self.keys))
        return pa.array(map(self.by_key.get, keys.to_pylist()), self.values.type)

    def find_repeated(self, keys: pa.Array) -> pa.Array:
        """Return the values of keys, cast to the vocabulary's type; find each distinct key once."""
        codes = keys.cast(self.keys.type).dictionary_encode()
        return self.find(codes.dictionary).take(codes.indices)


class Dictionary:
    """Spark table of keys and values, with cached local copies per key type.

    Rows with a null key or value, or NaN as the key, are left out. Of several rows with one key,
    the smallest value counts.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    key, value : str
        Names of its columns.
    entries : pyarrow.Table, optional
        Its rows, if they are already on the driver, sorted by key, with values from 1.
    """

    def __init__(self, df: DataFrame, key: str, value: str, entries: pa.Table | None = None):
        self.df, self.key, self.value, self._entries = df, key, value, entries
        self._tables: dict[str, pa.Table | None] = {}
        if entries is not None and len(entries) <= DRIVER_KEYS:
            self._tables[column_types.of_arrow(entries["key"].type)] = entries
        self._frames: dict[str, DataFrame] = {}
        self._shipped: dict[str, Any] = {}

    @property
    def value_type(self) -> str:
        return dtype_of(self.df, self.value)

    def common_type(self, dtype: str) -> str:
        """Return the type in which values of type `dtype` can be compared with the keys."""
        key = dtype_of(self.df, self.key)
        if dtype != key and column_types.is_integral(dtype) and column_types.is_integral(key):
            return "bigint"
        if dtype != key and column_types.is_number(dtype) and column_types.is_number(key):
            return "double"
        return key

    def look_up(
        self, df: DataFrame, name: str, output: str, default: Column, broadcast: bool = True
    ) -> LookUp:
        """Return a LookUp of a column's values, cast to a type that fits the dictionary's keys."""
        dtype = self.common_type(dtype_of(df, name))
        entries = self.entries(dtype) if broadcast else self.lazy_entries(dtype)
        return LookUp(entries, {"key": try_cast(col(name), dtype)}, {output: ("value", default)})

    def entries(self, dtype: str) -> DataFrame:
        """Return a DataFrame of each distinct ``key``, cast to type `dtype`, and its ``value``."""
        table = self._table(dtype)
        if table is None:
            return self.lazy_entries(dtype)
        if dtype not in self._frames:
            schema = self._pairs(dtype).schema
            self._frames[dtype] = frame_of_arrow(self.df.sparkSession, table, schema)
        return F.broadcast(self._frames[dtype])

    @spark.action
    def broadcast_entries(self, dtype: str, limited: bool = True) -> BroadcastValue | None:
        """Broadcast the entries as a :class:`Vocabulary`; return None if there are too many."""
        if dtype not in self._shipped:
            table = self._table(dtype)
            if table is None and limited:
                return None
            table = _unique(to_arrow(self._pairs(dtype))) if table is None else table
            columns = (column.combine_chunks() for column in table.columns)
            self._shipped[dtype] = spark.broadcast_value(Vocabulary(*columns), self.df.sparkSession)
        return self._shipped[dtype]

    def lazy_entries(self, dtype: str) -> DataFrame:
        """Return :meth:`entries` as a lazy DataFrame, without collecting or broadcasting it."""
        return self._pairs(dtype).groupBy("key").agg(F.min("value").alias("value"))

    def largest(self) -> int:
        """Return the largest value, or 0 if the dictionary is empty."""
        if self._entries is not None:
            return len(self._entries)
        (largest,) = spark.aggregate_values(self.df, [F.max(col(self.value))])
        return largest or 0

    def _pairs(self, dtype: str) -> DataFrame:
        pairs = self.df.select(
            try_cast(col(self.key), dtype).alias("key"), col(self.value).alias("value")
        )
        is_known = ~spark.is_missing(F.col("key"), dtype_of(pairs, "key"))
        return pairs.filter(is_known & F.col("value").isNotNull())

    @spark.action
    def _table(self, dtype: str) -> pa.Table | None:
        """Collect the entries, sorted by key; return None if there are too many."""
        if dtype not in self._tables:
            table = to_arrow(self._pairs(dtype).limit(DRIVER_KEYS + 1))
            self._tables[dtype] = _unique(table) if table.num_rows <= DRIVER_KEYS else None
        return self._tables[dtype]


def numbered_dictionary(spark: SparkSession, vocabulary: pa.Table) -> Dictionary:
    """Return a Dictionary that maps the values of a vocabulary to ids from 1."""
    numbers = pa.array(range(1, len(vocabulary) + 1), pa.int32())
    entries = pa.table({"key": vocabulary["value"], "value": numbers})
    entries = entries.sort_by("key").combine_chunks()
    dtype = column_types.of_arrow(entries["key"].type)
    df = frame_of_arrow(spark, entries, f"key {dtype}, value int")
    return Dictionary(df, "key", "value", entries)


def _unique(pairs: pa.Table) -> pa.Table:
    """Sort key-value pairs by key; keep the smallest value of each key."""
    pairs = pairs.sort_by([("key", "ascending"), ("value", "ascending")]).combine_chunks()
    if pairs.num_rows < 2:
        return pairs
    keys = pairs["key"]  # group_by would separate 0.0 from -0.0
    is_new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return pairs.filter(pa.concat_arrays([pa.array([True]), is_new.combine_chunks()]))


# -- joins -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookUp:
    """Look-up table to join with rows, with its key expressions and output columns.

    Attributes
    ----------
    table : pyspark.sql.DataFrame
        One row for each combination of keys.
    at : dict of str to Column
        Key column of the table to the matching expression over the rows.
    outputs : dict of str to (str, Column)
        Output name to the table's column, and the default for combinations that the table lacks.
    """

    table: DataFrame
    at: Mapping[str, Column]
    outputs: Mapping[str, tuple[str, Column]]


def join(
    df: DataFrame, look_ups: Sequence[LookUp], others: Mapping[str, Column | None] | None = None
) -> DataFrame:
    """Left-join `df` with several look-up tables and add their outputs.

    `others` adds further columns. The result has the column order of `others`; None in it marks an
    output of a look-up. Outputs replace columns only after all joins, because a replaced column may
    be a key of another table.
    """
    rows, results = df, dict(others or {})
    hidden_names: list[str] = []
    for i, each in enumerate(look_ups):
        if not each.outputs:
            continue
        wanted = [*each.at, *dict.fromkeys(column for column, _ in each.outputs.values())]
        hidden = {name: spark.unused_name(rows, f"joined{i}_{j}") for j, name in enumerate(wanted)}
        table = each.table.select(*(col(name).alias(other) for name, other in hidden.items()))
        same = spark.all_of(value == col(hidden[name]) for name, value in each.at.items())
        rows = rows.join(table, same, "left")
        for output, (column, default) in each.outputs.items():
            results[output] = F.coalesce(col(hidden[column]), default)
        hidden_names += hidden.values()
    return replace(rows, cast("dict[str, Column]", results)).drop(*hidden_names)


def encode(
    df: DataFrame, dictionaries: Mapping[str, Dictionary], broadcast: bool, oov_buckets: int = 0
) -> DataFrame:
    """Replace single values of columns by ids; a value that the dictionary lacks becomes null.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    dictionaries : dict of str to Dictionary
        By column.
    broadcast : bool
        False for shuffle joins, unless Spark decides otherwise.
    oov_buckets : int, default 0
        Number of extra ids, after the largest one, for values without an entry. A hash selects the
        id.
    """
    look_ups = []
    for name, dictionary in dictionaries.items():
        default = F.lit(None)
        if oov_buckets:
            number = fast_bucket(col(name), oov_buckets) + (dictionary.largest() + 1)
            default = F.when(col(name).isNotNull(), number)
        look_ups.append(dictionary.look_up(df, name, name, default, broadcast))
    return join(df, look_ups)


def encode_cells(
    df: DataFrame,
    dictionaries: Mapping[str, Dictionary],
    broadcast: bool,
    separator: str | None,
    sort: bool,
    smallest: bool,
    oov_buckets: int = 0,
) -> DataFrame:
    """Replace cells by ids; a cell is an array, a string of several values, or a single value.

    The arguments are those of :func:`encode`, :func:`encode_tokens` and :func:`encode_lists`. With
    a `separator` of None, strings are single values.
    """
    lists = {n: each for n, each in dictionaries.items() if column_types.is_array(dtype_of(df, n))}
    others = {n: each for n, each in dictionaries.items() if n not in lists}
    if lists:
        df = encode_lists(df, lists, sort, smallest)
    if separator is None:
        return encode(df, others, broadcast, oov_buckets)
    return encode_tokens(df, others, separator, broadcast, sort, smallest)


def encode_tokens(
    df: DataFrame,
    dictionaries: Mapping[str, Dictionary],
    separator: str,
    broadcast: bool,
    sort: bool,
    smallest: bool,
) -> DataFrame:
    """Split strings at `separator`, and replace each string by an array of the ids of its values.

    Values without an entry are left out. A cell without any known value becomes null.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    dictionaries : dict of str to Dictionary
    separator : str
        Regular expression.
    broadcast : bool
        False for joins, whatever the size.
    sort : bool
        Sort the ids.
    smallest : bool
        Keep only the smallest id of each cell.
    """
    for name, dictionary in dictionaries.items():
        dtype = dictionary.common_type("string")
        broadcast_entries = dictionary.broadcast_entries(dtype) if broadcast else None
        if broadcast_entries is None:
            df = _join_tokens(df, name, dictionary, dtype, separator)
        else:
            tokens = F.split(col(name).cast("string"), separator)
            known = partial(_known_of, broadcast_entries)
            function = spark.arrow_function(known, f"array<{dictionary.value_type}>")
            df = replace(df, {name: function(try_cast(tokens, f"array<{dtype}>"))})
        if smallest:
            df = replace(df, {name: F.array_min(col(name))})
        elif sort:
            df = replace(df, {name: F.sort_array(col(name))})
    return df


def encode_lists(
    df: DataFrame, dictionaries: Mapping[str, Dictionary], sort: bool, smallest: bool
) -> DataFrame:
    """Replace the values in arrays by ids, in order; drop values that the dictionary lacks.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    dictionaries : dict of str to Dictionary
    sort : bool
        Sort the ids.
    smallest : bool
        Keep only the smallest id of each cell; null if there is none.
    """
    for name, dictionary in dictionaries.items():
        dtype = dictionary.common_type(column_types.cell_value_type(dtype_of(df, name)))
        broadcast_entries = cast(
            "BroadcastValue", dictionary.broadcast_entries(dtype, limited=False)
        )
        function = spark.arrow_function(
            partial(_known_in_lists_of, broadcast_entries), f"array<{dictionary.value_type}>"
        )
        df = replace(df, {name: function(try_cast(col(name), f"array<{dtype}>"))})
        if smallest:
            df = replace(df, {name: F.array_min(col(name))})
        elif sort:
            df = replace(df, {name: F.sort_array(col(name))})
    return df


def _join_tokens(
    df: DataFrame, name: str, dictionary: Dictionary, dtype: str, separator: str
) -> DataFrame:
    """Encode the tokens of strings with joins; each distinct string is split once."""
    cells = df.select(col(name).alias("cell")).dropna().distinct()
    tokens = F.split(F.col("cell").cast("string"), separator)
    rows = cells.select("cell", F.posexplode(tokens).alias("position", "token"))
    entries = dictionary.lazy_entries(dtype)
    known = rows.join(entries, try_cast(F.col("token"), dtype) == F.col("key"))
    both = F.sort_array(F.collect_list(F.struct("position", "value")))
    encoded = known.groupBy("cell").agg(both["value"].alias("numbers"))
    return join(df, [LookUp(encoded, {"cell": col(name)}, {name: ("numbers", F.lit(None))})])


def value_features(
    df: DataFrame, outputs: Mapping[str, str], dictionary: Dictionary, default: object
) -> DataFrame:
    """Add columns with the results of looking up values, or arrays of values, in a dictionary.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    outputs : dict of str to str
        Input column to output column; they may be the same.
    dictionary : Dictionary
    default : object
        Result for values without an entry.
    """
    wanted = dictionary.value_type
    look_ups: list[LookUp] = []
    results: dict[str, Column | None] = dict.fromkeys(outputs.values())
    for name, output in outputs.items():
        inner, depth = column_types.innermost(dtype_of(df, name))
        if not depth:
            known = F.lit(default).cast(wanted)
            look_ups.append(dictionary.look_up(df, name, output, known))
            continue
        dtype = dictionary.common_type(inner)
        broadcast_entries = cast(
            "BroadcastValue", dictionary.broadcast_entries(dtype, limited=False)
        )
        begin, end = "array<" * depth, ">" * depth
        values = partial(_values, broadcast_entries, depth, default)
        function = spark.arrow_function(values, f"{begin}{wanted}{end}")
        results[output] = function(try_cast(col(name), f"{begin}{dtype}{end}"))
    return join(df, look_ups, results)


def _values(
    broadcast_entries: BroadcastValue, depth: int, default: object, keys: pa.Array
) -> pa.Array:
    """Look up the keys in lists that are nested `depth` levels deep; unknown keys get `default`."""
    if not depth:
        values = broadcast_entries.value.find_repeated(keys)
        return values if default is None else values.fill_null(default)
    inner = _values(broadcast_entries, depth - 1, default, keys.flatten())
    return make_lists(list_lengths(keys), inner, keys.is_null())


def _known_of(broadcast_entries: BroadcastValue, keys: pa.Array) -> pa.Array:
    return _known(broadcast_entries.value, keys)


def _known(vocabulary: Vocabulary, keys: pa.Array) -> pa.Array:
    """Look up the known keys of each list; a list without a known key becomes null."""
    values = vocabulary.find_repeated(keys.flatten())
    rows = np.repeat(np.arange(len(keys)), list_lengths(keys))
    known = rows[values.is_valid().to_numpy(zero_copy_only=False)]
    counts = np.bincount(known, minlength=len(keys))
    return make_lists(counts, values.drop_null(), pa.array(counts == 0))


def _known_in_lists_of(broadcast_entries: BroadcastValue, keys: pa.Array) -> pa.Array:
    return _known_in_lists(broadcast_entries.value, keys)


def _known_in_lists(vocabulary: Vocabulary, keys: pa.Array) -> pa.Array:
    """Look up the known keys of each list; only a null list becomes null."""
    known = _known(vocabulary, keys)
    return make_lists(list_lengths(known), known.flatten(), keys.is_null())


# Maximum number of values to rank on the driver. A million short strings take about 30 MB.
DRIVER_VALUES = 2_000_000


def number_column(name: str) -> str:
    """Return the name of the id column: ``id``, or ``id_number`` if `name` is ``id``."""
    return "id_number" if name.lower() == "id" else "id"


@spark.action
def learn(
    df: DataFrame, sources: Sequence[VocabularySource], order_by_freq: bool, separator: str | None
) -> list[DataFrame]:
    """Learn vocabularies from columns.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    sources : list of VocabularySource
    order_by_freq : bool
        Order ids by falling count, and equal counts by value; otherwise by value.
    separator : str or None
        Regular expression between the values of a cell.

    Returns
    -------
    list of pyspark.sql.DataFrame
        Columns: the name of the source, and the ids (int) from 1, named by :func:`number_column`.
    """
    counted, fields = count_values(df, sources, separator)
    counted = counted.persist()
    try:
        rank = _ranked_on_driver if counted.count() <= DRIVER_VALUES else _ranked_by_spark
        frames = rank(counted, fields, order_by_freq)
    finally:
        counted.unpersist()
    return [
        frame.toDF(source.name, number_column(source.name))
        for frame, source in zip(frames, sources, strict=True)
    ]


@spark.action
def distinct_values(df: DataFrame, columns: list[str]) -> dict[str, list]:
    """Return the distinct values of columns, sorted, null last."""
    sources = [VocabularySource(name, (name,)) for name in columns]
    counted, fields = count_values(df, sources, None, nulls=True)
    distinct: dict[str, list] = {name: [] for name in columns}
    for row in counted.collect():
        distinct[columns[row["source"]]].append(row[fields[row["source"]]])
    return {
        name: sorted(values, key=lambda value: (value is None, value))
        for name, values in distinct.items()
    }


def count_values(
    df: DataFrame, sources: Sequence[VocabularySource], separator: str | None, nulls: bool = False
) -> tuple[DataFrame, list[str]]:
    """Count the values in the columns of each vocabulary, in one aggregation.

    Returns
    -------
    counted : pyspark.sql.DataFrame
        Columns ``source`` (int), ``value_<i>`` for each type that occurs, and ``count``. The value
        is in the column for the type of its source; the other value columns are null.
    fields : list of str
        Column ``value_<i>`` of each source.
    """
    of_sources = [_value_kind(df, source, separator) for source in sources]
    types = list(dict.fromkeys(of_sources))
    fields = [f"value_{types.index(dtype)}" for dtype in of_sources]
    are_lists = separator is not None or any(
        column_types.is_array(dtype_of(df, name)) for source in sources for name in source.columns
    )

    def pairs(i: int, name: str) -> Column:
        """Return the (source, value) pairs of a cell: a struct, or an array of structs."""
        cell, dtype = col(name), dtype_of(df, name)

        def typed(value: Column) -> Column:
            if not nulls:  # vocabularies do not contain NaN
                value = spark.without_nan(value, column_types.cell_value_type(dtype))
            return value.cast(of_sources[i])

        def pair(value: Column) -> Column:
            each = ((dtype, value if dtype == of_sources[i] else F.lit(None)) for dtype in types)
            fields = (cell.cast(dtype).alias(f"value_{j}") for j, (dtype, cell) in enumerate(each))
            return F.struct(F.lit(i).alias("source"), *fields)

        if not are_lists:
            return pair(typed(cell))
        # a null cell has no tokens; concat of a null array would be null
        if column_types.is_array(dtype):
            return F.transform(F.coalesce(cell, F.array().cast(dtype)), lambda v: pair(typed(v)))
        if separator is None:
            return F.array(pair(typed(cell)))
        none = F.array().cast("array<string>")
        return F.transform(F.coalesce(F.split(typed(cell), separator), none), pair)

    cells = [pairs(i, name) for i, source in enumerate(sources) for name in source.columns]
    every = F.concat(*cells) if are_lists else F.array(*cells)
    pair = spark.unused_name(df, "pair")
    values = [f"value_{i}" for i in range(len(types))]
    rows = df.select(F.explode(every).alias(pair)).select(f"{pair}.*")
    if not nulls:
        rows = rows.filter(reduce(lambda a, b: a | b, (F.col(v).isNotNull() for v in values)))
    counted = rows.groupBy("source", *values).agg(F.count("*").alias("count"))
    return keep_frequent(counted, (source.min_count for source in sources)), fields


@spark.action
def counts_of_sources(counted: DataFrame, fields: Sequence[str]) -> list[pa.Table]:
    """Collect a :func:`count_values` result as one table of ``value`` and ``count`` per source."""
    table = to_arrow(counted)
    parts = (table.filter(pc.equal(table["source"], i)) for i in range(len(fields)))
    return [
        part.select([field, "count"]).rename_columns(["value", "count"])
        for part, field in zip(parts, fields, strict=True)
    ]


def _ranked(counts: pa.Table, order_by_freq: bool) -> pa.Table:
    """Return the values in the order of their ids: by count if `order_by_freq`, then by value."""
    order = [("count", "descending")] if order_by_freq else []
    return counts.sort_by([*order, ("value", "ascending")]).select(["value"]).combine_chunks()


def keep_frequent(counted: DataFrame, limits: Iterable[int]) -> DataFrame:
    """Keep values that occur at least as often as the limit of their ``source``."""
    conditions = [
        (F.col("source") != i) | (F.col("count") >= limit)
        for i, limit in enumerate(limits)
        if limit > 1
    ]
    return counted.filter(spark.all_of(conditions)) if conditions else counted


def _value_kind(df: DataFrame, source: VocabularySource, separator: str | None) -> str:
    message = (
        "The column {name} of type {dtype} has no vocabulary: its cells should be single values or "
        "arrays of them; flatten or explode it first"
    )
    check_types(schema_of(df), source.columns, is_atomic_or_list, message)
    cells = [dtype_of(df, name) for name in source.columns]
    if separator is not None and any(map(column_types.is_array, cells)):
        raise UsageError(
            f"do_split is for cells of text, but {list(source.columns)} are of type "
            f"{', '.join(dict.fromkeys(cells))}; leave it out",
            code="argument-conflict",
            argument="do_split",
            columns=list(source.columns),
        )
    of_columns = list(map(column_types.cell_value_type, cells))
    if separator is not None or any(map(column_types.is_text, of_columns)):
        return "string"
    if len(set(of_columns)) == 1:
        return of_columns[0]
    return "double" if any(map(column_types.is_fractional, of_columns)) else "bigint"


def is_atomic_or_list(dtype: str) -> bool:
    """Return True for types of single values, and for arrays of such types."""
    return column_types.is_atomic(column_types.cell_value_type(dtype))


def _is_category_or_list(dtype: str) -> bool:
    return column_types.is_category(column_types.cell_value_type(dtype))


def _ranked_on_driver(
    counted: DataFrame, fields: list[str], order_by_freq: bool
) -> list[DataFrame]:
    frames = []
    for field, counts in zip(fields, counts_of_sources(counted, fields), strict=True):
        values = _ranked(counts, order_by_freq)
        ids = pa.array(range(1, len(values) + 1), pa.int32())
        schema = f"value {dtype_of(counted, field)}, id int"
        frames.append(frame_of_arrow(counted.sparkSession, values.append_column("id", ids), schema))
    return frames


def _ranked_by_spark(counted: DataFrame, fields: list[str], order_by_freq: bool) -> list[DataFrame]:
    from pyspark.sql import Window

    values = [name for name in counted.columns if name not in ("source", "count")]
    order = [F.col("count").desc()] if order_by_freq else []
    window = Window.partitionBy("source").orderBy(*order, *values)
    ranked = computed(counted.withColumn("id", F.row_number().over(window)))
    return [
        ranked.filter(F.col("source") == i).select(field, "id") for i, field in enumerate(fields)
    ]


# -- the operator of pipelines ---------------------------------------------------------------------

_JOINED_COLUMNS = 6  # maximum number of columns for which joins are faster than Arrow


class Encode(Function):
    """Function that encodes a value as its id, and an unknown value as null or an extra id."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, oov_buckets: int):
        self.vocabulary, self.oov_buckets = vocabulary, oov_buckets

    def array(self, values: pa.Array) -> pa.Array:
        numbers = self.vocabulary.find(values)
        if not self.oov_buckets or numbers.null_count == values.null_count:
            return numbers
        unknown = pc.and_(values.is_valid(), numbers.is_null())
        others = buckets(to_strings(values.filter(unknown)), self.oov_buckets, FAST)
        others = pa.array(others + len(self.vocabulary) + 1, pa.int32())
        return pc.replace_with_mask(numbers, unknown, others)

    def single(self, *input_types: str) -> Callable[..., Any]:
        known = self.vocabulary.by_key.get
        if not self.oov_buckets:
            return known
        of_unknown = super().single(*input_types)
        return lambda value: known(value) or of_unknown(value)


class EncodeTokens(Function):
    """Function that encodes a string as the ids of its known tokens; null if none is known."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, separator: str, sort: bool, smallest: bool):
        self.vocabulary, self.separator = vocabulary, separator
        self.sort, self.smallest = sort, smallest

    def array(self, values: pa.Array) -> pa.Array:
        numbers = _known(self.vocabulary, pc.split_pattern(values, self.separator))
        if self.sort or self.smallest:
            items, rows = numbers.flatten(), pc.list_parent_indices(numbers)
            ordered = items.take(pa.array(np.lexsort((items.to_numpy(), rows.to_numpy()))))
            numbers = make_lists(list_lengths(numbers), ordered, numbers.is_null())
        return pc.list_element(numbers, 0) if self.smallest else numbers

    def single(self, *input_types: str) -> Callable[..., Any]:
        return self._of_cell

    def _of_cell(self, value: str | None) -> list[int] | int | None:
        tokens = () if value is None else value.split(self.separator)
        numbers = list(filter(None, map(self.vocabulary.by_key.get, tokens)))
        if not numbers:
            return None
        if self.smallest:
            return min(numbers)
        return sorted(numbers) if self.sort else numbers


class EncodeLists(Function):
    """Function that encodes a list as the ids of its known values, in order.

    It is not marked costly, because Arrow cannot dictionary-encode lists.
    """

    def __init__(self, vocabulary: Vocabulary, sort: bool, smallest: bool):
        self.vocabulary, self.sort, self.smallest = vocabulary, sort, smallest

    def array(self, values: pa.Array) -> pa.Array:
        numbers = _known_in_lists(self.vocabulary, values)
        if self.sort or self.smallest:
            items, rows = numbers.flatten(), pc.list_parent_indices(numbers)
            ordered = items.take(pa.array(np.lexsort((items.to_numpy(), rows.to_numpy()))))
            numbers = make_lists(list_lengths(numbers), ordered, numbers.is_null())
        if not self.smallest:
            return numbers
        is_empty = pa.array(np.asarray(list_lengths(numbers)) == 0)
        none = pa.scalar([None], numbers.type)
        return pc.list_element(pc.if_else(is_empty, none, numbers), 0)

    def single(self, *input_types: str) -> Callable[..., Any]:
        return self._of_cell

    def _of_cell(self, value: Sequence[Any] | None) -> list[int] | int | None:
        if value is None:
            return None
        numbers = list(filter(None, map(self.vocabulary.by_key.get, value)))
        if self.smallest:
            return min(numbers, default=None)
        return sorted(numbers) if self.sort else numbers


@register_operator
@dataclass(frozen=True)
class CategoryEncode(Operator):
    """Operator that implements ``category_encode``; its state holds a table per vocabulary.

    Attributes
    ----------
    columns : list of dict
        ``{"src_cols": [...], "col_name": ...}`` for each vocabulary.
    freq_limit : dict of str to int
        Minimum count by the name of the vocabulary.
    """

    columns: list[dict[str, Any]]
    freq_limit: dict[str, int]
    order_by_freq: bool
    do_split: bool
    sep: str
    sort_for_array: bool
    keep_most_frequent: bool
    broadcast: bool
    oov_buckets: int
    method = "category_encode"

    @classmethod
    def of(
        cls, columns: object, freq_limit: object, *options: Any
    ) -> CategoryEncode:  # options: fields of the class
        """Build the operator from the user's arguments."""
        sources = sources_of(columns, freq_limit)
        named = [{"src_cols": list(each.columns), "col_name": each.name} for each in sources]
        limits = {each.name: each.min_count for each in sources if each.min_count}
        return cls(named, limits, *options)

    def __post_init__(self) -> None:
        if not check_string(self.sep, "sep") or "\\" in self.sep:
            raise UsageError(
                f"sep should be plain text without a backslash in a pipeline, got {self.sep!r}",
                code="argument-value",
                argument="sep",
            )
        check_oov_buckets(self.oov_buckets, self.do_split)

    @property
    def reads(self) -> list[str]:
        return [name for each in self.columns for name in each["src_cols"]]

    def requests(self, before: Schema) -> dict[str, Statistic]:
        separator = self.sep if self.do_split else None
        requests: dict[str, Statistic] = {}
        for each in self.columns:
            names, name = each["src_cols"], each["col_name"]
            check_categories(before, names, lists=True)
            of_columns = {before[each].kind for each in names}
            if self.oov_buckets and any(map(column_types.is_array, of_columns)):
                raise UsageError(
                    f"oov_buckets is for single values, but {names} are of type "
                    f"{', '.join(of_columns)}; leave it out",
                    code="argument-conflict",
                    argument="oov_buckets",
                    columns=list(names),
                )
            if self.do_split and of_columns != {"string"}:
                raise UsageError(
                    f"do_split needs strings, but {names} are of type {', '.join(of_columns)}",
                    code="data-dtype",
                    argument="do_split",
                    columns=list(names),
                )
            if len(of_columns) > 1:
                raise UsageError(
                    f"The columns {names} of one vocabulary should be of one type, but are "
                    f"{sorted(of_columns)}; cast them first",
                    code="data-dtype",
                    columns=list(names),
                )
            requests[name] = Counts(tuple(names), separator, self.freq_limit.get(name, 0))
        return requests

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        return {name: _ranked(counts, self.order_by_freq) for name, counts in statistics.items()}

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        cells = []
        for each in self.columns:
            is_list = column_types.is_array(before[each["src_cols"][0]].kind)
            several = (is_list or self.do_split) and not self.keep_most_frequent
            dtype = "array<int>" if several else "int"
            function, rows = None, None
            if state is not None:
                vocabulary = Vocabulary(state[each["col_name"]]["value"].combine_chunks())
                function = self._function(vocabulary, is_list)
                rows = len(vocabulary) + self.oov_buckets + 1
            field = Field(dtype, rows)
            cells += [OutputColumn((name,), name, field, function) for name in each["src_cols"]]
        return cells

    def _function(self, vocabulary: Vocabulary, is_list: bool) -> Function:
        if is_list:
            return EncodeLists(vocabulary, self.sort_for_array, self.keep_most_frequent)
        if self.do_split:
            return EncodeTokens(vocabulary, self.sep, self.sort_for_array, self.keep_most_frequent)
        return Encode(vocabulary, self.oov_buckets)

    def split_for_arrow(self, state: State) -> tuple[Operator | None, Operator | None]:
        # small vocabularies are faster in workers, unless there are few columns
        small = [each for each in self.columns if len(state[each["col_name"]]) <= DRIVER_KEYS]
        are_many = len(self.reads) > _JOINED_COLUMNS
        if not small or not are_many or not self.broadcast or self.do_split:
            return None, self
        remaining = [each for each in self.columns if each not in small]
        remainder = dataclasses.replace(self, columns=remaining) if remaining else None
        return dataclasses.replace(self, columns=small), remainder

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        dictionaries: dict[str, Dictionary] = {}
        for each in self.columns:
            learned = numbered_dictionary(df.sparkSession, state[each["col_name"]])
            dictionaries |= dict.fromkeys(each["src_cols"], learned)
        separator = re.escape(self.sep) if self.do_split else None
        options = self.sort_for_array, self.keep_most_frequent, self.oov_buckets
        return encode_cells(df, dictionaries, self.broadcast, separator, *options)


def check_oov_buckets(oov_buckets: int, do_split: bool) -> None:
    """Check the number of ids for unknown values."""
    if check_integer("oov_buckets", oov_buckets, 0) and do_split:
        raise UsageError(
            "oov_buckets cannot be used with do_split; leave one of them out",
            code="argument-conflict",
            argument="oov_buckets",
        )


def check_categories(before: Schema, names: Sequence[str], lists: bool = False) -> None:
    """Check that columns exist and hold values that all executors compare in the same way.

    With `lists` cells may also be arrays of such values.
    """
    cells = "arrays of them, " if lists else ""
    message = (
        "The column {name} of type {dtype} has no categories in a pipeline: cells should be "
        f"strings, whole numbers, booleans, {cells}or dates; cast or bin them first"
    )
    check_types(before, names, _is_category_or_list if lists else column_types.is_category, message)
