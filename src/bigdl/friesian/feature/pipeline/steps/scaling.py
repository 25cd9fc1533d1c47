"""Numbers scaled to a range by extremes that were learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.requests import Extremes, Request
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

__all__ = ["MinMaxScale", "Scale"]


class Scale(Function):
    """``(x − low) / span * factor + offset`` as float, within bounds if there are any."""

    def __init__(self, low: float, high: float, minimum: float, maximum: float, clip: bool):
        self.low, self.bounds = low, (minimum, maximum) if clip else None
        if low == high:
            self.span, self.factor, self.offset = 1.0, 0.0, (minimum + maximum) / 2
        else:
            self.span, self.factor, self.offset = high - low, maximum - minimum, minimum

    def array(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        return by_numpy(doubles(values), self._scaled, pa.float32())

    def _scaled(self, values: Any) -> Any:
        import numpy as np

        scaled = (values - self.low) / self.span * self.factor + self.offset
        if self.bounds is not None:
            scaled = np.clip(scaled, *self.bounds)
        return scaled.astype(np.float32)

    def value(self, value: Any) -> float | None:
        if value is None:
            return None
        scaled = (float(value) - self.low) / self.span * self.factor + self.offset
        if self.bounds is not None and not math.isnan(scaled):
            scaled = max(min(scaled, self.bounds[1]), self.bounds[0])
        return kinds.float32(scaled)


class Missing(Function):
    """Null for every value: the column had none that extremes could be made of."""

    def array(self, values: pa.Array) -> pa.Array:
        import pyarrow as pa

        return pa.nulls(len(values), pa.float32())

    def value(self, value: Any) -> None:
        return None


@dataclass(frozen=True)
class MinMaxScale(Step):
    """``min_max_scale``; the state has the extremes of each column."""

    columns: list[str]
    min: float
    max: float
    clip: bool
    method = "min_max_scale"

    def __post_init__(self) -> None:
        for bound, what in ((self.min, "min"), (self.max, "max")):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise UsageError(f"{what} should be a number, got {bound!r}")
        if not self.min < self.max:
            raise UsageError(f"min should be smaller than max, but got {self.min} and {self.max}")

    def requests(self, before: Schema) -> dict[str, Request]:
        require_fields(before, self.columns)
        for name in self.columns:
            if not kinds.is_numeric(before[name].kind):
                raise UsageError(
                    f"The column {name} of type {before[name].kind} cannot be scaled in a "
                    "pipeline; it should hold numbers"
                )
        return {name: Extremes((name,)) for name in self.columns}

    def settled(self, before: Schema, answers: Mapping[str, Any]) -> State:
        extremes = {}
        for name, (low, high) in answers.items():
            if low is not None and math.isinf(float(high) - float(low)):
                raise UsageError(
                    f"The extremes of the column {name} should be finite, got {low} and {high}; "
                    "clip it first"
                )
            extremes[name] = [None, None] if low is None else [float(low), float(high)]
        return {"extremes": extremes}

    def cells(self, before: Schema, state: State | None) -> list[Cell]:
        return [
            Cell((name,), name, Field("float"), None if state is None else self._scale(name, state))
            for name in self.columns
        ]

    def _scale(self, name: str, state: State) -> Function:
        low, high = state["extremes"][name]
        if low is None:
            return Missing()
        return Scale(low, high, float(self.min), float(self.max), self.clip)

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        from bigdl.friesian.feature.operators.scaling import apply_min_max

        return apply_min_max(df, state["extremes"], self.min, self.max, self.clip)
