"""Conversion of pandas, Arrow, Polars and Spark tables for metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards.frames import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "Table",
    "as_arrow",
    "as_table",
    "check_same_type",
    "column_names",
    "id_type",
    "ids",
    "index_in",
    "numbers",
    "sorted_codes",
]

# Any: a pandas, Arrow, Polars or Spark table, or a FeatureTable; as_table detects which.
Table = Any


def as_table(data: Table, what: str, columns: Sequence[str]) -> pa.Table | DataFrame:
    """Select columns of a table as an Arrow table, or as a Spark DataFrame.

    Parameters
    ----------
    data : pandas, Arrow, Polars or Spark table, or FeatureTable
    what : str
        Name of the argument, for errors.
    columns : sequence of str

    Raises
    ------
    UsageError
        If `data` is not a table, or a column is missing.
    """
    data, names = _unwrapped(data), column_names(data)
    module = type(data).__module__.partition(".")[0]
    if not names:
        raise UsageError(
            f"{what} should be a pandas, Arrow, Polars or Spark table with the columns "
            f"{list(columns)}, got {type(data)}",
            code="argument-type",
            argument=what,
        )
    for column in columns:
        if column not in names:
            raise UsageError(
                f"{what} has no column {column!r}; its columns are {names}",
                code="column-missing",
                column=column,
            )
    if module == "pyspark":
        return data.select(*(quoted(column) for column in columns))
    if module == "pandas":
        try:
            return pa.Table.from_pandas(data[list(columns)], preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(
                f"{what} has a column whose values have different types: {error}", code="data-dtype"
            ) from None
    if module == "polars":
        data = data.collect() if hasattr(data, "collect") else data
        return data.select(columns).to_arrow()
    return (data if isinstance(data, pa.Table) else pa.table(data)).select(columns)


def as_arrow(data: Table, what: str, columns: Sequence[str]) -> pa.Table:
    """Select columns of a table as an Arrow table; collect the rows of a Spark table."""
    table = as_table(data, what, columns)
    if isinstance(table, pa.Table):
        return table
    from bigdl.orca.cluster.versions import to_arrow

    return to_arrow(table)


def column_names(data: Table) -> list[str]:
    """Return the column names of a table; an empty list for other objects."""
    data = _unwrapped(data)
    return list(data.column_names if isinstance(data, pa.Table) else getattr(data, "columns", ()))


def _unwrapped(data: Table) -> Table:
    """Return the DataFrame of a FeatureTable; return other objects unchanged."""
    return data.df if type(data).__module__.startswith("bigdl.") and hasattr(data, "df") else data


def id_type(dtype: pa.DataType, what: str, column: str) -> pa.DataType:
    """Return the type in which ids of a column are compared: int64 or string.

    Raises
    ------
    UsageError
        For ids that are neither integers nor strings.
    """
    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    if pa.types.is_integer(dtype):
        return pa.int64()
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or dtype == pa.string_view():
        return pa.string()
    raise UsageError(
        f"Ids in column {column!r} of {what} should be integers or strings, got {dtype}",
        code="data-dtype",
        column=column,
    )


def ids(table: pa.Table, column: str, what: str) -> pa.ChunkedArray:
    """Return an id column as int64 or string.

    Raises
    ------
    UsageError
        For nulls and other types.
    """
    values = table[column]
    if values.null_count:
        raise UsageError(
            f"Column {column!r} of {what} has {values.null_count} nulls; drop those rows",
            code="data-null",
            column=column,
        )
    return values.cast(id_type(values.type, what, column))


def sorted_codes(*columns: pa.ChunkedArray) -> tuple[pa.Array, list[np.ndarray]]:
    """Return the sorted distinct values of columns, and each element's index in these values."""
    values = pc.unique(pa.chunked_array([chunk for each in columns for chunk in each.chunks]))
    values = values.take(pc.sort_indices(values))
    return values, [index_in(each, values) for each in columns]


def index_in(column: pa.ChunkedArray | pa.Array, values: pa.Array) -> np.ndarray:
    """Return the index of each element in `values`; ``len(values)`` for unknown elements."""
    indices = pc.fill_null(pc.index_in(column, value_set=values), len(values))
    return np.asarray(indices).astype(np.int64)


def check_same_type(expected: pa.DataType, actual: pa.DataType, what: str, column: str) -> None:
    """Raise a UsageError unless an id column has the same type as in the other tables."""
    if expected != actual:
        raise UsageError(
            f"Column {column!r} of {what} has ids of type {actual}, the other tables have "
            f"{expected}; cast one of them",
            code="data-schema",
            column=column,
        )


def numbers(table: pa.Table, column: str, what: str) -> pa.ChunkedArray:
    """Return a column as float64, with NaN for nulls.

    Raises
    ------
    UsageError
        If the column is not numeric.
    """
    values = table[column]
    if not (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_decimal(values.type)
    ):
        raise UsageError(
            f"Column {column!r} of {what} should be numbers, got {values.type}",
            code="data-dtype",
            column=column,
        )
    return pc.fill_null(values.cast(pa.float64(), safe=False), math.nan)
