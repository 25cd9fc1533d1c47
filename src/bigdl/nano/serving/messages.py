"""gRPC messages of the Open Inference Protocol, from the compiled ``open_inference.proto``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.serving.open_inference import (
    MOST_VALUES,
    check_declared,
    count_of,
    from_bytes,
    from_values,
)
from bigdl.nano.serving.protos import Message, MessageClass, ProtoPool
from bigdl.nano.serving.signature import Signature, datatype_of

SERVICE = "inference.GRPCInferenceService"
METHODS = (
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer"),
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
)
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@functools.cache
def messages() -> dict[str, MessageClass]:
    """Return the message classes of the protocol by name."""
    pool = ProtoPool("bigdl.nano.serving", "open_inference.binpb")
    return pool.messages("bigdl.open_inference")


def parameters_of(message: Message) -> dict[str, Any]:
    """Return the parameters of a message as a dict of Python values."""
    values = {}
    for name, parameter in message.parameters.items():
        chosen = parameter.WhichOneof("parameter_choice")
        values[name] = getattr(parameter, chosen) if chosen else None
    return values


def set_parameter(message: Message, name: str, value: bool | int | float | str) -> None:
    """Set a parameter of a message to a Python value."""
    parameter = message.parameters[name]
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def check_fields(content: bytes) -> None:
    """Refuse an unparsed message that would need far more memory after parsing.

    An empty nested message or string takes two bytes, but about a hundred after parsing. A packed
    number takes one byte, and up to eight after parsing.

    Parameters
    ----------
    content : bytes

    Raises
    ------
    UsageError
        If it has more than :data:`MOST_VALUES` fields and packed numbers.
    """
    if len(content) <= MOST_VALUES // 16:
        return
    most = MOST_VALUES // 16  # fields; each one costs as much as sixteen numbers
    fields = numbers = 0
    waiting = [(memoryview(content), 0)]
    while waiting:
        view, depth = waiting.pop()
        begin, end = 0, len(view)
        while begin < end:
            fields += 1
            if fields > most:
                raise UsageError(
                    f"A message may have {most} fields and texts; send large tensors as raw "
                    "contents",
                    code="request-limit",
                )
            key, begin = _varint(view, begin)
            number, wire_type = key >> 3, key & 7
            if wire_type == 0:
                _, begin = _varint(view, begin)
            elif wire_type in _FIXED:
                begin += _FIXED[wire_type]
            elif wire_type == 2:
                length, begin = _varint(view, begin)
                part = view[begin : begin + length]
                begin += length
                if number in _NESTED[depth]:
                    waiting.append((part, depth + 1))
                elif (size := _PACKED[depth].get(number)) is not None:
                    numbers += len(part) // size if size else _count_varints(part)
            elif wire_type > 5:  # no valid field; parsing raises the error
                break
    if numbers > MOST_VALUES:
        raise UsageError(
            f"A message may have {MOST_VALUES} numbers in typed contents, but has {numbers}; send "
            "large tensors as raw contents",
            code="request-limit",
        )


_FIXED = {1: 8, 5: 4}  # bytes of a field by its wire type
# By nesting depth (ModelInferRequest, its tensors, their contents): the numbers of fields that hold
# messages, and of fields that hold packed numbers with the bytes per number (0: varint).
_NESTED: tuple[frozenset[int], ...] = (frozenset((4, 5, 6)), frozenset((2, 4, 5)), frozenset())
_PACKED: tuple[dict[int, int], ...] = ({}, {3: 0}, {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 4, 7: 8})


def _count_varints(part: memoryview) -> int:
    return int(np.count_nonzero(np.frombuffer(part, np.uint8) < 128))


def _varint(view: memoryview, begin: int) -> tuple[int, int]:
    """Return the varint at an offset and the offset after it; the value is 0 past the end."""
    value = shift = 0
    while begin < len(view):
        byte = view[begin]
        begin += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            return value, begin
        shift += 7
    return 0, len(view)


def read_tensors(
    tensors: Sequence[Message],
    raw: Sequence[bytes],
    signature: Signature | None = None,
    most_rows: int | None = None,
) -> dict[str, np.ndarray]:
    """Decode the tensors of a request or response into a dict of arrays by name.

    Parameters
    ----------
    tensors : sequence of message
    raw : sequence of bytes
        Raw contents of the tensors, or empty if the messages hold the contents.
    signature : Signature, optional
        The model's signature. Tensors that do not fit are refused before an array is allocated.
    most_rows : int, optional
        Largest number of rows of a tensor.

    Raises
    ------
    UsageError
        If contents are missing or do not fit.
    """
    if raw and len(raw) != len(tensors):
        raise UsageError(
            f"There are {len(tensors)} tensors but {len(raw)} raw contents; send one for each, or "
            "none",
            code="request-invalid",
        )
    arrays: dict[str, np.ndarray] = {}
    for position, tensor in enumerate(tensors):
        name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
        if name in arrays:
            raise UsageError(
                f"Tensor {name!r} is given twice", code="request-invalid", argument=name
            )
        if "shared_memory_region" in tensor.parameters:
            raise UsageError(
                f"Tensor {name!r} is in shared memory, which is not supported",
                code="request-invalid",
                argument=name,
            )
        count_of(shape, name)
        if signature is not None:
            check_declared(signature, name, datatype, shape, most_rows)
        if raw:
            if tensor.HasField("contents"):
                raise UsageError(
                    f"Tensor {name!r} has both contents and raw contents",
                    code="request-limit",
                    argument=name,
                )
            arrays[name] = from_bytes(raw[position], datatype, shape, name)
            continue
        if datatype not in _CONTENTS:
            raise UsageError(
                f"Tensor {name!r} of {datatype} has to be given as raw contents, as this datatype "
                "has no field",
                code="request-invalid",
                argument=name,
            )
        values = getattr(tensor.contents, _CONTENTS[datatype])
        if datatype == "BYTES":
            arrays[name] = _texts(values, shape, name)
        else:
            arrays[name] = from_values(values, datatype, shape, name)
    return arrays


def _texts(values: Sequence[bytes], shape: list[int], name: str) -> np.ndarray:
    count = count_of(shape, name)
    if len(values) != count:
        raise UsageError(
            f"Tensor {name!r} has to hold {count} texts, but holds {len(values)}",
            code="request-invalid",
            argument=name,
        )
    array = np.empty(count, object)
    array[:] = list(values)
    return array.reshape(shape)


def describe_tensor(message: Message, name: str, array: np.ndarray) -> None:
    """Set the name, datatype and shape of a tensor message."""
    message.name, message.datatype = name, datatype_of(array.dtype)
    message.shape.extend(array.shape)
