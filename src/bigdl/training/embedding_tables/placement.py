"""Placement of a model's tables: whole, or only the rows that one worker owns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from bigdl.runtime.worker import Worker
from bigdl.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class TablePlacement:
    """Rank, number of workers and folder of the worker that a model's tables are built for.

    Attributes
    ----------
    rank, world_size : int
        Rank of the worker and number of workers.
    folder : str or None
        Folder where the worker may write files.
    is_loaded : bool
        True if the rows come from a checkpoint and need no initialization.
    """

    rank: int = 0
    world_size: int = 1
    folder: str | None = None
    is_loaded: bool = False

    @classmethod
    def of(cls, worker: Worker) -> TablePlacement:
        """Return the placement of a worker."""
        options = worker.options
        has_slices = "snapshot" in options and Checkpoint.unpack_head(options["snapshot"]).slices
        is_loaded = bool(has_slices or options.get("slices"))
        return cls(worker.rank, worker.world_size, worker.local_dir, is_loaded)


NO_ROWS = TablePlacement(0, 0)  # a model without table rows
_current: ContextVar[TablePlacement | None] = ContextVar("placement", default=None)


@contextlib.contextmanager
def table_placement(placement: TablePlacement | None) -> Iterator[None]:
    """Context manager that sets the table placement of new models; None keeps the current one."""
    token = _current.set(placement or _current.get())
    try:
        yield
    finally:
        _current.reset(token)


def current_placement() -> TablePlacement | None:
    """Return the placement that the active :func:`table_placement` set, or None."""
    return _current.get()
