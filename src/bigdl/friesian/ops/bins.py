"""Numbers cut into bins, and whole numbers spread over indicator columns."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.columns import as_names, check_different, col, replace
from bigdl.friesian.ops.operator import (
    Cell,
    Extremes,
    Field,
    Function,
    Operator,
    Quantiles,
    Request,
    Schema,
    State,
    require_kind,
    require_numbers,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["CutBins", "OneHotEncode"]


class Bin(Function):
    """The number of edges that are not above a value, or its label."""

    def __init__(self, edges: Sequence[float], labels: Sequence[str] | None):
        self.edges, self.labels = list(edges), None if labels is None else list(labels)
        self.is_whole = all(isinstance(edge, int) for edge in edges)

    def array(self, values: pa.Array) -> pa.Array:
        whole = self.is_whole and pa.types.is_integer(values.type)
        kind = pa.int64() if whole else pa.float64()
        numbers = values.fill_null(pa.scalar(0, values.type)).cast(kind, safe=False).to_numpy()
        edges = np.array(self.edges, np.int64 if whole else np.float64)
        found = np.searchsorted(edges, numbers, side="right").astype(np.int32)
        missing = values.is_null().to_numpy(zero_copy_only=False) | (numbers != numbers)
        found[missing] = len(self.edges) + 1
        if self.labels is None:
            return pa.array(found)
        return pa.array([*self.labels, None], pa.string()).take(pa.array(found))

    def value(self, value: float | None) -> int | str | None:
        if value is None or value != value:
            return len(self.edges) + 1 if self.labels is None else None
        whole = self.is_whole and isinstance(value, int)
        found = bisect.bisect_right(self.edges, value if whole else float(value))
        return found if self.labels is None else self.labels[found]

    def column(self, value: Column, kind: str) -> Column:
        """Return the bin of a column of Spark, by a balanced tree of comparisons."""

        def result(number: int) -> Column:
            return F.lit(number if self.labels is None else self.labels[number])

        def between(first: int, last: int) -> Column:
            if first == last:
                return result(first)
            middle = (first + last) // 2
            below = value < F.lit(self.edges[middle])
            return F.when(below, between(first, middle)).otherwise(between(middle + 1, last))

        missing = value.isNull()
        if kinds.is_fractional(kind):
            missing = missing | F.isnan(value)
        none = F.lit(len(self.edges) + 1) if self.labels is None else F.lit(None)
        return F.when(missing, none).otherwise(between(0, len(self.edges)))


@dataclass(frozen=True)
class CutBins(Operator):
    """``cut_bins`` and ``quantile_bins``; the state has the edges of each column.

    Attributes
    ----------
    bins : dict of str to (int or list of float)
        By column: edges, or how many bins.
    by_quantiles : bool
        Whether the bins that are counted have about as many rows each, rather than equal widths.
    labels : dict of str to list of str
        Of some columns.
    out_cols : list of str
    """

    bins: dict[str, Any]
    by_quantiles: bool
    labels: dict[str, list[str]]
    out_cols: list[str]
    drop: bool
    method = "cut_bins"

    @classmethod
    def of(
        cls,
        columns: Any,
        bins: Any,
        labels: Any,
        out_cols: Any,
        drop: bool,
        by_quantiles: bool = False,
    ) -> CutBins:
        """Return the operator for the arguments that users give."""
        names = as_names(columns)
        outputs = [f"{name}_bin" for name in names] if out_cols is None else as_names(out_cols)
        for name in names:
            if isinstance(bins, Mapping) and name not in bins:
                raise UsageError(f"bins has nothing for the column {name}: {dict(bins)!r}")
        wanted = {name: bins[name] if isinstance(bins, Mapping) else bins for name in names}
        words = {
            name: labels.get(name) if isinstance(labels, Mapping) else labels for name in names
        }
        for each in words.values():
            if each is not None and not isinstance(each, list | tuple):
                raise UsageError(
                    f"labels should be a list of str or a dict of them, but got {each!r}"
                )
        given = {name: list(each) for name, each in words.items() if each is not None}
        return cls(wanted, by_quantiles, given, outputs, drop)

    def __post_init__(self) -> None:
        least = 2 if self.by_quantiles else 1
        for bins in self.bins.values():
            _check_bins(bins, least)
        if len(self.out_cols) != len(self.bins):
            raise UsageError(
                f"out_cols should have the same length as columns, but got {self.out_cols} for "
                f"{list(self.bins)}"
            )
        check_different(self.out_cols, "out_cols")
        for name, words in self.labels.items():
            if not isinstance(self.bins[name], int):
                _check_labels(name, self.bins[name], words)

    @property
    def reads(self) -> list[str]:
        return list(self.bins)

    def requests(self, before: Schema) -> dict[str, Request]:
        require_kind(before, list(self.bins), kinds.is_number, "numbers")
        found: dict[str, Request] = {}
        for name, bins in self.bins.items():
            if isinstance(bins, int):
                asked = quantiles(name, bins) if self.by_quantiles else Extremes((name,), True)
                found[name] = asked
        return found

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        edges = {
            name: self._edges(name, bins, answers[name]) if name in answers else bins
            for name, bins in self.bins.items()
        }
        for name, words in self.labels.items():
            _check_labels(name, edges[name], words)
        return {"edges": edges}

    def _edges(self, name: str, bins: int, answer: Sequence) -> list[float]:
        if not answer or answer[0] is None:
            raise UsageError(
                f"The column {name} has no value that bins could be made of; give edges"
            )
        if self.by_quantiles:
            return sorted(set(answer))
        low, high = map(float, answer)
        return [*(low + (high - low) * i / bins for i in range(bins)), high]

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        require_numbers(before, list(self.bins))
        cells = []
        for name, output in zip(self.bins, self.out_cols, strict=True):
            function = None if state is None else self._function(name, before, state)
            made = Field("string") if name in self.labels else Field("int")
            if name not in self.labels and function is not None:
                made = Field("int", len(function.edges) + 2)
            cells.append(Cell((name,), output, made, function))
        return cells

    def _function(self, name: str, before: Schema, state: State) -> Bin:
        return Bin(_typed(state["edges"][name], before[name].kind), self.labels.get(name))

    def after(self, before: Schema, state: State | None) -> Schema:
        found = super().after(before, state)
        return {name: each for name, each in found.items() if name not in self._dropped}

    @property
    def _dropped(self) -> set[str]:
        return set(self.bins) - set(self.out_cols) if self.drop else set()

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        made = {
            output: self._function(name, before, state).column(col(name), before[name].kind)
            for name, output in zip(self.bins, self.out_cols, strict=True)
        }
        return replace(df, made).drop(*self._dropped)


def quantiles(name: str, parts: int) -> Quantiles:
    """Return the request for the edges between bins of about as many rows each."""
    return Quantiles((name,), tuple(i / parts for i in range(1, parts)))


def _check_labels(name: str, edges: Sequence[float], words: Sequence[str]) -> None:
    if len(words) != len(edges) + 1:
        raise UsageError(
            f"labels should be of length {len(edges) + 1}, one more than the edges of {name}, but "
            f"got {len(words)}"
        )


def _typed(edges: Sequence[float], kind: str) -> list[float]:
    """Whole edges for whole numbers, else all of them float: Spark compares by either."""
    if kinds.is_integral(kind) and all(isinstance(edge, int) for edge in edges):
        return list(edges)
    return [float(edge) for edge in edges]


def _check_bins(bins: Any, least: int) -> None:
    if isinstance(bins, int) and not isinstance(bins, bool):
        if bins < least:
            raise UsageError(f"bins should be a whole number from {least} on, got {bins!r}")
        return
    is_list = isinstance(bins, list | tuple) and len(bins) > 0
    if not is_list or not all(type(each) in (int, float) and math.isfinite(each) for each in bins):
        raise UsageError(f"bins should be int or a list of numbers, but got {bins!r}")
    if any(a >= b for a, b in pairwise(bins)):
        raise UsageError(f"The edges in bins should be ascending, but got {bins!r}")


class Indicator(Function):
    """1 for one number, 0 for all others and null."""

    def __init__(self, number: int):
        self.number = number

    def array(self, values: pa.Array) -> pa.Array:
        found = pc.equal(values, pa.scalar(self.number, values.type))
        return found.fill_null(False).cast(pa.int32())

    def value(self, value: int | None) -> int:
        return int(value == self.number)


@dataclass(frozen=True)
class OneHotEncode(Operator):
    """``one_hot_encode``; the state has the sizes that were not given."""

    columns: list[str]
    sizes: list[int] | None
    prefix: list[str]
    keep_original_columns: bool
    method = "one_hot_encode"

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not all(type(each) is int and each > 0 for each in self.sizes):
                raise UsageError(
                    f"sizes should be positive int or a list of them, but got {self.sizes!r}"
                )
            if len(self.sizes) != len(self.columns):
                raise UsageError(
                    f"sizes should have the same length as columns, but got {self.sizes} for "
                    f"{self.columns}"
                )
        if len(self.prefix) != len(self.columns):
            raise UsageError(
                f"prefix should have the same length as columns, but got {self.prefix} for "
                f"{self.columns}"
            )

    def requests(self, before: Schema) -> dict[str, Request]:
        require_kind(
            before, self.columns, kinds.is_integral, "whole numbers", advice="encode it first"
        )
        if self.sizes is not None:
            return {}
        known = [name for name in self.columns if before[name].cardinality is None]
        return {name: Extremes((name,)) for name in known}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        return {
            name: 0 if high is None else max(high, -1) + 1 for name, (_, high) in answers.items()
        }

    def hides_columns(self, before: Schema) -> bool:
        return bool(self.requests(before))

    def _sizes(self, before: Schema, state: State) -> dict[str, int]:
        if self.sizes is not None:
            return dict(zip(self.columns, self.sizes, strict=True))
        return {name: state.get(name, before[name].cardinality) for name in self.columns}

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        prefixes = dict(zip(self.columns, self.prefix, strict=True))
        cells = [
            Cell((name,), f"{prefixes[name]}_{i}", Field("int", 2), Indicator(i))
            for name, size in self._sizes(before, state or {}).items()
            for i in range(size)
        ]
        kept = {n for n in before if self.keep_original_columns or n not in self.columns}
        counts = Counter(cell.output for cell in cells)
        twins = sorted(name for name, count in counts.items() if count > 1 or name in kept)
        if twins:
            raise UsageError(f"There would be several columns {twins}; use another prefix")
        return cells

    def after(self, before: Schema, state: State | None) -> Schema:
        cells, found = self.cells(before, state), {}
        for name, each in before.items():
            if name not in self.columns or self.keep_original_columns:
                found[name] = each
            found |= {cell.output: cell.field for cell in cells if cell.inputs == (name,)}
        return found

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        made: dict[str, list[Column]] = {}
        for cell in self.cells(before, state):
            (name,) = cell.inputs
            one = F.when(col(name) == cast("Indicator", cell.function).number, 1).otherwise(0)
            made.setdefault(name, []).append(one.alias(cell.output))
        shown: list[Column] = []
        for name in df.columns:
            if name not in self.columns or self.keep_original_columns:
                shown.append(col(name))
            shown += made.get(name, [])
        return df.select(*shown)
