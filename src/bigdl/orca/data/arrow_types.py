"""Arrow's types in terms of Spark's, and of the conversion rules, which are written for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

_VECTOR = ["type", "size", "indices", "values"]  # fields of Spark ML's vectors in Parquet


def spark_readable(type_: pa.DataType, nested: bool = False) -> pa.DataType:
    """Return the Arrow type in which Spark takes the values of an Arrow type of pandas."""
    from pyspark.sql.pandas.types import from_arrow_type

    kinds = pa.types
    if kinds.is_dictionary(type_):
        return spark_readable(type_.value_type, nested)
    if kinds.is_map(type_):
        return pa.map_(spark_readable(type_.key_type, True), spark_readable(type_.item_type, True))
    if kinds.is_list(type_) or kinds.is_large_list(type_) or kinds.is_fixed_size_list(type_):
        return pa.list_(spark_readable(type_.value_type, True))
    if kinds.is_struct(type_):
        return pa.struct([(field.name, spark_readable(field.type, True)) for field in type_])
    if kinds.is_timestamp(type_):
        return pa.timestamp("us", "UTC" if type_.tz or not nested else None)
    if kinds.is_time(type_):
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


def is_carried(kind: Any) -> bool:
    """Return True if Arrow carries values of a Spark type to Python and back.

    It does not carry void within arrays and maps, intervals of months, variants, and types of
    users.
    """
    from pyspark.ml.linalg import MatrixUDT, VectorUDT
    from pyspark.sql import types as T

    if isinstance(kind, T.ArrayType):
        return is_carried(kind.elementType) and not isinstance(kind.elementType, T.NullType)
    if isinstance(kind, T.MapType):
        inner = kind.keyType, kind.valueType
        return all(is_carried(each) and not isinstance(each, T.NullType) for each in inner)
    if isinstance(kind, T.StructType):
        return all(is_carried(each.dataType) for each in kind.fields)
    carried = (
        *(T.NumericType, T.StringType, T.BinaryType, T.BooleanType, T.DateType, T.NullType),
        *(T.TimestampType, T.TimestampNTZType, T.DayTimeIntervalType, VectorUDT, MatrixUDT),
    )
    return isinstance(kind, carried)


def spark_type(name: str, arrow_type: pa.DataType) -> DataType:
    """Return the Spark type that a column of Parquet would have in a DataFrame."""
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
    """The Arrow type of a column of Parquet in its spec's type.

    Where the spec has another dtype than it casts to (floats for a model of whole numbers), it is
    the latter: what decodes it tells whole numbers from others.
    """
    base = spec.cast.rstrip(">").rpartition("<")[2].rpartition(",")[2]
    type_ = pa.string() if is_text(spec.dtype) else pa.from_numpy_dtype(spec.dtype)
    if base in _WIDER and not is_text(spec.dtype):
        type_ = pa.from_numpy_dtype(_WIDER[base])
    for _ in range(spec.ndim):
        type_ = pa.list_(type_)
    return pa.map_(source.key_type, type_) if spec.kind == "map" else type_


def in_type_of(spec: ColumnSpec, column: pa.Array) -> pa.Array:
    """A column of Parquet, or of a function of SQL, in its spec's type.

    Raises
    ------
    SourceError
        If a value cannot be converted.
    """
    if spec.cast == "vector":
        return densified(spec, column)
    wanted = arrow_type_of(spec, column.type)
    try:
        cast = column if column.type == wanted else column.cast(wanted, safe=False)
        return cast.fill_null(float("nan")) if spec.missing else cast
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"Column '{spec.name}' cannot be converted: {error}",
            code="data-dtype",
            column=spec.name,
        ) from None


def densified(spec: ColumnSpec, column):
    """Spark ML's vectors, dense and sparse, as lists of values."""
    if column.null_count:  # a list column with the same nulls: what refuses nulls counts them
        empty = [[0.0] if each.is_valid else None for each in column]
        return pa.array(empty, pa.list_(pa.float64()))
    kinds = column.field("type").to_numpy(zero_copy_only=False)
    values = column.field("values")
    if (kinds == 1).all():
        return values
    sizes = column.field("size").fill_null(-1).to_numpy(zero_copy_only=False)
    lengths = np.where(kinds == 1, np.diff(values.offsets.to_numpy()), sizes)
    width = common_length(spec, lengths, "arrays")
    dense = np.zeros((len(column), width))
    counts = np.diff(values.offsets.to_numpy())
    rows = np.repeat(np.arange(len(column)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    places = np.arange(len(rows)) - starts  # of a dense vector's values
    sparse = kinds[rows] == 0
    places[sparse] = column.field("indices").flatten().to_numpy(zero_copy_only=False)
    dense[rows, places] = values.flatten().to_numpy(zero_copy_only=False)
    offsets = pa.array(np.arange(len(column) + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(dense.reshape(-1)))
