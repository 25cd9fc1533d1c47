"""The rows of one rank of the parameter layer, from which every step takes its own."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.plan import Step
from bigdl.orca.parameter_layer.rank import Contribution, changed
from bigdl.training.batches import BatchSource, TensorShard
from bigdl.training.state import seed_everything


class ReplicaWorker:
    """Rank, world size and exit functions of a replica, in place of a worker."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self._resources = contextlib.ExitStack()
        self.at_exit, self.close = self._resources.callback, self._resources.close


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
        self._place = ReplicaWorker(rank, program.ranks)
        self._order: tuple[int, Any] = (-1, None)  # of an epoch

    def _read(self, data: BatchSource, config: dict) -> None:
        """Take the rows of every step from `data`.

        Of ``config["shuffle_memory"]`` bytes shuffled rows may take, all of them by default: a
        replica that is made again elsewhere shuffles alike, so it must not depend on what is free.

        Raises
        ------
        UsageError
            If the data cannot be sampled as the program says.
        """
        if self._sampling == "window" and not isinstance(data, TensorShard):
            raise UsageError(
                "sampling='window' needs rows that are side by side, and a DataLoader is read "
                "sample by sample; leave sampling= out or pass arrays"
            )
        memory = config.get("shuffle_memory")
        self._data, self._window = data, 0 if memory is None else data.window(memory)

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _put(self, weights: np.ndarray, running: Sequence[np.ndarray]) -> None:
        """Bring the model where a step begins."""

    @abstractmethod
    def _gradient(self, batch: Any, rows: int, step: Step, began: float) -> Contribution:
        """Return the contribution of a batch, but for what layers have changed.

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
        """Return what layers change besides the trained weights, as it is now."""

    def _batch(self, step: Step, start: int, stop: int) -> Any:
        """The rows `start`...`stop` of a step's epoch, as the model takes them."""
        settings, data = self._settings, self._data
        if step.epoch != self._order[0]:
            order = data.order(
                settings.shuffle, settings.seed, step.epoch, self._rank, self._window, tuple
            )
            self._order = step.epoch, order
        order = self._order[1]
        if self._sampling == "exact":
            return data.batch(start, stop, order)
        key = [settings.seed, step.epoch, step.number, self._rank]
        first = int(np.random.default_rng(key).integers(data.rows))
        places = (first + np.arange(stop - start)) % data.rows
        if order is not None:
            whole = order if isinstance(order, np.ndarray) else order[0 : data.rows]
            places = whole[places]
        return data.batch(0, stop - start, places)

    def _seed(self, step: Step) -> None:
        """Draw random numbers of this step and rank alone."""
        mixed = np.random.SeedSequence([self._settings.seed, step.epoch, step.number])
        seed_everything(int(mixed.generate_state(1)[0]), self._rank + 1)

    # -- what the parameter layer asks ---------------------------------------------------------

    def describe(self) -> dict:
        """Return what the driver needs to know of the rows; JSON-able."""
        return {**self._data.facts(self._window), "inputs": self._data.inputs}

    def compute(
        self, step: Step, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        """The gradient at `weights`; buffers that are not given are as they were at the start."""
        started = time.perf_counter()
        start, stop = step.ranges[self._rank]
        if start == stop:
            return Contribution()
        batch = self._batch(step, start, stop)
        fetched = time.perf_counter()
        before = [buffers.get(number, kept) for number, kept in enumerate(self._initial)]
        self._put(weights, before)
        self._seed(step)
        contribution = self._gradient(batch, stop - start, step, fetched)
        contribution.record |= {"counted": contribution.counted, "fetch_s": fetched - started}
        contribution.buffers = changed(before, self._running())
        return contribution

    def close(self) -> None:
        """End what the data has started."""
        self._place.close()
