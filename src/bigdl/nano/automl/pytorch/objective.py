"""One trial: a model that is made, trained and judged."""

from __future__ import annotations

import copy
import logging
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.automl.hpo.lazy import Choice, Lazy, Naming, take
from bigdl.nano.automl.pytorch.epochs import EpochFigures
from bigdl.nano.automl.pytorch.latency import fastest
from bigdl.nano.automl.pytorch.trainers import fresh_trainer

__all__ = ["LATENCY", "TrainerObjective"]

LATENCY = "latency"
"""Metric that needs no logging: milliseconds that the trained model takes for a batch."""

_LIGHTNING = ("pytorch_lightning", "lightning_fabric")


class TrainerObjective:
    """Makes a model with what a trial proposes, trains it, and returns its figures.

    It travels to the processes of a parallel search.

    Parameters
    ----------
    model : object
        A lazy model.
    data : dict
        Arguments of ``Trainer.fit``; loaders may be lazy, too.
    trainer : dict
        Arguments of the Trainer.
    metrics, directions : list of str
    mode : {"best", "last"}
        Of which epoch the figures are: the best in the first metric, or the last.
    acceleration : bool
        Whether latency is that of the fastest runtime.
    input_sample : object
        What latency is measured with.
    """

    def __init__(
        self,
        model: Any,
        data: dict[str, Any],
        trainer: dict[str, Any],
        metrics: list[str],
        directions: list[str],
        mode: str,
        acceleration: bool,
        input_sample: Any,
    ):
        self.subject = {"model": model, "data": data}
        self._trainer = trainer
        self._metrics = metrics
        self._directions = directions
        self._mode = mode
        self._acceleration = acceleration
        self._input_sample = input_sample

    def __call__(self, trial: Any) -> float | list[float]:
        made = take(self.subject, Choice.of_trial(Naming(self.subject), trial))
        model, data = made["model"], made["data"]
        if not isinstance(self.subject["model"], Lazy):
            model = copy.deepcopy(model)  # only the data are searched
        logged = [metric for metric in self._metrics if metric != LATENCY]
        alone = (self._trainer.get("num_processes") or 1) == 1
        judged = trial if alone and len(self._metrics) == 1 else None
        epochs = EpochFigures(logged, judged)
        with _without_reports(), _interruptible():
            trainer = fresh_trainer(self._trainer, epochs)
            trainer.fit(model, **data)
        figures = self._figures(trainer, epochs, logged) if logged else {}
        if judged is None and len(self._metrics) == 1:
            epochs.report(trial)
        if LATENCY in self._metrics or self._acceleration:
            runtime, figures[LATENCY] = fastest(
                model, trainer, self._input_sample, self._acceleration
            )
            trial.set_user_attr("optimization", runtime)
        values = [figures[metric] for metric in self._metrics]
        return values if len(values) > 1 else values[0]

    def _figures(self, trainer: Any, epochs: EpochFigures, logged: list[str]) -> dict[str, float]:
        if epochs.figures:
            return epochs.figures[self._epoch(epochs.figures, logged[0])]
        missing = [metric for metric in logged if metric not in trainer.callback_metrics]
        if missing:
            known = ", ".join(map(repr, trainer.callback_metrics)) or "nothing"
            raise UsageError(
                f"The model does not log {', '.join(map(repr, missing))}, which target_metric asks "
                f"for; it logs {known}"
            )
        return {metric: _number(trainer.callback_metrics[metric]) for metric in logged}

    def _epoch(self, figures: list[dict[str, float]], metric: str) -> int:
        if self._mode == "last":
            return len(figures) - 1
        sign = -1.0 if self._directions[self._metrics.index(metric)].lower() == "maximize" else 1.0

        def badness(epoch: int) -> float:
            value = figures[epoch][metric]
            return math.inf if math.isnan(value) else sign * value

        return min(range(len(figures)), key=badness)


@contextmanager
def _without_reports() -> Iterator[None]:
    """Without what Lightning says about each fit."""
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in _LIGHTNING]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logging.WARNING, logger.level))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lightning ends the program on Ctrl-C; here it ends the search, as elsewhere in Python."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from ended


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)
