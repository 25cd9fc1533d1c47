"""What ``fit`` and ``evaluate`` were asked for, as the workers get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigdl.training.fit import RunSettings
from bigdl.training.position import Position

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
class KerasFitSettings(RunSettings):
    """The arguments of ``fit``; callbacks travel with the model.

    Attributes
    ----------
    validation : EvaluationSettings
    initial_epoch : int
        Number of the first epoch of this fit, for callbacks.
    steps_per_epoch : int, optional
        Batches of an epoch; default all rows once.
    validation_freq : int or sequence of int
        Validate after every so many epochs, or after those with these numbers (from 1).
    """

    validation: EvaluationSettings
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    class_weight: dict[int, float] | None = None
    verbose: int | str = 1

    def epoch_number(self, position: Position) -> int:
        """The number of the current epoch, as callbacks count."""
        return position.epoch - self.goal.first + self.initial_epoch

    def validates_after(self, epoch: int) -> bool:
        """Whether the epoch with this number (from 1) is followed by a validation."""
        if isinstance(self.validation_freq, int):
            return epoch % self.validation_freq == 0
        return epoch in self.validation_freq
