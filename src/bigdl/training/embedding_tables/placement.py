"""Where a model is made: whole, or on a worker that has some rows of its tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from bigdl.runtime.worker import Worker
from bigdl.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class TablePlacement:
    """Where a model is made.

    Attributes
    ----------
    rank, world_size : int
        Of the worker.
    folder : str or None
        Where it may write files.
    is_loaded : bool
        True if rows come from a checkpoint, so that they need no first values.
    """

    rank: int = 0
    world_size: int = 1
    folder: str | None = None
    is_loaded: bool = False

    @classmethod
    def of(cls, worker: Worker) -> TablePlacement:
        """Return the place of a worker."""
        options = worker.options
        has_slices = "snapshot" in options and Checkpoint.unpack_head(options["snapshot"]).slices
        is_loaded = bool(has_slices or options.get("slices"))
        return cls(worker.rank, worker.world_size, worker.local_dir, is_loaded)


NO_ROWS = TablePlacement(0, 0)  # a model without the rows of its tables
_place: ContextVar[TablePlacement | None] = ContextVar("place", default=None)


@contextlib.contextmanager
def table_placement(place: TablePlacement | None) -> Iterator[None]:
    """Make models for a place within the block; None leaves it to a block around this one."""
    token = _place.set(place or _place.get())
    try:
        yield
    finally:
        _place.reset(token)


def current_placement() -> TablePlacement | None:
    """Return the place of the block around this call."""
    return _place.get()
