"""What only tables of Spark do, as functions of DataFrames.

See the methods of :class:`Table` and :class:`FeatureTable` that are called as the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.cells import Cast
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import (
    F,
    all_of,
    as_names,
    check_string,
    col,
    kind_of,
    names_of,
    numeric_columns,
    random_seed,
    replace,
    schema_of,
    temporary,
)

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, Row, SparkSession

_STATS = ("min", "max", "avg", "sum", "count")
_ARITHMETIC: tuple[str, ...] = ("sum", "avg", "mean", "sum_distinct", "stddev", "stddev_pop")
_ARITHMETIC += ("variance", "var_pop", "skewness", "kurtosis")
_OTHERS = ("max", "min", "count", "collect_list", "collect_set", "first", "last")
_AGGREGATES = {
    **{name: name for name in (*_ARITHMETIC, *_OTHERS, "approx_count_distinct")},
    "sumDistinct": "sum_distinct",
    "approxCountDistinct": "approx_count_distinct",
}
# what Spark calls the results of functions, where it is not their own name
_SHOWN = {"mean": "avg(", "sum_distinct": "sum(DISTINCT "}


# -- files -----------------------------------------------------------------------------------------


def _spark() -> SparkSession:
    from bigdl.orca import OrcaContext

    return OrcaContext.get_spark_session()


def _paths(paths: Any) -> list[str]:
    from bigdl.orca.data.pandas.readers import for_spark

    return for_spark(paths)


def read_parquet(paths: Any) -> DataFrame:
    """Parquet files, folders or patterns."""
    return _spark().read.parquet(*_paths(paths))


def read_json(paths: Any, cols: Any = None) -> DataFrame:
    """Files with an object of JSON in every line; `cols` names those to keep."""
    df = _spark().read.json(_paths(paths))
    return df if cols is None else df.select(*as_names(cols, "cols"))


def read_text(paths: Any, col_name: str) -> DataFrame:
    """Files of lines, as one column of strings."""
    return _spark().read.text(_paths(paths)).withColumnRenamed("value", col_name)


def from_pandas(frame: pd.DataFrame) -> DataFrame:
    """A frame of pandas; its index is not taken over."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UsageError(
            f"pandas_df should be a DataFrame of pandas, but got {type(frame).__name__}"
        )
    return _spark().createDataFrame(frame)


def read_csv(paths: Any, delimiter: str, header: bool, names: Any, dtype: Any) -> DataFrame:
    """CSV files; see :meth:`FeatureTable.read_csv`."""
    reader = _spark().read.option("sep", delimiter).option("header", header)
    df = reader.csv(_paths(paths))  # all strings, after a look at the first line
    if names is not None:
        names = as_names(names, "names")
        if len(names) != len(df.columns):
            raise UsageError(
                f"names should have the same length as the number of columns, {len(df.columns)}, "
                f"but got {names}"
            )
    if not _covers(dtype, names or df.columns):  # a pass over the data finds the other types
        df = reader.csv(_paths(paths), inferSchema=True)
    return _with_types(df if names is None else df.toDF(*names), dtype)


def _covers(dtype: Any, names: list[str]) -> bool:
    return isinstance(dtype, str | list | tuple) or (
        isinstance(dtype, Mapping) and all(name in dtype for name in names)
    )


def _with_types(df: DataFrame, dtype: Any) -> DataFrame:
    if dtype is None:
        return df
    if isinstance(dtype, str):
        return _cast(df, None, dtype)
    if isinstance(dtype, list | tuple):
        if len(dtype) != len(df.columns):
            raise UsageError(
                "dtype should have the same length as the number of columns, "
                f"{len(df.columns)}, but got {dtype!r}"
            )
        dtype = dict(zip(df.columns, dtype, strict=True))
    if not isinstance(dtype, Mapping):
        raise UsageError(f"dtype should be str, list of str or dict, but got {dtype!r}")
    for name, kind in dtype.items():
        df = _cast(df, [name], kind)
    return df


def _cast(df: DataFrame, names: list[str] | None, dtype: Any) -> DataFrame:
    return Cast(names, dtype).catalyst(df, schema_of(df), {})


# -- rows of tables --------------------------------------------------------------------------------


