"""One trial: a configuration is trained epoch by epoch until it is good, or has had its epochs.

A **builder** is picklable and makes a model of a configuration, wherever a trial runs.  The
**model** trains epoch by epoch: a trial calls :meth:`TrialModel.epoch`, keeps
:meth:`TrialModel.weights` when an epoch was the best one so far, and :meth:`TrialModel.state` where
the search may move a trial or go back.  Models of PyTorch and Keras are the loops of their
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
    """A figure of the predictions for a validation set.

    Attributes
    ----------
    name : str
    mode : {"min", "max"}
    function : callable, optional
        ``f(y_true, y_pred)``; without one, `name` is that of an Evaluator's metric, or one that
        the model itself knows.
    """

    name: str
    mode: str
    function: Callable[[Any, Any], Any] | None = None

    @property
    def sign(self) -> int:
        """1 or -1, so that larger values of ``sign * value`` are better."""
        return 1 if self.mode == "max" else -1

    def compute(self, y_true: Any, y_pred: Any) -> float:
        """Return the figure of an ndarray, or of a list of them for several outputs."""
        if self.function is not None:
            value = np.asarray(self.function(y_true, y_pred))
            if value.size != 1:
                raise UsageError(
                    f"The metric {self.name} must be a number, the function returned shape "
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
        """Return True if a value is better than another, or is a number and the other is not."""
        if np.isnan(value):
            return False
        return than is None or bool(np.isnan(than)) or self.sign * value > self.sign * than


@dataclass(frozen=True)
class SearchGoal:
    """Metrics of a search, and the value of the first one that is good enough.

    Attributes
    ----------
    metrics : sequence of SearchMetric
    threshold : float, optional
        A trial that reaches it ends; of the first metric.
    """

    metrics: Sequence[SearchMetric]
    threshold: float | None = None

    @property
    def first(self) -> SearchMetric:
        """The metric by which the epochs of a trial are compared."""
        return self.metrics[0]

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return [metric.name for metric in self.metrics]

    @property
    def is_single(self) -> bool:
        """True if there is one metric only."""
        return len(self.metrics) == 1

    def is_reached(self, value: float) -> bool:
        """Return True if a value of the first metric is good enough to end a trial."""
        if self.threshold is None or np.isnan(value):
            return False
        return self.first.sign * value >= self.first.sign * self.threshold

    @classmethod
    def of(
        cls,
        metric: Any,
        metric_mode: Any = None,
        metric_threshold: float | None = None,
        *,
        known: Callable[[str], tuple[bool, str | None]] = lambda name: (False, None),
    ) -> SearchGoal:
        """Return the goal that the arguments of ``fit`` name.

        Parameters
        ----------
        metric : str, callable or list of them
        metric_mode : {"min", "max"} or list of them, optional
        metric_threshold : float, optional
        known : callable, optional
            Returns if the model itself has a metric of a name, and its mode as far as that is
            known.

        Raises
        ------
        UsageError
            For a metric that there is none of, or whose mode is neither given nor known.
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
    metric: Any, mode: Any, known: Callable[[str], tuple[bool, str | None]]
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


def _name(metric: Any) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


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


@dataclass
class TrialJob:
    """Parts that all trials of a search have in common.

    Attributes
    ----------
    builder : Builder
    train, validation : object
        Of :func:`~bigdl.orca.automl.model.data.trial_data`. Without `validation` the metrics are
        those of the training data.
    goal : SearchGoal
    epochs : int
    seed : int
        Of the random numbers of every trial, so that trials differ by their configurations alone.
    bundles : sequence of dict
        The resources of each worker that trains the model of a trial, which are the same ones.
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
        """GPUs of each worker of a trial."""
        return self.bundles[0].get("gpu", 0)


@dataclass(frozen=True)
class EpochResult:
    """Outcome of an epoch.

    Attributes
    ----------
    epoch : int
        Epochs so far.
    figures : list of float
        Of the goal's metrics.
    best : list of float
        Those of the best epoch so far, if there was one.
    is_best : bool
        True for that epoch.
    is_last : bool
    seconds : float
        Of all epochs so far.
    """

    epoch: int = 0
    figures: Sequence[float] = ()
    best: Sequence[float] = ()
    is_best: bool = False
    is_last: bool = False
    seconds: float = 0.0


class TrialRun:
    """A trial in the process that runs it, or in each of the processes that do.

    Parameters
    ----------
    job : TrialJob
    config : dict
    rank, size : int
        Of several workers, all of which make the same calls.
    **place
        Of several workers ``line`` and ``host``.
    """

    def __init__(
        self, job: TrialJob, config: Mapping[str, Any], rank: int = 0, size: int = 1, **place: Any
    ):
        self._job, self._last = job, EpochResult()
        self._worker = Worker(
            rank,
            size,
            threads=len(usable_cores()),
            shards={"data": job.train, "validation": job.validation or job.train},
            driver=DriverConnection({"use_gpu": job.gpus > 0}),
            **place,
        )
        seed_everything(job.seed)
        try:
            self.model = job.builder.build(dict(config), job, self._worker)
        except BaseException:
            self.close(CLEAN_UP_S)
            raise

    def close(self, patience: float | None = None) -> None:
        """Free what the trial has opened, and leave the other workers."""
        self._worker.clean_up(patience)

    def step(self) -> EpochResult:
        """Train for one epoch and compute its figures."""
        job, last, start = self._job, self._last, time.perf_counter()
        figures = self.model.epoch()
        seconds = last.seconds + time.perf_counter() - start
        is_best = job.goal.first.is_better(figures[0], last.best[0] if last.best else None)
        self._last = EpochResult(
            last.epoch + 1,
            figures,
            figures if is_best or not last.best else last.best,
            is_best,
            last.epoch + 1 >= job.epochs or job.goal.is_reached(figures[0]),
            seconds,
        )
        return self._last

    def state(self) -> dict[str, Any]:
        """Return what another process needs to go on with the trial."""
        return {"model": self.model.state(), "step": self._last}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.restore(state["model"])
        self._last = state["step"]
