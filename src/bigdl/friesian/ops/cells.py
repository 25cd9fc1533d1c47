"""Operators that change single cells, nulls and types, and that select columns or rows."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types, spark
from bigdl.friesian.ops.batches import Quantiles, to_string, to_strings
from bigdl.friesian.ops.column_types import Field, Schema, require_columns
from bigdl.friesian.ops.operator import (
    Function,
    NumberFunction,
    Operator,
    OutputColumn,
    State,
    Statistic,
    TableOperator,
    register_operator,
)
from bigdl.friesian.ops.spark import F, check_different, check_new_names, col, rename_columns
from bigdl.orca.cluster.versions import try_cast

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from bigdl.friesian.ops.operator import State

HIDDEN = "__bigdl_asked_"  # prefix of temporary columns that a fit adds for statistics


@register_operator
@dataclass(frozen=True)
class Select(Operator):
    """Operator that implements ``select``."""

    columns: list[str]
    method = "select"

    def __post_init__(self) -> None:
        check_different(self.columns, "cols")

    def after(self, before: Schema, state: State | None) -> Schema:
        require_columns(before, self.columns)
        return {name: before[name] for name in self.columns}

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        hidden = [name for name in df.columns if name.startswith(HIDDEN)]
        kept = (name for name in self.columns if name in df.columns)
        return df.select(*map(col, kept), *map(col, hidden))


@register_operator
@dataclass(frozen=True)
class Drop(Operator):
    """Operator that implements ``drop``."""

    columns: list[str]
    method = "drop"

    @property
    def reads(self) -> list[str]:
        return []

    @property
    def dropped(self) -> set[str]:
        return set(self.columns)


@register_operator
@dataclass(frozen=True)
class Rename(Operator):
    """Operator that implements ``rename``."""

    columns: dict[str, str]
    method = "rename"

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        names = self._names(before)
        check_new_names([*(old for old in before if old not in names), *names.values()])
        return [OutputColumn((old,), new, before[old], None) for old, new in names.items()]

    def _names(self, before: Schema) -> dict[str, str]:
        return {old: new for old, new in self.columns.items() if old in before}

    def after(self, before: Schema, state: State | None) -> Schema:
        names = self._names(before)
        return {names.get(name, name): each for name, each in before.items()}

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        return rename_columns(df, self._names(before))


@register_operator
@dataclass(frozen=True)
class Filter(TableOperator):
    """Operator that implements ``filter`` with a SQL condition."""

    condition: str
    method = "filter"

    @property
    def reads(self) -> list[str]:
        """One-element list of the SQL condition, because only Spark can parse its column names."""
        return [self.condition]

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        return df.filter(self.condition)


@register_operator
@dataclass(frozen=True)
class DropNa(TableOperator):
    """Operator that implements ``dropna``."""

    columns: list[str] | None
    how: str
    thresh: int | None
    method = "dropna"

    def __post_init__(self) -> None:
        check_choice("how", self.how, ("any", "all"))
        if self.thresh is not None:
            check_integer("thresh", self.thresh)

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        names = df.columns if self.columns is None else self.columns
        require_columns(df.columns, names)
        subset = [spark.quoted(name) for name in names]
        return df.dropna(how=self.how, thresh=self.thresh, subset=subset)


# -- nulls -----------------------------------------------------------------------------------------


class Fill(Function):
    """Function that replaces nulls by a constant, cast to the type of the column."""

    def __init__(self, value: object, dtype: str):
        self.value, self.dtype = value, dtype
        constant = _cut(value, dtype)
        if dtype.startswith("decimal"):
            _, scale = column_types.digits(dtype)
            unit = decimal.Decimal(1).scaleb(-scale)
            constant = decimal.Decimal(str(constant)).quantize(unit, decimal.ROUND_HALF_UP)
        self.constant = column_types.coerce_value(constant, dtype, "value")

    def array(self, values: pa.Array) -> pa.Array:
        if not values.null_count:
            return values
        return values.fill_null(pa.scalar(self.constant, column_types.to_arrow(self.dtype)))

    def single(self, *input_types: str) -> Callable[..., Any]:
        return lambda value: self.constant if value is None else value

    def column(self, value: Column) -> Column:
        return F.coalesce(value, F.lit(self.value).cast(self.dtype))


def _cut(constant: Any, dtype: str) -> Any:
    return math.trunc(constant) if column_types.is_integral(dtype) else constant


@register_operator
@dataclass(frozen=True)
class FillNa(Operator):
    """Operator that implements ``fillna``."""

    value: float | str | bool
    columns: list[str] | None
    method = "fillna"

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float | str):
            raise UsageError(
                f"value should be int, float, str or bool, but got {self.value!r}",
                code="argument-type",
                argument="value",
            )

    def _names(self, before: Schema) -> list[str]:
        if self.columns is not None:
            require_columns(before, self.columns)
            for name in self.columns:
                self._check(name, before[name].kind)
            return self.columns
        return [name for name, each in before.items() if self._takes(each.kind)]

    @property
    def _group(self) -> str:
        if isinstance(self.value, bool):
            return "boolean"
        return "string" if isinstance(self.value, str) else "numeric"

    def _takes(self, dtype: str) -> bool:
        if _group(dtype) != self._group:
            return False
        value = cast("float", self.value)  # for numeric types
        if column_types.is_integral(dtype):
            low, high = column_types.limits(dtype)
            return math.isfinite(value) and low <= math.trunc(value) <= high
        if dtype.startswith("decimal"):
            precision, scale = column_types.digits(dtype)
            return math.isfinite(value) and abs(value) < 10 ** (precision - scale)
        return True

    def _check(self, name: str, dtype: str) -> None:
        if _group(dtype) != self._group:
            raise UsageError(
                f"{self._group} does not match the type of column {name}, which is {dtype}",
                code="argument-type",
                argument="value",
                column=name,
            )
        if not self._takes(dtype):
            raise UsageError(
                f"The column {name} of type {dtype} cannot hold {self.value!r}",
                code="argument-value",
                argument="value",
                column=name,
            )

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        cells = []
        for name in self._names(before):
            each, fill = before[name], Fill(self.value, before[name].kind)
            if each.cardinality is not None:
                each = replace(each, cardinality=max(each.cardinality, fill.constant + 1))
            cells.append(OutputColumn((name,), name, each, fill))
        return cells


def _group(dtype: str) -> str:
    if column_types.is_text(dtype):
        return "string"
    return "numeric" if column_types.is_number(dtype) else dtype


@register_operator
@dataclass(frozen=True)
class FillMedian(Operator):
    """Operator that implements ``fill_median``; its state holds the median of each column."""

    columns: list[str] | None
    method = "fill_median"

    def requests(self, before: Schema) -> dict[str, Statistic]:
        return medians_of(before, self.columns)

    def fit_state(self, before: Schema, statistics: Mapping[str, Any]) -> State:
        empty = [name for name, medians in statistics.items() if not medians]
        if empty:
            raise UsageError(
                f"The columns {empty} have no median since all their values are null; fill them "
                "with a constant",
                code="data-null",
                columns=empty,
            )
        return {name: _cut(medians[0], before[name].kind) for name, medians in statistics.items()}

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        cells = []
        for name in medians_of(before, self.columns):
            fill = None if state is None else Fill(state[name], before[name].kind)
            cells.append(OutputColumn((name,), name, before[name], fill))
        return cells


def medians_of(before: Schema, names: Sequence[str] | None) -> dict[str, Statistic]:
    """Return a Quantiles request for each column's median; by default for all numeric columns."""
    if names is None:
        names = [name for name, each in before.items() if column_types.is_number(each.kind)]
    require_columns(before, names)
    for name in names:
        dtype = before[name].kind
        if not column_types.is_number(dtype):
            raise UsageError(
                f"{name} with data type {re.split('[<(]', dtype)[0].capitalize()}Type is not "
                "supported: a median needs numbers",
                code="data-dtype",
                column=name,
            )
    return {name: Quantiles((name,)) for name in names}


