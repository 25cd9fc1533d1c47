"""Memory of the running process: its limit, and glibc's allocator settings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator

from bigdl.common.platform.memory import available_memory, glibc, mallopt, trim
from bigdl.common.platform.processes import at_fork

__all__ = [
    "available_memory",
    "freeze_modules",
    "glibc_tunables",
    "release_memory",
    "return_freed_blocks",
    "tune_allocator",
    "tuned_allocator",
]

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_LARGEST_THRESHOLD_OF_OLD_GLIBC = 32 << 20
_TOP_PAD_OF_GLIBC = 128 << 10
_MMAP_THRESHOLD = 1 << 30
_TOP_PAD = 64 << 20
_RETURNED_BLOCK = 1 << 20


def tune_allocator(trim_threshold: int | None = None) -> bool:
    """Make glibc keep freed memory in this process instead of returning it to the kernel.

    By default glibc maps every large buffer and unmaps it when it is freed. A model that allocates
    its activations in each step then pays for a page fault on each page of them, a third of its
    CPU time at batch sizes of 16 and more. In exchange, the process stays at its peak size.

    Parameters
    ----------
    trim_threshold : int, optional
        Free bytes at the top of the heap above which they are returned; default: never.

    Returns
    -------
    bool
        Whether the allocator was tuned. False if the allocator is not glibc's (another libc, or
        jemalloc, tcmalloc or mimalloc in ``LD_PRELOAD``), or if ``GLIBC_TUNABLES`` sets its
        threshold; nothing changes then.
    """
    # -1 becomes the largest size_t: no trimming at all. No other C int can express that.
    trim = -1 if trim_threshold is None else trim_threshold
    return _set_thresholds(_MMAP_THRESHOLD, trim, _TOP_PAD)


def _set_thresholds(mmap_threshold: int, trim_threshold: int, top_pad: int) -> bool:
    set_option = None if _is_tuned_by_user() else mallopt()
    if set_option is None:
        return False
    tuned = _set_mmap_threshold(set_option, mmap_threshold) is not None
    tuned &= bool(set_option(_M_TRIM_THRESHOLD, trim_threshold))
    tuned &= bool(set_option(_M_TOP_PAD, top_pad))
    return tuned


_tuned = 0  # contexts of tuned_allocator that have not ended
_tuned_lock = threading.Lock()
# A fork waits until no thread resets the allocator: the child would inherit a locked lock.
at_fork(
    before=_tuned_lock.acquire,
    after_in_parent=_tuned_lock.release,
    after_in_child=_tuned_lock.release,
)


def return_freed_blocks() -> bool:
    """Make glibc return freed blocks of 1 MiB and more to the kernel at once.

    Each of them then costs a page fault per page when it is allocated again. Without this, a
    process whose large blocks have different lifetimes keeps their sum.

    Returns
    -------
    bool
        Whether the allocator was changed, see :func:`tune_allocator`.
    """
    return _set_thresholds(_RETURNED_BLOCK, _RETURNED_BLOCK, _TOP_PAD_OF_GLIBC)


@contextlib.contextmanager
def tuned_allocator(
    trim_threshold: int | None = None, *, returns_blocks: bool = False
) -> Iterator[bool]:
    """Context manager that applies :func:`tune_allocator` and finally releases freed memory.

    Contexts may overlap: the first sets the thresholds and the last resets them. Afterwards
    buffers of up to 32 MiB come from the heap, the limit of glibc's adaptive threshold. The
    adaptation itself cannot be turned on again.

    Parameters
    ----------
    trim_threshold : int, optional
        As for :func:`tune_allocator`.
    returns_blocks : bool
        Apply :func:`return_freed_blocks` instead.

    Yields
    ------
    bool
        Whether the allocator is tuned.
    """
    global _tuned
    with _tuned_lock:
        tuned = _tuned > 0 or (
            return_freed_blocks() if returns_blocks else tune_allocator(trim_threshold)
        )
        _tuned += tuned
    try:
        yield tuned
    finally:
        if tuned:
            with _tuned_lock:
                _tuned -= 1
                if _tuned == 0:
                    largest = _LARGEST_THRESHOLD_OF_OLD_GLIBC
                    _set_thresholds(largest, 2 * largest, _TOP_PAD_OF_GLIBC)
                    trim()


def glibc_tunables() -> dict[str, str]:
    """Return the ``GLIBC_TUNABLES`` that start a process with a tuned allocator.

    Only setting a threshold shows whether glibc accepts it, so the calling process keeps the first
    of these thresholds.

    Returns
    -------
    dict of str to str
        Names and values, to be joined by ``=`` and ``:``. Empty where glibc is not in use.
    """
    libc = glibc()
    if libc is None:
        return {}
    threshold = _set_mmap_threshold(libc.mallopt, _MMAP_THRESHOLD)
    if threshold is None:
        return {}
    return {
        "glibc.malloc.mmap_threshold": str(threshold),
        "glibc.malloc.trim_threshold": str(ctypes.c_size_t(-1).value),  # never
        "glibc.malloc.top_pad": str(_TOP_PAD),
    }


def _set_mmap_threshold(set_option: Callable[[int, int], int], threshold: int) -> int | None:
    """Set the mmap threshold, or old glibc's maximum if this fails; return the value or None."""
    for value in (threshold, min(threshold, _LARGEST_THRESHOLD_OF_OLD_GLIBC)):
        if set_option(_M_MMAP_THRESHOLD, value):
            return value
    return None


_frozen_modules = 0


def freeze_modules() -> None:
    """Exclude the loaded modules from garbage collection.

    PySpark runs a full collection after each task of a Python worker, and servers run one at times.
    With torch loaded it takes about 60 ms, longer than many tasks or requests. Call this at the
    start of each task or once a server is ready; it costs time only if modules were loaded since
    the last call.
    """
    global _frozen_modules
    if len(sys.modules) != _frozen_modules:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def release_memory() -> None:
    """Return memory that Arrow and the C library have freed to the kernel."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()
    trim()


def _is_tuned_by_user() -> bool:
    return "glibc.malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
