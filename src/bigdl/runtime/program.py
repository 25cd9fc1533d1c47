"""What the jobs of all engines share: their numbers, and programs on their way to the workers."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from bigdl.common.errors import UsageError, require

__all__ = ["active_jobs", "job_number", "pickled"]

_lock = threading.Lock()
_numbers = itertools.count()
_active: set[int] = set()


@contextlib.contextmanager
def job_number() -> Iterator[int]:
    """A number among the jobs of this driver, whose spools stay until the end of the block."""
    with _lock:
        number = next(_numbers)
        _active.add(number)
    try:
        yield number
    finally:
        with _lock:
            _active.discard(number)


def active_jobs() -> tuple[int, ...]:
    """The numbers of the jobs whose spools are in use."""
    with _lock:
        return tuple(sorted(_active))


def pickled(fn: Callable) -> bytes:
    """A program by value, so that lambdas and classes of a notebook work.

    Raises
    ------
    UsageError
        If it is no function, or refers to something that cannot be pickled.
    """
    cloudpickle = require("cloudpickle", "orca")
    if not callable(fn):
        raise UsageError(f"fn should be a function of a worker, got {type(fn).__name__}")
    try:
        return cloudpickle.dumps(fn)
    except Exception as error:
        raise UsageError(
            f"The program cannot be shipped to the workers, since it refers to something that "
            f"cannot be pickled ({error}); create such objects inside the function instead"
        ) from error
