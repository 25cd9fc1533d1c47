"""Vocabularies: the values of columns with their numbers, all learned by one pass.

Rows become (vocabulary, value) pairs by one ``explode``, and one aggregation counts them.  The
numbers of a vocabulary depend on nothing but the values and their counts.  As long as they are few
they are ranked on the driver, else by Spark, each vocabulary by a task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds, lookup
from bigdl.friesian.ops.batches import texts_of
from bigdl.friesian.ops.hashing import FAST, buckets
from bigdl.friesian.ops.kinds import Field, Schema, check_kinds, require_columns
from bigdl.friesian.ops.lookup import DRIVER_KEYS, Vocabulary
from bigdl.friesian.ops.operator import Cell, Function, Operator, State, ValueFunction
from bigdl.friesian.ops.requests import Counts, Request
from bigdl.friesian.ops.spark import (
    F,
    all_of,
    check_string,
    col,
    kind_of,
    temporary,
    without_nan,
)
from bigdl.orca.data.transformer.encoding import Source, sources_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Counted values that are ranked on the driver.  A million short strings take about 30 MB there.
DRIVER_VALUES = 2_000_000


def number_column(name: str) -> str:
    """The column of the numbers of a vocabulary: ``id``, unless its values are called so."""
    return "id_number" if name.lower() == "id" else "id"


def learn(
    df: DataFrame,
    sources: Sequence[Source],
    order_by_freq: bool,
    separator: str | None,
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

    Returns
    -------
    list of pyspark.sql.DataFrame
        Columns: the name of the source and, called by :func:`number_column`, the numbers (int),
        which begin with 1.
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


def distinct_values(df: DataFrame, columns: list[str]) -> dict[str, list]:
    """The different values of columns in their order, a null at the end."""
    sources = [Source(name, (name,)) for name in columns]
    counted, fields = count_values(df, sources, None, nulls=True)
    distinct: dict[str, list] = {name: [] for name in columns}
    for row in counted.collect():
        distinct[columns[row["source"]]].append(row[fields[row["source"]]])
    return {
        name: sorted(values, key=lambda value: (value is None, value))
        for name, values in distinct.items()
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

    require_columns(df.columns, [name for source in sources for name in source.columns])
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
        rows = rows.filter(reduce(lambda a, b: a | b, (F.col(v).isNotNull() for v in values)))
    counted = rows.groupBy("source", *values).agg(F.count("*").alias("count"))
    return enough(counted, (source.at_least for source in sources)), fields


def enough(counted: DataFrame, limits: Iterable[int]) -> DataFrame:
    """Return the counts that are not below the limit of their ``source``."""
    conditions = [
        (F.col("source") != i) | (F.col("count") >= limit)
        for i, limit in enumerate(limits)
        if limit > 1
    ]
    return counted.filter(all_of(conditions)) if conditions else counted


def _value_kind(df: DataFrame, source: Source, separator: str | None) -> str:
    of_columns = [kind_of(df, name) for name in source.columns]
    for name, kind in zip(source.columns, of_columns, strict=True):
        if not kinds.is_atomic(kind):
            hint = "; explode it first" if kinds.is_array(kind) else ""
            raise UsageError(
                f"The column {name} of type {kind} has no vocabulary: its cells should be single "
                f"values{hint}"
            )
    if separator is not None or any(map(kinds.is_text, of_columns)):
        return "string"
    if len(set(of_columns)) == 1:
        return of_columns[0]
    return "double" if any(map(kinds.is_fractional, of_columns)) else "bigint"


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
    value = col(name)
    if not nulls:
        value = without_nan(value, kind_of(df, name))  # NaN is no value of a vocabulary
    value = value.cast(kind)

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
    from pyspark.sql import Window

    values = [name for name in counted.columns if name not in ("source", "count")]
    order = [F.col("count").desc()] if order_by_freq else []
    window = Window.partitionBy("source").orderBy(*order, *values)
    ranked = counted.withColumn("id", F.row_number().over(window)).localCheckpoint(eager=True)
    return [
        ranked.filter(F.col("source") == i).select(field, "id") for i, field in enumerate(fields)
    ]


# -- the operator of pipelines ---------------------------------------------------------------------

_JOINED_COLUMNS = 6  # that are joined faster than they go through Arrow


class Encode(Function):
    """The number of a value; unknown ones share some numbers behind the largest, if any."""

    is_costly = True

    def __init__(self, vocabulary: Vocabulary, oov_buckets: int):
        self.vocabulary, self.oov_buckets = vocabulary, oov_buckets

    def array(self, values: pa.Array) -> pa.Array:
        numbers = self.vocabulary.find(values)
        if not self.oov_buckets or numbers.null_count == values.null_count:
            return numbers
        unknown = pc.and_(values.is_valid(), numbers.is_null())
        others = buckets(texts_of(values.filter(unknown)), self.oov_buckets, FAST)
        others = pa.array(others + len(self.vocabulary) + 1, pa.int32())
        return pc.replace_with_mask(numbers, unknown, others)

    def single(self, *input_kinds: str) -> Callable[..., Any]:
        known = self.vocabulary.by_key.get
        if not self.oov_buckets:
            return known
        of_unknown = super().single(*input_kinds)
        return lambda value: known(value) or of_unknown(value)


class EncodeTokens(ValueFunction):
    """The numbers of the values in a cell that are known; null if there is none."""

    def __init__(self, vocabulary: Vocabulary, separator: str, sort: bool, smallest: bool):
        self.kind = "int" if smallest else "array<int>"
        self.vocabulary, self.separator = vocabulary, separator
        self.sort, self.smallest = sort, smallest

    def value(self, value: str | None) -> list[int] | int | None:
        known = self.vocabulary.by_key
        tokens = () if value is None else value.split(self.separator)
        numbers = [known[token] for token in tokens if token in known]
        if not numbers:
            return None
        if self.smallest:
            return min(numbers)
        return sorted(numbers) if self.sort else numbers


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
        sources = sources_of(columns, freq_limit)
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
        check_integer("oov_buckets", self.oov_buckets, 0)
        if self.oov_buckets and self.do_split:
            raise UsageError("oov_buckets cannot be used with do_split; leave one of them out")

    @property
    def reads(self) -> list[str]:
        return [name for each in self.columns for name in each["src_cols"]]

    def requests(self, before: Schema) -> dict[str, Request]:
        separator = self.sep if self.do_split else None
        requests: dict[str, Request] = {}
        for each in self.columns:
            names, name = each["src_cols"], each["col_name"]
            check_categories(before, names)
            of_columns = {before[each].kind for each in names}
            if self.do_split and of_columns != {"string"}:
                raise UsageError(
                    f"do_split needs strings, but {names} are of type {', '.join(of_columns)}"
                )
            if len(of_columns) > 1:
                raise UsageError(
                    f"The columns {names} of one vocabulary should be of one type, but are "
                    f"{sorted(of_columns)}; cast them first"
                )
            requests[name] = Counts(tuple(names), separator, self.freq_limit.get(name, 0))
        return requests

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        return {name: self._ranked(counts) for name, counts in answers.items()}

    def _ranked(self, counts: pa.Table) -> pa.Table:
        order = [("count", "descending")] if self.order_by_freq else []
        return counts.sort_by([*order, ("value", "ascending")]).select(["value"]).combine_chunks()

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        kind = "array<int>" if self.do_split and not self.keep_most_frequent else "int"
        cells = []
        for each in self.columns:
            function, rows = None, None
            if state is not None:
                vocabulary = Vocabulary(state[each["col_name"]]["value"].combine_chunks())
                function, rows = self._function(vocabulary), len(vocabulary) + self.oov_buckets + 1
            made = Field(kind, rows)
            cells += [Cell((name,), name, made, function) for name in each["src_cols"]]
        return cells

    def _function(self, vocabulary: Vocabulary) -> Function:
        if self.do_split:
            return EncodeTokens(vocabulary, self.sep, self.sort_for_array, self.keep_most_frequent)
        return Encode(vocabulary, self.oov_buckets)

    def divided(self, state: State) -> tuple[Operator | None, Operator | None]:
        # vocabularies that fit in workers are faster there, unless they are few
        small = [each for each in self.columns if len(state[each["col_name"]]) <= DRIVER_KEYS]
        are_many = len(self.reads) > _JOINED_COLUMNS
        if not small or not are_many or not self.broadcast or self.do_split:
            return None, self
        rest = [each for each in self.columns if each not in small]
        return replace(self, columns=small), replace(self, columns=rest) if rest else None

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        dictionaries: dict[str, lookup.Dictionary] = {}
        for each in self.columns:
            learned = lookup.numbered(df.sparkSession, state[each["col_name"]])
            dictionaries |= dict.fromkeys(each["src_cols"], learned)
        if not self.do_split:
            return lookup.encode(df, dictionaries, self.broadcast, self.oov_buckets)
        options = self.broadcast, self.sort_for_array, self.keep_most_frequent
        return lookup.encode_tokens(df, dictionaries, re.escape(self.sep), *options)


def check_categories(before: Schema, names: Sequence[str]) -> None:
    """Check that columns exist and hold values that all executors tell apart alike."""
    message = (
        "The column {name} of type {kind} has no categories in a pipeline: cells should be "
        "strings, whole numbers, booleans or dates; cast or bin them first"
    )
    check_kinds(before, names, kinds.is_category, message)
