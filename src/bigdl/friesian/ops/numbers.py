"""Numeric operators: clipping, logarithms, scaling, binning and one-hot encoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.batches import MinMax, PositionMinMax, Quantiles
from bigdl.friesian.ops.column_types import Field, Schema, check_types, require_type
from bigdl.friesian.ops.operator import (
    NumberFunction,
    Operator,
    OutputColumn,
    State,
    Statistic,
    register_operator,
)
from bigdl.friesian.ops.spark import F, as_names, check_lengths, col

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame

    from bigdl.common.types import ColumnNames
    from bigdl.friesian.ops.operator import State


class NumberOperator(Operator):
    """Operator on numeric columns; pipelines reject decimal columns."""

    def check(self, before: Schema) -> None:
        require_type(before, self.reads or (), column_types.is_numeric, "numbers")

    def require_numbers(self, before: Schema) -> None:
        """Raise a UsageError unless the columns are numeric."""
        require_type(before, self.reads or (), column_types.is_number, "numbers")


# -- clipping and logarithms -----------------------------------------------------------------------


class ClipNumber(NumberFunction):
    """Function that clips numbers to an interval; nulls and NaN stay unchanged."""

    def __init__(self, low: float | None, high: float | None, dtype: str):
        self.low, self.high, self.kind = _bound(low, dtype), _bound(high, dtype), dtype

    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.low is not None:
            numbers = np.maximum(numbers, self.low)
        return numbers if self.high is None else np.minimum(numbers, self.high)

    def column(self, value: Column) -> Column:
        bounded = value
        for bound, limited in ((self.low, F.greatest), (self.high, F.least)):
            if bound is not None:
                bounded = limited(bounded, F.lit(bound).cast(self.kind))
        # greatest and least skip nulls, and Spark orders NaN above all numbers
        return F.when(spark.is_missing(value, self.kind), value).otherwise(bounded)


def _bound(bound: float | None, dtype: str) -> float | None:
    """Convert a bound to a type, and limit it to the type's range."""
    if bound is None or not column_types.is_integral(dtype):
        return column_types.coerce_value(bound, dtype, "the bound")
    low, high = column_types.limits(dtype)
    return math.trunc(min(max(bound, low), high))


@register_operator
@dataclass(frozen=True)
class Clip(NumberOperator):
    """Operator that implements ``clip``."""

    columns: list[str]
    min: float | None
    max: float | None
    method = "clip"

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise UsageError(
                "at least one of min and max should be not None",
                code="argument-missing",
                argument="min",
            )
        for bound, what in ((self.min, "min"), (self.max, "max")):
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if bound is not None and not (is_number and bound == bound):
                raise UsageError(
                    f"{what} should be a number or None, got {bound!r}",
                    code="argument-type",
                    argument=what,
                )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UsageError(
                f"min should be smaller than max, but got {self.min} and {self.max}",
                code="argument-value",
                argument="min",
            )

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        self.require_numbers(before)
        return [
            OutputColumn((name,), name, Field(dtype), ClipNumber(self.min, self.max, dtype))
            for name, dtype in ((name, before[name].kind) for name in self.columns)
        ]


