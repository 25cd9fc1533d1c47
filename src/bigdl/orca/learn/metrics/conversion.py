"""From whatever a user passes as ``metrics=`` to states with unique names."""

from __future__ import annotations

import copy
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics import confusion, curves, means
from bigdl.orca.learn.metrics.adapters import CustomizedMetric, TorchmetricsMetric, is_torchmetrics
from bigdl.orca.learn.metrics.base import Metric
from bigdl.orca.learn.metrics.state import TorchMetric

__all__ = ["convert_metrics"]

_CLASSES = {
    name.lower(): getattr(module, name)
    for module in (means, confusion, curves)
    for name in module.__all__
}
_ALIASES = {
    "acc": "accuracy",
    "auroc": "auc",
    "f1": "f1score",
    "meanabsoluteerror": "mae",
    "meansquarederror": "mse",
}
_CONTRACT = ("__call__", "compute", "reset", "state", "load_state", "merge", "reductions")


def convert_metrics(metrics: Any, backend: str | None) -> list[TorchMetric]:
    """Do the work of :meth:`Metric.convert_metrics_list`."""
    if metrics is None:
        metrics = []
    elif not isinstance(metrics, list | tuple):
        metrics = [metrics]
    states = [_to_state(metric, backend) for metric in metrics]
    taken: set[str] = set()
    for state in states:
        state.name = _unused(state.name, taken)
        taken.add(state.name.lower())
    return states


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.lower() in taken:  # fit reports val_<name in lower case>
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _to_state(given: Any, backend: str | None) -> TorchMetric:
    if _follows_contract(given):
        state = copy.deepcopy(given)
        state.reset()
        state.name = getattr(given, "name", type(given).__name__)
        return state
    return _to_metric(given).get_metric(backend)


def _follows_contract(given: Any) -> bool:
    if isinstance(given, type) or is_torchmetrics(given):
        return False
    return all(hasattr(given, attribute) for attribute in _CONTRACT)


def _to_metric(given: Any) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        return _by_name(given)
    if isinstance(given, type):
        raise UsageError(f"{given.__name__} is a class; as a metric pass an instance of it")
    if is_torchmetrics(given):
        return TorchmetricsMetric(given)
    if callable(given) and not hasattr(given, "compute"):
        return CustomizedMetric(given)
    if callable(given):
        raise UsageError(
            f"{type(given).__name__} has a compute() but no state that can be merged across "
            "workers; pass an Orca Metric, a torchmetrics.Metric or a function fn(preds, targets), "
            "or give it the methods of bigdl.orca.learn.metrics.TorchMetric"
        )
    raise UsageError(
        f"a metric is expected to be an Orca Metric, the name of one, a torchmetrics.Metric or a "
        f"function fn(preds, targets), got {given!r} ({type(given).__name__})"
    )


def _by_name(name: str) -> Metric:
    key = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    key = _ALIASES.get(key, key)
    if key not in _CLASSES:
        known = ", ".join(sorted(cls.__name__ for cls in _CLASSES.values()))
        raise UsageError(f"there is no metric of the name {name!r}; known names are: {known}")
    return _CLASSES[key]()
