"""The training loop of Keras: one step, one epoch, one fit.

Like the loop of PyTorch it knows neither which engine runs it nor what the input was.  The step is
the model's own ``train_step``; gradients meet where it hands them to the optimizer
(:mod:`~bigdl.orca.learn.tf2.reducer`).  A rank without rows of a batch makes the step with a row of
zeros that weighs nothing, and forgets what that has done to its own state.
"""

from __future__ import annotations

import contextlib
import numbers
import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.tf2.callbacks import WorkerCallbacks
from bigdl.orca.learn.tf2.data import Assembly
from bigdl.orca.learn.tf2.evaluation import evaluate_batches, figures_of, numbers_of
from bigdl.orca.learn.tf2.fit_settings import KerasFitSettings
from bigdl.orca.learn.tf2.forms import form_of
from bigdl.orca.learn.tf2.keeper import KerasKeeper
from bigdl.orca.learn.tf2.opening import build_for, check_end, open_rows
from bigdl.orca.learn.tf2.parts import KerasParts, Packed, fit_divisor
from bigdl.orca.learn.tf2.reducer import GradientReducer
from bigdl.orca.learn.tf2.running import RunningWeights, changed_by_rows
from bigdl.orca.learn.tf2.runtime import seed_keras
from bigdl.orca.learn.tf2.sources import Part
from bigdl.orca.learn.tf2.state import seed_states, tensor_of, to_variable
from bigdl.orca.learn.tf2.steps import steps_of
from bigdl.training.batches import BatchLayout, all_gather_json
from bigdl.training.checkpoint import BackgroundWriter
from bigdl.training.figures import score_of
from bigdl.training.loop import WorkerLoop, open_run_directory

__all__ = ["KerasFitProgram", "KerasLoop"]


@dataclass
class KerasFitProgram:
    """A fit, as shipped to the workers.

    Attributes
    ----------
    packed : Packed
        The parts of the model, and the callbacks.
    """

    packed: Packed
    config: dict
    settings: KerasFitSettings
    sync: Any  # class of the GradientSync

    def __call__(self, worker):
        parts, callbacks = self.packed.unpack(self.config, worker.threads)
        with tuned_allocator():
            loop = KerasLoop(
                worker, self.sync(worker), parts, self.settings, callbacks, self.config
            )
            try:
                return loop.fit()
            except Exception:
                if loop.reducer.failure is not None:  # TensorFlow has made another one of it
                    raise loop.reducer.failure from None
                raise


