"""Keras models in a search."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.metrics import Evaluator
from bigdl.orca.automl.model.base import Builder, Model, batch_size_of, figures_of
from bigdl.orca.automl.model.rows import Creator, Rows

__all__ = ["KerasBaseModel", "KerasModelBuilder"]

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
        if sync is None:
            return KerasBaseModel(model, config)
        from bigdl.orca.automl.model.keras_workers import SharedKerasModel

        return SharedKerasModel(model, config, sync)

    def load(self, config, weights):
        model = self.compiled(config)
        _load_weights(model, weights)
        return model

    def seed(self, seed):
        require("keras", "tf").utils.set_random_seed(seed % 2**32)

    def default_metric(self, make_config):
        """The first metric that the model was compiled with; without any, its loss."""
        model = self.compiled(make_config())
        found = (model.get_compile_config() or {}).get("metrics")
        while isinstance(found, list | tuple) and found:
            found = found[0]
        if isinstance(found, Mapping) and isinstance(found.get("config"), Mapping):  # an object
            found = found["config"].get("name")
        return found if found and isinstance(found, str) else "loss"

    def knows(self, metric):
        if metric.lower() in Evaluator.metrics_func:
            return False, None
        return True, _MODES.get(metric)

    def compiled(self, config):
        """The user's model of a configuration."""
        model = self.model_creator(dict(config))
        if not getattr(model, "compiled", False):
            raise UsageError(
                "You must create a compiled model in model_creator; call model.compile(...) before "
                f"it is returned, got {type(model).__name__}"
            )
        return model


class KerasBaseModel(Model):
    """A Keras model in training.

    Parameters
    ----------
    model : keras.Model
    config : dict
        ``batch_size`` (default 32) cuts arrays; ``shuffle`` (default True) says whether their rows
        are shuffled.
    """

    def __init__(self, model, config: Mapping[str, Any]):
        self.model, self.config = model, config
        self._datasets: dict[int, Any] = {}

    def fit_epoch(self, data, epoch):
        given = {"epochs": epoch + 1, "initial_epoch": epoch, "verbose": 0, "shuffle": False}
        if isinstance(data, Rows):
            shuffle = bool(self.config.get("shuffle", True))
            given.update(batch_size=batch_size_of(self.config), shuffle=shuffle)
        self.model.fit(**self._given(data), **given)

    def figures(self, data, metrics):
        own = [m for m in metrics if m.function is None and not _is_evaluators(m.name)]
        found = self._evaluated(data, own) if own else {}
        others = [metric for metric in metrics if metric not in own]
        if others:
            values = figures_of(*self._predicted(data), others)
            found.update(zip((m.name for m in others), values, strict=True))
        return [float(found[metric.name]) for metric in metrics]

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

    def _given(self, data) -> dict:
        """Arguments of ``fit`` and ``evaluate``."""
        if not isinstance(data, Rows):
            return {"x": self._dataset(data)}
        return {"x": one_or_list(data.features), "y": one_or_list(data.targets)}

    def _evaluated(self, data, metrics) -> dict[str, float]:
        size = {"batch_size": batch_size_of(self.config)} if isinstance(data, Rows) else {}
        found = self.model.evaluate(**self._given(data), verbose=0, return_dict=True, **size)
        for metric in metrics:
            if metric.name not in found:
                raise UsageError(
                    f"The model has no metric {metric.name!r}; it was compiled with "
                    f"{', '.join(found)}"
                )
        return found

    def _predicted(self, data) -> tuple[list, list]:
        """Targets and predictions, in the same order."""
        if isinstance(data, Rows):
            x = one_or_list(data.features)
            found = self.model.predict(x, batch_size=batch_size_of(self.config), verbose=0)
            return data.targets, _listed(found)
        targets, outputs = [], []
        for x, y, *_ in self._dataset(data):
            targets.append([np.asarray(each) for each in _listed(y)])
            outputs.append([np.asarray(each) for each in _listed(self.model.predict_on_batch(x))])
        if not targets:
            raise UsageError("The validation data has no rows")
        return _joined(targets), _joined(outputs)

    def _dataset(self, data: Creator):
        if id(data) not in self._datasets:
            made = data.make(dict(self.config))
            if isinstance(made, tuple | list) or not hasattr(made, "__iter__"):
                raise UsageError(
                    "The function given as data must return a tf.data.Dataset of (x, y), or "
                    f"another loader that Keras takes, it returned {type(made).__name__}"
                )
            self._datasets[id(data)] = made
        return self._datasets[id(data)]


def _is_evaluators(name: str) -> bool:
    return name in Evaluator.metrics_func


def one_or_list(values: list):
    """What Keras takes for one or several inputs or targets."""
    return values[0] if len(values) == 1 else values


def _listed(value) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _joined(batches: list[list]) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


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
