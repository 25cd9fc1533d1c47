"""Python objects on their way between two processes of one machine, through a Unix socket.

Arrays and tensors do not go through the socket. Their bytes lie in a memory file that has no name
(``memfd_create``), and the socket carries its descriptor: the sender copies once, the receiver
maps the file and works on it in place. Nothing of it can stay behind in ``/dev/shm``, whose size,
64 MB in most containers, does not matter either. Small arrays, and all where there are no memory
files, travel in the message itself.

A :class:`Message` can be passed on without being opened.
"""

from __future__ import annotations

import array
import functools
import io
import mmap
import os
import pickle
import socket
import struct
import sys
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

__all__ = ["Message", "decode", "encode", "receive", "send"]

_IN_MEMORY_FILE = 1 << 18  # bytes of arrays from which on they are worth one
_ALIGNMENT = 64  # of an array in the blob: a cache line, and what AVX512 likes
# kind, bytes of the pickle, number of arrays, bytes of the blob, whether it is in a memory file
_HEADER = struct.Struct("=BQQQ?")


@dataclass
class Message:
    """A pickled object and, apart from it, the bytes of its arrays.

    Attributes
    ----------
    pickled : bytes
        The object without its arrays (protocol 5).
    sizes : list of int
        Bytes of each array.
    blob : bytearray
        The arrays, if they are not in a memory file.
    memory : int or None
        Descriptor of the memory file, to be closed.
    """

    pickled: bytes
    sizes: list[int]
    blob: bytearray
    memory: int | None = None

    def close(self) -> None:
        """Let go of the memory file; what was decoded from it keeps it."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


def encode(value: Any) -> Message:
    """Turn an object into a message.

    Lambdas, closures and classes of a script travel (``cloudpickle``); a tensor keeps its memory
    format and loses its gradient.

    Parameters
    ----------
    value : object
        Anything that can be pickled.

    Returns
    -------
    Message
        To be closed by its owner.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _pickler()(file, protocol=5, buffer_callback=buffers.append).dump(value)
    arrays = [buffer.raw() for buffer in buffers]
    sizes = [len(each) for each in arrays]
    places = _places(sizes)
    memory = _memory_file(arrays, places) if places[-1] >= _IN_MEMORY_FILE else None
    blob = bytearray(places[-1] if memory is None else 0)
    if memory is None:
        for content, start in zip(arrays, places, strict=False):
            blob[start : start + len(content)] = content
    return Message(file.getvalue(), sizes, blob, memory)


def decode(message: Message) -> Any:
    """The object in a message. Its arrays are its own to write to, and lie in the message."""
    places = _places(message.sizes)
    content: Any = message.blob
    if message.memory is not None:
        # Private: a message may be decoded by several processes.
        content = mmap.mmap(message.memory, places[-1], flags=mmap.MAP_PRIVATE)
    view = memoryview(content)
    arrays = [
        view[start : start + size] for size, start in zip(message.sizes, places, strict=False)
    ]
    return pickle.loads(message.pickled, buffers=arrays)


def send(line: socket.socket, kind: int, message: Message) -> None:
    """Send a message; it stays open.

    Parameters
    ----------
    line : socket.socket
        A stream of ``AF_UNIX``.
    kind : int
        A byte for the receiver to know what this is.
    message : Message
        What to send.
    """
    in_file = message.memory is not None
    header = _HEADER.pack(
        kind, len(message.pickled), len(message.sizes), len(message.blob), in_file
    )
    if message.memory is not None:
        socket.send_fds(line, [header], [message.memory])
    else:
        line.sendall(header)
    line.sendall(array.array("Q", message.sizes).tobytes() + message.pickled)
    if message.blob:
        line.sendall(message.blob)


def receive(line: socket.socket) -> tuple[int, Message]:
    """Wait for a message.

    Parameters
    ----------
    line : socket.socket
        A stream of ``AF_UNIX``.

    Returns
    -------
    kind : int
        As the sender gave it.
    message : Message
        To be closed by its owner.

    Raises
    ------
    EOFError
        If the other side is gone.
    """
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    try:
        start, descriptors, _, _ = socket.recv_fds(line, _HEADER.size, 1, flags)
    except ConnectionError as error:
        raise EOFError from error
    memory = descriptors[0] if descriptors else None
    try:
        header = start + bytes(_exactly(line, _HEADER.size - len(start)))
        kind, pickled, count, blob, _ = _HEADER.unpack(header)
        sizes = array.array("Q", bytes(_exactly(line, 8 * count))).tolist()
        message = Message(bytes(_exactly(line, pickled)), sizes, _exactly(line, blob), memory)
    except BaseException:
        if memory is not None:
            os.close(memory)
        raise
    return kind, message


def _exactly(line: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    done = 0
    while done < size:
        try:
            got = line.recv_into(view[done:])
        except ConnectionError as error:
            raise EOFError from error
        if not got:
            raise EOFError
        done += got
    return content


def _places(sizes: list[int]) -> list[int]:
    """Where each array begins, and at last where the blob ends."""
    rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return list(accumulate(rounded, initial=0))


def _memory_file(arrays: list[memoryview], places: list[int]) -> int | None:
    """A memory file with the arrays; None where there can be none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        memory = os.memfd_create("bigdl-message")
    except OSError:
        return None
    try:
        os.truncate(memory, places[-1])
        # Written, not mapped: memory that is not there is an error here and not a bus error.
        for content, start in zip(arrays, places, strict=False):
            done = 0
            while done < len(content):
                done += os.pwrite(memory, content[done:], start + done)
    except OSError:
        os.close(memory)
        return None
    return memory


@functools.cache
def _pickler() -> type:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value):
            reduced = _reduced_tensor(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return Pickler


def _reduced_tensor(value: Any) -> Any:
    """How to make a plain tensor on the CPU anew from its bytes, in the order of its memory."""
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


def _rebuilt_tensor(content: Any, dtype: Any, shape: tuple[int, ...], order: list[int]) -> Any:
    import torch

    if 0 in shape:
        dense = torch.empty(shape, dtype=dtype)
    else:
        dense = torch.frombuffer(content, dtype=dtype).view(shape)
    return dense.permute([order.index(axis) for axis in range(len(order))])