class KerasLoop(WorkerLoop):
    """One worker's part of a fit."""

    def __init__(
        self, worker, sync, parts: KerasParts, settings: KerasFitSettings, callbacks, config: dict
    ):
        self.worker, self.sync, self.settings = worker, sync, settings
        self.rank, self.size = sync.rank, sync.world_size
        self._config = config

        # creators run under one seed, so that all ranks start from the same weights
        seed_keras(settings.seed)
        self.model = parts.build(training=True)
        _check_optimizer(self.model)
        self._divisor = fit_divisor(self.model)
        self.reducer = GradientReducer(sync, settings.batch_size or 0)
        writer = BackgroundWriter()
        worker.at_exit(writer.wait)  # after the sync has stopped: a peer may wait for it
        sync.start()
        seed_keras(settings.seed)  # a dataset that shuffles does so alike on all ranks
        batches = self._prepare_data()
        if self._divisor == "none" and self.model.losses and self.size > 1:
            raise UsageError(
                "A loss with reduction='sum' does not go with regularization, which every worker "
                "would add; use reduction='sum_over_batch_size'"
            )
        seed_keras(settings.seed, self.rank + 1)
        self._spread_seeds()
        self.reducer.attach(self.model)
        self._steps = steps_of(self.model)
        self._running = RunningWeights(self.model, sync)
        self._initial_metrics = [tensor_of(v) for v in self.model.metrics_variables]
        self._checkpoints = KerasKeeper(
            worker,
            sync,
            self.model,
            self._running,
            batches,
            open_run_directory(settings, worker, self.rank),
            None if self._types is None else self._types[0],
            writer=writer,
        )
        self._checkpoints.example = form_of(self._made_up[0])
        self.position, self._sums = self._checkpoints.restore()
        window = (self._checkpoints.windows or [0] * self.size)[self.rank]
        self._source = self._data.source(self._plan, self._assembly, settings, self.rank, window)
        self._epoch_steps = settings.steps_per_epoch or self._source.steps
        self._callbacks = self._checkpoints.callbacks = WorkerCallbacks(
            callbacks,
            self.model,
            self.rank,
            epochs=settings.initial_epoch + (settings.goal.epochs or 0) - settings.goal.first,
            steps=self._epoch_steps,
            verbose=settings.verbose,
        )
        self._has_callbacks = bool(callbacks)
        optimizer = self.model.optimizer
        self._may_change_at_end = self._has_callbacks or getattr(optimizer, "use_ema", False)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> dict:
        """Train to the end; rank 0 returns where the final state is."""
        self.model.stop_training = False
        self._callbacks.list.on_train_begin()
        if self.settings.goal.is_begun(self.position) and self._checkpoints.callback_numbers:
            self._callbacks.put_numbers(self._checkpoints.callback_numbers)
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        while not self._is_over():
            self._epoch()
        if self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        self._callbacks.list.on_train_end()
        if self._may_change_at_end:
            self._checkpoints.expect_changes()
        return self._finish()

    def _epoch(self):
        position, number = self.position, self.settings.epoch_number(self.position)
        self._callbacks.list.on_epoch_begin(number)
        if not position.step:
            self.model.reset_metrics()
        is_whole, logs = self._batches()
        if is_whole:
            self._running.merge()
        with self._metrics_kept():
            entry = self._entry(logs)
            if self._validation is not None and self.settings.validates_after(number + 1):
                entry["logs"].update(self._validate())
        self._callbacks.list.on_epoch_end(number, dict(entry["logs"]))
        entry["logs"] = {
            name: value if isinstance(value, list) else float(value)
            for name, value in self._callbacks.noted.items()
            if isinstance(value, numbers.Real | list)
        }
        if not is_whole:
            position.partial = entry
            return
        self._close_epoch(entry)
        self._checkpoint_after_epoch(entry["logs"].get("loss"), score_of(entry["logs"]))

    def _batches(self) -> tuple[bool, dict]:
        """The batches that are left of the epoch: whether it is whole now, and the last figures."""
        position, logs = self.position, {}
        if self.settings.steps_per_epoch:
            self._source.seek(0, position.global_step)
        else:
            self._source.seek(position.epoch, position.step)
        while position.step != self._epoch_steps:
            started = time.perf_counter()
            part = self._source.next(wrap=bool(self.settings.steps_per_epoch))
            if not part.total:
                if not position.step:
                    raise UsageError("The training data has no rows")
                break
            logs = self._step(part, time.perf_counter() - started) or logs
            if position.step != self._epoch_steps:
                if self._callbacks.stops_in_epoch and self._is_stopped():
                    return False, logs
                self._checkpoint_in_epoch()
        return True, logs

    def _entry(self, logs) -> dict:
        """The figures of the epoch, the same on every rank."""
        rows = int(self._sums.rows)
        figures = figures_of(self.model, logs, rows, self.sync, self._initial_metrics)
        entry = self._sums.reduce(self.sync)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = [int(row[0]) for row in self.sync.all_gather([float(peak)])]
        return {
            "epoch": self.position.epoch + 1,
            "global_step": self.position.global_step,
            "num_samples": entry["num_samples"],
            "steps": self.position.step,
            "logs": figures,
            "profile": {**entry["profile"], "peak_memory_bytes": peaks, "ended_at": time.time()},
        }

    def _validate(self) -> dict[str, float]:
        settings = self.settings.validation
        batches = self._validation.batches(
            replace(self._assembly, class_weight=None),
            settings.batch_size,
            self.size,
            settings.num_steps,
        )
        with self._running.merged():
            found = evaluate_batches(
                self.model, self._steps, batches, self.sync, self._callbacks.list
            )
        return {f"val_{name}": value for name, value in found.items()}

    @contextlib.contextmanager
    def _metrics_kept(self):
        """Leave the metrics of the epoch, which may go on, as they were before the block."""
        own = [(v, tensor_of(v)) for v in self.model.metrics_variables]
        yield
        for variable, value in own:
            to_variable(variable, value)

    def _is_over(self) -> bool:
        return self.settings.goal.is_reached(self.position) or self._is_stopped()

    def _stop(self) -> None:
        self.model.stop_training = True

    def _is_stopped(self) -> bool:
        """Whether a callback has stopped the training, on any rank; a collective."""
        if self._has_callbacks:
            votes = self.sync.all_gather([float(self.model.stop_training)])
            self.model.stop_training = any(vote[0] for vote in votes)
        return self.model.stop_training

    # -- one step ------------------------------------------------------------------------------

    def _step(self, part: Part, fetch_s: float) -> dict:
        position, number = self.position, self.position.step
        self._callbacks.list.on_train_batch_begin(number)
        started = time.perf_counter()
        self.reducer.weight, self.reducer.has_rows = self._weight(part), bool(part.rows)
        logs = self._steps.train(part.batch) if part.rows else self._step_along()
        self.reducer.check()
        figures = numbers_of(logs)
        step_s = time.perf_counter() - started
        position.step += 1
        position.global_step += 1
        self._running.rows += part.rows
        self._sums.add(
            0.0,
            float(part.rows),
            part.rows,
            fetch_s=fetch_s,
            forward_s=step_s,
            backward_s=0.0,
            step_s=fetch_s + step_s,
        )
        self._callbacks.list.on_train_batch_end(number, figures)
        goal = self.settings.goal
        self.worker.progress(
            epoch=position.epoch - goal.first,
            epochs=(goal.epochs or 0) - goal.first,
            step=position.step,
            steps=self._epoch_steps or position.step,
            loss=figures.get("loss"),
        )
        return logs

    def _weight(self, part) -> float:
        """The weight of this rank's loss in that of the batch."""
        if self.size == 1:
            return 1.0
        if self._divisor == "none":
            return float(part.rows > 0)
        own, total = float(part.rows), float(part.total)
        if self._divisor == "weights":
            if part.rows and len(part.batch) > 2:
                own = float(np.asarray(part.batch[2], "float64").sum())
            total = sum(row[0] for row in self.sync.all_gather([own]))
        return own / total if total else 0.0

    def _step_along(self) -> dict:
        """Take part in a step without rows."""
        before = [(v, tensor_of(v)) for v in changed_by_rows(self.model)]
        self._steps.train(self._made_up)
        for variable, value in before:
            to_variable(variable, value)
        return {}

    # -- data ----------------------------------------------------------------------------------

    def _prepare_data(self) -> BatchLayout:
        settings, shards = self.settings, self.worker.shards
        columns = settings.validation
        self._data = self._open(shards["data"])
        self._validation = self._open(shards["validation"]) if "validation" in shards else None
        check_end(self._data, "training", "steps_per_epoch", settings.steps_per_epoch)
        if self._validation is not None:
            check_end(self._validation, "validation", "validation_steps", columns.num_steps)
        rows = 1 if self._validation is None else self._validation.known["rows"]
        everyone = all_gather_json(self.sync, {**self._data.known, "validation": rows})
        if not sum(each["validation"] for each in everyone):
            raise UsageError("The validation data has no rows")
        self._plan, batches = self._data.plan(settings, everyone)
        self._types = next((each["types"] for each in everyone if each["types"]), None)
        self._assembly = Assembly.of(
            self.model,
            columns.feature_cols,
            columns.label_cols,
            weighted=columns.weighted,
            class_weight=settings.class_weight,
        )
        self._made_up = self._data.example(self._types, self._assembly)
        build_for(self.model, self._made_up)
        if self._validation is not None:
            self._validation.take_types(self._types, self._data)
        return batches

    def _open(self, shard):
        return open_rows(self.worker, shard, self.settings.validation, self._config, self.sync)

    def _spread_seeds(self):
        """Let the random layers of every rank but the first draw other numbers."""
        if self.rank == 0:
            return
        for variable in seed_states(self.model):
            entropy = [*(int(n) for n in tensor_of(variable).reshape(-1)), self.rank]
            drawn = np.random.SeedSequence(entropy).generate_state(variable.shape[0]) >> 1
            variable.assign(drawn.astype("int64"))


def _check_optimizer(model):
    """A step of the user's own may do without the compiled optimizer."""
    import keras

    if model.optimizer is None and type(model).train_step is keras.Model.train_step:
        raise UsageError("fit needs an optimizer; pass it to model.compile")
