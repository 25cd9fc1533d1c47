"""PyTorch metric states under their BigDL 2.x names.

Each class is the state of the metric of the same name in :mod:`bigdl.orca.learn.metrics`. Objects
are called with batches.
"""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn import metrics
from bigdl.orca.learn.metrics.metric import MergedMetric, TensorState, TorchMetric

PytorchMetric = TorchMetric


class _StateOfMetric(TensorState):
    """A TensorState that creates its metric from the constructor arguments."""

    _metric_class: type[Any]

    def __init__(self, *arguments: Any, **keywords: Any):
        metric = self._metric_class(*arguments, **keywords)
        if not isinstance(metric, MergedMetric):
            raise UsageError(
                f"{metric.get_name()} has no mergeable state", code="metric-unsupported"
            )
        super().__init__(metric)


def _state_class(name: str) -> type[_StateOfMetric]:
    doc = f"State of :class:`bigdl.orca.learn.metrics.{name}`, updated by calling it with batches."
    namespace = {"_metric_class": getattr(metrics, name), "__doc__": doc, "__module__": __name__}
    return type(name, (_StateOfMetric,), namespace)


Accuracy = _state_class("Accuracy")
SparseCategoricalAccuracy = _state_class("SparseCategoricalAccuracy")
CategoricalAccuracy = _state_class("CategoricalAccuracy")
BinaryAccuracy = _state_class("BinaryAccuracy")
Top5Accuracy = _state_class("Top5Accuracy")
MSE = _state_class("MSE")
MAE = _state_class("MAE")
BinaryCrossEntropy = _state_class("BinaryCrossEntropy")
CategoricalCrossEntropy = _state_class("CategoricalCrossEntropy")
SparseCategoricalCrossEntropy = _state_class("SparseCategoricalCrossEntropy")
KLDivergence = _state_class("KLDivergence")
Poisson = _state_class("Poisson")
