"""What a search looks for: metrics, which of their values are better, and when one is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.metrics import Evaluator

__all__ = ["Goal", "Metric"]

_NO_MODE = (
    "We cannot infer the metric mode of {metric}; please specify the `metric_mode` parameter in "
    "AutoEstimator.fit()"
)


@dataclass(frozen=True)
class Metric:
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
    function: Callable | None = None

    @property
    def sign(self) -> int:
        """1 or -1, so that larger values of ``sign * value`` are better."""
        return 1 if self.mode == "max" else -1

    def of(self, y_true, y_pred) -> float:
        """The figure.

        Parameters
        ----------
        y_true, y_pred : ndarray, or list of them for several outputs
        """
        if self.function is not None:
            return _number(self.function(y_true, y_pred), self.name)
        if isinstance(y_true, list):
            each = [self.of(y, p) for y, p in zip(y_true, y_pred, strict=True)]
            return float(np.mean(each))
        return Evaluator.evaluate(self.name, y_true, y_pred, multioutput="uniform_average")

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than another; a number is better than none and than nan."""
        if np.isnan(value):
            return False
        return than is None or bool(np.isnan(than)) or self.sign * value > self.sign * than


@dataclass(frozen=True)
class Goal:
    """One or several metrics.

    Attributes
    ----------
    metrics : sequence of Metric
    threshold : float, optional
        A trial that reaches it ends; of the first metric.
    """

    metrics: Sequence[Metric]
    threshold: float | None = None

    @property
    def first(self) -> Metric:
        """The metric by which the epochs of a trial are compared."""
        return self.metrics[0]

    @property
    def is_single(self) -> bool:
        """Whether there is one metric only."""
        return len(self.metrics) == 1

    def reached(self, value: float) -> bool:
        """Whether a value of the first metric is good enough to end a trial."""
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
    ) -> Goal:
        """The goal that the arguments of ``fit`` name.

        Parameters
        ----------
        metric : str, callable or list of them
        metric_mode : {"min", "max"} or list of them, optional
        metric_threshold : float, optional
        known : callable, optional
            Whether the model itself has a metric of a name, and its mode as far as that is known.

        Raises
        ------
        UsageError
            For a metric that there is none of, or whose mode is neither given nor known.
        """
        several = isinstance(metric, list | tuple)
        metrics = list(metric) if several else [metric]
        modes = metric_mode if isinstance(metric_mode, list | tuple) else [metric_mode]
        if several and metric_mode is None:
            modes = [None] * len(metrics)
        if not metrics or len(modes) != len(metrics):
            raise UsageError(
                "metric_mode must be one of 'min' and 'max' for every metric, got metrics "
                f"{[_name(each) for each in metrics]} and modes {list(modes)}"
            )
        found = [_metric(each, mode, known) for each, mode in zip(metrics, modes, strict=True)]
        names = [each.name for each in found]
        if len(set(names)) < len(names):
            raise UsageError(f"Two of the metrics have the same name: {names}")
        if metric_threshold is not None:
            kinds = int | float | np.number
            if isinstance(metric_threshold, bool) or not isinstance(metric_threshold, kinds):
                raise UsageError(f"metric_threshold must be a number, got {metric_threshold!r}")
        return cls(found, metric_threshold)


def _metric(metric, mode, known) -> Metric:
    if mode not in (None, "min", "max"):
        raise UsageError(f"metric_mode must be 'min' or 'max', got {mode!r}")
    if isinstance(metric, str):
        is_the_models, own_mode = known(metric)
        mode = mode or own_mode
        if is_the_models:
            if mode is None:
                raise UsageError(_NO_MODE.format(metric=metric))
            return Metric(metric, mode)
        if mode is None:
            mode = Evaluator.get_metric_mode(metric)
        return Metric(Evaluator.check_metric(metric), mode)
    if not callable(metric) or isinstance(metric, type):
        raise UsageError(f"metric must be a name or a function of (y_true, y_pred), got {metric!r}")
    if mode is None:
        raise UsageError(
            "You must specify `metric_mode` for your metric function; pass metric_mode='min' or "
            "'max' to AutoEstimator.fit()"
        )
    return Metric(_name(metric), mode, metric)


def _name(metric) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


def _number(value, name) -> float:
    value = np.asarray(value)
    if value.size != 1:
        raise UsageError(
            f"The metric {name} must be a number, the function returned shape {value.shape}"
        )
    return float(value.reshape(()))
