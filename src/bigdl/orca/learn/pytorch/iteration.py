"""One batch of training: from rows to gradients, and to new weights when an update is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.gradients import Update
from bigdl.orca.learn.pytorch.runner import Runner
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.training.device import to_device
from bigdl.training.sums import EpochSums

__all__ = ["Iteration"]


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
