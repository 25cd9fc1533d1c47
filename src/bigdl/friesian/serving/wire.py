"""Messages and methods of the gRPC services, made of the descriptors in ``protos``.

What the fields of type string carry is said by the header
``bigdl-payload``:

``arrow``
    Base64 of a stream of Arrow with one record batch: the columns by their names.
``json``
    Base64 of JSON: of the features of one id a list of values, in the order of ``colNames``; of the
    inputs of a ranker an object of columns; of its answer a list, or an object of lists.
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
    """Return what a server of gRPC takes for a service.

    Parameters
    ----------
    service : str
    functions : dict of str to callable
        Each gets request and context and returns the answer.
    guard : callable
        Called with the name, the class of the request, the function, the bytes of a request and
        its context; returns the answer.
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


# -- columns as text -------------------------------------------------------------------------------


def encoded(batch: pa.RecordBatch) -> str:
    """Return a batch as Base64 of a stream of Arrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode("ascii")


def encoded_json(value: object) -> str:
    """Return a value as Base64 of JSON."""
    return base64.b64encode(json.dumps(value).encode()).decode("ascii")


def decoded(text: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of a payload, and its columns as arrays.

    Raises
    ------
    UsageError
        If it is neither Arrow nor JSON, or not of columns of one length.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("The payload is not Base64", code="request-invalid") from None
    if content.startswith(_JAVA):
        raise UsageError(
            "The payload is a serialized object of Java, which is not read; send Arrow or JSON",
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
            f"The payload is neither a stream of Arrow nor JSON: {error}", code="request-invalid"
        ) from None
    return ARROW, {name: table[name].combine_chunks() for name in table.column_names}


def _table_of(content: bytes) -> pa.Table:
    """Return the table of a stream of Arrow, whose columns have no more bytes than the stream.

    Compressed buffers are refused before they are unpacked, and so are types whose values may
    need no bytes of their own: their number would be whatever the stream says.
    """
    declared = 0
    for message in pa.ipc.MessageReader.open_stream(content):
        if message.type in ("record batch", "dictionary"):
            is_compressed, size = _buffers_of(message.metadata)
            declared += size
            if is_compressed:
                raise UsageError(
                    "The payload has compressed buffers of Arrow; write the stream without "
                    "compression",
                    code="request-invalid",
                )
            if declared > len(content):  # PyArrow copies buffers of the other byte order, each one
                raise _too_many_bytes(declared)
        if message.type == "dictionary":
            raise UsageError(
                "The payload has dictionaries of Arrow; write the values themselves",
                code="request-invalid",
            )
    stream = pa.ipc.open_stream(content)
    if len(stream.schema) > _MOST_COLUMNS:
        raise UsageError(
            f"The payload has {len(stream.schema)} columns, but may have {_MOST_COLUMNS}",
            code="request-limit",
        )
    for each in stream.schema:
        if not _has_bytes(each.type):
            raise UsageError(
                f"The column {each.name[:60]!r} of the payload is of type {str(each.type)[:60]}, "
                "which is not taken; send numbers, texts, or lists of them",
                code="request-invalid",
            )
    table = stream.read_all()
    table.validate(full=True)
    if table.nbytes > len(content) + 64 * table.num_columns:
        raise _too_many_bytes(table.nbytes)
    return table


def _too_many_bytes(size: int) -> UsageError:
    return UsageError(
        f"The columns of the payload have {size} bytes, more than the payload itself has; write "
        "each buffer once",
        code="request-invalid",
    )


_MOST_COLUMNS = 4096


def _has_bytes(kind: pa.DataType) -> bool:
    """Return True if each value of a type takes at least a bit of the stream."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    if types.is_fixed_size_list(kind):
        return kind.list_size > 0 and _has_bytes(kind.value_type)
    if types.is_struct(kind):
        return kind.num_fields > 0 and all(_has_bytes(each.type) for each in kind)
    if types.is_map(kind):
        return _has_bytes(kind.key_type) and _has_bytes(kind.item_type)
    if types.is_fixed_size_binary(kind):
        return kind.byte_width > 0
    return (
        types.is_primitive(kind)
        or types.is_decimal(kind)
        or any(
            test(kind)
            for test in (
                *(types.is_string, types.is_large_string, types.is_binary, types.is_large_binary),
            )
        )
    )


