"""The training loop of Keras: one step, one epoch, one fit.

Like the loop of PyTorch it knows neither which engine runs it nor what the input was.  The step is
the model's own ``train_step``; gradients meet where it hands them to the optimizer
(:mod:`~bigdl.training.keras.reducer`).  A rank without rows of a batch makes the step with a row of
zeros that weighs nothing, and then restores its own state.
"""

import numbers
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.worker import Worker
from bigdl.training.batches import all_gather_json
from bigdl.training.figures import score_of
from bigdl.training.fit import FitLoop, RunSettings, WorkerLoop
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.callbacks import WorkerCallbacks
from bigdl.training.keras.data import (
    EvaluationSettings,
    Part,
    Rows,
    build_for,
    check_end,
    check_step,
    inputs_of,
    open_rows,
)
from bigdl.training.keras.reducer import WorkerSteps, check_optimizer
from bigdl.training.keras.state import (
    array_of,
    dump_optimizers,
    dump_weights,
    form_of,
    kept_values,
    merge_metrics,
    put_optimizers,
    put_weights,
    seed_states,
    set_values,
    sharded_layers,
    values_of,
)
from bigdl.training.keras.tables import ModelTables
from bigdl.training.slices import SavedSlices
from bigdl.training.state import capture_rng, restore_rng
from bigdl.training.tables.place import Place, placed


@dataclass(kw_only=True)
class KerasFitSettings(EvaluationSettings, RunSettings):
    """The arguments of ``fit``, and those of its validation; callbacks travel with the model.

    Attributes
    ----------
    initial_epoch : int
        Number of the first epoch of this fit, for callbacks.
    steps_per_epoch : int, optional
        Batches of an epoch; default all rows once.
    validation_freq : int or sequence of int
        Validate after every so many epochs, or after those with these numbers (from 1).
    """

    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    class_weight: dict[int, float] | None = None
    verbose: int | str = 1
    loss_weight: Any = None

    def validates_after(self, epoch: int) -> bool:
        """Return True if the epoch with this number (from 1) is followed by a validation."""
        if isinstance(self.validation_freq, int):
            return epoch % self.validation_freq == 0
        return epoch in self.validation_freq


@dataclass
class KerasProgram(ABC):
    """The program of the workers, as it is shipped to them.

    Attributes
    ----------
    packed : Packed
        The parts of the model, and the callbacks.
    config : dict
    sync : type
        Class of the GradientSync.
    """

    packed: Packed
    config: dict
    sync: Any

    def __call__(self, worker: Worker) -> dict:
        parts, callbacks = self.packed.unpack(self.config, worker.threads)
        with tuned_allocator():
            return self._run(worker, self.sync(worker), parts, callbacks)

    @abstractmethod
    def _run(self, worker: Worker, sync: GradientSync, parts: Any, callbacks: list) -> dict:
        """Compute in a worker."""


@dataclass
class KerasFitProgram(KerasProgram):
    """A fit."""

    settings: KerasFitSettings

    def _run(self, worker, sync, parts, callbacks):
        loop = KerasLoop(worker, sync, parts, self.settings, callbacks, self.config)
        if self.settings.run_url is None and sharded_layers(loop.model):
            raise UsageError(
                "A model with a ShardedEmbedding needs model_dir= in Estimator.from_keras, a "
                "folder that the driver and all workers share: workers write their rows there",
                code="argument-missing",
                argument="model_dir",
            )
        return loop.fit()


