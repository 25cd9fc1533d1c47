"""Messages between ranks: how numbers are encoded, and how documents and arrays are packed.

BigDL 2.x cut float32 to its upper two bytes and summed in that form, which shrinks a gradient a
little with every worker.  Here 16 bit formats round to the nearest (ties to even), and the sum is
made in float32 where they arrive, at the same number of bytes.

A message is a JSON-able document with arrays in it, whole or cut in frames of a few megabytes
for a carrier that mixes their order.  No pickles: what arrives is data, and its numbers are views
of the bytes that arrived.
"""

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from bigdl.common.checks import check_choice


class Codec:
    """Bytes of a vector of float32 and back; here as they are, in other codecs rounded.

    Attributes
    ----------
    feedback : bool
        True if a rank adds what encoding has lost to its next gradient ("1-bit SGD", Seide et
        al. 2014).
    weights : str
        Name of the codec in which weights are sent beside gradients in this one.
    """

    feedback = False
    weights = "fp32"

    def encode(self, vector: np.ndarray) -> bytes | np.ndarray:
        """The vector as something bytes-like of so many bytes; perhaps a view of it."""
        return np.ascontiguousarray(vector, dtype=np.float32).view(np.uint8)

    def decode(self, data: Any) -> np.ndarray:
        """A vector of float32, perhaps read-only, from bytes of :meth:`encode`."""
        return np.frombuffer(data, np.float32)


class _Float16(Codec):
    weights = "fp16"

    def encode(self, vector):
        largest = np.float32(np.finfo(np.float16).max)
        # an infinity of our making would stay in the weights for ever
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
    """Integers from -127 to 127, with a scale for each block of numbers."""

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
    """Return the codec of a name."""
    return CODECS[check_choice("compression", name, CODECS)]


_HEADER = struct.Struct("<Q")  # bytes of the document
_ALIGN = 8
_ARRAY = "__array__"  # key of what stands for one in the JSON: place, dtype, shape, is a tensor


class ArrayMessage:
    """A document with arrays that nobody has copied yet; ``len`` is the number of its bytes.

    The arrays must not change before it has been copied to where it goes.

    Parameters
    ----------
    doc : object
        JSON-able, but for arrays, tensors and bytes anywhere in it.

    Attributes
    ----------
    parts : list of bytes-like
        One after another they are the message.
    """

    def __init__(self, doc: Any):
        self._arrays: dict[int, np.ndarray] = {}  # by their places behind the document
        self._size = 0
        self._text = json.dumps(doc, default=self._place).encode()
        head = _HEADER.pack(len(self._text)) + self._text
        self.parts: list = [head + _padding(len(head))]
        for array in self._arrays.values():
            self.parts += [array.reshape(-1).view(np.uint8).data, _padding(array.nbytes)]

    def _place(self, value):
        """Keep an array and return what stands for it in the JSON."""
        is_tensor = hasattr(value, "detach")
        if isinstance(value, bytes | bytearray | memoryview):
            value = np.frombuffer(value, np.uint8)
        array = value.detach().numpy() if is_tensor else value
        place, shape = self._size, list(array.shape)
        self._arrays[place] = np.ascontiguousarray(array)
        self._size += array.nbytes + len(_padding(array.nbytes))
        return {_ARRAY: [place, array.dtype.str, shape, is_tensor]}

    def __len__(self):
        return sum(map(len, self.parts))

    def __bytes__(self):
        return b"".join(self.parts)

    def opened(self) -> Any:
        """The document, as :func:`unpack` gives it where it arrives."""
        return _filled(self._text, lambda place, dtype, shape: self._arrays[place].reshape(shape))


class ReceivedMessage:
    """A message that came in as three pieces, of which the middle one may lie anywhere.

    Parameters
    ----------
    head, tail : bytes-like
        The beginning and the end of the message.
    large : ndarray of uint8
        What is between: an array of the message, or all of it.

    Attributes
    ----------
    parts : list of bytes-like
        One after another they are the message.
    """

    def __init__(self, head: Any, large: np.ndarray, tail: Any):
        self.parts = [memoryview(head), large.data, memoryview(tail)]

    def opened(self) -> Any:
        """The document; its arrays are views of the pieces."""
        head, large, _ = self.parts
        if not len(head):
            return unpack(large)
        end = _HEADER.size + _HEADER.unpack_from(head)[0]

        def read(place, dtype, shape):
            start, parts = _aligned(end) + place, iter(self.parts)
            part = next(parts)
            while start >= len(part):
                start, part = start - len(part), next(parts)
            return np.frombuffer(part, dtype, math.prod(shape), start).reshape(shape)

        return _filled(bytes(head[_HEADER.size : end]), read)


def pack(doc: Any) -> bytes:
    """A document as bytes; see :class:`ArrayMessage`."""
    return bytes(ArrayMessage(doc))


def unpack(data: Any) -> Any:
    """The document of a message; bytes are arrays in it, and arrays are views not to be changed.

    Parameters
    ----------
    data : bytes-like, ArrayMessage or ReceivedMessage
    """
    if isinstance(data, ArrayMessage | ReceivedMessage):
        return data.opened()
    view = memoryview(data)
    end = _HEADER.size + _HEADER.unpack_from(view)[0]
    arrays = view[_aligned(end) :]

    def read(place, dtype, shape):
        return np.frombuffer(arrays, dtype, math.prod(shape), place).reshape(shape)

    return _filled(bytes(view[_HEADER.size : end]), read)


