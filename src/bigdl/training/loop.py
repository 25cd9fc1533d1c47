"""One worker's part of a fit: the end of an epoch and of the fit, for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.checkpointing import StateKeeper
from bigdl.training.position import Position
from bigdl.training.run_checkpoints import fires
from bigdl.training.run_settings import RunSettings
from bigdl.training.sums import EpochSums
from bigdl.training.trigger import TriggerState

__all__ = ["WorkerLoop"]


class WorkerLoop(ABC):
    """What a framework's loop stands on; the loop makes what it works with."""

    settings: RunSettings
    sync: GradientSync
    position: Position
    _keeper: StateKeeper
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
        self._pull_triggers(self.position.after_epoch(loss, score))

    def _checkpoint_in_epoch(self) -> None:
        """Take a checkpoint after a step, if it is due; a collective."""
        self._pull_triggers(TriggerState(self.position.epoch, self.position.global_step))

    def _pull_triggers(self, state: TriggerState) -> None:
        if fires(self.settings.end, state, self.sync):
            self._stop()
        if not fires(self.settings.trigger, state, self.sync):
            return
        if self._keeper.directory is None and self._is_over():
            return  # the result of the fit is the same state
        self._keeper.save(self.position, self._sums)

    def _finish(self) -> dict:
        """Leave the final state where the driver finds it, and say where; a collective."""
        self.position.end_fit(self.settings.goal)
        return {"checkpoint": self._keeper.finish(self.position, self._sums)}
