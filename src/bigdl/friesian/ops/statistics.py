"""Figures of columns and groups, each set of them by one pass over the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.kinds import require_columns
from bigdl.friesian.ops.schema import Feature, FeatureSchema
from bigdl.friesian.ops.spark import (
    F,
    all_of,
    as_names,
    col,
    kind_of,
    names_of,
    numeric_columns,
    temporary,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

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
