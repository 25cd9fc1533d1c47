"""Numbers cut into bins, and whole numbers spread over indicator columns."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.bins import check_indicators
from bigdl.friesian.feature.operators.columns import as_names, check_different
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.requests import Extremes, Quantiles, Request
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    State,
    Step,
    require_fields,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["CutBins", "OneHotEncode"]


class Bin(Function):
    """The number of edges that are not above a value, or its label."""

    def __init__(self, edges: Sequence[float], labels: Sequence[str] | None):
        self.edges, self.labels = list(edges), None if labels is None else list(labels)
        self.is_whole = all(isinstance(edge, int) for edge in edges)

    def array(self, values: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa

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


@dataclass(frozen=True)
class CutBins(Step):
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
        """The step for the arguments that users give."""
        names = as_names(columns)
        outputs = [f"{name}_bin" for name in names] if out_cols is None else as_names(out_cols)
        missing = [name for name in names if isinstance(bins, Mapping) and name not in bins]
        if missing:
            raise UsageError(f"bins has nothing for the columns {missing}: {dict(bins)!r}")
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
            bins = self.bins[name]
            if not isinstance(bins, int):
                _check_labels(name, bins, words)

    @property
    def reads(self) -> list[str]:
        return list(self.bins)

    def requests(self, before: Schema) -> dict[str, Request]:
        require_fields(before, list(self.bins))
        found: dict[str, Request] = {}
        for name, bins in self.bins.items():
            if not kinds.is_numeric(before[name].kind):
                raise UsageError(
                    f"{name} should be a column of numbers, but its type is {before[name].kind}"
                )
            if isinstance(bins, int):
                shares = tuple(i / bins for i in range(1, bins))
                asked = Quantiles((name,), shares) if self.by_quantiles else Extremes((name,), True)
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
        return sorted({*(low + (high - low) * i / bins for i in range(bins)), high})

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        cells = []
        for name, output in zip(self.bins, self.out_cols, strict=True):
            words = self.labels.get(name)
            edges = None if state is None else state["edges"][name]
            function = None if edges is None else Bin(_typed(edges, before[name].kind), words)
            made = Field("string") if words is not None else Field("int")
            if words is None and edges is not None:
                made = Field("int", len(edges) + 2)
            cells.append(Cell((name,), output, made, function))
        return cells

    def after(self, before: Schema, state: State | None) -> Schema:
        found = super().after(before, state)
        gone = set(self.bins) - set(self.out_cols) if self.drop else ()
        return {name: each for name, each in found.items() if name not in gone}

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.bins import cut_bins

        edges = {name: _typed(each, before[name].kind) for name, each in state["edges"].items()}
        return cut_bins(df, edges, self.labels or None, self.out_cols, self.drop)


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
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.equal(values, pa.scalar(self.number, values.type))
        return found.fill_null(False).cast(pa.int32())

    def value(self, value: int | None) -> int:
        return int(value == self.number)


@dataclass(frozen=True)
class OneHotEncode(Step):
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
        require_fields(before, self.columns)
        for name in self.columns:
            if not kinds.is_integral(before[name].kind):
                raise UsageError(
                    f"{name} should be a column of whole numbers, but its type is "
                    f"{before[name].kind}; encode it first"
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
        kept = [n for n in before if self.keep_original_columns or n not in self.columns]
        check_indicators([cell.output for cell in cells], kept)
        return cells

    def after(self, before: Schema, state: State | None) -> Schema:
        cells, found = self.cells(before, state), {}
        for name, each in before.items():
            if name not in self.columns or self.keep_original_columns:
                found[name] = each
            found |= {cell.output: cell.field for cell in cells if cell.inputs == (name,)}
        return found

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.bins import one_hot_encode

        sizes = self._sizes(before, state)
        return one_hot_encode(df, sizes, self.prefix, self.keep_original_columns)