class KerasEpochs(FitLoop):
    """Epochs of a Keras model with callbacks, wherever their steps are made."""

    model: Any
    settings: KerasFitSettings
    rank: int
    _callbacks: WorkerCallbacks
    _numbers = ""  # what callbacks had counted
    _epoch_steps: Any  # None for a dataset of unknown length

    @abstractmethod
    def _train_epoch(self, number: int) -> tuple[bool, dict]:
        """Make what is left of an epoch.

        Returns
        -------
        bool, dict
            Whether the epoch is whole now, and its figures: ``logs`` and those of all frameworks.
        """

    def fit(self) -> Any:
        """Train to the end; returns what :meth:`_finish` does."""
        optimizer = self.model.optimizer
        self._begin_fit()
        self._run_epochs()
        if optimizer is not None:
            optimizer.finalize_variable_values(self.model.trainable_weights)
        self._callbacks.list.on_train_end()
        if not self._callbacks.is_empty or getattr(optimizer, "use_ema", False):
            self._saved = None  # the weights may have changed since
        return self._finish()

    def _attach(self, callbacks: Sequence[Any]) -> None:
        """Open the callbacks, once the steps of an epoch are known."""
        settings = self.settings
        self._callbacks = self._open_callbacks(
            callbacks,
            epochs=settings.initial_epoch + (settings.goal.epochs or 0) - settings.goal.first,
            steps=self._epoch_steps,
            verbose=settings.verbose,
        )

    def _open_callbacks(self, callbacks: Sequence[Any], **params: Any) -> WorkerCallbacks:
        """Return the callbacks of this process; a subclass may run all processes' in one."""
        return WorkerCallbacks(callbacks, self.model, self.rank, **params)

    def _begin_fit(self) -> None:
        """Call the hooks of the begin, and restore what callbacks had counted in this fit."""
        self.model.stop_training = False
        self._callbacks.list.on_train_begin()
        if self.settings.goal.is_begun(self.position) and self._numbers:
            self._callbacks.put_numbers(self._numbers)

    def _epoch(self) -> None:
        settings = self.settings  # callbacks count the epochs of their own fit
        number = settings.initial_epoch + self.position.epoch - settings.goal.first
        self._callbacks.list.on_epoch_begin(number)
        is_whole, entry = self._train_epoch(number)
        self._call_epoch_end(number, dict(entry["logs"]))
        logs = entry["logs"] = {
            name: value if isinstance(value, list) else float(value)
            for name, value in self._callbacks.logs.items()
            if isinstance(value, numbers.Real | list)
        }
        self._end_epoch(entry, is_whole, loss=logs.get("loss"), score=score_of(logs))

    def _entry_of(self, sums: dict, logs: dict, memory: list[int]) -> dict:
        """Return the figures of the epoch as they are kept."""
        return {
            "epoch": self.position.epoch + 1,
            "global_step": self.position.global_step,
            "num_samples": sums["num_samples"],
            "steps": self.position.batch,
            "logs": logs,
            "profile": {**sums["profile"], "peak_memory_bytes": memory, "ended_at": time.time()},
        }

    def _call_epoch_end(self, number: int, logs: dict) -> None:
        """Call the hooks of an epoch's end."""
        self._callbacks.list.on_epoch_end(number, logs)

    def _files(self) -> dict[str, bytes]:
        return {
            "model.pt": dump_weights(self.model),
            "optimizer.pt": dump_optimizers(self.model),
            "callbacks.json": self._callbacks.numbers().encode(),
        }

    def _load(self, files: dict[str, bytes]) -> None:
        put_weights(self.model, files["model.pt"])
        if "optimizer.pt" in files:
            put_optimizers(self.model, files["optimizer.pt"])
        self._numbers = files.get("callbacks.json", b"").decode()


