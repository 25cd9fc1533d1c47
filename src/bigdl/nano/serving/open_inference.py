"""Requests and answers of the Open Inference Protocol (version 2), as JSON and as binary tensors.

What a client sends is not trusted: sizes are checked before anything is allocated, and whatever is
wrong is a :class:`UsageError`, which a server answers with status 400.
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
"""The header that says how many bytes of JSON stand before the binary tensors."""

MOST_VALUES = 4 << 20
"""Values of JSON, or of typed fields, that one request may have: a list of them takes about 160 MB
of memory, however few bytes it has."""

_MOST_DIMENSIONS = 32
_MOST_TENSORS = 4096
_MOST_ELEMENTS = 1 << 40  # of a shape; NumPy refuses 2**63 bytes, in words of its own
_MARKS = (b",", b"[", b"{", b":")  # one of them stands before each value of JSON, key or container
_LARGE = 1 << 16  # numbers that are written as JSON in one step, during which no thread runs
_TEXT_BYTES = {1: 5, 2: 9, 4: 15, 8: 22}  # of a number in JSON, by the bytes that it has in memory


@dataclass(frozen=True)
class RequestedOutput:
    """An output that a client asks for, and whether as binary data."""

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """A request for inference.

    Attributes
    ----------
    inputs : dict of str to ndarray
    outputs : sequence of RequestedOutput or None
        None asks for all.
    binary : bool
        True if outputs that nothing is said of are wanted as binary data.
    id : str
    timeout : float or None
        Seconds.
    """

    inputs: dict[str, np.ndarray]
    outputs: Sequence[RequestedOutput] | None = None
    binary: bool = False
    id: str = ""
    timeout: float | None = None

    def wanted(self, signature: Signature) -> list[tuple[int, RequestedOutput]]:
        """Return positions of outputs, each with how it is wanted.

        Raises
        ------
        UsageError
            If the model has no such output, or one is asked for twice.
        """
        names = [spec.name for spec in signature.outputs]
        if not self.outputs:
            return [(i, RequestedOutput(name, self.binary)) for i, name in enumerate(names)]
        asked = set()
        for each in self.outputs:
            if each.name not in names:
                raise UsageError(
                    f"The model has no output {_short(each.name)}; it has {', '.join(names)}",
                    code="request-invalid",
                )
            if each.name in asked:
                raise UsageError(f"Output {each.name!r} is asked for twice", code="request-invalid")
            asked.add(each.name)
        return [(names.index(each.name), each) for each in self.outputs]


def strict_inputs(
    signature: Signature, inputs: Mapping[str, np.ndarray], most_rows: int
) -> list[np.ndarray]:
    """Return the arrays of a request in the model's order, whose types must be the model's.

    Raises
    ------
    UsageError
        As of :meth:`Signature.arrays`, and for other types.
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
    """Refuse an input by what a request says of it, before its values are looked at.

    Raises
    ------
    UsageError
        If the model has no such input, or one of another datatype or shape.
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
    """Return the number of elements of a shape of a request.

    Raises
    ------
    UsageError
        If it is no shape, or one of more elements than an array can have.
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
    if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:  # with the zeros left out
        raise UsageError(
            f"The shape of tensor {name!r} is larger than any that can be computed, got "
            f"{_short(shape)}",
            code="request-invalid",
        )
    return math.prod(shape)


