"""Arrow's types in terms of the conversion rules, which are written for Spark's."""

from __future__ import annotations

import re

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.columns import ColumnSpec
from bigdl.runtime.shards.feed import SourceError

__all__ = ["arrow_type_of", "densified", "spark_type"]

_VECTOR = ["type", "size", "indices", "values"]  # fields of Spark ML's vectors in Parquet


def spark_type(name: str, arrow_type):
    """The Spark type that a column of Parquet would have in a DataFrame."""
    import pyarrow as pa
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T

    kinds = pa.types

    def of(t):
        if kinds.is_dictionary(t):
            return of(t.value_type)
        if kinds.is_list(t) or kinds.is_large_list(t) or kinds.is_fixed_size_list(t):
            return T.ArrayType(of(t.value_type))
        if kinds.is_map(t):
            return T.MapType(of(t.key_type), of(t.item_type))
        if kinds.is_struct(t) and [t.field(i).name for i in range(t.num_fields)] == _VECTOR:
            return VectorUDT()
        if kinds.is_decimal(t):
            return T.DecimalType(min(t.precision, 38), t.scale)
        for is_of_kind, spark in (
            (kinds.is_boolean, T.BooleanType()),
            (
                lambda t: t in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32()),
                T.IntegerType(),
            ),
            (lambda t: t in (pa.int64(), pa.uint32()), T.LongType()),
            (lambda t: t in (pa.float16(), pa.float32()), T.FloatType()),
            (kinds.is_float64, T.DoubleType()),
            (lambda t: kinds.is_string(t) or kinds.is_large_string(t), T.StringType()),
            (kinds.is_timestamp, T.TimestampType()),
            (kinds.is_date, T.DateType()),
        ):
            if is_of_kind(t):
                return spark
        raise UsageError(f"Column '{name}' has type {arrow_type}, which cannot become a tensor")

    return of(arrow_type)


_BASES = {"boolean": "bool_", "int": "int32", "bigint": "int64", "float": "float32"}
_BASES |= {"double": "float64", "string": "string"}


def arrow_type_of(spec: ColumnSpec):
    """The Arrow type of a column in its spec's Spark type."""
    import pyarrow as pa

    def of(text):
        if text.startswith("array<"):
            return pa.list_(of(text[len("array<") : -1]))
        if found := re.fullmatch(r"map<(\w+),(.+)>", text):
            return pa.map_(of(found[1]), of(found[2]))
        return getattr(pa, _BASES[text])()

    return of(spec.cast)


def densified(spec: ColumnSpec, column):
    """Spark ML's vectors, dense and sparse, as lists of values."""
    import pyarrow as pa

    if column.null_count:
        return _null_list(column)
    kinds = column.field("type").to_numpy(zero_copy_only=False)
    values = column.field("values")
    if (kinds == 1).all():
        return values
    sizes = column.field("size").fill_null(-1).to_numpy(zero_copy_only=False)
    lengths = np.where(kinds == 1, np.diff(values.offsets.to_numpy()), sizes)
    if (lengths != lengths[0]).any():
        other = int(lengths[lengths != lengths[0]][0])
        raise SourceError(
            f"Column '{spec.name}' holds arrays of different lengths "
            f"({int(lengths[0])} and {other}); pad or cut them to one length first"
        )
    width = int(lengths[0])
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


def _null_list(column):
    """A list column with the same nulls: what refuses nulls counts them."""
    import pyarrow as pa

    return pa.array([[0.0] if each.is_valid else None for each in column], pa.list_(pa.float64()))
