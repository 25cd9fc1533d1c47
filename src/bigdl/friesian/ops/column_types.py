"""Spark names of column types, conversions to Arrow, and checks of columns by type.

No function of this module needs Spark.
"""

from __future__ import annotations

import ctypes
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Field:
    """Type, cardinality and length of a column.

    Attributes
    ----------
    kind : str
        Spark type name, such as ``"int"`` or ``"array<double>"``.
    cardinality : int or None
        Largest possible value plus 1, for columns of non-negative integer ids. It is the number of
        rows of an embedding.
    length : int or None
        Length of the arrays, if all arrays have the same length.

    Examples
    --------
    >>> from bigdl.friesian.operators import Field
    >>> Field("array<int>", cardinality=944, length=100).kind  # histories of 100 ids below 944
    'array<int>'
    """

    kind: str
    cardinality: int | None = None
    length: int | None = None


Schema = Mapping[str, Field]

BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_FRACTIONAL = ("float", "double")
PLAIN = (*BITS, *_FRACTIONAL, "boolean", "string", "date")
"""Scalar types that Spark, Arrow and Parquet have in common."""

_NAMES = {
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


_PYTHON_TYPES = {"string": str, "boolean": bool, "binary": bytes, "double": float}


def is_integral(dtype: str) -> bool:
    """Return True for integer types."""
    return dtype in BITS


def is_fractional(dtype: str) -> bool:
    """Return True for the types that have NaN: float and double."""
    return dtype in _FRACTIONAL


def is_numeric(dtype: str) -> bool:
    """Return True for number types that Python and Arrow compute as Spark does."""
    return is_integral(dtype) or is_fractional(dtype)


def is_number(dtype: str) -> bool:
    """Return True for number types, including decimal."""
    return is_numeric(dtype) or dtype.startswith("decimal")


def is_time(dtype: str) -> bool:
    """Return True for types that can represent times: numbers, dates and timestamps."""
    return is_number(dtype) or dtype in ("date", "timestamp", "timestamp_ntz")


def digits(dtype: str) -> tuple[int, int]:
    """Return the precision and scale of a type name ``decimal(precision,scale)``."""
    precision, scale = dtype[len("decimal(") : -1].split(",")
    return int(precision), int(scale)


def is_text(dtype: str) -> bool:
    """Return True for string types."""
    return dtype == "string" or dtype.startswith(("string ", "char(", "varchar("))


def is_atomic(dtype: str) -> bool:
    """Return True for types of single values, neither nested nor vectors."""
    nested = dtype.startswith(("array<", "map<", "struct<"))
    return not nested and dtype not in ("matrix", "variant", "vector", "void")


def is_category(dtype: str) -> bool:
    """Return True for types whose values Spark, Arrow and Python compare and format alike."""
    return is_integral(dtype) or dtype in ("string", "boolean", "date")


def is_array(dtype: str) -> bool:
    """Return True for array types."""
    return dtype.startswith("array<")


def cell_value_type(dtype: str) -> str:
    """Return the element type of an array type, or the type itself."""
    return element_type(dtype) if is_array(dtype) else dtype


def element_type(dtype: str) -> str:
    """Return the element type of an array type."""
    return dtype[len("array<") : -1]


def innermost(dtype: str) -> tuple[str, int]:
    """Return the innermost element type of nested arrays, and the nesting depth."""
    depth = 0
    while is_array(dtype):
        dtype, depth = element_type(dtype), depth + 1
    return dtype, depth


def limits(dtype: str) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type."""
    limit = 1 << (BITS[dtype] - 1)
    return -limit, limit - 1


def of_arrow(dtype: pa.DataType) -> str:
    """Return the Spark type name of an Arrow type."""
    if pa.types.is_dictionary(dtype):
        return of_arrow(dtype.value_type)
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return f"array<{of_arrow(dtype.value_type)}>"
    if pa.types.is_decimal(dtype):
        return f"decimal({dtype.precision},{dtype.scale})"
    if pa.types.is_timestamp(dtype):
        return "timestamp_ntz" if dtype.tz is None else "timestamp"
    if pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return "string"
    return _NAMES.get(dtype, str(dtype))


@cache
def to_arrow(dtype: str) -> pa.DataType:
    """Return the Arrow type of a Spark type name; the inverse of :func:`of_arrow`."""
    if is_array(dtype):
        return pa.list_(to_arrow(element_type(dtype)))
    if dtype.startswith("decimal"):
        return pa.decimal128(*digits(dtype))
    return next(each for each, name in _NAMES.items() if name == dtype)


def single_value_array(value: object, dtype: str) -> pa.Array:
    """Build an Arrow array of length 1; None becomes null."""
    try:
        known = to_arrow(dtype)
    except StopIteration:  # no operator computes with such values, but one may need a length
        known = pa.list_(pa.null()) if value is None else None
    return pa.array([value], known)


def to_typed_array(values: Any, dtype: str, name: str) -> pa.Array:
    """Convert values to an Arrow array of a Spark type.

    Parameters
    ----------
    values : pyarrow.Array, numpy.ndarray or list
        Each row of a matrix becomes a list.
    dtype : str
        Spark type name.
    name : str
        Column name for the error message.

    Raises
    ------
    UsageError
        If the values have another type or do not fit.
    """
    try:
        wanted: pa.DataType | None = to_arrow(dtype)
    except StopIteration:  # no operator computes with such values
        wanted = None
    try:
        if getattr(values, "ndim", 1) == 2:
            items = pa.array(values.reshape(-1))
            values = pa.FixedSizeListArray.from_arrays(items, values.shape[1])
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return array if wanted is None or array.type == wanted else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"{name} should be of type {dtype}: {error}", code="data-dtype", column=name
        ) from error


def coerce_value(value: object, dtype: str, name: str) -> Any:  # the Python type of `dtype`
    """Convert a Python value to the type of a column.

    Parameters
    ----------
    value : object
        None, or a value that the type accepts. NumPy numbers count as Python numbers.
    dtype : str
        Spark type name.
    name : str
        Column name for the error message.

    Raises
    ------
    UsageError
        If the value has another type or does not fit.
    """
    if value is None or type(value) is _PYTHON_TYPES.get(dtype):
        return value
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        value = value.item()
    if is_array(dtype):
        values = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(values, list | tuple):
            return [coerce_value(each, element_type(dtype), name) for each in values]
    if is_fractional(dtype) and isinstance(value, int | float) and not isinstance(value, bool):
        return ctypes.c_float(value).value if dtype == "float" else float(value)
    if is_integral(dtype) and type(value) is int:
        low, high = limits(dtype)
        if low <= value <= high:
            return value
        raise UsageError(
            f"{name} is of type {dtype}, which cannot hold {value!r}",
            code="data-value",
            column=name,
        )
    if _has_type(value, dtype):
        return value
    raise UsageError(
        f"{name} should be of type {dtype}, but got {value!r} of type {type(value).__name__}",
        code="data-dtype",
        column=name,
    )


def _has_type(value: object, dtype: str) -> bool:
    if dtype == "date":
        return isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    if dtype in _PYTHON_TYPES:
        return isinstance(value, _PYTHON_TYPES[dtype])
    return not (is_numeric(dtype) or is_array(dtype))  # other values are passed unchanged


# -- checks of columns -----------------------------------------------------------------------------


def require_columns(
    known: Iterable[str], names: Iterable[str], where: str = "Table", advice: str = ""
) -> None:
    """Raise a UsageError if a table or schema lacks any of the columns `names`."""
    missing = [name for name in dict.fromkeys(names) if name not in known]
    if missing:
        raise UsageError(
            f"{missing} do not exist in this {where}, whose columns are {list(known)}{advice}",
            code="column-missing",
            columns=missing,
            allowed=list(known),
        )


def require_type(
    before: Schema,
    names: Iterable[str],
    has_type: Callable[[str], bool],
    word: str,
    advice: str = "",
    rule: str = "",
) -> None:
    """Raise a UsageError unless columns exist and have an accepted type.

    Parameters
    ----------
    before : Schema
    names : iterable of str
    has_type : callable
        Returns True for an accepted type name.
    word : str
        Description of the accepted types for the message, such as ``"numbers"``.
    advice : str, optional
        Appended to the message.
    rule : str, optional
        Message of BigDL 2.x, which then begins the message.
    """
    rule = f"{rule}: " if rule else ""
    message = f"{rule}{{name}} should be a column of {word}, but its type is {{dtype}}{advice}"
    check_types(before, names, has_type, message)


def check_types(
    before: Schema, names: Iterable[str], has_type: Callable[[str], bool], message: str
) -> None:
    """Raise a UsageError with a custom message unless columns exist and have an accepted type.

    `message` may refer to ``{name}`` and ``{dtype}``, the name and the type of the column.
    """
    names = list(names)
    require_columns(before, names)
    for name in names:
        if not has_type(before[name].kind):
            raise UsageError(
                message.format(name=name, dtype=before[name].kind), code="data-dtype", column=name
            )
