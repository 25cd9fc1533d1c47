"""Joins, groups and orders of the rows of all shards, by Spark SQL.

The columns are called ``c0``, ``c1``, ... on the way, so that no name needs quotes, and rows carry
their place, so that every result has a defined order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards.frames import frames_of, spark_frame

__all__ = ["deduplicated", "described", "grouped", "merged", "ordered"]

_PLACE = "place"
_FUNCTIONS = [
    *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "approx_count_distinct"),
    *("stddev", "stddev_pop", "variance", "var_pop", "skewness", "kurtosis"),
    *("collect_list", "collect_set", "first", "last"),
]
_SPELLED = {"sumDistinct": "sum_distinct"}
_HOW = {"inner": "inner", "left": "left", "right": "right", "outer": "full"}


def _placed(frame, place: str = _PLACE):
    from pyspark.sql import functions as F

    return frame.withColumn(place, F.monotonically_increasing_id())


def ordered(rdd, columns: Sequence | None, ascending: bool | Sequence):
    """All rows in the order of some columns, nulls last, equal ones as they were."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    columns = names if columns is None else columns
    falling = [not each for each in _per_column(ascending, len(columns))]
    keys = [
        F.desc_nulls_last(_safe(names, column)) if falls else F.asc_nulls_last(_safe(names, column))
        for column, falls in zip(columns, falling, strict=True)
    ]
    sorted_ = _placed(frame).orderBy(*keys, _PLACE).drop(_PLACE)
    return frames_of(sorted_, names=names)


def _per_column(ascending, number):
    if isinstance(ascending, bool):
        return [ascending] * number
    if len(ascending) != number:
        raise UsageError(
            f"ascending must be True, False or one of them for each of {number} columns, "
            f"got {ascending!r}"
        )
    return list(ascending)


def _safe(names, column) -> str:
    return f"c{names.index(column)}"


def deduplicated(rdd):
    """The first of equal rows, in the order of the rows."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    columns = frame.columns
    first = _placed(frame).groupBy(*columns).agg(F.min(_PLACE).alias(_PLACE))
    return frames_of(first.orderBy(_PLACE).select(*columns), names=names)


def described(rdd, columns: Sequence | None):
    """Spark's summary of columns as a pandas frame."""
    frame, names = spark_frame(rdd, safe=True)
    chosen = names if columns is None else list(columns)
    safe = [_safe(names, column) for column in chosen]
    result = frame.describe(*safe).toPandas() if safe else frame.describe().toPandas()
    back = {f"c{i}": name for i, name in enumerate(names)}
    return result.rename(columns=back)


def grouped(rdd, columns: Sequence, agg: Any, join: bool):
    """Aggregates of groups in the order of their keys, or of every row's group beside it."""
    from pyspark.sql import functions as F

    frame, names = spark_frame(rdd, safe=True)
    others = [name for name in names if name not in columns]
    wanted = _aggregates(agg, others, names)
    keys = [_safe(names, column) for column in columns]
    if not wanted:
        outputs, aggregates = ["count"], [F.count(F.lit(1)).alias("a0")]
    else:
        outputs = [
            f"sum(DISTINCT {column})"
            if function == "sumDistinct"
            else f"{'avg' if function == 'mean' else function}({column})"
            for column, function in wanted
        ]
        aggregates = [
            getattr(F, _SPELLED.get(function, function))(_safe(names, column)).alias(f"a{i}")
            for i, (column, function) in enumerate(wanted)
        ]
    groups = frame.groupBy(*keys).agg(*aggregates)
    values = [f"a{i}" for i in range(len(outputs))]
    if not join:
        order = [F.asc_nulls_last(key) for key in keys] or [F.lit(1)]
        return frames_of(groups.orderBy(*order).select(*keys, *values), names=[*columns, *outputs])
    rows = _placed(frame)
    renamed = groups.select(*(F.col(k).alias(f"k{k}") for k in keys), *values)
    same = F.lit(True)
    for key in keys:
        same = same & F.col(key).eqNullSafe(F.col(f"k{key}"))
    joined = rows.join(renamed, same, "left").orderBy(_PLACE)
    return frames_of(joined.select(*frame.columns, *values), names=[*names, *outputs])


