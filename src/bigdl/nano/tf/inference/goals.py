"""What ``metric``, ``eval_func`` and ``accuracy_criterion`` ask of a Keras model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import AccuracyGoal
from bigdl.nano.tf.inference.batches import batches_of
from bigdl.nano.tf.inference.calls import CallInputs

__all__ = ["accuracy_goal", "score_of"]

_ROWS = 32
_TARGETS = ("target", "true", "label")


def accuracy_goal(
    metric: Any,
    eval_func: Callable | None,
    data: tuple[Any, Any],
    inputs: Callable[[], CallInputs],
    criterion: Mapping | None,
    max_trials: int | None = None,
    timeout: float | None = None,
) -> AccuracyGoal | None:
    """The goal of a quantization; None if neither `metric` nor `eval_func` is given.

    Parameters
    ----------
    metric, eval_func, criterion, max_trials, timeout
        As of ``InferenceOptimizer.quantize``.
    data : tuple
        ``x`` and ``y``.
    inputs : callable
        Tells the model's inputs.

    Raises
    ------
    UsageError
        If the criterion is not of a known form, or stands alone.
    """
    if eval_func is not None:
        score = _scored_by(eval_func)
    else:
        score = None if metric is None else score_of(metric, data, inputs)
    return AccuracyGoal.of(score, criterion, max_trials, timeout)


def _scored_by(eval_func: Callable) -> Callable[[Any], float]:
    return lambda model: _number(eval_func(model))


def score_of(metric: Any, data: Any, inputs: Callable[[], CallInputs]) -> Callable[[Any], float]:
    """A function from a model to its score on data.

    Parameters
    ----------
    metric : keras.metrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (one name contains
        "pred", another "target", "true" or "label"), is computed on the model's predictions; any
        other is called as ``metric(model, data)``, or as ``metric(model)`` without data.
    data : Dataset, tuple or None
        ``(x, y)`` or a dataset of such pairs.
    inputs : callable
        Tells the model's inputs.

    Raises
    ------
    UsageError
        If the metric is no callable, or has to have targets and the data have none.
    """
    if not isinstance(metric, keras.metrics.Metric) and not callable(metric):
        raise UsageError("metric should be a tf.keras.metrics.Metric or a Callable")
    roles = _roles(metric)
    if not isinstance(metric, keras.metrics.Metric) and roles is None:
        return lambda model: _number(metric(model) if data is None else metric(model, data))
    pair = data if isinstance(data, tuple) else (data, None)
    if pair[0] is None or (len(pair) > 1 and pair[1] is None and isinstance(data, tuple)):
        raise UsageError("A metric of predictions and targets needs data that hold targets")
    return lambda model: _score_predictions(metric, roles, model, pair, inputs())


def _roles(metric: Any) -> tuple[str, str] | None:
    """Names of the parameters for predictions and for targets."""
    try:
        names = list(inspect.signature(metric).parameters)
    except (TypeError, ValueError):
        return None
    predicted = [name for name in names if "pred" in name]
    target = [name for name in names if any(word in name for word in _TARGETS)]
    target = [name for name in target if name not in predicted]
    return (predicted[0], target[0]) if predicted and target else None


def _score_predictions(metric, roles, model, data, inputs: CallInputs) -> float:
    streaming = isinstance(metric, keras.metrics.Metric)
    if streaming:
        metric.reset_state()
    total, rows = 0.0, 0
    for batch in batches_of(data, inputs, _ROWS):
        if batch.targets is None:
            raise UsageError(
                "The metric compares predictions with targets, but the data hold no targets; "
                "give (x, y), or a dataset of such pairs"
            )
        predicted = model(*inputs.pack(batch.arrays))
        if streaming:
            metric.update_state(batch.targets, predicted)
        else:
            score = metric(**{roles[0]: predicted, roles[1]: batch.targets})
            total += float(np.mean(np.asarray(score))) * batch.rows
        rows += batch.rows
    if not rows:
        raise UsageError("The data for the metric hold no batch; give at least one")
    return _number(metric.result()) if streaming else total / rows


def _number(result: Any) -> float:
    try:
        return float(np.asarray(result))
    except (TypeError, ValueError):
        raise UsageError(f"The metric must return a number, but it returned {result!r}") from None
