"""Memory of a fit that is kept for the next one.

What a fit frees goes back to the kernel when the allocator's context ends
(:func:`bigdl.common.memory.tuned_allocator`), and the next fit pays for a page fault on each page
of it: a third of a million for a ResNet50 on batches of 64. Fits often follow each other closely:
in a search, in a cross-validation, in the cells of a notebook. So a context outlives a fit by a
minute, and a thread ends it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from bigdl.common.memory import tuned_allocator

__all__ = ["keep_memory", "release_memory"]

_SECONDS = 60.0


class _Kept:
    """The context that outlives fits, and the timer that ends it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._context = ExitStack()
        self._timer: threading.Timer | None = None

    def keep(self, seconds: float) -> None:
        """Let the context end so many seconds from now."""
        with self.lock:
            if self._timer is None:
                self._context.enter_context(tuned_allocator())
            else:
                self._timer.cancel()
            self._timer = threading.Timer(seconds, self._expire)
            self._timer.name, self._timer.daemon = "bigdl-kept-memory", True
            self._timer.start()

    def release(self) -> None:
        """End the context, and its thread."""
        with self.lock:
            timer, self._timer = self._timer, None
            self._context.close()
        if timer is not None:
            timer.cancel()
            timer.join()
            _wait_until_gone(timer)

    def unlock_in_fork(self) -> None:
        """In a copy of the process, which has no thread that would end the context."""
        self._timer = None
        self.lock.release()

    def _expire(self) -> None:
        with self.lock:
            if threading.current_thread() is self._timer:  # no fit has ended since
                self._timer = None
                self._context.close()


def _wait_until_gone(thread: threading.Thread) -> None:
    """Wait for the system, by whose count of threads a fork is refused; Python is done first."""
    entry = Path(f"/proc/self/task/{thread.native_id}")
    give_up = time.monotonic() + 1
    while entry.exists() and time.monotonic() < give_up:
        time.sleep(0.001)


_kept = _Kept()


# A fork waits until no memory is being given back: its locks would stay closed in the copy.
os.register_at_fork(
    before=_kept.lock.acquire,
    after_in_parent=_kept.lock.release,
    after_in_child=_kept.unlock_in_fork,
)


def keep_memory(seconds: float = _SECONDS) -> None:
    """Keep what this process has freed for some time, for a fit that may follow.

    To be called before the allocator's context of the last fit ends. Nothing happens where the
    allocator cannot be tuned.

    Parameters
    ----------
    seconds : float
        From now on; a later call starts anew.
    """
    _kept.keep(seconds)


def release_memory() -> None:
    """Give back what is kept, at once: other processes are about to need it."""
    _kept.release()
