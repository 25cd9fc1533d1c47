"""Metrics of predictions for a table."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError
from bigdl.orca.automl.metrics import Evaluator
from bigdl.orca.automl.table.columns import BINARY, MULTICLASS, REGRESSION, TableTarget

_DEFAULTS = {BINARY: "auc", MULTICLASS: "logloss", REGRESSION: "rmse"}
_SMALLEST = 1e-7  # probability in a logarithm


def _logloss(y: np.ndarray, scores: np.ndarray) -> float:
    chosen = np.clip(scores[np.arange(len(y)), y], _SMALLEST, 1)
    return float(-np.log(chosen).mean())


def _auc(y: np.ndarray, scores: np.ndarray) -> float:
    from sklearn.metrics import roc_auc_score

    if len(np.unique(y)) < 2:
        return math.nan
    return float(roc_auc_score(y, scores[:, 1]))


def _of_classes(function: str, **options: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    def compute(y: np.ndarray, scores: np.ndarray) -> float:
        from sklearn import metrics

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes that the rows lack
            return float(getattr(metrics, function)(y, scores.argmax(axis=1), **options))

    return compute


_CLASSIFICATION = {
    "accuracy": ("max", lambda y, scores: float((scores.argmax(axis=1) == y).mean())),
    "balanced_accuracy": ("max", _of_classes("balanced_accuracy_score")),
    "f1_macro": ("max", _of_classes("f1_score", average="macro")),
    "logloss": ("min", _logloss),
}
_BINARY = {"auc": ("max", _auc), "f1": ("max", _of_classes("f1_score"))}


@dataclass(frozen=True)
class TableMetric:
    """Metric of a table's models.

    Attributes
    ----------
    name : str
    mode : {"min", "max"}
    compute : callable
        ``f(y, scores)`` of class indices and probabilities, or of values and values.
    """

    name: str
    mode: str
    compute: Callable[[np.ndarray, np.ndarray], float]

    @classmethod
    def of(cls, metric: object, mode: str | None, target: TableTarget) -> TableMetric:
        """Return a metric by its name, or one of a function of labels and predicted labels.

        Raises
        ------
        UsageError
            If the task has no metric of this name, a function has no mode, or the mode is not
            that of a named metric.
        """
        if mode is not None:
            check_choice("metric_mode", mode, ("min", "max"))
        if metric is None:
            metric = _DEFAULTS[target.task]
        if callable(metric):
            if mode is None:
                raise UsageError(
                    "A metric function needs metric_mode='min' or 'max', got metric_mode=None",
                    code="argument-missing",
                    argument="metric_mode",
                )
            return cls(getattr(metric, "__name__", "metric"), mode, _OfLabels(metric, target))
        known = metrics_of(target.task)
        if metric not in known:
            raise UsageError(
                f"metric {metric!r} is not supported for a {target.task} target; pass one of "
                f"{', '.join(known)}, or a function of (y_true, y_pred) with metric_mode",
                code="name-unknown",
                argument="metric",
                allowed=list(known),
            )
        metric_mode, compute = known[str(metric)]
        if mode not in (None, metric_mode):
            raise UsageError(
                f"metric {metric!r} has the mode {metric_mode!r}, got metric_mode={mode!r}; leave "
                "metric_mode out, which is for functions",
                code="argument-conflict",
                argument="metric_mode",
            )
        return cls(str(metric), metric_mode, compute)


@dataclass(frozen=True)
class _OfLabels:
    """Metric that is a function of labels, of which the models give probabilities."""

    function: Callable[[np.ndarray, np.ndarray], float]
    target: TableTarget

    def __call__(self, y: np.ndarray, scores: np.ndarray) -> float:
        if self.target.is_classification:
            y = self.target.decode(np.eye(len(self.target.classes))[y])
        return float(self.function(y, self.target.decode(scores)))


def metrics_of(task: str) -> dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], float]]]:
    """Return mode and function of all metrics of a task, by name; the default is first."""
    metrics: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], float]]]
    if task == REGRESSION:
        names = [name for name in Evaluator.metrics_func if name != "accuracy"]
        metrics = {
            name: (Evaluator.get_metric_mode(name), functools.partial(Evaluator.evaluate, name))
            for name in names
        }
    else:
        metrics = {**_CLASSIFICATION, **(_BINARY if task == BINARY else {})}
    default = _DEFAULTS[task]
    return {default: metrics[default], **metrics}
