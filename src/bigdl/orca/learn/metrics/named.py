"""The metrics by name: means of terms, figures from counts per class, and curves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.learn.metrics.metric import MergedMetric, register_metric

if TYPE_CHECKING:
    import torch

    from bigdl.orca.learn.metrics.metric import Reduction, State
else:
    torch = LazyModule("torch", "orca")

__all__ = [
    "AUC",
    "MAE",
    "MSE",
    "ROC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossEntropy",
    "CategoricalAccuracy",
    "CategoricalCrossEntropy",
    "F1Score",
    "KLDivergence",
    "Poisson",
    "Precision",
    "PrecisionRecallCurve",
    "Recall",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossEntropy",
    "Top5Accuracy",
]


_EPSILON = 1e-7  # keeps logarithms finite


class MeanMetric(MergedMetric):
    """Base of the metrics that are ``sum(terms) / number of terms``.

    With weights of the rows it is ``sum(weight * term) / sum(weight)`` over the terms.
    """

    @abstractmethod
    def _terms(self, preds: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the terms of one batch, one per element or row."""

    def _prepared(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple:
        """Return what :meth:`_terms` takes: by default float64 of equal shapes."""
        preds, targets = same_shape(self.get_name(), preds, targets)
        return preds.double(), targets.double()

    def _batch_state(self, preds, targets, weights=None):
        terms = self._terms(*self._prepared(*cpu_tensors(self.get_name(), preds, targets)))
        if weights is None:
            return {"total": terms.sum(dtype=torch.float64), "count": torch.tensor(terms.numel())}
        terms = terms.reshape(len(terms), -1)
        weights = row_weights(self.get_name(), weights, len(terms))
        total = (weights[:, None] * terms).sum()
        return {"total": total, "count": weights.sum() * terms.shape[1]}


class LabelMetric(MeanMetric):
    """Base of the metrics of class scores against labels."""

    def _prepared(self, preds, targets):
        preds, targets, has_classes = class_scores(self.get_name(), preds, targets)
        if not has_classes:
            raise UsageError(
                f"{self.get_name()} expects preds of shape (..., classes) and labels of shape "
                f"(...), got {tuple(preds.shape)} and {tuple(targets.shape)}",
                code="data-shape",
            )
        return preds, targets


class DistributionMetric(MeanMetric):
    """Base of the metrics of class scores against a number for each class."""

    def _prepared(self, preds, targets):
        if preds.ndim < 2 or preds.shape != targets.shape:
            raise UsageError(
                f"{self.get_name()}: preds and targets are expected to have the same shape (..., "
                f"classes), got {tuple(preds.shape)} and {tuple(targets.shape)}; for integer "
                "labels use the Sparse variant of the metric",
                code="data-shape",
            )
        return preds, targets


class Accuracy(MeanMetric):
    """Share of right predictions.

    Class scores ``(..., C)`` against labels ``(...)`` or ``(..., 1)``: the class with the highest
    score (the first one of equal scores) is compared.  Else shapes are equal, where ``(n, 1)``
    counts as ``(n,)``: floating-point predictions are taken as probabilities and become 1 from 0.5
    on, integer ones are compared as they are.  In an Estimator whose loss is
    ``nn.BCEWithLogitsLoss`` the sigmoid of the model's output is taken.

    Parameters
    ----------
    zero_based_label : bool, default True
        Whether the first class is labelled 0.  False: it is 1, and 1 is subtracted from targets
        before they meet the class found by score or probability.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Accuracy
    >>> accuracy = Accuracy().get_metric()
    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 0, 0]))
    >>> accuracy.compute()  # the classes of highest score are 1, 0 and 1
    tensor(0.6667)
    """

    takes = "probability"

    def __init__(self, zero_based_label: bool = True):
        self.zero_based_label = zero_based_label

    def _prepared(self, preds, targets):
        return preds, targets

    def _terms(self, preds, targets):
        preds, targets, has_classes = class_scores(self.get_name(), preds, targets)
        if has_classes:
            preds = preds.argmax(-1)
        elif preds.is_floating_point():
            preds = (preds >= 0.5).long()
        else:
            return preds == targets
        return preds == (targets if self.zero_based_label else targets - 1)


class SparseCategoricalAccuracy(LabelMetric):
    """Share of rows whose class of highest score is the label.

    Scores are ``(..., C)``, labels ``(...)`` or ``(..., 1)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import SparseCategoricalAccuracy
    >>> accuracy = SparseCategoricalAccuracy().get_metric()
    >>> accuracy(torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]), torch.tensor([1, 2]))
    >>> accuracy.compute()
    tensor(0.5000)
    """

    def _terms(self, preds, targets):
        return preds.argmax(-1) == targets


class CategoricalAccuracy(DistributionMetric):
    """Share of rows whose class of highest score is that of the one-hot target.

    Both are of shape ``(..., C)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import CategoricalAccuracy
    >>> accuracy = CategoricalAccuracy().get_metric()
    >>> scores = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    >>> accuracy(scores, torch.tensor([[0, 1, 0], [0, 0, 1]]))
    >>> accuracy.compute()
    tensor(0.5000)
    """

    def _terms(self, preds, targets):
        return preds.argmax(-1) == targets.argmax(-1)


class BinaryAccuracy(MeanMetric):
    """Share of elements where ``preds > 0.5`` equals the 0/1 target.

    For predictions of shape ``(n,)`` or ``(n, 1)`` elements are rows.  For several outputs per
    row every output counts, so the figure stays between 0 and 1 (BigDL 2.x divided by the number
    of rows).

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import BinaryAccuracy
    >>> accuracy = BinaryAccuracy().get_metric()
    >>> accuracy(torch.tensor([0.9, 0.4, 0.6, 0.2]), torch.tensor([1, 0, 0, 0]))
    >>> accuracy.compute()
    tensor(0.7500)
    """

    takes = "probability"

    def _terms(self, preds, targets):
        return (preds > 0.5).long() == targets


class Top5Accuracy(LabelMetric):
    """Share of rows whose label is among the five classes of highest score.

    Scores are ``(..., C)``, labels ``(...)`` or ``(..., 1)``.  Of equal scores the class with the
    lower number goes first.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Top5Accuracy
    >>> accuracy = Top5Accuracy().get_metric()
    >>> accuracy(torch.tensor([[7, 6, 5, 4, 3, 2], [7, 6, 5, 4, 3, 2]]), torch.tensor([4, 5]))
    >>> accuracy.compute()  # class 5 comes sixth
    tensor(0.5000)
    """

    def _terms(self, preds, targets):
        classes = preds.shape[-1]
        labels = labels_below(classes, self.get_name(), targets).unsqueeze(-1)
        own = preds.gather(-1, labels)
        ahead = (preds > own) | ((preds == own) & (torch.arange(classes) < labels))
        return (ahead.sum(-1) < 5) & ~own.squeeze(-1).isnan()


class MSE(MeanMetric):
    """Mean of ``(pred - target)**2`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MSE
    >>> mse = MSE().get_metric()
    >>> mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    >>> mse.compute()
    tensor(2.)
    """

    def _terms(self, preds, targets):
        return (preds - targets).square()


class MAE(MeanMetric):
    """Mean of ``|pred - target|`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MAE
    >>> mae = MAE().get_metric()
    >>> mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    >>> mae.compute()
    tensor(1.)
    """

    def _terms(self, preds, targets):
        return (preds - targets).abs()


class BinaryCrossEntropy(MeanMetric):
    """Mean of ``-t log(p) - (1 - t) log(1 - p)`` over all elements, in nats.

    Predictions are probabilities, clipped to ``[1e-7, 1 - 1e-7]``.  Shapes must be equal;
    ``(n, 1)`` counts as ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import BinaryCrossEntropy
    >>> entropy = BinaryCrossEntropy().get_metric()
    >>> entropy(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
    >>> entropy.compute()  # log 2
    tensor(0.6931)
    """

    takes = "probability"

    def _terms(self, preds, targets):
        preds = preds.clamp(_EPSILON, 1 - _EPSILON)
        return -targets * preds.log() - (1 - targets) * (1 - preds).log()


class CategoricalCrossEntropy(DistributionMetric):
    """Mean over rows of ``-sum(t log p)``, in nats.

    Both are of shape ``(..., C)``; predictions are probabilities, at least 1e-7 after clipping.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import CategoricalCrossEntropy
    >>> entropy = CategoricalCrossEntropy().get_metric()
    >>> entropy(torch.tensor([[0.25, 0.5, 0.25]]), torch.tensor([[0.0, 1.0, 0.0]]))
    >>> entropy.compute()  # -log 0.5
    tensor(0.6931)
    """

    takes = "distribution"

    def _terms(self, preds, targets):
        return -(targets.double() * preds.double().clamp(min=_EPSILON).log()).sum(-1)


class SparseCategoricalCrossEntropy(LabelMetric):
    """Mean over rows of ``-log p[label]``, in nats.

    Predictions are probabilities ``(..., C)``, at least 1e-7 after clipping; labels are ``(...)``
    or ``(..., 1)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import SparseCategoricalCrossEntropy
    >>> entropy = SparseCategoricalCrossEntropy().get_metric()
    >>> entropy(torch.tensor([[0.25, 0.5, 0.25]]), torch.tensor([1]))
    >>> entropy.compute()  # -log 0.5
    tensor(0.6931)
    """

    takes = "distribution"

    def _terms(self, preds, targets):
        labels = labels_below(preds.shape[-1], self.get_name(), targets)
        own = preds.gather(-1, labels.unsqueeze(-1))
        return -own.double().clamp(min=_EPSILON).log()


class KLDivergence(DistributionMetric):
    """Mean over rows of ``sum(t log(t / p + 1e-7))``, in nats.

    Both are distributions of shape ``(..., C)``; predictions are at least 1e-7 after clipping.  A
    class with ``t = 0`` adds nothing.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import KLDivergence
    >>> divergence = KLDivergence().get_metric()
    >>> divergence(torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]]))
    >>> divergence.compute()
    tensor(0.1438)
    """

    takes = "distribution"

    def _terms(self, preds, targets):
        preds, targets = preds.double().clamp(min=_EPSILON), targets.double()
        return (targets * (targets / preds + _EPSILON).log()).sum(-1)


class Poisson(MeanMetric):
    """Mean of ``p - t log(p + 1e-7)`` over all elements.

    Shapes must be equal; ``(n, 1)`` counts as ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Poisson
    >>> poisson = Poisson().get_metric()
    >>> poisson(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> poisson.compute()
    tensor(1.5000)
    """

    def _terms(self, preds, targets):
        return preds - targets * (preds + _EPSILON).log()


class ConfusionMetric(MergedMetric):
    """Base of the metrics that follow from hits, predictions and truths per class."""

    reductions: Mapping[str, Reduction] = {"hits": "sum", "predicted": "sum", "actual": "sum"}
    _among: tuple[str, ...]  # the figure is the share of the hits among these, on average

    def __init__(
        self, num_classes: int | None = None, average: str = "micro", threshold: float = 0.5
    ):
        name = type(self).__name__
        check_choice(f"{name}: average", average, ("micro", "macro", "weighted"))
        if num_classes is not None:
            check_positive(f"{name}: num_classes", num_classes)
        self.num_classes = num_classes
        self.average = average
        self.threshold = threshold
        if 0 < threshold < 1:  # else it is one of logits
            self.takes = "probability"

    def _batch_state(self, preds, targets, weights=None):
        preds, targets = cpu_tensors(self.get_name(), preds, targets)
        predicted, actual, classes = self._labels(preds, targets)
        hit, of_hits = predicted == actual, None
        if weights is not None:
            weights = row_weights(self.get_name(), weights, len(targets))
            weights = weights.repeat_interleave(len(actual) // len(targets))
            of_hits = weights[hit]
        return {
            "hits": actual[hit].bincount(of_hits, classes),
            "predicted": predicted.bincount(weights, classes),
            "actual": actual.bincount(weights, classes),
        }

    def _labels(self, preds, targets) -> tuple[torch.Tensor, torch.Tensor, int]:
        name = self.get_name()
        preds, targets, has_classes = class_scores(name, preds, targets)
        expected = self.num_classes
        classes = max(expected or 2, 2)
        if has_classes:
            if expected is not None and preds.shape[-1] != classes:
                raise UsageError(
                    f"{name}: num_classes={expected}, but preds have {preds.shape[-1]} columns",
                    code="data-shape",
                    metric=name,
                )
            classes = preds.shape[-1]
            preds = preds.argmax(-1)
        elif preds.ndim > 1 and preds.is_floating_point():
            raise several_labels(name, targets)
        elif preds.is_floating_point():
            if classes > 2:
                raise UsageError(
                    f"{name}: num_classes={classes} needs preds with {classes} columns or "
                    f"integer labels, got floating-point preds of shape {tuple(preds.shape)}",
                    code="data-shape",
                    metric=name,
                )
            preds = preds >= self.threshold
        predicted = labels_below(classes, name, preds.flatten(), "preds")
        return predicted, labels_below(classes, name, targets.flatten()), classes

    def _figure(self, state):
        state = {key: tensor.double() for key, tensor in state.items()}
        if not state["actual"].sum():
            return torch.tensor(float("nan"))
        average = self.average
        if average == "micro":
            pick = slice(1, 2) if len(state["hits"]) == 2 else slice(None)
            state = {key: tensor[pick].sum() for key, tensor in state.items()}
        mean = sum(state[name] for name in self._among) / len(self._among)
        figure = torch.where(mean > 0, state["hits"] / mean, 0.0)  # 0 / 0 is 0
        if average == "macro":
            figure = figure[state["predicted"] + state["actual"] > 0].mean()
        elif average == "weighted":
            figure = (figure * state["actual"]).sum() / state["actual"].sum()
        return figure.float()


class Precision(ConfusionMetric):
    """Share of the predictions of a class that are right.

    Predictions with ``C >= 2`` columns are class scores, and the class with the highest score
    counts.  One column, ``(n,)`` or ``(n, 1)``, of floating-point numbers holds probabilities of
    class 1, which is chosen from `threshold` on.  In an Estimator whose loss is
    ``nn.BCEWithLogitsLoss`` their sigmoid is taken where `threshold` is between 0 and 1; else the
    threshold is one of logits (0.0).  Integer predictions are labels.

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

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Precision
    >>> precision = Precision(threshold=0.4).get_metric()
    >>> precision(torch.tensor([0.9, 0.5, 0.1, 0.2]), torch.tensor([1, 0, 1, 0]))
    >>> precision.compute()  # of two rows that are taken for class 1, one is
    tensor(0.5000)
    """

    _among = ("predicted",)


class Recall(ConfusionMetric):
    """Share of the rows of a class that were found; everything else as in :class:`Precision`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Recall
    >>> recall = Recall().get_metric()
    >>> recall(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 1, 1, 1]))
    >>> recall.compute()  # two of four rows of class 1 are found
    tensor(0.5000)
    """

    _among = ("actual",)


class F1Score(ConfusionMetric):
    """Harmonic mean of precision and recall; everything else as in :class:`Precision`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import F1Score
    >>> f1 = F1Score().get_metric()
    >>> f1(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 1, 1, 1]))
    >>> f1.compute()  # precision is 1, recall one half
    tensor(0.6667)
    """

    _among = ("predicted", "actual")


class CurveMetric(MergedMetric):
    """All scores and labels, in the order of the rows; without weights there are none of these."""

    takes = "score"

    reductions: Mapping[str, Reduction] = {"scores": "cat", "labels": "cat", "weights": "cat"}

    def _batch_state(self, preds, targets, weights=None):
        name = self.get_name()
        scores, labels = binary_scores(name, *cpu_tensors(name, preds, targets))
        narrow = scores.dtype in (torch.float32, torch.float16, torch.bfloat16)
        scores = scores.to(torch.float32 if narrow else torch.float64, copy=True)
        state = {"scores": scores, "labels": labels.to(torch.uint8)}
        if weights is None:
            return {**state, "weights": torch.zeros(0, dtype=torch.float64)}
        state["weights"] = row_weights(name, weights, len(scores))
        counts = state["weights"] > 0  # the others would be thresholds of nobody
        return {key: tensor[counts] for key, tensor in state.items()}

    @staticmethod
    def _counts(state: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the distinct scores in ascending order and their rows of class 1 and 0."""
        thresholds, place = state["scores"].unique(return_inverse=True)
        weights, is_positive = state["weights"], state["labels"] == 1

        def count(chosen):
            of_chosen = weights[chosen] if len(weights) else None
            return place[chosen].bincount(of_chosen, len(thresholds))

        return thresholds, count(is_positive), count(~is_positive)


class AUC(CurveMetric):
    """Area under the ROC curve, exact.

    The probability that a random row of class 1 has a higher score than a random one of class 0,
    where equal scores count one half (as ``sklearn.metrics.roc_auc_score``).  Every score is kept:
    a worker needs 5 bytes per row for float32 scores.

    Scores are ``(n,)``, ``(n, 1)`` or ``(n, 2)`` (column 1 counts), probabilities or not; targets
    are 0 and 1.  An Estimator whose loss is ``nn.CrossEntropyLoss`` takes the difference of two
    columns, which are logits.  The figure is nan if there is only one class, or a score is nan.

    Parameters
    ----------
    threshold_num : int, default 200
        Accepted for programs written for BigDL 2.x; the figure is exact, no thresholds are needed.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import AUC
    >>> auc = AUC().get_metric()
    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> auc.compute()  # three of the four pairs of both classes are in order
    tensor(0.7500)
    """

    def __init__(self, threshold_num: int = 200):
        self.threshold_num = threshold_num

    def _figure(self, state):
        thresholds, positives, negatives = self._counts(state)
        pairs = positives.sum() * negatives.sum()
        if not pairs or thresholds.isnan().any():
            return torch.tensor(float("nan"))
        below = negatives.cumsum(0) - negatives
        twice_won = (positives * (2 * below + negatives)).sum()  # integers: exact
        return (twice_won.double() / (2 * pairs).double()).float()


class ROC(CurveMetric):
    """The ROC curve; its figure is the tuple ``(fpr, tpr, thresholds)`` of 1-D tensors.

    One point per distinct score, in descending order, after the point ``(0, 0)`` with the
    threshold inf: ``sklearn.metrics.roc_curve(..., drop_intermediate=False)``.  A rate whose class
    has no row is nan.  See :class:`AUC` for the inputs.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import ROC
    >>> roc = ROC().get_metric()
    >>> roc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> false_positives, true_positives, thresholds = roc.compute()
    >>> true_positives.tolist()
    [0.0, 0.5, 0.5, 1.0, 1.0]
    """

    def _figure(self, state):
        thresholds, positives, negatives = (counts.flip(0) for counts in self._counts(state))
        start = torch.zeros(1, dtype=torch.int64)
        true, false = (torch.cat([start, c]).cumsum(0).double() for c in (positives, negatives))
        first = torch.full((1,), float("inf"), dtype=thresholds.dtype)
        return (
            (false / false[-1]).float(),
            (true / true[-1]).float(),
            torch.cat([first, thresholds]),
        )


class PrecisionRecallCurve(CurveMetric):
    """The precision-recall curve; its figure is ``(precision, recall, thresholds)``, 1-D tensors.

    One point per distinct score, in ascending order, then the point ``(1, 0)`` without threshold:
    ``sklearn.metrics.precision_recall_curve``.  Recall is nan if no row is of class 1.  See
    :class:`AUC` for the inputs.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import PrecisionRecallCurve
    >>> curve = PrecisionRecallCurve().get_metric()
    >>> curve(torch.tensor([0.1, 0.4, 0.8]), torch.tensor([0, 1, 1]))
    >>> precision, recall, thresholds = curve.compute()
    >>> recall.tolist()
    [1.0, 1.0, 0.5, 0.0]
    """

    def _figure(self, state):
        thresholds, positives, negatives = self._counts(state)
        above = positives.flip(0).cumsum(0).flip(0).double()
        chosen = (positives + negatives).flip(0).cumsum(0).flip(0).double()
        end = torch.ones(1, dtype=torch.float64)
        return (
            torch.cat([above / chosen, end]).float(),
            torch.cat([above / positives.sum(), end - 1]).float(),
            thresholds,
        )


# -- what the metrics read of a batch ------------------------------------------------------------


def cpu_tensors(name: str, preds: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as detached CPU tensors with at least one dimension."""
    return _cpu_tensor(name, "preds", preds), _cpu_tensor(name, "targets", targets)


def _cpu_tensor(name: str, role: str, value: Any) -> torch.Tensor:
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{name}: {role} are expected to be one tensor, got {type(value).__name__}; for a "
            "model with several inputs or outputs pass a function fn(preds, targets) as the metric",
            code="data-type",
            metric=name,
        )
    value = value.detach().cpu()
    return value.reshape(1) if value.ndim == 0 else value


def row_weights(name: str, weights: Any, rows: int) -> torch.Tensor:
    """Return the weights of a batch's rows as float64 of shape ``(rows,)``, on the CPU."""
    weights = _cpu_tensor(name, "weights", weights).to(torch.float64)
    if weights.numel() != rows:
        raise UsageError(
            f"{name}: expected one weight for each of {rows} rows, got weights of shape "
            f"{tuple(weights.shape)}",
            code="data-shape",
            metric=name,
        )
    weights = weights.reshape(rows)
    if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
        raise UsageError(
            f"{name}: weights are expected to be finite numbers >= 0",
            code="data-value",
            metric=name,
        )
    return weights


def _drop_trailing_ones(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.ndim > 1 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    return tensor


def same_shape(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with trailing dimensions of size 1 dropped, so ``(n, 1)`` meets ``(n,)``."""
    if preds.shape == targets.shape:
        return preds, targets
    squeezed = _drop_trailing_ones(preds), _drop_trailing_ones(targets)
    if squeezed[0].shape != squeezed[1].shape:
        raise UsageError(
            f"{name}: preds and targets are expected to have the same shape, "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}",
            code="data-shape",
            metric=name,
        )
    return squeezed


def class_scores(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Tell class scores from plain predictions.

    Returns
    -------
    preds, targets : torch.Tensor
        ``(..., C)`` and ``(...)`` if there is a class dimension (the last one, of size > 1), else
        of equal shape.  Trailing dimensions of size 1 are dropped where that makes them fit.
    has_classes : bool
        Whether there is a class dimension.
    """
    pairs = [(preds, targets), (_drop_trailing_ones(preds), _drop_trailing_ones(targets))]
    for scores, labels in pairs:
        if scores.shape[:-1] == labels.shape and scores.shape[-1] > 1:
            return scores, labels, True
    scores, labels = pairs[-1]
    if scores.shape == labels.shape:
        return scores, labels, False
    raise UsageError(
        f"{name}: expected preds of shape (..., classes) or (...) for targets of shape (...), "
        f"got {tuple(preds.shape)} and {tuple(targets.shape)}; the class dimension comes last",
        code="data-shape",
        metric=name,
    )


def binary_scores(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score of class 1 and the 0/1 labels, both 1-D, from one or two columns."""
    preds, targets, has_classes = class_scores(name, preds, targets)
    if has_classes:
        if preds.shape[-1] != 2:
            raise UsageError(
                f"{name} is for two classes: expected preds with one or two columns, "
                f"got {preds.shape[-1]}; for more classes pass a torchmetrics metric",
                code="data-shape",
                metric=name,
            )
        preds = preds[..., 1]
    elif preds.ndim > 1:
        raise several_labels(name, targets)
    return preds.flatten(), labels_below(2, name, targets.flatten())


def several_labels(name: str, targets: torch.Tensor) -> UsageError:
    """Return the error for targets with more than one column."""
    return UsageError(
        f"{name}: targets are expected to be labels, one per row, got targets of shape "
        f"{tuple(targets.shape)}; for several labels per row pass a torchmetrics metric",
        code="data-shape",
        metric=name,
    )


def labels_below(classes: int, name: str, labels: torch.Tensor, role="targets") -> torch.Tensor:
    """Return class labels as int64 after checking that each is one of 0 ... `classes` - 1."""
    integers = labels.to(torch.int64)
    wrong = (integers < 0) | (integers >= classes) | (integers != labels)
    if wrong.any():
        raise UsageError(
            f"{name}: {role} are expected to be labels from 0 to {classes - 1}, "
            f"got {labels[wrong][0].item()}",
            code="data-value",
            metric=name,
        )
    return integers


for _name in __all__:
    register_metric(_name, globals()[_name])