# -- types -----------------------------------------------------------------------------------------

_SPARK_TYPES = {
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
_SPACE = "".join(map(chr, range(33)))  # characters that Spark strips from numbers in strings
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?")
_WORDS = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
_TRUE, _FALSE = ("t", "true", "y", "yes", "1"), ("f", "false", "n", "no", "0")
_BOOLEANS = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}


def _number(text: str) -> float | None:
    """Parse a number from a string as Spark does; None if it is not a number."""
    if _NUMBER.fullmatch(text):
        return float(text.rstrip("dDfF"))
    sign, word = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    number = _WORDS.get(word.lower())
    if number is None or (sign and number != number):
        return None
    return -number if sign == "-" else number


class ParseText(Function):
    """Function that parses strings as numbers or booleans as Spark does; null if invalid."""

    is_costly = True

    def __init__(self, dtype: str):
        self.dtype = dtype
        self._of_double = CastNumber(dtype).single("double")

    def array(self, values: pa.Array) -> pa.Array:
        return pa.array(map(self._value, values.to_pylist()), column_types.to_arrow(self.dtype))

    def single(self, *input_types: str) -> Callable[..., Any]:
        return self._value

    def _value(self, value: str | None) -> bool | int | float | None:
        text = "" if value is None else value.strip(_SPACE)
        if self.dtype == "boolean":
            return _BOOLEANS.get(text.lower())
        if column_types.is_integral(self.dtype) and _WHOLE.fullmatch(text):
            low, high = column_types.limits(self.dtype)
            if low <= int(text) <= high:
                return int(text)
        return self._of_double(_number(text))


