"""What ``fit`` was asked for."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.pytorch.evaluation import EvaluationSettings, evaluate_shard
from bigdl.orca.learn.pytorch.forward import BatchColumns, counts_unevenly, forward_for
from bigdl.orca.learn.pytorch.gradients import Clipping, Update, may_be_sparse
from bigdl.orca.learn.pytorch.parts import Built, ModelParts
from bigdl.orca.learn.pytorch.runner import Runner, WorkerBatches
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.training.batches import (
    BatchLayout,
    all_gather_json,
    open_batches,
    plan_batches,
    shuffle_memory,
)
from bigdl.training.checkpoint import BackgroundWriter, CheckpointManager
from bigdl.training.device import device_of, move, precision_of, to_device
from bigdl.training.figures import EpochSums, score_of, validation_names
from bigdl.training.fit import RunSettings, Training
from bigdl.training.loop import WorkerLoop, open_run_directory
from bigdl.training.state import (
    RunningState,
    capture_rng,
    dumps,
    isolated_rng,
    loads,
    restore_rng,
    seed_everything,
)

__all__ = [
    "Buffers",
    "FitProgram",
    "FitSettings",
    "Iteration",
    "TorchCheckpointManager",
    "TorchLoop",
    "TorchTraining",
]


@dataclass
class FitSettings(RunSettings):
    """The arguments of ``fit`` as the workers get them.

    Attributes
    ----------
    label_cols : sequence of str
        With `weight_col` its column is the last one.
    per_worker : bool
        Whether the validation figures of each worker are wanted too.
    accumulate : int
        Batches of one update.
    precision : str
        ``"fp32"`` or ``"bf16"``.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    summary : bool
        Whether loss, learning rate and throughput of every step are recorded.
    """

    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    metrics: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    per_worker: bool = False
    clipping: Clipping = field(default_factory=Clipping)
    accumulate: int = 1
    precision: str = "fp32"
    weighted: bool = False
    summary: bool = False


class Buffers(RunningState):
    """The buffers of a module."""

    def own(self) -> list:
        """A copy of this worker's buffers."""
        return [buffer.clone() for buffer in self._model.buffers()]

    def put(self, values: list) -> None:
        """Set this worker's buffers, e.g. to what :meth:`own` gave."""
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)


class TorchCheckpointManager(CheckpointManager):
    """:class:`~bigdl.training.checkpoint.CheckpointManager` for the parts of a PyTorch training.

    Every rank's own are its random numbers.
    """

    _built: Built
    #: of the loop, if steps are recorded
    summary: StepSummary | None = None

    def _initial(self):
        return {"model.pt": dumps(self._built.model.state_dict())}

    def _shared(self):
        files = self._built.files()
        if self.summary is not None:
            files["summary.pt"] = dumps(self.summary.take())
        return files

    def _put_shared(self, files):
        self._built.load(files)
        if self.summary is not None and "summary.pt" in files:
            self.summary.put(loads(files["summary.pt"]))

    def _own(self):
        return capture_rng()

    def _put_own(self, state):
        restore_rng(state)


