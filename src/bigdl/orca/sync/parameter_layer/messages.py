"""What travels between ranks: a JSON-able document and arrays, in one piece of bytes.

No pickles: what arrives is data, and its numbers are views of the bytes that arrived.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np

__all__ = ["pack", "unpack"]

_HEADER = struct.Struct("<QQ")  # bytes of the document, and of the list of arrays
_ALIGN = 8


def pack(doc, arrays: Sequence = ()) -> bytes:
    """A document and arrays (or bytes) as bytes."""
    arrays = [
        np.frombuffer(a, np.uint8) if isinstance(a, bytes | bytearray | memoryview) else a
        for a in arrays
    ]
    text = json.dumps(doc).encode()
    listed = json.dumps([[a.dtype.str, list(a.shape)] for a in arrays]).encode()
    parts = [_HEADER.pack(len(text), len(listed)), text, listed]
    parts.append(_padding(sum(map(len, parts))))
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts += [data, _padding(data.nbytes)]
    return b"".join(parts)


def unpack(data) -> tuple:
    """The document and the arrays, which are read-only views, of :func:`pack`."""
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