class ToText(Function):
    """Function that converts an integer, a boolean or a date to a string."""

    def array(self, values: pa.Array) -> pa.Array:
        return to_strings(values)

    def single(self, *input_types: str) -> Callable[..., Any]:
        return to_string


class CastNumber(NumberFunction):
    """Function that casts to a number type or boolean; a value that does not fit becomes null."""

    def __init__(self, dtype: str):
        self.kind = dtype
        self._type = np.dtype(column_types.to_arrow(dtype).to_pandas_dtype())

    def numbers(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        numbers = np.asarray(numbers)
        if not column_types.is_integral(self.kind) or numbers.dtype.kind != "f":
            return numbers.astype(self._type)
        # the largest bigint rounds to 2**63 as a double; Spark maps 2**63 back to it
        _, high = column_types.limits(self.kind)
        undefined = np.asarray(self.undefined(numbers))
        whole = np.where(undefined | (numbers >= high), 0, numbers)
        return np.where(numbers >= high, self._type.type(high), whole.astype(self._type))

    def undefined(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        if not column_types.is_integral(self.kind):
            return None
        low, high = column_types.limits(self.kind)
        return ~((np.floor(numbers) <= high) & (np.ceil(numbers) >= low))


@register_operator
@dataclass(frozen=True)
class Cast(Operator):
    """Operator that implements ``cast``; values that cannot be converted become null."""

    columns: list[str] | None
    dtype: str | DataType
    method = "cast"

    def __post_init__(self) -> None:
        if hasattr(self.dtype, "simpleString"):  # a Spark DataType; pipelines accept names only
            return
        if not isinstance(self.dtype, str) or self.dtype not in _SPARK_TYPES:
            raise UsageError(
                "dtype should be string, boolean, int, long, short, float, double. "
                f"Use one of them or a DataType of Spark instead of {self.dtype!r}",
                code="argument-value",
                argument="dtype",
            )

    @property
    def spark_type(self) -> str:
        return (
            _SPARK_TYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype.simpleString()
        )

    def _names(self, before: Schema) -> list[str]:
        names = list(before) if self.columns is None else self.columns
        require_columns(before, names)
        return names

    def cells(self, before: Schema, state: State | None) -> list[OutputColumn]:
        return [self._cell(name, before[name]) for name in self._names(before)]

    def _cell(self, name: str, source: Field) -> OutputColumn:
        wanted = self.spark_type
        if source.kind == wanted:
            return OutputColumn((name,), name, source, None)
        keeps_size = column_types.is_integral(source.kind) and column_types.is_integral(wanted)
        field = Field(wanted, source.cardinality if keeps_size else None)
        is_exact = column_types.is_integral(source.kind) or source.kind == "boolean"
        if source.kind == "string":
            return OutputColumn((name,), name, field, ParseText(wanted))
        if wanted == "string" and (is_exact or source.kind == "date"):
            return OutputColumn((name,), name, field, ToText())
        if wanted != "string" and (is_exact or column_types.is_fractional(source.kind)):
            return OutputColumn((name,), name, field, CastNumber(wanted))
        raise UsageError(
            f"The column {name} of type {source.kind} cannot be cast to {wanted} in a pipeline: "
            "Spark and Python would not agree; cast the table first",
            code="data-dtype",
            column=name,
        )

    def catalyst(self, df: DataFrame, before: Schema, state: State | None) -> DataFrame:
        changed = [name for name in self._names(before) if before[name].kind != self.spark_type]
        return spark.replace(
            df, {name: self._column(col(name), before[name].kind) for name in changed}
        )

    def _column(self, value: Column, source: str) -> Column:
        wanted = self.spark_type if isinstance(self.dtype, str) else self.dtype
        if (
            column_types.is_text(source) and self.spark_type == "float"
        ):  # round to double first, as Python does
            return try_cast(try_cast(value, "double"), wanted)
        if column_types.is_text(source) and column_types.is_integral(self.spark_type):
            # truncate fractions, as Spark does without ANSI mode
            return F.coalesce(try_cast(value, wanted), try_cast(try_cast(value, "double"), wanted))
        return try_cast(value, wanted)
