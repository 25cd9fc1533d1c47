"""A copy of a model in a rank of the parameter layer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigdl.orca.learn.layer_fit.rows import LayerRows, Place
from bigdl.orca.parameter_layer.buffers import changed
from bigdl.orca.parameter_layer.plan import Step
from bigdl.orca.parameter_layer.rank import Contribution
from bigdl.training.state import seed_everything

__all__ = ["LayerReplica"]


class LayerReplica(ABC):
    """Computes gradients of one rank's rows: a ``Replica`` of the parameter layer.

    Parameters
    ----------
    program : TorchReplicaProgram or KerasReplicaProgram
    rank : int
    """

    _initial: list[np.ndarray]  # what layers change, as it was at the start

    def __init__(self, program: Any, rank: int):
        self._settings, self._rank = program.settings, rank
        self._sampling = program.sampling
        self._place = Place(rank, program.ranks)

    def _read(self, data: Any, config: dict) -> None:
        """Take the rows of every step from `data`."""
        memory = config.get("shuffle_memory")
        self._rows = LayerRows(data, self._settings, self._rank, self._sampling, memory)

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _put(self, weights: np.ndarray, running: Sequence[np.ndarray]) -> None:
        """Bring the model where a step begins."""

    @abstractmethod
    def _gradient(self, batch: Any, rows: int, step: Step, began: float) -> Contribution:
        """What a batch contributes, but for what layers have changed.

        Parameters
        ----------
        batch : object
        rows : int
        step : Step
        began : float
            When the batch was there, by ``time.perf_counter``.
        """

    @abstractmethod
    def _running(self) -> list[np.ndarray]:
        """What layers change besides the trained weights, as it is now."""

    def _batch(self, step: Step, start: int, stop: int) -> Any:
        """The rows `start`...`stop` of a step's epoch, as the model takes them."""
        return self._rows.batch(step, start, stop)

    def _seed(self, step: Step) -> None:
        """Draw random numbers of this step and rank alone."""
        mixed = np.random.SeedSequence([self._settings.seed, step.epoch, step.number])
        seed_everything(int(mixed.generate_state(1)[0]), self._rank + 1)

    # -- what the parameter layer asks ---------------------------------------------------------

    def describe(self) -> dict:
        """What the driver needs to know of the rows; JSON-able."""
        return self._rows.describe()

    def compute(
        self, step: Step, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        """The gradient at `weights`; buffers that are not given are as they were at the start."""
        started = time.perf_counter()
        start, stop = step.ranges[self._rank]
        if start == stop:
            return Contribution(record={"loss": 0.0, "counted": 0.0})
        batch = self._batch(step, start, stop)
        fetched = time.perf_counter()
        before = [buffers.get(number, kept) for number, kept in enumerate(self._initial)]
        self._put(weights, before)
        self._seed(step)
        found = self._gradient(batch, stop - start, step, fetched)
        found.record |= {"counted": found.counted, "fetch_s": fetched - started}
        found.buffers = changed(before, self._running())
        return found

    def close(self) -> None:
        """End what the data has started."""
        self._place.close()
