"""Locks, owners, preallocation and mappings of files, and files in memory."""

from __future__ import annotations

import atexit
import contextlib
import errno
import getpass
import mmap
import os
import random
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from bigdl.common.timeouts import LOCK_LOOK_S

if sys.platform != "win32":
    import fcntl

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mman.h; macOS reserves no memory
_MAP_FIXED = 0x10  # from mman.h of Linux and macOS
_COPY_BYTES = 1 << 20
_LOCKED_BYTES = 1 << 20  # of a lock on Windows: a shared one takes one of these bytes
_LOCK_OFFSET = 1 << 30  # after all bytes of a lock file, which others must be able to read

DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Error numbers of a full disk and an exceeded quota."""


# Owners -------------------------------------------------------------------------------------------


def user_id() -> str:
    """Return the user's number, or on Windows a name of letters, digits and ``_``."""
    if sys.platform == "win32":
        with contextlib.suppress(ImportError, OSError):  # a service may have no name
            return re.sub(r"\W", "_", getpass.getuser())
        return "user"
    return str(os.geteuid())


def is_own(status: os.stat_result) -> bool:
    """Return True if this user owns a file; always on Windows, which has no such numbers."""
    return sys.platform == "win32" or status.st_uid == os.geteuid()


def is_of_root(status: os.stat_result) -> bool:
    """Return True if the administrator owns a file, also in a container that does not map root."""
    return status.st_uid in (0, *_unmapped_root())


def has_modes() -> bool:
    """Return True if files have owners and modes; Windows has access lists instead."""
    return sys.platform != "win32"


def is_closed_to_others(status: os.stat_result, mode: int = 0o077) -> bool:
    """Return True if a file's mode has none of the given bits; always on Windows."""
    return sys.platform == "win32" or not status.st_mode & mode


def is_replaceable(status: os.stat_result, mode: int = 0o022) -> bool:
    """Return True if other users may replace files in a folder, as its mode has the given bits."""
    if sys.platform == "win32":
        return False
    return bool(status.st_mode & mode and not status.st_mode & stat.S_ISVTX)


def make_private(path: str) -> None:
    """Remove other users' permissions on a folder of this user; follow no link."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _unmapped_root() -> list[int]:
    """Return the user id of the host's root in a container that does not map this user."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return []
        return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    except (OSError, ValueError):
        return []


# Locks --------------------------------------------------------------------------------------------