class Iteration(Runner):
    """The part of a training loop that repeats; the loop makes what it works with."""

    settings: FitSettings
    worker: Any
    sync: Any
    summary: StepSummary | None
    _plan: Any
    _data: Any
    _kind: Any
    _built: Any
    _buffers: Any
    _update: Update
    _sums: EpochSums
    _is_uneven: bool
    _precision: Callable

    def _iteration(self, order) -> bool:
        """One batch; returns whether it ended in an update of the weights."""
        position = self.position
        started = time.perf_counter()
        start, stop, batch_rows = self._plan.batch(position.step, self.rank)
        rows = stop - start
        self.batch_idx = position.step
        self.batch = self.output = self.target = self.loss = None
        if rows:
            self.batch = to_device(self._data.batch(start, stop, order), self.device)
        self.call("before_train_iter")
        self._update.begin()
        fetched = forwarded = time.perf_counter()
        if rows:
            with self._precision():
                self._forward()
            forwarded = time.perf_counter()
        counted, total = self._counted(rows, batch_rows)
        position.step += 1
        self.updated = self._backward(counted, total)
        computed = time.perf_counter()
        self._buffers.rows += rows
        loss = self.loss.item() if counted and self.loss is not None else 0.0
        parts = loss, float(rows)  # what adds up to the loss of the batch, and what it counts
        if self.settings.weighted:
            parts = loss if self._kind.sums else loss * counted, counted
        elif not self._kind.sums:
            parts = loss * (counted / total if total else 0.0) * batch_rows, float(rows)
        if self.updated:
            position.global_step += 1
            self._built.step_scheduler_after_update(self)
        self._sums.add(
            *parts,
            rows,
            fetch_s=fetched - started,
            forward_s=forwarded - fetched,
            backward_s=computed - forwarded,
            step_s=time.perf_counter() - started,
        )
        if self.summary is not None:
            self.summary.add(self, parts, batch_rows, time.perf_counter() - started, self.updated)
        self.call("after_train_iter")
        self.worker.progress(
            epoch=position.epoch - self.settings.goal.first,
            epochs=self.num_epochs - self.settings.goal.first,
            step=position.step,
            steps=self._plan.steps,
            loss=self._sums.mean(),
        )
        return self.updated

    def _forward(self):
        self.forward_by(lambda: self._kind.forward(self.batch, self.batch_idx))
        if self.main is None:
            self.forward()
            return
        self.main.on_train_forward(self)
        if not hasattr(self.loss, "backward"):
            raise UsageError(
                "on_train_forward (or on_iter_forward) of the MainCallback must set runner.loss to "
                f"a tensor, it is {type(self.loss).__name__}"
            )

    def _backward(self, counted, total) -> bool:
        """From the loss to gradients, and to new weights if an update is due; a collective."""
        if self.main is not None and self.main.owns_backward:
            if self.loss is None:  # takes part in every pass without having a say
                self.loss = sum((p * 0).sum() for p in self._update.parameters if p.requires_grad)
            weight = float(counted > 0) if self._kind.sums else counted / total if total else 0.0
            with self._update.by_hand(weight):
                self.main.on_iter_backward(self)
            if self.batch is None:
                self.loss = None
            return True
        self._update.add(self.loss, counted, total)
        if not self._update.is_due and self.position.step < self._plan.steps:
            return False
        self._update.step()
        return True

    def _counted(self, rows, batch_rows) -> tuple[float, float]:
        """What the loss was divided by on this rank and on all of them."""
        if not self._is_uneven:
            return float(rows), float(batch_rows)
        own = self._kind.denominator(self.output, self.target, rows) if rows else 0.0
        return own, sum(row[0] for row in self.sync.all_gather([own]))


@dataclass
class FitProgram:
    """A fit, as shipped to the workers."""

    parts: ModelParts
    settings: FitSettings
    sync: Any  # class of the GradientSync

    def __call__(self, worker):
        with tuned_allocator():
            return TorchLoop(worker, self.sync(worker), self.parts, self.settings).fit()


