"""Keras models that several workers of a trial train together.

Each batch is shared out as for PyTorch, and gradients meet where Keras hands them to the optimizer
(:mod:`bigdl.orca.learn.tf2.reducer`).
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
        self._running.merge()
        self._running.rows = 0
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
        from bigdl.orca.learn.tf2.opening import build_for
        from bigdl.orca.learn.tf2.parts import fit_divisor
        from bigdl.orca.learn.tf2.reducer import GradientReducer
        from bigdl.orca.learn.tf2.running import RunningWeights
        from bigdl.orca.learn.tf2.state import (
            dump_optimizers,
            dump_weights,
            put_optimizers,
            put_weights,
        )
        from bigdl.orca.learn.tf2.steps import steps_of

        build_for(self.model, example)
        self._divisor = fit_divisor(self.model)
        for dump, put in ((dump_weights, put_weights), (dump_optimizers, put_optimizers)):
            state = self._sync.broadcast(dump(self.model) if self._sync.rank == 0 else None)
            if self._sync.rank:
                put(self.model, state)
        self._spread_seeds()
        self._reducer = GradientReducer(self._sync, batch_size_of(self.config))
        self._reducer.attach(self.model)
        self._running = RunningWeights(self.model, self._sync)
        self._steps = steps_of(self.model)

    def _spread_seeds(self):
        """Let random layers draw other numbers than those of the first worker."""
        from bigdl.orca.learn.tf2.state import seed_states, tensor_of

        if self._sync.rank:
            for variable in seed_states(self.model):
                entropy = [*(int(n) for n in tensor_of(variable).reshape(-1)), self._sync.rank]
                drawn = np.random.SeedSequence(entropy).generate_state(variable.shape[0]) >> 1
                variable.assign(drawn.astype("int64"))

    def _train(self, batch: _Batch):
        """One update from a batch, of which this worker computes its part."""
        start, stop = part_of(batch.rows, self._sync.rank, self._sync.world_size)
        given = batch.take(start, stop) if stop > start else None
        self._reducer.weight = self._weight(given, stop - start, batch.rows)
        self._reducer.has_rows = given is not None
        self._running.rows += stop - start
        try:
            if given is None:
                self._step_along(batch)
            else:
                self._steps.train(given)
        except Exception:
            if self._reducer.failure is not None:  # the backend has made another one of it
                raise self._reducer.failure from None
            raise

    def _weight(self, given, rows: int, total: int) -> float:
        """The weight of this worker's loss in that of the batch."""
        if self._divisor == "none":
            return float(rows > 0)
        own, every = float(rows), float(total)
        if self._divisor == "weights":
            if given is not None and given[2] is not None:
                own = float(np.asarray(given[2], "float64").sum())
            every = sum(each for (each,) in self._sync.all_gather([own]))
        return own / every if every else 0.0

    def _step_along(self, batch: _Batch):
        """Take part in a step without rows of one's own."""
        from bigdl.orca.learn.tf2.running import changed_by_rows
        from bigdl.orca.learn.tf2.state import tensor_of, to_variable

        before = [(variable, tensor_of(variable)) for variable in changed_by_rows(self.model)]
        self._steps.train(batch.take(0, 1))
        for variable, value in before:
            to_variable(variable, value)

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