class KerasLoop(KerasEpochs, WorkerLoop):
    """The training loop of Keras in one worker.

    A checkpoint holds the random state of every rank (also that of layers), its metrics of an
    unfinished epoch, and the callback counters of rank 0.
    """

    def __init__(
        self,
        worker: Worker,
        sync: GradientSync,
        parts: Any,
        settings: KerasFitSettings,
        callbacks: Sequence[Any],
        config: dict,
    ):
        self.worker, self.sync, self.settings = worker, sync, settings
        self.rank, self.size = sync.rank, sync.world_size
        self._config = config

        # creators run under one seed, so that all ranks start from the same weights
        seed_keras(settings.seed)
        # rows of tables need a folder to be written to
        place = None if settings.run_url is None else Place.of(worker)
        with placed(place):
            self.model = parts.build(training=True)
        check_optimizer(self.model)
        self._steps = WorkerSteps(
            self.model,
            sync,
            settings.batch_size or 0,
            settings.loss_weight,
            lambda text: self._warn_once(text, "loss"),
        )
        self._start(worker, sync)
        seed_keras(settings.seed)  # a dataset that shuffles does so alike on all ranks
        self._prepare_data()
        seed_keras(settings.seed, self.rank + 1)
        self._steps.attach()
        self._tables = self._steps.tables
        self._check_callbacks(callbacks)
        self._initial_metrics = values_of(self.model.metrics_variables)
        self._running = self._steps.running
        self._epoch_steps = settings.steps_per_epoch or self._data.steps
        self._attach(callbacks)
        self._restore()
        window = (self._layout.windows or [0] * self.size)[self.rank]
        self._data.start(self._assembly, settings, self.rank, window)
        self._parts: Iterator[Part] | None = None
        self._is_first = True  # no step of this fit has succeeded yet

    def _check_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Refuse what sharded embeddings do not go with."""
        if self._tables and any(getattr(c, "restore_best_weights", False) for c in callbacks):
            raise UsageError(
                "restore_best_weights of a callback does not go with a ShardedEmbedding, whose "
                "rows are on all workers; leave it out, and load a checkpoint of model_dir",
                code="argument-conflict",
                argument="restore_best_weights",
            )

    # -- the fit -------------------------------------------------------------------------------

    def _train_epoch(self, number):
        if not self.position.batch:
            self.model.reset_metrics()
        is_whole, logs = self._train_batches()
        if is_whole:
            self._running.merge()
        with kept_values(self.model.metrics_variables):  # the epoch may go on
            entry = self._entry(logs)
            if self._validation is not None and self.settings.validates_after(number + 1):
                entry["logs"].update(self._validate())
        return is_whole, entry

    def _train_batches(self) -> tuple[bool, dict]:
        """Make the steps that are left of the epoch.

        Returns
        -------
        bool, dict
            Whether the epoch is whole now, and the last figures.
        """
        position = self.position
        logs: dict[str, Any] = {}
        if not self.settings.steps_per_epoch:
            rest = self._rest
            self._epoch_steps = self._data.steps_of_pass(rest, position.epoch)
            self._parts = self._data.parts(position.epoch, position.batch, wrap=False, rest=rest)
        elif self._parts is None:
            self._parts = self._data.parts(0, position.global_step, wrap=True)
        while position.batch != self._epoch_steps:
            started = time.perf_counter()
            part = next(cast("Iterator[Part]", self._parts), None)
            if part is None:
                if not position.batch:
                    raise UsageError("The training data has no rows", code="data-empty")
                break
            logs = self._step(part, time.perf_counter() - started) or logs
            if position.batch != self._epoch_steps:
                if self._callbacks.stops_in_epoch and self._is_stopped():
                    return False, logs
                self._apply_triggers()
        return True, logs

    def _entry(self, logs) -> dict:
        """Return the figures of the epoch, the same on every rank."""
        rows = int(self._sums.rows)
        figures = figures_of(self.model, logs, rows, self.sync, self._initial_metrics)
        sums = cast("dict", self._sums.all_reduce(self.sync))  # an epoch has rows
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = [int(row[0]) for row in self.sync.all_gather([float(peak)])]
        return self._entry_of(sums, figures, peaks)

    def _validate(self) -> dict[str, float]:
        settings = self.settings
        batches = cast("Rows", self._validation).batches(
            replace(self._assembly, class_weight=None),
            settings.batch_size,
            self.size,
            settings.num_steps,
        )
        with self._running.merged():
            figures = evaluate_batches(
                self.model, self._steps, batches, self.sync, self._callbacks.list, self._tables
            )
        return {f"val_{name}": value for name, value in figures.items()}

    def _is_stopped(self) -> bool:
        """Return True if a callback has stopped the training, on any rank; a collective."""
        if not self._callbacks.is_empty:
            votes = self.sync.all_gather([float(self.model.stop_training)])
            self.model.stop_training = any(vote[0] for vote in votes)
        return self.model.stop_training

    # -- the state -----------------------------------------------------------------------------

    def _facts(self):
        return {**super()._facts(), "example": form_of(inputs_of(self._zero_row))}

    def _own(self):
        return {
            "rng": capture_rng(),
            "seeds": values_of(seed_states(self.model)),
            "metrics": values_of(self.model.metrics_variables),
        }

    def _put_sums(self, states):
        for variable, initial, *values in zip(
            self.model.metrics_variables,
            self._initial_metrics,
            *(state["metrics"] for state in states),
            strict=True,
        ):
            start = array_of(initial).astype("float64")
            gained = sum(array_of(value).astype("float64") - start for value in values)
            variable.assign((start + gained).astype(array_of(variable).dtype))

    @property
    def _source(self):
        return self._data.source

    def _left(self):
        return None if self.settings.steps_per_epoch else self._data.ids_from(self.position.batch)

    def _put_own(self, state):
        restore_rng(state["rng"])
        set_values(seed_states(self.model), state["seeds"])
        set_values(self.model.metrics_variables, state["metrics"])

    def _files(self):
        return {**super()._files(), **self._tables.files()}

    def _load(self, files):
        super()._load(self._tables.cut(files))

    def _slices(self):
        return self._tables.arrays()

    def _load_slices(self, slices):
        self._tables.load(slices)

    # -- one step ------------------------------------------------------------------------------

    def _step(self, part: Part, fetch_s: float) -> dict:
        position, number = self.position, self.position.batch
        self._callbacks.list.on_train_batch_begin(number)
        started = time.perf_counter()
        try:
            logs = self._steps.train(part.batch, part.rows, part.total, self._zero_row)
        except Exception as error:
            if self._is_first:
                self._assembly.check_order(error)
            raise
        self._is_first = False
        figures = numbers_of(logs)
        step_s = time.perf_counter() - started
        position.batch += 1
        position.global_step += 1
        self._sums.add(
            0.0,
            float(part.rows),
            part.rows,
            fetch_s=fetch_s,
            forward_s=step_s,
            step_s=fetch_s + step_s,
        )
        self._callbacks.list.on_train_batch_end(number, figures)
        epochs, steps = self.settings.goal.epochs or 0, self._epoch_steps or position.batch
        self.worker.progress(**self._progress(epochs, steps, figures.get("loss")))
        return logs

    # -- data ----------------------------------------------------------------------------------

    def _prepare_data(self) -> None:
        settings, shards = self.settings, self.worker.shards
        self._data = self._open(shards["data"])
        self._validation = self._open(shards["validation"]) if "validation" in shards else None
        check_end(self._data, "training", "steps_per_epoch", settings.steps_per_epoch)
        rows = 1
        if self._validation is not None:
            check_end(self._validation, "validation", "validation_steps", settings.num_steps)
            rows = self._validation.known["rows"]
        everyone = self._exchange({**self._data.known, "validation": rows})
        self._layout = self._data.plan(settings, everyone)
        self._assembly = settings.assembly(self.model, settings.class_weight)
        self._zero_row = self._data.example(self._types, self._assembly)
        check_step(self.model, self._data, "train_step")
        if self._validation is not None:
            check_step(self.model, self._validation, "test_step")
        build_for(self.model, self._zero_row)
        if self._validation is not None:
            self._validation.take_types(self._types, self._data)

    def _open(self, shard: Any) -> Rows:
        """Return the rows of a shard; a subclass may read them from somewhere else."""
        return open_rows(self.worker, shard, self.settings, self._config, self.sync)


# -- evaluation ----------------------------------------------------------------------------------


def evaluate_batches(
    model: Any,
    steps: Any,
    batches: Iterable,
    sync: GradientSync,
    callbacks: Any,
    tables: ModelTables,
) -> dict[str, float]:
    """Return the figures of a model over the batches of all workers; a collective.

    Parameters
    ----------
    model : keras.Model
    steps : Steps or WorkerSteps
    batches : iterable of (batch, rows)
        Of this worker.
    sync : GradientSync
    callbacks : keras.callbacks.CallbackList
    tables : ModelTables
    """
    model.reset_metrics()
    tables.begin(is_training=False)
    initial = values_of(model.metrics_variables)
    callbacks.on_test_begin()
    logs, rows = {}, 0
    for index, (batch, rows_of_batch) in enumerate(batches):
        callbacks.on_test_batch_begin(index)
        logs, rows = steps.test(batch), rows + rows_of_batch
        tables.errors.check()
        callbacks.on_test_batch_end(index, numbers_of(logs))
    tables.finish()
    figures = figures_of(model, logs, rows, sync, initial)
    callbacks.on_test_end(figures)
    return figures


def figures_of(
    model: Any, logs: dict, rows: int, sync: GradientSync, initial: list
) -> dict[str, float]:
    """Return the figures of an epoch, merged over the workers; a collective.

    Where a step returns figures other than the model's metrics, their means are returned.

    Parameters
    ----------
    model : keras.Model
    logs : dict
        What the last step of this worker returned.
    rows : int
        That this worker has seen.
    sync : GradientSync
    initial : list of tensor
        See :func:`merge_metrics`.
    """
    merge_metrics(model, sync, initial)
    metrics = numbers_of(model.get_metrics_result())
    names: list[str] = next((each for each in all_gather_json(sync, sorted(logs)) if each), [])
    if not names or set(names) <= set(metrics):
        return metrics
    figures = numbers_of(logs)
    everyone = sync.all_gather([float(rows), *(figures.get(name, 0.0) for name in names)])
    total = sum(row[0] for row in everyone) or 1.0
    return {
        name: sum(row[0] * row[1 + i] for row in everyone) / total for i, name in enumerate(names)
    }


def numbers_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as Python numbers (or lists of them)."""

    def number(value):
        array = array_of(value)
        return array.item() if array.ndim == 0 else array.tolist()

    return {name: number(value) for name, value in logs.items()}


