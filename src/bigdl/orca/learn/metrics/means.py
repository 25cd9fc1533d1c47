"""Metrics that are the mean of one term per element or per row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.orca.learn.metrics.base import Metric
from bigdl.orca.learn.metrics.inputs import (
    class_scores,
    cpu_tensors,
    labels_below,
    row_weights,
    same_shape,
)
from bigdl.orca.learn.metrics.state import TensorMetric, TorchMetric

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.state import Reduction

__all__ = [
    "MAE",
    "MSE",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossEntropy",
    "CategoricalAccuracy",
    "CategoricalCrossEntropy",
    "KLDivergence",
    "Poisson",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossEntropy",
    "Top5Accuracy",
]

_EPSILON = 1e-7  # keeps logarithms finite


class MeanMetric(Metric):
    """Base of the metrics that are ``sum(terms) / number of terms``.

    With weights of the rows it is ``sum(weight * term) / sum(weight)`` over the terms.
    """

    def _torch_metric(self) -> TorchMetric:
        return _Mean(self)

    @abstractmethod
    def _terms(self, preds: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the terms of one batch, one per element or row; inputs are on the CPU."""


class _Mean(TensorMetric):
    reductions: Mapping[str, Reduction] = {"total": "sum", "count": "sum"}
    takes_weights = True

    def __init__(self, metric: MeanMetric):
        self._metric = metric
        super().__init__(metric.get_name())

    def _initial_state(self):
        import torch

        return {"total": torch.tensor(0.0, dtype=torch.float64), "count": torch.tensor(0)}

    def _batch_state(self, preds, targets, weights=None):
        import torch

        terms = self._metric._terms(*cpu_tensors(self.name, preds, targets))
        if weights is None:
            return {"total": terms.sum(dtype=torch.float64), "count": torch.tensor(terms.numel())}
        terms = terms.reshape(len(terms), -1)
        weights = row_weights(self.name, weights, len(terms))
        total = (weights[:, None] * terms).sum()
        return {"total": total, "count": weights.sum() * terms.shape[1]}

    def compute(self):
        state = self.state()
        return (state["total"] / state["count"]).float()


class Accuracy(MeanMetric):
    """Share of right predictions.

    Class scores ``(..., C)`` against labels ``(...)`` or ``(..., 1)``: the class with the highest
    score (the first one of equal scores) is compared.  Else shapes are equal, where ``(n, 1)``
    counts as ``(n,)``: floating-point predictions are taken as probabilities and become 1 from 0.5
    on, integer ones are compared as they are.

    Parameters
    ----------
    zero_based_label : bool, default True
        Whether the first class is labelled 0.  False: it is 1, and 1 is subtracted from targets
        before they meet the class found by score or probability.
    """

    def __init__(self, zero_based_label: bool = True):
        self.zero_based_label = zero_based_label

    def _terms(self, preds, targets):
        preds, targets, has_classes = class_scores(self.get_name(), preds, targets)
        if has_classes:
            preds = preds.argmax(-1)
        elif preds.is_floating_point():
            preds = (preds >= 0.5).long()
        else:
            return preds == targets
        return preds == (targets if self.zero_based_label else targets - 1)


class SparseCategoricalAccuracy(MeanMetric):
    """Share of rows whose class of highest score is the label.

    Scores are ``(..., C)``, labels ``(...)`` or ``(..., 1)``.
    """

    def _terms(self, preds, targets):
        scores, labels = _scores_and_labels(self.get_name(), preds, targets)
        return scores.argmax(-1) == labels


class CategoricalAccuracy(MeanMetric):
    """Share of rows whose class of highest score is that of the one-hot target.

    Both are of shape ``(..., C)``.
    """

    def _terms(self, preds, targets):
        preds, targets = _distributions(self.get_name(), preds, targets)
        return preds.argmax(-1) == targets.argmax(-1)


class BinaryAccuracy(MeanMetric):
    """Share of elements where ``preds > 0.5`` equals the 0/1 target.

    For predictions of shape ``(n,)`` or ``(n, 1)`` elements are rows.  For several outputs per
    row every output counts, so the figure stays between 0 and 1 (BigDL 2.x divided by the number
    of rows).
    """

    def _terms(self, preds, targets):
        preds, targets = same_shape(self.get_name(), preds, targets)
        return (preds > 0.5).long() == targets


