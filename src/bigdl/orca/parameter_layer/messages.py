"""Messages between ranks: encoding of vectors, and packing of documents with arrays.

BigDL 2.x truncated float32 to its upper two bytes and summed in that format, which shrinks a
gradient slightly with every worker.  Here 16-bit formats round to nearest even, and the receiver
sums in float32, at the same number of bytes.

A message is a JSON document with arrays.  It is sent whole, or split into frames of a few
megabytes for transports that reorder them.  There are no pickles: a received message is only data,
and its arrays are views of the received bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from bigdl.common.checks import check_choice

BytesLike: TypeAlias = "bytes | bytearray | memoryview | np.ndarray"
"""Bytes; an array has the dtype uint8."""
Message: TypeAlias = "ArrayMessage | ReceivedMessage | BytesLike"
"""A packed document: to send, received, or as bytes."""


class Codec:
    """Codec that stores float32 vectors as bytes without rounding; its subclasses round the values.

    Attributes
    ----------
    feedback : bool
        True if a rank adds the encoding error to its next gradient ("1-bit SGD", Seide et al.
        2014).
    weights : str
        Name of the codec for weights, if gradients use this codec.
    """

    feedback = False
    weights = "fp32"

    def encode(self, vector: np.ndarray) -> bytes | np.ndarray:
        """Encode a vector as a bytes-like object, which may be a view."""
        return np.ascontiguousarray(vector, dtype=np.float32).view(np.uint8)

    def decode(self, data: BytesLike) -> np.ndarray:
        """Decode bytes that :meth:`encode` returned to a float32 vector, which may be read-only."""
        return np.frombuffer(data, np.float32)


class _Float16(Codec):
    weights = "fp16"

    def encode(self, vector):
        largest = np.float32(np.finfo(np.float16).max)
        # an overflow to infinity would stay in the weights forever
        bounded = np.where(np.isinf(vector), vector, np.clip(vector, -largest, largest))
        return bounded.astype(np.float16).view(np.uint8)

    def decode(self, data):
        return np.frombuffer(data, np.float16).astype(np.float32)


class _BFloat16(Codec):
    weights = "bf16"

    def encode(self, vector):
        import torch

        rounded = torch.from_numpy(np.ascontiguousarray(vector, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint8)

    def decode(self, data):
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Int8(Codec):
    """Codec of integers from -127 to 127, with one scale per block of numbers."""

    feedback = True
    weights = "bf16"

    _BLOCK = 1024

    def encode(self, vector):
        blocks = -(-len(vector) // self._BLOCK)
        padded = np.zeros(blocks * self._BLOCK, np.float32)
        padded[: len(vector)] = vector
        rows = padded.reshape(blocks, self._BLOCK)
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        safe = np.where(scales > 0, scales, np.float32(1))
        with np.errstate(invalid="ignore"):
            whole = np.rint(rows / safe[:, None]).astype(np.int8)
        return scales.tobytes() + whole.reshape(-1)[: len(vector)].tobytes()

    def decode(self, data):
        size = memoryview(data).nbytes
        count = size - 4 * -(-size // (self._BLOCK + 4))
        blocks = -(-count // self._BLOCK)
        scales = np.frombuffer(data, np.float32, blocks)
        values = np.frombuffer(data, np.int8, count, 4 * blocks).astype(np.float32)
        values *= np.repeat(scales, self._BLOCK)[:count]
        return values


CODECS: dict[str, Codec] = {
    "fp32": Codec(),
    "fp16": _Float16(),
    "bf16": _BFloat16(),
    "int8": _Int8(),
}


def codec_for(name: str) -> Codec:
    """Return the codec with this name."""
    return CODECS[check_choice("compression", name, CODECS)]


_HEADER = struct.Struct("<Q")  # size of the document in bytes
_ALIGN = 8
_ARRAY = "__array__"  # key of a placeholder: offset, dtype, shape, is a tensor


class ArrayMessage:
    """Message of a JSON document and arrays, which are not copied; ``len`` is its size in bytes.

    The arrays must not change until the message is copied.

    Parameters
    ----------
    doc : object
        JSON-serializable document, which may contain arrays, tensors and bytes.

    Attributes
    ----------
    parts : list of bytes-like
        One after another they are the message.
    """

    def __init__(self, doc: object):
        self._arrays: dict[int, np.ndarray] = {}  # by byte offset after the document
        self._size = 0
        self._text = json.dumps(doc, default=self._placeholder).encode()
        head = _HEADER.pack(len(self._text)) + self._text
        self.parts: list = [head + _padding(len(head))]
        for array in self._arrays.values():
            self.parts += [array.reshape(-1).view(np.uint8).data, _padding(array.nbytes)]

    def _placeholder(self, value):
        """Register an array and return its placeholder for the JSON document."""
        is_tensor = hasattr(value, "detach")
        if isinstance(value, bytes | bytearray | memoryview):
            value = np.frombuffer(value, np.uint8)
        array = value.detach().numpy() if is_tensor else value
        offset, shape = self._size, list(array.shape)
        self._arrays[offset] = np.ascontiguousarray(array)
        self._size += array.nbytes + len(_padding(array.nbytes))
        return {_ARRAY: [offset, array.dtype.str, shape, is_tensor]}

    def __len__(self):
        return sum(map(len, self.parts))

    def __bytes__(self):
        return b"".join(self.parts)

    def opened(self) -> Any:  # JSON values and arrays
        """Return the document, as :func:`unpack` returns it at the receiver."""
        return _filled(self._text, lambda offset, dtype, shape: self._arrays[offset].reshape(shape))


class ReceivedMessage:
    """Received message in three buffers; the middle buffer may be preallocated memory.

    Parameters
    ----------
    head, tail : bytes-like
        Start and end of the message.
    large : ndarray of uint8
        Middle of the message: one of its arrays, or the whole message.

    Attributes
    ----------
    parts : list of bytes-like
        One after another they are the message.
    """

    def __init__(self, head: Any, large: np.ndarray, tail: Any):
        self.parts = [memoryview(head), large.data, memoryview(tail)]

    def opened(self) -> Any:  # JSON values and arrays
        """Return the decoded document; its arrays are views of the received buffers."""
        head, large, _ = self.parts
        if not len(head):
            return unpack(large)
        end = _HEADER.size + _HEADER.unpack_from(head)[0]

        def read(offset, dtype, shape):
            start, parts = _aligned(end) + offset, iter(self.parts)
            part = next(parts)
            while start >= len(part):
                start, part = start - len(part), next(parts)
            return np.frombuffer(part, dtype, math.prod(shape), start).reshape(shape)

        return _filled(bytes(head[_HEADER.size : end]), read)


def pack(doc: object) -> bytes:
    """Serialize a document to bytes, see :class:`ArrayMessage`."""
    return bytes(ArrayMessage(doc))


def unpack(data: Any) -> Any:  # JSON values and arrays
    """Return the document of a message; its arrays are read-only views, and bytes become arrays.

    Parameters
    ----------
    data : bytes-like, ArrayMessage or ReceivedMessage
    """
    if isinstance(data, ArrayMessage | ReceivedMessage):
        return data.opened()
    view = memoryview(data)
    end = _HEADER.size + _HEADER.unpack_from(view)[0]
    arrays = view[_aligned(end) :]

    def read(offset, dtype, shape):
        return np.frombuffer(arrays, dtype, math.prod(shape), offset).reshape(shape)

    return _filled(bytes(view[_HEADER.size : end]), read)


def _filled(text: bytes, read: Callable[[int, str, list[int]], np.ndarray]) -> Any:
    """Parse JSON text, and replace each array placeholder with the array that `read` returns."""

    def fill(doc):
        if _ARRAY not in doc:
            return doc
        *spec, is_tensor = doc[_ARRAY]
        array = read(*spec)
        if not is_tensor:
            return array
        import torch

        return torch.from_numpy(array.copy())

    return json.loads(text, object_hook=fill)


def _aligned(position: int) -> int:
    return -(-position // _ALIGN) * _ALIGN


def _padding(length: int) -> bytes:
    """Return the padding after `length` bytes; an empty array is padded as well."""
    return b"\0" * (_aligned(max(length, 1)) - length)


# tag, lane, is the message in a file, source, index of the frame, number of frames
_FRAME = struct.Struct("<cB?xIII")
PAYLOAD_BYTES = 4 << 20  # the JVM copies larger ones more often


def frames_of(
    tag: bytes, source: int, data: ArrayMessage | bytes, lane: int = 0
) -> Iterator[bytes]:
    """Split a message into frames of limited size, each with a header.

    Parameters
    ----------
    tag : bytes
        One character that identifies the type of message.
    source : int
        Rank of the sender.
    data : bytes-like or ArrayMessage
    lane : int
        Lane of the message; receivers skip the lanes that they do not read.
    """
    parts = data.parts if isinstance(data, ArrayMessage) else [data]
    count = max(1, -(-len(data) // PAYLOAD_BYTES))
    for number, payload in enumerate(_payloads(parts, count)):
        yield b"".join((_FRAME.pack(tag, lane, False, source, number, count), *payload))


def frame_of_file(tag: bytes, source: int, path: str, lane: int = 0) -> bytes:
    """Build a frame that refers to a message in a file, which the receiver can read."""
    return _FRAME.pack(tag, lane, True, source, 0, 1) + path.encode()


def _payloads(parts, count) -> Iterator[list[memoryview]]:
    """Distribute the bytes of `parts` over `count` frames; yield the buffers of each frame."""
    views = [memoryview(part) for part in parts]
    for _ in range(count):
        payload, room = [], PAYLOAD_BYTES
        while views and room:
            payload.append(views[0][:room])
            room -= len(payload[-1])
            views[0] = views[0][len(payload[-1]) :]
            if not len(views[0]):
                views.pop(0)
        yield payload


class FrameReader:
    """Frames that a task received, grouped by tag and sender and sorted.

    Spark fetches blocks in any order. It reuses a Python worker only if the task has read its whole
    input, so all frames are read.

    Parameters
    ----------
    frames : iterable of bytes-like
    lanes : collection of int, optional
        Lanes to read; default all.
    """

    def __init__(self, frames: Iterable, lanes: Collection[int] | None = None):
        self._frames: dict[bytes, dict[int, dict[int, memoryview]]] = {}
        for frame in frames:
            tag, lane, is_in_file, source, number, _ = _FRAME.unpack_from(frame, 0)
            if lanes is None or lane in lanes:
                payload = memoryview(frame)[_FRAME.size :]
                if is_in_file:
                    payload = np.memmap(str(payload, "utf-8"), np.uint8, "r").data
                self._frames.setdefault(tag, {}).setdefault(source, {})[number] = payload

    def messages(self, tag: bytes) -> list:
        """Return all messages with a tag, in the order of their senders' ranks."""
        by_source = self._frames.get(tag, {})
        return [_joined(by_source[source]) for source in sorted(by_source)]

    def message(self, tag: bytes) -> Message | None:
        """Return the only message with a tag, or None."""
        return next(iter(self.messages(tag)), None)

    def documents(self, tag: bytes) -> list:
        """Return the documents of all messages with a tag."""
        return [unpack(data) for data in self.messages(tag)]

    def document(self, tag: bytes) -> Any:  # JSON values and arrays
        """Return the document of the only message with a tag, or None."""
        return next(iter(self.documents(tag)), None)


