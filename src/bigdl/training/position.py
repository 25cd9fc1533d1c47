"""Position of a training run, its stopping criterion, and triggers that read the position.

A :class:`Position` counts over all fits of an Estimator and is part of every checkpoint.  A fit can
end inside an epoch (``max_steps``, or a callback that stops it).  Its metrics of that epoch are
``partial``.  The next fit of the same Estimator closes the epoch there and starts a new one; a run
that is resumed from the checkpoint finishes the epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from bigdl.common.checks import check_integer, check_number
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
class StoppingCriterion:
    """Epoch or step after which a fit ends, counted from the start of the run.

    Attributes
    ----------
    epochs, steps : int or None
        Number of epochs or of optimizer steps; one of the two is set.
    first : int
        Epochs that had metrics when the fit began.
    """

    epochs: int | None = None
    steps: int | None = None
    first: int = 0

    def is_reached(self, position: Position) -> bool:
        if self.steps is not None:
            return position.global_step >= self.steps
        return position.epoch >= (self.epochs or 0)

    def is_begun(self, position: Position) -> bool:
        """Return True if part of this fit is already done, for example after a resume."""
        is_within_epoch = position.batch > 0 and position.partial is None
        return position.epochs_with_metrics > self.first or is_within_epoch

    def last_epoch(self, position: Position, batches: int, accumulate: int = 1) -> int:
        """Return the last epoch of the run, assuming that each epoch has `batches` batches.

        Parameters
        ----------
        position : Position
            Current position of the run.
        batches : int
            Batches per epoch.
        accumulate : int
            Batches per optimizer step.
        """
        if self.steps is None:
            return self.epochs or 0
        left = self.steps - position.global_step
        begun = -(-position.batch // accumulate) if position.partial is None else 0
        return position.epochs_with_metrics + -(-(left + begun) // -(-batches // accumulate))

    @property
    def key(self) -> str:
        end = f"epoch {self.epochs}" if self.steps is None else f"step {self.steps}"
        return f"after epoch {self.first}, to {end}"


@dataclass
class Position:
    """Finished epochs and steps of a training run, and its epoch metrics.

    Attributes
    ----------
    epoch : int
        Finished epochs.
    batch : int
        Finished batches of the current epoch; ``step`` in a checkpoint's manifest.
    global_step : int
        Finished optimizer steps.
    history : list of dict
        Metrics of every finished epoch; ``epoch`` counts from 1 and ``global_step`` is the step at
        its end.
    partial : dict, optional
        Metrics of the epoch in which a fit ended.
    ends : dict of str to int
        By a criterion's key: number of epochs with metrics when that fit ended early.
    """

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    partial: dict[str, Any] | None = None
    ends: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Position:
        """Build the position that a checkpoint's manifest records."""
        names = {f.name for f in fields(cls)}
        facts = {"batch" if k == "step" else k: v for k, v in manifest.items()}
        return cls(**{k: v for k, v in facts.items() if k in names})

    def to_json(self) -> dict[str, Any]:
        return {"step" if k == "batch" else k: v for k, v in asdict(self).items()}

    @property
    def epochs_with_metrics(self) -> int:
        """Number of epochs that have metrics, including an unfinished one."""
        return self.epoch + (self.partial is not None)

    def close_epoch(self, entry: dict[str, Any]) -> None:
        """Append the metrics of an epoch and count it as finished."""
        self.history.append(entry)
        self.partial = None
        self.epoch += 1
        self.batch = 0

    def end_fit(self, criterion: StoppingCriterion) -> None:
        """Record where a fit ended, if it ended before its stopping criterion was reached."""
        if not criterion.is_reached(self):
            self.ends[criterion.key] = self.epochs_with_metrics

    def epoch_metrics(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the metrics of the epochs after `first`, up to `last`."""
        everything = [*self.history, *([self.partial] if self.partial else [])]
        return [entry for entry in everything if first < entry["epoch"] <= last]

    def end_of(self, criterion: StoppingCriterion) -> int | None:
        """Return the last epoch of the fit with this criterion; None if the fit has not ended."""
        if criterion.key in self.ends:
            return self.ends[criterion.key]
        if not criterion.is_reached(self):
            return None
        if criterion.steps is None:
            return criterion.epochs
        passed = (e["epoch"] for e in self.history if e["global_step"] >= criterion.steps)
        return next(passed, self.epochs_with_metrics)

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.batch}" if self.global_step else "the start"


@dataclass(frozen=True)
class TriggerState:
    """State of a training run after an optimizer step, as passed to triggers.

    Parameters
    ----------
    epoch : int
        Number of finished epochs.
    step : int
        Number of finished optimizer steps; a step on one global batch counts 1.
    epoch_finished : bool, default False
        True after the last step of an epoch.
    loss : float, optional
        Mean training loss of the epoch that has just ended; None within an epoch.
    score : float, optional
        Latest validation score, or None.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MinLoss, TriggerState
    >>> at_the_end = TriggerState(epoch=3, step=120, epoch_finished=True, loss=0.08)
    >>> MinLoss(0.1)(at_the_end)
    True
    """

    epoch: int
    step: int
    epoch_finished: bool = False
    loss: float | None = None
    score: float | None = None


class Trigger(ABC):
    """Condition that is evaluated after each optimizer step.

    A trigger must keep no state, since retries, ``TriggerOr`` and the parameter layer skip or
    repeat calls.

    Attributes
    ----------
    is_reproducible : bool
        True if the answer depends on the state alone, so that all workers agree. For other triggers
        (such as one that reads the clock) the answer of rank 0 counts.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import Trigger, TriggerState
    >>> class EveryOtherEpoch(Trigger):
    ...     def __call__(self, state):
    ...         return state.epoch_finished and state.epoch % 2 == 0
    >>> [EveryOtherEpoch()(TriggerState(epoch, epoch * 10, True)) for epoch in (1, 2, 3, 4)]
    [False, True, False, True]
    """

    is_reproducible = False

    @abstractmethod
    def __call__(self, state: TriggerState) -> bool:
        """Return True if the trigger fires.

        Parameters
        ----------
        state : TriggerState
            State of the training after the last step.

        Returns
        -------
        bool
        """

    def get_trigger(self) -> Trigger:
        """Return the trigger itself (BigDL 2.x returned a JVM object)."""
        return self

    @staticmethod
    def convert_trigger(trigger: object) -> Trigger:
        """Convert a trigger or its name to a Trigger.

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
            f"got {trigger!r} ({type(trigger).__name__})",
            code="argument-type",
            argument="trigger",
        )


