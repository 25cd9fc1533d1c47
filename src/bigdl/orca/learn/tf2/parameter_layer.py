"""Keras fit with the parameter layer: the driver's model and the ranks' replicas.

The driver's model has the callbacks and the optimizer. A replica computes the gradients of its
rank's rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.common.platform.memory import peak_memory
from bigdl.orca.learn.tf2.parameter_layer_optimizer import KerasParameterLayerOptimizer
from bigdl.orca.parameter_layer.fit.loop import (
    DriverModel,
    ParameterLayerRun,
    check_hooks,
)
from bigdl.orca.parameter_layer.fit.replica import (
    FlatModel,
    ParameterLayerReplica,
    TouchedRows,
)
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.fit import FitContext
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.callbacks import BATCH_HOOKS, WorkerCallbacks
from bigdl.training.keras.data import build_for, is_dataset, open_data
from bigdl.training.keras.loop import (
    KerasEvaluateProgram,
    KerasFitProgram,
    KerasFitSettings,
    KerasHooks,
    entry_of,
    numbers_of,
)
from bigdl.training.keras.reducer import KerasLoss
from bigdl.training.keras.state import (
    array_of,
    dump_weights,
    form_of,
    growing_layers,
    is_read_in_part,
    optimizers_of,
    put_weights,
    seed_states,
    synchronized_layers,
    values_of,
    zeros_of,
)

if TYPE_CHECKING:
    import keras

_METRIC, _LOG, _ROWS = "metric ", "log ", "rows"  # key prefixes in the sums of a record


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise an error for callbacks with batch hooks.

    Keras callbacks that write files are accepted if their frequency is "epoch".
    """
    import keras

    base = keras.callbacks.Callback
    for callback in callbacks:
        frequency = getattr(callback, "save_freq", getattr(callback, "update_freq", None))
        if type(callback).__module__.startswith("keras.") and frequency == "epoch":
            continue
        check_hooks(callback, base, BATCH_HOOKS)


def _check_model(model: keras.Model) -> None:
    """Raise an error for a model that the parameter layer cannot train."""
    if model.optimizer is None or len(optimizers_of(model)) > 1:
        raise UsageError(
            f"backend='bigdl' needs exactly one optimizer in model.compile, {model.name} has "
            f"{len(optimizers_of(model)) if model.optimizer else 'none'}; use backend='spark'",
            code="optimizer-unsupported",
        )
    if not model.built:
        raise UsageError(
            "backend='bigdl' needs the weights before it reads rows, but the model has none until "
            "its input shape is known; add a keras.Input, or call model.build in the model creator",
            code="model-unbuilt",
        )
    for layer in growing_layers(model).values():
        raise UsageError(
            f"The GrowingEmbedding {layer.name} cannot grow with backend='bigdl', whose workers "
            "hold "
            "all rows; use another backend, or a ShardedEmbedding",
            code="unsupported",
        )
    for layer in synchronized_layers(model):
        raise UsageError(
            "backend='bigdl' does not support BatchNormalization(synchronized=True), such as "
            f"{layer.name}, because workers do not communicate inside a step; use "
            "backend='spark' or synchronized=False",
            code="unsupported",
        )


def _flat(model: keras.Model, widths: Sequence[int]) -> FlatModel:
    """Return a FlatModel of trained weights and of weights that layers update (moving averages).

    Trainable weights that are currently frozen are excluded: they do not change.
    """
    frozen = {id(w) for layer in model._flatten_layers() for w in layer._trainable_variables}
    running = [weight for weight in model.non_trainable_weights if id(weight) not in frozen]
    trained = model.trainable_weights
    return FlatModel(trained, running, array_of, lambda v, values: v.assign(values), widths)


