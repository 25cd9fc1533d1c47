"""A copy of a Keras model in a rank of the parameter layer."""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import dataclass

import numpy as np

from bigdl.orca.learn.layer_fit.replica import LayerReplica
from bigdl.orca.learn.tf2.data import Assembly
from bigdl.orca.learn.tf2.evaluation import numbers_of
from bigdl.orca.learn.tf2.fit_settings import KerasFitSettings
from bigdl.orca.learn.tf2.forms import form_of
from bigdl.orca.learn.tf2.layer_gradients import GradientStep
from bigdl.orca.learn.tf2.opening import build_for, open_columns
from bigdl.orca.learn.tf2.parts import Packed, fit_divisor
from bigdl.orca.learn.tf2.runtime import seed_keras
from bigdl.orca.learn.tf2.state import array_of, put_weights, seed_states
from bigdl.orca.parameter_layer.rank import Contribution

__all__ = ["KerasReplica", "KerasReplicaProgram", "running_weights"]


def running_weights(model) -> list:
    """The weights that layers change themselves, such as the averages of BatchNormalization.

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
        See :class:`~bigdl.orca.learn.layer_fit.options.LayerOptions`.
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
        data = open_columns(shards["data"], columns, config, self._place)
        self._read(data, config)
        seed_keras(settings.seed)  # creators may draw what is no weight
        self._model = parts.build(training=True)
        self._divisor = fit_divisor(self._model)
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
        self._step = GradientStep(self._model)
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
        """What the loss was divided by."""
        if self._divisor == "weights" and len(batch) > 2:
            return float(np.asarray(batch[2], "float64").sum())
        return float(rows)

    def _added(self) -> list[list[float]]:
        """What the batch adds to the states of the metrics."""
        return [
            (array_of(variable).astype("float64") - initial).reshape(-1).tolist()
            for variable, initial in zip(
                self._model.metrics_variables, self._no_metrics, strict=True
            )
        ]

    def _of_its_own(self, figures) -> dict[str, float]:
        """What a training step of the user's returned besides, or instead of, metrics."""
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
