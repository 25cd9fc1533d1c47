"""The training loop of PyTorch: one step, one epoch, one fit.

It knows neither which engine runs it nor what the input was: a worker gives it shards, a sync
gives it collectives.  :class:`FitProgram` is what an engine ships.  What all ranks decide (whether
to go on, whether to write a checkpoint) is computed from figures that are equal on all of them.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.buffers import Buffers
from bigdl.orca.learn.pytorch.evaluation import EvaluationSettings, evaluate_shard
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.gradients import Update, may_be_sparse
from bigdl.orca.learn.pytorch.iteration import Iteration
from bigdl.orca.learn.pytorch.keeper import TorchKeeper
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.runner import BatchesOfWorker
from bigdl.orca.learn.pytorch.steps import counts_unevenly, step_for
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.training.background import BackgroundWriter
from bigdl.training.batches import Batches, exchange, planned
from bigdl.training.device import device_of, move, precision_of
from bigdl.training.figures import score_of, validation_names
from bigdl.training.loop import WorkerLoop
from bigdl.training.run_checkpoints import open_run
from bigdl.training.state import seed_everything
from bigdl.training.tensors import open_batches, shuffle_memory

__all__ = ["FitProgram", "FitSettings", "TorchLoop"]


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
        self._kind = step_for(
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
        self._keeper = TorchKeeper(
            worker,
            sync,
            built,
            self._buffers,
            batches,
            open_run(settings, worker, self.rank),
            inputs,
            writer=writer,
        )
        self._keeper.summary = self.summary
        self.position, self._sums = self._keeper.restore()
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(
            self.position, self._plan.steps, settings.accumulate
        )
        local = settings.batch_size // self.size
        self.train_loader = BatchesOfWorker(self._data, local)
        if self._validation is not None:
            self.val_loader = BatchesOfWorker(self._validation, local)

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

    def _prepare_data(self) -> tuple[Batches, list | None]:
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
        everyone = exchange(self.sync, own)
        self._plan, batches = planned(settings, everyone)
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
            self._keeper.windows[self.rank],
            lambda: (plan.batch(step, self.rank)[:2] for step in steps),
        )
