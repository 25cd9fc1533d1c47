"""Metrics of a complete validation set, by name.

The first axis of an array is the sample axis; ``"raw_values"`` keeps the other axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "MAE",
    "MAPE",
    "MDAPE",
    "ME",
    "MPE",
    "MSE",
    "MSLE",
    "MSPE",
    "R2",
    "RMSE",
    "Accuracy",
    "Evaluator",
    "sMAPE",
    "sMDAPE",
]

_EPSILON = 1e-10


def _msle(y, p):
    if (y < 0).any() or (p < 0).any():
        raise UsageError(
            "msle computes the logarithm of 1 + y, so values must not be negative",
            code="data-value",
            metric="msle",
        )
    return np.mean((np.log1p(y) - np.log1p(p)) ** 2, axis=0)


def _r2(y, p):
    """Return R²; for constant targets, 1 if the predictions are exact, else 0."""
    residual = np.sum((y - p) ** 2, axis=0)
    total = np.sum((y - np.mean(y, axis=0)) ** 2, axis=0)
    constant = total == 0
    score = 1 - residual / np.where(constant, 1, total)
    return np.where(constant, np.where(residual == 0, 1.0, 0.0), score)


def _relative(y, p):
    return 100 * (y - p) / (y + _EPSILON)


def _symmetric(y, p):
    return 100 * np.abs(y - p) / (np.abs(y) + np.abs(p) + _EPSILON)


def _accuracy(y, p):
    """Return the fraction of correct labels; class scores are converted to labels first."""
    if y.shape[1:] == (1,):
        y = y[:, 0]
    if p.ndim == y.ndim + 1:
        p = np.argmax(p, axis=1) if p.shape[1] > 1 else p[:, 0]
    if p.dtype.kind == "f" and not np.array_equal(p, np.rint(p)):
        p = p > 0.5
    return np.mean(y == p)


_METRICS: dict[str, Callable] = {
    "me": lambda y, p: np.mean(y - p, axis=0),
    "mae": lambda y, p: np.mean(np.abs(y - p), axis=0),
    "mse": lambda y, p: np.mean((y - p) ** 2, axis=0),
    "rmse": lambda y, p: np.sqrt(np.mean((y - p) ** 2, axis=0)),
    "msle": _msle,
    "r2": _r2,
    "mpe": lambda y, p: np.mean(_relative(y, p), axis=0),
    "mape": lambda y, p: np.mean(np.abs(_relative(y, p)), axis=0),
    "mspe": lambda y, p: np.mean(_relative(y, p) ** 2 / 100, axis=0),
    "smape": lambda y, p: np.mean(_symmetric(y, p), axis=0),
    "mdape": lambda y, p: np.median(np.abs(_relative(y, p)), axis=0),
    "smdape": lambda y, p: np.median(_symmetric(y, p), axis=0),
    "accuracy": _accuracy,
}
_MAX = ("r2", "accuracy")


class Evaluator:
    """Evaluator that computes metrics by name.

    ``me``, ``mae``, ``mse``, ``rmse``, ``msle``, ``r2``; ``mpe``, ``mape``, ``mspe``, ``smape``,
    ``mdape``, ``smdape``, which are percentages; ``accuracy``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.automl.metrics import Evaluator
    >>> float(Evaluator.evaluate("mse", np.array([1.0, 2.0]), np.array([1.0, 4.0])))
    2.0
    """

    metrics_func = _METRICS
    max_mode_metrics = _MAX

    @staticmethod
    def evaluate(metric: str, y_true, y_pred, multioutput: str = "raw_values"):
        """Compute a metric of predictions.

        Parameters
        ----------
        metric : str
            Name of the metric, in upper or lower case.
        y_true : array of shape (n, ...)
        y_pred : array of the same shape
            For ``"accuracy"``: labels, scores of shape (n, classes), or scores of a single class
            with threshold 0.5.
        multioutput : {"raw_values", "uniform_average", "variance_weighted"}
            ``"raw_values"`` returns one value per output, ``"uniform_average"`` their mean; for
            ``"rmse"`` the root of the mean squared error.  ``"variance_weighted"``, for ``"r2"``
            only, weights the mean with the variances of the outputs.

        Returns
        -------
        float or ndarray
            Always float64.  With ``"raw_values"`` an array with the shape of one sample, or a
            number if a sample is a number.

        Raises
        ------
        UsageError
            If the metric or `multioutput` is unknown, the shapes differ, or the arrays are empty.
        """
        name = Evaluator.check_metric(metric)
        choices = ("raw_values", "uniform_average", *(["variance_weighted"] * (name == "r2")))
        check_choice("multioutput", multioutput, choices)
        y_true, y_pred = np.asarray(y_true), np.asarray(y_pred)
        _check_shapes(name, y_true, y_pred)
        if name == "accuracy":
            return float(_accuracy(y_true, y_pred))
        # float32 sums of a million values lose precision, and unsigned integers wrap around
        y_true, y_pred = y_true.astype(np.float64), y_pred.astype(np.float64)
        if multioutput == "variance_weighted":
            variances = np.var(y_true, axis=0)
            if variances.any():
                return float(np.average(_r2(y_true, y_pred), weights=variances))
        elif multioutput == "raw_values":
            value = np.asarray(_METRICS[name](y_true, y_pred))
            return value.reshape(())[()] if value.shape in ((), (1,)) else value
        elif name == "rmse":
            return float(np.sqrt(np.mean(_METRICS["mse"](y_true, y_pred))))
        return float(np.mean(_METRICS[name](y_true, y_pred)))

    @staticmethod
    def check_metric(metric: str) -> str:
        """Return a metric's name in lower case, or raise UsageError if the metric does not exist.

        Raises
        ------
        UsageError
            If there is no metric with this name.
        """
        name = metric.lower() if isinstance(metric, str) else ""
        if name not in _METRICS:
            raise UsageError(
                f"metric {metric} is not supported; supported are {', '.join(sorted(_METRICS))}",
                code="name-unknown",
                metric=metric,
                allowed=list(_METRICS),
            )
        return name

    @staticmethod
    def get_metric_mode(metric: str) -> str:
        """Return ``"max"`` if larger values of a metric are better, else ``"min"``.

        Raises
        ------
        UsageError
            If the metric is unknown.
        """
        try:
            return "max" if Evaluator.check_metric(metric) in _MAX else "min"
        except UsageError:
            raise UsageError(
                f"We cannot infer the metric mode of {metric}; please specify the `metric_mode` "
                "parameter in AutoEstimator.fit()",
                code="argument-missing",
                argument="metric_mode",
                metric=metric,
            ) from None


def _check_shapes(name, y_true, y_pred):
    if not y_true.ndim or not len(y_true):
        raise UsageError(
            f"{name} needs at least one sample, but y_true has shape {y_true.shape}",
            code="data-empty",
            metric=name,
        )
    same = y_true.shape == y_pred.shape
    if name == "accuracy":
        same = same or (y_pred.shape[:1] == y_true.shape[:1] and _is_scores(y_true, y_pred))
    if not same:
        raise UsageError(
            f"y_true and y_pred must have equal shapes, got {y_true.shape} and {y_pred.shape}",
            code="data-shape",
        )


def _is_scores(y_true, y_pred) -> bool:
    """Return True if the predictions have the shape of class scores for the labels."""
    labels = y_true.shape[1:]
    return y_pred.shape[2:] == labels or (labels == (1,) and y_pred.ndim == 2)


def _named(name: str) -> Callable:
    def metric(
        y_true: ArrayLike, y_pred: ArrayLike, multioutput: str = "raw_values"
    ) -> float | np.ndarray:
        return Evaluator.evaluate(name, y_true, y_pred, multioutput)

    metric.__doc__ = f"""Compute ``Evaluator.evaluate("{name}", …)``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.automl.metrics import {name}
    >>> y = np.array([1.0, 2.0])
    >>> float({name}(y, y))  # of exact predictions
    {float(name.lower() in _MAX)}
    """
    return metric


ME, MAE, MSE, RMSE, MSLE, R2 = map(_named, ("ME", "MAE", "MSE", "RMSE", "MSLE", "R2"))
MPE, MAPE, MSPE = map(_named, ("MPE", "MAPE", "MSPE"))
sMAPE, MDAPE, sMDAPE = map(_named, ("sMAPE", "MDAPE", "sMDAPE"))
Accuracy = _named("Accuracy")