def concat(frames: list[DataFrame], mode: str, distinct: bool) -> DataFrame:
    """The rows of all frames, by the names of their columns; see :meth:`Table.concat`."""
    if mode not in ("inner", "outer"):
        raise UsageError(f"concat mode should be either outer or inner, but got {mode!r}")
    frames = _with_equal_kinds(frames)
    if mode == "inner":
        common = [
            name for name in frames[0].columns if all(name in each.columns for each in frames)
        ]
        if not common:
            raise UsageError("The tables have no column in common; use mode='outer'")
        frames = [each.select(*map(col, common)) for each in frames]
    united = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    return united.distinct() if distinct else united


def _with_equal_kinds(frames: list[DataFrame]) -> list[DataFrame]:
    """A column of strings in one frame becomes one in all: ANSI mode would parse the strings."""
    textual: dict[str, set[bool]] = {}
    for frame in frames:
        for name, field in schema_of(frame).items():
            textual.setdefault(name, set()).add(kinds.is_text(field.kind))
    mixed = [name for name, answers in textual.items() if len(answers) > 1]
    return [
        frame.withColumns(
            {name: col(name).cast("string") for name in mixed if name in frame.columns}
        )
        for frame in frames
    ]


def drop_duplicates(df: DataFrame, subset: Any, sort_cols: Any, keep: str) -> DataFrame:
    """One row of each group of equal ones; see :meth:`Table.drop_duplicates`."""
    from pyspark.sql import Window

    if keep not in ("min", "max"):
        raise UsageError(f"keep should be either min or max, but got {keep!r}")
    names = df.columns if subset is None else as_names(subset, "subset")
    require_columns(df.columns, names)
    if sort_cols is None:
        return df.dropDuplicates(names)
    order = as_names(sort_cols, "sort_cols")
    require_columns(df.columns, order)
    place, rank = temporary(df, "place"), temporary(df, "rank")
    sorting = [col(name).asc() if keep == "min" else col(name).desc() for name in order]
    window = Window.partitionBy(*map(col, names)).orderBy(*sorting, place)
    ranked = df.withColumn(place, F.monotonically_increasing_id())
    ranked = ranked.withColumn(rank, F.row_number().over(window))
    return ranked.filter(F.col(rank) == 1).drop(place, rank)


def filter_by_frequency(df: DataFrame, columns: Any, min_freq: int, keep_rows: bool) -> DataFrame:
    """Values, or their rows, that occur often enough; see :meth:`FeatureTable`."""

    names = as_names(columns)
    require_columns(df.columns, names)
    check_integer("min_freq", min_freq)
    count = temporary(df, "count")
    counted = df.groupBy(*map(col, names)).agg(F.count("*").alias(count))
    frequent = counted.filter(F.col(count) >= min_freq).drop(count)
    if not keep_rows:
        return frequent
    hidden = {name: temporary([*df.columns], f"key{i}") for i, name in enumerate(names)}
    frequent = frequent.withColumnsRenamed(hidden)
    same = all_of(col(name).eqNullSafe(col(key)) for name, key in hidden.items())
    return df.join(frequent, same, "left_semi")


def shuffle_partitions(df: DataFrame, seed: int | None) -> DataFrame:
    """The rows of each partition in random order; none moves to another partition."""

    return df.sortWithinPartitions(F.rand(random_seed(seed)))


# -- joins in time ---------------------------------------------------------------------------------


def join_as_of(
    df: DataFrame, other: DataFrame, on: Any, time_col: str, ttl: float | None
) -> DataFrame:
    """The latest row of `other` at the time of each row; see :meth:`FeatureTable.join_as_of`.

    The rows of both frames are sorted together, once, and each takes the last row of `other` before
    it.  A join on all earlier times would make their product first.
    """
    from pyspark.sql import Window

    keys = as_names(on, "on")
    for frame in (df, other):
        require_columns(frame.columns, [*keys, check_string(time_col, "time_col")])
    _check_times(time_col, kind_of(df, time_col), kind_of(other, time_col))
    added = [name for name in other.columns if name not in (*keys, time_col)]
    shared = [name for name in added if name in df.columns]
    if shared:
        raise UsageError(f"Both tables have the columns {shared}; rename those of one of them")
    if not added:
        raise UsageError(f"The other table has no columns beside {[*keys, time_col]}")
    if ttl is not None:
        check_number("ttl", ttl, 0)
    known = all_of(col(name).isNotNull() for name in (*keys, time_col))
    names = [f"key_{i}" for i in range(len(keys))]
    shown = [col(key).alias(name) for key, name in zip(keys, names, strict=True)]
    row, fact = (F.struct(*map(col, frame.columns)) for frame in (df, other))
    shown.append(col(time_col).alias("time"))
    rows = df.select(*shown, F.lit(True).alias("asks"), row.alias("row"))
    facts = other.filter(known).select(*shown, F.lit(False).alias("asks"), fact.alias("fact"))
    # at the same time the facts come first: what is known at that time counts
    window = Window.partitionBy(*names).orderBy("time", "asks")
    window = window.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    both = rows.unionByName(facts, allowMissingColumns=True)
    both = both.withColumn("fact", F.last("fact", ignorenulls=True).over(window)).filter("asks")
    fact = F.col("fact")
    if ttl is not None:
        age = _age(F.col("time"), fact[time_col], kind_of(df, time_col))
        fact = F.when(age <= F.lit(ttl), fact)
    return both.select(
        *(F.col("row").getField(name).alias(name) for name in df.columns),
        *(fact.getField(name).alias(name) for name in added),
    )


