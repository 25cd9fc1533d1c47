"""The driver's loop of a PyTorch training by the parameter layer: epochs, callbacks, validation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.layer_fit.figures import LayerFigures
from bigdl.orca.learn.layer_fit.groups import LayerGroups, LayerRun
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback
from bigdl.orca.learn.pytorch.group_phases import GroupPhases
from bigdl.orca.learn.pytorch.runner import Runner
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.training.checkpoint import Snapshot
from bigdl.training.figures import score_of, validation_names
from bigdl.training.state import dumps, loads

__all__ = ["TorchLayerLoop", "check_callbacks"]

_OF_STEPS = ("before_train_iter", "after_train_iter", "before_iter", "after_iter")


class TorchLayerLoop(LayerGroups, Runner):
    """A fit by the parameter layer; what callbacks see as their runner.

    Parameters
    ----------
    run : LayerRun
    config : dict
    """

    def __init__(self, run: LayerRun, config: dict):
        settings = run.settings
        place = SimpleNamespace(rank=0, world_size=run.plan.ranks)
        Runner.__init__(self, place, config, settings.callbacks)
        LayerGroups.__init__(self, run)
        built = run.model.built
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self.device = next(self.model.parameters()).device
        self._summary = StepSummary() if settings.summary else None
        self._phases = GroupPhases() if settings.summary else None
        self.begin(run.start)
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(self.position, self._plan.steps)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""
        self.call("before_run")
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        states = self._train()
        self.call("after_run")
        return self._finish(states)

    def _epoch(self):
        position = self.position
        self.call("before_train_epoch")
        is_whole = self._groups_of_epoch()
        entry = self._figures.entry()
        if entry is None:  # it was stopped before the first step
            return
        entry = {"epoch": position.epoch + 1, "global_step": position.global_step, **entry}
        if self._options.stragglers is not None:
            entry |= self._figures.dropped
        if self._validate is not None:
            self._run_validation(entry)
        self.epoch_stats, self.epoch_is_whole = entry, is_whole
        if self.callbacks:
            self._pull()
        self.call("after_train_epoch")
        if not is_whole:
            position.partial = entry
            return
        self._close_epoch(entry)
        self._pull_triggers(entry["train_loss"], score_of(entry))

    def _run_validation(self, entry):
        self.call("before_val_epoch")
        self._pull()
        found = self._validate(dumps(self.model.state_dict()))
        figures = validation_names(found["figures"])
        entry.update(figures)
        entry["profile"].update(found["profile"])
        for own, those in zip(entry["workers"], found.get("workers", ()), strict=False):
            own.update(validation_names(those))
        self.epoch_stats, self.metrics_stats = entry, figures
        self.call("after_val_epoch")

    def _close_epoch(self, entry):
        super()._close_epoch(entry)
        self._layer.built.step_scheduler_after_epoch(self, entry)

    @property
    def _epochs_of_fit(self):
        return self.num_epochs - self.settings.goal.first

    def _pass_step(self):
        self._layer.pass_step()
        self._layer.built.step_scheduler_after_update(self)

    # -- figures -------------------------------------------------------------------------------

    def _no_figures(self):
        weighted, sums = self.settings.weighted, self._layer.sums
        return LayerFigures(self._layer_plan.ranks, weighted=weighted, sums=sums)

    def _after_group(self, steps, seconds):
        if self._summary is None:
            return
        first = self.position.global_step - len(steps) + 1
        pairs = zip(steps, self._figures.rows, strict=True)
        for number, (step, (loss, counted, rows)) in enumerate(pairs, first):
            mean = loss / counted if counted else float("nan")
            throughput = rows * len(steps) / seconds
            rate = float(step.hyper[0]["lr"])
            self._summary.rows.append([float(number), mean, rate, throughput, time.time()])
        self._phases.add(self.position.global_step, self._figures.phases)

    def _kept(self):
        if self._summary is None:
            return {}
        return {
            "summary.pt": dumps(self._summary.take()),
            "phases.pt": dumps(self._phases.take()),
        }

    def _put_kept(self, files):
        for kept, name in ((self._summary, "summary.pt"), (self._phases, "phases.pt")):
            if kept is not None and name in files:
                kept.put(loads(files[name]))


def check_callbacks(callbacks: Sequence[Any], accumulate: int) -> None:
    """Refuse what the steps of the parameter layer do not do."""
    for callback in callbacks:
        kind = type(callback)
        hooks = [h for h in _OF_STEPS if getattr(kind, h, None) is not getattr(Callback, h)]
        if isinstance(callback, MainCallback) or hooks:
            what = "is a MainCallback" if not hooks else f"has {', '.join(hooks)}"
            raise UsageError(
                f"{kind.__name__} {what}, but the steps of backend='bigdl' run in Spark tasks that "
                "call no callbacks; use hooks of epochs, or backend='spark'"
            )
    if accumulate > 1:
        raise UsageError(
            "accumulate_grad_batches does not go with backend='bigdl'; pass a batch_size that is "
            f"{accumulate} times as large, which is the same update"
        )
