"""Encoding and decoding of the Open Inference Protocol (version 2) as JSON and binary tensors.

Requests are not trusted: sizes are checked before memory is allocated, and an invalid request
raises a :class:`UsageError`, which servers answer with status 400.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError
from bigdl.nano.serving.signature import (
    Signature,
    TensorSpec,
    check_rows,
    datatype_of,
    dtype_of,
)

orjson = LazyModule("orjson", "serving")

HEADER_LENGTH = "inference-header-content-length"
"""HTTP header with the number of bytes of JSON before the binary tensors."""

MOST_VALUES = 4 << 20
"""Largest number of JSON values, or of values in typed fields, of one request: a list of them takes
about 160 MB of memory, independent of their size in bytes."""

_MOST_DIMENSIONS = 32
_MOST_TENSORS = 4096
_MOST_ELEMENTS = 1 << 40  # of a shape; below NumPy's limit of 2**63 bytes, for a clear error
_MARKS = (b",", b"[", b"{", b":")  # each JSON value, key or container follows one of them
_LARGE = 1 << 16  # numbers encoded as JSON in one step, which holds the GIL
_TEXT_BYTES = {1: 5, 2: 9, 4: 15, 8: 22}  # bytes of a number in JSON, by its item size


@dataclass(frozen=True)
class RequestedOutput:
    """An output that a client requests, and its encoding."""

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """A decoded inference request.

    Attributes
    ----------
    inputs : dict of str to ndarray
    outputs : sequence of RequestedOutput or None
        None: all outputs of the model.
    binary : bool
        True if outputs are returned as binary data by default.
    id : str
    timeout : float or None
        Timeout in seconds.
    """

    inputs: dict[str, np.ndarray]
    outputs: Sequence[RequestedOutput] | None = None
    binary: bool = False
    id: str = ""
    timeout: float | None = None

    def select_outputs(self, signature: Signature) -> list[tuple[int, RequestedOutput]]:
        """Return the requested outputs with their positions among the model's outputs.

        Raises
        ------
        UsageError
            If the model lacks an output, or one is requested twice.
        """
        names = [spec.name for spec in signature.outputs]
        if not self.outputs:
            return [(i, RequestedOutput(name, self.binary)) for i, name in enumerate(names)]
        seen = set()
        for each in self.outputs:
            if each.name not in names:
                raise UsageError(
                    f"The model has no output {_short(each.name)}; it has {', '.join(names)}",
                    code="request-invalid",
                )
            if each.name in seen:
                raise UsageError(f"Output {each.name!r} is requested twice", code="request-invalid")
            seen.add(each.name)
        return [(names.index(each.name), each) for each in self.outputs]


def strict_inputs(
    signature: Signature, inputs: Mapping[str, np.ndarray], most_rows: int
) -> list[np.ndarray]:
    """Return a request's arrays in the model's order; refuse arrays of other types.

    Raises
    ------
    UsageError
        If an array has another type than the model's input, or as for :meth:`Signature.arrays`.
    """
    for spec in signature.inputs:
        array = inputs.get(spec.name)
        if array is not None and array.dtype != spec.dtype:
            raise UsageError(
                f"Input {spec.name!r} has the datatype {spec.datatype}, but "
                f"{datatype_of(array.dtype)} was given",
                code="request-invalid",
                argument=spec.name,
            )
    return signature.arrays(inputs, most_rows)


def check_declared(
    signature: Signature, name: str, datatype: str, shape: Sequence[int], most_rows: int | None
) -> None:
    """Check the declared name, datatype and shape of an input before its values are read.

    Raises
    ------
    UsageError
        If the model has no such input, or its datatype or shape differs.
    """
    spec = next((each for each in signature.inputs if each.name == name), None)
    if spec is None:
        expected = ", ".join(each.name for each in signature.inputs)
        raise UsageError(
            f"The model takes the inputs {expected}, but got {name[:60]}", code="request-invalid"
        )
    if dtype_of(datatype) != spec.dtype:
        raise UsageError(
            f"Input {name!r} has the datatype {spec.datatype}, but {datatype} was given",
            code="request-invalid",
        )
    spec.check_shape(tuple(shape))
    if most_rows is not None and signature.has_rows:
        check_rows(shape[0], most_rows)


def count_of(shape: object, name: str) -> int:
    """Return the number of elements of a shape in a request.

    Raises
    ------
    UsageError
        If it is no valid shape, or has more elements than an array can have.
    """
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > _MOST_DIMENSIONS
        or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape)
    ):
        raise UsageError(
            f"The shape of tensor {name!r} has to be a list of at most {_MOST_DIMENSIONS} sizes, "
            f"got {_short(shape)}",
            code="request-invalid",
            argument=name,
        )
    if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:  # ignoring zeros
        raise UsageError(
            f"The shape of tensor {name!r} is too large to be computed, got {_short(shape)}",
            code="request-invalid",
        )
    return math.prod(shape)


def from_bytes(
    data: bytes | bytearray | memoryview, datatype: str, shape: Sequence[int], name: str
) -> np.ndarray:
    """Decode a tensor from bytes: little-endian numbers, or strings with length prefixes.

    ``BF16`` becomes float32.

    Raises
    ------
    UsageError
        If the number of bytes does not match the shape.
    """
    dtype, count = dtype_of(datatype), count_of(shape, name)
    if dtype.kind == "O":
        return _texts(data, count, name).reshape(shape)
    is_bfloat16 = datatype == "BF16"
    size = count * (2 if is_bfloat16 else dtype.itemsize)
    if len(data) != size:
        raise UsageError(
            f"Tensor {name!r} of {datatype}{list(shape)} needs {size} bytes, but {len(data)} were "
            "given",
            code="request-invalid",
            argument=name,
        )
    if is_bfloat16:  # bfloat16 is the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("u4") << 16).view("f4").reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def _texts(data: bytes | bytearray | memoryview, count: int, name: str) -> np.ndarray:
    if len(data) < 4 * count:  # check before allocating `count` objects
        raise UsageError(f"Tensor {name!r} holds fewer than {count} texts", code="request-invalid")
    if count > MOST_VALUES:
        raise UsageError(
            f"Tensor {name!r} has {count} texts, but may have {MOST_VALUES}", code="request-limit"
        )
    texts = np.empty(count, object)
    view, begin = memoryview(data), 0
    for number in range(count):
        length = int.from_bytes(view[begin : begin + 4], "little")
        begin += 4
        if begin + length > len(view):
            raise UsageError(
                f"Text {number} of tensor {name!r} goes beyond its end",
                code="request-invalid",
                argument=name,
            )
        texts[number] = bytes(view[begin : begin + length])
        begin += length
    if begin != len(view):
        raise UsageError(
            f"Tensor {name!r} has {len(view) - begin} bytes after its last of {count} texts",
            code="request-invalid",
            argument=name,
        )
    return texts


def to_bytes(array: np.ndarray) -> bytes:
    """Encode a tensor as bytes in the format of :func:`from_bytes`."""
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for each in array.ravel():
        text = each.encode() if isinstance(each, str) else bytes(each)
        parts += [len(text).to_bytes(4, "little"), text]
    return b"".join(parts)


def from_values(values: object, datatype: str, shape: Sequence[int], name: str) -> np.ndarray:
    """Decode a tensor from flat or nested lists of JSON values.

    Raises
    ------
    UsageError
        If their number does not match the shape, or one does not fit the datatype.
    """
    dtype, count = dtype_of(datatype), count_of(shape, name)
    problem = f"Tensor {name!r} has to hold {count} values of {datatype}"
    if dtype.kind == "O":
        texts = _flat_texts(values, count, problem)
        if len(texts) != count:
            raise UsageError(
                f"{problem}, but holds {len(texts)}", code="request-invalid", argument=name
            )
        array = np.empty(count, object)
        array[:] = texts
        return array.reshape(shape)
    flat, types = _flat_numbers(values, count, problem)
    if not types <= _TYPES[dtype.kind]:
        raise UsageError(f"{problem}, but holds other values", code="request-invalid")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return np.array(flat, np.float64).astype(dtype, copy=False).reshape(shape)
    try:  # use 64 bits first, so that no value wraps around
        array = np.array(flat, {"b": bool, "i": np.int64, "u": np.uint64}[dtype.kind])
    except OverflowError:
        raise UsageError(
            f"{problem}, but one is out of its range", code="request-invalid"
        ) from None
    cast = array.astype(dtype, copy=False)
    if not np.array_equal(cast, array):
        raise UsageError(f"{problem}, but one is out of its range", code="request-invalid")
    return cast.reshape(shape)


_TYPES: dict[str, set[type]] = {"f": {float, int}, "b": {bool}, "i": {int}, "u": {int}}


def _flat_numbers(values: Any, count: int, problem: str) -> tuple[Sequence[Any], set[type]]:
    """Flatten nested lists of `count` values; return the values and their types.

    No array is created here, because NumPy would look for a common type of all values, and could
    convert numbers to strings as long as the longest one.
    """
    if not isinstance(values, Sequence):
        if not hasattr(values, "__len__") or isinstance(values, Mapping):
            raise UsageError(f"{problem} in a list", code="request-invalid")
    elif isinstance(values, str):
        raise UsageError(f"{problem} in a list", code="request-invalid")
    while True:
        types = set(map(type, values))
        if list not in types:
            break
        if len(types) > 1 or len(set(map(len, values))) > 1:
            raise UsageError(
                f"{problem}, but its lists have different lengths", code="request-invalid"
            )
        if len(values) * len(values[0]) > count or not values[0]:
            break
        values = list(chain.from_iterable(values))
    size = len(values) * (len(values[0]) if list in types else 1)
    if size != count:
        raise UsageError(f"{problem}, but holds {size}", code="request-invalid")
    return ([], set()) if not count else (values, types)


def _flat_texts(values: object, count: int, problem: str) -> list[bytes]:
    if not isinstance(values, list):
        raise UsageError(f"{problem} in a list", code="request-invalid")
    texts: list[bytes] = []
    waiting = [iter(values)]
    while waiting:
        for each in waiting[-1]:
            if isinstance(each, list):
                waiting.append(iter(each))
                break
            if not isinstance(each, str):
                raise UsageError(f"{problem}, but holds {_short(each)}", code="request-invalid")
            if len(texts) == count:
                raise UsageError(f"{problem}, but holds more", code="request-invalid")
            texts.append(each.encode())
        else:
            waiting.pop()
    return texts


def check_json(body: bytes, end: int) -> None:
    """Refuse JSON of more than :data:`MOST_VALUES` values before it is parsed.

    Raises
    ------
    UsageError
    """
    if end <= MOST_VALUES:
        return
    count = sum(body.count(each, 0, end) for each in _MARKS)
    if count > MOST_VALUES:
        raise UsageError(
            f"The JSON of a request may have about {MOST_VALUES} values, but has {count}; send "
            "large tensors as binary data",
            code="request-limit",
        )


def parse_json(body: bytes, length: int | None = None) -> dict[str, Any]:
    """Parse a JSON object of at most :data:`MOST_VALUES` values.

    Parameters
    ----------
    body : bytes
    length : int, optional
        Number of bytes of JSON. Default: the whole body.

    Raises
    ------
    UsageError
        If it is no JSON object or has too many values. The number of values is estimated before
        parsing, because a byte or two of JSON become up to a hundred bytes of memory.
    """
    end = len(body) if length is None else length
    check_json(body, end)
    try:
        parsed = orjson.loads(memoryview(body)[:end])
    except ValueError as error:
        raise UsageError(f"The request is no JSON: {error}", code="request-invalid") from None
    if not isinstance(parsed, dict):
        raise UsageError(
            f"The request has to be an object of JSON, got {_short(parsed)}", code="request-invalid"
        )
    return parsed


def read_request(
    body: bytes,
    header_length: int | None = None,
    signature: Signature | None = None,
    most_rows: int | None = None,
) -> InferRequest:
    """Decode the body of an HTTP inference request.

    Parameters
    ----------
    body : bytes
    header_length : int, optional
        Number of bytes of JSON; the remaining bytes are binary tensors.
    signature : Signature, optional
        The model's signature. Inputs that do not fit are refused before an array is allocated.
    most_rows : int, optional
        Largest number of rows of an input.

    Raises
    ------
    UsageError
        If the request violates the protocol.
    """
    view = memoryview(body)
    length = len(view) if header_length is None else header_length
    if not 0 <= length <= len(view):
        raise UsageError(
            f"The header Inference-Header-Content-Length says {length}, but the request has "
            f"{len(view)} bytes",
            code="request-invalid",
        )
    parsed = parse_json(body, length)
    inputs: dict[str, np.ndarray] = {}
    begin = length
    for tensor in _objects(parsed, "inputs"):
        name, datatype, shape = _facts(tensor)
        if name in inputs:
            raise UsageError(f"Input {name!r} is given twice", code="request-invalid")
        if signature is not None:
            check_declared(signature, name, datatype, shape, most_rows)
        parameters = _parameters(tensor)
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in tensor:
                raise UsageError(
                    f"Input {name!r} has neither data nor binary_data_size",
                    code="request-invalid",
                    argument=name,
                )
            inputs[name] = from_values(tensor["data"], datatype, shape, name)
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not size >= 0:
            raise UsageError(
                f"binary_data_size of input {name!r} is a number of bytes",
                code="request-invalid",
                argument=name,
            )
        if begin + size > len(view):
            raise UsageError(
                f"The binary data of input {name!r} go beyond the end of the request",
                code="request-invalid",
                argument=name,
            )
        inputs[name] = from_bytes(view[begin : begin + size], datatype, shape, name)
        begin += size
    if begin != len(view):
        raise UsageError(
            f"{len(view) - begin} bytes after the JSON belong to no input; set binary_data_size",
            code="request-invalid",
        )
    outputs = None
    if parsed.get("outputs") is not None:
        outputs = [_requested(each) for each in _objects(parsed, "outputs")]
    options = _parameters(parsed)
    identity = parsed.get("id", "")
    if not isinstance(identity, str):
        raise UsageError(
            f"The id of a request is a text, got {_short(identity)}",
            code="request-invalid",
            argument="id",
        )
    binary = options.get("binary_data_output", False) is True
    return InferRequest(inputs, outputs, binary, identity, timeout_of(options))


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Return the timeout in seconds; the parameter ``timeout`` is in microseconds.

    Raises
    ------
    UsageError
        If it is no positive number.
    """
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e15:
        raise UsageError(
            f"timeout is a number of microseconds above 0, got {_short(timeout)}",
            code="request-invalid",
            argument="timeout",
        )
    return timeout / 1e6


