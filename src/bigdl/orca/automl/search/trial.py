"""One trial: a configuration is trained epoch by epoch until it is good, or has had its epochs."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import Builder
from bigdl.orca.automl.model.rows import opened
from bigdl.orca.automl.search.objective import Goal

__all__ = ["Job", "Step", "TrialRun"]


@dataclass
class Job:
    """What all trials of a search have in common.

    Attributes
    ----------
    builder : Builder
    train, validation : Rows, Creator or what is opened as one of them
        Without `validation` the metrics are those of the training data.
    goal : Goal
    epochs : int
    seed : int
        Of the random numbers of every trial, so that trials differ by their configurations alone.
    gpus : float
        Of each worker of a trial.
    workers : int
        That train the model of a trial together.
    """

    builder: Builder
    train: Any
    validation: Any
    goal: Goal
    epochs: int = 1
    seed: int = 0
    gpus: float = 0.0
    workers: int = 1

    def opened(self) -> Job:
        """The same with its data at hand, in the process of a trial."""
        return replace(self, train=opened(self.train), validation=opened(self.validation))


@dataclass(frozen=True)
class Step:
    """What came of an epoch.

    Attributes
    ----------
    epoch : int
        Epochs so far.
    figures : list of float
        Of the goal's metrics.
    best : list of float
        Those of the best epoch so far.
    is_best : bool
        Whether this is that epoch.
    is_last : bool
    seconds : float
        Of all epochs so far.
    """

    epoch: int
    figures: Sequence[float]
    best: Sequence[float]
    is_best: bool
    is_last: bool
    seconds: float


class TrialRun:
    """A trial in the process that runs it.

    Parameters
    ----------
    job : Job
    config : dict
    sync : GradientSync, optional
        Of a trial of several workers, which has started.  All of them make the same calls.
    """

    def __init__(self, job: Job, config: Mapping[str, Any], sync=None):
        self._job = job
        random.seed(job.seed)
        np.random.seed(job.seed % 2**32)
        job.builder.seed(job.seed)
        self.model = job.builder.build(
            dict(config), epochs=job.epochs, use_gpu=job.gpus > 0, sync=sync
        )
        self._epoch, self._best, self._seconds = 0, None, 0.0

    def step(self) -> Step:
        """Train for one epoch and look at the result."""
        job, start = self._job, time.perf_counter()
        self.model.fit_epoch(job.train, self._epoch)
        seen = job.train if job.validation is None else job.validation
        figures = self.model.figures(seen, job.goal.metrics)
        self._epoch += 1
        self._seconds += time.perf_counter() - start
        first = figures[0]
        is_best = job.goal.first.is_better(first, self._best and self._best[0])
        if is_best or self._best is None:
            self._best = figures
        is_last = self._epoch >= job.epochs or job.goal.reached(first)
        return Step(self._epoch, figures, self._best, is_best, is_last, self._seconds)

    def state(self) -> dict:
        """What another process needs to go on with the trial."""
        model = self.model.state()
        return {"model": model, "epoch": self._epoch, "best": self._best, "seconds": self._seconds}

    def restore(self, state: dict) -> None:
        """Go on from a state."""
        if not isinstance(state, dict) or "model" not in state:
            raise UsageError("The state is not one of a trial")
        self.model.restore(state["model"])
        self._epoch, self._best, self._seconds = state["epoch"], state["best"], state["seconds"]
