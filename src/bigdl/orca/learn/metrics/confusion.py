"""Precision, recall and F1, from counts per class."""

from __future__ import annotations

import numbers
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
    several_labels,
)
from bigdl.orca.learn.metrics.state import TensorMetric, TorchMetric

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.state import Reduction

__all__ = ["F1Score", "Precision", "Recall"]

_AVERAGES = ("micro", "macro", "weighted")


class ConfusionMetric(Metric):
    """Base of the metrics that follow from hits, predictions and truths per class."""

    def __init__(
        self, num_classes: int | None = None, average: str = "micro", threshold: float = 0.5
    ):
        name = type(self).__name__
        if average not in _AVERAGES:
            raise UsageError(f"{name}: average is expected to be in {_AVERAGES}, got {average!r}")
        if num_classes is not None and (
            isinstance(num_classes, bool)
            or not isinstance(num_classes, numbers.Integral)
            or num_classes < 1
        ):
            raise UsageError(f"{name}: num_classes must be a positive int, got {num_classes!r}")
        self.num_classes = num_classes
        self.average = average
        self.threshold = threshold

    def _torch_metric(self) -> TorchMetric:
        return _Confusion(self)

    @staticmethod
    @abstractmethod
    def _ratio(hits: torch.Tensor, predicted: torch.Tensor, actual: torch.Tensor):
        """Return numerator and denominator of the figure, element by element."""


class Precision(ConfusionMetric):
    """Share of the predictions of a class that are right.

    Predictions with ``C >= 2`` columns are class scores, and the class with the highest score
    counts.  One column, ``(n,)`` or ``(n, 1)``, of floating-point numbers holds probabilities of
    class 1, which is chosen from `threshold` on; no sigmoid is guessed, so for logits give the
    threshold in logits (0.0).  Integer predictions are labels.

    With two classes the figure is that of class 1, the positive one, unless `average` asks for
    both.  A class that was never predicted (for precision) or never true (for recall) has the
    figure 0.

    Parameters
    ----------
    num_classes : int, optional
        Number of classes; known from the columns of the predictions if these are class scores,
        else 2.
    average : {"micro", "macro", "weighted"}, default "micro"
        "micro": of the two classes the positive one; of more classes the counts of all are summed
        first.  "macro": mean of the classes that occur in predictions or targets.  "weighted": the
        same, weighted by the number of true rows.
    threshold : float, default 0.5
        Where class 1 begins if predictions have one column.

    Raises
    ------
    UsageError
        If a parameter is not one of these.
    """

    @staticmethod
    def _ratio(hits, predicted, actual):
        return hits, predicted


class Recall(ConfusionMetric):
    """Share of the rows of a class that were found; everything else as in :class:`Precision`."""

    @staticmethod
    def _ratio(hits, predicted, actual):
        return hits, actual


class F1Score(ConfusionMetric):
    """Harmonic mean of precision and recall; everything else as in :class:`Precision`."""

    @staticmethod
    def _ratio(hits, predicted, actual):
        return 2 * hits, predicted + actual


class _Confusion(TensorMetric):
    """Hits, predictions and truths of each class; empty tensors until the first batch.

    They are counts, or sums of the rows' weights.
    """

    reductions: Mapping[str, Reduction] = {"hits": "sum", "predicted": "sum", "actual": "sum"}
    takes_weights = True

    def __init__(self, metric: ConfusionMetric):
        self._metric = metric
        super().__init__(metric.get_name())

    def _initial_state(self):
        import torch

        return {key: torch.zeros(0, dtype=torch.int64) for key in self.reductions}

    def _batch_state(self, preds, targets, weights=None):
        preds, targets = cpu_tensors(self.name, preds, targets)
        predicted, actual, classes = self._labels(preds, targets)
        hit, of_hits = predicted == actual, None
        if weights is not None:
            weights = row_weights(self.name, weights, len(targets))
            weights = weights.repeat_interleave(len(actual) // len(targets))
            of_hits = weights[hit]
        return {
            "hits": actual[hit].bincount(of_hits, classes),
            "predicted": predicted.bincount(weights, classes),
            "actual": actual.bincount(weights, classes),
        }

    def _labels(self, preds, targets) -> tuple[torch.Tensor, torch.Tensor, int]:
        preds, targets, has_classes = class_scores(self.name, preds, targets)
        expected = self._metric.num_classes
        classes = max(expected or 2, 2)
        if has_classes:
            if expected is not None and preds.shape[-1] != classes:
                raise UsageError(
                    f"{self.name}: num_classes={expected}, but preds have {preds.shape[-1]} columns"
                )
            classes = preds.shape[-1]
            preds = preds.argmax(-1)
        elif preds.ndim > 1 and preds.is_floating_point():
            raise several_labels(self.name, targets)
        elif preds.is_floating_point():
            if classes > 2:
                raise UsageError(
                    f"{self.name}: num_classes={classes} needs preds with {classes} columns or "
                    f"integer labels, got floating-point preds of shape {tuple(preds.shape)}"
                )
            preds = preds >= self._metric.threshold
        predicted = labels_below(classes, self.name, preds.flatten(), "preds")
        return predicted, labels_below(classes, self.name, targets.flatten()), classes

    def compute(self):
        import torch

        state = {key: tensor.double() for key, tensor in self.state().items()}
        if not state["actual"].sum():
            return torch.tensor(float("nan"))
        average = self._metric.average
        if average == "micro":
            pick = slice(1, 2) if len(state["hits"]) == 2 else slice(None)
            state = {key: tensor[pick].sum() for key, tensor in state.items()}
        numerator, denominator = self._metric._ratio(**state)
        figure = torch.where(denominator > 0, numerator / denominator, 0.0)  # 0 / 0 is 0
        if average == "macro":
            figure = figure[state["predicted"] + state["actual"] > 0].mean()
        elif average == "weighted":
            figure = (figure * state["actual"]).sum() / state["actual"].sum()
        return figure.float()
