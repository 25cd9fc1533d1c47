"""Operators that change one cell at a time: nulls, bounds, logarithms, types."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import columns, kinds
from bigdl.friesian.ops.batches import by_numpy, doubles, text_of, texts_of
from bigdl.friesian.ops.columns import col
from bigdl.friesian.ops.operator import (
    Cell,
    Field,
    Function,
    Operator,
    Quantiles,
    Request,
    Schema,
    State,
    TableOperator,
    require_fields,
    require_kind,
    require_numbers,
)
from bigdl.friesian.ops.spark import F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["Cast", "Clip", "DropNa", "FillMedian", "FillNa", "Log"]


# -- nulls -----------------------------------------------------------------------------------------


class Fill(Function):
    """A constant in the place of nulls."""

    def __init__(self, constant: Any, kind: str):
        constant = _cut(constant, kind)
        if kind.startswith("decimal"):
            _, scale = kinds.digits(kind)
            unit = decimal.Decimal(1).scaleb(-scale)
            constant = decimal.Decimal(str(constant)).quantize(unit, decimal.ROUND_HALF_UP)
        self.constant = kinds.coerced(constant, kind, "value")
        self.kind = kind

    def array(self, values: pa.Array) -> pa.Array:
        if not values.null_count:
            return values
        return values.fill_null(pa.scalar(self.constant, kinds.to_arrow(self.kind)))

    def value(self, value: Any) -> Any:
        return self.constant if value is None else value


def _cut(constant: Any, kind: str) -> Any:
    return math.trunc(constant) if kinds.is_integral(kind) else constant


def _filled(df: DataFrame, values: Mapping[str, Any], before: Schema) -> DataFrame:
    """Replace the nulls of each column by its own value, cast to the type of the column."""

    return columns.replace(
        df,
        {
            name: F.coalesce(col(name), F.lit(value).cast(before[name].kind))
            for name, value in values.items()
        },
    )


@dataclass(frozen=True)
class FillNa(Operator):
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
                self._check(name, before[name].kind)
            return self.columns
        names = [name for name, each in before.items() if self._takes(each.kind)]
        if type(self.value) is int and -(2**31) <= self.value < 2**31:
            return [name for name in names if before[name].kind == "int"]
        return names

    @property
    def _group(self) -> str:
        if isinstance(self.value, bool):
            return "boolean"
        return "string" if isinstance(self.value, str) else "numeric"

    def _takes(self, kind: str) -> bool:
        if _group(kind) != self._group:
            return False
        value = cast("float", self.value)  # if the kind is one of numbers
        if kinds.is_integral(kind):
            limit = 1 << (kinds.BITS[kind] - 1)
            return math.isfinite(value) and -limit <= math.trunc(value) < limit
        if kind.startswith("decimal"):
            precision, scale = kinds.digits(kind)
            return math.isfinite(value) and abs(value) < 10 ** (precision - scale)
        return True

    def _check(self, name: str, kind: str) -> None:
        if _group(kind) != self._group:
            raise UsageError(
                f"{self._group} does not match the type of column {name}, which is {kind}"
            )
        if not self._takes(kind):
            raise UsageError(f"The column {name} of type {kind} cannot hold {self.value!r}")

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        cells = []
        for name in self._names(before):
            each, fill = before[name], Fill(self.value, before[name].kind)
            if each.cardinality is not None:
                each = replace(each, cardinality=max(each.cardinality, fill.constant + 1))
            cells.append(Cell((name,), name, each, fill))
        return cells

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        return _filled(df, dict.fromkeys(self._names(before), self.value), before)


def _group(kind: str) -> str:
    if kinds.is_text(kind):
        return "string"
    return "numeric" if kinds.is_number(kind) else kind


@dataclass(frozen=True)
class FillMedian(Operator):
    """``fill_median``; the state has the median of each column."""

    columns: list[str] | None
    method = "fill_median"

    def requests(self, before: Schema) -> dict[str, Request]:
        return medians_of(before, self.columns)

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
            for name in medians_of(before, self.columns)
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        return _filled(df, state, before)


def medians_of(before: Schema, names: Sequence[str] | None) -> dict[str, Request]:
    """The requests for the medians of columns, by default of all columns of numbers."""
    if names is None:
        names = [name for name, each in before.items() if kinds.is_number(each.kind)]
    require_fields(before, names)
    for name in names:
        kind = before[name].kind
        if not kinds.is_number(kind):
            raise UsageError(
                f"{name} with data type {re.split('[<(]', kind)[0].capitalize()}Type is not "
                "supported: a median needs numbers"
            )
    return {name: Quantiles((name,)) for name in names}


@dataclass(frozen=True)
class DropNa(TableOperator):
    """``dropna``."""

    columns: list[str] | None
    how: str
    thresh: int | None
    method = "dropna"

    def __post_init__(self) -> None:
        if self.how not in ("any", "all"):
            raise UsageError(f"how should be any or all, but got {self.how!r}")
        if self.thresh is not None:
            check_integer("thresh", self.thresh)

    def catalyst(self, df: DataFrame, before: Schema, state: State) -> DataFrame:
        names = df.columns if self.columns is None else self.columns
        columns.require_columns(df, names)
        quoted = [f"`{name.replace('`', '``')}`" for name in names]
        return df.dropna(how=self.how, thresh=self.thresh, subset=quoted)


# -- bounds and logarithms -------------------------------------------------------------------------


class Bound(Function):
    """Bounds for numbers; nulls and NaN stay."""

    def __init__(self, low: float | None, high: float | None, kind: str):
        self.low, self.high = _bound(low, kind), _bound(high, kind)

    def array(self, values: pa.Array) -> pa.Array:
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
    """The bound as the kind can hold it: an int column has no larger limit than its own."""
    if bound is None or not kinds.is_integral(kind):
        return None if bound is None else kinds.coerced(bound, kind, "the bound")
    limit = 1 << (kinds.BITS[kind] - 1)
    if math.isinf(bound):
        return limit - 1 if bound > 0 else -limit
    return min(max(math.trunc(bound), -limit), limit - 1)


@dataclass(frozen=True)
class Clip(Operator):
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
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UsageError(f"min should be smaller than max, but got {self.min} and {self.max}")

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        require_numbers(before, self.columns)
        return [
            Cell((name,), name, Field(kind), Bound(self.min, self.max, kind))
            for name, kind in ((name, before[name].kind) for name in self.columns)
        ]

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        require_kind(before, self.columns, kinds.is_number, "numbers")
        return columns.replace(
            df, {name: self._bounded(col(name), before[name].kind) for name in self.columns}
        )

    def _bounded(self, value: Column, kind: str) -> Column:
        bounded = value
        for bound, limited in ((self.min, F.greatest), (self.max, F.least)):
            if bound is not None:
                bounded = limited(bounded, F.lit(_bound(bound, kind)).cast(kind))
        # greatest and least skip nulls, and NaN is the greatest number of Spark
        keep = value.isNull()
        if kinds.is_fractional(kind):
            keep = keep | F.isnan(value)
        return F.when(keep, value).otherwise(bounded)


class Logarithm(Function):
    """``log(x + 1)`` with 0 for negative x, or ``log(x)`` with null for x that is not positive."""

    def __init__(self, clipping: bool):
        self.clipping = clipping

    def array(self, values: pa.Array) -> pa.Array:
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
class Log(Operator):
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
        require_kind(before, self.columns, kinds.is_number, "numbers")

        def logarithm(value: Column) -> Column:
            if not self.clipping:
                return F.when(value > 0, F.log(value))
            return F.when(value < 0, F.lit(0.0)).otherwise(F.log1p(value))

        return columns.replace(
            df, {name: logarithm(col(name).cast("double")) for name in self.columns}
        )


# -- types -----------------------------------------------------------------------------------------

_KINDS = {
    "str": "string",
    "string": "string",
    "bool": "boolean",
    "boolean": "boolean",
    "int": "int",
    "integer": "int",
    "long": "bigint",
    "short": "smallint",
    "float": "float",
    "double": "double",
}
_SPACE = "".join(map(chr, range(33)))  # what Spark cuts off around numbers in text
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?")
_WORDS = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")


def _whole(number: float, kind: str) -> int | None:
    """A number cut to a whole one, None where the kind cannot hold it."""
    limit = 1 << (kinds.BITS[kind] - 1)
    if not math.isfinite(number):
        return None
    if not (math.floor(number) <= limit - 1 and math.ceil(number) >= -limit):
        # as a double the largest bigint is 2**63, which Spark takes for it
        return limit - 1 if kind == "bigint" and number == float(limit) else None
    return math.trunc(number)


def _number(text: str) -> float | None:
    """The number that a text means to Spark."""
    if _NUMBER.fullmatch(text):
        return float(text.rstrip("dDfF"))
    sign, word = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    found = _WORDS.get(word.lower())
    if found is None or (sign and found != found):
        return None
    return -found if sign == "-" else found


class OfText(Function):
    """The number or boolean that a text means, or null."""

    is_costly = True

    def __init__(self, kind: str):
        self.kind = kind

    def array(self, values: pa.Array) -> pa.Array:
        return pa.array(map(self.value, values.to_pylist()), kinds.to_arrow(self.kind))

    def value(self, value: str | None) -> Any:
        if value is None:
            return None
        text = value.strip(_SPACE)
        if self.kind == "boolean":
            return text.lower() in _TRUE if text.lower() in (*_TRUE, *_FALSE) else None
        if kinds.is_integral(self.kind) and _WHOLE.fullmatch(text):
            limit = 1 << (kinds.BITS[self.kind] - 1)
            if -limit <= int(text) < limit:
                return int(text)
        number = _number(text)
        if number is None or kinds.is_integral(self.kind):
            return None if number is None else _whole(number, self.kind)
        return kinds.float32(number) if self.kind == "float" else number


class ToText(Function):
    """The text of a whole number, a boolean or a date."""

    def array(self, values: pa.Array) -> pa.Array:
        return texts_of(values)

    def value(self, value: Any) -> str | None:
        return text_of(value)


class OfNumber(Function):
    """A number or boolean as another kind of them, null where that cannot hold it."""

    def __init__(self, source: str, kind: str):
        self.source, self.kind = source, kind

    def array(self, values: pa.Array) -> pa.Array:
        kind = kinds.to_arrow(self.kind)
        if self.kind == "boolean":
            return pc.not_equal(values, pa.scalar(0, values.type))
        if self.source == "boolean":
            return values.cast(pa.int8()).cast(kind)
        if not kinds.is_integral(self.kind):
            return values.cast(kind, safe=False)
        if kinds.is_integral(self.source):
            limit = 1 << (kinds.BITS[self.kind] - 1)
            wide = values.cast(pa.int64())
            fits = pc.and_(pc.greater_equal(wide, -limit), pc.less_equal(wide, limit - 1))
            return pc.if_else(fits, wide, None).cast(kind)
        return self._cut(values.cast(pa.float64()), kind)

    def _cut(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        limit = 1 << (kinds.BITS[self.kind] - 1)
        numbers = values.to_numpy(zero_copy_only=False)  # null is NaN, and both become null
        fits = (np.floor(numbers) <= limit - 1) & (np.ceil(numbers) >= -limit)
        found = np.zeros(len(numbers), np.int64)
        is_largest = numbers == float(limit) if self.kind == "bigint" else np.zeros_like(fits)
        inside = fits & ~is_largest
        found[inside] = numbers[inside].astype(np.int64)
        found[is_largest] = limit - 1
        return pa.array(found, pa.int64(), mask=~(fits | is_largest)).cast(kind)

    def value(self, value: Any) -> Any:
        if value is None:
            return None
        if self.kind == "boolean":
            return value != 0
        if kinds.is_integral(self.kind):
            return _whole(value, self.kind)
        if self.kind == "double":
            return float(value)
        return self._float(value)

    def _float(self, value: float) -> float:
        if isinstance(value, int) and abs(value) >= 1 << 53:  # not rounded twice
            return float(np.int64(value).astype(np.float32))
        return kinds.float32(value)


@dataclass(frozen=True)
class Cast(Operator):
    """``cast``; what cannot be converted becomes null."""

    columns: list[str] | None
    dtype: str | DataType
    method = "cast"

    def __post_init__(self) -> None:
        if hasattr(self.dtype, "simpleString"):  # of Spark; a pipeline takes names only
            return
        if not isinstance(self.dtype, str) or self.dtype not in _KINDS:
            raise UsageError(
                "dtype should be string, boolean, int, long, short, float, double. "
                f"Use one of them or a DataType of Spark instead of {self.dtype!r}"
            )

    @property
    def kind(self) -> str:
        return _KINDS[self.dtype] if isinstance(self.dtype, str) else self.dtype.simpleString()

    def _names(self, before: Schema) -> list[str]:
        names = list(before) if self.columns is None else self.columns
        require_fields(before, names)
        return names

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        return [self._cell(name, before[name]) for name in self._names(before)]

    def _cell(self, name: str, source: Field) -> Cell:
        wanted = self.kind
        if source.kind == wanted:
            return Cell((name,), name, source, None)
        keeps_size = kinds.is_integral(source.kind) and kinds.is_integral(wanted)
        field = Field(wanted, source.cardinality if keeps_size else None)
        if source.kind == "string":
            return Cell((name,), name, field, OfText(wanted))
        if kinds.is_integral(source.kind) or source.kind == "boolean":
            function = ToText() if wanted == "string" else OfNumber(source.kind, wanted)
            return Cell((name,), name, field, function)
        if kinds.is_fractional(source.kind) and wanted != "string":
            return Cell((name,), name, field, OfNumber(source.kind, wanted))
        if source.kind == "date" and wanted == "string":
            return Cell((name,), name, field, ToText())
        raise UsageError(
            f"The column {name} of type {source.kind} cannot be cast to {wanted} in a pipeline: "
            "Spark and Python would not agree; cast the table first"
        )

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        changed = [name for name in self._names(before) if before[name].kind != self.kind]
        return columns.replace(
            df, {name: self._column(col(name), before[name].kind) for name in changed}
        )

    def _column(self, value: Column, source: str) -> Column:
        wanted = self.kind if isinstance(self.dtype, str) else self.dtype
        if kinds.is_text(source) and self.kind == "float":  # rounded to double first, as in Python
            return value.try_cast("double").try_cast(wanted)
        if kinds.is_text(source) and kinds.is_integral(self.kind):
            # a fraction is cut, as in Spark before ANSI mode
            return F.coalesce(value.try_cast(wanted), value.try_cast("double").try_cast(wanted))
        return value.try_cast(wanted)
