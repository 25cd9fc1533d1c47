"""What a launched worker prints, on its way to the parent's streams and to log files."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from itertools import pairwise
from typing import BinaryIO

_TAIL_LINES = 20
_LONGEST_TAIL_LINE = 2000
_LONGEST_LINE = 1 << 20
# A progress bar ends its lines with a carriage return. One at the end of what was read may be the
# first half of "\r\n" and waits for more.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")


class WorkerStream:
    """One output stream of one worker.

    Parameters
    ----------
    pipe : BinaryIO
        The parent's end, unbuffered.
    name : str
        ``"stdout"`` or ``"stderr"``: the stream of the parent that gets the lines, looked up in
        ``sys`` at each write, as notebooks and test runners replace it.
    prefix : str
        Put before each line in the parent's stream.
    log : BinaryIO or None
        Gets the bytes as they are; unbuffered.
    show : bool
        Whether the parent's stream gets the lines.
    """

    def __init__(self, pipe: BinaryIO, name: str, prefix: str, log: BinaryIO | None, show: bool):
        self.pipe = pipe
        self._name = name
        self._prefix = prefix
        self._log = log
        self._show = show
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Pass on what is there; False when the worker has closed the stream."""
        chunk = self._take()
        self._feed(chunk or b"")
        return chunk != b""

    def drain(self) -> None:
        """Pass on all that a worker which has ended left behind."""
        while chunk := self._take():
            self._feed(chunk)
        if self._rest:
            self._pass([self._rest.rstrip(b"\r") + b"\n"])
            self._rest = b""

    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self._tail)

    def _take(self) -> bytes | None:
        """Bytes from the pipe: none at its end, None if there are none at the moment."""
        try:
            return os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return None

    def _feed(self, chunk: bytes) -> None:
        if self._log is not None:
            self._log.write(chunk)
        self._rest += chunk
        ends = [0, *(match.end() for match in _LINE_END.finditer(self._rest))]
        lines = [self._rest[start:stop] for start, stop in pairwise(ends)]
        self._rest = self._rest[ends[-1] :]
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest + b"\n")
            self._rest = b""
        self._pass(lines)

    def _pass(self, lines: list[bytes]) -> None:
        texts = [line.decode("utf-8", errors="replace") for line in lines]
        self._tail.extend(text.rstrip("\r\n")[:_LONGEST_TAIL_LINE] for text in texts)
        target = getattr(sys, self._name)
        if self._show and texts and target is not None:
            target.write("".join(self._prefix + text for text in texts))
            target.flush()
