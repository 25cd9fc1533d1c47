"""What was known at the time of a record: a join that never looks into the future."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_string,
    col,
    is_integral,
    is_numeric,
    require_columns,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["join_as_of"]


def join_as_of(
    df: DataFrame, other: DataFrame, on: Any, time_col: str, ttl: float | None
) -> DataFrame:
    """The latest row of `other` at the time of each row; see :meth:`FeatureTable.join_as_of`.

    The rows of both frames are sorted together, once, and each takes the last row of `other` before
    it.  A join on all earlier times would make their product first.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    keys = as_names(on, "on")
    for frame in (df, other):
        require_columns(frame, [*keys, check_string(time_col, "time_col")])
    _check_times(time_col, type_of(df, time_col), type_of(other, time_col))
    added = [name for name in other.columns if name not in (*keys, time_col)]
    shared = [name for name in added if name in df.columns]
    if shared:
        raise UsageError(f"Both tables have the columns {shared}; rename those of one of them")
    if not added:
        raise UsageError(f"The other table has no columns beside {[*keys, time_col]}")
    _check_ttl(ttl)
    known = reduce(lambda a, b: a & b, (col(name).isNotNull() for name in (*keys, time_col)))
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
        age = _age(F.col("time"), fact[time_col], type_of(df, time_col))
        fact = F.when(age <= F.lit(ttl), fact)
    return both.select(
        *(F.col("row").getField(name).alias(name) for name in df.columns),
        *(fact.getField(name).alias(name) for name in added),
    )


def _check_times(name: str, ours: DataType, theirs: DataType) -> None:
    from pyspark.sql import types as T

    for kind in (ours, theirs):
        times = T.DateType | T.TimestampType | T.TimestampNTZType
        if not is_numeric(kind) and not isinstance(kind, times):
            raise UsageError(
                f"{name} should hold numbers, dates or timestamps, but its type is "
                f"{kind.simpleString()}; cast it first"
            )
    if is_numeric(ours) != is_numeric(theirs):
        raise UsageError(
            f"{name} should hold numbers in both tables or in none, but its types are "
            f"{ours.simpleString()} and {theirs.simpleString()}"
        )


def _check_ttl(ttl: Any) -> None:
    is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is not None and (not is_number or not ttl >= 0):
        raise UsageError(f"ttl should be a number from 0 on, or None, but got {ttl!r}")


def _all(df: DataFrame) -> Column:
    from pyspark.sql import functions as F

    return F.struct(*(col(name).alias(name) for name in df.columns))


def _age(now: Column, then: Column, kind: DataType) -> Column:
    """The time between, in seconds unless the times are numbers."""
    if is_integral(kind):
        return now.cast("bigint") - then.cast("bigint")
    if is_numeric(kind):
        return now - then
    return now.cast("timestamp").cast("double") - then.cast("timestamp").cast("double")
