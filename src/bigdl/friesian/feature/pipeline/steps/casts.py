"""A step that changes types; what cannot be converted becomes null."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    Step,
    require_fields,
)
from bigdl.friesian.feature.pipeline.steps.hashing import text_of, texts_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["Cast"]

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
        import pyarrow as pa

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
        import pyarrow as pa
        import pyarrow.compute as pc

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
        import numpy as np
        import pyarrow as pa

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
            import numpy as np

            return float(np.int64(value).astype(np.float32))
        return kinds.float32(value)


@dataclass(frozen=True)
class Cast(Step):
    """``cast``."""

    columns: list[str] | None
    dtype: str
    method = "cast"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in _KINDS:
            raise UsageError(
                "dtype should be string, boolean, int, long, short, float, double. "
                f"Use one of them instead of {self.dtype!r}"
            )

    @property
    def kind(self) -> str:
        return _KINDS[self.dtype]

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        names = list(before) if self.columns is None else self.columns
        require_fields(before, names)
        return [self._cell(name, before[name]) for name in names]

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
        from bigdl.friesian.feature.operators.columns import col, replace

        changed = [cell for cell in self.cells(before, state) if cell.function is not None]
        return replace(
            df,
            {
                each.output: self._column(col(each.output), before[each.output].kind)
                for each in changed
            },
        )

    def _column(self, value: Any, source: str) -> Any:
        from bigdl.friesian.feature.operators.cells import cast_column

        if source == "string" and kinds.is_numeric(self.kind):
            if self.kind == "float":  # rounded to double first, as in Python
                return value.try_cast("double").try_cast("float")
            from pyspark.sql.types import StringType

            return cast_column(value, StringType(), self.kind)
        return value.try_cast(self.kind)