def _check_times(name: str, ours: str, theirs: str) -> None:
    for kind in (ours, theirs):
        if not kinds.is_number(kind) and kind not in ("date", "timestamp", "timestamp_ntz"):
            raise UsageError(
                f"{name} should hold numbers, dates or timestamps, but its type is "
                f"{kind}; cast it first"
            )
    if kinds.is_number(ours) != kinds.is_number(theirs):
        raise UsageError(
            f"{name} should hold numbers in both tables or in none, but its types are "
            f"{ours} and {theirs}"
        )


def _age(now: Column, then: Column, kind: str) -> Column:
    """The time between, in seconds unless the times are numbers."""
    if kinds.is_integral(kind):
        now, then = now.cast("bigint"), then.cast("bigint")
    elif not kinds.is_number(kind):
        now, then = now.cast("timestamp").cast("double"), then.cast("timestamp").cast("double")
    return now - then


# -- figures of columns and groups ----------------------------------------------------------------


def get_stats(df: DataFrame, columns: Any, aggr: Any) -> dict[str, Any]:
    """Figures of columns; see :meth:`Table.get_stats`."""

    names = numeric_columns(df) if columns is None else as_names(columns)
    require_columns(df.columns, [*names, *(aggr if isinstance(aggr, Mapping) else ())])
    wanted = {name: _stats_of(aggr, name) for name in names}
    for name, stats in wanted.items():
        needs_numbers = {"avg", "sum"} & set(stats)
        if needs_numbers and not kinds.is_number(kind_of(df, name)):
            raise UsageError(
                f"{sorted(needs_numbers)} need numbers, but the column {name} is of type "
                f"{kind_of(df, name)}"
            )
    if not names:
        return {}
    figures = [getattr(F, stat)(col(name)) for name, stats in wanted.items() for stat in stats]
    row = df.agg(*(each.alias(str(i)) for i, each in enumerate(figures))).first()
    values = iter(cast("Row", row))
    of_columns = {name: [next(values) for _ in stats] for name, stats in wanted.items()}
    return {name: each[0] if len(each) == 1 else each for name, each in of_columns.items()}


def _stats_of(aggr: Any, column: str) -> list[str]:
    if isinstance(aggr, Mapping):
        if column not in aggr:
            raise UsageError(f"aggr has nothing for the column {column}: {dict(aggr)!r}")
        aggr = aggr[column]
    stats = as_names(aggr, "aggr")
    for stat in stats:
        if stat not in _STATS:
            raise UsageError(f"aggr should be one of {', '.join(_STATS)}, but get {stat!r}")
    return stats


def extremes(df: DataFrame, columns: Any, stat: str) -> DataFrame:
    """A table of the columns ``column`` (string) and `stat` (double), min or max of each."""
    names = numeric_columns(df) if columns is None else as_names(columns)
    if names:
        names_of(df, names, kinds.is_number, "numbers")
    stats = get_stats(df, names, stat) if names else {}
    rows = [(name, None if value is None else float(value)) for name, value in stats.items()]
    return df.sparkSession.createDataFrame(rows, f"column string, `{stat}` double")


