"""Copies of the model in Python processes: made once, used for all steps of a training.

As long as there is one, the process keeps the memory that it frees: every step needs the same
large arrays again, and to map them anew costs more than to sum them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from bigdl.common.memory import tuned_allocator

__all__ = ["close_replicas", "replica_of"]

_open: dict[tuple, tuple[Any, Any]] = {}  # training and rank -> what it was made for, replica
_memory = contextlib.ExitStack()


def replica_of(training: str, rank: int, version: Any, make: Callable[[], Any]):
    """This process' replica of a rank; those of other trainings are closed.

    Parameters
    ----------
    training : str
    rank : int
    version : object
        What it depends on; a replica of another version is made anew.
    make : callable
    """
    close_replicas(except_of=training)
    found = _open.get((training, rank))
    if found is None or found[0] != version:
        if found is not None:
            del _open[training, rank]
            _close(found[1])
        made = make()
        if not _open:
            _memory.enter_context(tuned_allocator())
        found = _open[training, rank] = version, made
    return found[1]


def close_replicas(except_of: str | None = None) -> None:
    """Let go of the replicas in this process."""
    for place in [p for p in _open if p[0] != except_of]:
        _close(_open.pop(place)[1])
    if not _open:
        _memory.close()


def _close(replica):
    close = getattr(replica, "close", None)
    if close is not None:
        close()
