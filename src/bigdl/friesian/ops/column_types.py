"""Fields of columns and their kinds, by the names that Spark has for its types.

Nothing here needs Spark.
"""

import ctypes
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from bigdl.common.errors import UsageError


@dataclass(frozen=True)
class Field:
    """Type, cardinality and length of a column.

    Attributes
    ----------
    kind : str
        Its type, as Spark writes it: ``"int"``, ``"array<double>"``.
    cardinality : int or None
        One more than the largest number that it can hold, for columns of category numbers from 0
        on; the number of rows of an embedding.
    length : int or None
        Of its arrays, if all have the same.

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
"""Kinds that Spark, Arrow and Parquet have in common."""

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


def is_time(kind: str) -> bool:
    """Return True if values can be times."""
    return is_number(kind) or kind in ("date", "timestamp", "timestamp_ntz")


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


def is_category(kind: str) -> bool:
    """Return True if Spark, Arrow and Python tell values apart, and write them, in the same way."""
    return is_integral(kind) or kind in ("string", "boolean", "date")


def is_array(kind: str) -> bool:
    """Return True if values are arrays."""
    return kind.startswith("array<")


def of_cells(kind: str) -> str:
    """The kind of the values in cells: that of an array's elements, or of the cells themselves."""
    return element_of(kind) if is_array(kind) else kind


def element_of(kind: str) -> str:
    """The kind of what is in an array."""
    return kind[len("array<") : -1]


def innermost(kind: str) -> tuple[str, int]:
    """The kind of what is in the innermost arrays, and how deep they are nested."""
    depth = 0
    while is_array(kind):
        kind, depth = element_of(kind), depth + 1
    return kind, depth


def limits(kind: str) -> tuple[int, int]:
    """The smallest and the largest number of a kind of whole numbers."""
    limit = 1 << (BITS[kind] - 1)
    return -limit, limit - 1


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
    return _NAMES.get(kind, str(kind))


@cache
def to_arrow(kind: str) -> pa.DataType:
    """The type of Arrow for a name that :func:`of_arrow` gives to what steps compute with."""
    if is_array(kind):
        return pa.list_(to_arrow(element_of(kind)))
    if kind.startswith("decimal"):
        return pa.decimal128(*digits(kind))
    return next(each for each, name in _NAMES.items() if name == kind)


def array_of(value: Any, kind: str) -> pa.Array:
    """An array of one value; None is null."""
    try:
        known = to_arrow(kind)
    except StopIteration:  # no step computes with such values, but one may ask for a length
        known = pa.list_(pa.null()) if value is None else None
    return pa.array([value], known)


def array_as(values: Any, kind: str, name: str) -> pa.Array:
    """Many values as an array of a kind.

    Parameters
    ----------
    values : pyarrow.Array, numpy.ndarray or list
        A matrix holds a list in each row.
    kind : str
    name : str
        Of the column, for the message.

    Raises
    ------
    UsageError
        If they are of another type or do not fit.
    """
    try:
        wanted: pa.DataType | None = to_arrow(kind)
    except StopIteration:  # no step computes with such values
        wanted = None
    try:
        if getattr(values, "ndim", 1) == 2:
            flat = pa.array(values.reshape(-1))
            values = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return array if wanted is None or array.type == wanted else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"{name} should be of type {kind}: {error}", code="data-dtype", column=name
        ) from error


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
    if value is None or type(value) is _PYTHON_TYPES.get(kind):
        return value
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        value = value.item()
    if is_array(kind):
        values = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(values, list | tuple):
            return [coerced(each, element_of(kind), name) for each in values]
    if is_fractional(kind) and isinstance(value, int | float) and not isinstance(value, bool):
        return ctypes.c_float(value).value if kind == "float" else float(value)
    if is_integral(kind) and type(value) is int:
        low, high = limits(kind)
        if low <= value <= high:
            return value
        raise UsageError(
            f"{name} is of type {kind}, which cannot hold {value!r}", code="data-value", column=name
        )
    if _is_of_kind(value, kind):
        return value
    raise UsageError(
        f"{name} should be of type {kind}, but got {value!r} of type {type(value).__name__}",
        code="data-dtype",
        column=name,
    )


def _is_of_kind(value: object, kind: str) -> bool:
    if kind == "date":
        return isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    if kind in _PYTHON_TYPES:
        return isinstance(value, _PYTHON_TYPES[kind])
    return not (is_numeric(kind) or is_array(kind))  # what no step computes with passes as it is


# -- checks of columns -----------------------------------------------------------------------------


def require_columns(
    known: Iterable[str], names: Iterable[str], where: str = "Table", advice: str = ""
) -> None:
    """Check that all columns exist, in the names of a table or in its schema."""
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
    """Check that columns exist and are of a kind, which a message calls by a word.

    Before that it has a rule in the words of BigDL 2.x, where there are some.
    """
    rule = f"{rule}: " if rule else ""
    message = f"{rule}{{name}} should be a column of {word}, but its type is {{kind}}{advice}"
    check_types(before, names, has_type, message)


def check_types(
    before: Schema, names: Iterable[str], has_type: Callable[[str], bool], message: str
) -> None:
    """Check that columns exist and are of a kind; the message takes a ``name`` and a ``kind``."""
    names = list(names)
    require_columns(before, names)
    for name in names:
        if not has_type(before[name].kind):
            raise UsageError(
                message.format(name=name, kind=before[name].kind), code="data-dtype", column=name
            )