def _widths(model: keras.Model, batch_rows: int) -> list[int]:
    """Return the row width of each embedding that a batch reads in part; 0 for other weights."""
    import keras

    if keras.backend.backend() != "tensorflow":  # other backends have no sparse gradients
        return [0] * len(model.trainable_weights)
    tables = {
        id(weight)
        for layer in model._flatten_layers()
        for weight in layer.trainable_weights
        if weight is getattr(layer, "embeddings", None)
    }
    return [
        weight.shape[1] if id(weight) in tables and is_read_in_part(weight, batch_rows) else 0
        for weight in model.trainable_weights
    ]


class KerasReplica(ParameterLayerReplica):
    """Copy of a Keras model on a rank, with the rank's rows."""

    def _open(self, program, weights, shard):
        import torch

        settings, flat = self._settings, None
        # the task has set its number of threads
        parts, *_ = program.packed.unpack(program.config, torch.get_num_threads())
        data = open_data(self, shard, settings, program.config)
        if is_dataset(data):
            raise UsageError(
                "backend='bigdl' reads rows by index, which a tf.data.Dataset does not support; "
                "pass a DataFrame, XShards, arrays or a torch DataLoader, or use backend='spark'",
                code="data-type",
            )
        seed_keras(settings.seed)  # creators may use random values other than weights
        self._model = parts.build(training=True)
        self._loss = KerasLoss(self._model, settings.loss_weight)
        self._assembly = settings.assembly(self._model, settings.class_weight)
        self._example = self._assembly(data.batch(0, 1)) if data.rows else None
        if self._example is not None:  # without rows no gradient is requested
            build_for(self._model, self._example)
            put_weights(self._model, weights)
            tables = {number for number, width in enumerate(self._widths) if width}
            self._step = _GradientStep(self._model, tables)
            flat = _flat(self._model, self._widths)
            self._model.reset_metrics()
            self._no_metrics = values_of(self._model.metrics_variables)
        return data, flat

    def describe(self) -> dict:
        return {**super().describe(), "example": form_of(self._example)}

    def _batch(self, step, start, stop):
        return self._assembly(super()._batch(step, start, stop))

    def _seed(self, step):
        super()._seed(step)
        key = [self._settings.seed, step.epoch, step.number, self.rank]
        for number, variable in enumerate(seed_states(self._model)):
            state = np.random.SeedSequence([*key, number]).generate_state(variable.shape[0]) >> 1
            variable.assign(state.astype("int64"))

    def _gradient(self, batch, rows, step, began):
        model, loss = self._model, self._loss
        if not loss.weights.is_known and loss.weights.is_due():
            # each rank probes the loss independently
            result = loss.find(batch)
            loss.weights.settle(result.reduction, result.reason)
        model.reset_metrics()
        logs, gradients = self._step(batch)
        computed = time.perf_counter()
        counted = loss.count(batch, rows)
        values = numbers_of(logs)
        mean = values.get("loss", 0.0)
        if loss.is_sum and not loss.weights.is_known:
            # the parameter layer averages losses that are not yet known to be sums
            begins, ends = zip(*step.ranges, strict=True)
            scale = (sum(ends) - sum(begins)) / rows
            gradients = [_scaled(gradient, scale) for gradient in gradients]
            mean /= rows
        sums = {
            f"{_METRIC}{number}": (array_of(variable).astype("float64") - initial.numpy()).tolist()
            for number, (variable, initial) in enumerate(
                zip(model.metrics_variables, self._no_metrics, strict=True)
            )
        }
        # a custom train_step may return other values in addition to, or instead of, metrics
        if not set(values) <= set(model.get_metrics_result()):
            numbers = {k: v for k, v in values.items() if isinstance(v, float | int)}
            sums |= {f"{_LOG}{name}": value * rows for name, value in numbers.items()}
        record = {
            "loss": mean if counted else 0.0,
            "sums": {**sums, _ROWS: rows},
            "memory": peak_memory(),
            "forward_s": computed - began,
        }
        if loss.weights.reason and self.world_size > 1:
            record["note"] = loss.sentence()
        return gradients, counted, record


