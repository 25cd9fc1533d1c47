"""Builders and models of a search.

A **builder** is picklable and makes a model of a configuration, wherever a trial runs.  The
**model** trains epoch by epoch: a trial calls :meth:`Model.fit_epoch` and :meth:`Model.figures` in
turns, keeps :meth:`Model.weights` when an epoch was the best one so far, and
:meth:`Model.state` where the search may move a trial or go back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.orca.automl.model.data import Creator, Rows
    from bigdl.orca.automl.trial import Metric
    from bigdl.runtime.collectives.base import GradientSync

__all__ = [
    "Builder",
    "Model",
    "as_list",
    "batch_size_of",
    "concatenated",
    "figures_of",
    "part_of",
]

_BATCH_SIZE = 32


class Builder(ABC):
    """Makes the model of a configuration."""

    #: dtype of floating values of the data; None leaves it to them
    floats: str | None = None
    #: True if several workers can train a model together
    takes_workers = False

    @abstractmethod
    def build(
        self,
        config: Mapping[str, Any],
        *,
        epochs: int = 1,
        use_gpu: bool = False,
        sync: GradientSync | None = None,
    ) -> Model:
        """Return a model that has not been trained.

        Parameters
        ----------
        config : dict
        epochs : int
            For how many it will be trained at most.
        use_gpu : bool
            The trial has a GPU.
        sync : GradientSync, optional
            Of a trial of several workers, where :attr:`takes_workers`.
        """

    @abstractmethod
    def load(self, config: Mapping[str, Any], weights: bytes) -> Any:
        """Return the user's own class of model with trained weights."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the framework's random numbers."""

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


class Model(ABC):
    """A model in training.

    Parameters
    ----------
    config : dict
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self._loaders: dict[int, Any] = {}

    def loader_of(self, data: Creator, check: Callable[[Any], None]) -> Any:
        """Return the loader that the user's function makes of the configuration, once checked."""
        if id(data) not in self._loaders:
            loader = data.function(dict(self.config))
            check(loader)
            self._loaders[id(data)] = loader
        return self._loaders[id(data)]

    @abstractmethod
    def fit_epoch(self, data: Rows | Creator, epoch: int) -> None:
        """Train for one epoch, of which `epoch` is the number, from 0."""

    @abstractmethod
    def figures(self, data: Rows | Creator, metrics: Sequence[Metric]) -> list[float]:
        """Return the metrics of the predictions for data."""

    @abstractmethod
    def weights(self) -> bytes:
        """Return the trained weights."""

    @abstractmethod
    def state(self) -> bytes:
        """Return everything that the training goes on with."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Go on from a state."""


def batch_size_of(config: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch that a configuration asks for."""
    size = config.get("batch_size", _BATCH_SIZE)
    return check_positive("batch_size of a configuration", size)


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or a list of another value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def concatenated(batches: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the arrays of all batches, each output by itself."""
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def part_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a worker's part of a batch, and the one behind its last."""
    return rows * rank // size, rows * (rank + 1) // size


def figures_of(y_true: list, y_pred: list, metrics: Sequence[Metric]) -> list[float]:
    """Return metrics of one or several outputs.

    A prediction of shape (n, 1) is that of targets of shape (n,), and the reverse.
    """
    if len(y_true) != len(y_pred):
        raise UsageError(
            f"The model gives {len(y_pred)} outputs but the data has {len(y_true)} targets"
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
