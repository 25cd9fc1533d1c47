"""Training loop of Keras models: steps, epochs and fits.

Like the PyTorch loop it is independent of the engine and the type of input.  A step calls the
model's ``train_step``; gradients are all-reduced before they reach the optimizer
(:mod:`~bigdl.training.keras.reducer`).  A rank without rows of a batch makes the step with a row of
zeros of weight 0, and then restores its local state.
"""

from __future__ import annotations

import functools
import numbers
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.common.platform.memory import peak_memory
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.worker import Worker
from bigdl.training.batches import BatchSource, all_gather_json
from bigdl.training.embedding_tables.keras_model import ModelTables, sharded_layers
from bigdl.training.embedding_tables.placement import TablePlacement, table_placement
from bigdl.training.fit import (
    EpochRunner,
    FitContext,
    Hooks,
    TrainState,
    Triggers,
    WorkerCheckpointer,
    WorkerStep,
    exchange,
    input_facts,
    start,
)
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.callbacks import WorkerCallbacks
from bigdl.training.keras.data import (
    KerasEvaluationSettings,
    Rows,
    WorkerBatch,
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
    values_of,
)
from bigdl.training.metrics import score_of
from bigdl.training.position import RunSettings
from bigdl.training.slices import SavedSlices
from bigdl.training.state import capture_rng, restore_rng

if TYPE_CHECKING:
    import keras
    import numpy as np

    from bigdl.runtime.shards.shard import LoaderShard, Shard


@dataclass(kw_only=True)
class KerasFitSettings(KerasEvaluationSettings, RunSettings):
    """Arguments of ``fit`` and of its validation, except callbacks, which are sent with the model.

    Attributes
    ----------
    initial_epoch : int
        Number of the first epoch of this fit, for callbacks.
    steps_per_epoch : int, optional
        Batches of an epoch; default all rows once.
    validation_freq : int or sequence of int
        Number of epochs between validations, or the numbers (from 1) of the epochs to validate.
    """

    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    class_weight: dict[int, float] | None = None
    verbose: int | str = 1
    loss_weight: Any = None

    def validates_after(self, epoch: int) -> bool:
        """Return True if a validation follows the epoch with this number (from 1)."""
        if isinstance(self.validation_freq, int):
            return epoch % self.validation_freq == 0
        return epoch in self.validation_freq


@dataclass
class KerasProgram(ABC):
    """Base class of the programs that Keras workers run.

    Attributes
    ----------
    packed : Packed
        The components of the model, and the callbacks.
    config : dict
    sync : type
        Class of the GradientSync.
    """

    packed: Packed
    config: dict[str, Any]
    sync: Any

    def __call__(self, worker: Worker) -> dict[str, Any]:
        parts, callbacks = self.packed.unpack(self.config, worker.threads)
        with tuned_allocator():
            return self._run(worker, self.sync(worker), parts, callbacks)

    @abstractmethod
    def _run(
        self, worker: Worker, sync: GradientSync, parts: Any, callbacks: list[Any]
    ) -> dict[str, Any]:
        """Run the program in a worker."""


@dataclass
class KerasFitProgram(KerasProgram):
    """Program that workers run for a Keras fit."""

    settings: KerasFitSettings

    def _run(
        self, worker: Worker, sync: GradientSync, parts: Any, callbacks: list[Any]
    ) -> dict[str, Any]:
        fit = KerasFit(worker, sync, parts, self.settings, callbacks, self.config)
        if self.settings.run_url is None and sharded_layers(fit.model):
            raise UsageError(
                "A model with a ShardedEmbedding needs model_dir= in Estimator.from_keras, a "
                "folder that the driver and all workers share: workers write their rows there",
                code="argument-missing",
                argument="model_dir",
            )
        return cast("dict[str, Any]", fit.epochs.run())


