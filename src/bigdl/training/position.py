"""Where a training stands, and where it is to end.

A :class:`Position` is counted over all fits of an Estimator and is part of every checkpoint.  A
fit can end inside an epoch (``max_steps``, or a callback that stops it).  Its figures for that
epoch are ``partial``: the next fit of the same Estimator closes the epoch there and starts a new
one, while a run that is resumed from the checkpoint finishes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from bigdl.training.trigger import TriggerState

__all__ = ["Goal", "Position"]


@dataclass(frozen=True)
class Goal:
    """Where a fit is to end, counted from the start of the run: after an epoch or after a step.

    Attributes
    ----------
    epochs, steps : int or None
        One of them.
    first : int
        Epochs that had figures when the fit began.
    """

    epochs: int | None = None
    steps: int | None = None
    first: int = 0

    def is_reached(self, position: Position) -> bool:
        if self.steps is not None:
            return position.global_step >= self.steps
        return position.epoch >= (self.epochs or 0)

    def is_begun(self, position: Position) -> bool:
        """Whether some of this fit is done already, as in one that is resumed."""
        is_within_epoch = position.step > 0 and position.partial is None
        return position.counted > self.first or is_within_epoch

    def last_epoch(self, position: Position, batches: int, accumulate: int = 1) -> int:
        """The epoch that ends the run, where an epoch has so many batches.

        Parameters
        ----------
        position : Position
            Where the run stands.
        batches : int
        accumulate : int
            Batches of one step.
        """
        if self.steps is None:
            return self.epochs or 0
        left = self.steps - position.global_step
        begun = -(-position.step // accumulate) if position.partial is None else 0
        return position.counted + -(-(left + begun) // -(-batches // accumulate))

    @property
    def key(self) -> str:
        end = f"epoch {self.epochs}" if self.steps is None else f"step {self.steps}"
        return f"after epoch {self.first}, to {end}"


@dataclass
class Position:
    """Where a training stands.

    Attributes
    ----------
    epoch : int
        Finished epochs.
    step : int
        Finished steps of the epoch after those.
    global_step : int
        Optimizer steps done.
    history : list of dict
        Figures of every finished epoch; ``epoch`` counts from 1 and ``global_step`` is the one at
        its end.
    partial : dict, optional
        Figures of the epoch in which a fit ended.
    ends : dict of str to int
        For each fit that ended before its goal, the goal's key and the epoch of its last figures.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    history: list[dict] = field(default_factory=list)
    partial: dict | None = None
    ends: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: dict) -> Position:
        """The position in the manifest of a checkpoint."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in manifest.items() if k in known})

    def to_json(self) -> dict:
        return asdict(self)

    @property
    def counted(self) -> int:
        """Epochs that have figures, an unfinished one included."""
        return self.epoch + (self.partial is not None)

    def after_epoch(self, loss: float | None, score: float | None) -> TriggerState:
        """What triggers are told at the end of an epoch."""
        return TriggerState(self.epoch, self.global_step, True, loss, score)

    def close_epoch(self, entry: dict) -> None:
        """Count the epoch that has these figures as finished."""
        self.history.append(entry)
        self.partial = None
        self.epoch += 1
        self.step = 0

    def end_fit(self, goal: Goal) -> None:
        """Note where a fit has ended, if that is before its goal."""
        if not goal.is_reached(self):
            self.ends[goal.key] = self.counted

    def figures(self, first: int, last: int) -> list[dict]:
        """Figures of the epochs after `first`, up to `last`."""
        everything = [*self.history, *([self.partial] if self.partial else [])]
        return [entry for entry in everything if first < entry["epoch"] <= last]

    def end_of(self, goal: Goal) -> int | None:
        """Epoch of the last figures of the fit with this goal; None if it has not ended."""
        if goal.key in self.ends:
            return self.ends[goal.key]
        if not goal.is_reached(self):
            return None
        if goal.steps is None:
            return goal.epochs
        passed = (e["epoch"] for e in self.history if e["global_step"] >= goal.steps)
        return next(passed, self.counted)

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step}" if self.global_step else "the start"
