"""A copy of a Keras model in a rank of the parameter layer, which computes gradients."""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.replica import LayerReplica
from bigdl.orca.parameter_layer.rank import Contribution
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.data import Assembly, build_for, is_dataset, open_data
from bigdl.training.keras.evaluation import numbers_of
from bigdl.training.keras.loop import KerasFitSettings
from bigdl.training.keras.reducer import loss_divisor
from bigdl.training.keras.state import array_of, form_of, put_weights, seed_states

__all__ = ["KerasReplica", "KerasReplicaProgram", "running_weights"]


def running_weights(model: Any) -> list:
    """Return the weights that layers change themselves, such as the averages of BatchNormalization.

    Those that were made to be trained and are frozen now are no such weights: they stay.
    """
    frozen = {id(w) for layer in model._flatten_layers() for w in layer._trainable_variables}
    return [weight for weight in model.non_trainable_weights if id(weight) not in frozen]


@dataclass
class KerasReplicaProgram:
    """Makes replicas; shipped to the ranks.

    Attributes
    ----------
    packed : Packed
        The parts of the model.
    config : dict
    settings : KerasFitSettings
    model : bytes
        Weights at the start; trainable ones are replaced in every step, others are not.
    ranks : int
    sampling : str
        See :class:`~bigdl.orca.learn.layer_fit.loop.LayerOptions`.
    """

    packed: Packed
    config: dict
    settings: KerasFitSettings
    model: bytes
    ranks: int
    sampling: str = "exact"

    def __call__(self, rank: int, shards: dict) -> KerasReplica:
        import torch

        # the task has set them
        (parts,) = self.packed.unpack(self.config, torch.get_num_threads())
        return KerasReplica(self, parts, rank, shards)


class KerasReplica(LayerReplica):
    """A copy of a Keras model, and the rows of its rank.

    Parameters
    ----------
    program : KerasReplicaProgram
    parts : KerasParts
    rank : int
    shards : dict of str to Shard
    """

    def __init__(self, program: KerasReplicaProgram, parts, rank: int, shards: dict):
        super().__init__(program, rank)
        settings, config = self._settings, program.config
        columns = settings.validation
        data = open_data(self._place, shards["data"], columns, config)
        if is_dataset(data):
            raise UsageError(
                "backend='bigdl' reads rows by number, and a tf.data.Dataset can only be read from "
                "its beginning; pass a DataFrame, XShards, arrays or a torch DataLoader, or use "
                "backend='spark'"
            )
        self._read(data, config)
        seed_keras(settings.seed)  # creators may draw what is no weight
        self._model = parts.build(training=True)
        self._divisor = loss_divisor(self._model)
        self._assembly = Assembly.of(
            self._model,
            columns.feature_cols,
            columns.label_cols,
            weighted=columns.weighted,
            class_weight=settings.class_weight,
        )
        self._has_rows = bool(data.rows)
        if not self._has_rows:  # it is never asked for a gradient
            return
        self._example = self._assembly(data.batch(0, 1))
        build_for(self._model, self._example)
        put_weights(self._model, program.model)
        self._step = _GradientStep(self._model)
        self._weights = self._model.trainable_weights
        self._changing = running_weights(self._model)
        self._initial = [np.array(array_of(weight)) for weight in self._changing]
        self._model.reset_metrics()
        self._no_metrics = [np.array(array_of(v)) for v in self._model.metrics_variables]

    def describe(self) -> dict:
        example = form_of(self._example) if self._has_rows else None
        return {**super().describe(), "example": example}

    def _batch(self, step, start, stop):
        return self._assembly(super()._batch(step, start, stop))

    def _put(self, weights, running):
        stops = list(itertools.accumulate(int(np.prod(w.shape)) for w in self._weights))
        for weight, part in zip(self._weights, np.split(weights, stops[:-1]), strict=True):
            weight.assign(part.reshape(weight.shape))
        for weight, values in zip(self._changing, running, strict=True):
            weight.assign(values)

    def _running(self):
        return [array_of(weight) for weight in self._changing]

    def _seed(self, step):
        super()._seed(step)
        key = [self._settings.seed, step.epoch, step.number, self._rank]
        for number, variable in enumerate(seed_states(self._model)):
            state = np.random.SeedSequence([*key, number]).generate_state(variable.shape[0]) >> 1
            variable.assign(state.astype("int64"))

    def _gradient(self, batch, rows, step, began):
        self._model.reset_metrics()
        logs, gradients = self._step(batch)
        computed = time.perf_counter()
        counted = self._counted(batch, rows)
        figures = numbers_of(logs)
        record = {
            "loss": figures.get("loss", 0.0) if counted else 0.0,
            "metrics": self._added(),
            "logs": self._of_its_own(figures),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "forward_s": computed - began,
        }
        absent = [i for i in range(len(self._weights)) if i not in gradients]
        return Contribution(self._flat(gradients), counted, rows, absent, record=record)

    def _counted(self, batch, rows) -> float:
        """Return what the loss was divided by."""
        if self._divisor == "weights" and len(batch) > 2:
            return float(np.asarray(batch[2], "float64").sum())
        return float(rows)

    def _added(self) -> list[list[float]]:
        """Return what the batch adds to the states of the metrics."""
        return [
            (array_of(variable).astype("float64") - initial).reshape(-1).tolist()
            for variable, initial in zip(
                self._model.metrics_variables, self._no_metrics, strict=True
            )
        ]

    def _of_its_own(self, figures) -> dict[str, float]:
        """Return what a training step of the user's returned besides, or instead of, metrics."""
        if set(figures) <= set(self._model.get_metrics_result()):
            return {}
        return {k: v for k, v in figures.items() if isinstance(v, float | int)}

    def _flat(self, gradients) -> np.ndarray:
        return np.concatenate(
            [
                np.zeros(int(np.prod(weight.shape)), np.float32)
                if number not in gradients
                else np.asarray(gradients[number], np.float32).reshape(-1)
                for number, weight in enumerate(self._weights)
            ]
        )