class _Reproducible(Trigger):
    is_reproducible = True


class EveryEpoch(_Reproducible):
    """Trigger that fires at the end of each epoch.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import EveryEpoch, TriggerState
    >>> trigger = EveryEpoch()
    >>> trigger(TriggerState(epoch=0, step=9)), trigger(TriggerState(1, 10, epoch_finished=True))
    (False, True)
    """

    def __call__(self, state: TriggerState) -> bool:
        return state.epoch_finished


class SeveralIteration(_Reproducible):
    """Trigger that fires after every `interval` optimizer steps.

    Parameters
    ----------
    interval : int
        At least 1.

    Raises
    ------
    UsageError
        If `interval` is not a positive int.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import SeveralIteration, TriggerState
    >>> trigger = SeveralIteration(50)
    >>> [step for step in range(1, 200) if trigger(TriggerState(0, step))]
    [50, 100, 150]
    """

    def __init__(self, interval: int):
        self.interval = check_integer("interval of SeveralIteration", interval, 1)

    def __call__(self, state: TriggerState) -> bool:
        return state.step > 0 and state.step % self.interval == 0


class MaxEpoch(_Reproducible):
    """Trigger that fires after every step once `max_epoch` epochs are finished.

    Parameters
    ----------
    max_epoch : int
        At least 1.

    Raises
    ------
    UsageError
        If `max_epoch` is not a positive int.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MaxEpoch, TriggerState
    >>> trigger = MaxEpoch(3)
    >>> [trigger(TriggerState(epoch, epoch * 10, True)) for epoch in (2, 3, 4)]
    [False, True, True]
    """

    def __init__(self, max_epoch: int):
        self.max_epoch = check_integer("max_epoch of MaxEpoch", max_epoch, 1)

    def __call__(self, state: TriggerState) -> bool:
        return state.epoch >= self.max_epoch


class MaxIteration(_Reproducible):
    """Trigger that fires after every step once `max_iteration` optimizer steps are done.

    Parameters
    ----------
    max_iteration : int
        At least 1.

    Raises
    ------
    UsageError
        If `max_iteration` is not a positive int.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MaxIteration, TriggerState
    >>> trigger = MaxIteration(100)
    >>> [trigger(TriggerState(0, step)) for step in (99, 100, 101)]
    [False, True, True]
    """

    def __init__(self, max_iteration: int):
        self.max_iteration = check_integer("max_iteration of MaxIteration", max_iteration, 1)

    def __call__(self, state: TriggerState) -> bool:
        return state.step >= self.max_iteration


class MaxScore(_Reproducible):
    """Trigger that fires while the latest validation score is greater than `max_score`.

    Parameters
    ----------
    max_score : float
        Threshold in the unit of the score.

    Raises
    ------
    UsageError
        If `max_score` is not a number.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MaxScore, TriggerState
    >>> trigger = MaxScore(0.9)
    >>> [trigger(TriggerState(1, 10, True, score=score)) for score in (0.85, 0.9, 0.95)]
    [False, False, True]
    """

    def __init__(self, max_score: float):
        self.max_score = check_number("max_score of MaxScore", max_score)

    def __call__(self, state: TriggerState) -> bool:
        return state.score is not None and bool(state.score > self.max_score)


