"""What travels between ranks: a JSON-able document and arrays, in one piece of bytes.

No pickles: what arrives is data, and its numbers are views of the bytes that arrived.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np

__all__ = ["Message", "pack", "unpack"]

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
