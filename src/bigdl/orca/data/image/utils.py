"""Column types of a ParquetDataset, and conversion of records to and from Parquet values.

========================  ==========================  ===========================
type of the field         a record has                the Parquet file has
========================  ==========================  ===========================
``FeatureType.IMAGE``     path or bytes of an image   the bytes of the image file
``FeatureType.NDARRAY``   a numpy array               bytes of a compressed npz
``FeatureType.SCALAR``    a number, str or bytes      the value
========================  ==========================  ===========================
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.file import read_bytes

if TYPE_CHECKING:
    import pyarrow as pa


class FeatureType(Enum):
    """Type of a column: image, array or scalar.

    Examples
    --------
    >>> from bigdl.orca.data.image.utils import FeatureType
    >>> [feature_type.name for feature_type in FeatureType]
    ['IMAGE', 'NDARRAY', 'SCALAR']
    """

    IMAGE = "IMAGE"
    NDARRAY = "NDARRAY"
    SCALAR = "SCALAR"


class DType(Enum):
    """Dtype of a scalar, or of the elements of an array.

    Examples
    --------
    >>> from bigdl.orca.data.image.utils import DType
    >>> [dtype.name for dtype in DType]
    ['STRING', 'BYTES', 'INT32', 'FLOAT32', 'UINT8']
    """

    STRING = "STRING"
    BYTES = "BYTES"
    INT32 = "INT32"
    FLOAT32 = "FLOAT32"
    UINT8 = "UINT8"


class SchemaField(NamedTuple):
    """Type, dtype and shape of one column.

    Attributes
    ----------
    feature_type : FeatureType
    dtype : DType
    shape : tuple of int
        Shape of an array, ``()`` for other types.

    Examples
    --------
    >>> from bigdl.orca.data.image.utils import DType, FeatureType, SchemaField
    >>> boxes = SchemaField(FeatureType.NDARRAY, DType.FLOAT32, (-1, 4))  # -1: any number of rows
    >>> boxes.shape
    (-1, 4)
    """

    feature_type: FeatureType
    dtype: DType
    shape: tuple = ()


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Yield lists of `size` items (the last one may be shorter), without reading ahead."""
    iterator = iter(items)
    while block := list(itertools.islice(iterator, size)):
        yield block


def check_schema(schema: object) -> dict[str, SchemaField]:
    """Return `schema` as a dict, or raise UsageError if it is invalid."""
    if not isinstance(schema, Mapping) or not schema:
        raise UsageError(
            f"schema must be a dict of SchemaField by column name, got {schema!r}",
            code="argument-type",
            argument="schema",
        )
    for name, field in schema.items():
        good = isinstance(field, SchemaField) and isinstance(field.dtype, DType)
        if not good or not isinstance(field.feature_type, FeatureType):
            raise UsageError(
                f"The column {name!r} of the schema must be a "
                f"SchemaField(FeatureType, DType, shape), got {field!r}",
                code="argument-type",
                argument="schema",
                column=name,
            )
    return dict(schema)


def encode_schema(schema: Mapping[str, SchemaField]) -> str:
    """Convert a schema to JSON."""
    return json.dumps(
        {
            name: {"feature_type": type_.name, "dtype": dtype.name, "shape": list(shape)}
            for name, (type_, dtype, shape) in schema.items()
        }
    )


def decode_schema(text: str | bytes) -> dict[str, SchemaField]:
    """Parse a schema that :func:`encode_schema` or BigDL 2.x wrote."""
    try:
        return {
            name: SchemaField(
                FeatureType[_member(field["feature_type"])],
                DType[_member(field["dtype"])],
                tuple(field["shape"]),
            )
            for name, field in json.loads(text).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"This is not the schema of a ParquetDataset: {text!r}", code="file-damaged"
        ) from error


def _member(value: str | Mapping[str, str]) -> str:
    """Return the name of an enum member, such as ``IMAGE``; also accept BigDL 2.x notation."""
    if isinstance(value, Mapping):
        value = value["__enum__"]
    return value.rpartition(".")[2]


def arrow_schema(schema: Mapping[str, SchemaField]) -> pa.Schema:
    """Return the Arrow schema of the Parquet columns."""
    import pyarrow as pa

    def type_of(field: SchemaField) -> pa.DataType:
        if field.feature_type is not FeatureType.SCALAR or field.dtype is DType.BYTES:
            return pa.binary()
        if field.dtype is DType.UINT8:
            return pa.int32()  # Spark has no unsigned types
        return pa.type_for_alias(field.dtype.name.lower())

    return pa.schema([(name, type_of(field)) for name, field in schema.items()])


def encode_record(schema: Mapping[str, SchemaField], record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one record to Parquet values."""
    if record.keys() != schema.keys():
        raise UsageError(
            f"A record has the columns {sorted(record)}, but the schema has {sorted(schema)}",
            code="data-schema",
            columns=list(record),
        )
    return {name: _encode(name, field, record[name]) for name, field in schema.items()}


def _encode(name: str, field: SchemaField, value: Any) -> bytes | str | float:
    if field.feature_type is FeatureType.IMAGE:
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        return read_bytes(value)
    if field.feature_type is FeatureType.NDARRAY:
        array = np.asarray(value)
        if array.dtype == object:
            raise UsageError(
                f"Column {name!r} contains an array of Python objects; use elements of one type "
                "and rows of equal length",
                code="data-dtype",
                column=name,
            )
        data = io.BytesIO()
        np.savez_compressed(data, array)
        return data.getvalue()
    return value.item() if isinstance(value, np.generic) else value


def decode_record(schema: Mapping[str, SchemaField], record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Parquet values to a record, with arrays as ndarrays and images as bytes."""
    return {
        name: _decode_array(value) if schema[name].feature_type is FeatureType.NDARRAY else value
        for name, value in record.items()
    }


def _decode_array(data: bytes) -> np.ndarray:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return arrays[arrays.files[0]]
