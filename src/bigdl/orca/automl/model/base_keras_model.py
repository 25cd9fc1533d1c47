"""Keras models in a search.

Several workers of a trial share out each batch as for PyTorch, and gradients meet where Keras hands
them to the optimizer (:mod:`bigdl.training.keras.reducer`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.metrics import Evaluator
from bigdl.orca.automl.model.base import (
    Builder,
    Model,
    as_list,
    batch_size_of,
    concatenated,
    figures_of,
    part_of,
)
from bigdl.orca.automl.model.data import Batch, Rows

__all__ = ["KerasModelBuilder"]

_MODES = {"loss": "min", "acc": "max", "auc": "max"}


class KerasModelBuilder(Builder):
    """Makes a compiled Keras model.

    Parameters
    ----------
    model_creator : callable
        ``f(config)``.

    Raises
    ------
    UsageError
        If it is no function.
    """

    takes_workers = True

    def __init__(self, model_creator: Callable):
        if isinstance(model_creator, type) or not callable(model_creator):
            raise UsageError(
                "model_creator must be a function of the configuration that returns a compiled "
                f"Keras model, got {type(model_creator).__name__}"
            )
        self.model_creator = model_creator

    def build(self, config, *, epochs=1, use_gpu=False, sync=None):
        model = self.compiled(config)
        return (
            _KerasModel(model, config) if sync is None else _SharedKerasModel(model, config, sync)
        )

    def load(self, config, weights):
        model = self.compiled(config)
        _load_weights(model, weights)
        return model

    def seed(self, seed):
        require("keras", "tf").utils.set_random_seed(seed % 2**32)

    def default_metric(self, make_config):
        """Return the first metric that the model was compiled with; without any, its loss."""
        model = self.compiled(make_config())
        metric = (model.get_compile_config() or {}).get("metrics")
        while isinstance(metric, list | tuple) and metric:
            metric = metric[0]
        if isinstance(metric, Mapping) and isinstance(metric.get("config"), Mapping):  # an object
            metric = metric["config"].get("name")
        return metric if metric and isinstance(metric, str) else "loss"

    def knows(self, metric):
        if metric.lower() in Evaluator.metrics_func:
            return False, None
        return True, _MODES.get(metric)

    def compiled(self, config):
        """Return the user's model of a configuration."""
        model = self.model_creator(dict(config))
        if not getattr(model, "compiled", False):
            raise UsageError(
                "You must create a compiled model in model_creator; call model.compile(...) before "
                f"it is returned, got {type(model).__name__}"
            )
        return model