def _objects(parsed: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    listed = parsed.get(key)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UsageError(f"The request needs {key!r}, a list of tensors", code="request-invalid")
    if len(listed) > _MOST_TENSORS:
        raise UsageError(
            f"A request may have {_MOST_TENSORS} {key}, got {len(listed)}", code="request-limit"
        )
    return listed


def _facts(tensor: Mapping[str, Any]) -> tuple[str, str, list[int]]:
    name, datatype = tensor.get("name"), tensor.get("datatype")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise UsageError("Each input needs a name, a datatype and a shape", code="request-invalid")
    shape = tensor.get("shape")
    count_of(shape, name)
    assert isinstance(shape, list)
    if "shared_memory_region" in _parameters(tensor):
        raise UsageError(
            f"Input {name!r} is in shared memory, which this server does not read",
            code="request-invalid",
            argument=name,
        )
    return name, datatype, shape


def _parameters(tensor: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tensor.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise UsageError(
            f"parameters have to be an object, got {_short(parameters)}",
            code="request-invalid",
            argument="parameters",
        )
    return parameters


def _requested(tensor: Mapping[str, Any]) -> RequestedOutput:
    name, parameters = tensor.get("name"), _parameters(tensor)
    if not isinstance(name, str):
        raise UsageError("Each requested output needs a name", code="request-invalid")
    refuse_output_parameters(name, parameters)
    return RequestedOutput(name, parameters.get("binary_data", False) is True)


def refuse_output_parameters(name: str, parameters: Iterable[str]) -> None:
    """Refuse output parameters of the protocol that this server does not support.

    Raises
    ------
    UsageError
    """
    for each in ("classification", "shared_memory_region"):
        if each in parameters:
            raise UsageError(
                f"Output {name!r} asks for {each}, which this server does not offer",
                code="request-invalid",
                argument=each,
            )


_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = 32
_repr.maxstring = _repr.maxlong = _repr.maxother = 100


def _short(value: object) -> str:
    """Return a short description of a value, without converting a large value to text."""
    text = _repr.repr(value)
    if len(text) <= 60:
        return text
    unit = "characters" if isinstance(value, str) else "values"
    size = f" of {len(value)} {unit}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"


@dataclass
class EncodedAnswer:
    """Body of an HTTP response: JSON followed by binary tensors."""

    header: bytes
    tensors: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """Complete body in bytes."""
        return b"".join([self.header, *self.tensors]) if self.tensors else self.header


def write_answer(
    request: InferRequest,
    signature: Signature,
    results: Sequence[np.ndarray],
    model: str,
    version: str,
    most_bytes: int | None = None,
) -> EncodedAnswer:
    """Encode the response to an inference request.

    NaN and infinite numbers become ``null`` in JSON.

    Raises
    ------
    UsageError
        If a requested output does not exist or holds bytes that JSON cannot represent, or if the
        response would have more than `most_bytes`.
    """
    outputs, binaries = [], []
    selected = request.select_outputs(signature)
    check_answer(selected, results, most_bytes)
    for position, requested in selected:
        array = results[position]
        output: dict[str, Any] = {
            "name": requested.name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if requested.binary:
            binaries.append(to_bytes(array))
            output["parameters"] = {"binary_data_size": len(binaries[-1])}
        else:
            output["data"] = _json_data(array, requested.name)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id:
        answer["id"] = request.id
    answer["outputs"] = outputs
    return EncodedAnswer(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), binaries)


def check_answer(
    selected: Sequence[tuple[int, RequestedOutput]],
    results: Sequence[np.ndarray],
    most_bytes: int | None,
) -> None:
    """Refuse a response that would exceed the allowed number of bytes, before it is encoded.

    Raises
    ------
    UsageError
        If the response would have more than `most_bytes`.
    """
    if most_bytes is None:
        return
    size = 0
    for position, requested in selected:
        array = results[position]
        if array.dtype.kind in "OSU":
            size += sum(len(each) + 4 for each in array.ravel())
        elif requested.binary:
            size += array.nbytes
        else:
            size += array.size * _TEXT_BYTES.get(array.itemsize, 22)
    if size > most_bytes:
        raise UsageError(
            f"The answer would have about {size} bytes, but one may have {most_bytes}; ask for "
            "fewer rows or outputs at a time, or for binary data",
            code="request-invalid",
        )


def _json_data(array: np.ndarray, name: str) -> object:
    """Return the elements of a tensor for orjson; large tensors are encoded in parts."""
    values = json_values(array, name)
    if len(values) <= _LARGE:
        return values
    parts = (
        orjson.dumps(values[begin : begin + _LARGE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for begin in range(0, len(values), _LARGE)
    )
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def json_values(array: np.ndarray, name: str) -> np.ndarray | list[str]:
    """Return the elements of a tensor for JSON: an array of numbers, or a list of strings.

    Raises
    ------
    UsageError
        If it holds bytes that are not UTF-8.
    """
    flat = np.ascontiguousarray(array).ravel()
    if array.dtype.kind not in "OSU":
        return flat
    try:
        return [each if isinstance(each, str) else bytes(each).decode() for each in flat]
    except UnicodeDecodeError:
        raise UsageError(
            f"Tensor {name!r} holds bytes that are no valid UTF-8, which JSON cannot represent; "
            "send or request it as binary data",
            code="request-invalid",
            argument=name,
        ) from None


def model_metadata(
    name: str, versions: Sequence[str], platform: str, signature: Signature
) -> dict[str, Any]:
    """Return the metadata of a model as a JSON-serializable dict."""

    def described(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
            for spec in specs
        ]

    return {
        "name": name,
        "versions": list(versions),
        "platform": platform,
        "inputs": described(signature.inputs),
        "outputs": described(signature.outputs),
    }
