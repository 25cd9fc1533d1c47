"""Statistics of a model that every worker makes from its own rows, such as BatchNorm's."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

__all__ = ["RunningState"]


class RunningState(ABC):
    """What layers change besides the weights, merged over the workers at every epoch's end.

    A floating value becomes the mean over the workers, weighted by the rows that each has seen
    since the last merge; an integer one (a counter) becomes the largest.  A value that no worker
    has changed, such as a mask or a positional encoding, is left alone to the last bit.

    Parameters
    ----------
    model : torch.nn.Module or keras.Model
        Of equal values on all ranks.
    sync : GradientSync

    Attributes
    ----------
    rows : int
        Rows that this worker has seen since the last merge; the loop adds to it.
    """

    def __init__(self, model, sync):
        self._model, self._sync = model, sync
        self.rows = 0
        self._merged = self.own()

    @abstractmethod
    def own(self) -> list:
        """A copy of this worker's values, as tensors."""

    @abstractmethod
    def put(self, values: list) -> None:
        """Set this worker's values, e.g. to what :meth:`own` gave."""

    def merge(self) -> None:
        """Make the values of all workers equal; a collective."""
        self.put(self._merge())
        self.rows = 0
        self._merged = self.own()

    @contextlib.contextmanager
    def merged(self):
        """Have merged values for the time of the block; a collective.

        What a checkpoint holds does not depend on when it is taken, and to take it does not change
        the run.
        """
        own = self.own()
        self.put(self._merge())
        try:
            yield
        finally:
            self.put(own)

    def _merge(self) -> list:
        import torch

        values = self.own()
        if self._sync.world_size == 1 or not values:
            return values
        changed = [float(not torch.equal(a, b)) for a, b in zip(values, self._merged, strict=True)]
        everyone = self._sync.all_gather([float(self.rows), *changed])
        rows = sum(row[0] for row in everyone)
        for i, value in enumerate(values):
            if not any(row[1 + i] for row in everyone):
                continue
            if not (value.is_floating_point() or value.is_complex()):
                kind = torch.uint8 if value.dtype == torch.bool else torch.int64
                values[i] = self._sync.all_reduce(value.to(kind), "max").to(value.dtype)
                continue
            share = self.rows / rows if rows else 1.0 / len(everyone)
            # what a worker without rows has may be anything, a nan included
            part = value * share if share else torch.zeros_like(value)
            values[i] = self._sync.all_reduce(part.contiguous())
        return values