def from_bytes(
    data: bytes | bytearray | memoryview, datatype: str, shape: Sequence[int], name: str
) -> np.ndarray:
    """Return a tensor from its bytes: little-endian numbers, or texts with their lengths before.

    Numbers of ``BF16`` become float32.

    Raises
    ------
    UsageError
        If there are more or fewer bytes than the shape needs.
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
    if is_bfloat16:  # the upper halves of numbers of float32
        return (np.frombuffer(data, "<u2").astype("u4") << 16).view("f4").reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def _texts(data: bytes | bytearray | memoryview, count: int, name: str) -> np.ndarray:
    if len(data) < 4 * count:  # before as many objects are allocated as a shape can name
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
    """Return the bytes of a tensor, as :func:`from_bytes` reads them."""
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for each in array.ravel():
        text = each.encode() if isinstance(each, str) else bytes(each)
        parts += [len(text).to_bytes(4, "little"), text]
    return b"".join(parts)


def from_values(values: Any, datatype: str, shape: Sequence[int], name: str) -> np.ndarray:
    """Return a tensor from numbers of JSON, flat or nested.

    Raises
    ------
    UsageError
        If they are of another number, or do not fit the datatype.
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
    try:  # as wide as JSON's numbers, so that nothing wraps around
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
    """Return the values of nested lists in one list of `count`, and their types.

    No array is made here: NumPy would look for a type that holds all values, and make texts of
    numbers as long as the longest of them.
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


def _flat_texts(values: Any, count: int, problem: str) -> list[bytes]:
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
    """Refuse JSON of more than :data:`MOST_VALUES` values, before it is parsed.

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
    """Return an object of JSON of at most :data:`MOST_VALUES` values.

    Parameters
    ----------
    body : bytes
    length : int, optional
        Where the JSON ends; default: with the body.

    Raises
    ------
    UsageError
        If it is none, or has more values. These are estimated before they are made: a byte or two
        of JSON become up to a hundred of memory.
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
    """Return the request in the body of an HTTP request.

    Parameters
    ----------
    body : bytes
    header_length : int, optional
        How many of its bytes are JSON; the others are binary tensors.
    signature : Signature, optional
        Of the model. What does not fit it is refused before an array is made.
    most_rows : int, optional
        Of an input.

    Raises
    ------
    UsageError
        If anything in it is not as the protocol says.
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
            f"{len(view) - begin} bytes after the JSON belong to no input; give binary_data_size",
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
    """Return the seconds of the parameter ``timeout``, which is in microseconds.

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
        raise UsageError("Each output that is asked for needs a name", code="request-invalid")
    refuse_output_parameters(name, parameters)
    return RequestedOutput(name, parameters.get("binary_data", False) is True)


def refuse_output_parameters(name: str, parameters: Iterable[str]) -> None:
    """Refuse what some servers do with outputs and this one does not.

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
    """Show a value of any size in a few words, without writing it out before."""
    text = _repr.repr(value)
    if len(text) <= 60:
        return text
    unit = "characters" if isinstance(value, str) else "values"
    size = f" of {len(value)} {unit}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"


@dataclass
class WrittenAnswer:
    """The body of an HTTP answer: JSON, and binary tensors after it."""

    header: bytes
    tensors: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All bytes."""
        return b"".join([self.header, *self.tensors]) if self.tensors else self.header


def write_answer(
    request: InferRequest,
    signature: Signature,
    results: Sequence[np.ndarray],
    model: str,
    version: str,
    most_bytes: int | None = None,
) -> WrittenAnswer:
    """Return the answer to a request.

    Numbers of JSON that are not finite become ``null``.

    Raises
    ------
    UsageError
        If an output that is asked for is not there, holds texts that JSON cannot, or the answer
        would have more than `most_bytes`.
    """
    outputs, binaries = [], []
    wanted = request.wanted(signature)
    check_answer(wanted, results, most_bytes)
    for position, asked in wanted:
        array = results[position]
        output: dict[str, Any] = {
            "name": asked.name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if asked.binary:
            binaries.append(to_bytes(array))
            output["parameters"] = {"binary_data_size": len(binaries[-1])}
        else:
            output["data"] = _json_data(array, asked.name)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id:
        answer["id"] = request.id
    answer["outputs"] = outputs
    return WrittenAnswer(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), binaries)


def check_answer(
    wanted: Sequence[tuple[int, RequestedOutput]],
    results: Sequence[np.ndarray],
    most_bytes: int | None,
) -> None:
    """Refuse an answer of more bytes than allowed, before it is written.

    Raises
    ------
    UsageError
    """
    if most_bytes is None:
        return
    size = 0
    for position, asked in wanted:
        array = results[position]
        if array.dtype.kind in "OSU":
            size += sum(len(each) + 4 for each in array.ravel())
        elif asked.binary:
            size += array.nbytes
        else:
            size += array.size * _TEXT_BYTES.get(array.itemsize, 22)
    if size > most_bytes:
        raise UsageError(
            f"The answer would have about {size} bytes, but one may have {most_bytes}; ask for "
            "fewer rows or outputs at a time, or for binary data",
            code="request-invalid",
        )


def _json_data(array: np.ndarray, name: str) -> Any:
    """Return the elements of a tensor for orjson, large ones written already, bit by bit."""
    values = json_values(array, name)
    if len(values) <= _LARGE:
        return values
    parts = (
        orjson.dumps(values[begin : begin + _LARGE], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for begin in range(0, len(values), _LARGE)
    )
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def json_values(array: np.ndarray, name: str) -> Any:
    """Return the elements of a tensor for JSON: an array of numbers, or a list of texts.

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
            f"Tensor {name!r} holds bytes that are no text, which JSON cannot hold; send or ask "
            "for it as binary data",
            code="request-invalid",
            argument=name,
        ) from None


def model_metadata(
    name: str, versions: Sequence[str], platform: str, signature: Signature
) -> dict[str, Any]:
    """Return the metadata of a model for an answer in JSON."""

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
