"""Trials: training of one configuration, epoch by epoch, until a stopping criterion is met.

A **builder** is picklable and creates a model from a configuration in the process of a trial.  The
**model** trains epoch by epoch: a trial calls :meth:`TrialModel.epoch`, saves
:meth:`TrialModel.weights` after each new best epoch, and :meth:`TrialModel.state` if the scheduler
may move or roll back a trial.  PyTorch and Keras models use the training loops of their
Estimators, in the process of the trial.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.checks import check_number
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import UsageError
from bigdl.common.timeouts import CLEAN_UP_S
from bigdl.orca.automl.metrics import Evaluator
from bigdl.runtime.worker import DriverConnection, Worker
from bigdl.training.state import seed_everything


@dataclass(frozen=True)
class SearchMetric:
    """Metric that a search computes from the predictions for the validation set.

    Attributes
    ----------
    name : str
    mode : {"min", "max"}
    function : callable, optional
        ``f(y_true, y_pred)``; without a function, `name` is a metric of Evaluator or of the model.
    """

    name: str
    mode: str
    function: Callable[[Any, Any], Any] | None = None

    @property
    def sign(self) -> int:
        """1 for metrics to maximize, -1 for metrics to minimize."""
        return 1 if self.mode == "max" else -1

    def compute(
        self, y_true: np.ndarray | Sequence[np.ndarray], y_pred: np.ndarray | Sequence[np.ndarray]
    ) -> float:
        """Compute the metric of an array, or its mean over the arrays of several outputs."""
        if self.function is not None:
            value = np.asarray(self.function(y_true, y_pred))
            if value.size != 1:
                raise UsageError(
                    f"The function of metric {self.name} must return a number, but returned shape "
                    f"{value.shape}",
                    code="metric-unsupported",
                    metric=self.name,
                )
            return float(value.reshape(()))
        if isinstance(y_true, list):
            each = [self.compute(y, p) for y, p in zip(y_true, y_pred, strict=True)]
            return float(np.mean(each))
        return Evaluator.evaluate(self.name, y_true, y_pred, multioutput="uniform_average")

    def is_better(self, value: float, than: float | None) -> bool:
        """Return True if a value is better than another; NaN is worse than any number."""
        if np.isnan(value):
            return False
        return than is None or bool(np.isnan(than)) or self.sign * value > self.sign * than


@dataclass(frozen=True)
class SearchGoal:
    """Metrics of a search, and an optional threshold for the first metric.

    Attributes
    ----------
    metrics : sequence of SearchMetric
    threshold : float, optional
        Value of the first metric that ends a trial.
    """

    metrics: Sequence[SearchMetric]
    threshold: float | None = None

    @property
    def first(self) -> SearchMetric:
        """Metric that determines the best epoch of a trial."""
        return self.metrics[0]

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return [metric.name for metric in self.metrics]

    @property
    def is_single(self) -> bool:
        """True if there is only one metric."""
        return len(self.metrics) == 1

    def is_reached(self, value: float) -> bool:
        """Return True if a value of the first metric reaches the threshold."""
        if self.threshold is None or np.isnan(value):
            return False
        return self.first.sign * value >= self.first.sign * self.threshold

    @classmethod
    def of(
        cls,
        metric: object,
        metric_mode: object = None,
        metric_threshold: float | None = None,
        *,
        known: Callable[[str], tuple[bool, str | None]] = lambda name: (False, None),
    ) -> SearchGoal:
        """Create a SearchGoal from the arguments of ``fit``.

        Parameters
        ----------
        metric : str, callable or list of them
        metric_mode : {"min", "max"} or list of them, optional
        metric_threshold : float, optional
        known : callable, optional
            Returns whether the model has a metric of a name, and its mode if known.

        Raises
        ------
        UsageError
            If a metric does not exist, or its mode is neither given nor known.
        """
        metrics = as_list(metric)
        modes = [None] * len(metrics) if metric_mode is None else as_list(metric_mode)
        if not metrics or len(modes) != len(metrics):
            raise UsageError(
                "metric_mode must be one of 'min' and 'max' for every metric, got metrics "
                f"{[_name(each) for each in metrics]} and modes {modes}",
                code="argument-value",
                argument="metric_mode",
                allowed=["min", "max"],
            )
        goal = [_metric(each, mode, known) for each, mode in zip(metrics, modes, strict=True)]
        names = [each.name for each in goal]
        if len(set(names)) < len(names):
            raise UsageError(
                f"Two of the metrics have the same name: {names}",
                code="argument-value",
                argument="metric",
            )
        if metric_threshold is not None:
            check_number("metric_threshold", metric_threshold)
        return cls(goal, metric_threshold)


def _metric(
    metric: object, mode: object, known: Callable[[str], tuple[bool, str | None]]
) -> SearchMetric:
    if mode not in (None, "min", "max"):
        raise UsageError(
            f"metric_mode must be 'min' or 'max', got {mode!r}",
            code="argument-value",
            argument="metric_mode",
            allowed=["min", "max"],
        )
    if isinstance(metric, str):
        is_of_model, model_mode = known(metric)
        mode = mode or model_mode or Evaluator.get_metric_mode(metric)
        return SearchMetric(metric if is_of_model else Evaluator.check_metric(metric), mode)
    if not callable(metric) or isinstance(metric, type):
        raise UsageError(
            f"metric must be a name or a function of (y_true, y_pred), got {metric!r}",
            code="argument-type",
            argument="metric",
        )
    if mode is None:
        raise UsageError(
            "You must specify `metric_mode` for your metric function; pass metric_mode='min' or "
            "'max' to AutoEstimator.fit()",
            code="argument-missing",
            argument="metric_mode",
        )
    return SearchMetric(_name(metric), mode, metric)


def _name(metric: object) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


class Builder(ABC):
    """Base class of builders, which create a model from a configuration."""

    #: dtype to which floating-point data is converted; None keeps the dtype
    floats: str | None = None
    #: True if models support missing features: nulls are passed as NaN
    nulls_are_missing = False
    #: True if models support categories: categorical pandas columns are passed as such
    takes_categories = False
    #: True if several workers can train a model together
    takes_workers = False

    @abstractmethod
    def build(self, config: dict[str, Any], job: TrialJob, worker: Worker) -> TrialModel:
        """Create an untrained model.

        Parameters
        ----------
        config : dict
        job : TrialJob
            Settings that all trials share, with loaded data.
        worker : Worker
            Worker of the trial; one of several only with :attr:`takes_workers`. Its shards are the
            job's data.
        """

    @abstractmethod
    def load(self, config: Mapping[str, Any], weights: bytes) -> object:
        """Create the user's model with trained weights."""

    @abstractmethod
    def default_metric(self, make_config: Callable[[], dict]) -> str:
        """Return the metric to use if the user passes none.

        Parameters
        ----------
        make_config : callable
            Returns the configuration of a trial.

        Raises
        ------
        UsageError
            If the user must pass a metric.
        """

    def knows(self, metric: str) -> tuple[bool, str | None]:
        """Return whether the model computes a metric of this name, and its mode if known."""
        return False, None


