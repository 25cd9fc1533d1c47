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
Scalar columns of one dtype travel as one array per row and stay together as the columns of one
matrix: Spark writes an Arrow list of k values about twice as fast as k Arrow columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.base import SourceError

__all__ = ["ColumnSpec", "Leaf", "column_spec", "decode", "decode_batch", "float_dtype", "project"]

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
    """One array of a shard: what it holds, dtype and row shape.

    Attributes
    ----------
    column : str or tuple of str
        The column, or the scalar columns that are the columns of this matrix.
    key : str or None
        Key of a map column.
    dtype : str
    shape : tuple of int
        Without the rows.
    """

    column: str | tuple[str, ...]
    key: str | None
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, doc: list | dict) -> Leaf:
        """From what ``json`` made of a leaf, as a dict or a list of its fields."""
        column, key, dtype, shape = doc.values() if isinstance(doc, dict) else doc
        column = tuple(column) if isinstance(column, list) else column
        return cls(column, key, dtype, tuple(shape))


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
    """Select and convert the columns of `specs` in the JVM, for :func:`decode_batch`."""
    from pyspark.sql import functions as F

    out = []
    for i, members in enumerate(_groups(specs)):
        columns = [convert(spec) for spec in members]
        out.append((F.array(*columns) if len(columns) > 1 else columns[0]).alias(f"c{i}"))
    return frame.select(*out)


def convert(spec: ColumnSpec):
    """The Spark column of a spec, converted in the JVM."""
    from pyspark.sql import functions as F

    column = F.col("`" + spec.name.replace("`", "``") + "`")
    if spec.cast == "vector":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column, spec.dtype)
    return column.cast(spec.cast) if spec.cast else column


def _groups(specs) -> list[list[ColumnSpec]]:
    """Scalar columns of one dtype together, every other column alone."""
    groups: dict = {}
    for i, spec in enumerate(specs):
        scalar = spec.kind == "plain" and spec.ndim == 0
        groups.setdefault(spec.dtype if scalar else i, []).append(spec)
    return list(groups.values())


def decode_batch(specs, batch) -> tuple[list[Leaf], list[np.ndarray]]:
    """The arrays of one record batch of :func:`project`, C-contiguous, and what they are."""
    leaves, arrays = [], []
    for members, column in zip(_groups(specs), batch.columns, strict=True):
        if len(members) > 1:
            names = tuple(spec.name for spec in members)
            array = _decode_group(members, column)
            leaves.append(Leaf(names, None, array.dtype.name, array.shape[1:]))
            arrays.append(array)
            continue
        for key, array in decode(members[0], column):
            leaves.append(Leaf(members[0].name, key, array.dtype.name, array.shape[1:]))
            arrays.append(np.ascontiguousarray(array))
    return leaves, arrays


def _decode_group(members, array):
    values = array.flatten()
    if values.null_count:
        missing = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) % len(members)
        first = members[int(missing[0])]
        raise _nulls(first, int((missing == missing[0]).sum()))
    values = values.to_numpy(zero_copy_only=False)
    return values.reshape(len(array), len(members))


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
        raise _nulls(spec, array.null_count)


def _nulls(spec, count):
    return SourceError(
        f"Column '{spec.name}' holds nulls ({count} in the first batch that has any); fill or "
        f'drop them first, e.g. df.dropna(subset=["{spec.name}"])'
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
