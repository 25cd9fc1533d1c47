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


class _Called(TensorState):
    """A TensorState that creates its metric from the constructor arguments."""

    _metric_class: type[Any]

    def __init__(self, *arguments: Any, **keywords: Any):
        metric = self._metric_class(*arguments, **keywords)
        if not isinstance(metric, MergedMetric):
            raise UsageError(
                f"{metric.get_name()} has no mergeable state", code="metric-unsupported"
            )
        super().__init__(metric)


def _called(name: str) -> type[_Called]:
    doc = f"State of :class:`bigdl.orca.learn.metrics.{name}`, updated by calling it with batches."
    namespace = {"_metric_class": getattr(metrics, name), "__doc__": doc, "__module__": __name__}
    return type(name, (_Called,), namespace)


Accuracy = _called("Accuracy")
SparseCategoricalAccuracy = _called("SparseCategoricalAccuracy")
CategoricalAccuracy = _called("CategoricalAccuracy")
BinaryAccuracy = _called("BinaryAccuracy")
Top5Accuracy = _called("Top5Accuracy")
MSE = _called("MSE")
MAE = _called("MAE")
BinaryCrossEntropy = _called("BinaryCrossEntropy")
CategoricalCrossEntropy = _called("CategoricalCrossEntropy")
SparseCategoricalCrossEntropy = _called("SparseCategoricalCrossEntropy")
KLDivergence = _called("KLDivergence")
Poisson = _called("Poisson")
