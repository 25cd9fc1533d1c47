"""Metrics of PyTorch as BigDL 2.x names them: objects that are called with batches.

They are the states of :mod:`bigdl.orca.learn.metrics`, one for each metric, under their names.
"""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn import metrics
from bigdl.orca.learn.metrics.metric import MergedMetric, TensorState, TorchMetric

PytorchMetric = TorchMetric


class _Called(TensorState):
    """A state that is made without its metric."""

    _of: type[Any]  # the metric

    def __init__(self, *arguments: Any, **keywords: Any):
        metric = self._of(*arguments, **keywords)
        if not isinstance(metric, MergedMetric):
            raise UsageError(f"{metric.get_name()} is no metric of sums", code="metric-unsupported")
        super().__init__(metric)


def _called(name: str) -> type[_Called]:
    doc = f"The state of :class:`bigdl.orca.learn.metrics.{name}`, which is called with batches."
    namespace = {"_of": getattr(metrics, name), "__doc__": doc, "__module__": __name__}
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
