"""A Keras fit by the parameter layer: the driver's side, and the copies of the model in the ranks.

The driver's model has the callbacks and the optimizer; a replica computes the gradients of the rows
of its rank.
"""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.figures import LayerFigures
from bigdl.orca.learn.layer_fit.loop import (
    LayerLoop,
    LayerModel,
    LayerOptions,
    LayerRun,
    LayerTraining,
)
from bigdl.orca.learn.layer_fit.replica import LayerReplica
from bigdl.orca.learn.tf2.layer_optimizer import LayerOptimizer, check_trainable
from bigdl.orca.learn.tf2.parts import KerasParts, KerasTraining
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.orca.parameter_layer.rank import Contribution
from bigdl.training.checkpoint import Snapshot
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.callbacks import BATCH_HOOKS, WorkerCallbacks
from bigdl.training.keras.data import build_for, is_dataset, open_data
from bigdl.training.keras.loop import EvaluateProgram, KerasEpochs, KerasFitSettings, numbers_of
from bigdl.training.keras.reducer import loss_divisor
from bigdl.training.keras.state import (
    array_of,
    dump_optimizers,
    dump_weights,
    form_of,
    optimizers_of,
    put_optimizers,
    put_weights,
    seed_states,
    synchronized_layers,
    zeros_of,
)

_FIGURES, _NUMBERS = "figures.json", "callbacks.json"


class KerasLayerTraining(LayerTraining, KerasTraining):
    """:class:`~bigdl.orca.learn.tf2.parts.KerasTraining` by the parameter layer."""

    def _unpacked(self, program):
        parts, callbacks = program.packed.unpack()
        check_positive("batch_size", program.settings.batch_size)
        _check_callbacks(callbacks)
        return parts, callbacks

    def _model(self, parts, settings, start):
        return KerasLayerModel(parts, settings.seed, start)

    def _replicas(self, program, parts, model, ranks, sampling):
        settings = replace(program.settings, trigger=None)
        packed = Packed.of(parts)
        return KerasReplicaProgram(packed, program.config, settings, model.start, ranks, sampling)

    def _evaluation(self, program, parts, feed):
        settings = program.settings
        return EvaluateProgram(
            Packed.of(parts, []),
            program.config,
            self._sync,
            settings.validation,
            settings.seed,
        )

    def _loop(self, run, parts, callbacks):
        return KerasLayerLoop(run, callbacks)


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that want to know of single batches.

    Those of Keras that write files after batches only if they are told so are fine.
    """
    import keras

    base = keras.callbacks.Callback
    for callback in callbacks:
        cls = type(callback)
        frequency = getattr(callback, "save_freq", getattr(callback, "update_freq", None))
        if cls.__module__.startswith("keras.") and frequency == "epoch":
            continue
        hooks = [h for h in BATCH_HOOKS if getattr(cls, h) is not getattr(base, h)]
        hooks += [h for h in BATCH_HOOKS if h in vars(callback)]
        if hooks:
            raise UsageError(
                f"{cls.__name__} has {', '.join(hooks)}, but the steps of backend='bigdl' run in "
                "Spark tasks that call no callbacks; use hooks of epochs, or backend='spark'"
            )


class KerasLayerLoop(KerasEpochs, LayerLoop):
    """A fit by the parameter layer; callbacks are called on the driver.

    Parameters
    ----------
    run : LayerRun
    callbacks : sequence of keras.callbacks.Callback
    """

    settings: KerasFitSettings
    _layer: KerasLayerModel
    _figures: _KerasLayerFigures

    def __init__(self, run: LayerRun, callbacks: Sequence[Any]):
        super().__init__(run)
        self.model, settings = self._layer.model, self.settings
        self._callbacks = cast("WorkerCallbacks", None)  # until the first rows are known
        self._numbers = ""  # what callbacks had counted
        self.begin(run.start)
        self._callbacks = WorkerCallbacks(
            callbacks,
            self.model,
            0,
            epochs=settings.initial_epoch + self._epochs_of_fit,
            steps=self._epoch_steps,
            verbose=settings.verbose,
        )

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end and return the final state."""
        optimizer = self.model.optimizer
        self._begin_fit(self._numbers)
        states = self._train()
        if not self._callbacks.is_empty or optimizer.use_ema:  # they may change weights at the end
            states = self._pull()
            optimizer.finalize_variable_values(self.model.trainable_weights)
        self._callbacks.list.on_train_end()
        return self._finish(states)

    def _train_epoch(self, number):
        self._groups_of_epoch()
        entry = self._entry()
        if self._validate_weights is not None and self.settings.validates_after(number + 1):
            entry["logs"].update(self._validation())
        return True, entry

    def _end_epoch(self, number, logs):
        if self._callbacks.is_empty:
            super()._end_epoch(number, logs)
        else:
            states, before = self._pull(), self._layer.vector(self._layer_plan)
            super()._end_epoch(number, logs)
            if not np.array_equal(before, self._layer.vector(self._layer_plan)):
                # the ranks get the weights that a callback has set
                residuals = [state.residual for state in states]
                self._transport.start(self._layer.states(self._layer_plan, residuals))
        self.stop = bool(self.model.stop_training)

    def _entry(self) -> dict:
        figures = self._figures
        # a step of the user's own may return figures of its own
        logs = figures.means() or self._layer.figures(figures.added)
        if self._options.stragglers is not None:
            logs |= figures.dropped
        return self._entry_of(cast("dict", figures.entry()), logs, figures.memory)

    def _validation(self) -> dict[str, float]:
        self._pull()
        self._callbacks.list.on_test_begin()
        validate = cast("Callable[[bytes], dict]", self._validate_weights)
        figures = validate(dump_weights(self.model))
        self._callbacks.list.on_test_end(figures)
        return {f"val_{name}": value for name, value in figures.items()}

    # -- what the groups ask -------------------------------------------------------------------

    @property
    def _epoch_steps(self):
        return self.settings.steps_per_epoch or self._plan.steps

    def _place(self):
        if self.settings.steps_per_epoch:  # an epoch goes on where the last one ended
            return divmod(self.position.global_step, self._plan.steps)
        return super()._place()

    def _pass_step(self):
        self._layer.optimizer.pass_step()

    def _no_figures(self):
        return _KerasLayerFigures(self._layer_plan.ranks, sums=self._layer.sums)

    def _open_rows(self):
        super()._open_rows()
        known = self._transport.rows()
        self._layer.build_for(next(each["example"] for each in known if each["example"]))

    def _kept(self):
        files = {_FIGURES: self._figures.dump()} if self.position.step else {}
        if self._callbacks is not None:
            files[_NUMBERS] = self._callbacks.numbers().encode()
        return files

    def _put_kept(self, files):
        self._numbers = files.get(_NUMBERS, b"").decode()
        if self.position.step and not self.position.partial and _FIGURES in files:
            self._figures.put(files[_FIGURES])

    def _restart_from_latest(self, error):
        super()._restart_from_latest(error)
        self.model.stop_training = False
        if self._numbers:
            self._callbacks.put_numbers(self._numbers)


