"""Kinds of columns, by the names that Spark has for its types; nothing here needs Spark."""

from __future__ import annotations

import ctypes
import datetime
from typing import Any

import pyarrow as pa

from bigdl.common.errors import UsageError

__all__ = [
    "BITS",
    "coerced",
    "digits",
    "element_of",
    "float32",
    "is_array",
    "is_atomic",
    "is_fractional",
    "is_integral",
    "is_number",
    "is_numeric",
    "is_text",
    "of_arrow",
    "to_arrow",
]

BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_FRACTIONAL = ("float", "double")


def is_integral(kind: str) -> bool:
    """Return True if values are whole numbers."""
    return kind in BITS


def is_fractional(kind: str) -> bool:
    """Return True if values are float or double, which know NaN."""
    return kind in _FRACTIONAL


def is_numeric(kind: str) -> bool:
    """Return True if values are numbers that Python and Arrow compute as Spark does."""
    return is_integral(kind) or is_fractional(kind)


def is_number(kind: str) -> bool:
    """Return True if values are numbers, decimal ones too."""
    return is_numeric(kind) or kind.startswith("decimal")


def digits(kind: str) -> tuple[int, int]:
    """Return precision and scale of ``decimal(precision,scale)``."""
    precision, scale = kind[len("decimal(") : -1].split(",")
    return int(precision), int(scale)


def is_text(kind: str) -> bool:
    """Return True if values are strings."""
    return kind == "string" or kind.startswith(("string ", "char(", "varchar("))


def is_atomic(kind: str) -> bool:
    """Return True if values are single ones."""
    nested = kind.startswith(("array<", "map<", "struct<"))
    return not nested and kind not in ("matrix", "variant", "vector", "void")


def is_array(kind: str) -> bool:
    """Return True if values are arrays."""
    return kind.startswith("array<")


def element_of(kind: str) -> str:
    """The kind of what is in an array."""
    return kind[len("array<") : -1]


def of_arrow(kind: pa.DataType) -> str:
    """The name that Spark has for a type of Arrow."""

    if pa.types.is_dictionary(kind):
        return of_arrow(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{of_arrow(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    return _names().get(kind, str(kind))


def to_arrow(kind: str) -> pa.DataType:
    """The type of Arrow for a name that :func:`of_arrow` gives to what steps compute with."""

    if is_array(kind):
        return pa.list_(to_arrow(element_of(kind)))
    if kind.startswith("decimal"):
        return pa.decimal128(*digits(kind))
    return next(each for each, name in _names().items() if name == kind)


def _names() -> dict[pa.DataType, str]:

    return {
        pa.int8(): "tinyint",
        pa.int16(): "smallint",
        pa.int32(): "int",
        pa.int64(): "bigint",
        pa.float32(): "float",
        pa.float64(): "double",
        pa.string(): "string",
        pa.bool_(): "boolean",
        pa.date32(): "date",
        pa.binary(): "binary",
    }


def float32(value: float) -> float:
    """A float of 64 bits rounded to the nearest of 32 bits; infinite where that is too small."""
    return ctypes.c_float(value).value


def coerced(value: Any, kind: str, name: str) -> Any:
    """A value of Python as a column of this kind holds it.

    Parameters
    ----------
    value : object
        None, or what the kind takes: a number of NumPy counts as one of Python.
    kind : str
    name : str
        Of the column, for the message.

    Raises
    ------
    UsageError
        If it is of another type or does not fit.
    """
    if value is None:
        return None
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        value = value.item()
    if is_array(kind):
        given = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(given, list | tuple):
            return [coerced(each, element_of(kind), name) for each in given]
    if is_fractional(kind) and isinstance(value, int | float) and not isinstance(value, bool):
        return float32(value) if kind == "float" else float(value)
    if is_integral(kind) and type(value) is int:
        limit = 1 << (BITS[kind] - 1)
        if -limit <= value < limit:
            return value
        raise UsageError(f"{name} is of type {kind}, which cannot hold {value!r}")
    if _is_of_kind(value, kind):
        return value
    raise UsageError(
        f"{name} should be of type {kind}, but got {value!r} of type {type(value).__name__}"
    )


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == "date":
        return isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    known = {"string": str, "boolean": bool, "binary": bytes}
    if kind in known:
        return isinstance(value, known[kind])
    return not (is_numeric(kind) or is_array(kind))  # what no step computes with passes as it is
