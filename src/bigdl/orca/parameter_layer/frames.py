"""Messages cut in frames of a few megabytes, for a carrier that mixes their order."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator

from bigdl.orca.parameter_layer.messages import Message

__all__ = ["Inbox", "frames_of"]

_HEADER = struct.Struct("<cBxxIII")  # kind, line, source, number of the frame, number of frames
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
        yield b"".join((_HEADER.pack(kind, line, source, number, count), *payload))


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
            kind, line, source, number, _ = _HEADER.unpack_from(frame, 0)
            if lines is None or line in lines:
                payload = memoryview(frame)[_HEADER.size :]
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
