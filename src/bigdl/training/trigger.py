"""Triggers: when to write a checkpoint, when to validate, when to stop.

A trigger has no state of its own.  The training loop calls it once after each optimizer step with
a :class:`TriggerState`; after the last step of an epoch, ``epoch_finished`` is True and ``epoch``
counts that epoch already.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError

__all__ = [
    "EveryEpoch",
    "MaxEpoch",
    "MaxIteration",
    "MaxScore",
    "MinLoss",
    "SeveralIteration",
    "Trigger",
    "TriggerAnd",
    "TriggerOr",
    "TriggerState",
]


@dataclass(frozen=True)
class TriggerState:
    """Where a training stands.

    Parameters
    ----------
    epoch : int
        Number of finished epochs.
    step : int
        Number of optimizer steps done, of all workers together (a step on one global batch is 1).
    epoch_finished : bool, default False
        Whether the step just done was the last one of its epoch.
    loss : float, optional
        Training loss of the last step, if known.
    score : float, optional
        Latest validation score, if there is one.
    """

    epoch: int
    step: int
    epoch_finished: bool = False
    loss: float | None = None
    score: float | None = None


class Trigger(ABC):
    """A yes or no after each optimizer step.

    Attributes
    ----------
    is_reproducible : bool
        Whether the answer depends on the state alone, so that every worker finds the same. Of a
        trigger that looks at other things (the time, say) the answer of rank 0 counts.
    """

    is_reproducible = False

    @abstractmethod
    def __call__(self, state: TriggerState) -> bool:
        """Tell whether the trigger fires.

        Parameters
        ----------
        state : TriggerState
            Where the training stands after the step just done.

        Returns
        -------
        bool
        """

    def get_trigger(self) -> Trigger:
        """Return the trigger itself (BigDL 2.x returned an object of the JVM)."""
        return self

    @staticmethod
    def convert_trigger(trigger: Any) -> Trigger:
        """Accept a trigger or its name.

        Parameters
        ----------
        trigger : Trigger or str
            ``"everyepoch"`` in any case is :class:`EveryEpoch`.

        Returns
        -------
        Trigger

        Raises
        ------
        UsageError
            If it is neither.
        """
        if isinstance(trigger, Trigger):
            return trigger
        if isinstance(trigger, str) and trigger.lower() == "everyepoch":
            return EveryEpoch()
        raise UsageError(
            'a trigger is expected to be a Trigger such as EveryEpoch() or the text "everyepoch", '
            f"got {trigger!r} ({type(trigger).__name__})"
        )


class EveryEpoch(Trigger):
    """Fires at the end of each epoch."""

    is_reproducible = True

    def __call__(self, state: TriggerState) -> bool:
        return state.epoch_finished


class SeveralIteration(Trigger):
    """Fires after every `interval` optimizer steps.

    Parameters
    ----------
    interval : int
        At least 1.

    Raises
    ------
    UsageError
        If `interval` is not a positive int.
    """

    is_reproducible = True

    def __init__(self, interval: int):
        self.interval = _positive_int("SeveralIteration", "interval", interval)

    def __call__(self, state: TriggerState) -> bool:
        return state.step > 0 and state.step % self.interval == 0


class MaxEpoch(Trigger):
    """Fires once `max_epoch` epochs are finished, and from then on.

    Parameters
    ----------
    max_epoch : int
        At least 1.

    Raises
    ------
    UsageError
        If `max_epoch` is not a positive int.
    """

    is_reproducible = True

    def __init__(self, max_epoch: int):
        self.max_epoch = _positive_int("MaxEpoch", "max_epoch", max_epoch)

    def __call__(self, state: TriggerState) -> bool:
        return state.epoch >= self.max_epoch


class MaxIteration(Trigger):
    """Fires once `max_iteration` optimizer steps are done, and from then on.

    Parameters
    ----------
    max_iteration : int
        At least 1.

    Raises
    ------
    UsageError
        If `max_iteration` is not a positive int.
    """

    is_reproducible = True

    def __init__(self, max_iteration: int):
        self.max_iteration = _positive_int("MaxIteration", "max_iteration", max_iteration)

    def __call__(self, state: TriggerState) -> bool:
        return state.step >= self.max_iteration


class MaxScore(Trigger):
    """Fires while the latest validation score is greater than `max_score`.

    Parameters
    ----------
    max_score : float
        In the unit of the score.

    Raises
    ------
    UsageError
        If `max_score` is not a number.
    """

    is_reproducible = True

    def __init__(self, max_score: float):
        self.max_score = _number("MaxScore", "max_score", max_score)

    def __call__(self, state: TriggerState) -> bool:
        return state.score is not None and bool(state.score > self.max_score)


class MinLoss(Trigger):
    """Fires while the training loss is less than `min_loss`.

    Parameters
    ----------
    min_loss : float
        In the unit of the loss.

    Raises
    ------
    UsageError
        If `min_loss` is not a number.
    """

    is_reproducible = True

    def __init__(self, min_loss: float):
        self.min_loss = _number("MinLoss", "min_loss", min_loss)

    def __call__(self, state: TriggerState) -> bool:
        return state.loss is not None and bool(state.loss < self.min_loss)


class TriggerAnd(Trigger):
    """Fires when all of its triggers do.

    Parameters
    ----------
    *triggers : Trigger or str
        At least one, each as in :meth:`Trigger.convert_trigger`.

    Raises
    ------
    UsageError
        If there is none, or one is not a trigger.
    """

    def __init__(self, *triggers: Trigger | str):
        self.triggers = _triggers("TriggerAnd", triggers)
        self.is_reproducible = all(t.is_reproducible for t in self.triggers)

    def __call__(self, state: TriggerState) -> bool:
        return all(trigger(state) for trigger in self.triggers)


class TriggerOr(Trigger):
    """Fires when any of its triggers does.

    Parameters
    ----------
    *triggers : Trigger or str
        At least one, each as in :meth:`Trigger.convert_trigger`.

    Raises
    ------
    UsageError
        If there is none, or one is not a trigger.
    """

    def __init__(self, *triggers: Trigger | str):
        self.triggers = _triggers("TriggerOr", triggers)
        self.is_reproducible = all(t.is_reproducible for t in self.triggers)

    def __call__(self, state: TriggerState) -> bool:
        return any(trigger(state) for trigger in self.triggers)


def _positive_int(owner: str, parameter: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise UsageError(f"{owner}: {parameter} is expected to be a positive int, got {value!r}")
    return int(value)


def _number(owner: str, parameter: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{owner}: {parameter} is expected to be a number, got {value!r}")
    return float(value)


def _triggers(owner: str, triggers: tuple[Any, ...]) -> tuple[Trigger, ...]:
    if not triggers:
        raise UsageError(f"{owner} expects at least one trigger, got none")
    return tuple(Trigger.convert_trigger(trigger) for trigger in triggers)
