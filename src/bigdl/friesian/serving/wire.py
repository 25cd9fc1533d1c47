"""Messages and payload encodings of the gRPC services, from the descriptors in ``protos``.

The header ``bigdl-payload`` gives the encoding of string fields:

``arrow``
    Base64 of an Arrow stream with one record batch of named columns.
``json``
    Base64 of JSON. Features of an id are a list of values, in the order of ``colNames``. Inputs of
    a ranker are an object of columns. Its answer is a list, or an object of lists.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError, require
from bigdl.nano.serving.open_inference import check_json
from bigdl.nano.serving.protos import Message, ProtoPool
from bigdl.nano.serving.protos import MessageClass as MessageClass

if TYPE_CHECKING:
    import grpc

PAYLOAD = "bigdl-payload"
ARROW, JSON = "arrow", "json"

_JAVA = b"\xac\xed"
_pool = ProtoPool("bigdl.friesian.serving", "protos", "services.binpb")
message, methods = _pool.message, _pool.methods


def handler_of(
    service: str,
    functions: Mapping[str, Callable[[Message, Any], Message]],
    guard: Callable[..., Message],
) -> grpc.GenericRpcHandler:
    """Build the gRPC handler of a service.

    Parameters
    ----------
    service : str
    functions : dict of str to callable
        Methods of the service; each maps request and context to an answer.
    guard : callable
        Called with the name, the request class, the function, the bytes of a request and its
        context; returns the answer.
    """
    grpc = require("grpc", "serving")
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            partial(guard, f"{service}/{name}", request, functions[name]),
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for name, (request, _) in methods(service).items()
    }
    return grpc.method_handlers_generic_handler(service, handlers)


# -- payloads --------------------------------------------------------------------------------------


def encode_arrow(batch: pa.RecordBatch) -> str:
    """Encode a record batch as a Base64-encoded Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode("ascii")


def encode_json(value: object) -> str:
    """Encode a value as Base64-encoded JSON."""
    return base64.b64encode(json.dumps(value).encode()).decode("ascii")


