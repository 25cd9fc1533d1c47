"""What ``fit`` and ``evaluate`` were asked for, as the workers get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bigdl.orca.learn.position import Goal, Position
from bigdl.orca.learn.trigger import EveryEpoch, Trigger

__all__ = ["EvaluationSettings", "KerasFitSettings"]


@dataclass(frozen=True)
class EvaluationSettings:
    """The arguments of ``evaluate``, or what ``fit`` says of its validation.

    Attributes
    ----------
    batch_size : int
        Rows of a batch over all workers together.
    feature_cols, label_cols : sequence of str or None
        With `weighted` the last label column holds the weights of the rows.
    num_steps : int, optional
        Batches of each worker at most.
    """

    batch_size: int
    feature_cols: Sequence[str] | None
    label_cols: Sequence[str] | None
    num_steps: int | None = None
    weighted: bool = False


@dataclass
class KerasFitSettings:
    """The arguments of ``fit``; callbacks travel with the model.

    Attributes
    ----------
    goal : Goal
        Where to stop; counted on from fit to fit.
    initial_epoch : int
        Number of the first epoch of this fit, for callbacks.
    steps_per_epoch : int, optional
        Batches of an epoch; default all rows once.
    validation : EvaluationSettings
    validation_freq : int or sequence of int
        Validate after every so many epochs, or after those with these numbers (from 1).
    trigger, run_url, keep
        See :class:`bigdl.orca.learn.pytorch.fit_settings.FitSettings`.
    """

    goal: Goal
    batch_size: int
    seed: int
    validation: EvaluationSettings
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    class_weight: dict[int, float] | None = None
    shuffle: bool = True
    drop_last: bool = False
    trigger: Trigger | None = field(default_factory=EveryEpoch)
    run_url: str | None = None
    keep: int = 2
    verbose: int | str = 1

    def epoch_number(self, position: Position) -> int:
        """The number of the current epoch, as callbacks count."""
        return position.epoch - self.goal.first + self.initial_epoch

    def validates_after(self, epoch: int) -> bool:
        """Whether the epoch with this number (from 1) is followed by a validation."""
        if isinstance(self.validation_freq, int):
            return epoch % self.validation_freq == 0
        return epoch in self.validation_freq