def _aggregates(agg, others, names) -> list[tuple[Any, str]]:
    if isinstance(agg, str):
        wanted = [(column, agg) for column in others]
    elif isinstance(agg, list):
        wanted = [(column, function) for column in others for function in agg]
    elif isinstance(agg, dict):
        wanted = [
            (column, function)
            for column, functions in agg.items()
            for function in ([functions] if isinstance(functions, str) else functions)
        ]
    else:
        raise UsageError(
            f"agg must be a name of a function, a list of them, or a dict by column, got {agg!r}"
        )
    for column, function in wanted:
        if column not in names:
            raise UsageError(f"agg names the column {column!r}, which is not in {names}")
        if function not in _FUNCTIONS:
            raise UsageError(f"agg must be of {_FUNCTIONS}, got {function!r}")
    if not wanted and agg != "count":
        raise UsageError("There is no column to aggregate besides those that are grouped by")
    return wanted


def merged(left_rdd, right_rdd, how: str, on: Sequence | None):
    """Rows of two frames joined where keys are equal, a null being equal to a null.

    In the order of the left rows (of the right ones for ``"right"``, of the keys for ``"outer"``),
    then of the others.
    """
    from pyspark.sql import functions as F

    if how not in _HOW:
        raise UsageError(f"how must be one of {list(_HOW)}, got {how!r}")
    left, left_names = spark_frame(left_rdd, safe=True)
    right, right_names = spark_frame(right_rdd, safe=True)
    keys = [name for name in left_names if name in right_names] if on is None else list(on)
    missing = [key for key in keys if key not in left_names or key not in right_names]
    if missing or not keys:
        raise UsageError(
            f"Both frames must have the columns that they are merged on, {keys or 'none in common'}"
            f"; they have {left_names} and {right_names}"
        )
    left = _placed(left.toDF(*(f"l{c}" for c in left.columns)), "l")
    right = _placed(right.toDF(*(f"r{c}" for c in right.columns)), "r")
    same, types = F.lit(True), (dict(left.dtypes), dict(right.dtypes))
    for key in keys:
        one, two = f"l{_safe(left_names, key)}", f"r{_safe(right_names, key)}"
        if _is_text(types[0][one]) != _is_text(types[1][two]):
            raise UsageError(
                f"Column {key!r} is {types[0][one]} in one frame and {types[1][two]} in the other; "
                "give it one type first"
            )
        same = same & F.col(one).eqNullSafe(F.col(two))
    joined = left.join(right, same, _HOW[how])
    columns, names = [], []
    for name in left_names:
        column = F.col(f"l{_safe(left_names, name)}")
        if name in keys:
            column = F.coalesce(column, F.col(f"r{_safe(right_names, name)}"))
        columns.append(column)
        names.append(f"{name}_x" if name in right_names and name not in keys else name)
    for name in right_names:
        if name not in keys:
            columns.append(F.col(f"r{_safe(right_names, name)}"))
            names.append(f"{name}_y" if name in left_names else name)
    safe = [column.alias(f"c{i}") for i, column in enumerate(columns)]
    order = {"right": ["r", "l"]}.get(how, ["l", "r"])
    order = [F.asc_nulls_last(place) for place in order]
    if how == "outer":
        position = {name: i for i, name in enumerate(left_names)}
        order = [F.asc_nulls_last(f"c{position[key]}") for key in keys] + order
    result = joined.select(*safe, "l", "r").orderBy(*order).drop("l", "r")
    return frames_of(result, names=names)


def _is_text(type_: str) -> bool:
    return type_ == "string"