def lock(file: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until its descriptor is closed or the process ends.

    Parameters
    ----------
    file : int
        Descriptor of a file, or the result of :func:`open_folder`.
    shared : bool, default False
        Let other processes hold shared locks, too. A held lock of the other type is converted.
    wait : bool, default True
        Wait until no other process holds a conflicting lock.

    Raises
    ------
    BlockingIOError
        If another process holds a conflicting lock and `wait` is False.
    OSError
        If the file system has no locks.
    """
    if sys.platform != "win32":
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, operation | (0 if wait else fcntl.LOCK_NB))
        return
    import msvcrt

    held = _held.pop(file, None)
    if held is not None:
        os.lseek(file, held[0], os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, held[1])
    while True:
        start = _LOCK_OFFSET + (random.randrange(_LOCKED_BYTES) if shared else 0)
        count = 1 if shared else _LOCKED_BYTES
        os.lseek(file, start, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, count)
        except OSError as error:
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from error
            time.sleep(LOCK_LOOK_S)
        else:
            _held[file] = start, count
            return


_position_lock = threading.Lock()  # a descriptor on Windows has one position for all threads
_held: dict[int, tuple[int, int]] = {}  # on Windows: the locked bytes of each descriptor


def open_folder(path: str) -> int:
    """Open a folder for :func:`lock` and return its descriptor; follow no link.

    Windows cannot open folders: this opens a file with the suffix ``.lock`` next to it.

    Raises
    ------
    OSError
        If the folder does not exist.
    """
    if sys.platform != "win32":
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not os.path.isdir(path) or os.path.islink(path):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", path)
    return os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)


def close_folder(path: str, descriptor: int) -> None:
    """Close the result of :func:`open_folder`, which releases its lock."""
    _held.pop(descriptor, None)
    os.close(descriptor)
    if sys.platform == "win32" and not os.path.isdir(path):
        with contextlib.suppress(OSError):  # another process has opened it
            os.unlink(f"{path}.lock")


def is_open_folder(path: str, descriptor: int) -> bool:
    """Return True if a path still leads to the folder that :func:`open_folder` opened."""
    try:
        if sys.platform == "win32":
            return os.path.isdir(path)
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def unlink_open(path: str) -> None:
    """Remove a file that this process has open or mapped; Windows removes it at exit."""
    try:
        os.unlink(path)
    except PermissionError:
        if sys.platform != "win32":
            raise
        atexit.register(_remove_quietly, path)


def unlink_unused(path: str | Path) -> None:
    """Remove a file if it exists; on Windows, only if no process has it open or mapped."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except PermissionError:
        if sys.platform != "win32":
            raise


def _remove_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


# Content ------------------------------------------------------------------------------------------


def reserve(file: int, size: int) -> None:
    """Allocate the first bytes of a file on the disk, or only set its size.

    Raises
    ------
    OSError
        If the disk has less space, where the system can reserve it; otherwise writing raises it.
    """
    if sys.platform == "linux" and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif os.fstat(file).st_size < size:
        os.ftruncate(file, size)


def write_at(file: int, content: memoryview, offset: int) -> int:
    """Write bytes at an offset and return their number, which may be smaller.

    Threads may write to one descriptor at the same time.
    """
    if sys.platform != "win32":
        return os.pwrite(file, content, offset)
    import msvcrt

    with _position_lock:
        msvcrt.setmode(file, os.O_BINARY)  # of text, a line feed would become two bytes
        os.lseek(file, offset, os.SEEK_SET)
        return os.write(file, content)


def read_part(file: int, size: int, offset: int) -> bytes:
    """Read at most `size` bytes of an open file from an offset; threads may call this at once."""
    if sys.platform != "win32":
        return os.pread(file, size, offset)
    import msvcrt

    with _position_lock:
        msvcrt.setmode(file, os.O_BINARY)
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, size)


def read_whole(file: int) -> bytes:
    """Read an open file from its first byte, also if its path was removed."""
    parts: list[bytes] = []
    offset = 0
    while True:
        part = read_part(file, _COPY_BYTES, offset)
        if not part:
            return b"".join(parts)
        parts.append(part)
        offset += len(part)


def copy_range(source: IO[bytes], target: IO[bytes], start: int, count: int) -> None:
    """Append bytes of a file to another, in the kernel if possible.

    Parameters
    ----------
    source, target : file
        The target has no buffered bytes.
    start : int
        Offset of the first byte in the source.
    count : int

    Raises
    ------
    EOFError
        If the source ends before.
    """
    if sys.platform == "linux" and hasattr(os, "sendfile"):  # others send to sockets only
        while count:
            sent = os.sendfile(target.fileno(), source.fileno(), start, count)
            if sent == 0:
                raise EOFError("the file is shorter than its chunks")
            start, count = start + sent, count - sent
        return
    source.seek(start)
    while count:
        content = source.read(min(count, _COPY_BYTES))
        if not content:
            raise EOFError("the file is shorter than its chunks")
        target.write(content)
        count -= len(content)
    target.flush()