class KerasDriverModel(DriverModel):
    """Driver-side Keras model that calls the callbacks.

    Parameters
    ----------
    program : KerasFitProgram
    ranks : int
    start : Checkpoint or None
    context : FitContext

    Raises
    ------
    UsageError
        If the parameter layer cannot train the model.
    """

    replica = KerasReplica
    are_changes_kept = True

    def __init__(
        self,
        program: KerasFitProgram,
        ranks: int,
        start: Checkpoint | None,
        context: FitContext,
    ):
        settings: KerasFitSettings = program.settings
        self._program, self._settings, self._state = program, settings, context.state
        self._parts, callbacks = program.packed.unpack()
        check_positive("batch_size", settings.batch_size)
        _check_callbacks(callbacks)
        self.model = model = self._parts.build_on_driver(settings.seed, training=True)
        _check_model(model)
        self.optimizer = KerasParameterLayerOptimizer(model.optimizer, model.trainable_weights)
        loss_weights = KerasLoss(model, settings.loss_weight).weights
        self.loss_is_sum = loss_weights.is_known and loss_weights.is_sum
        opened = functools.partial(WorkerCallbacks, callbacks, model, 0)
        self.hooks: KerasHooks = KerasHooks(context, model, opened)
        if start is not None:
            self.load(start.files)
        self.flat = _flat(model, _widths(model, settings.batch_size))

    def replica_program(self):
        settings = replace(self._settings, checkpoint_trigger=None)
        return replace(self._program, packed=Packed.of(self._parts), settings=settings)

    def evaluation(self, feed, sync):
        """Return the program that evaluates weights on a feed."""
        settings = replace(self._settings, checkpoint_trigger=None)
        packed = Packed.of(self._parts, [])
        return KerasEvaluateProgram(packed, self._program.config, sync, settings, settings.seed)

    def weights(self):
        return dump_weights(self.model)

    def load(self, files):
        super().load(files)
        self.model.stop_training = False
        self.hooks.put_numbers()  # callbacks continue from these numbers

    def open_rows(self, described, steps):
        # metrics create variables when the model gets its first batch
        example = next(each["example"] for each in described if each["example"])
        build_for(self.model, zeros_of(example))
        if self.loss_is_sum and self.model.losses:
            raise UsageError(
                "A loss with reduction='sum' is not supported with regularization, which every "
                "worker would add; use reduction='sum_over_batch_size'",
                code="loss-unsupported",
            )
        return self._settings.steps_per_epoch or steps

    def pass_and_step(self, steps):
        if self._settings.steps_per_epoch:  # an epoch continues where the previous one ended
            return divmod(self._state.position.global_step, steps)
        return None

    def validates(self):
        return self._settings.validates_after(self.hooks.number + 1)

    def end_epoch(self, metrics, evaluate):
        logs = self._logs(metrics.added)
        if self._settings.parameter_layer.drop_stragglers is not None:
            logs |= metrics.dropped
        entry = entry_of(self._state, cast("dict", metrics.entry()), logs, metrics.memory)
        if evaluate is not None:
            self.hooks.list.on_test_begin()
            validation = evaluate()
            self.hooks.list.on_test_end(validation)
            logs.update({f"val_{name}": value for name, value in validation.items()})
        return entry

    def _logs(self, added: dict[str, Any]) -> dict:
        """Return the mean values that a custom train_step returned, or else the model's metrics."""
        model = self.model
        means = {
            name.removeprefix(_LOG): float(total / added[_ROWS])
            for name, total in added.items()
            if name.startswith(_LOG)
        }
        if means:
            return means
        model.reset_metrics()
        for number, variable in enumerate(model.metrics_variables):
            value = array_of(variable)
            total = value.astype("float64") + added.get(f"{_METRIC}{number}", 0.0)
            variable.assign(total.astype(value.dtype))
        return numbers_of(model.get_metrics_result())


run_by_parameter_layer = ParameterLayerRun(KerasDriverModel)


