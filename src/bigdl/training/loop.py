"""Epochs of a fit, for every framework and wherever its steps are made.

A :class:`FitLoop` closes epochs and asks the triggers.  The steps of a :class:`WorkerLoop` are made
where it runs, in a worker; those of :class:`bigdl.orca.learn.layer_fit.loop.LayerLoop` in the ranks
of the parameter layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.checkpoint import CheckpointDirectory, CheckpointManager
from bigdl.training.figures import EpochSums
from bigdl.training.fit import RunSettings
from bigdl.training.position import Position, Trigger, TriggerState

if TYPE_CHECKING:
    from bigdl.runtime.worker import Worker

__all__ = ["FitLoop", "WorkerLoop", "open_run_directory"]


class FitLoop(ABC):
    """End of a fit and its checkpoints, as triggers ask for them."""

    settings: RunSettings
    position: Position

    @abstractmethod
    def _is_over(self) -> bool:
        """Return True if the fit ends here, the same on every rank; maybe a collective."""

    @abstractmethod
    def _stop(self) -> None:
        """End the fit here."""

    @abstractmethod
    def _save_checkpoint(self) -> None:
        """Keep the state as it is now."""

    def _fires(self, trigger: Trigger | None, state: TriggerState) -> bool:
        return trigger is not None and bool(trigger(state))

    def _close_epoch(self, entry: dict) -> None:
        """Count an epoch that is whole, with its figures."""
        self.position.close_epoch(entry)

    def _checkpoint_after_epoch(self, loss: float | None, score: float | None) -> None:
        """Take a checkpoint at the end of an epoch, or stop there, if triggers say so."""
        self._apply_triggers(self.position.after_epoch(loss, score))

    def _apply_triggers(self, state: TriggerState) -> None:
        if self._fires(self.settings.end, state):
            self._stop()
        if self._fires(self.settings.trigger, state):
            self._save_checkpoint()


class WorkerLoop(FitLoop):
    """One worker's part of a fit; its methods are collectives."""

    sync: GradientSync
    _checkpoints: CheckpointManager
    _sums: EpochSums

    def _fires(self, trigger: Trigger | None, state: TriggerState) -> bool:
        answer = super()._fires(trigger, state)
        if trigger is not None and not trigger.is_reproducible:  # that of rank 0 counts
            answer = bool(self.sync.all_gather([float(answer)])[0][0])
        return answer

    def _close_epoch(self, entry: dict) -> None:
        super()._close_epoch(entry)
        self._sums = EpochSums()

    def _checkpoint_in_epoch(self) -> None:
        """Take a checkpoint after a step, or stop there, if triggers say so."""
        self._apply_triggers(TriggerState(self.position.epoch, self.position.global_step))

    def _save_checkpoint(self) -> None:
        if self._checkpoints.directory is None and self._is_over():
            return  # the result of the fit is the same state
        self._checkpoints.save(self.position, self._sums)

    def _finish(self) -> dict:
        """Leave the final state where the driver finds it, and say where."""
        self.position.end_fit(self.settings.goal)
        return {"checkpoint": self._checkpoints.finish(self.position, self._sums)}


def open_run_directory(
    settings: RunSettings, worker: Worker, rank: int
) -> CheckpointDirectory | None:
    """Return the folder of this run, or None without a ``model_dir``.

    Raises
    ------
    UsageError
        On rank 0, if the worker does not see the folder of the driver.
    """
    if settings.run_url is None:
        return None
    directory = CheckpointDirectory(settings.run_url, settings.keep)
    if rank == 0 and not directory.is_shared():
        raise UsageError(
            f"The worker on {worker.host} does not see model_dir {settings.run_url!r}; pass a "
            "folder that the driver and all workers share"
        )
    return directory
