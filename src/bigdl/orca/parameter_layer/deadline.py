"""A computation that others wait for only so long.

What is late is not ended, since nothing can end a thread in the middle of native code. It goes on
by itself, and the next computation of the process waits for it, because both would use the same
model and the same random generators; that wait counts as its own time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["within"]

T = TypeVar("T")


class _Computation(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, compute: Callable[[], T]):
        self._compute = compute
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="bigdl-contribution").start()

    def _run(self):
        try:
            self._value = self._compute()
        except BaseException as error:  # raised where the result is taken
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended; waits for that at most so long."""
        return self._done.wait(None if seconds is None else max(0.0, seconds))

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


_late: list[_Computation] = []  # of this process: at most one


def within(seconds: float | None, compute: Callable[[], T]) -> T | None:
    """What `compute` gives, or None if that takes longer.

    Parameters
    ----------
    seconds : float or None
        None waits for it, however long it takes.
    compute : callable

    Raises
    ------
    Exception
        What `compute` raised, or what the late computation before it has raised since.
    """
    end = None if seconds is None else time.monotonic() + seconds
    if _late:
        if not _late[0].wait(_left(end)):
            return None
        _late.pop().result()
    if end is None:
        return compute()
    begun = _Computation(compute)
    if not begun.wait(_left(end)):
        _late.append(begun)
        return None
    return begun.result()


def _left(end):
    return None if end is None else end - time.monotonic()