class _GradientStep:
    """Runs ``train_step`` of a model and takes what it hands to the optimizer.

    So losses, weights of rows, regularization and a training step of the user's own are those of
    any other training.  The model's metrics take note of the batch; its weights stay as they are,
    but for what its layers change themselves.

    Parameters
    ----------
    model : keras.Model
        Its optimizer makes no updates any more.
    """

    def __init__(self, model):
        self._model = model
        self._numbers = {id(weight): i for i, weight in enumerate(model.trainable_weights)}
        self._scale = model.optimizer.loss_scale_factor
        self._taken: list[dict[int, Any]] = []
        object.__setattr__(model.optimizer, "apply", self._take)
        self._steps = steps_of(self)

    def __call__(self, batch) -> tuple[dict, dict[int, np.ndarray]]:
        """Return figures and gradients of a batch.

        Returns
        -------
        dict
            What the step returned.
        dict of int to ndarray
            Gradients by the number of the weight; those that do not depend on it have none.
        """
        logs, gradients = self._steps.train(batch)
        self._check()
        scale = self._scale
        arrays = {number: array_of(gradient) for number, gradient in gradients.items()}
        return logs, arrays if scale is None else {n: a / scale for n, a in arrays.items()}

    # -- what the steps of a backend ask a model -----------------------------------------------

    @property
    def run_eagerly(self) -> bool:
        return self._model.run_eagerly

    def train(self) -> None:
        """Turn the training mode of torch on."""
        self._model.train()

    def train_step(self, batch) -> tuple[dict, dict]:
        """The model's own, with the gradients."""
        self._taken.clear()
        logs = self._model.train_step(batch)
        return logs, self._taken[0] if self._taken else {}

    def _take(self, grads, trainable_variables=None):
        variables = trainable_variables or self._model.trainable_weights
        self._taken.append(
            {
                self._numbers.get(id(variable), -1): _dense(gradient)
                for gradient, variable in zip(grads, variables, strict=True)
                if gradient is not None
            }
        )

    def _check(self):
        """Refuse other steps; not inside of a step, where TensorFlow makes another error of it."""
        if len(self._taken) != 1:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} makes {len(self._taken)} updates; "
                "backend='bigdl' makes one in a step, so use backend='spark'"
            )
        if -1 in self._taken[0]:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} updates what is not a trainable "
                "weight of the model; use backend='spark'"
            )


def _dense(gradient):
    """Return a gradient, of which that of an embedding may be sparse, as a dense tensor."""
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)