def _joined(parts):
    if len(parts) == 1:
        return parts[0]
    return b"".join(parts[number] for number in range(len(parts)))


class Packable:
    """Base class of dataclasses that can be serialized to messages, including dicts of arrays."""

    numbered: ClassVar[tuple[str, ...]] = ("buffers",)  # attributes that hold such arrays

    def pack(self) -> bytes:
        """Serialize the object to bytes."""
        return bytes(self.message())

    def message(self) -> ArrayMessage:
        """Return the object as a message, without copying arrays."""
        arrays = {name: list(getattr(self, name).items()) for name in self.numbered}
        return ArrayMessage({**vars(self), **arrays})

    @classmethod
    def unpack(cls, data: Message) -> Self:
        """Deserialize an object; its arrays are views of `data`."""
        packable = cls(**unpack(data))
        for name in cls.numbered:
            setattr(packable, name, dict(getattr(packable, name)))
        return packable


@dataclass
class RankState(Packable):
    """A rank's slice of the weights with its optimizer state and buffers.

    Attributes
    ----------
    weights : ndarray of float32
        Slice of the weights, in full precision for every codec.
    optimizer : list of dict
        Optimizer state of each segment.
    buffers : dict of int to ndarray
        Model buffers that this rank merges, and that changed since the start.
    residual : ndarray of float32 or None
        Encoding error of this rank's gradients, for all parameters.
    records : list of dict
        Times of the steps of this group; on rank 0 also the records of every rank's batch.
    is_halted : bool
        True if a step of this group was discarded, so that later steps are skipped.
    """

    weights: np.ndarray
    optimizer: list[dict]
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    residual: np.ndarray | None = None
    records: list[dict] = field(default_factory=list)
    is_halted: bool = False

    def begin_group(self) -> None:
        """Clear the records and flags of the previous group."""
        self.records, self.is_halted = [], False

    @classmethod
    def unpack(cls, data: Message) -> Self:
        """Deserialize a state; copy its weights, buffers and residual."""
        state = super().unpack(data)
        state.weights = state.weights.copy()
        state.buffers = {number: buffer.copy() for number, buffer in state.buffers.items()}
        state.residual = None if state.residual is None else state.residual.copy()
        return state
