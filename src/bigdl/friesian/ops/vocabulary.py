"""Vocabularies: the values of columns with their numbers, all learned by one pass.

Rows become (vocabulary, value) pairs by one ``explode``, and one aggregation counts them.  The
numbers of a vocabulary depend on nothing but the values and their counts.  As long as they are few
they are ranked on the driver, else by a sort of Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds, lookup
from bigdl.friesian.ops.batches import text_of, texts_of
from bigdl.friesian.ops.columns import (
    as_names,
    check_count,
    check_string,
    col,
    kind_of,
    require_columns,
    temporary,
)
from bigdl.friesian.ops.hashing import FAST, bucket, buckets
from bigdl.friesian.ops.lookup import DRIVER_KEYS
from bigdl.friesian.ops.operator import (
    Cell,
    Counts,
    Field,
    Function,
    Operator,
    Request,
    Schema,
    State,
    require_fields,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "DRIVER_VALUES",
    "CategoryEncode",
    "Source",
    "Vocabulary",
    "check_categories",
    "count_values",
    "distinct_values",
    "learn",
    "number_column",
    "sources_of",
]

# Counted values that are ranked on the driver.  A million short strings take about 30 MB there.
DRIVER_VALUES = 2_000_000


@dataclass(frozen=True)
class Source:
    """One vocabulary to be learned.

    Attributes
    ----------
    name : str
        Of the column of values in the result.
    columns : tuple of str
        Where the values come from.
    at_least : int
        Values that occur less often are left out.
    """

    name: str
    columns: tuple[str, ...]
    at_least: int = 0


def number_column(name: str) -> str:
    """The column of the numbers of a vocabulary: ``id``, unless its values are called so."""
    return "id_number" if name.lower() == "id" else "id"


def sources_of(columns: Sequence[Any], freq_limit: Any) -> list[Source]:
    """Return the vocabularies for the arguments of ``gen_string_idx``.

    Parameters
    ----------
    columns : list of str or dict
        A dict ``{"src_cols": [...], "col_name": ...}`` means one vocabulary of several columns.
    freq_limit : int, dict of str to int, or None
    """
    if freq_limit is not None and not isinstance(freq_limit, Mapping):
        _check_limit(freq_limit)
    found = []
    for each in columns:
        if isinstance(each, Mapping):
            if "src_cols" not in each:
                raise UsageError(
                    f"src_cols must be provided if columns is a dictionary, but got {dict(each)!r}"
                )
            names = as_names(each["src_cols"], "src_cols")
            name = each.get("col_name") or f"{names[0]}_union"
        else:
            names = as_names(each)
            name = names[0]
        limit = freq_limit.get(name) if isinstance(freq_limit, Mapping) else freq_limit
        found.append(Source(name, tuple(names), 0 if limit is None else _check_limit(limit)))
    return found


def _check_limit(limit: Any) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise UsageError(
            f"freq_limit should be int, dict of str to int, or None, but got {limit!r}"
        )
    return limit


def learn(
    df: DataFrame,
    sources: Sequence[Source],
    order_by_freq: bool,
    separator: str | None,
    id_name: Callable[[str], str] | None = None,
) -> list[DataFrame]:
    """Learn vocabularies.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    sources : list of Source
    order_by_freq : bool
        Number the values by falling count, and equal counts by value; otherwise by value.
    separator : str or None
        Regular expression between the several values of a cell.
    id_name : callable, optional
        The name of the column of numbers by that of the source; default: :func:`number_column`.

    Returns
    -------
    list of pyspark.sql.DataFrame
        Columns: the name of the source, and the numbers (int), which begin with 1.
    """
    counted, fields = count_values(df, sources, separator)
    counted = counted.persist()
    try:
        rank = _ranked_on_driver if counted.count() <= DRIVER_VALUES else _ranked_by_spark
        frames = rank(counted, fields, order_by_freq)
    finally:
        counted.unpersist()
    return [
        frame.toDF(source.name, (id_name or number_column)(source.name))
        for frame, source in zip(frames, sources, strict=True)
    ]


def distinct_values(df: DataFrame, columns: list[str]) -> dict[str, list]:
    """The different values of columns in their order, a null at the end."""
    sources = [Source(name, (name,)) for name in columns]
    counted, fields = count_values(df, sources, None, nulls=True)
    found: dict[str, list] = {name: [] for name in columns}
    for row in counted.collect():
        found[columns[row["source"]]].append(row[fields[row["source"]]])
    return {
        name: sorted(v for v in values if v is not None) + [v for v in values if v is None]
        for name, values in found.items()
    }


def count_values(
    df: DataFrame, sources: Sequence[Source], separator: str | None, nulls: bool = False
) -> tuple[DataFrame, list[str]]:
    """Count the values of all sources by one aggregation.

    Returns
    -------
    counted : pyspark.sql.DataFrame
        Columns ``source`` (int), one ``value_<i>`` for each type that occurs, and ``count``; the
        value is in the column of the type of its source, the others are null.
    fields : list of str
        The column ``value_<i>`` of each source.
    """

    require_columns(df, [name for source in sources for name in source.columns])
    of_sources = [_value_kind(df, source, separator) for source in sources]
    types = list(dict.fromkeys(of_sources))
    fields = [f"value_{types.index(kind)}" for kind in of_sources]
    cells = [
        _pairs(df, i, name, of_sources[i], types, separator, nulls)
        for i, source in enumerate(sources)
        for name in source.columns
    ]
    every = F.concat(*cells) if separator is not None else F.array(*cells)
    pair = temporary(df, "pair")
    values = [f"value_{i}" for i in range(len(types))]
    rows = df.select(F.explode(every).alias(pair)).select(f"{pair}.*")
    if not nulls:
        present = F.col(values[0]).isNotNull()
        for value in values[1:]:
            present = present | F.col(value).isNotNull()
        rows = rows.filter(present)
    counted = rows.groupBy("source", *values).agg(F.count("*").alias("count"))
    limits = {i: source.at_least for i, source in enumerate(sources) if source.at_least > 1}
    if limits:
        enough = F.lit(True)
        for i, limit in limits.items():
            enough = enough & ((F.col("source") != i) | (F.col("count") >= limit))
        counted = counted.filter(enough)
    return counted, fields


def _value_kind(df: DataFrame, source: Source, separator: str | None) -> str:
    found = [kind_of(df, name) for name in source.columns]
    for name, kind in zip(source.columns, found, strict=True):
        if not kinds.is_atomic(kind):
            hint = "; explode it first" if kinds.is_array(kind) else ""
            raise UsageError(
                f"The column {name} of type {kind} has no vocabulary: its cells should be single "
                f"values{hint}"
            )
    if separator is not None or any(map(kinds.is_text, found)):
        return "string"
    if len(set(found)) == 1:
        return found[0]
    return "double" if any(map(kinds.is_fractional, found)) else "bigint"


def _pairs(
    df: DataFrame,
    i: int,
    name: str,
    kind: str,
    types: list[str],
    separator: str | None,
    nulls: bool,
) -> Column:
    """Return the pairs of one cell: a struct, or with a separator an array of structs."""

    value = col(name).cast(kind)
    if kinds.is_fractional(kind_of(df, name)) and not nulls:
        value = F.when(~F.isnan(col(name)), value)  # NaN is no value of a vocabulary

    def pair(value: Column) -> Column:
        fields = [
            (value if each == kind else F.lit(None).cast(each)).alias(f"value_{j}")
            for j, each in enumerate(types)
        ]
        return F.struct(F.lit(i).alias("source"), *fields)

    if separator is None:
        return pair(value)
    # a null cell has no tokens; concat of a null array would be null
    return F.transform(F.coalesce(F.split(value, separator), F.array().cast("array<string>")), pair)


def _ranked_on_driver(
    counted: DataFrame, fields: list[str], order_by_freq: bool
) -> list[DataFrame]:
    from pyspark.sql.types import IntegerType, StructField, StructType

    table = counted.toArrow()
    frames = []
    for i, field in enumerate(fields):
        mine = table.filter(pc.equal(table["source"], i)).select([field, "count"])
        order = [("count", "descending")] if order_by_freq else []
        values = mine.sort_by([*order, (field, "ascending")])[field]
        ids = pa.array(range(1, len(values) + 1), pa.int32())
        schema = StructType([counted.schema[field], StructField("id", IntegerType())])
        ranked = pa.table([values, ids], names=schema.names)
        frames.append(counted.sparkSession.createDataFrame(ranked, schema))
    return frames


def _ranked_by_spark(counted: DataFrame, fields: list[str], order_by_freq: bool) -> list[DataFrame]:
    """Ranks by a range-partitioned sort; the sorted values are written once and never sorted again.

    A second sort could cut other ranges, and the offsets of the first would be wrong for it.
    """

    frames = []
    for i, field in enumerate(fields):
        order = [F.col("count").desc()] if order_by_freq else []
        mine = counted.filter(F.col("source") == i).select(F.col(field), F.col("count"))
        laid = mine.orderBy(*order, F.col(field)).localCheckpoint(eager=True)
        numbered = laid.select(
            F.col(field),
            F.spark_partition_id().alias("part"),
            F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1).alias("place"),
        )
        offsets, total = [], 0
        for part, size in sorted(numbered.groupBy("part").count().collect()):
            offsets.append((part, total))
            total += size
        starts = laid.sparkSession.createDataFrame(offsets, "part int, start bigint")
        rank = (F.col("start") + F.col("place") + 1).cast("int")
        ranked = numbered.join(F.broadcast(starts), "part")
        frames.append(ranked.select(F.col(field), rank.alias("id")))
    return frames


# -- the operator of pipelines ---------------------------------------------------------------------

_JOINED_COLUMNS = 6  # that are joined faster than they go through Arrow


class Vocabulary:
    """Values, whose numbers are their places from 1 on.

    Parameters
    ----------
    values : pyarrow.Array
    """

    def __init__(self, values: pa.Array):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def numbers(self) -> dict[Any, int]:
        """The numbers by the values."""
        return {value: place for place, value in enumerate(self.values.to_pylist(), 1)}

    def find(self, values: pa.Array) -> pa.Array:
        """The numbers (int32) of values, null for a null or an unknown one."""

        if len(self) < 4 * len(values):  # it builds a table of its own of the whole vocabulary
            places = pc.index_in(values, value_set=self.values)
            return pc.add(places, pa.scalar(1, pa.int32()))
        numbers = self.numbers
        return pa.array([numbers.get(value) for value in values.to_pylist()], pa.int32())


class Encode(Function):
    """The number of a value; unknown ones share some numbers behind the largest, if any."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, oov_buckets: int):
        self.vocabulary, self.oov_buckets = vocabulary, oov_buckets

    def array(self, values: pa.Array) -> pa.Array:
        found = self.vocabulary.find(values)
        return with_buckets(values, found, len(self.vocabulary) + 1, self.oov_buckets)

    def value(self, value: Any) -> int | None:
        found = self.vocabulary.numbers.get(value)
        if found is not None or value is None or not self.oov_buckets:
            return found
        return bucket(text_of(value), self.oov_buckets, FAST) + len(self.vocabulary) + 1