def _filled(text: bytes, read: Callable[[int, str, list[int]], np.ndarray]) -> Any:
    """The document with its arrays where they stood."""

    def fill(doc):
        if _ARRAY not in doc:
            return doc
        *place, is_tensor = doc[_ARRAY]
        array = read(*place)
        if not is_tensor:
            return array
        import torch

        return torch.from_numpy(array.copy())

    return json.loads(text, object_hook=fill)


def _aligned(position: int) -> int:
    return -(-position // _ALIGN) * _ALIGN


def _padding(length: int) -> bytes:
    """Return the bytes of padding after `length` bytes; an empty array takes some, too."""
    return b"\0" * (_aligned(max(length, 1)) - length)


# kind, line, is the message in a file, source, number of the frame, number of frames
_FRAME = struct.Struct("<cB?xIII")
PAYLOAD_BYTES = 4 << 20  # larger ones are copied more often on their way through the JVM


def frames_of(kind: bytes, source: int, data: Any, line: int = 0) -> Iterator[bytes]:
    """A message as frames.

    Parameters
    ----------
    kind : bytes
        One character.
    source : int
        The rank that it is from.
    data : bytes-like or ArrayMessage
    line : int
        Those who do not read this line pass over it.
    """
    parts = data.parts if isinstance(data, ArrayMessage) else [data]
    count = max(1, -(-len(data) // PAYLOAD_BYTES))
    for number, payload in enumerate(_payloads(parts, count)):
        yield b"".join((_FRAME.pack(kind, line, False, source, number, count), *payload))


def frame_of_file(kind: bytes, source: int, path: str, line: int = 0) -> bytes:
    """A frame for a message that lies in a file, where those who get it can read it."""
    return _FRAME.pack(kind, line, True, source, 0, 1) + path.encode()


def _payloads(parts, count) -> Iterator[list[memoryview]]:
    """Parts of bytes cut so that each of `count` lists holds a frame's payload."""
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
    """The frames that a task is given, read to the end and put in order.

    Spark fetches blocks in any order, and re-uses a Python worker only if its task has read all
    its input.

    Parameters
    ----------
    frames : iterable of bytes-like
    lines : collection of int, optional
        What is on others is passed over; default: nothing is.
    """

    def __init__(self, frames: Iterable, lines: Collection[int] | None = None):
        self._frames: dict[bytes, dict[int, dict[int, memoryview]]] = {}
        for frame in frames:
            kind, line, is_in_file, source, number, _ = _FRAME.unpack_from(frame, 0)
            if lines is None or line in lines:
                payload = memoryview(frame)[_FRAME.size :]
                if is_in_file:
                    payload = np.memmap(str(payload, "utf-8"), np.uint8, "r").data
                self._frames.setdefault(kind, {}).setdefault(source, {})[number] = payload

    def messages(self, kind: bytes) -> list:
        """All messages of a kind, in the order of the ranks that they are from."""
        by_source = self._frames.get(kind, {})
        return [_joined(by_source[source]) for source in sorted(by_source)]

    def message(self, kind: bytes) -> Any:
        """The only message of a kind, or None."""
        return next(iter(self.messages(kind)), None)

    def documents(self, kind: bytes) -> list:
        """The documents of all messages of a kind."""
        return [unpack(data) for data in self.messages(kind)]

    def document(self, kind: bytes) -> Any:
        """The document of the only message of a kind, or None."""
        return next(iter(self.documents(kind)), None)


def _joined(parts):
    if len(parts) == 1:
        return parts[0]
    return b"".join(parts[number] for number in range(len(parts)))


class Packable:
    """Base of what travels with arrays by their numbers, such as buffers."""

    numbered: ClassVar[tuple[str, ...]] = ("buffers",)  # attributes that hold such arrays

    def pack(self) -> bytes:
        """Return all of it as bytes."""
        return bytes(self.message())

    def message(self) -> ArrayMessage:
        """Return a view of it."""
        arrays = {name: list(getattr(self, name).items()) for name in self.numbered}
        return ArrayMessage({**vars(self), **arrays})

    @classmethod
    def unpack(cls, data: Any) -> Self:
        """The inverse of :meth:`pack` and :meth:`message`, with views of the data."""
        packable = cls(**unpack(data))
        for name in cls.numbered:
            setattr(packable, name, dict(getattr(packable, name)))
        return packable


@dataclass
class RankState(Packable):
    """A slice of the weights with all that belongs to it.

    Attributes
    ----------
    weights : ndarray of float32
        The slice, in full precision whatever is sent.
    optimizer : list of dict
        State of the optimizer, for each segment.
    buffers : dict of int to ndarray
        Those buffers of the model that are merged here and have changed since the start.
    residual : ndarray of float32 or None
        What encoding has taken from this rank's gradients, of all parameters.
    records : list of dict
        Times of the steps of this group, and on rank 0 what every rank had to say of its batch.
    is_halted : bool
        True if a step of this group was discarded: those after it are not made.
    """

    weights: np.ndarray
    optimizer: list[dict]
    buffers: dict[int, np.ndarray] = field(default_factory=dict)
    residual: np.ndarray | None = None
    records: list[dict] = field(default_factory=list)
    is_halted: bool = False

    def begin_group(self) -> None:
        """Forget what was only about the group before."""
        self.records, self.is_halted = [], False

    @classmethod
    def unpack(cls, data: Any) -> Self:
        """The inverse of :meth:`pack` and :meth:`message`; nothing is a view of the data."""
        state = super().unpack(data)
        state.weights = state.weights.copy()
        state.buffers = {number: buffer.copy() for number, buffer in state.buffers.items()}
        state.residual = None if state.residual is None else state.residual.copy()
        return state
