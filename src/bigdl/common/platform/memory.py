"""The C library's allocator, the memory of a process and the memory of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bigdl.common.platform.cores import cgroup_directories, read_text
from bigdl.common.timeouts import MEMORY_LOOK_S

_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_NO_LIMIT = 1 << 60  # cgroup v1 encodes "no limit" as the largest multiple of a page
_STACK_T_BYTES = 24  # of sigaltstack(2): a pointer, a size and an int, in any order
_MEMORY_KILLED_FIRST = "1000"  # the highest score of /proc/self/oom_score_adj

PRELOAD = "LD_PRELOAD"
"""Environment variable that lists libraries which a program loads first."""


# The C library ------------------------------------------------------------------------------------


def c_library() -> ctypes.CDLL | None:
    """Return the C library of this process; None on Windows."""
    return None if sys.platform == "win32" else ctypes.CDLL(None)


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None."""
    libc = c_library()
    return libc if libc is not None and hasattr(libc, "gnu_get_libc_version") else None


def mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's ``mallopt``, or None if its allocator is not in use or cannot be tuned."""
    if preloaded_allocator() is not None:
        return None
    libc = glibc()
    return None if libc is None else libc.mallopt


def trim() -> None:
    """Return memory freed by the C library's allocator to the kernel (glibc only)."""
    libc = c_library()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def preloads(environ: Mapping[str, str]) -> list[str]:
    """Return the libraries that an environment preloads, separated by blanks or colons."""
    return environ.get(PRELOAD, "").replace(":", " ").split()


def can_preload() -> bool:
    """Return True if libraries can be preloaded into programs by :data:`PRELOAD`."""
    return sys.platform not in ("win32", "darwin")


def preloaded_allocator() -> str | None:
    """Return the name of the allocator that this process has preloaded, or None."""
    preloaded = os.environ.get(PRELOAD, "")
    return next((name for name in _ALLOCATORS if name in preloaded), None)


@contextlib.contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Context manager that restores this thread's alternate signal stack on exit (POSIX)."""
    libc = c_library()
    if libc is None or not hasattr(libc, "sigaltstack"):
        yield
        return
    before = ctypes.create_string_buffer(_STACK_T_BYTES)
    known = libc.sigaltstack(None, before) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaltstack(before, None)


# Memory -------------------------------------------------------------------------------------------


def available_memory(root: str | Path = "/") -> int:
    """Return the bytes that this process can allocate without swapping or being killed.

    Parameters
    ----------
    root : str or Path
        Directory that contains ``proc`` and ``sys``.

    Returns
    -------
    int
        ``MemAvailable`` of the machine, or the rest of the control group's or an ancestor's limit
        if that is less. Page cache that the kernel can drop counts as available.
    """
    kilobytes = re.search(r"^MemAvailable: *(\d+) kB$", read_text(Path(root, "proc/meminfo")), re.M)
    if kilobytes is not None:
        rooms = [int(kilobytes[1]) << 10]
    elif str(root) == "/":
        import psutil

        rooms = [int(psutil.virtual_memory().available)]
    else:
        rooms = [total_memory()]
    for directory in cgroup_directories("memory", root):
        limit = _first_number(directory, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _first_number(directory, "memory.current", "memory.usage_in_bytes") or 0
        counters = dict(
            line.split() for line in read_text(directory / "memory.stat").splitlines() if line
        )
        # In v1, total_inactive_file includes the descendants, inactive_file does not.
        cache = counters.get("total_inactive_file", counters.get("inactive_file", "0"))
        rooms.append(limit - used + int(cache))
    return max(0, min(rooms))


def allocatable_memory(processes: int = 1) -> int:
    """Return the bytes that this process can allocate if others allocate as much.

    Parameters
    ----------
    processes : int
        Number of processes that share the memory of the machine, including this one.

    Returns
    -------
    int
        Its part of :func:`available_memory`, or the rest of its limit (``ulimit -d`` or ``-v``) if
        that is less.
    """
    rooms = [available_memory() // max(1, processes)]
    if sys.platform != "win32":
        import resource

        status = read_text(Path("/proc/self/status"))
        for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            used = re.search(rf"^{name}:\s*(\d+) kB", status, re.M)
            if (size := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY and used:
                rooms.append(size - (int(used[1]) << 10))
    return max(0, min(rooms))


def total_memory() -> int:
    """Return the bytes of the machine's memory."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        if sys.platform != "win32":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.virtual_memory().total)


def shared_memory_space() -> int | None:
    """Return the free bytes of the folder for shared memory; None if the system has none."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def peak_memory() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PeakMeter:
    """Meter of the resident memory of this process in a ``with`` block.

    Linux resets and reads the kernel's peak. Elsewhere a thread samples the memory.

    Attributes
    ----------
    peak : int
        Largest resident memory in the block, in bytes; known after it.
    """

    peak = 0

    def __enter__(self) -> PeakMeter:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        except OSError:
            self._sample()
            self._thread = threading.Thread(target=self._watch, name="bigdl-memory", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        peak = re.search(r"VmHWM:\s*(\d+) kB", read_text(Path("/proc/self/status")))
        if peak is not None:
            self.peak = int(peak[1]) << 10
        else:
            self._sample()

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_LOOK_S):
            self._sample()

    def _sample(self) -> None:
        import psutil

        self.peak = max(self.peak, int(psutil.Process().memory_info().rss))


def be_killed_first() -> None:
    """Make the kernel end this process first when memory runs out, where it can be asked to."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MEMORY_KILLED_FIRST)


def _first_number(directory: Path, *names: str) -> int | None:
    """Return the integer in the first of the named system files that contains an integer."""
    texts = (read_text(directory / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)
