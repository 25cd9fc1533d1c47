"""Numbers scaled to a range, each column (or each position of an array) by its own extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.batches import by_numpy, doubles
from bigdl.friesian.ops.columns import col, replace, schema_of
from bigdl.friesian.ops.operator import (
    Cell,
    Extremes,
    Field,
    Function,
    Operator,
    Request,
    Schema,
    State,
    require_fields,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

__all__ = ["MinMaxScale"]


def _terms(low: float | None, high: float | None, minimum: float, maximum: float) -> tuple:
    """Return low, span, factor and offset of ``(x - low) / span * factor + offset``.

    Where the extremes are equal every value becomes the middle of the range.
    """
    if low is None or high is None:
        return None, None, None, None  # there was no value
    low, high = float(low), float(high)
    if not low <= high or math.isinf(high - low):
        raise UsageError(f"The extremes should be finite and in order, got {low} and {high}")
    if low == high:
        return low, 1.0, 0.0, (minimum + maximum) / 2
    return low, high - low, maximum - minimum, minimum


class Scale(Function):
    """``(x − low) / span * factor + offset`` as float, within bounds if there are any."""

    def __init__(self, low: float, high: float, minimum: float, maximum: float, clip: bool):
        self.terms = _terms(low, high, minimum, maximum)
        self.bounds = (minimum, maximum) if clip else None

    def array(self, values: pa.Array) -> pa.Array:
        if None in self.terms:
            return pa.nulls(len(values), pa.float32())
        return by_numpy(doubles(values), self._scaled, pa.float32())

    def _scaled(self, values: Any) -> Any:
        low, span, factor, offset = self.terms
        scaled = (values - low) / span * factor + offset
        if self.bounds is not None:
            scaled = np.clip(scaled, *self.bounds)
        return scaled.astype(np.float32)

    def value(self, value: Any) -> float | None:
        if value is None or None in self.terms:
            return None
        low, span, factor, offset = self.terms
        scaled = (float(value) - low) / span * factor + offset
        if self.bounds is not None and not math.isnan(scaled):
            scaled = max(min(scaled, self.bounds[1]), self.bounds[0])
        return kinds.float32(scaled)


@dataclass(frozen=True)
class MinMaxScale(Operator):
    """``min_max_scale``; the state has the extremes of each column.

    Numbers become float, arrays array<double>, vectors stay vectors; nulls stay nulls.  A pipeline
    scales numbers only.
    """

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
        self._check(before, kinds.is_numeric)
        return {name: Extremes((name,)) for name in self.columns}

    def _check(self, before: Schema, is_scalable: Any) -> None:
        require_fields(before, self.columns)
        for name in self.columns:
            if not is_scalable(before[name].kind):
                raise UsageError(
                    f"The column {name} of type {before[name].kind} cannot be scaled; it should "
                    "hold numbers, or in a table arrays of numbers or vectors"
                )

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
        bounds = float(self.min), float(self.max), self.clip
        return [
            Cell(
                (name,),
                name,
                Field("float"),
                None if state is None else Scale(*(*state["extremes"][name], *bounds)),
            )
            for name in self.columns
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        self._check(before, _is_scalable)
        return replace(
            df,
            {
                name: self._scaled_column(name, before[name].kind, *state["extremes"][name])
                for name in self.columns
            },
        )

    def _scaled_column(self, name: str, kind: str, low: Any, high: Any) -> Column:
        if kinds.is_number(kind) != (not isinstance(low, list | tuple)):
            raise UsageError(
                f"The extremes of the column {name} of type {kind} should be "
                f"{'numbers' if kinds.is_number(kind) else 'lists'}, got {low!r} and {high!r}"
            )
        bounds = float(self.min), float(self.max)
        if kinds.is_number(kind):
            columns = (F.lit(each).cast("double") for each in _terms(low, high, *bounds))
            return self._scaled(col(name).cast("double"), *columns).cast("float")
        # position by position; the terms are literal arrays, so that the plan stays small
        terms = [_terms(a, b, *bounds) for a, b in zip(low, high, strict=True)]
        arrays = [
            F.array(*map(F.lit, each)).cast("array<double>")
            for each in (zip(*terms, strict=True) if terms else [()] * 4)
        ]
        values = F.transform(
            _as_array(name, kind),
            lambda value, i: self._scaled(value, *(F.get(each, i) for each in arrays)),
        )
        if kind != "vector":
            return values
        from pyspark.ml.functions import array_to_vector

        return F.when(col(name).isNotNull(), array_to_vector(values))

    def _scaled(
        self, value: Column, low: Column, span: Column, factor: Column, offset: Column
    ) -> Column:
        scaled = (value - low) / span * factor + offset
        if not self.clip:
            return scaled
        bounded = F.greatest(F.least(scaled, F.lit(float(self.max))), F.lit(float(self.min)))
        # greatest and least skip nulls, and NaN is the greatest number of Spark
        return F.when(scaled.isNull() | F.isnan(scaled), scaled).otherwise(bounded)

    def extremes(self, df: DataFrame) -> dict[str, tuple]:
        """Return the extremes of the columns of a table, without nulls and NaN.

        Two floats for a column of numbers, two lists of floats for one of arrays or vectors; None
        for a column that has no value.
        """
        before = schema_of(df)
        self._check(before, _is_scalable)
        numbers = [name for name in self.columns if kinds.is_number(before[name].kind)]
        arrays = [name for name in self.columns if name not in numbers]
        found = _extremes_of_numbers(df, numbers, before) if numbers else {}
        found |= _extremes_of_arrays(df, arrays, before) if arrays else {}
        return {name: found[name] for name in self.columns}


def _is_scalable(kind: str) -> bool:
    inner = kinds.element_of(kind) if kinds.is_array(kind) else kind
    return kinds.is_number(inner) or kind == "vector"


def _extremes_of_numbers(df: DataFrame, names: Sequence[str], before: Schema) -> dict[str, tuple]:

    figures = []
    for i, name in enumerate(names):
        value = col(name).cast("double")
        if kinds.is_fractional(before[name].kind):
            value = F.when(~F.isnan(value), value)
        figures += [F.min(value).alias(f"min{i}"), F.max(value).alias(f"max{i}")]
    row = cast("Row", df.agg(*figures).first())
    return {name: (row[2 * i], row[2 * i + 1]) for i, name in enumerate(names)}


def _extremes_of_arrays(df: DataFrame, names: Sequence[str], before: Schema) -> dict[str, tuple]:

    def tagged(i: int, name: str) -> Column:
        def one(value: Column, place: Column) -> Column:
            value = F.when(~F.isnan(value), value)
            return F.struct(F.lit(i).alias("column"), place.alias("place"), value.alias("value"))

        values = _as_array(name, before[name].kind)
        return F.transform(F.coalesce(values, F.array().cast("array<double>")), one)

    cells = [tagged(i, name) for i, name in enumerate(names)]
    rows = df.select(F.explode(F.concat(*cells)).alias("cell")).select("cell.*")
    grouped = rows.groupBy("column", "place").agg(F.min("value"), F.max("value"))
    found: dict[str, tuple] = {name: ([], []) for name in names}
    for i, _, low, high in sorted(grouped.collect(), key=lambda row: row[:2]):
        found[names[i]][0].append(low)
        found[names[i]][1].append(high)
    return found


def _as_array(name: str, kind: str) -> Column:
    """Return a column of arrays or vectors as array<double>."""
    if kind == "vector":
        from pyspark.ml.functions import vector_to_array

        return F.when(col(name).isNotNull(), vector_to_array(col(name)))
    return col(name).cast("array<double>")
