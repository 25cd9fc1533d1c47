"""Messages between ranks: a JSON-able document and arrays, whole or cut in frames.

No pickles: what arrives is data, and its numbers are views of the bytes that arrived.  Frames of a
few megabytes are for a carrier that mixes their order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

__all__ = ["Inbox", "Message", "frames_of", "pack", "unpack"]

_HEADER = struct.Struct("<QQ")  # bytes of the document, and of the list of arrays
_ALIGN = 8


class Message:
    """A document and arrays that nobody has copied yet; ``len`` is the number of its bytes.

    The arrays must not change before it has been copied to where it goes.

    Parameters
    ----------
    doc : object
        JSON-able.
    arrays : sequence of ndarray or bytes-like

    Attributes
    ----------
    parts : list of bytes-like
        One after another they are the message.
    """

    def __init__(self, doc, arrays: Sequence = ()):
        self._arrays = [
            np.frombuffer(a, np.uint8) if isinstance(a, bytes | bytearray | memoryview) else a
            for a in arrays
        ]
        self._text = json.dumps(doc).encode()
        listed = json.dumps([[a.dtype.str, list(a.shape)] for a in self._arrays]).encode()
        head = [_HEADER.pack(len(self._text), len(listed)), self._text, listed]
        head.append(_padding(sum(map(len, head))))
        self.parts: list = [b"".join(head)]
        for array in self._arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            self.parts += [data, _padding(data.nbytes)]

    def __len__(self):
        return sum(map(len, self.parts))

    def __bytes__(self):
        return b"".join(self.parts)

    def written(self) -> np.ndarray:
        """All of it in one array of bytes."""
        found, start = np.empty(len(self), np.uint8), 0
        for part in self.parts:
            stop = start + len(part)
            found[start:stop] = np.frombuffer(part, np.uint8)
            start = stop
        return found

    def opened(self) -> tuple:
        """The document and the arrays, as :func:`unpack` gives them where they arrive."""
        return json.loads(self._text), self._arrays


def pack(doc, arrays: Sequence = ()) -> bytes:
    """A document and arrays (or bytes) as bytes."""
    return bytes(Message(doc, arrays))


def unpack(data) -> tuple:
    """The document and the arrays of a message; the arrays are views, not to be written to.

    Parameters
    ----------
    data : bytes-like or Message
    """
    if isinstance(data, Message):
        return data.opened()
    texts, listed = _HEADER.unpack_from(data, 0)
    view = memoryview(data)
    start = _HEADER.size + texts
    doc = json.loads(bytes(view[_HEADER.size : start]))
    shapes = json.loads(bytes(view[start : start + listed]))
    start = _aligned(start + listed)
    arrays = []
    for code, shape in shapes:
        dtype = np.dtype(code)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(
            np.frombuffer(view, dtype, count, start).reshape(shape)
            if count
            else np.empty(shape, dtype)
        )
        start = _aligned(start + count * dtype.itemsize)
    return doc, arrays


def _aligned(position: int) -> int:
    return -(-position // _ALIGN) * _ALIGN


def _padding(length: int) -> bytes:
    return b"\0" * (_aligned(length) - length)


_FRAME = struct.Struct("<cBxxIII")  # kind, line, source, number of the frame, number of frames
_PAYLOAD = 4 << 20  # larger ones are copied more often on their way through the JVM


def frames_of(kind: bytes, source: int, data, line: int = 0) -> Iterator[bytes]:
    """A message as frames.

    Parameters
    ----------
    kind : bytes
        One character.
    source : int
        The rank that it is from.
    data : bytes-like or Message
    line : int
        Those who do not read this line pass over it.
    """
    parts = data.parts if isinstance(data, Message) else [data]
    count = max(1, -(-len(data) // _PAYLOAD))
    for number, payload in enumerate(_payloads(parts, count)):
        yield b"".join((_FRAME.pack(kind, line, source, number, count), *payload))


def _payloads(parts, count) -> Iterator[list[memoryview]]:
    """Parts of bytes cut so that each of `count` lists holds a frame's payload."""
    views = [memoryview(part) for part in parts]
    for _ in range(count):
        payload, room = [], _PAYLOAD
        while views and room:
            payload.append(views[0][:room])
            room -= len(payload[-1])
            views[0] = views[0][len(payload[-1]) :]
            if not len(views[0]):
                views.pop(0)
        yield payload


class Inbox:
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
            kind, line, source, number, _ = _FRAME.unpack_from(frame, 0)
            if lines is None or line in lines:
                payload = memoryview(frame)[_FRAME.size :]
                self._frames.setdefault(kind, {}).setdefault(source, {})[number] = payload

    def messages(self, kind: bytes) -> list:
        """All messages of a kind, in the order of the ranks that they are from."""
        found = self._frames.get(kind, {})
        return [_joined(found[source]) for source in sorted(found)]

    def message(self, kind: bytes):
        """The only message of a kind, or None."""
        found = self.messages(kind)
        return found[0] if found else None


def _joined(parts):
    if len(parts) == 1:
        return parts[0]
    return b"".join(parts[number] for number in range(len(parts)))