class _KerasLayerFigures(LayerFigures):
    """:class:`~bigdl.orca.learn.layer_fit.figures.LayerFigures`, and the sums of metrics.

    Parameters
    ----------
    ranks : int
    sums : bool

    Attributes
    ----------
    added : list of ndarray of float64
        Additions of the batches so far to the states of the metrics.
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
            added = [np.asarray(values, np.float64) for values in source["metrics"]]
            before = self.added or [np.zeros_like(values) for values in added]
            self.added = [a + b for a, b in zip(before, added, strict=True)]
            for name, value in source["logs"].items():
                self._logs[name] = self._logs.get(name, 0.0) + value * source["rows"]
            self._rows += source["rows"]
            self.memory[rank] = max(self.memory[rank], source["memory"])
        return super()._add_step(sources, seconds)

    def means(self) -> dict[str, float]:
        """Return means over the rows of what the steps returned."""
        return {name: total / self._rows for name, total in self._logs.items()}

    def dump(self) -> bytes:
        """Return what is not in the sums of the ranks, for a checkpoint inside an epoch."""
        added = [values.tolist() for values in self.added]
        return json.dumps([added, self._logs, self._rows]).encode()

    def put(self, data: bytes) -> None:
        """The inverse of :meth:`dump`."""
        added, self._logs, self._rows = json.loads(data)
        self.added = [np.asarray(values, np.float64) for values in added]


class KerasLayerModel(LayerModel):
    """The driver's own Keras model and its optimizer, which callbacks may change.

    Parameters
    ----------
    parts : KerasParts
    seed : int
    snapshot : Snapshot, optional
        What to start from.

    Raises
    ------
    UsageError
        For a model that the parameter layer cannot train.

    Attributes
    ----------
    model : keras.Model
    optimizer : LayerOptimizer
    """

    def __init__(self, parts: KerasParts, seed: int, snapshot: Snapshot | None):
        self.model = parts.build_on_driver(seed, training=True)
        self._check()
        self._weights = list(self.model.trainable_weights)
        check_trainable(self._weights)
        self.optimizer = LayerOptimizer(self.model.optimizer, self._weights)
        self.sums = loss_divisor(self.model) == "none"
        self._changing = _running_weights(self.model)
        if snapshot is not None:
            self.load(snapshot)
        self.start = dump_weights(self.model)
        self._initial = self._running()

    def _check(self):
        model = self.model
        if model.optimizer is None or len(optimizers_of(model)) > 1:
            raise UsageError(
                f"backend='bigdl' trains with the one optimizer of model.compile, {model.name} has "
                f"{len(optimizers_of(model)) if model.optimizer else 'none there'}; use "
                "backend='spark'"
            )
        if not model.built:
            raise UsageError(
                "backend='bigdl' needs to know the weights before it reads the rows, and the model "
                "has none until it is told the shape of its input; give it a keras.Input, or call "
                "model.build in the model creator"
            )
        for layer in synchronized_layers(model):
            raise UsageError(
                "With backend='bigdl' no worker waits for another inside a step, and "
                f"BatchNormalization(synchronized=True) does, as {layer.name} is; use "
                "backend='spark' or synchronized=False"
            )

    def build_for(self, form) -> None:
        """Make the variables of the metrics, for batches of a form that a replica described."""
        build_for(self.model, zeros_of(form))
        if self.sums and self.model.losses:
            raise UsageError(
                "A loss with reduction='sum' does not go with regularization, which every worker "
                "would add; use reduction='sum_over_batch_size'"
            )

    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """Return the plan of a training of this model."""
        optimizer = self.optimizer
        return LayerPlan(
            tuple(int(np.prod(weight.shape)) for weight in self._weights),
            optimizer.groups,
            optimizer.sliced,
            ranks,
            options.compression,
            self.sums,
            optimizer.clamp,
            optimizer.norm,
            max_drop=options.max_drop,
            slack=0.0,
            with_norms=optimizer.with_norms,
        )

    def hyper(self) -> tuple[dict, ...]:
        """Return the numbers of the optimizer for the next step."""
        return self.optimizer.hyper()

    # -- figures -------------------------------------------------------------------------------

    def figures(self, added: Sequence[Sequence[float] | np.ndarray]) -> dict:
        """Return the figures of metrics to whose states so much was added since they were reset."""
        model = self.model
        model.reset_metrics()
        for variable, values in zip(model.metrics_variables, added, strict=True):
            value = array_of(variable)
            more = np.asarray(values, "float64").reshape(value.shape)
            variable.assign((value.astype("float64") + more).astype(value.dtype))
        return numbers_of(model.get_metrics_result())

    # -- the state of the ranks ----------------------------------------------------------------

    def vector(self, plan: LayerPlan) -> np.ndarray:
        """Return the trainable weights as they are now, in the order of the flat vector."""
        return plan.geometry.flatten([array_of(weight) for weight in self._weights])

    def _shapes(self):
        return [tuple(weight.shape) for weight in self._weights]

    def _running(self):
        return _copies(self._changing)

    def _put(self, parts, running):
        _assign(self._weights, parts)
        _assign(self._changing, running)

    def _optimizer_state(self):
        return self.optimizer.state()

    def _put_optimizer_state(self, state):
        self.optimizer.put_state(state)

    # -- files ---------------------------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""
        put_weights(self.model, snapshot.files["model.pt"])
        if "optimizer.pt" in snapshot.files:
            put_optimizers(self.model, snapshot.files["optimizer.pt"])

    def files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint: the model, and the optimizer's slices of all ranks."""
        return {"model.pt": dump_weights(self.model), "optimizer.pt": dump_optimizers(self.model)}


# -- in the ranks --------------------------------------------------------------------------------


def _copies(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(array_of(variable)) for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    """Set variables to arrays, which may be flat."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(np.reshape(value, variable.shape))


def _running_weights(model: Any) -> list:
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
        self._assembly = columns.assembly(self._model, settings.class_weight)
        self._has_rows = bool(data.rows)
        if not self._has_rows:  # it is never asked for a gradient
            return
        self._example = self._assembly(data.batch(0, 1))
        build_for(self._model, self._example)
        put_weights(self._model, program.model)
        self._step = _GradientStep(self._model)
        self._weights = self._model.trainable_weights
        self._changing = _running_weights(self._model)
        self._initial = _copies(self._changing)
        self._model.reset_metrics()
        self._no_metrics = _copies(self._model.metrics_variables)

    def describe(self) -> dict:
        example = form_of(self._example) if self._has_rows else None
        return {**super().describe(), "example": example}

    def _batch(self, step, start, stop):
        return self._assembly(super()._batch(step, start, stop))

    def _put(self, weights, running):
        stops = list(itertools.accumulate(int(np.prod(w.shape)) for w in self._weights))
        _assign(self._weights, np.split(weights, stops[:-1]))
        _assign(self._changing, running)

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