class TorchLoop(Iteration, WorkerLoop):
    """One worker's part of a fit."""

    def __init__(self, worker, sync, parts: ModelParts, settings: FitSettings):
        super().__init__(worker, parts.config, settings.callbacks)
        self.worker, self.sync, self.settings = worker, sync, settings

        # creators run under one seed, so that all ranks start from the same weights
        seed_everything(settings.seed)
        built = parts.build(training=True)
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self._built = built
        self._kind = forward_for(
            self.model,
            self.criterion,
            weighted=settings.weighted,
            columns=BatchColumns(settings.feature_cols, settings.label_cols),
        )
        self._update = Update(
            sync,
            self.optimizer,
            may_be_sparse(self.model),
            sums=self._kind.sums,
            clipping=settings.clipping,
            accumulate=settings.accumulate,
        )
        seed_everything(settings.seed, self.rank + 1)

        writer = BackgroundWriter()
        worker.at_exit(writer.wait)  # after the sync has stopped: a peer may wait for it
        sync.start()
        self.device = device_of(worker, sync)
        move(built, self.device)
        self._precision = precision_of(settings.precision, self.device)
        batches, inputs = self._prepare_data()
        self._is_uneven = self._is_uneven or settings.weighted
        self._buffers = Buffers(self.model, sync)
        self.summary = StepSummary() if settings.summary else None
        self._checkpoints = TorchCheckpointManager(
            worker,
            sync,
            built,
            self._buffers,
            batches,
            open_run_directory(settings, worker, self.rank),
            inputs,
            writer=writer,
        )
        self._checkpoints.summary = self.summary
        self.position, self._sums = self._checkpoints.restore()
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(
            self.position, self._plan.steps, settings.accumulate
        )
        local = settings.batch_size // self.size
        self.train_loader = WorkerBatches(self._data, local)
        if self._validation is not None:
            self.val_loader = WorkerBatches(self._validation, local)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> dict:
        """Train to the end; rank 0 returns where the final state is."""
        self.call("before_run")
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        while not self._is_over():
            self._epoch()
        self.call("after_run")
        return self._finish()

    def _epoch(self):
        position = self.position
        self.model.train()
        self.call("before_train_epoch")
        order = self._order()
        while position.step < self._plan.steps and not self._is_over():
            while not self._iteration(order):
                pass
            if position.step < self._plan.steps:
                self._checkpoint_in_epoch()
        is_whole = position.step == self._plan.steps
        if is_whole:
            self._buffers.merge()
        entry = self._sums.reduce(self.sync)
        if entry is None:  # it was stopped before the first step
            return
        done = {"epoch": position.epoch + 1, "global_step": position.global_step}
        entry = {**done, **entry}
        entry["profile"]["ended_at"] = time.time()
        if self._validation is not None:
            self._validate(entry)
        self.epoch_stats, self.epoch_is_whole = entry, is_whole
        self.call("after_train_epoch")
        if not is_whole:
            position.partial = entry
            return
        self._close_epoch(entry)
        self._checkpoint_after_epoch(entry["train_loss"], score_of(entry))

    def _validate(self, entry):
        self.call("before_val_epoch")
        settings = EvaluationSettings(
            self.settings.batch_size,
            self.settings.metrics,
            per_worker=self.settings.per_worker,
            precision=self.settings.precision,
        )
        with self._buffers.merged():
            found = evaluate_shard(self, self._kind, self._validation, self.sync, settings)
        entry.update(validation_names(found["figures"]))
        entry["profile"].update(found["profile"])
        for own, figures in zip(entry["workers"], found.get("workers", ()), strict=False):
            own.update(validation_names(figures))
        self.epoch_stats, self.metrics_stats = entry, validation_names(found["figures"])
        self.call("after_val_epoch")

    def merged_buffers(self):
        return self._buffers.merged()

    def _close_epoch(self, entry):
        super()._close_epoch(entry)
        self._built.step_scheduler_after_epoch(self, entry)

    def _is_over(self) -> bool:
        """Whether to end here; callbacks may stop on any rank, so then the ranks ask each other."""
        if self.settings.goal.is_reached(self.position):
            return True
        if self.callbacks and self.size > 1:
            self.stop = any(vote[0] for vote in self.sync.all_gather([float(self.stop)]))
        return self.stop

    def _stop(self) -> None:
        self.stop = True

    # -- data ----------------------------------------------------------------------------------

    def _prepare_data(self) -> tuple[BatchLayout, list | None]:
        settings, shards = self.settings, self.worker.shards
        train, validation = shards["data"], shards.get("validation")
        self._data = self._open(train)
        self._validation = None if validation is None else self._open(validation)
        own = {
            "rows": self._data.rows,
            "fingerprint": self._data.fingerprint,
            "validation": 1 if self._validation is None else self._validation.rows,
            "drop_last": bool(self._data.drop_last),
            "window": self._data.window(shuffle_memory(self.config, self.worker.threads)),
            "types": None if self._data.inputs is None else [self._data.inputs, self._data.targets],
            "uneven": counts_unevenly(self.criterion)
            and (
                self.criterion.weight is not None
                or self._data.has_label(self.criterion.ignore_index)
            ),
        }
        everyone = all_gather_json(self.sync, own)
        self._plan, batches = plan_batches(settings, everyone)
        if not sum(e["validation"] for e in everyone):
            raise UsageError("The validation data has no rows")
        self._is_uneven = any(e["uneven"] for e in everyone)
        inputs, targets = next((e["types"] for e in everyone if e["types"]), (None, None))
        if self._validation is not None:
            self._validation.take_types(inputs, targets, self._data)
        return batches, inputs

    def _open(self, shard):
        features, labels = self.settings.feature_cols, self.settings.label_cols
        size = self.settings.batch_size
        return open_batches(shard, features, labels, self.worker, self.config, size)

    def _order(self):
        settings, plan = self.settings, copy.copy(self._plan)
        steps = range(self.position.step, plan.steps)
        return self._data.order(
            settings.shuffle,
            settings.seed,
            self.epochs,
            self.rank,
            self._checkpoints.windows[self.rank],
            lambda: (plan.batch(step, self.rank)[:2] for step in steps),
        )


class TorchTraining(Training):
    """:class:`~bigdl.training.fit.Training` of a PyTorch model."""

    def _program(self, parts: ModelParts, settings):
        return FitProgram(parts, settings, self._sync)

    def weights(self, parts: ModelParts) -> bytes:
        """The state dict of the model; before the first fit the one that it would start from."""
        if self.snapshot is not None:
            return self.snapshot.files["model.pt"]
        with isolated_rng(self.seed):
            return dumps(parts.build_model().state_dict())
