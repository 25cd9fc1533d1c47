"""Steps that change one cell at a time: nulls, bounds, logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.requests import Quantiles, Request
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    State,
    Step,
    require_fields,
)
from bigdl.friesian.feature.pipeline.steps.numbers import by_numpy, doubles

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["Clip", "Fill", "FillMedian", "FillNa", "Log"]


class Fill(Function):
    """A constant in the place of nulls."""

    def __init__(self, constant: Any, kind: str):
        self.constant = kinds.coerced(_cut(constant, kind), kind, "value")
        self.kind = kind

    def array(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        if not values.null_count:
            return values
        return values.fill_null(pa.scalar(self.constant, kinds.to_arrow(self.kind)))

    def value(self, value: Any) -> Any:
        return self.constant if value is None else value


def _cut(constant: Any, kind: str) -> Any:
    return math.trunc(constant) if kinds.is_integral(kind) else constant


@dataclass(frozen=True)
class FillNa(Step):
    """``fillna``."""

    value: float | str | bool
    columns: list[str] | None
    method = "fillna"

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float | str):
            raise UsageError(f"value should be int, float, str or bool, but got {self.value!r}")

    def _names(self, before: Schema) -> list[str]:
        if self.columns is not None:
            require_fields(before, self.columns)
            for name in self.columns:
                _check_fill(self.value, name, before[name].kind)
            return self.columns
        names = [name for name, each in before.items() if _takes(self.value, each.kind)]
        if type(self.value) is int and -(2**31) <= self.value < 2**31:
            return [name for name in names if before[name].kind == "int"]
        return names

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        cells = []
        for name in self._names(before):
            each, fill = before[name], Fill(self.value, before[name].kind)
            if each.cardinality is not None:
                least = fill.constant + 1
                each = replace(each, cardinality=max(each.cardinality, least))
            cells.append(Cell((name,), name, each, fill))
        return cells

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.cells import fill_values

        return fill_values(df, dict.fromkeys(self._names(before), self.value))


def _group(kind: str) -> str:
    return "numeric" if kinds.is_numeric(kind) else kind


def _group_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "numeric"


def _takes(value: Any, kind: str) -> bool:
    return _group(kind) == _group_of(value) and (not kinds.is_numeric(kind) or _fits(value, kind))


def _fits(value: float, kind: str) -> bool:
    if not kinds.is_integral(kind):
        return True
    limit = 1 << (kinds.BITS[kind] - 1)
    return math.isfinite(value) and -limit <= math.trunc(value) < limit


def _check_fill(value: Any, name: str, kind: str) -> None:
    if _group(kind) != _group_of(value):
        raise UsageError(
            f"{_group_of(value)} does not match the type of column {name}, which is {kind}"
        )
    if not _takes(value, kind):
        raise UsageError(f"The column {name} of type {kind} cannot hold {value!r}")


@dataclass(frozen=True)
class FillMedian(Step):
    """``fill_median``; the state has the median of each column."""

    columns: list[str] | None
    method = "fill_median"

    def _names(self, before: Schema) -> list[str]:
        if self.columns is None:
            return [name for name, each in before.items() if kinds.is_numeric(each.kind)]
        require_numbers(before, self.columns)
        return self.columns

    def requests(self, before: Schema) -> dict[str, Request]:
        return {name: Quantiles((name,)) for name in self._names(before)}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        empty = [name for name, found in answers.items() if not found]
        if empty:
            raise UsageError(
                f"The columns {empty} have no median since all their values are null; fill them "
                "with a constant"
            )
        return {name: _cut(found[0], before[name].kind) for name, found in answers.items()}

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        return [
            Cell(
                (name,),
                name,
                before[name],
                None if state is None else Fill(state[name], before[name].kind),
            )
            for name in self._names(before)
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.cells import fill_values

        return fill_values(df, state)


class Bound(Function):
    """Bounds for numbers; nulls and NaN stay."""

    def __init__(self, low: float | None, high: float | None, kind: str):
        self.low, self.high = _bound(low, kind), _bound(high, kind)

    def array(self, values: pa.Array) -> pa.Array:
        import numpy as np

        def bounded(numbers: np.ndarray) -> np.ndarray:
            if self.low is not None:
                numbers = np.maximum(numbers, numbers.dtype.type(self.low))
            if self.high is not None:
                numbers = np.minimum(numbers, numbers.dtype.type(self.high))
            return numbers

        return by_numpy(values, bounded, values.type)

    def value(self, value: Any) -> Any:
        if value is None or value != value:
            return value
        if self.low is not None:
            value = max(value, self.low)
        return value if self.high is None else min(value, self.high)


def _bound(bound: float | None, kind: str) -> float | None:
    """The bound as the kind can hold it."""
    if bound is None or not kinds.is_integral(kind):
        return None if bound is None else kinds.coerced(bound, kind, "the bound")
    limit = 1 << (kinds.BITS[kind] - 1)
    if math.isinf(bound):
        return limit - 1 if bound > 0 else -limit
    return min(max(math.trunc(bound), -limit), limit - 1)


@dataclass(frozen=True)
class Clip(Step):
    """``clip``."""

    columns: list[str]
    min: float | None
    max: float | None
    method = "clip"

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise UsageError("at least one of min and max should be not None")
        for bound, what in ((self.min, "min"), (self.max, "max")):
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if bound is not None and not (is_number and bound == bound):
                raise UsageError(f"{what} should be a number or None, got {bound!r}")
        if None not in (self.min, self.max) and self.min > self.max:
            raise UsageError(f"min should be smaller than max, but got {self.min} and {self.max}")

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        require_numbers(before, self.columns)
        return [
            Cell(
                (name,),
                name,
                Field(before[name].kind),
                Bound(self.min, self.max, before[name].kind),
            )
            for name in self.columns
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.cells import clip

        return clip(df, self.columns, self.min, self.max)


class Logarithm(Function):
    """``log(x + 1)`` with 0 for negative x, or ``log(x)`` with null for x that is not positive."""

    def __init__(self, clipping: bool):
        self.clipping = clipping

    def array(self, values: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = doubles(values)
        if self.clipping:
            return by_numpy(numbers, lambda x: np.log1p(np.where(x < 0, 0.0, x)), pa.float64())
        found = by_numpy(numbers, np.log, pa.float64())
        return pc.if_else(pc.less_equal(numbers, 0.0), pa.scalar(None, pa.float64()), found)

    def value(self, value: float | None) -> float | None:
        if value is None:
            return None
        if self.clipping:
            return 0.0 if value < 0 else math.log1p(value)
        return None if value <= 0 else math.log(value)


@dataclass(frozen=True)
class Log(Step):
    """``log``."""

    columns: list[str]
    clipping: bool
    method = "log"

    def __post_init__(self) -> None:
        if not isinstance(self.clipping, bool):
            raise UsageError(
                f"clipping should be a boolean, but get {type(self.clipping).__name__}"
            )

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        require_numbers(before, self.columns)
        logarithm = Logarithm(self.clipping)
        return [Cell((name,), name, Field("double"), logarithm) for name in self.columns]

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.cells import log

        return log(df, self.columns, self.clipping)


def require_numbers(before: Schema, names: Sequence[str]) -> None:
    """Check that columns exist and hold numbers."""
    require_fields(before, names)
    for name in names:
        if not kinds.is_numeric(before[name].kind):
            raise UsageError(
                f"{name} should be a column of numbers, but its type is {before[name].kind}"
            )