def decode_payload(text: str) -> tuple[str, dict[str, Any]]:
    """Decode a payload; return its encoding and its columns as arrays.

    Raises
    ------
    UsageError
        If it is neither Arrow nor JSON, or its columns have different lengths.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("The payload is not Base64", code="request-invalid") from None
    if content.startswith(_JAVA):
        raise UsageError(
            "The payload is a serialized Java object, which is not supported; send Arrow or JSON",
            code="request-invalid",
        )
    if content[:1] == b"{":
        return JSON, _of_json(content)
    try:
        table = _table_of(content)
    except UsageError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"The payload is neither an Arrow stream nor JSON: {error}", code="request-invalid"
        ) from None
    return ARROW, {name: table[name].combine_chunks() for name in table.column_names}


def _table_of(content: bytes) -> pa.Table:
    """Read the table of an Arrow stream; raise if its buffers exceed the size of the stream.

    Compressed buffers are rejected before decompression. Types whose values may occupy no bytes are
    rejected too, because the stream could then declare any number of values.
    """
    declared = 0
    for message in pa.ipc.MessageReader.open_stream(content):
        if message.type in ("record batch", "dictionary"):
            is_compressed, size = _buffers_of(message.metadata)
            declared += size
            if is_compressed:
                raise UsageError(
                    "The payload has compressed buffers; write the Arrow stream uncompressed",
                    code="request-invalid",
                )
            if declared > len(content):  # PyArrow copies each buffer of the other byte order
                raise _too_many_bytes(declared)
        if message.type == "dictionary":
            raise UsageError(
                "The payload has Arrow dictionaries; write plain values",
                code="request-invalid",
            )
    stream = pa.ipc.open_stream(content)
    if len(stream.schema) > _MOST_COLUMNS:
        raise UsageError(
            f"The payload has {len(stream.schema)} columns, but may have at most {_MOST_COLUMNS}",
            code="request-limit",
        )
    for each in stream.schema:
        if not _has_bytes(each.type):
            raise UsageError(
                f"The column {each.name[:60]!r} of the payload is of type {str(each.type)[:60]}, "
                "which is not supported; send numbers, strings, or lists of them",
                code="request-invalid",
            )
    table = stream.read_all()
    table.validate(full=True)
    if table.nbytes > len(content) + 64 * table.num_columns:
        raise _too_many_bytes(table.nbytes)
    return table


def _too_many_bytes(size: int) -> UsageError:
    return UsageError(
        f"The columns of the payload have {size} bytes, more than the payload itself; write each "
        "buffer once",
        code="request-invalid",
    )


_MOST_COLUMNS = 4096


def _has_bytes(dtype: pa.DataType) -> bool:
    """Return True if each value of a type occupies at least one bit of the stream."""
    types = pa.types
    if types.is_list(dtype) or types.is_large_list(dtype):
        return _has_bytes(dtype.value_type)
    if types.is_fixed_size_list(dtype):
        return dtype.list_size > 0 and _has_bytes(dtype.value_type)
    if types.is_struct(dtype):
        return dtype.num_fields > 0 and all(_has_bytes(each.type) for each in dtype)
    if types.is_map(dtype):
        return _has_bytes(dtype.key_type) and _has_bytes(dtype.item_type)
    if types.is_fixed_size_binary(dtype):
        return dtype.byte_width > 0
    return (
        types.is_primitive(dtype)
        or types.is_decimal(dtype)
        or any(
            test(dtype)
            for test in (
                *(types.is_string, types.is_large_string, types.is_binary, types.is_large_binary),
            )
        )
    )


def has_numbers(column: pa.Array) -> bool:
    """Return True if a column holds numbers, booleans, or lists of numbers or booleans."""
    dtype = column.type
    while (
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or (pa.types.is_fixed_size_list(dtype))
    ):
        dtype = dtype.value_type
    return pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)


# Field indices in the flatbuffer tables of an Arrow message: type and header of a message, batch of
# a dictionary, buffers and compression of a batch.
_TYPE, _HEADER, _DATA, _BUFFERS, _COMPRESSION = 1, 2, 1, 2, 3
_DICTIONARY = 2  # header type


def _buffers_of(metadata: pa.Buffer) -> tuple[bool, int]:
    """Return whether the batch of an Arrow message is compressed, and its declared size in bytes.

    PyArrow does not expose this before it decompresses the buffers.
    """
    content = metadata.to_pybytes()

    def number(offset: int, code: str = "<i") -> int:
        return struct.unpack_from(code, content, offset)[0]

    def field(table: int, which: int) -> int:
        """Return the byte offset of a FlatBuffers table field, or 0 if the field is absent."""
        known = table - number(table)
        entry = 4 + 2 * which
        if entry >= number(known, "<H"):
            return 0
        offset = number(known + entry, "<H")
        return table + offset if offset else 0

    def child(table: int, which: int) -> int:
        position = field(table, which)
        return position + number(position) if position else 0

    try:
        message = number(0)
        batch = child(message, _HEADER)
        header_type = field(message, _TYPE)
        if batch and header_type and number(header_type, "<B") == _DICTIONARY:
            batch = child(batch, _DATA)
        listed = child(batch, _BUFFERS) if batch else 0
        if not listed:
            return bool(batch and field(batch, _COMPRESSION)), 0
        pairs = np.frombuffer(content, "<i8", 2 * number(listed, "<I"), listed + 4)
        size = sum(map(abs, pairs[1::2].tolist()))  # pairs of offset and size
        return bool(field(batch, _COMPRESSION)), size
    except (struct.error, ValueError):
        raise ValueError("its metadata is damaged") from None


def _of_json(content: bytes) -> dict[str, Any]:
    check_json(content, len(content))
    try:
        columns = json.loads(content)
        if len(columns) > _MOST_COLUMNS:
            raise ValueError(
                f"there are {len(columns)} columns, but at most {_MOST_COLUMNS} are allowed"
            )
        if not all(isinstance(each, list) for each in columns.values()):
            raise ValueError("each column should be a list")
        for each in columns.values():
            _check_nesting(each)
        arrays = {name: pa.array(each) for name, each in columns.items()}
        if len({len(each) for each in arrays.values()}) > 1:
            raise ValueError("the columns have different lengths")
    except (ValueError, RecursionError, OverflowError, pa.ArrowException) as error:
        raise UsageError(
            f"The payload is not a JSON object of columns: {error}", code="request-invalid"
        ) from None
    return arrays


def _check_nesting(column: list[Any]) -> None:
    """Raise a ValueError for objects and deeply nested lists.

    Arrow would create a column for each key and each level. Objects with different keys would take
    as many values as there are keys times objects.
    """
    values: Any = column
    for _ in range(_MOST_LISTS):
        types = set(map(type, values))
        if dict in types:
            raise ValueError("its values should be numbers, strings, or lists of them, not objects")
        if list not in types:
            return
        values = list(chain.from_iterable(each for each in values if type(each) is list))
    raise ValueError(f"its lists should be at most {_MOST_LISTS - 1} deep")


_MOST_LISTS = 9  # maximum nesting depth, including the column


def batch_of_arrays(columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Build a record batch from NumPy or Arrow arrays; matrices become fixed-size lists."""
    arrays = []
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column = np.ascontiguousarray(column)
            if column.ndim == 2:
                items = pa.array(column.reshape(-1))
                column = pa.FixedSizeListArray.from_arrays(items, column.shape[1])
            else:
                column = pa.array(column)
        arrays.append(column)
    return pa.record_batch(arrays, names=list(columns))