class TrialModel(ABC):
    """Base class of the models that trials train; all workers of a trial call the same methods."""

    @abstractmethod
    def epoch(self) -> list[float]:
        """Train for one epoch and return the values of the search's metrics."""

    @abstractmethod
    def weights(self) -> bytes:
        """Return the trained weights."""

    @abstractmethod
    def state(self) -> object:
        """Return the complete training state."""

    @abstractmethod
    def restore(self, state: object) -> None:
        """Restore a training state, but keep the learning rate of this model's configuration."""


def as_list(value: object) -> list[Any]:
    """Convert a list or tuple to a list, and wrap any other value in a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def concatenate_batches(batches: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Concatenate the arrays of all batches, separately for each input or output."""
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def compute_metrics(y_true: list, y_pred: list, metrics: Sequence[SearchMetric]) -> list[float]:
    """Compute metrics of one or more outputs.

    Predictions of shape (n, 1) match targets of shape (n,), and vice versa.
    """
    if len(y_true) != len(y_pred):
        raise UsageError(
            f"The model has {len(y_pred)} outputs but the data has {len(y_true)} targets",
            code="model-output",
        )
    y_pred = [_reshape_like(p, y) for y, p in zip(y_true, y_pred, strict=True)]
    if len(y_true) == 1:
        y_true, y_pred = y_true[0], y_pred[0]
    return [metric.compute(y_true, y_pred) for metric in metrics]


