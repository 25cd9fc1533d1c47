"""Keras models that several workers of a trial train together.

Each batch is shared out as for PyTorch, and gradients meet where Keras hands them to the optimizer
(:mod:`bigdl.training.keras.reducer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import batch_size_of, part_of
from bigdl.orca.automl.model.base_keras_model import KerasBaseModel, one_or_list
from bigdl.orca.automl.model.rows import Rows

__all__ = ["SharedKerasModel"]


@dataclass(frozen=True)
class _Batch:
    """A batch of all workers; ``take(start, stop)`` gives ``(x, y, weights)`` of some rows."""

    rows: int
    take: Callable[[int, int], tuple]


class SharedKerasModel(KerasBaseModel):
    """A Keras model in training, of one of several workers.

    Parameters
    ----------
    model : keras.Model
    config : dict
        See :class:`~bigdl.orca.automl.model.base_keras_model.KerasBaseModel`.
    sync : GradientSync
        Which has started.
    """

    def __init__(self, model, config: Mapping[str, Any], sync):
        super().__init__(model, config)
        self._sync = sync
        self._steps: Any = None

    def fit_epoch(self, data, epoch):
        self.model.reset_metrics()
        batches = 0
        for batch in self._batches(data, epoch):
            if self._steps is None:
                self._prepare(batch.take(0, 1))
            self._train(batch)
            batches += 1
        if not batches:
            raise UsageError("The training data has no rows")
        self._steps.running.merge()
        if self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def figures(self, data, metrics):
        """The first worker computes them, since Keras computes its own metrics by itself."""
        values = [0.0] * len(metrics)
        if self._sync.rank == 0:
            values = super().figures(data, metrics)
        return self._sync.all_gather(values)[0]

    def _prepare(self, example):
        """Build the model, as that of the first worker, and let gradients meet."""
        from bigdl.training.keras.data import build_for
        from bigdl.training.keras.reducer import WorkerSteps
        from bigdl.training.keras.state import share_state

        build_for(self.model, example)
        steps = WorkerSteps(self.model, self._sync, batch_size_of(self.config))
        share_state(self.model, self._sync)
        steps.attach()
        self._steps, self._example = steps, example

    def _train(self, batch: _Batch):
        """Make an update from a batch, of which this worker computes its part."""
        start, stop = part_of(batch.rows, self._sync.rank, self._sync.world_size)
        part = batch.take(start, stop) if stop > start else None
        self._steps.train(part, stop - start, batch.rows, self._example)

    # -- batches -----------------------------------------------------------------------------------

    def _batches(self, data, epoch: int) -> Iterator[_Batch]:
        return self._of_rows(data, epoch) if isinstance(data, Rows) else self._of_dataset(data)

    def _of_rows(self, rows: Rows, epoch: int) -> Iterator[_Batch]:
        from bigdl.runtime.shards.batches import permutation

        size, count = batch_size_of(self.config), len(rows)
        shuffle = self.config.get("shuffle", True)
        order = permutation(count, self.config.get("seed", 0), epoch, 0) if shuffle else None

        def batch(first):
            def take(start, stop):
                places = slice(first + start, first + stop)
                places = places if order is None else order[places]
                x, y = (
                    [np.array(a[places]) for a in part] for part in (rows.features, rows.targets)
                )
                return one_or_list(x), one_or_list(y), None

            return _Batch(min(size, count - first), take)

        yield from map(batch, range(0, count, size))

    def _of_dataset(self, data) -> Iterator[_Batch]:
        import keras

        for given in self._dataset(data):
            leaves = keras.tree.map_structure(np.asarray, tuple(given))

            def take(start, stop, leaves=leaves):
                x, y, *weights = keras.tree.map_structure(lambda leaf: leaf[start:stop], leaves)
                return x, y, weights[0] if weights else None

            yield _Batch(len(keras.tree.flatten(leaves)[0]), take)