class KerasHooks(Hooks):
    """Callbacks of a Keras fit, and the files of its model.

    Parameters
    ----------
    context : FitContext
    model : keras.Model
    open_callbacks : callable
        Returns the :class:`WorkerCallbacks` of this process for the keywords ``epochs``, ``steps``
        and ``verbose``.
    tables : ModelTables, optional
        The sharded embeddings of the model.
    """

    def __init__(
        self,
        context: FitContext,
        model: keras.Model,
        open_callbacks: Callable[..., WorkerCallbacks],
        tables: ModelTables | None = None,
    ):
        self._model, self._settings = model, context.settings
        self._state, self._sync = context.state, context.sync
        self._open_callbacks, self._tables = open_callbacks, tables
        self._callbacks = WorkerCallbacks((), model, 0)  # replaced by `open`
        self._is_open = False
        self._numbers = ""  # counters of callbacks from a checkpoint
        self._has_step = False  # whether this process made a batch of the epoch

    def open(self) -> None:
        """Open the callbacks; called when the number of steps per epoch is known."""
        settings, self._is_open = self._settings, True
        self._callbacks = self._open_callbacks(
            epochs=settings.initial_epoch + (settings.stop_at.epochs or 0) - settings.stop_at.first,
            steps=self._state.epoch_steps,
            verbose=settings.verbose,
        )

    @property
    def are_called(self) -> bool:
        return not self._callbacks.is_empty

    @property
    def list(self) -> keras.callbacks.CallbackList:
        """The ``keras.callbacks.CallbackList``."""
        return self._callbacks.list

    @property
    def number(self) -> int:
        """Number of the current epoch, counted from the start of its fit as callbacks expect."""
        settings = self._settings
        number: int = settings.initial_epoch + self._state.position.epoch - settings.stop_at.first
        return number

    def begin_fit(self) -> None:
        if not self._is_open:
            self.open()
        self._model.stop_training = False
        self.list.on_train_begin()
        if self._state.stop_at.is_begun(self._state.position):
            self.put_numbers()

    def put_numbers(self) -> None:
        """Restore the counters of callbacks from a checkpoint of this fit."""
        if self._numbers:
            self._callbacks.put_numbers(self._numbers)

    def end_fit(self) -> bool:
        optimizer = self._model.optimizer
        if optimizer is not None:
            optimizer.finalize_variable_values(self._model.trainable_weights)
        self.list.on_train_end()
        return self.are_called or bool(getattr(optimizer, "use_ema", False))

    def begin_epoch(self) -> None:
        self._has_step = False
        self.list.on_epoch_begin(self.number)

    def end_batch(self, number: int, metrics: dict[str, Any]) -> None:
        """Run callbacks after a training batch."""
        self._has_step = True
        self.list.on_train_batch_end(number, metrics)

    def end_epoch(self, entry: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        self.list.on_epoch_end(self.number, dict(entry["logs"]))
        logs = entry["logs"] = {
            name: value if isinstance(value, list) else float(value)
            for name, value in self._callbacks.logs.items()
            if isinstance(value, numbers.Real | list)
        }
        self._state.stop = bool(self._model.stop_training)
        return {"loss": logs.get("loss"), "score": score_of(logs)}

    def is_stopped(self, *, in_epoch: bool = False) -> bool:
        if self._sync is None:
            return self._state.stop
        if in_epoch and not (self._has_step and self._callbacks.stops_in_epoch):
            return False
        if self.are_called:
            votes = self._sync.all_gather([float(self._model.stop_training)])
            self._model.stop_training = any(vote[0] for vote in votes)
        return bool(self._model.stop_training)

    def files(self) -> dict[str, bytes]:
        return {
            "model.pt": dump_weights(self._model),
            "optimizer.pt": dump_optimizers(self._model),
            "callbacks.json": self._callbacks.numbers().encode(),
            **({} if self._tables is None else self._tables.files()),
        }

    def load(self, files: dict[str, bytes]) -> None:
        if self._tables is not None:
            files = self._tables.cut(files)
        put_weights(self._model, files["model.pt"])
        if "optimizer.pt" in files:
            put_optimizers(self._model, files["optimizer.pt"])
        self._numbers = files.get("callbacks.json", b"").decode()


def entry_of(
    state: TrainState, sums: dict[str, Any], logs: dict[str, Any], memory: Sequence[int]
) -> dict[str, Any]:
    """Build the history entry of an epoch.

    Parameters
    ----------
    state : TrainState
    sums : dict
        Merged :class:`~bigdl.training.metrics.EpochSums`.
    logs : dict
        Metrics of the model.
    memory : sequence of int
        Peak memory of each rank's process in bytes.
    """
    return {
        **state.entry(),
        "num_samples": sums["num_samples"],
        "steps": state.position.batch,
        "logs": logs,
        "profile": {**sums["profile"], "peak_memory_bytes": memory, "ended_at": time.time()},
    }


@dataclass(eq=False)
class KerasStep(WorkerStep):
    """Training step that calls the ``train_step`` of a Keras model in one worker.

    A checkpoint has the random state of every rank, including that of layers, its metrics of an
    unfinished epoch, and the callback counters of rank 0.
    """

    context: FitContext
    model: Any
    hooks: KerasHooks
    steps: WorkerSteps
    rows: WorkerRows

    def __post_init__(self) -> None:
        model, steps = self.model, self.steps
        self._tables, self.running = steps.tables, steps.running
        self._initial_metrics = values_of(model.metrics_variables)
        self._epoch_steps = self.context.state.epoch_steps
        self._parts: Iterator[WorkerBatch] | None = None
        self._logs: dict[str, Any] = {}  # logs of the last step
        self._is_ended = False  # whether the rows of the epoch are exhausted
        self._is_first = True  # whether no step of this fit has succeeded yet

    # -- an epoch ------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self._is_ended or self.context.state.position.batch == self._epoch_steps

    def begin_epoch(self) -> None:
        state, data = self.context.state, self.rows.data
        position, remaining = state.position, state.remaining
        if not position.batch:
            self.model.reset_metrics()
        self._logs, self._is_ended = {}, False
        if not self.context.settings.steps_per_epoch:
            self._epoch_steps = data.steps_of_pass(remaining, position.epoch)
            self._parts = data.parts(
                position.epoch, position.batch, wrap=False, remaining=remaining
            )
        elif self._parts is None:
            self._parts = data.parts(0, position.global_step, wrap=True, remaining=remaining)

    def run(self, triggers: Triggers) -> bool:
        started = time.perf_counter()
        part = next(cast("Iterator[WorkerBatch]", self._parts), None)
        if part is None:
            if not self.context.state.position.batch:
                raise UsageError("The training data has no rows", code="data-empty")
            self._is_ended = True
            return False
        self._logs = self._train(part, time.perf_counter() - started) or self._logs
        return not self.is_done and triggers.ask()

    def _train(self, part: WorkerBatch, fetch_s: float) -> dict[str, Any]:
        state, position, rows = self.context.state, self.context.state.position, self.rows
        number = position.batch
        self.hooks.list.on_train_batch_begin(number)
        started, sync = time.perf_counter(), self.context.sync
        before_s = sync.collective_s
        try:
            logs = self.steps.train(part.batch, part.rows, part.total, rows.zero_row)
        except Exception as error:
            if self._is_first:
                rows.assembly.check_order(error)
            raise
        self._is_first = False
        metrics = numbers_of(logs)
        step_s, exchange_s = time.perf_counter() - started, sync.collective_s - before_s
        position.batch += 1
        position.global_step += 1
        state.sums.add(
            0.0,
            float(part.rows),
            part.rows,
            fetch_s=fetch_s,
            forward_s=step_s - exchange_s,
            exchange_s=exchange_s,
            step_s=fetch_s + step_s,
        )
        state.exchanges.add(exchange_s)
        self.hooks.end_batch(number, metrics)
        epochs, steps = state.stop_at.epochs or 0, self._epoch_steps or position.batch
        self.context.worker.progress(**state.progress(epochs, steps, metrics.get("loss")))
        return logs

    def end_epoch(self) -> dict[str, Any]:
        if self.is_done:
            self.running.merge()
        model, sync, rows = self.model, self.context.sync, self.rows
        with kept_values(model.metrics_variables):  # the epoch may continue
            seen = int(self.context.state.sums.rows)
            logs = metrics_of(model, self._logs, seen, sync, self._initial_metrics)
            # not None, since an epoch has rows
            sums = cast("dict[str, Any]", self.context.state.sums.all_reduce(sync))
            peaks = [int(row[0]) for row in sync.all_gather([float(peak_memory())])]
            entry = entry_of(self.context.state, sums, logs, peaks)
            validates = self.context.settings.validates_after(self.hooks.number + 1)
            if rows.validation is not None and validates:
                logs.update(self._validate(rows.validation))
        return entry

    def _validate(self, data: Rows) -> dict[str, float]:
        settings, sync = self.context.settings, self.context.sync
        batches = data.batches(
            replace(self.rows.assembly, class_weight=None),
            settings.batch_size,
            sync.world_size,
            settings.num_steps,
        )
        with self.running.merged():
            metrics = evaluate_batches(
                self.model, self.steps, batches, sync, self.hooks.list, self._tables
            )
        return {f"val_{name}": value for name, value in metrics.items()}

    # -- the state -----------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        facts = input_facts(self.context.settings, self.rows.inputs)
        return {**facts, "example": form_of(inputs_of(self.rows.zero_row))}

    def rank_state(self) -> dict[str, Any]:
        return {
            "rng": capture_rng(),
            "seeds": values_of(seed_states(self.model)),
            "metrics": values_of(self.model.metrics_variables),
        }

    def put_rank_state(self, state: dict[str, Any]) -> None:
        restore_rng(state["rng"])
        set_values(seed_states(self.model), state["seeds"])
        set_values(self.model.metrics_variables, state["metrics"])

    def put_sums(self, states: list[dict[str, Any]]) -> None:
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
    def source(self) -> BatchSource:
        return self.rows.data.source

    def left(self) -> np.ndarray | None:
        if self.context.settings.steps_per_epoch:
            return None
        return self.rows.data.ids_from(self.context.state.position.batch)

    def slices(self) -> dict[str, np.ndarray]:
        return {} if self._tables is None else self._tables.arrays()

    def load_slices(self, slices: SavedSlices) -> None:
        if self._tables is not None:
            self._tables.load(slices)


class WorkerRows:
    """Training and validation rows of one worker, and their conversion to batches.

    Parameters
    ----------
    context : FitContext
    model : keras.Model
        Model whose variables are built here.
    open_shard : callable
        ``open_shard(shard)`` returns the rows of a shard.

    Attributes
    ----------
    data, validation : ColumnRows or DatasetRows
        The latter is None without validation.
    inputs : list or None
        Types of the model's inputs.
    assembly : BatchArguments
    zero_row : tuple
        A batch of one row of zeros.
    """

    def __init__(self, context: FitContext, model: keras.Model, open_shard: Callable[[Any], Rows]):
        settings, shards, rows = context.settings, context.worker.shards, 1
        self.data, self.validation = open_shard(shards["data"]), None
        if "validation" in shards:
            self.validation = open_shard(shards["validation"])
        check_end(self.data, "training", "steps_per_epoch", settings.steps_per_epoch)
        if self.validation is not None:
            check_end(self.validation, "validation", "validation_steps", settings.num_steps)
            rows = self.validation.known["rows"]
        everyone, types = exchange(context.sync, {**self.data.known, "validation": rows})
        context.state.layout = self.data.plan(settings, everyone)
        context.state.epoch_steps = settings.steps_per_epoch or self.data.steps
        self.inputs = types and types[0]
        self.assembly = settings.assembly(model, settings.class_weight)
        self.zero_row = self.data.example(types, self.assembly)
        check_step(model, self.data, "train_step")
        if self.validation is not None:
            check_step(model, self.validation, "test_step")
        build_for(model, self.zero_row)
        if self.validation is not None:
            self.validation.take_types(types, self.data)


class KerasFit:
    """Keras fit in one worker, assembled from its components.

    Parameters
    ----------
    worker : Worker
    sync : GradientSync
    parts : KerasParts
        Any object with ``build(training=True)``.
    settings : KerasFitSettings
    callbacks : sequence of keras.callbacks.Callback
    config : dict
    open_shard : callable, optional
        ``open_shard(shard, model)`` returns the rows of a shard; replaces the default reader.
    open_callbacks : callable, optional
        Replaces :class:`WorkerCallbacks`, such as for callbacks that run on one rank for all.

    Attributes
    ----------
    state : TrainState
    model : keras.Model
    hooks : KerasHooks
    rows : WorkerRows
    epochs : EpochRunner
    """

    def __init__(
        self,
        worker: Worker,
        sync: GradientSync,
        parts: Any,
        settings: KerasFitSettings,
        callbacks: Sequence[Any],
        config: dict[str, Any],
        *,
        open_shard: Callable[[Any, Any], Rows] | None = None,
        open_callbacks: Callable[..., WorkerCallbacks] = WorkerCallbacks,
    ):
        rank, self.state = sync.rank, TrainState(settings.stop_at)
        context = FitContext(settings, self.state, worker, sync)

        # creators run under one seed, so that all ranks start with the same weights
        seed_keras(settings.seed)
        # sharded tables need a folder for their rows
        with table_placement(None if settings.run_url is None else TablePlacement.of(worker)):
            self.model = model = parts.build(training=True)
        check_optimizer(model)
        steps = WorkerSteps(
            model,
            sync,
            settings.batch_size or 0,
            settings.loss_weight,
            lambda text: context.warn(text, "loss"),
        )
        writer = start(worker, sync)
        seed_keras(settings.seed)  # a dataset shuffles alike on all ranks

        def rows_of(shard: Shard | LoaderShard) -> Rows:
            if open_shard is not None:
                return open_shard(shard, model)
            is_training = shard is worker.shards["data"]
            return open_rows(worker, shard, settings, config, sync, is_training=is_training)

        self.rows = rows = WorkerRows(context, model, rows_of)
        seed_keras(settings.seed, rank + 1)
        steps.attach()
        if steps.tables is not None:
            _check_callbacks(callbacks)
        opened = functools.partial(open_callbacks, callbacks, model, rank)
        self.hooks = hooks = KerasHooks(context, model, opened, steps.tables)
        step = KerasStep(context, model, hooks, steps, rows)
        hooks.open()
        checkpointer = WorkerCheckpointer(context, hooks, step, writer)
        checkpointer.restore()
        window = (self.state.layout.windows or [0] * sync.world_size)[rank]
        rows.data.start(rows.assembly, settings, rank, window)
        self.epochs = EpochRunner(context, Triggers(context), hooks, step, checkpointer)


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise an error for callbacks that sharded embeddings do not support."""
    if any(getattr(c, "restore_best_weights", False) for c in callbacks):
        raise UsageError(
            "restore_best_weights of a callback is not supported with a ShardedEmbedding, whose "
            "rows are on all workers; remove it, and load a checkpoint of model_dir",
            code="argument-conflict",
            argument="restore_best_weights",
        )


# -- evaluation ----------------------------------------------------------------------------------


def evaluate_batches(
    model: keras.Model,
    steps: Any,
    batches: Iterable[Any],
    sync: GradientSync,
    callbacks: keras.callbacks.CallbackList,
    tables: ModelTables | None,
) -> dict[str, float]:
    """Evaluate a model on the batches of all workers; return its metrics (collective operation).

    Parameters
    ----------
    model : keras.Model
    steps : Steps or WorkerSteps
    batches : iterable of (batch, rows)
        Batches of this worker.
    sync : GradientSync
    callbacks : keras.callbacks.CallbackList
    tables : ModelTables or None
    """
    model.reset_metrics()
    if tables is not None:
        tables.begin(is_training=False)
    initial = values_of(model.metrics_variables)
    callbacks.on_test_begin()
    logs, rows = {}, 0
    for index, (batch, rows_of_batch) in enumerate(batches):
        callbacks.on_test_batch_begin(index)
        logs, rows = steps.test(batch), rows + rows_of_batch
        if tables is not None:
            tables.errors.check()
        callbacks.on_test_batch_end(index, numbers_of(logs))
    if tables is not None:
        tables.finish()
    metrics = metrics_of(model, logs, rows, sync, initial)
    callbacks.on_test_end(metrics)
    return metrics


def metrics_of(
    model: keras.Model, logs: dict[str, Any], rows: int, sync: GradientSync, initial: list[Any]
) -> dict[str, float]:
    """Return the merged metrics of all workers for an epoch or evaluation; a collective operation.

    If a step returns values other than the model's metrics, their means are returned.

    Parameters
    ----------
    model : keras.Model
    logs : dict
        Logs of this worker's last step.
    rows : int
        Number of rows that this worker has seen.
    sync : GradientSync
    initial : list of tensor
        See :func:`merge_metrics`.
    """
    merge_metrics(model, sync, initial)
    metrics = numbers_of(model.get_metrics_result())
    names: list[str] = next((each for each in all_gather_json(sync, sorted(logs)) if each), [])
    if not names or set(names) <= set(metrics):
        return metrics
    values = numbers_of(logs)
    everyone = sync.all_gather([float(rows), *(values.get(name, 0.0) for name in names)])
    total = sum(row[0] for row in everyone) or 1.0
    return {
        name: sum(row[0] * row[1 + i] for row in everyone) / total for i, name in enumerate(names)
    }


def numbers_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert metrics to Python numbers, or lists of them."""

    def number(value: object) -> float | list[Any]:
        array = array_of(value)
        numbers: float | list[Any] = array.tolist()  # a number if there are no dimensions
        return numbers

    return {name: number(value) for name, value in logs.items()}


@dataclass
class KerasEvaluateProgram(KerasProgram):
    """Program that workers run for a Keras evaluation."""

    settings: KerasEvaluationSettings
    seed: int

    def _run(
        self, worker: Worker, sync: GradientSync, parts: Any, callbacks: list[Any]
    ) -> dict[str, Any]:
        settings = self.settings
        seed_keras(self.seed)
        with table_placement(TablePlacement.of(worker)):
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
        tables = ModelTables.of(model)
        if tables is not None:
            tables.connect(sync)
        weights = sync.broadcast(worker.state() if sync.rank == 0 else None)
        if weights and tables is not None:
            weights = tables.cut({"model.pt": weights})["model.pt"]
        if weights:
            put_weights(model, weights)
        if worker.options.get("slices") and tables is not None:
            tables.load(SavedSlices(**worker.options["slices"]))
        hooks = WorkerCallbacks(callbacks, model, sync.rank).list
        batches = data.batches(assembly, settings.batch_size, sync.world_size, settings.num_steps)
        return evaluate_batches(model, steps_of(model), batches, sync, hooks, tables)
