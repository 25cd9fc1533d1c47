"""Memory that processes of one machine share, identified by a process id and a number."""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import secrets
import weakref
from collections.abc import Callable

from bigdl.common.platform.files import has_memory_files, map_shared, memory_file

_NAME = "bigdl"
_NUMBER_BITS = 48  # exact in a 64-bit float, in which numbers may be sent


class SharedPages:
    """New shared memory, which other processes of this user can map while this object exists.

    On Linux it is an anonymous memory file, which its last user frees. Elsewhere it is a mapped
    temporary file, whose name contains a random number.

    Parameters
    ----------
    size : int
        Size in bytes.
    folder : callable
        Returns the folder for a temporary file. The folder is removed with this process.

    Raises
    ------
    OSError
        If the memory cannot be created.

    Attributes
    ----------
    pages : mmap.mmap
        The memory; it stays valid without this object.
    number : int
        Number for :func:`map_shared_pages`.
    """

    def __init__(self, size: int, folder: Callable[[], str]):
        if _has_process_files():
            self.number = memory_file(_NAME)
            weakref.finalize(self, os.close, self.number)
            os.truncate(self.number, size)
            self.pages = map_shared(self.number, size, writable=True)
            return
        self.number = secrets.randbits(_NUMBER_BITS)
        path = os.path.join(folder(), _file_name(os.getpid(), self.number))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, _remove, path)
        try:
            os.truncate(file, size)
            self.pages = map_shared(file, size, writable=True)
        finally:
            os.close(file)


def map_shared_pages(process: int, number: int, root: Callable[[], str]) -> mmap.mmap:
    """Map the :class:`SharedPages` of a process of this machine, read-only.

    Parameters
    ----------
    process : int
        Its process id.
    number : int
        :attr:`SharedPages.number`.
    root : callable
        Returns the parent of the folders for temporary files.

    Raises
    ------
    OSError
        If this process cannot read it.
    """
    if _has_process_files():
        path = f"/proc/{process}/fd/{number}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # another process may have this id
            raise FileNotFoundError(f"{path} is not shared memory")
    else:
        name = _file_name(process, number)
        paths = glob.glob(os.path.join(glob.escape(root()), "*", name))
        if not paths:
            raise FileNotFoundError(f"there is no shared memory {name}")
        path = paths[0]
    with open(path, "rb") as file:
        return map_shared(file.fileno())


def _has_process_files() -> bool:
    """Return True if processes can open the memory files of other processes."""
    return has_memory_files() and os.path.isdir("/proc/self/fd")


def _file_name(process: int, number: int) -> str:
    return f"memory-{process}-{number:012x}"


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # it is mapped, on Windows: removed with its folder
        os.unlink(path)
