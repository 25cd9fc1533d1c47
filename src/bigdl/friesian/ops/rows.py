"""Rows: read from files, chosen, ordered, united and joined."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.cells import Cast
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.spark import (
    F,
    all_of,
    as_names,
    check_string,
    col,
    kind_of,
    random_seed,
    renamed,
    schema_of,
    temporary,
)

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame, SparkSession


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
    mixed = [name for name, found in textual.items() if len(found) > 1]
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


def join(
    left: DataFrame,
    right: DataFrame,
    on: Any,
    how: str,
    lsuffix: str | None,
    rsuffix: str | None,
) -> DataFrame:
    """The join of two frames; see :meth:`FeatureTable.join`."""
    keys = None if on is None or on == [] else as_names(on, "on")
    if keys is None and how != "cross":
        raise UsageError(f"on should be str or a list of str for a join of type {how!r}; got None")
    if keys is not None:
        require_columns(left.columns, keys)
        require_columns(right.columns, keys)
    shared = [name for name in left.columns if name in right.columns and name not in (keys or [])]
    if lsuffix is not None:
        left = renamed(left, {name: name + lsuffix for name in shared})
    if rsuffix is not None:
        right = renamed(right, {name: name + rsuffix for name in shared})
    if keys is None:
        return left.crossJoin(right)
    return left.join(right, keys, how)


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
    rows = df.select(
        *shown, col(time_col).alias("time"), F.lit(True).alias("asks"), _all(df).alias("row")
    )
    facts = other.filter(known).select(
        *shown, col(time_col).alias("time"), F.lit(False).alias("asks"), _all(other).alias("fact")
    )
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


def _all(df: DataFrame) -> Column:

    return F.struct(*(col(name).alias(name) for name in df.columns))


def _age(now: Column, then: Column, kind: str) -> Column:
    """The time between, in seconds unless the times are numbers."""
    if kinds.is_integral(kind):
        return now.cast("bigint") - then.cast("bigint")
    if kinds.is_number(kind):
        return now - then
    return now.cast("timestamp").cast("double") - then.cast("timestamp").cast("double")