def _reshape_like(predicted, target):
    longer, shorter = sorted((predicted.shape, target.shape), key=len, reverse=True)
    if longer == (*shorter, 1):
        return predicted.reshape(target.shape)
    return predicted


@dataclass
class TrialJob:
    """Settings and data that all trials of a search share.

    Attributes
    ----------
    builder : Builder
    train, validation : object
        Result of :func:`~bigdl.orca.automl.model.data.trial_data`. Without `validation` the metrics
        are computed on the training data.
    goal : SearchGoal
    epochs : int
        Maximum number of epochs of a trial.
    seed : int
        Random seed of every trial, so trials differ only in their configurations.
    bundles : sequence of dict
        Resources of each worker of a trial; all entries are equal.
    """

    builder: Builder
    train: Any
    validation: Any
    goal: SearchGoal
    epochs: int = 1
    seed: int = 0
    bundles: Sequence[Mapping[str, float]] = ({},)

    @property
    def gpus(self) -> float:
        """Number of GPUs of each worker of a trial."""
        return self.bundles[0].get("gpu", 0)


@dataclass(frozen=True)
class EpochResult:
    """Metrics and status of a trial after an epoch.

    Attributes
    ----------
    epoch : int
        Number of completed epochs.
    metrics : list of float
        Values of the search's metrics.
    best : list of float
        Metrics of the best epoch so far, if any.
    is_best : bool
        True if this epoch is the best so far.
    is_last : bool
        True if the trial ends after this epoch.
    seconds : float
        Duration of all epochs so far.
    """

    epoch: int = 0
    metrics: Sequence[float] = ()
    best: Sequence[float] = ()
    is_best: bool = False
    is_last: bool = False
    seconds: float = 0.0


class TrialRun:
    """Execution of a trial by this process, which is its only worker or one of several.

    Parameters
    ----------
    job : TrialJob
    config : dict
    rank, size : int
        Rank and number of the trial's workers, all of which make the same calls.
    **connection
        ``channel``, ``host``, ``certificate`` and ``timeout`` of
        :class:`~bigdl.runtime.worker.Worker`, if there are several workers.
    """

    def __init__(
        self,
        job: TrialJob,
        config: Mapping[str, Any],
        rank: int = 0,
        size: int = 1,
        **connection: Any,
    ):
        self._job, self._last = job, EpochResult()
        self._worker = Worker(
            rank,
            size,
            threads=len(usable_cores()),
            shards={"data": job.train, "validation": job.validation or job.train},
            driver=DriverConnection({"use_gpu": job.gpus > 0}),
            **connection,
        )
        seed_everything(job.seed)
        try:
            self.model = job.builder.build(dict(config), job, self._worker)
        except BaseException:
            self.close(CLEAN_UP_S)
            raise

    def close(self, timeout: float | None = None) -> None:
        """Release the trial's resources and disconnect from the other workers."""
        self._worker.clean_up(timeout)

    def step(self) -> EpochResult:
        """Train for one epoch and compute its metrics."""
        job, last, start = self._job, self._last, time.perf_counter()
        metrics = self.model.epoch()
        seconds = last.seconds + time.perf_counter() - start
        is_best = job.goal.first.is_better(metrics[0], last.best[0] if last.best else None)
        self._last = EpochResult(
            last.epoch + 1,
            metrics,
            metrics if is_best or not last.best else last.best,
            is_best,
            last.epoch + 1 >= job.epochs or job.goal.is_reached(metrics[0]),
            seconds,
        )
        return self._last

    def state(self) -> dict[str, Any]:
        """Return the state from which another process can continue the trial."""
        return {"model": self.model.state(), "step": self._last}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        self.model.restore(state["model"])
        self._last = state["step"]
