"""Python objects that are sent between two local processes through a pipe.

The pipe is a duplex pipe of :mod:`multiprocessing`. It carries small objects, and all objects on
systems without memory files. The bytes of a large object are in an anonymous memory file
(``memfd_create``), whose descriptor the pipe carries. The sender copies once; the receiver maps the
file and uses its arrays in place. No file can remain in ``/dev/shm``, and the small size of
``/dev/shm`` in containers, often 64 MB, does not matter.

A :class:`PickledMessage` can be forwarded without being unpickled.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.platform.files import map_private, memory_file, write_at
from bigdl.common.platform.network import can_send_files
from bigdl.runtime.serialization import value_pickler

if TYPE_CHECKING:
    import torch

_IN_MEMORY_FILE = 1 << 18  # minimum bytes for a memory file
_PIECE = 1 << 30  # bytes of the content that the pipe carries at once
_ALIGNMENT = 64  # bytes, for arrays: a cache line and an AVX-512 register


@dataclass
class PickledMessage:
    """A pickled object with its arrays in separate buffers.

    Attributes
    ----------
    sizes : list of int
        Bytes of the pickle (protocol 5) without its arrays, then of each array.
    content : bytearray
        The bytes, unless they are in a memory file.
    memory : int or None
        Descriptor of the memory file, which the owner closes.
    failed : bool
        Whether the object is a :class:`~bigdl.runtime.failure.Failure` instead of a result.
    """

    sizes: list[int]
    content: bytearray
    memory: int | None = None
    failed: bool = False

    def close(self) -> None:
        """Close the memory file of the message; decoded objects stay valid."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


def encode(value: object) -> PickledMessage:
    """Pickle an object into a message.

    ``cloudpickle`` pickles lambdas, closures and classes of a script. A tensor keeps its memory
    format and loses its gradient.

    Parameters
    ----------
    value : object
        Any object that can be pickled.

    Returns
    -------
    PickledMessage
        The caller closes it.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _pickler()(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [len(part) for part in parts]
    offsets = _part_offsets(sizes)
    memory = _memory_file(parts, offsets) if offsets[-1] >= _IN_MEMORY_FILE else None
    content = bytearray(offsets[-1] if memory is None else 0)
    if memory is None:
        for part, start in zip(parts, offsets, strict=False):
            content[start : start + len(part)] = part
    return PickledMessage(sizes, content, memory)


def encoded(value: object, what: str) -> PickledMessage:
    """Pickle an object into a message; on failure, raise a UsageError about `what`."""
    try:
        return encode(value)
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent to a worker: {error}", code="model-copy"
        ) from error


def decode(message: PickledMessage, *, writable: bool = True) -> Any:  # the object that was sent
    """Unpickle a message; its arrays share the message's memory, and are writable by default."""
    offsets = _part_offsets(message.sizes)
    content: Any = message.content
    if message.memory is not None:
        # Private: a message may be decoded by several processes.
        content = map_private(message.memory, offsets[-1])
    view = memoryview(content) if writable else memoryview(content).toreadonly()
    pickled, *arrays = [
        view[start : start + size] for size, start in zip(message.sizes, offsets, strict=False)
    ]
    return pickle.loads(pickled, buffers=arrays)


def opened(message: PickledMessage) -> Any:  # the object that was sent
    """Unpickle a message and close it."""
    try:
        return decode(message)
    finally:
        message.close()


def send(connection: Connection, message: PickledMessage) -> None:
    """Send a message over a pipe; the message stays open."""
    connection.send((message.sizes, message.memory is not None, message.failed))
    if message.memory is None:
        for part in _pieces(message.content):
            connection.send_bytes(part)
    else:
        send_handle(connection, message.memory, None)


def receive(connection: Connection) -> PickledMessage:
    """Receive a message from a pipe; the caller closes it.

    Raises
    ------
    EOFError
        If the other side has closed the pipe.
    """
    try:
        sizes, in_memory_file, failed = connection.recv()
        if in_memory_file:
            memory = recv_handle(connection)
            os.set_inheritable(memory, False)
            return PickledMessage(sizes, bytearray(), memory, failed)
        content = bytearray(_part_offsets(sizes)[-1])
        for part in _pieces(content):
            connection.recv_bytes_into(part)
        return PickledMessage(sizes, content, failed=failed)
    except ConnectionError as error:
        raise EOFError from error


def _pieces(content: bytearray) -> list[memoryview]:
    """Divide bytes into parts that a pipe of any system can carry, one if they are few."""
    whole = memoryview(content)
    return [whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE)] or [whole]


def _part_offsets(sizes: list[int]) -> list[int]:
    """Return the aligned byte offset of each part of a message, followed by the total size."""
    rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return list(accumulate(rounded, initial=0))


def _memory_file(parts: list[memoryview], offsets: list[int]) -> int | None:
    """Write message parts to a new memory file; return its descriptor, or None on failure."""
    if not can_send_files():
        return None
    try:
        memory = memory_file("bigdl-message")
    except OSError:
        return None
    try:
        os.truncate(memory, offsets[-1])
        # Written, not mapped: missing memory then raises OSError instead of SIGBUS.
        for content, start in zip(parts, offsets, strict=False):
            done = 0
            while done < len(content):
                done += write_at(memory, content[done:], start + done)
    except OSError:
        os.close(memory)
        return None
    return memory


@functools.cache
def _pickler() -> type:
    class TensorPickler(value_pickler()):  # type: ignore[misc]  # created on first use
        def reducer_override(self, value: object) -> object:
            reduced = _reduced_tensor(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return TensorPickler


def _reduced_tensor(value: Any) -> object:
    """Return a pickle reduction that rebuilds a plain CPU tensor from its bytes."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not getattr(torch, "Tensor", None):
        return NotImplemented
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        return NotImplemented
    tensor = value.detach().resolve_conj().resolve_neg()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        tensor, order = tensor.contiguous(), list(range(tensor.dim()))
    dense = tensor.permute(order)
    content = pickle.PickleBuffer(dense.reshape(-1).view(torch.uint8).numpy())
    return _rebuilt_tensor, (content, tensor.dtype, tuple(dense.shape), order)


def _rebuilt_tensor(
    content: bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]
) -> torch.Tensor:
    import torch

    if 0 in shape:
        dense = torch.empty(shape, dtype=dtype)
    else:
        dense = torch.frombuffer(content, dtype=dtype).view(shape)
    return dense.permute([order.index(axis) for axis in range(len(order))])
