"""From what the ranks recorded of the steps of a Keras model to the figures of an epoch."""

from __future__ import annotations

import json

import numpy as np

from bigdl.orca.learn.layer_fit.figures import LayerFigures

__all__ = ["KerasLayerFigures"]


class KerasLayerFigures(LayerFigures):
    """:class:`~bigdl.orca.learn.layer_fit.figures.LayerFigures`, and what metrics add up to.

    Parameters
    ----------
    ranks : int
    sums : bool

    Attributes
    ----------
    added : list of ndarray of float64
        What the batches so far have added to the states of the metrics.
    memory : list of int
        The most bytes that each rank's process has had.
    """

    def __init__(self, ranks: int, *, sums: bool):
        super().__init__(ranks, weighted=False, sums=sums)
        self.added: list[np.ndarray] = []
        self.memory = [0] * ranks
        self._logs: dict[str, float] = {}  # sums over rows
        self._rows = 0

    def _add_step(self, sources, seconds):
        for rank, source in enumerate(sources):
            if "metrics" not in source:  # it had no rows
                continue
            found = [np.asarray(values, np.float64) for values in source["metrics"]]
            before = self.added or [np.zeros_like(values) for values in found]
            self.added = [a + b for a, b in zip(before, found, strict=True)]
            for name, value in source["logs"].items():
                self._logs[name] = self._logs.get(name, 0.0) + value * source["rows"]
            self._rows += source["rows"]
            self.memory[rank] = max(self.memory[rank], source["memory"])
        return super()._add_step(sources, seconds)

    def means(self) -> dict[str, float]:
        """What the steps returned, as means over the rows."""
        return {name: total / self._rows for name, total in self._logs.items()}

    def dump(self) -> bytes:
        """What is not in the sums of the ranks, for a checkpoint inside an epoch."""
        added = [values.tolist() for values in self.added]
        return json.dumps([added, self._logs, self._rows]).encode()

    def put(self, data: bytes) -> None:
        """The inverse of :meth:`dump`."""
        added, self._logs, self._rows = json.loads(data)
        self.added = [np.asarray(values, np.float64) for values in added]
