"""One object of the driver for all workers, stored once on each machine.

The driver pickles the object, with its arrays in separate buffers. On each machine, the first
worker that opens the object copies it over the :mod:`~bigdl.runtime.channel` to a file, in a folder
that only this user can enter. All workers of the machine map the file, so its arrays are in memory
once. The last of them removes the file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bigdl.common.platform.files import read_part
from bigdl.common.private_folders import SharedFolder, private_root
from bigdl.runtime.channel import CHUNK, AttemptChannel
from bigdl.runtime.messages import PickledMessage, decode, encoded

_READ = "shared object"  # name of the channel's function


@dataclass(frozen=True)
class SharedReference:
    """Reference to an object of the driver, sent to the workers.

    Attributes
    ----------
    token : str
        Random name of the object.
    sizes : tuple of int
        Bytes of each part of the pickled object.
    length : int
        Bytes of the file.
    """

    token: str
    sizes: tuple[int, ...]
    length: int

    @contextmanager
    def open(self, channel: AttemptChannel) -> Iterator[Any]:
        """Context manager that yields the object; its arrays are read-only."""
        name = f"data-{self.token[:-8]}.{self.token[-8:]}"  # a name of temporary folders
        folder = SharedFolder(os.path.join(private_root(), name))
        path = os.path.join(folder.path, "data")
        try:
            with folder.writing():
                if not os.path.exists(path):
                    self._copy(channel, f"{path}.new")
                    os.replace(f"{path}.new", path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                message = PickledMessage(list(self.sizes), bytearray(), descriptor)
                value = decode(message, writable=False)
            finally:
                os.close(descriptor)
            yield value
        finally:
            folder.close()

    def _copy(self, channel: AttemptChannel, path: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            for start in range(0, self.length, CHUNK):
                file.write(channel.call_bytes(_READ, str(start).encode()))


class SharedObject:
    """The driver's side of an object that workers open by its `reference`.

    Parameters
    ----------
    value : object
        An object that can be pickled.
    name : str
        Its name in the error message if it cannot be pickled.
    """

    def __init__(self, value: object, name: str):
        self._message = encoded(value, name)
        self._thread = ThreadPoolExecutor(1, "bigdl-data")
        memory, content = self._message.memory, self._message.content
        length = len(content) if memory is None else os.fstat(memory).st_size
        token = secrets.token_hex(16)
        self.reference = SharedReference(token, tuple(self._message.sizes), length)

    def serve(self, channel: AttemptChannel) -> None:
        """Answer the workers of an attempt."""
        channel.answer_bytes(_READ, self._read, self._thread)

    def close(self) -> None:
        """Release the object."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._message.close()

    def _read(self, request: bytes) -> bytes:
        start = int(request)
        if self._message.memory is None:
            return bytes(self._message.content[start : start + CHUNK])
        return read_part(self._message.memory, CHUNK, start)