def has_numbers(column: pa.Array) -> bool:
    """Return True if a column has numbers or truth values, or lists of them."""
    kind = column.type
    while (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or (pa.types.is_fixed_size_list(kind))
    ):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


# Of the tables in a message of Arrow, from 0: the header of a message, the batch of a dictionary,
# and the buffers and the compression of a batch.
_TYPE, _HEADER, _DATA, _BUFFERS, _COMPRESSION = 1, 2, 1, 2, 3
_DICTIONARY = 2  # the type of a header


def _buffers_of(metadata: pa.Buffer) -> tuple[bool, int]:
    """Return if a batch, as a message of Arrow describes it, is compressed, and its bytes.

    PyArrow does not say it before it has unpacked the buffers.
    """
    content = metadata.to_pybytes()

    def number(place: int, code: str = "<i") -> int:
        return struct.unpack_from(code, content, place)[0]

    def field(table: int, which: int) -> int:
        """Return where a field of a table is; 0 if it is left out."""
        known = table - number(table)
        entry = 4 + 2 * which
        if entry >= number(known, "<H"):
            return 0
        offset = number(known + entry, "<H")
        return table + offset if offset else 0

    def child(table: int, which: int) -> int:
        place = field(table, which)
        return place + number(place) if place else 0

    try:
        message = number(0)
        batch = child(message, _HEADER)
        kind = field(message, _TYPE)
        if batch and kind and number(kind, "<B") == _DICTIONARY:
            batch = child(batch, _DATA)
        listed = child(batch, _BUFFERS) if batch else 0
        if not listed:
            return bool(batch and field(batch, _COMPRESSION)), 0
        pairs = np.frombuffer(content, "<i8", 2 * number(listed, "<I"), listed + 4)
        size = sum(map(abs, pairs[1::2].tolist()))  # of offsets and sizes
        return bool(field(batch, _COMPRESSION)), size
    except (struct.error, ValueError):
        raise ValueError("its metadata are damaged") from None


def _of_json(content: bytes) -> dict[str, Any]:
    check_json(content, len(content))
    try:
        columns = json.loads(content)
        if len(columns) > _MOST_COLUMNS:
            raise ValueError(f"there are {len(columns)} columns, but may be {_MOST_COLUMNS}")
        if not all(isinstance(each, list) for each in columns.values()):
            raise ValueError("each column should be a list")
        for each in columns.values():
            _check_nesting(each)
        arrays = {name: pa.array(each) for name, each in columns.items()}
        if len({len(each) for each in arrays.values()}) > 1:
            raise ValueError("the columns have different lengths")
    except (ValueError, RecursionError, OverflowError, pa.ArrowException) as error:
        raise UsageError(
            f"The payload is no JSON of columns: {error}", code="request-invalid"
        ) from None
    return arrays


def _check_nesting(column: list[Any]) -> None:
    """Refuse objects and deep lists, of which Arrow would make a column for each key and depth.

    Objects of different keys would take as many values as there are keys times objects.
    """
    values: Any = column
    for _ in range(_MOST_LISTS):
        types = set(map(type, values))
        if dict in types:
            raise ValueError("its values should be numbers, texts, or lists of them, not objects")
        if list not in types:
            return
        values = list(chain.from_iterable(each for each in values if type(each) is list))
    raise ValueError(f"its lists should be at most {_MOST_LISTS - 1} deep")


_MOST_LISTS = 9  # one in another, with the column


def batch_of_arrays(columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Return arrays of NumPy or Arrow as a batch; matrices become lists of a fixed size."""
    arrays = []
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column = np.ascontiguousarray(column)
            if column.ndim == 2:
                flat = pa.array(column.reshape(-1))
                column = pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
            else:
                column = pa.array(column)
        arrays.append(column)
    return pa.record_batch(arrays, names=list(columns))
