"""What a model of a search is, in prose.

A **builder** is picklable and makes a model of a configuration, wherever a trial runs.  The
**model** trains epoch by epoch: a trial calls :meth:`Model.fit_epoch` and :meth:`Model.figures` in
turns, keeps :meth:`Model.weights` when an epoch was the best one so far, and
:meth:`Model.state` where the search may move a trial or go back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.search.objective import Metric

__all__ = ["Builder", "Model", "batch_size_of", "figures_of", "part_of"]

_BATCH_SIZE = 32


class Builder(ABC):
    """Makes the model of a configuration."""

    #: dtype of floating values of the data; None leaves it to them
    floats: str | None = None
    #: whether several workers can train a model together
    takes_workers = False

    @abstractmethod
    def build(
        self, config: Mapping[str, Any], *, epochs: int = 1, use_gpu: bool = False, sync=None
    ) -> Model:
        """A model that has not been trained.

        Parameters
        ----------
        config : dict
        epochs : int
            For how many it will be trained at most.
        use_gpu : bool
            Whether the trial has a GPU.
        sync : GradientSync, optional
            Of a trial of several workers, where :attr:`takes_workers`.
        """

    @abstractmethod
    def load(self, config: Mapping[str, Any], weights: bytes) -> Any:
        """What ``get_best_model`` gives: the user's own kind of model, with trained weights."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Put the framework's random numbers into a state."""

    @abstractmethod
    def default_metric(self, make_config: Callable[[], dict]) -> str:
        """The metric that is meant where none is given.

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
        """Whether the models compute a metric of this name themselves, and its mode if known."""
        return False, None


class Model(ABC):
    """A model in training."""

    @abstractmethod
    def fit_epoch(self, data, epoch: int) -> None:
        """Train for one epoch, of which `epoch` is the number, from 0."""

    @abstractmethod
    def figures(self, data, metrics: Sequence[Metric]) -> list[float]:
        """The metrics of the predictions for data."""

    @abstractmethod
    def weights(self) -> bytes:
        """What the trained model is."""

    @abstractmethod
    def state(self) -> bytes:
        """Everything that the training goes on with."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Go on from a state."""


def batch_size_of(config: Mapping[str, Any]) -> int:
    """The rows of a batch that a configuration asks for."""
    size = config.get("batch_size", _BATCH_SIZE)
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
        raise UsageError(f"batch_size of a configuration must be a positive integer, got {size!r}")
    return int(size)


def part_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The first row of a worker's part of a batch, and the one behind its last."""
    return rows * rank // size, rows * (rank + 1) // size


def figures_of(y_true: list, y_pred: list, metrics: Sequence[Metric]) -> list[float]:
    """Metrics of one or several outputs.

    A prediction of shape (n, 1) is that of targets of shape (n,), and the reverse.
    """
    if len(y_true) != len(y_pred):
        raise UsageError(
            f"The model gives {len(y_pred)} outputs but the data has {len(y_true)} targets"
        )
    y_pred = [_like(p, y) for y, p in zip(y_true, y_pred, strict=True)]
    if len(y_true) == 1:
        y_true, y_pred = y_true[0], y_pred[0]
    return [metric.of(y_true, y_pred) for metric in metrics]


def _like(predicted, target):
    longer, shorter = sorted((predicted.shape, target.shape), key=len, reverse=True)
    if longer == (*shorter, 1):
        return predicted.reshape(target.shape)
    return predicted
