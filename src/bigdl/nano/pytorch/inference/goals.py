"""What ``metric``, ``eval_func`` and ``accuracy_criterion`` ask of a quantized model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import AccuracyGoal
from bigdl.nano.pytorch.inference.batches import batches_of, rows_of
from bigdl.nano.pytorch.inference.context import active_settings, context_of

__all__ = ["accuracy_goal", "score_of"]


def accuracy_goal(
    metric: Any,
    eval_func: Callable | None,
    data: Any,
    criterion: Mapping | None,
    max_trials: int | None = None,
    timeout: float | None = None,
) -> AccuracyGoal | None:
    """The goal of a quantization; None if neither `metric` nor `eval_func` is given.

    Raises
    ------
    UsageError
        If the criterion is not of a known form, or stands alone.
    """
    if eval_func is not None:
        score = _scored_by(eval_func)
    else:
        score = None if metric is None else score_of(metric, data)
    return AccuracyGoal.of(score, criterion, max_trials, timeout)


def _scored_by(eval_func: Callable) -> Callable[[torch.nn.Module], float]:
    return lambda model: _in_context(model, lambda: _call_with_data(eval_func, model, None))


def score_of(metric: Any, data: Any) -> Callable[[torch.nn.Module], float]:
    """A function from a model to its score on data.

    Parameters
    ----------
    metric : torchmetrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (names that contain
        "pred" and "target"), is computed on the model's predictions; any other is called as
        ``metric(model, data)``, or as ``metric(model)`` without data.
    data : DataLoader, tuple or None
        Batches with targets.

    Raises
    ------
    UsageError
        If the metric is no callable, or has to have targets and the data have none.
    """
    if not callable(metric):
        raise UsageError(f"metric must be a torchmetrics.Metric or a callable, not {metric!r}")
    if _takes_predictions(metric):
        if data is None:
            raise UsageError("A metric of predictions and targets needs data that hold targets")
        return lambda model: _score_predictions(metric, model, data)
    return lambda model: _in_context(model, lambda: _call_with_data(metric, model, data))


def _call_with_data(metric, model, data) -> float:
    result = metric(model) if data is None else metric(model, data)
    try:
        return float(result)
    except (TypeError, ValueError):
        raise UsageError(f"The metric must return a number, but it returned {result!r}") from None


def _takes_predictions(metric) -> bool:
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        return True
    try:
        names = " ".join(inspect.signature(metric).parameters)
    except (TypeError, ValueError):
        return False
    return "pred" in names and "target" in names


def _score_predictions(metric, model, data) -> float:
    reference = getattr(model, "nano_source", None)
    described = reference if isinstance(reference, torch.nn.Module) else model

    def run() -> float:
        streaming = hasattr(metric, "update") and hasattr(metric, "compute")
        if streaming:
            metric.reset()
        total, rows = 0.0, 0
        for batch in batches_of(described, data):
            if not batch.targets:
                raise UsageError(
                    "The metric compares predictions with targets, but the data hold no targets; "
                    "give batches of the form (input, target)"
                )
            predicted = model(*batch.args, **batch.kwargs)
            target = batch.targets[0] if len(batch.targets) == 1 else batch.targets
            if isinstance(predicted, torch.Tensor) and predicted.dtype is torch.bfloat16:
                predicted = predicted.float()
            if streaming:
                metric.update(predicted, target)
            else:
                count = rows_of(batch)
                total += float(metric(predicted, target)) * count
            rows += rows_of(batch)
        if not rows:
            raise UsageError("The data for the metric hold no batch; give at least one")
        return float(metric.compute()) if streaming else total / rows

    return _in_context(model, run)


def _in_context(model, run):
    from bigdl.nano.pytorch.inference.source import evaluating

    with evaluating(model):
        if active_settings() is not None:
            return run()
        with context_of(model):
            return run()