class Logarithm(NumberFunction):
    """Function ``log(x + 1)``, with 0 for negative x; or ``log(x)``, with null unless x > 0."""

    kind = "double"

    def __init__(self, clipping: bool):
        self.clipping = clipping

    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        numbers = np.asarray(numbers, np.float64)  # np.float64(x) of one number would be a scalar
        return np.log1p(np.maximum(numbers, 0.0)) if self.clipping else np.log(numbers)

    def undefined(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        return None if self.clipping else numbers <= 0

    def column(self, value: Column) -> Column:
        number = value.cast("double")
        if not self.clipping:
            return F.when(number > 0, F.log(number))
        return F.when(number < 0, F.lit(0.0)).otherwise(F.log1p(number))


@register_operator
@dataclass(frozen=True)
class Log(NumberOperator):
    """Operator that implements ``log``."""

    columns: list[str]
    clipping: bool
    method = "log"

    def __post_init__(self) -> None:
        if not isinstance(self.clipping, bool):
            raise UsageError(
                f"clipping should be a boolean, but get {type(self.clipping).__name__}",
                code="argument-type",
                argument="clipping",
            )

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        self.require_numbers(before)
        logarithm = Logarithm(self.clipping)
        return [OutputColumn((name,), name, Field("double"), logarithm) for name in self.columns]


# -- ranges ----------------------------------------------------------------------------------------


class ScaleNumber(NumberFunction):
    """Function that scales numbers linearly to a range, returns floats and optionally clips.

    It computes ``(x - low) / span * factor + offset``. Where the extremes are equal, every value
    becomes the middle of the range. On Spark tables the extremes may be lists; arrays are then
    scaled by position.
    """

    kind = "float"

    def __init__(
        self,
        low: float | Sequence[float],
        high: float | Sequence[float],
        minimum: float,
        maximum: float,
        clip: bool,
        source: str,
    ):
        self.minimum, self.maximum = float(minimum), float(maximum)
        self.clip, self.source = clip, source
        lists = (low, high) if isinstance(low, list | tuple) else ([low], [high])
        self.terms = [self._terms(*each) for each in zip(*lists, strict=True)]
        self._known_terms = None if not self.terms or None in self.terms[0] else self.terms[0]

    def _terms(self, low: float | None, high: float | None) -> tuple:
        if low is None or high is None:
            return None, None, None, None  # the column had no values
        low, high = float(low), float(high)
        if not low <= high or math.isinf(high - low):
            raise UsageError(
                f"The extremes should be finite and in order, got {low} and {high}",
                code="data-value",
            )
        if low == high:
            return low, 1.0, 0.0, (self.minimum + self.maximum) / 2
        return low, high - low, self.maximum - self.minimum, self.minimum

    def numbers(
        self, numbers: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32] | np.float32:  # a scalar for a single number
        low, span, factor, offset = self._known_terms or (0.0, 1.0, 1.0, 0.0)
        results = (np.asarray(numbers, np.float64) - low) / span * factor + offset
        if self.clip:
            results = np.minimum(np.maximum(results, self.minimum), self.maximum)
        return np.float32(results)

    def undefined(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        return None if self._known_terms else np.full(np.shape(numbers), True)

    def column(self, value: Column) -> Column:
        if column_types.is_number(self.source):
            terms = (F.lit(each).cast("double") for each in self.terms[0])
            return self._scaled(value.cast("double"), *terms).cast("float")
        # scale by position; literal arrays of terms keep the plan small
        arrays = [
            F.array(*map(F.lit, each)).cast("array<double>")
            for each in (zip(*self.terms, strict=True) if self.terms else [()] * 4)
        ]
        values = F.transform(
            as_array(value, self.source),
            lambda each, i: self._scaled(each, *(F.get(terms, i) for terms in arrays)),
        )
        if self.source != "vector":
            return values
        from pyspark.ml.functions import array_to_vector

        return F.when(value.isNotNull(), array_to_vector(values))

    def _scaled(
        self, value: Column, low: Column, span: Column, factor: Column, offset: Column
    ) -> Column:
        scaled = (value - low) / span * factor + offset
        if not self.clip:
            return scaled
        bounded = F.greatest(F.least(scaled, F.lit(self.maximum)), F.lit(self.minimum))
        # greatest and least skip nulls, and Spark orders NaN above all numbers
        return F.when(spark.is_missing(scaled, "double"), scaled).otherwise(bounded)


@register_operator
@dataclass(frozen=True)
class MinMaxScale(Operator):
    """Operator that implements ``min_max_scale``; its state holds the extremes of each column.

    Numbers become float, arrays become array<double>, vectors stay vectors, nulls stay nulls.
    Pipelines scale numbers only.
    """

    columns: list[str]
    min: float
    max: float
    clip: bool
    method = "min_max_scale"

    def __post_init__(self) -> None:
        if not check_number("min", self.min) < check_number("max", self.max):
            raise UsageError(
                f"min should be smaller than max, but got {self.min} and {self.max}",
                code="argument-value",
                argument="min",
            )

    def check(self, before: Schema) -> None:
        self._check(before, column_types.is_numeric)

    def _check(self, before: Schema, is_scalable: Callable[[str], bool]) -> None:
        message = (
            "The column {name} of type {dtype} cannot be scaled; it should hold numbers, or in a "
            "table arrays of numbers or vectors"
        )
        check_types(before, self.columns, is_scalable, message)

    def requests(self, before: Schema) -> dict[str, Statistic]:
        self._check(before, _is_scalable)
        are_single = {name: column_types.is_number(before[name].kind) for name in self.columns}
        return {
            name: MinMax((name,)) if is_single else PositionMinMax((name,))
            for name, is_single in are_single.items()
        }

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        extremes = {}
        for name, (low, high) in statistics.items():
            if isinstance(low, list):
                extremes[name] = [low, high]
                continue
            if low is not None and math.isinf(float(high) - float(low)):
                raise UsageError(
                    f"The extremes of the column {name} should be finite, got {low} and {high}; "
                    "clip it first",
                    code="data-value",
                    column=name,
                )
            extremes[name] = [None, None] if low is None else [float(low), float(high)]
        return {"extremes": extremes}

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        self._check(before, _is_scalable)
        cells, options = [], (self.min, self.max, self.clip)
        for name in self.columns:
            dtype, scale = before[name].kind, None
            if state is not None:
                low, high = state["extremes"][name]
                if column_types.is_number(dtype) == isinstance(low, list | tuple):
                    raise UsageError(
                        f"The extremes of the column {name} of type {dtype} should be "
                        f"{'numbers' if column_types.is_number(dtype) else 'lists'}, got {low!r} "
                        f"and {high!r}",
                        code="argument-type",
                        column=name,
                    )
                scale = ScaleNumber(low, high, *options, dtype)
            cells.append(OutputColumn((name,), name, Field("float"), scale))
        return cells


def _is_scalable(dtype: str) -> bool:
    inner = column_types.element_type(dtype) if column_types.is_array(dtype) else dtype
    return column_types.is_number(inner) or dtype == "vector"


def as_array(value: Column, dtype: str) -> Column:
    """Convert a column of arrays or vectors to array<double>."""
    if dtype == "vector":
        from pyspark.ml.functions import vector_to_array

        return F.when(value.isNotNull(), vector_to_array(value))
    return value.cast("array<double>")


# -- bins ------------------------------------------------------------------------------------------


class Bin(NumberFunction):
    """Function that returns a number's bin: the count of edges at or below it, or a label."""

    kind = "int"

    def __init__(self, edges: Sequence[float], labels: Sequence[str] | None, source: str):
        # Spark compares integers with integers and everything else as doubles
        is_whole = column_types.is_integral(source) and all(isinstance(edge, int) for edge in edges)
        self.edges = list(edges) if is_whole else list(map(float, edges))
        self._edges = np.array(self.edges, np.int64 if is_whole else np.float64)
        self.words = None if labels is None else [*labels, None]
        self.source, self.of_null = source, len(edges) + 1

    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        bins = np.searchsorted(self._edges, numbers, side="right").astype(np.int32)
        return bins + (numbers != numbers)

    def array(self, *values: pa.Array) -> pa.Array:
        bins = super().array(*values)
        return bins if self.words is None else pa.array(self.words, pa.string()).take(bins)

    def single(self, *input_types: str) -> Callable[..., Any]:
        bin_of, words = super().single(*input_types), self.words
        return bin_of if words is None else lambda number: words[bin_of(number)]

    def column(self, value: Column) -> Column:
        """Compute the bins of a Spark column with a balanced tree of comparisons."""

        def result(number: int) -> Column:
            return F.lit(number if self.words is None else self.words[number])

        def between(first: int, last: int) -> Column:
            if first == last:
                return result(first)
            middle = (first + last) // 2
            below = value < F.lit(self.edges[middle])
            return F.when(below, between(first, middle)).otherwise(between(middle + 1, last))

        tree = between(0, len(self.edges))
        return F.when(spark.is_missing(value, self.source), result(self.of_null)).otherwise(tree)


@register_operator
@dataclass(frozen=True)
class CutBins(NumberOperator):
    """Operator that implements ``cut_bins`` and ``quantile_bins``; its state holds the edges.

    Attributes
    ----------
    bins : dict of str to (int or list of float)
        Edges, or the number of bins, by column.
    labels : dict of str to list of str
        Bin labels by column; other columns get integers.
    out_cols : list of str
    drop : bool
    by_quantiles : bool
        For a number of bins: True for bins with about equally many rows, False for equal widths.
    """

    bins: dict[str, Any]
    labels: dict[str, list[str]]
    out_cols: list[str]
    drop: bool
    by_quantiles: bool = False
    method = "cut_bins"

    @classmethod
    def of(
        cls,
        columns: ColumnNames,
        bins: object,
        labels: object,
        out_cols: ColumnNames | None,
        **options: Any,  # fields of the class
    ) -> CutBins:
        """Build the operator from the user's arguments."""
        names = as_names(columns)
        outputs = [f"{name}_bin" for name in names] if out_cols is None else as_names(out_cols)
        for name in names:
            if isinstance(bins, Mapping) and name not in bins:
                raise UsageError(
                    f"bins has no entry for the column {name}: {dict(bins)!r}",
                    code="argument-value",
                    argument="bins",
                    column=name,
                )
        wanted = {name: bins[name] if isinstance(bins, Mapping) else bins for name in names}
        words = {}
        for name in names:
            each = labels.get(name) if isinstance(labels, Mapping) else labels
            if each is not None and not isinstance(each, list | tuple):
                raise UsageError(
                    f"labels should be a list of str or a dict of them, but got {each!r}",
                    code="argument-type",
                    argument="labels",
                )
            if each is not None:
                words[name] = list(each)
        return cls(wanted, words, outputs, **options)

    def __post_init__(self) -> None:
        least = 2 if self.by_quantiles else 1
        for bins in self.bins.values():
            _check_bins(bins, least)
        check_lengths("out_cols", self.out_cols, "columns", self.bins)
        spark.check_different(self.out_cols, "out_cols")
        for name, words in self.labels.items():
            if not isinstance(self.bins[name], int):
                _check_labels(name, self.bins[name], words)

    @property
    def reads(self) -> list[str]:
        return list(self.bins)

    def requests(self, before: Schema) -> dict[str, Statistic]:
        self.require_numbers(before)
        counted = {name: bins for name, bins in self.bins.items() if isinstance(bins, int)}
        if self.by_quantiles:
            return {
                name: Quantiles((name,), tuple(i / bins for i in range(1, bins)))
                for name, bins in counted.items()
            }
        return {name: MinMax((name,), is_finite=True) for name in counted}

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        edges = {
            name: self._edges(name, bins, statistics[name]) if name in statistics else bins
            for name, bins in self.bins.items()
        }
        for name, words in self.labels.items():
            _check_labels(name, edges[name], words)
        return {"edges": edges}

    def _edges(self, name: str, bins: int, statistic: Sequence) -> list[float]:
        if not statistic or statistic[0] is None:
            raise UsageError(
                f"The column {name} has no values to compute bins from; pass edges",
                code="data-empty",
                column=name,
            )
        if self.by_quantiles:
            return sorted(set(statistic))
        low, high = map(float, statistic)
        return [*(low + (high - low) * i / bins for i in range(bins)), high]

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        cells = []
        for name, output in zip(self.bins, self.out_cols, strict=True):
            labels, function, size = self.labels.get(name), None, None
            if state is not None:
                function = Bin(state["edges"][name], labels, before[name].kind)
                size = len(function.edges) + 2
            field = Field("int", size) if labels is None else Field("string")
            cells.append(OutputColumn((name,), output, field, function))
        return cells

    @property
    def dropped(self) -> set[str]:
        return set(self.bins) - set(self.out_cols) if self.drop else set()


def _check_labels(name: str, edges: Sequence[float], words: Sequence[str]) -> None:
    if len(words) != len(edges) + 1:
        raise UsageError(
            f"labels should be of length {len(edges) + 1}, one more than the edges of {name}, but "
            f"got {len(words)}",
            code="argument-value",
            argument="labels",
            column=name,
        )


def _check_bins(bins: Any, least: int) -> None:
    if isinstance(bins, int):
        check_integer("bins", bins, least)
        return
    is_list = isinstance(bins, list | tuple) and len(bins) > 0
    if not is_list or not all(type(each) in (int, float) and math.isfinite(each) for each in bins):
        raise UsageError(
            f"bins should be int or a list of numbers, but got {bins!r}",
            code="argument-type",
            argument="bins",
        )
    if any(a >= b for a, b in pairwise(bins)):
        raise UsageError(
            f"The edges in bins should be ascending, but got {bins!r}",
            code="argument-value",
            argument="bins",
        )


# -- indicators ------------------------------------------------------------------------------------


class Indicator(NumberFunction):
    """Function that returns 1 for one number, and 0 for all others and null."""

    kind, of_null = "int", 0

    def __init__(self, number: int):
        self.number = number

    def numbers(self, numbers: object) -> npt.NDArray[np.int32] | np.int32:
        return np.int32(numbers == self.number)

    def column(self, value: Column) -> Column:
        return F.when(value == self.number, 1).otherwise(0)


@register_operator
@dataclass(frozen=True)
class OneHotEncode(Operator):
    """Operator that implements ``one_hot_encode``; its state holds sizes learned from the data."""

    columns: list[str]
    sizes: list[int] | None
    prefix: list[str]
    keep_original_columns: bool
    method = "one_hot_encode"

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not all(type(each) is int and each > 0 for each in self.sizes):
                raise UsageError(
                    f"sizes should be positive int or a list of them, but got {self.sizes!r}",
                    code="argument-value",
                    argument="sizes",
                )
            check_lengths("sizes", self.sizes, "columns", self.columns)
        check_lengths("prefix", self.prefix, "columns", self.columns)

    def requests(self, before: Schema) -> dict[str, Statistic]:
        advice = "; encode it first"
        require_type(before, self.columns, column_types.is_integral, "whole numbers", advice)
        if self.sizes is not None:
            return {}
        unknown = [name for name in self.columns if before[name].cardinality is None]
        return {name: MinMax((name,)) for name in unknown}

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        return {
            name: 0 if high is None else max(high, -1) + 1 for name, (_, high) in statistics.items()
        }

    def hides_columns(self, before: Schema) -> bool:
        return bool(self.requests(before))

    def _sizes(self, before: Schema, state: State) -> dict[str, int]:
        if self.sizes is not None:
            return dict(zip(self.columns, self.sizes, strict=True))
        return {name: state.get(name, before[name].cardinality) for name in self.columns}

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        prefixes = dict(zip(self.columns, self.prefix, strict=True))
        cells = [
            OutputColumn((name,), f"{prefixes[name]}_{i}", Field("int", 2), Indicator(i))
            for name, size in self._sizes(before, state or {}).items()
            for i in range(size)
        ]
        outputs = (cell.output for cell in cells)
        spark.check_new_names([*self._kept(before), *outputs], "use another prefix")
        return cells

    def _kept(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.keep_original_columns or name not in self.columns]

    def _order(self, names: Iterable[str], cells: Sequence[OutputColumn]) -> list[str]:
        """Return the output column names; indicators take the position of their source column."""
        kept, order = set(self._kept(names)), []
        for name in names:
            order += [name] if name in kept else []
            order += [cell.output for cell in cells if cell.inputs == (name,)]
        return order

    def after(self, before: Schema, state: State | None) -> Schema:
        cells = self.cells(before, state)
        known = {**before, **{cell.output: cell.field for cell in cells}}
        return {name: known[name] for name in self._order(before, cells)}

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        order = self._order(df.columns, self.cells(before, state))
        return super().catalyst(df, before, state).select(*map(col, order))