def group_by(df: DataFrame, columns: Any, agg: Any, join: bool) -> DataFrame:
    """Aggregates of groups; see :meth:`FeatureTable.group_by`."""
    keys = as_names(columns) if columns else []
    require_columns(df.columns, keys)
    if join and not keys:
        raise UsageError("columns should not be empty if join is True: there is nothing to join on")
    figures = [_aggregate(df, name, each) for name, each in _wanted_aggregates(df, keys, agg)]
    if not figures:
        raise UsageError(f"There is nothing to aggregate: all columns of {df.columns} are keys")
    grouped = df.groupBy(*map(col, keys)).agg(*figures)
    return _join_groups(df, grouped, keys) if join else grouped


def _wanted_aggregates(df: DataFrame, keys: list[str], agg: Any) -> list[tuple[str, str]]:
    if isinstance(agg, Mapping):
        require_columns(df.columns, agg)
        return [(name, each) for name, some in agg.items() for each in as_names(some, "agg")]
    if not isinstance(agg, str | list | tuple):
        raise UsageError(f"agg should be str, list or dict, but got {agg!r}")
    others = [name for name in df.columns if name not in keys]
    return [(name, each) for each in as_names(agg, "agg") for name in others]


def _aggregate(df: DataFrame, name: str, agg: str) -> Column:

    if agg not in _AGGREGATES:
        raise UsageError(f"agg should be one of {', '.join(_AGGREGATES)}, but got {agg!r}")
    function = _AGGREGATES[agg]
    if function in _ARITHMETIC and kinds.is_text(kind_of(df, name)):
        number = col(name).try_cast("double")  # text without a number counts as null
        begin = _SHOWN.get(function, f"{function}(")
        return getattr(F, function)(number).alias(f"{begin}{name})")
    return getattr(F, function)(col(name))


def _join_groups(df: DataFrame, grouped: DataFrame, keys: list[str]) -> DataFrame:
    """The rows of `df` with the figures of their groups, of groups of null too."""
    known = [*df.columns, *grouped.columns]
    hidden = {key: temporary(known, f"key{i}") for i, key in enumerate(keys)}
    grouped = grouped.withColumnsRenamed(hidden)
    same = all_of(col(key).eqNullSafe(col(other)) for key, other in hidden.items())
    return df.join(grouped, same, "left").drop(*hidden.values())


def feature_schema(df: DataFrame, names: Sequence[str]) -> FeatureSchema:
    """Return types, sizes and lengths of columns; see :meth:`FeatureTable.feature_schema`."""
    figures: dict[str, Column] = {}
    for i, name in enumerate(names):
        for figure, column in _figures(col(name), kind_of(df, name)).items():
            figures[f"{i}_{figure}"] = column
    values: dict[str, Any] = {}
    if figures:
        row = df.agg(*(column.alias(name) for name, column in figures.items())).first()
        values = cast("Row", row).asDict()
    return FeatureSchema(
        {name: _feature(kind_of(df, name), i, values) for i, name in enumerate(names)}
    )


def _figures(value: Column, kind: str) -> dict[str, Column]:
    """The aggregates that tell the extremes of a column and the lengths at each depth."""

    figures, depth = {}, 0
    while kinds.is_array(kind):
        lengths = F.array(F.when(value.isNotNull(), F.size(value)))
        if depth:  # the elements of `value` are the arrays of this depth
            inner = F.filter(value, lambda each: each.isNotNull())
            lengths, value = F.transform(inner, lambda each: F.size(each)), F.flatten(inner)
        figures[f"shortest_{depth}"] = F.min(F.array_min(lengths))
        figures[f"longest_{depth}"] = F.max(F.array_max(lengths))
        kind, depth = kinds.element_of(kind), depth + 1
    if kinds.is_integral(kind):
        low, high = (F.array_min(value), F.array_max(value)) if depth else (value, value)
        figures |= {"smallest": F.min(low), "largest": F.max(high)}
    return figures


def _feature(kind: str, i: int, figures: dict) -> Feature:
    shape: list[int | None] = []
    while kinds.is_array(kind):
        short, long = (figures[f"{i}_{each}_{len(shape)}"] for each in ("shortest", "longest"))
        shape.append(short if short == long else None)
        kind = kinds.element_of(kind)
    smallest, largest = (figures.get(f"{i}_{each}") for each in ("smallest", "largest"))
    if not kinds.is_integral(kind):
        cardinality = None
    elif largest is None:
        cardinality = 0
    else:
        cardinality = largest + 1 if cast("int", smallest) >= 0 else None
    return Feature(kind, cardinality, tuple(shape))