class MinLoss(_Reproducible):
    """Trigger that fires while the training loss is less than `min_loss`.

    Parameters
    ----------
    min_loss : float
        Threshold in the unit of the loss.

    Raises
    ------
    UsageError
        If `min_loss` is not a number.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MinLoss, TriggerState
    >>> trigger = MinLoss(0.1)
    >>> [trigger(TriggerState(1, 10, True, loss=loss)) for loss in (0.2, 0.1, 0.05)]
    [False, False, True]
    """

    def __init__(self, min_loss: float):
        self.min_loss = check_number("min_loss of MinLoss", min_loss)

    def __call__(self, state: TriggerState) -> bool:
        return state.loss is not None and bool(state.loss < self.min_loss)


class _Combined(Trigger):
    def __init__(self, *triggers: Trigger | str):
        if not triggers:
            raise UsageError(
                f"{type(self).__name__} expects at least one trigger, got none",
                code="argument-missing",
                argument="trigger",
            )
        self.triggers = tuple(map(Trigger.convert_trigger, triggers))
        self.is_reproducible = all(t.is_reproducible for t in self.triggers)


class TriggerAnd(_Combined):
    """Trigger that fires when all of its triggers fire.

    Parameters
    ----------
    *triggers : Trigger or str
        At least one, each as in :meth:`Trigger.convert_trigger`.

    Raises
    ------
    UsageError
        If there is none, or one is not a trigger.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MaxEpoch, MinLoss, TriggerAnd, TriggerState
    >>> trigger = TriggerAnd(MinLoss(0.1), MaxEpoch(5))  # well trained, and long enough
    >>> [trigger(TriggerState(epoch, epoch * 10, True, loss=0.05)) for epoch in (4, 5)]
    [False, True]
    """

    def __call__(self, state: TriggerState) -> bool:
        return all(trigger(state) for trigger in self.triggers)


class TriggerOr(_Combined):
    """Trigger that fires when any of its triggers fires.

    Parameters
    ----------
    *triggers : Trigger or str
        At least one, each as in :meth:`Trigger.convert_trigger`.

    Raises
    ------
    UsageError
        If there is none, or one is not a trigger.

    Examples
    --------
    >>> from bigdl.orca.learn.trigger import MaxEpoch, MinLoss, TriggerOr, TriggerState
    >>> trigger = TriggerOr(MinLoss(0.1), MaxEpoch(5))  # well trained, or long enough
    >>> [trigger(TriggerState(epoch, epoch * 10, True, loss=0.5)) for epoch in (4, 5)]
    [False, True]
    """

    def __call__(self, state: TriggerState) -> bool:
        return any(trigger(state) for trigger in self.triggers)


RECOVERIES = ("in_place", "restart")
"""Values of ``fit(recovery=)``."""


@dataclass
class RunSettings:
    """Framework-independent arguments of ``fit``, as the workers receive them.

    Attributes
    ----------
    stop_at : StoppingCriterion
        When to stop; epochs and steps continue to count from fit to fit.
    batch_size : int
        Rows of a global batch, over all workers.
    seed : int
        Set by :meth:`TrainingSession.fit`: its argument, else the seed of the previous fits.
    shuffle, drop_last : bool
    checkpoint_trigger : Trigger or None
        When to take a checkpoint before the end.
    end_trigger : Trigger or None
        When to stop early. It sees losses and scores only at the end of an epoch, since those of a
        batch differ between workers.
    run_url : str or None
        Folder for checkpoints; None sends them to the driver.
    keep : int
        Number of checkpoints to keep in that folder.
    pinned_checkpoint : str or None
        Name of a checkpoint that must stay during the fit, which reads slices from it.
    data_version : object
        Version of the data as the Feed reports it; checkpoints store it.
    data_identity : object
        Identity of the rows as the Feed reports it; checkpoints compare it.
    parameter_layer : bigdl.orca.parameter_layer.fit.loop.ParameterLayerOptions, optional
        Options of the parameter layer, if it runs the fit.
    recovery : {"restart", "in_place", "auto"}
        What happens after the loss of a worker, see :mod:`bigdl.training.in_place`; ``"auto"`` is
        in place if the workers find that possible.
    """

    stop_at: StoppingCriterion
    batch_size: int
    seed: int = 0
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    checkpoint_trigger: Trigger | None = field(default_factory=EveryEpoch, kw_only=True)
    end_trigger: Trigger | None = field(default=None, kw_only=True)
    run_url: str | None = field(default=None, kw_only=True)
    keep: int = field(default=2, kw_only=True)
    pinned_checkpoint: str | None = field(default=None, kw_only=True)
    data_version: Any = field(default=None, kw_only=True)
    data_identity: Any = field(default=None, kw_only=True)
    parameter_layer: Any = field(default=None, kw_only=True)
    recovery: str = field(default="restart", kw_only=True)