def sync_folder(path: str | Path) -> None:
    """Write the names of a folder's files to the disk; Windows does this itself."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Mappings -----------------------------------------------------------------------------------------


def map_private(file: int, size: int = 0) -> mmap.mmap:
    """Map a file writable; written pages are copied and the file never changes.

    Parameters
    ----------
    file : int
        Descriptor; it may be closed afterwards.
    size : int, default 0
        Number of bytes; 0 maps the whole file.
    """
    if sys.platform != "linux":
        return mmap.mmap(file, size, access=mmap.ACCESS_COPY)
    # NORESERVE: the kernel would refuse a reserve for files larger than its memory.
    return mmap.mmap(
        file,
        size,
        flags=mmap.MAP_PRIVATE | _NORESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )


def can_map_together() -> bool:
    """Return True if :func:`map_together` is supported: not on Windows."""
    return sys.platform != "win32"


def map_together(files: Iterable[tuple[str, int, int]], size: int) -> mmap.mmap:
    """Map files into one range of addresses, as :func:`map_private` does with one file.

    Parameters
    ----------
    files : iterable of (str, int, int)
        Path, offset in the range, and number of bytes of each file; offsets are multiples of the
        page size.
    size : int
        Number of bytes of the range; bytes of no file are zero.

    Raises
    ------
    OSError
        If a file cannot be opened or mapped, and on Windows.
    """
    if sys.platform == "win32":
        raise OSError("Windows cannot map several files into one range of addresses")
    import ctypes

    flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    whole = mmap.mmap(-1, size, flags | mmap.MAP_ANONYMOUS, access)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    map_file = ctypes.CDLL(None, use_errno=True).mmap
    map_file.restype = ctypes.c_void_p
    for path, offset, count in files:
        with open(path, "rb") as file:
            mapped = map_file(
                ctypes.c_void_p(address + offset),
                ctypes.c_size_t(count),
                access,
                flags | _MAP_FIXED,
                file.fileno(),
                ctypes.c_long(0),
            )
        if mapped != address + offset:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return whole


def map_shared(file: int, size: int = 0, *, writable: bool = False) -> mmap.mmap:
    """Map a file; its bytes are those of all processes that map it.

    Parameters
    ----------
    file : int
        Descriptor; it may be closed afterwards.
    size : int, default 0
        Number of bytes; 0 maps the whole file.
    writable : bool, default False
    """
    return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)


def advise(mapped: mmap.mmap, *, at_random: bool) -> None:
    """Tell the kernel whether a mapped file is read at random, without read-ahead."""
    if sys.platform != "win32":
        mapped.madvise(mmap.MADV_RANDOM if at_random else mmap.MADV_NORMAL)


def advise_address(start: int, size: int, *, at_random: bool) -> None:
    """Tell the kernel how mapped bytes at an address are read; see :func:`advise`."""
    if sys.platform == "win32":
        return
    import ctypes

    advice = mmap.MADV_RANDOM if at_random else mmap.MADV_NORMAL
    libc = ctypes.CDLL(None)
    if hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


# Files without a name -----------------------------------------------------------------------------


def has_memory_files() -> bool:
    """Return True if the system has anonymous files in memory."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def memory_file(name: str) -> int:
    """Create an anonymous file in memory and return its descriptor.

    Raises
    ------
    OSError
        If the system has none; see :func:`has_memory_files`.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    raise OSError("This system has no anonymous memory files")


def anonymous_file(folder: str | None, name: str = "file-") -> int:
    """Create a file in a folder that disappears with its descriptor, and return that."""
    if sys.platform == "win32":
        path = os.path.join(folder or tempfile.gettempdir(), f"{name}{random.getrandbits(64):x}")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_TEMPORARY | os.O_BINARY)
    descriptor, path = tempfile.mkstemp(prefix=name, dir=folder)
    os.unlink(path)
    return descriptor


def remove_folder(path: str) -> None:
    """Remove a folder; ignore errors, such as a file that a process has open on Windows."""
    shutil.rmtree(path, ignore_errors=True)


def link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, which must not exist; copy it if the system has no links.

    Raises
    ------
    FileExistsError
        If the target exists.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # another file system, or one without links
        with open(source, "rb") as file, open(target, "xb") as copy:
            shutil.copyfileobj(file, copy, _COPY_BYTES)


# Shell --------------------------------------------------------------------------------------------


def shell(program: str) -> Sequence[str] | None:
    """Return the command line that runs a POSIX shell script, or None if there is no shell."""
    return ["/bin/sh", "-c", program] if sys.platform != "win32" else None