@dataclass
class EvaluateProgram(KerasProgram):
    """An evaluation, as shipped to the workers."""

    settings: EvaluationSettings
    seed: int

    def _run(self, worker, sync, parts, callbacks):
        settings = self.settings
        seed_keras(self.seed)
        with placed(Place.of(worker)):
            model = parts.build(training=True)
        sync.start()
        data = open_rows(worker, worker.shard, settings, self.config, sync)
        check_end(data, "evaluation", "num_steps", settings.num_steps)
        known = all_gather_json(sync, data.known)
        if not sum(each["rows"] for each in known):
            raise UsageError("The data to evaluate has no rows", code="data-empty")
        assembly = settings.assembly(model)
        types = next((each["types"] for each in known if each["types"]), None)
        check_step(model, data, "test_step")
        build_for(model, data.example(types, assembly))
        tables = ModelTables(model)
        tables.connect(sync)
        weights = sync.broadcast(worker.state() if sync.rank == 0 else None)
        if weights:
            put_weights(model, tables.cut({"model.pt": weights})["model.pt"])
        if worker.options.get("slices"):
            tables.load(SavedSlices(**worker.options["slices"]))
        hooks = WorkerCallbacks(callbacks, model, sync.rank).list
        batches = data.batches(assembly, settings.batch_size, sync.world_size, settings.num_steps)
        return evaluate_batches(model, steps_of(model), batches, sync, hooks, tables)
