"""Builders and models of a search.

A **builder** is picklable and makes a model of a configuration, wherever a trial runs.  The
**model** trains epoch by epoch: a trial calls :meth:`TrialModel.epoch`, keeps
:meth:`TrialModel.weights` when an epoch was the best one so far, and :meth:`TrialModel.state` where
the search may move a trial or go back.  Models of PyTorch and Keras are the loops of their
Estimators, in the process of the trial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.orca.automl.trial import SearchMetric, TrialJob
    from bigdl.runtime.worker import Worker


class Builder(ABC):
    """Makes the model of a configuration."""

    #: dtype of floating values of the data; None leaves it to them
    floats: str | None = None
    #: True if models learn from features that are missing: nulls reach them as NaN
    nulls_are_missing = False
    #: True if models learn from categories: those of pandas reach them as such
    takes_categories = False
    #: True if several workers can train a model together
    takes_workers = False

    @abstractmethod
    def build(self, config: dict[str, Any], job: TrialJob, worker: Worker) -> TrialModel:
        """Return a model that has not been trained.

        Parameters
        ----------
        config : dict
        job : TrialJob
            What all trials have in common, with its data at hand.
        worker : Worker
            Of the trial; one of several only where :attr:`takes_workers`. Its shards are the job's
            data.
        """

    @abstractmethod
    def load(self, config: Mapping[str, Any], weights: bytes) -> Any:
        """Return the user's own class of model with trained weights."""

    @abstractmethod
    def default_metric(self, make_config: Callable[[], dict]) -> str:
        """Return the metric that is meant where none is given.

        Parameters
        ----------
        make_config : callable
            Gives the configuration of a trial.

        Raises
        ------
        UsageError
            If there must be one.
        """

    def knows(self, metric: str) -> tuple[bool, str | None]:
        """Return if the models compute a metric of this name themselves, and its mode if known."""
        return False, None


class TrialModel(ABC):
    """A model in training; the workers of a trial make all calls together."""

    @abstractmethod
    def epoch(self) -> list[float]:
        """Train for one epoch and return the metrics of the goal after it."""

    @abstractmethod
    def weights(self) -> bytes:
        """Return the trained weights."""

    @abstractmethod
    def state(self) -> Any:
        """Return everything that the training goes on with."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from a state, with the learning rate of this model's own configuration."""


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or a list of another value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def joined(batches: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Return the arrays of all batches, each input or output by itself."""
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def figures_of(y_true: list, y_pred: list, metrics: Sequence[SearchMetric]) -> list[float]:
    """Return metrics of one or several outputs.

    A prediction of shape (n, 1) is that of targets of shape (n,), and the reverse.
    """
    if len(y_true) != len(y_pred):
        raise UsageError(
            f"The model gives {len(y_pred)} outputs but the data has {len(y_true)} targets",
            code="model-output",
        )
    y_pred = [_like(p, y) for y, p in zip(y_true, y_pred, strict=True)]
    if len(y_true) == 1:
        y_true, y_pred = y_true[0], y_pred[0]
    return [metric.compute(y_true, y_pred) for metric in metrics]


def _like(predicted, target):
    longer, shorter = sorted((predicted.shape, target.shape), key=len, reverse=True)
    if longer == (*shorter, 1):
        return predicted.reshape(target.shape)
    return predicted
