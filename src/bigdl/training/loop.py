"""One worker's part of a fit: the end of an epoch and of the fit, for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.checkpoint import CheckpointDirectory, CheckpointManager
from bigdl.training.figures import EpochSums
from bigdl.training.fit import RunSettings
from bigdl.training.position import Position, Trigger, TriggerState

__all__ = ["WorkerLoop", "open_run_directory", "trigger_fires"]


class WorkerLoop(ABC):
    """What a framework's loop stands on; the loop makes what it works with."""

    settings: RunSettings
    sync: GradientSync
    position: Position
    _checkpoints: CheckpointManager
    _sums: EpochSums

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether to end here, the same on every rank; maybe a collective."""

    @abstractmethod
    def _stop(self) -> None:
        """End here."""

    def _close_epoch(self, entry: dict) -> None:
        """Count an epoch that is whole, with its figures."""
        self.position.close_epoch(entry)
        self._sums = EpochSums()

    def _checkpoint_after_epoch(self, loss: float | None, score: float | None) -> None:
        """Take a checkpoint at the end of an epoch, if it is due; a collective."""
        self._apply_triggers(self.position.after_epoch(loss, score))

    def _checkpoint_in_epoch(self) -> None:
        """Take a checkpoint after a step, if it is due; a collective."""
        self._apply_triggers(TriggerState(self.position.epoch, self.position.global_step))

    def _apply_triggers(self, state: TriggerState) -> None:
        if trigger_fires(self.settings.end, state, self.sync):
            self._stop()
        if not trigger_fires(self.settings.trigger, state, self.sync):
            return
        if self._checkpoints.directory is None and self._is_over():
            return  # the result of the fit is the same state
        self._checkpoints.save(self.position, self._sums)

    def _finish(self) -> dict:
        """Leave the final state where the driver finds it, and say where; a collective."""
        self.position.end_fit(self.settings.goal)
        return {"checkpoint": self._checkpoints.finish(self.position, self._sums)}


def open_run_directory(settings: RunSettings, worker: Any, rank: int) -> CheckpointDirectory | None:
    """The folder of this run, or None without a ``model_dir``.

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


def trigger_fires(trigger: Trigger | None, state: TriggerState, sync: Any) -> bool:
    """Whether a trigger fires, the same on every rank; maybe a collective."""
    if trigger is None:
        return False
    answer = bool(trigger(state))
    if not trigger.is_reproducible:  # the ranks' answers may differ: that of rank 0 counts
        answer = bool(sync.all_gather([float(answer)])[0][0])
    return answer
