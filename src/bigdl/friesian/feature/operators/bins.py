"""Numbers cut into bins, and whole numbers spread over indicator columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    check_count,
    check_different,
    col,
    is_fractional,
    is_integral,
    is_numeric,
    names_of,
    replace,
    type_of,
)
from bigdl.friesian.feature.operators.statistics import get_stats

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "bin_edges",
    "check_indicators",
    "cut_bins",
    "one_hot_encode",
    "one_hot_sizes",
    "quantile_edges",
]

_RELATIVE_ERROR = 0.001  # of the rank that an edge has


def bin_edges(df: DataFrame, columns: Any, bins: Any) -> dict[str, list[float]]:
    """The edges of the bins of columns.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    columns : str or list of str
    bins : int, list of numbers, or dict of str to one of them
        A list has the edges; an int is the number of equal parts from the smallest to the largest
        value, which one job finds for all such columns.

    Returns
    -------
    dict of str to list of float
        Ascending.
    """
    names = names_of(df, columns, is_numeric, "numbers")
    wanted = {name: _of_column(bins, name, "bins") for name in names}
    for each in wanted.values():
        _check_bins(each)
    counted = [name for name, each in wanted.items() if isinstance(each, int)]
    extremes = _extremes(df, counted) if counted else {}
    return {
        name: _equal_parts(name, *extremes[name], each) if name in extremes else list(each)
        for name, each in wanted.items()
    }


def quantile_edges(df: DataFrame, columns: Any, parts: Any) -> dict[str, list[float]]:
    """Edges between bins of about as many rows each; see :meth:`FeatureTable.quantile_edges`."""
    names = names_of(df, columns, is_numeric, "numbers")
    check_count(parts, "parts", 2)
    plain = df.select(*(col(name).cast("double").alias(str(i)) for i, name in enumerate(names)))
    shares = [i / parts for i in range(1, parts)]
    found = plain.approxQuantile([str(i) for i in range(len(names))], shares, _RELATIVE_ERROR)
    empty = [name for name, edges in zip(names, found, strict=True) if not edges]
    if empty:
        raise UsageError(f"The columns {empty} have no value that bins could be made of")
    return {name: sorted(set(edges)) for name, edges in zip(names, found, strict=True)}


def _of_column(value: Any, name: str, what: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if name not in value:
        raise UsageError(f"{what} has nothing for the column {name}: {dict(value)!r}")
    return value[name]


def _check_bins(bins: Any) -> None:
    if isinstance(bins, int) and not isinstance(bins, bool):
        if bins < 1:
            raise UsageError(f"bins should be a whole number from 1 on, got {bins!r}")
        return
    is_list = isinstance(bins, list | tuple) and len(bins) > 0
    if not is_list or not all(type(e) in (int, float) and math.isfinite(e) for e in bins):
        raise UsageError(f"bins should be int or a list of numbers, but got {bins!r}")
    if any(a >= b for a, b in pairwise(bins)):
        raise UsageError(f"The edges in bins should be ascending, but got {bins!r}")


def _extremes(df: DataFrame, names: list[str]) -> dict[str, list]:
    from pyspark.sql import functions as F

    finite = {
        name: F.when(~F.isnan(col(name)) & (F.abs(col(name)) < math.inf), col(name))
        for name in names
        if is_fractional(type_of(df, name))
    }
    return get_stats(replace(df, finite).select(*map(col, names)), names, ["min", "max"])


def _equal_parts(name: str, low: Any, high: Any, parts: int) -> list[float]:
    if low is None:
        raise UsageError(f"The column {name} has no value that bins could be made of; give edges")
    low, high = float(low), float(high)
    return [low + (high - low) * i / parts for i in range(parts)] + [high]


def cut_bins(
    df: DataFrame, edges: Mapping[str, Sequence[float]], labels: Any, out_cols: Any, drop: bool
) -> DataFrame:
    """The bin of every number; see :meth:`FeatureTable.cut_bins`."""
    names = list(edges)
    outputs = [f"{name}_bin" for name in names] if out_cols is None else as_names(out_cols)
    if len(outputs) != len(names):
        raise UsageError(
            f"out_cols should have the same length as columns, but got {outputs} for {names}"
        )
    check_different(outputs, "out_cols")
    added = {}
    for name, output in zip(names, outputs, strict=True):
        words = None if labels is None else _of_labels(labels, name)
        if words is not None and len(words) != len(edges[name]) + 1:
            raise UsageError(
                f"labels should be of length {len(edges[name]) + 1}, one more than the edges of "
                f"{name}, but got {len(words)}"
            )
        added[output] = _bin(df, name, edges[name], words)
    result = replace(df, added)
    return result.drop(*(name for name in names if name not in outputs)) if drop else result


def _of_labels(labels: Any, name: str) -> list[str] | None:
    words = labels.get(name) if isinstance(labels, Mapping) else labels
    if words is not None and not isinstance(words, list | tuple):
        raise UsageError(f"labels should be a list of str or a dict of them, but got {labels!r}")
    return words


def _bin(df: DataFrame, name: str, edges: Sequence[float], labels: Sequence | None) -> Column:
    """The number of edges that are not above the value, as a balanced tree of comparisons."""
    from pyspark.sql import functions as F

    value = col(name)

    def result(number: int) -> Column:
        return F.lit(number if labels is None else labels[number])

    def between(first: int, last: int) -> Column:
        if first == last:
            return result(first)
        middle = (first + last) // 2
        below = value < F.lit(edges[middle])
        return F.when(below, between(first, middle)).otherwise(between(middle + 1, last))

    missing = value.isNull()
    if is_fractional(type_of(df, name)):
        missing = missing | F.isnan(value)
    none = F.lit(len(edges) + 1) if labels is None else F.lit(None)
    return F.when(missing, none).otherwise(between(0, len(edges)))


def one_hot_sizes(df: DataFrame, columns: Any, sizes: Any) -> dict[str, int]:
    """How many indicators each column gets: what was asked, or its largest value plus 1."""
    names = names_of(df, columns, is_integral, "whole numbers", advice="encode it first")
    if sizes is None:
        largest = get_stats(df, names, "max")
        known = {name: -1 if each is None else max(each, -1) for name, each in largest.items()}
        return {name: each + 1 for name, each in known.items()}
    given = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    if not all(type(each) is int and each > 0 for each in given):
        raise UsageError(f"sizes should be positive int or a list of them, but got {sizes!r}")
    if len(given) != len(names):
        raise UsageError(
            f"sizes should have the same length as columns, but got {given} for {names}"
        )
    return dict(zip(names, given, strict=True))


def check_indicators(made: Sequence[str], kept: Sequence[str]) -> None:
    """Check that indicators have names of their own."""
    taken = set(kept)
    twins = sorted(name for name, count in Counter(made).items() if count > 1 or name in taken)
    if twins:
        raise UsageError(f"There would be several columns {twins}; use another prefix")


def one_hot_encode(
    df: DataFrame, sizes: Mapping[str, int], prefix: Any, keep_original: bool
) -> DataFrame:
    """Columns of 0 and 1 in the place of each column.

    A null and a value outside 0 … size − 1 has no indicator that is 1.
    """
    from pyspark.sql import functions as F

    prefixes = list(sizes) if prefix is None else as_names(prefix, "prefix")
    if len(prefixes) != len(sizes):
        raise UsageError(
            f"prefix should have the same length as columns, but got {prefixes} for {list(sizes)}"
        )
    prefix_of = dict(zip(sizes, prefixes, strict=True))
    kept = [name for name in df.columns if keep_original or name not in sizes]
    made = [f"{prefix_of[name]}_{j}" for name, size in sizes.items() for j in range(size)]
    check_indicators(made, kept)
    columns = []
    for name in df.columns:
        if name not in sizes or keep_original:
            columns.append(col(name))
        if name in sizes:
            columns += [
                F.when(col(name) == j, 1).otherwise(0).alias(f"{prefix_of[name]}_{j}")
                for j in range(sizes[name])
            ]
    return df.select(*columns)