def with_buckets(values: pa.Array, found: pa.Array, first: int, count: int) -> pa.Array:
    """Numbers that were found, and one of some from `first` on for each unknown value."""

    if not count or found.null_count == values.null_count:
        return found
    unknown = pc.and_(values.is_valid(), found.is_null())
    others = buckets(texts_of(values.filter(unknown)), count, FAST)
    return pc.replace_with_mask(found, unknown, pa.array(others + first, pa.int32()))


class EncodeTokens(Function):
    """The numbers of the values in a cell that are known; null if there is none."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, separator: str, sort: bool, smallest: bool):
        self.vocabulary, self.separator = vocabulary, separator
        self.sort, self.smallest = sort, smallest

    def array(self, values: pa.Array) -> pa.Array:
        kind = pa.int32() if self.smallest else pa.list_(pa.int32())
        return pa.array(map(self.value, values.to_pylist()), kind)

    def value(self, value: str | None) -> list[int] | int | None:
        if value is None:
            return None
        numbers = self.vocabulary.numbers
        found = [numbers[each] for each in value.split(self.separator) if each in numbers]
        if not found:
            return None
        if self.smallest:
            return min(found)
        return sorted(found) if self.sort else found


@dataclass(frozen=True)
class CategoryEncode(Operator):
    """``category_encode``; the state has a table of one column for each vocabulary.

    Attributes
    ----------
    columns : list of dict
        ``{"src_cols": [...], "col_name": ...}`` for each vocabulary.
    freq_limit : dict of str to int
        By the name of the vocabulary.
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
        cls,
        columns: Any,
        freq_limit: Any,
        order_by_freq: bool,
        do_split: bool,
        sep: str,
        *options: Any,
    ) -> CategoryEncode:
        """Return the operator for the arguments that users give."""
        given = list(columns) if isinstance(columns, list | tuple) else [columns]
        if not given:
            raise UsageError("columns should be str, dict or a list of them, but got None.")
        sources = sources_of(given, freq_limit)
        return cls(
            [{"src_cols": list(each.columns), "col_name": each.name} for each in sources],
            {each.name: each.at_least for each in sources if each.at_least},
            order_by_freq,
            do_split,
            check_string(sep, "sep"),
            *options,
        )

    def __post_init__(self) -> None:
        if not self.sep or "\\" in self.sep:
            raise UsageError(
                f"sep should be plain text without a backslash in a pipeline, got {self.sep!r}"
            )
        check_count(self.oov_buckets, "oov_buckets", 0)
        if self.oov_buckets and self.do_split:
            raise UsageError("oov_buckets cannot be used with do_split; leave one of them out")

    @property
    def reads(self) -> list[str]:
        return [name for each in self.columns for name in each["src_cols"]]

    def requests(self, before: Schema) -> dict[str, Request]:
        found: dict[str, Request] = {}
        for each in self.columns:
            self._check(before, each["src_cols"])
            separator = self.sep if self.do_split else None
            limit = self.freq_limit.get(each["col_name"], 0)
            found[each["col_name"]] = Counts(tuple(each["src_cols"]), separator, limit)
        return found

    def _check(self, before: Schema, names: Sequence[str]) -> None:
        check_categories(before, names)
        found = {before[name].kind for name in names}
        for kind in found:
            if self.do_split and kind != "string":
                raise UsageError(f"do_split needs strings, but {list(names)} are of type {kind}")
        if len(found) > 1:
            raise UsageError(
                f"The columns {list(names)} of one vocabulary should be of one type, but are "
                f"{sorted(found)}; cast them first"
            )

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        return {name: self._ranked(counts) for name, counts in answers.items()}

    def _ranked(self, counts: pa.Table) -> pa.Table:
        order = [("count", "descending")] if self.order_by_freq else []
        return counts.sort_by([*order, ("value", "ascending")]).select(["value"]).combine_chunks()

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        cells = []
        for each in self.columns:
            vocabulary = None if state is None else _vocabulary(state[each["col_name"]])
            rows = None if vocabulary is None else len(vocabulary) + self.oov_buckets + 1
            gives_arrays = self.do_split and not self.keep_most_frequent
            made = Field("array<int>" if gives_arrays else "int", rows)
            for name in each["src_cols"]:
                function = None if vocabulary is None else self._function(vocabulary)
                cells.append(Cell((name,), name, made, function))
        return cells

    def _function(self, vocabulary: Vocabulary) -> Function:
        if self.do_split:
            return EncodeTokens(vocabulary, self.sep, self.sort_for_array, self.keep_most_frequent)
        return Encode(vocabulary, self.oov_buckets)

    def pays_in_batches(self, state: State) -> bool:
        return len(self._fit_in_workers(state)) == len(self.columns) and self._are_many()

    def _are_many(self) -> bool:
        count = sum(len(each["src_cols"]) for each in self.columns)
        return self.broadcast and not self.do_split and count > _JOINED_COLUMNS

    def _fit_in_workers(self, state: State) -> list[dict[str, Any]]:
        return [each for each in self.columns if len(state[each["col_name"]]) <= DRIVER_KEYS]

    def divided(self, state: State) -> tuple[Operator | None, Operator]:
        small = self._fit_in_workers(state)
        if not small or not self._are_many():
            return None, self
        rest = [each for each in self.columns if each not in small]
        return replace(self, columns=small), replace(self, columns=rest)

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        columns = self.columns
        learned = {
            each["col_name"]: lookup.numbered(df.sparkSession, state[each["col_name"]])
            for each in columns
        }
        dictionaries = {
            name: learned[each["col_name"]] for each in columns for name in each["src_cols"]
        }
        if self.do_split:
            return lookup.encode_tokens(
                df,
                dictionaries,
                re.escape(self.sep),
                self.broadcast,
                self.sort_for_array,
                self.keep_most_frequent,
            )
        return lookup.encode(df, dictionaries, self.broadcast, self.oov_buckets)


def _vocabulary(table: pa.Table) -> Vocabulary:
    return Vocabulary(table["value"].combine_chunks())


def check_categories(before: Schema, names: Sequence[str]) -> None:
    """Check that columns exist and hold values that all executors tell apart alike."""
    require_fields(before, names)
    for name in names:
        kind = before[name].kind
        if not (kinds.is_integral(kind) or kind in ("string", "boolean", "date")):
            raise UsageError(
                f"The column {name} of type {kind} has no categories in a pipeline: cells should "
                "be strings, whole numbers, booleans or dates; cast or bin them first"
            )
