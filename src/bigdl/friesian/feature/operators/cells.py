"""Operators that change one cell at a time: nulls, bounds, logarithms, types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import (
    as_names,
    col,
    is_fractional,
    is_integral,
    is_numeric,
    is_textual,
    names_of,
    numeric_columns,
    replace,
    require_columns,
    type_name,
    type_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = [
    "add",
    "cast",
    "cast_column",
    "check_dropna",
    "clip",
    "fill_values",
    "fillna",
    "log",
    "medians",
]

_RELATIVE_ERROR = 0.001  # of the rank that a median has
_CASTS = {
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
_BITS = {"ByteType": 7, "ShortType": 15, "IntegerType": 31, "LongType": 63}


def fillna(df: DataFrame, value: Any, columns: str | list[str] | None) -> DataFrame:
    """Replace nulls, but not NaN, by a value; see :meth:`Table.fillna`."""
    if isinstance(value, bool):
        kind = "boolean"
    elif isinstance(value, int | float):
        kind = "numeric"
    elif isinstance(value, str):
        kind = "string"
    else:
        raise UsageError(f"value should be int, float, str or bool, but got {value!r}")
    if columns is None:
        names = [name for name in df.columns if _takes(value, kind, type_of(df, name))]
        if kind == "numeric" and _is_int32(value):
            names = [name for name in names if type_name(type_of(df, name)) == "IntegerType"]
    else:
        names = as_names(columns)
        require_columns(df, names)
        for name in names:
            _check_fill(value, kind, name, type_of(df, name))
    return fill_values(df, dict.fromkeys(names, value))


def fill_values(df: DataFrame, values: Mapping[str, Any]) -> DataFrame:
    """Replace the nulls of each column by its own value, cast to the type of the column."""
    from pyspark.sql import functions as F

    return replace(
        df,
        {
            name: F.coalesce(col(name), F.lit(value).cast(type_of(df, name)))
            for name, value in values.items()
        },
    )


def _is_int32(value: Any) -> bool:
    return isinstance(value, int) and -(2**31) <= value < 2**31


def _kind(data_type: DataType) -> str:
    if is_numeric(data_type):
        return "numeric"
    return "string" if is_textual(data_type) else data_type.typeName()


def _takes(value: Any, kind: str, data_type: DataType) -> bool:
    """Whether a column of this type can hold the value."""
    return _kind(data_type) == kind and (kind != "numeric" or _fits(value, data_type))


def _fits(value: float, data_type: DataType) -> bool:
    from pyspark.sql.types import DecimalType

    if is_integral(data_type):
        limit = 2 ** _BITS[type_name(data_type)]
        return math.isfinite(value) and -limit <= math.trunc(value) < limit
    if isinstance(data_type, DecimalType):
        digits = data_type.precision - data_type.scale
        return math.isfinite(value) and abs(value) < 10**digits
    return True


def _check_fill(value: Any, kind: str, name: str, data_type: DataType) -> None:
    if _kind(data_type) != kind:
        raise UsageError(
            f"{kind} does not match the type of column {name}, which is {data_type.simpleString()}"
        )
    if kind == "numeric" and not _fits(value, data_type):
        raise UsageError(
            f"The column {name} of type {data_type.simpleString()} cannot hold {value!r}"
        )


def check_dropna(how: Any, thresh: Any) -> None:
    """Check what ``dropna`` takes beside columns."""
    if how not in ("any", "all"):
        raise UsageError(f"how should be any or all, but got {how!r}")
    if thresh is not None and (isinstance(thresh, bool) or not isinstance(thresh, int)):
        raise UsageError(f"thresh should be an integer or None, but got {thresh!r}")


def clip(df: DataFrame, columns: Any, minimum: float | None, maximum: float | None) -> DataFrame:
    """Bounds for numbers; see :meth:`Table.clip`."""
    from pyspark.sql import functions as F

    if minimum is None and maximum is None:
        raise UsageError("at least one of min and max should be not None")
    for bound, what in ((minimum, "min"), (maximum, "max")):
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        if bound is not None and (not is_number or math.isnan(bound)):
            raise UsageError(f"{what} should be a number or None, got {bound!r}")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise UsageError(f"min should be smaller than max, but got {minimum} and {maximum}")
    names = names_of(df, columns, is_numeric, "numbers")

    def bounded(name: str) -> Column:
        value, data_type = col(name), type_of(df, name)
        for bound, limited in ((minimum, F.greatest), (maximum, F.least)):
            if bound is not None:
                value = limited(value, F.lit(_bound(bound, data_type)).cast(data_type))
        # greatest and least skip nulls, and NaN is the greatest number of Spark
        keep = col(name).isNull()
        if is_fractional(data_type):
            keep = keep | F.isnan(col(name))
        return F.when(keep, col(name)).otherwise(value)

    return replace(df, {name: bounded(name) for name in names})


def _bound(bound: float, data_type: DataType) -> float:
    """The bound as the type can hold it: an int column has no larger limit than its own."""
    if not is_integral(data_type):
        return bound
    limit = 2 ** _BITS[type_name(data_type)]
    if math.isinf(bound):
        return limit - 1 if bound > 0 else -limit
    return min(max(math.trunc(bound), -limit), limit - 1)


def log(df: DataFrame, columns: Any, clipping: bool) -> DataFrame:
    """Natural logarithms; see :meth:`Table.log`."""
    from pyspark.sql import functions as F

    if not isinstance(clipping, bool):
        raise UsageError(f"clipping should be a boolean, but get {type(clipping).__name__}")
    names = names_of(df, columns, is_numeric, "numbers")

    def logarithm(name: str) -> Column:
        value = col(name).cast("double")
        if not clipping:
            return F.when(value > 0, F.log(value))
        return F.when(value < 0, F.lit(0.0)).otherwise(F.log1p(value))

    return replace(df, {name: logarithm(name) for name in names})


def add(df: DataFrame, columns: Any, value: float) -> DataFrame:
    """A constant added to numbers."""
    from pyspark.sql import functions as F

    names = names_of(df, columns, is_numeric, "numbers")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"value should be a number, got {value!r}")
    return replace(df, {name: col(name) + F.lit(value) for name in names})


def medians(df: DataFrame, columns: Any) -> dict[str, float | None]:
    """Approximate medians of columns, None of one without a value; one job for all of them.

    Parameters
    ----------
    columns : str, list of str or None
        None for all columns of numbers.

    Returns
    -------
    dict of str to float or None
    """
    names = numeric_columns(df) if columns is None else as_names(columns)
    require_columns(df, names)
    for name in names:
        if not is_numeric(type_of(df, name)):
            raise UsageError(
                f"{name} with data type {type_name(type_of(df, name))} is not supported: a median "
                "needs numbers"
            )
    if not names:
        return {}
    plain = df.select(*(col(name).cast("double").alias(str(i)) for i, name in enumerate(names)))
    found = plain.approxQuantile([str(i) for i in range(len(names))], [0.5], _RELATIVE_ERROR)
    return {name: each[0] if each else None for name, each in zip(names, found, strict=True)}


def cast(df: DataFrame, columns: Any, dtype: Any) -> DataFrame:
    """Other types for columns; what cannot be converted becomes null."""
    names = df.columns if columns is None else as_names(columns)
    require_columns(df, names)
    wanted = _wanted_type(dtype)
    return replace(df, {name: cast_column(col(name), type_of(df, name), wanted) for name in names})


def _wanted_type(dtype: Any) -> str | DataType:
    from pyspark.sql.types import DataType

    if isinstance(dtype, DataType):
        return dtype
    if not isinstance(dtype, str) or dtype not in _CASTS:
        raise UsageError(
            "dtype should be string, boolean, int, long, short, float, double. "
            f"Use one of them or a DataType of Spark instead of {dtype!r}"
        )
    return _CASTS[dtype]


def cast_column(value: Column, source: DataType, wanted: str | DataType) -> Column:
    """`value` cast to a type; null where it does not fit.

    Text that holds a fraction becomes a whole number by truncation, as in Spark before ANSI mode.
    """
    from pyspark.sql import functions as F

    name = wanted if isinstance(wanted, str) else wanted.simpleString()
    if is_textual(source) and name in ("tinyint", "smallint", "int", "bigint"):
        return F.coalesce(value.try_cast(wanted), value.try_cast("double").try_cast(wanted))
    return value.try_cast(wanted)
