"""Mapping between Arrow types, Spark types and column specs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.cluster.versions import arrow_type
from bigdl.runtime.shards.columns import ColumnSpec, common_length
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import is_text

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType
else:
    pa = LazyModule("pyarrow", "orca")

_VECTOR = ["type", "size", "indices", "values"]  # fields of Spark ML vectors in Parquet files


def spark_readable(type_: pa.DataType, nested: bool = False) -> pa.DataType:
    """Return the Arrow type to which a pandas Arrow type is cast so that Spark can read it."""
    from pyspark.sql.pandas.types import from_arrow_type

    types = pa.types
    if types.is_dictionary(type_):
        return spark_readable(type_.value_type, nested)
    if types.is_map(type_):
        return pa.map_(spark_readable(type_.key_type, True), spark_readable(type_.item_type, True))
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return pa.list_(spark_readable(type_.value_type, True))
    if types.is_struct(type_):
        return pa.struct([(field.name, spark_readable(field.type, True)) for field in type_])
    if types.is_timestamp(type_):
        return pa.timestamp("us", "UTC" if type_.tz or not nested else None)
    if types.is_time(type_):
        return pa.time64("us")
    wider = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
        pa.float16(): pa.float32(),
        pa.null(): pa.string(),
        pa.string_view(): pa.string(),
        pa.binary_view(): pa.binary(),
        pa.large_string(): pa.string(),
        pa.large_binary(): pa.binary(),
        pa.date64(): pa.date32(),
    }
    return arrow_type(from_arrow_type(wider.get(type_, type_)))


def is_arrow_convertible(type_: DataType) -> bool:
    """Return True if Arrow can transfer values of a Spark type to Python and back.

    Not supported are void within arrays and maps, year-month intervals, variants and user-defined
    types.
    """
    from pyspark.ml.linalg import MatrixUDT, VectorUDT
    from pyspark.sql import types as T

    if isinstance(type_, T.ArrayType):
        return is_arrow_convertible(type_.elementType) and not isinstance(
            type_.elementType, T.NullType
        )
    if isinstance(type_, T.MapType):
        inner = type_.keyType, type_.valueType
        return all(
            is_arrow_convertible(each) and not isinstance(each, T.NullType) for each in inner
        )
    if isinstance(type_, T.StructType):
        return all(is_arrow_convertible(each.dataType) for each in type_.fields)
    convertible = (
        *(T.NumericType, T.StringType, T.BinaryType, T.BooleanType, T.DateType, T.NullType),
        *(T.TimestampType, T.TimestampNTZType, T.DayTimeIntervalType, VectorUDT, MatrixUDT),
    )
    return isinstance(type_, convertible)


def spark_type(name: str, arrow_type: pa.DataType) -> DataType:
    """Return the Spark type that a Parquet column has in a DataFrame."""
    from pyspark.errors import PySparkTypeError
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.pandas.types import from_arrow_type

    if pa.types.is_struct(arrow_type) and [field.name for field in arrow_type] == _VECTOR:
        return VectorUDT()
    try:
        return from_arrow_type(spark_readable(arrow_type))
    except PySparkTypeError:
        raise UsageError(
            f"Column '{name}' has type {arrow_type}, which cannot become a tensor",
            code="data-dtype",
            column=name,
        ) from None


_WIDER = {"double": "float64", "float": "float32", "bigint": "int64"}


def arrow_type_of(spec: ColumnSpec, source: pa.DataType) -> pa.DataType:
    """Return the Arrow type to which a Parquet column is cast to match its column spec.

    If the spec's dtype differs from its cast type (floats for a model with integer inputs), the
    cast type is returned: the decoder then checks for integer values.
    """
    base = spec.cast.rstrip(">").rpartition("<")[2].rpartition(",")[2]
    type_ = pa.string() if is_text(spec.dtype) else pa.from_numpy_dtype(spec.dtype)
    if base in _WIDER and not is_text(spec.dtype):
        type_ = pa.from_numpy_dtype(_WIDER[base])
    for _ in range(spec.ndim):
        type_ = pa.list_(type_)
    return pa.map_(source.key_type, type_) if spec.kind == "map" else type_


def cast_to_spec(spec: ColumnSpec, column: pa.Array) -> pa.Array:
    """Cast a Parquet column, or an argument of an SQL function, to the type of its column spec.

    Raises
    ------
    SourceError
        If a value cannot be converted.
    """
    if spec.cast == "vector":
        return dense_vectors(spec, column)
    target_type = arrow_type_of(spec, column.type)
    try:
        cast = column if column.type == target_type else column.cast(target_type, safe=False)
        return cast.fill_null(float("nan")) if spec.missing else cast
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"Column '{spec.name}' cannot be converted: {error}",
            code="data-dtype",
            column=spec.name,
        ) from None


def dense_vectors(spec: ColumnSpec, column):
    """Convert dense and sparse Spark ML vectors to lists of values."""
    if column.null_count:  # return a list column with the same nulls, which the null check counts
        empty = [[0.0] if each.is_valid else None for each in column]
        return pa.array(empty, pa.list_(pa.float64()))
    is_dense = column.field("type").to_numpy(zero_copy_only=False)
    values = column.field("values")
    if (is_dense == 1).all():
        return values
    sizes = column.field("size").fill_null(-1).to_numpy(zero_copy_only=False)
    lengths = np.where(is_dense == 1, np.diff(values.offsets.to_numpy()), sizes)
    width = common_length(spec, lengths, "arrays")
    dense = np.zeros((len(column), width))
    counts = np.diff(values.offsets.to_numpy())
    rows = np.repeat(np.arange(len(column)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    indices = np.arange(len(rows)) - starts  # positions in dense vectors
    sparse = is_dense[rows] == 0
    indices[sparse] = column.field("indices").flatten().to_numpy(zero_copy_only=False)
    dense[rows, indices] = values.flatten().to_numpy(zero_copy_only=False)
    offsets = pa.array(np.arange(len(column) + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(dense.reshape(-1)))