class _GradientStep:
    """Runs a model's ``train_step`` and captures the gradients passed to the optimizer.

    Losses, row weights, regularization and a custom training step work as in any other training.
    The model's metrics are updated; its weights only change where layers update them, such as
    moving averages.

    Parameters
    ----------
    model : keras.Model
        The model; its optimizer no longer applies updates.
    tables : collection of int
        Indices of embedding tables, whose gradients contain only the touched rows.
    """

    def __init__(self, model, tables: Collection[int] = ()):
        self._model, self._tables = model, tables
        self._numbers = {id(weight): i for i, weight in enumerate(model.trainable_weights)}
        self._scale = model.optimizer.loss_scale_factor
        self._captured: list[dict[int, Any]] = []
        object.__setattr__(model.optimizer, "apply", self._capture)
        self._steps = steps_of(self)

    def __call__(self, batch) -> tuple[dict, list[np.ndarray | TouchedRows | None]]:
        """Return the logs of the step and the gradient of every weight, or None."""
        logs, gradients = self._steps.train(batch)
        self._check()
        arrays: list[np.ndarray | TouchedRows | None] = [None] * len(self._numbers)
        for number, gradient in gradients.items():
            if isinstance(gradient, tuple):
                rows, values = map(array_of, gradient)
                shape = self._model.trainable_weights[number].shape
                arrays[number] = _touched_rows(rows, values / (self._scale or 1.0), shape)
            else:
                arrays[number] = array_of(gradient) / (self._scale or 1.0)
        return logs, arrays

    # -- interface that the steps of a Keras backend use ---------------------------------------

    @property
    def run_eagerly(self) -> bool:
        return self._model.run_eagerly

    def train(self) -> None:
        """Enable training mode, for torch."""
        self._model.train()

    def train_step(self, batch) -> tuple[dict, dict]:
        """Run the model's train_step; return its logs and the captured gradients."""
        self._captured.clear()
        logs = self._model.train_step(batch)
        return logs, self._captured[0] if self._captured else {}

    def _capture(self, grads, trainable_variables=None):
        variables = trainable_variables or self._model.trainable_weights
        numbers = (self._numbers.get(id(variable), -1) for variable in variables)
        self._captured.append(
            {
                number: _dense_or_rows(gradient, number in self._tables)
                for gradient, number in zip(grads, numbers, strict=True)
                if gradient is not None
            }
        )

    def _check(self):
        """Raise an error unless the step made exactly one update of trainable weights."""
        if len(self._captured) != 1:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} makes {len(self._captured)} "
                "updates, "
                "but backend='bigdl' supports one per step; use backend='spark'",
                code="model-unsupported",
            )
        if -1 in self._captured[0]:
            raise UsageError(
                f"The train_step of {type(self._model).__name__} updates variables that are not "
                "trainable weights of the model; use backend='spark'",
                code="model-unsupported",
            )


def _scaled(gradient, scale: float):
    """Return a gradient multiplied by a number."""
    if isinstance(gradient, TouchedRows):
        return TouchedRows(gradient.rows, gradient.values * scale)
    return None if gradient is None else gradient * scale


def _dense_or_rows(gradient, is_table: bool):
    """Return a gradient as a dense tensor, or for a table as row indices and values.

    The row indices of a table may contain duplicates.
    """
    if type(gradient).__name__ != "IndexedSlices":
        return gradient
    if is_table:
        return gradient.indices, gradient.values
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _touched_rows(rows: np.ndarray, values: np.ndarray, shape: Sequence[int]) -> TouchedRows:
    """Combine row indices and values of a table's gradient, summing duplicate rows."""
    import torch

    indices = torch.from_numpy(rows.reshape(1, -1).astype(np.int64))
    slices = torch.from_numpy(values.reshape(-1, shape[1]))
    gradient = torch.sparse_coo_tensor(indices, slices, tuple(shape), check_invariants=False)
    return TouchedRows.of(gradient)