class Top5Accuracy(MeanMetric):
    """Share of rows whose label is among the five classes of highest score.

    Scores are ``(..., C)``, labels ``(...)`` or ``(..., 1)``.  Of equal scores the class with the
    lower number goes first.
    """

    def _terms(self, preds, targets):
        import torch

        scores, labels = _scores_and_labels(self.get_name(), preds, targets)
        classes = scores.shape[-1]
        labels = labels_below(classes, self.get_name(), labels).unsqueeze(-1)
        own = scores.gather(-1, labels)
        ahead = (scores > own) | ((scores == own) & (torch.arange(classes) < labels))
        return (ahead.sum(-1) < 5) & ~own.squeeze(-1).isnan()


class MSE(MeanMetric):
    """Mean of ``(pred - target)**2`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.
    """

    def _terms(self, preds, targets):
        preds, targets = same_shape(self.get_name(), preds, targets)
        return (preds.double() - targets.double()).square()


class MAE(MeanMetric):
    """Mean of ``|pred - target|`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.
    """

    def _terms(self, preds, targets):
        preds, targets = same_shape(self.get_name(), preds, targets)
        return (preds.double() - targets.double()).abs()


class BinaryCrossEntropy(MeanMetric):
    """Mean of ``-t log(p) - (1 - t) log(1 - p)`` over all elements, in nats.

    Predictions are probabilities, clipped to ``[1e-7, 1 - 1e-7]``.  Shapes must be equal;
    ``(n, 1)`` counts as ``(n,)``.
    """

    def _terms(self, preds, targets):
        preds, targets = same_shape(self.get_name(), preds, targets)
        preds, targets = preds.double().clamp(_EPSILON, 1 - _EPSILON), targets.double()
        return -targets * preds.log() - (1 - targets) * (1 - preds).log()


class CategoricalCrossEntropy(MeanMetric):
    """Mean over rows of ``-sum(t log p)``, in nats.

    Both are of shape ``(..., C)``; predictions are probabilities, at least 1e-7 after clipping.
    """

    def _terms(self, preds, targets):
        preds, targets = _distributions(self.get_name(), preds, targets)
        return -(targets.double() * preds.double().clamp(min=_EPSILON).log()).sum(-1)


class SparseCategoricalCrossEntropy(MeanMetric):
    """Mean over rows of ``-log p[label]``, in nats.

    Predictions are probabilities ``(..., C)``, at least 1e-7 after clipping; labels are ``(...)``
    or ``(..., 1)``.
    """

    def _terms(self, preds, targets):
        probabilities, labels = _scores_and_labels(self.get_name(), preds, targets)
        labels = labels_below(probabilities.shape[-1], self.get_name(), labels)
        own = probabilities.gather(-1, labels.unsqueeze(-1))
        return -own.double().clamp(min=_EPSILON).log()


class KLDivergence(MeanMetric):
    """Mean over rows of ``sum(t log(t / p + 1e-7))``, in nats.

    Both are distributions of shape ``(..., C)``; predictions are at least 1e-7 after clipping.  A
    class with ``t = 0`` adds nothing.
    """

    def _terms(self, preds, targets):
        preds, targets = _distributions(self.get_name(), preds, targets)
        preds, targets = preds.double().clamp(min=_EPSILON), targets.double()
        return (targets * (targets / preds + _EPSILON).log()).sum(-1)


class Poisson(MeanMetric):
    """Mean of ``p - t log(p + 1e-7)`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.
    """

    def _terms(self, preds, targets):
        preds, targets = same_shape(self.get_name(), preds, targets)
        preds = preds.double()
        return preds - targets.double() * (preds + _EPSILON).log()


def _scores_and_labels(name, preds, targets):
    preds, targets, has_classes = class_scores(name, preds, targets)
    if not has_classes:
        raise UsageError(
            f"{name} expects preds of shape (..., classes) and labels of shape (...), "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}"
        )
    return preds, targets


def _distributions(name, preds, targets):
    if preds.ndim < 2 or preds.shape != targets.shape:
        raise UsageError(
            f"{name}: preds and targets are expected to have the same shape (..., classes), got "
            f"{tuple(preds.shape)} and {tuple(targets.shape)}; for integer labels use the Sparse "
            "variant of the metric"
        )
    return preds, targets
