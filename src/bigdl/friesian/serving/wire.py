"""Messages and methods of the gRPC services, made of the descriptors in ``protos``.

The messages are in a pool of their own, so a program may have stubs of the same services that were
generated elsewhere.  What the fields of type string carry is said by the header
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
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError, require

PAYLOAD = "bigdl-payload"
ARROW, JSON = "arrow", "json"

_JAVA = b"\xac\xed"


_making = threading.Lock()


@cache
def _loaded() -> tuple[Any, dict[str, Any]]:
    """Return the pool of the descriptors, and the classes of all messages by their names."""
    require("google.protobuf", "serving")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClassesForFiles

    pool = DescriptorPool()
    content = files("bigdl.friesian.serving").joinpath("protos", "services.binpb").read_bytes()
    listed = FileDescriptorSet.FromString(content).file
    for each in listed:
        pool.Add(each)
    return pool, GetMessageClassesForFiles([each.name for each in listed], pool)


def _pool_and_classes() -> tuple[Any, dict[str, Any]]:
    # Two threads that make the class of one message get two, which do not fit each other.
    with _making:
        return _loaded()


@cache
def message(name: str) -> Any:
    """Return the class of a message, such as ``recall.Query``."""
    return _pool_and_classes()[1][name]


@cache
def _methods(service: str) -> dict[str, tuple[Any, Any]]:
    """Return the classes of request and answer of each method of a service."""
    descriptor = _pool_and_classes()[0].FindServiceByName(service)
    return {
        each.name: (message(each.input_type.full_name), message(each.output_type.full_name))
        for each in descriptor.methods
    }


def stub_of(channel: Any, service: str) -> Any:
    """Return an object with a method for each one of a service."""
    made = {
        name: channel.unary_unary(
            f"/{service}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        for name, (_, answer) in _methods(service).items()
    }
    return SimpleNamespace(**made)


def handler_of(
    service: str, functions: Mapping[str, Callable[[Any, Any], Any]], guard: Callable[..., Any]
) -> Any:
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
        for name, (request, _) in _methods(service).items()
    }
    return grpc.method_handlers_generic_handler(service, handlers)


# -- columns as text -------------------------------------------------------------------------------


def encoded(batch: pa.RecordBatch) -> str:
    """Return a batch as Base64 of a stream of Arrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode("ascii")


def encoded_json(value: Any) -> str:
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
        table = pa.ipc.open_stream(content).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"The payload is neither a stream of Arrow nor JSON: {error}", code="request-invalid"
        ) from None
    return ARROW, {name: table[name].combine_chunks() for name in table.column_names}


def _of_json(content: bytes) -> dict[str, Any]:
    try:
        columns = json.loads(content)
        if not all(isinstance(each, list) for each in columns.values()):
            raise ValueError("each column should be a list")
        arrays = {name: pa.array(each) for name, each in columns.items()}
        if len({len(each) for each in arrays.values()}) > 1:
            raise ValueError("the columns have different lengths")
    except (ValueError, RecursionError, OverflowError, pa.ArrowException) as error:
        raise UsageError(
            f"The payload is no JSON of columns: {error}", code="request-invalid"
        ) from None
    return arrays


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
