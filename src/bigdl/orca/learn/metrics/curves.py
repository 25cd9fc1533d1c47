"""Metrics of a binary score at all its thresholds: ROC, its area, and precision-recall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bigdl.orca.learn.metrics.base import Metric
from bigdl.orca.learn.metrics.inputs import binary_scores, cpu_tensors, row_weights
from bigdl.orca.learn.metrics.state import TensorMetric, TorchMetric

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.state import Reduction

__all__ = ["AUC", "ROC", "PrecisionRecallCurve"]


class AUC(Metric):
    """Area under the ROC curve, exact.

    The probability that a random row of class 1 has a higher score than a random one of class 0,
    where equal scores count one half (as ``sklearn.metrics.roc_auc_score``).  Every score is kept:
    a worker needs 5 bytes per row for float32 scores.

    Scores are ``(n,)``, ``(n, 1)`` or ``(n, 2)`` (column 1 counts), probabilities or not; targets
    are 0 and 1.  The figure is nan if there is only one class, or a score is nan.

    Parameters
    ----------
    threshold_num : int, default 200
        Accepted for programs written for BigDL 2.x; the figure is exact, no thresholds are needed.
    """

    def __init__(self, threshold_num: int = 200):
        self.threshold_num = threshold_num

    def _torch_metric(self) -> TorchMetric:
        return _Area(self.get_name())


class ROC(Metric):
    """The ROC curve; its figure is the tuple ``(fpr, tpr, thresholds)`` of 1-D tensors.

    One point per distinct score, in descending order, after the point ``(0, 0)`` with the
    threshold inf: ``sklearn.metrics.roc_curve(..., drop_intermediate=False)``.  A rate whose class
    has no row is nan.  See :class:`AUC` for the inputs.
    """

    def _torch_metric(self) -> TorchMetric:
        return _ROC(self.get_name())


class PrecisionRecallCurve(Metric):
    """The precision-recall curve; its figure is ``(precision, recall, thresholds)``, 1-D tensors.

    One point per distinct score, in ascending order, then the point ``(1, 0)`` without threshold:
    ``sklearn.metrics.precision_recall_curve``.  Recall is nan if no row is of class 1.  See
    :class:`AUC` for the inputs.
    """

    def _torch_metric(self) -> TorchMetric:
        return _PrecisionRecall(self.get_name())


class _Scores(TensorMetric):
    """All scores and labels, in the order of the rows; without weights there are none of these."""

    reductions: Mapping[str, Reduction] = {"scores": "cat", "labels": "cat", "weights": "cat"}
    takes_weights = True

    def _initial_state(self):
        import torch

        return {
            "scores": torch.zeros(0, dtype=torch.float32),
            "labels": torch.zeros(0, dtype=torch.uint8),
            "weights": torch.zeros(0, dtype=torch.float64),
        }

    def _batch_state(self, preds, targets, weights=None):
        import torch

        scores, labels = binary_scores(self.name, *cpu_tensors(self.name, preds, targets))
        narrow = scores.dtype in (torch.float32, torch.float16, torch.bfloat16)
        scores = scores.to(torch.float32 if narrow else torch.float64, copy=True)
        state = {"scores": scores, "labels": labels.to(torch.uint8)}
        if weights is None:
            return {**state, "weights": torch.zeros(0, dtype=torch.float64)}
        state["weights"] = row_weights(self.name, weights, len(scores))
        counts = state["weights"] > 0  # the others would be thresholds of nobody
        return {key: tensor[counts] for key, tensor in state.items()}

    def _counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the distinct scores in ascending order and their rows of class 1 and 0."""
        state = self.state()
        thresholds, place = state["scores"].unique(return_inverse=True)
        weights, is_positive = state["weights"], state["labels"] == 1

        def count(chosen):
            of_chosen = weights[chosen] if len(weights) else None
            return place[chosen].bincount(of_chosen, len(thresholds))

        return thresholds, count(is_positive), count(~is_positive)


class _Area(_Scores):
    def compute(self):
        import torch

        thresholds, positives, negatives = self._counts()
        pairs = positives.sum() * negatives.sum()
        if not pairs or thresholds.isnan().any():
            return torch.tensor(float("nan"))
        below = negatives.cumsum(0) - negatives
        twice_won = (positives * (2 * below + negatives)).sum()  # integers: exact
        return (twice_won.double() / (2 * pairs).double()).float()


class _ROC(_Scores):
    def compute(self):
        import torch

        thresholds, positives, negatives = (counts.flip(0) for counts in self._counts())
        start = torch.zeros(1, dtype=torch.int64)
        true, false = (torch.cat([start, c]).cumsum(0).double() for c in (positives, negatives))
        first = torch.full((1,), float("inf"), dtype=thresholds.dtype)
        return (
            (false / false[-1]).float(),
            (true / true[-1]).float(),
            torch.cat([first, thresholds]),
        )


class _PrecisionRecall(_Scores):
    def compute(self):
        import torch

        thresholds, positives, negatives = self._counts()
        above = positives.flip(0).cumsum(0).flip(0).double()
        chosen = (positives + negatives).flip(0).cumsum(0).flip(0).double()
        end = torch.ones(1, dtype=torch.float64)
        return (
            torch.cat([above / chosen, end]).float(),
            torch.cat([above / positives.sum(), end - 1]).float(),
            thresholds,
        )
