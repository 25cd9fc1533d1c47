"""Messages of the Open Inference Protocol for gRPC, made from ``open_inference.proto``.

They live in a pool of their own, so they do not collide with those of other clients of the protocol
in the same process, and they are made at run time, so any version of protobuf will do.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.serving.open_inference import count_of, from_bytes, from_values
from bigdl.nano.serving.signature import datatype_of

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


def load_messages(descriptors: bytes, package: str) -> dict[str, Any]:
    """Return the message classes of a set of descriptors, by their names.

    Parameters
    ----------
    descriptors : bytes
        What ``protoc --descriptor_set_out`` writes.
    package : str
        The package whose messages are wanted.
    """
    protobuf = require("google.protobuf.descriptor_pb2", "serving")
    pool = require("google.protobuf.descriptor_pool", "serving").DescriptorPool()
    factory = require("google.protobuf.message_factory", "serving")
    files = protobuf.FileDescriptorSet.FromString(descriptors).file
    for file in files:
        pool.Add(file)
    return {
        message.name: factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{package}.{message.name}")
        )
        for file in files
        if file.package == package
        for message in file.message_type
    }


@functools.cache
def messages() -> dict[str, Any]:
    """Return the message classes of the protocol, by their names."""
    content = resources.files(__package__).joinpath("open_inference.binpb").read_bytes()
    return load_messages(content, "bigdl.open_inference")


def parameters_of(message: Any) -> dict[str, Any]:
    """Return parameters of a message as plain values."""
    values = {}
    for name, parameter in message.parameters.items():
        chosen = parameter.WhichOneof("parameter_choice")
        values[name] = getattr(parameter, chosen) if chosen else None
    return values


def set_parameter(message: Any, name: str, value: bool | int | float | str) -> None:
    """Set a parameter of a message."""
    parameter = message.parameters[name]
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def read_tensors(tensors: Any, raw: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a request or an answer by their names.

    Parameters
    ----------
    tensors : sequence of message
    raw : sequence of bytes
        Their contents, or none where they are in the messages.

    Raises
    ------
    UsageError
        If contents are missing or do not fit.
    """
    if raw and len(raw) != len(tensors):
        raise UsageError(
            f"There are {len(tensors)} tensors but {len(raw)} raw contents; give one for each, or "
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
        if raw:
            if tensor.HasField("contents"):
                raise UsageError(
                    f"Tensor {name!r} has both contents and raw contents",
                    code="request-invalid",
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


def _texts(values: Any, shape: list[int], name: str) -> np.ndarray:
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


def describe_tensor(message: Any, name: str, array: np.ndarray) -> None:
    """Fill in name, datatype and shape of a tensor."""
    message.name, message.datatype = name, datatype_of(array.dtype)
    message.shape.extend(array.shape)
