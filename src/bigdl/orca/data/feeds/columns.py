"""From a Spark type to a tensor's dtype and shape: the conversion rules, in one place.

========================  =====================================================
Spark                     in the model
========================  =====================================================
boolean                   bool
tinyint, smallint, int    int32
bigint                    int64
float, double, decimal    float32, or what ``config["dtype"]`` says
Vector (dense, sparse)    dense, floating, one more dimension
array<...>                one more dimension; equal lengths within a column
map<key, ...>             a dict of the value's arrays; equal keys in every row
========================  =====================================================

Vectors become arrays and doubles become floats **in the JVM**, so that half of the bytes are moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.base import SourceError

__all__ = ["ColumnSpec", "Leaf", "column_spec", "decode", "float_dtype"]

_FLOATS = {"float32": "float", "float64": "double"}


def float_dtype(config: dict | None) -> str:
    """Name of the floating dtype that ``config["dtype"]`` asks for (default ``"float32"``)."""
    given = (config or {}).get("dtype", "float32")
    name = str(given).removeprefix("torch.")
    if isinstance(given, type | np.dtype):
        name = np.dtype(given).name
    if name not in _FLOATS:
        raise UsageError(f'config["dtype"] must be "float32" or "float64", got {given!r}')
    return name


@dataclass(frozen=True)
class ColumnSpec:
    """How one column of a DataFrame reaches the model.

    Attributes
    ----------
    name : str
        Name of the column.
    kind : str
        ``"plain"`` or ``"map"``.
    dtype : str
        numpy name of the innermost values.
    ndim : int
        Dimensions besides the rows: 0 for scalars, 1 for vectors and arrays, ...
    cast : str or None
        Spark type to cast to in the JVM, ``"vector"`` for ML vectors, None to leave it.
    """

    name: str
    kind: str
    dtype: str
    ndim: int
    cast: str | None


@dataclass(frozen=True)
class Leaf:
    """Name, dtype and row shape of one array that a column was decoded to."""

    column: str
    key: str | None
    dtype: str
    shape: tuple[int, ...]


def column_spec(name: str, spark_type, floats: str) -> ColumnSpec:
    """The conversion of one column, or a UsageError that names it."""
    from pyspark.sql import types as T

    def inner(t, depth):
        while isinstance(t, T.ArrayType):
            t, depth = t.elementType, depth + 1
        if isinstance(t, T.BooleanType):
            return "bool", "boolean", depth
        if isinstance(t, (T.ByteType, T.ShortType, T.IntegerType)):
            return "int32", "int", depth
        if isinstance(t, T.LongType):
            return "int64", "bigint", depth
        if isinstance(t, (T.FloatType, T.DoubleType, T.DecimalType)):
            return floats, _FLOATS[floats], depth
        return None

    if type(spark_type).__name__ == "VectorUDT":
        return ColumnSpec(name, "plain", floats, 1, "vector")
    if isinstance(spark_type, T.MapType):
        found = inner(spark_type.valueType, 0)
        if found and isinstance(spark_type.keyType, (T.StringType, T.IntegerType, T.LongType)):
            dtype, base, depth = found
            value = "array<" * depth + base + ">" * depth
            key = spark_type.keyType.simpleString()
            return ColumnSpec(name, "map", dtype, depth, f"map<{key},{value}>")
    else:
        found = inner(spark_type, 0)
        if found:
            dtype, base, depth = found
            return ColumnSpec(name, "plain", dtype, depth, "array<" * depth + base + ">" * depth)
    advice = "encode it as numbers first"
    if isinstance(spark_type, T.StringType):
        advice = "encode it as numbers first, e.g. with StringIndexer"
    elif isinstance(spark_type, (T.TimestampType, T.DateType, T.TimestampNTZType)):
        advice = f'cast it to a number first, e.g. unix_timestamp("{name}")'
    raise UsageError(
        f"Column '{name}' has type {spark_type.simpleString()}, which cannot become a tensor; "
        f"{advice}"
    )


def project(frame, specs):
    """Select and convert the columns of `specs` in the JVM, named ``c0``, ``c1``, ..."""
    from pyspark.sql import functions as F

    out = []
    for i, spec in enumerate(specs):
        column = F.col("`" + spec.name.replace("`", "``") + "`")
        if spec.cast == "vector":
            from pyspark.ml.functions import vector_to_array

            column = vector_to_array(column, spec.dtype)
        elif spec.cast:
            column = column.cast(spec.cast)
        out.append(column.alias(f"c{i}"))
    return frame.select(*out)


def decode(spec: ColumnSpec, array) -> list[tuple[str | None, np.ndarray]]:
    """One Arrow column of one record batch as numpy arrays of shape ``(rows, ...)``.

    Returns
    -------
    list of (key, ndarray)
        One entry with key None, or one entry per key of a map column.

    Raises
    ------
    SourceError
        For nulls and for arrays of unequal lengths.
    """
    _no_nulls(spec, array)
    if spec.kind == "map":
        return _decode_map(spec, array)
    return [(None, _decode_values(spec, array, spec.ndim))]


def _no_nulls(spec, array):
    if array.null_count:
        raise SourceError(
            f"Column '{spec.name}' holds nulls ({array.null_count} in the first batch that has "
            f'any); fill or drop them first, e.g. df.dropna(subset=["{spec.name}"])'
        )


def _decode_values(spec, array, ndim):
    rows, shape = len(array), []
    for _ in range(ndim):
        _no_nulls(spec, array)
        offsets = array.offsets.to_numpy()
        lengths = np.diff(offsets)
        length = int(lengths[0]) if len(lengths) else 0
        if len(lengths) and (lengths != length).any():
            other = int(lengths[lengths != length][0])
            raise SourceError(
                f"Column '{spec.name}' holds arrays of different lengths ({length} and {other}); "
                "pad or cut them to one length first"
            )
        if rows and not length:
            raise SourceError(f"Column '{spec.name}' holds empty arrays; leave it out")
        shape.append(length)
        array = array.flatten()
    _no_nulls(spec, array)
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype != np.dtype(spec.dtype):
        values = values.astype(spec.dtype)
    return values.reshape(rows, *shape)


def _decode_map(spec, array):
    rows = len(array)
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    if rows == 0:
        return []
    width = int(lengths[0])
    keys = array.keys[int(offsets[0]) : int(offsets[-1])].to_numpy(zero_copy_only=False)
    items = array.items[int(offsets[0]) : int(offsets[-1])]
    first = list(keys[:width])
    order = np.argsort(np.asarray(first, dtype=object)) if width else []
    same = bool((lengths == width).all())
    if same:
        grid = np.asarray(keys, dtype=object).reshape(rows, width)
        same = bool((grid == np.asarray(first, dtype=object)).all())
    if not same:
        raise SourceError(
            f"Column '{spec.name}' is a map whose keys differ between rows; give every row the "
            "same keys in the same order"
        )
    values = _decode_values(spec, items, spec.ndim)
    values = values.reshape(rows, width, *values.shape[1:])
    return [(str(first[k]), np.ascontiguousarray(values[:, k])) for k in order]