# -- functions of users, and encoders of text -----------------------------------------------------


def apply(
    df: DataFrame, in_col: Any, out_col: str, func: Callable, dtype: Any, vectorized: bool
) -> DataFrame:
    """A column of what a function returns; see :meth:`FeatureTable.apply`."""

    check_string(out_col, "out_col")
    if not callable(func):
        raise UsageError(f"func should be a function, got {func!r}")
    names = as_names(in_col, "in_col")
    require_columns(df.columns, names)
    if vectorized:
        return replace(df, {out_col: _on_series(func, dtype, isinstance(in_col, str), names)})
    if isinstance(in_col, str):
        return replace(df, {out_col: F.udf(func, dtype)(col(in_col))})

    def on_list(*values):
        return func(list(values))

    return replace(df, {out_col: F.udf(on_list, dtype)(*map(col, names))})


def _on_series(func: Callable, dtype: Any, is_single: bool, names: list[str]) -> Column:
    import pandas as pd

    def on_series(*series):
        results = func(series[0]) if is_single else func(list(series))
        return results if isinstance(results, pd.Series) else pd.Series(results)

    function = F.pandas_udf(on_series, dtype)  # type: ignore[call-overload]  # pyspark's stubs lack a default
    return function(*map(col, names))


def string_embed(
    df: DataFrame, columns: Any, encoder: Any, reduce_dim: int | None, replaced: bool
) -> DataFrame:
    """Arrays of numbers in the place of texts; see :meth:`FeatureTable.string_embed`."""
    names = names_of(df, columns, kinds.is_text, "strings")
    if not callable(encoder):
        encoder = _SentenceEncoder(check_string(encoder, "bert_model"))
    outputs = {name: name if replaced else f"{name}_embed" for name in names}
    function = _embedding_function(encoder)
    df = replace(df, {output: function(col(name)) for name, output in outputs.items()})
    if reduce_dim is not None:
        for output in outputs.values():
            df = _reduced(df, output, reduce_dim)
    return df


def _embedding_function(encoder: Callable) -> Callable:
    from pyspark.sql.functions import pandas_udf

    # without annotations: those of this module are text, which pandas_udf does not read
    def embed(texts):
        import pandas as pd

        distinct = texts.dropna().unique().tolist()
        matrix = np.asarray(encoder(distinct), dtype=float) if distinct else []
        vectors = dict(zip(distinct, map(list, matrix), strict=True))
        cells = [vectors.get(text) if isinstance(text, str) else None for text in texts]
        return pd.Series(cells, dtype=object)

    return pandas_udf(embed, "array<double>")  # type: ignore[call-overload]  # pyspark's stubs lack a default


class _SentenceEncoder:
    """A model of sentence-transformers, loaded by each Python worker when it first needs it."""

    def __init__(self, name: str):
        import importlib.util

        if importlib.util.find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                "sentence_transformers is not installed; run: pip install sentence-transformers, "
                "or pass a function from a list of texts to a matrix as bert_model"
            )
        self.name = name
        self._model: Any = None

    def __getstate__(self):
        return {"name": self.name, "_model": None}

    def __call__(self, texts: list[str]) -> Any:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(self.name)
        return self._model.encode(texts)


def _reduced(df: DataFrame, name: str, dimensions: int) -> DataFrame:
    """Arrays projected on their principal components."""
    from pyspark.ml.feature import PCA
    from pyspark.ml.functions import array_to_vector

    check_integer("reduce_dim", dimensions, 1)
    present = df.filter(col(name).isNotNull())
    first = present.select(F.size(col(name))).first()
    if first is None:
        return df
    if first[0] < dimensions:
        raise UsageError(
            f"source vector size {first[0]} must be no less than k={dimensions}: reduce_dim can "
            "only make embeddings shorter"
        )
    vectors = present.select(array_to_vector(col(name)).alias("vector"))
    components = PCA(k=dimensions, inputCol="vector", outputCol="out").fit(vectors).pc.toArray()
    rows = [F.array(*(F.lit(float(x)) for x in column)) for column in components.T]

    def product(row: Column) -> Column:
        pairs = F.zip_with(col(name), row, lambda a, b: a * b)
        return F.aggregate(pairs, F.lit(0.0), lambda total, each: total + each)

    projected = F.array(*(product(row) for row in rows))
    return replace(df, {name: F.when(col(name).isNotNull(), projected)})