class _KerasModel(Model):
    """A Keras model in training.

    Parameters
    ----------
    model : keras.Model
    config : dict
        ``batch_size`` (default 32) cuts arrays; ``shuffle`` (default True) says whether their rows
        are shuffled.
    """

    def __init__(self, model, config: Mapping[str, Any]):
        super().__init__(config)
        self.model = model

    def fit_epoch(self, data, epoch):
        options = {"epochs": epoch + 1, "initial_epoch": epoch, "verbose": 0, "shuffle": False}
        if isinstance(data, Rows):
            shuffle = bool(self.config.get("shuffle", True))
            options.update(batch_size=batch_size_of(self.config), shuffle=shuffle)
        self.model.fit(**self._inputs(data), **options)

    def figures(self, data, metrics):
        compiled = [
            m for m in metrics if m.function is None and m.name not in Evaluator.metrics_func
        ]
        figures = self._evaluated(data, compiled) if compiled else {}
        others = [metric for metric in metrics if metric not in compiled]
        if others:
            values = figures_of(*self._predicted(data), others)
            figures.update(zip((m.name for m in others), values, strict=True))
        return [float(figures[metric.name]) for metric in metrics]

    def weights(self):
        return _saved_weights(self.model)

    def state(self):
        return self.weights()  # Keras saves the optimizer with them

    def restore(self, state):
        optimizer = self.model.optimizer
        rate = float(np.asarray(optimizer.learning_rate))
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        _load_weights(self.model, state)
        # the moments are of the other trial, the learning rate is this one's
        with contextlib.suppress(TypeError):  # a schedule, which goes by the steps
            optimizer.learning_rate = rate

    def _inputs(self, data) -> dict:
        """Return the data as arguments of ``fit`` and ``evaluate``."""
        if not isinstance(data, Rows):
            return {"x": self.loader_of(data, _check_loader)}
        return {"x": _one_or_list(data.features), "y": _one_or_list(data.targets)}

    def _evaluated(self, data, metrics) -> dict[str, float]:
        size = {"batch_size": batch_size_of(self.config)} if isinstance(data, Rows) else {}
        figures = self.model.evaluate(**self._inputs(data), verbose=0, return_dict=True, **size)
        for metric in metrics:
            if metric.name not in figures:
                raise UsageError(
                    f"The model has no metric {metric.name!r}; it was compiled with "
                    f"{', '.join(figures)}"
                )
        return figures

    def _predicted(self, data) -> tuple[list, list]:
        """Return targets and predictions, in the same order."""
        if isinstance(data, Rows):
            x = _one_or_list(data.features)
            predicted = self.model.predict(x, batch_size=batch_size_of(self.config), verbose=0)
            return data.targets, as_list(predicted)
        targets, outputs = [], []
        for x, y, *_ in self.loader_of(data, _check_loader):
            targets.append([np.asarray(each) for each in as_list(y)])
            outputs.append([np.asarray(each) for each in as_list(self.model.predict_on_batch(x))])
        if not targets:
            raise UsageError("The validation data has no rows")
        return concatenated(targets), concatenated(outputs)


class _SharedKerasModel(_KerasModel):
    """A Keras model in training, of one of several workers.

    Parameters
    ----------
    model : keras.Model
    config : dict
        See :class:`_KerasModel`.
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
        """Return figures of the first worker, since Keras computes its own metrics by itself."""
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

    def _train(self, batch: Batch):
        """Make an update from a batch, of which this worker computes its part."""
        start, stop = part_of(batch.rows, self._sync.rank, self._sync.world_size)
        part = batch.take(start, stop) if stop > start else None
        self._steps.train(part, stop - start, batch.rows, self._example)

    def _batches(self, data, epoch: int) -> Iterator[Batch]:
        """Yield batches that take ``(x, y, weights)``."""
        if not isinstance(data, Rows):
            yield from self._of_dataset(data)
            return
        for arrays in data.batches(self.config, epoch):

            def take(start, stop, arrays=arrays):
                x, y = map(_one_or_list, arrays.take(start, stop))
                return x, y, None

            yield Batch(arrays.rows, take)

    def _of_dataset(self, data) -> Iterator[Batch]:
        import keras

        for batch in self.loader_of(data, _check_loader):
            leaves = keras.tree.map_structure(np.asarray, tuple(batch))

            def take(start, stop, leaves=leaves):
                x, y, *weights = keras.tree.map_structure(lambda leaf: leaf[start:stop], leaves)
                return x, y, weights[0] if weights else None

            yield Batch(len(keras.tree.flatten(leaves)[0]), take)


def _one_or_list(values: list):
    """Return one or several inputs or targets as Keras takes them."""
    return values[0] if len(values) == 1 else values


def _saved_weights(model) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.weights.h5")
        model.save_weights(path)
        with open(path, "rb") as file:
            return file.read()


def _load_weights(model, weights: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.weights.h5")
        with open(path, "wb") as file:
            file.write(weights)
        with warnings.catch_warnings():
            # of a model that is not trained on
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(path)


def _check_loader(loader: Any) -> None:
    if isinstance(loader, tuple | list) or not hasattr(loader, "__iter__"):
        raise UsageError(
            "The function given as data must return a tf.data.Dataset of (x, y), or "
            f"another loader that Keras takes, it returned {type(loader).__name__}"
        )
