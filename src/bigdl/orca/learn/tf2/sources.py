"""Where a worker's batches of training come from, whatever the input was.

A source goes over its rows again and again; one time is a *pass*.  :meth:`seek` brings it to a
batch of a pass, and :meth:`next` gives this worker's part of the following one, on all ranks
together.  An epoch is one pass, or, with ``steps_per_epoch``, so many batches of one pass after
the other.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

__all__ = ["Part", "PlannedSource"]


class Part(NamedTuple):
    """A worker's part of a global batch.

    Attributes
    ----------
    batch : tuple or None
        ``(x, y)`` or ``(x, y, weights)``; None without rows.
    rows : int
        Of this worker.
    total : int
        Of all workers; 0 at the end of a pass.
    """

    batch: Any
    rows: int
    total: int


class PlannedSource:
    """Rows that can be reached by number, cut in batches by a plan.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    plan : BatchPlan
    assembly : Assembly
    settings : KerasFitSettings
    rank : int
    window : int
        Rows that are shuffled at a time; 0 for all.

    Attributes
    ----------
    steps : int
        Batches of a pass.
    """

    def __init__(self, data, plan, assembly, settings, rank: int, window: int):
        self._data, self._plan, self._assembly = data, plan, assembly
        self._settings, self._rank, self._window = settings, rank, window
        self._pass, self._step = 0, 0
        self._order: Any = None
        self.steps = plan.steps

    def seek(self, number: int, step: int) -> None:
        """Go to a batch of a pass; batches beyond its end belong to the following ones."""
        self._pass, self._step = number + step // self.steps, step % self.steps
        self._open()

    def next(self, *, wrap: bool) -> Part:
        """The next batch; at the end of a pass the first of the next one, or nothing."""
        if self._step == self.steps:
            if not wrap:
                return Part(None, 0, 0)
            self._pass, self._step = self._pass + 1, 0
            self._open()
        start, stop, total = self._plan.batch(self._step, self._rank)
        self._step += 1
        if start == stop:
            return Part(None, 0, total)
        columns = self._data.batch(start, stop, self._order)
        return Part(self._assembly(columns), stop - start, total)

    def _open(self):
        settings, plan = self._settings, copy.copy(self._plan)
        steps = range(self._step, self.steps)
        self._order = self._data.order(
            settings.shuffle,
            settings.seed,
            self._pass,
            self._rank,
            self._window,
            lambda: (plan.batch(step, self._rank)[:2] for step in steps),
        )
