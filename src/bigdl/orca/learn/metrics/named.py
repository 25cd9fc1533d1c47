"""Built-in metrics: means, metrics of a confusion matrix, and curves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import LazyModule, UsageError
from bigdl.orca.learn.metrics.metric import MergedMetric, register_metric

if TYPE_CHECKING:
    import torch

    from bigdl.common.types import Tensors
    from bigdl.orca.learn.metrics.metric import Reduction, State
else:
    torch = LazyModule("torch", "orca")

__all__ = [
    "AUC",
    "MAE",
    "MRR",
    "MSE",
    "NDCG",
    "ROC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossEntropy",
    "CategoricalAccuracy",
    "CategoricalCrossEntropy",
    "F1Score",
    "HitRate",
    "KLDivergence",
    "Poisson",
    "Precision",
    "PrecisionRecallCurve",
    "Recall",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossEntropy",
    "Top5Accuracy",
]


_EPSILON = 1e-7  # clipping bound that keeps logarithms finite


class MeanMetric(MergedMetric):
    """Base class of metrics that average one value per element or row, such as a squared error.

    With row weights it is ``sum(weight * value) / sum(weight)`` over these values.
    """

    @abstractmethod
    def _terms(self, preds: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the values to average for one batch, one per element or row."""

    def _prepare(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple:
        """Return the arguments of :meth:`_terms`, by default float64 tensors of equal shape."""
        preds, targets = same_shape(self.get_name(), preds, targets)
        return preds.double(), targets.double()

    def _batch_state(self, preds, targets, weights=None):
        terms = self._terms(*self._prepare(*cpu_tensors(self.get_name(), preds, targets)))
        if weights is None:
            return {"total": terms.sum(dtype=torch.float64), "count": torch.tensor(terms.numel())}
        terms = terms.reshape(len(terms), -1)
        weights = row_weights(self.get_name(), weights, len(terms))
        total = (weights[:, None] * terms).sum()
        return {"total": total, "count": weights.sum() * terms.shape[1]}


class LabelMetric(MeanMetric):
    """Base class of metrics that compare class scores with class labels."""

    def _prepare(self, preds, targets):
        preds, targets, has_classes = class_scores(self.get_name(), preds, targets)
        if not has_classes:
            raise UsageError(
                f"{self.get_name()} needs preds of shape (..., classes) and labels of shape "
                f"(...), got {tuple(preds.shape)} and {tuple(targets.shape)}",
                code="data-shape",
            )
        return preds, targets


class DistributionMetric(MeanMetric):
    """Base class of metrics that compare class scores with one target value per class."""

    def _prepare(self, preds, targets):
        if preds.ndim < 2 or preds.shape != targets.shape:
            raise UsageError(
                f"{self.get_name()}: preds and targets must have the same shape (..., "
                f"classes), got {tuple(preds.shape)} and {tuple(targets.shape)}; for integer "
                "labels use the Sparse variant of the metric",
                code="data-shape",
            )
        return preds, targets


class Accuracy(MeanMetric):
    """Fraction of correct predictions.

    For class scores ``(..., C)`` and labels ``(...)`` or ``(..., 1)``, the highest-scoring class
    (the first one of ties) is compared with the label. Otherwise the shapes must be equal, where
    ``(n, 1)`` counts as ``(n,)``. Floating-point predictions are probabilities and are rounded to 1
    if they are at least 0.5; integer predictions are labels. In an Estimator with the loss
    ``nn.BCEWithLogitsLoss``, the model's output passes through a sigmoid first.

    Parameters
    ----------
    zero_based_label : bool, default True
        Whether labels start at 0. If False they start at 1, and 1 is subtracted from the targets
        before they are compared with the predicted class.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Accuracy
    >>> accuracy = Accuracy().get_metric()
    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 0, 0]))
    >>> accuracy.compute()  # the highest-scoring classes are 1, 0 and 1
    tensor(0.6667)
    """

    takes = "probability"

    def __init__(self, zero_based_label: bool = True):
        self.zero_based_label = zero_based_label

    def _prepare(self, preds, targets):
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
    """Fraction of rows whose highest-scoring class is the label.

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
    """Fraction of rows whose highest-scoring class equals the class of the one-hot target.

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
    """Fraction of elements for which ``preds > 0.5`` equals the 0/1 target.

    For predictions of shape ``(n,)`` or ``(n, 1)``, elements are rows. With several outputs per
    row, every output counts, so the result is between 0 and 1 (BigDL 2.x divided by the number of
    rows).

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
    """Fraction of rows whose label is among the five highest-scoring classes.

    Scores are ``(..., C)``, labels ``(...)`` or ``(..., 1)``.  Ties are
    resolved in favor of the lower class index.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Top5Accuracy
    >>> accuracy = Top5Accuracy().get_metric()
    >>> accuracy(torch.tensor([[7, 6, 5, 4, 3, 2], [7, 6, 5, 4, 3, 2]]), torch.tensor([4, 5]))
    >>> accuracy.compute()  # class 5 has rank 6
    tensor(0.5000)
    """

    def _terms(self, preds, targets):
        classes = preds.shape[-1]
        labels = check_labels(classes, self.get_name(), targets).unsqueeze(-1)
        true_scores = preds.gather(-1, labels)
        ahead = (preds > true_scores) | ((preds == true_scores) & (torch.arange(classes) < labels))
        return (ahead.sum(-1) < 5) & ~true_scores.squeeze(-1).isnan()


class RankMetric(MergedMetric):
    """Base class of metrics of the target's rank, which merge as exact counts by rank.

    Predictions are integer ranks from 1 of shape ``(n,)``, such as the ``logits`` of Friesian's
    sequence models, where 0 marks a row that does not count. Or they are class scores ``(n, C)``
    with labels ``(n,)``: other classes with an equal score come first, so that a model with equal
    scores gets no hits.

    Parameters
    ----------
    k : int, default 10
        Largest rank that counts.
    """

    reductions: Mapping[str, Reduction] = {"ranks": "sum", "count": "sum"}

    def __init__(self, k: int = 10):
        self.k = check_positive("k", k)

    def get_name(self) -> str:
        """Return the name under which the metric is reported, such as ``"ndcg@10"``."""
        return f"{self._label}@{self.k}"

    _label = ""

    @abstractmethod
    def _gains(self, ranks: torch.Tensor) -> torch.Tensor:
        """Return the gain of each rank from 1."""

    def _batch_state(self, preds, targets, weights=None):
        preds, targets = cpu_tensors(self.get_name(), preds, targets)
        if preds.ndim == 1 and not preds.is_floating_point():
            ranks = preds.to(torch.int64)
        else:
            preds, targets, has_classes = class_scores(self.get_name(), preds, targets)
            if not has_classes or preds.ndim != 2:
                raise UsageError(
                    f"{self.get_name()} needs ranks of shape (n,), or scores of shape (n, classes) "
                    f"with labels of shape (n,), got {tuple(preds.shape)} and "
                    f"{tuple(targets.shape)}",
                    code="data-shape",
                )
            labels = check_labels(preds.shape[-1], self.get_name(), targets)[:, None]
            ranks = (~(preds < preds.gather(1, labels))).sum(1)
        kept = torch.where(ranks > self.k, 0, ranks)
        counted = ranks > 0
        if weights is None:
            amounts = torch.ones(len(ranks), dtype=torch.int64)
        else:
            amounts = row_weights(self.get_name(), weights, len(ranks))
        counts = torch.zeros(self.k + 1, dtype=amounts.dtype).index_add_(0, kept, amounts)
        return {"ranks": counts[1:], "count": amounts[counted].sum()}

    def _value(self, state):
        if not state["ranks"].numel():
            return torch.tensor(torch.nan)
        gains = self._gains(torch.arange(1, self.k + 1, dtype=torch.float64))
        return ((state["ranks"].double() * gains).sum() / state["count"].sum()).float()


class NDCG(RankMetric):
    """Normalized discounted cumulative gain of one relevant item per row: ``1 / log2(1 + rank)``.

    Parameters
    ----------
    k : int, default 10
        Largest rank that counts.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import NDCG
    >>> metric = NDCG(10).get_metric()
    >>> metric(torch.tensor([[0.1, 0.7, 0.2], [0.3, 0.4, 0.3]]), torch.tensor([2, 1]))
    >>> metric.name, metric.compute()  # ranks 2 and 1
    ('ndcg@10', tensor(0.8155))
    """

    _label = "ndcg"

    def _gains(self, ranks):
        return 1 / torch.log2(ranks + 1)


class HitRate(RankMetric):
    """Share of rows whose relevant item has at most rank k.

    Parameters
    ----------
    k : int, default 10

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import HitRate
    >>> metric = HitRate(2).get_metric()
    >>> metric(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 0]))  # ranks; targets are not used
    >>> metric.name, metric.compute()
    ('hit_rate@2', tensor(0.6667))
    """

    _label = "hit_rate"

    def _gains(self, ranks):
        return torch.ones_like(ranks)


class MRR(RankMetric):
    """Mean of the reciprocal rank of the relevant item, which is 0 after rank k.

    Parameters
    ----------
    k : int, default 10

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MRR
    >>> metric = MRR(10).get_metric()
    >>> metric(torch.tensor([1, 2, 30]), torch.tensor([0, 0, 0]))
    >>> metric.name, metric.compute()
    ('mrr@10', tensor(0.5000))
    """

    _label = "mrr"

    def _gains(self, ranks):
        return 1 / ranks


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
        labels = check_labels(preds.shape[-1], self.get_name(), targets)
        true_scores = preds.gather(-1, labels.unsqueeze(-1))
        return -true_scores.double().clamp(min=_EPSILON).log()


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
    """Base class of metrics computed from per-class counts of hits, predictions and labels."""

    reductions: Mapping[str, Reduction] = {"hits": "sum", "predicted": "sum", "actual": "sum"}
    _denominators: tuple[str, ...]  # the metric is hits / mean of these counts

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
        if 0 < threshold < 1:  # otherwise it is a threshold for logits
            self.takes = "probability"

    def _batch_state(self, preds, targets, weights=None):
        preds, targets = cpu_tensors(self.get_name(), preds, targets)
        predicted, actual, classes = self._labels(preds, targets)
        hit, hit_weights = predicted == actual, None
        if weights is not None:
            weights = row_weights(self.get_name(), weights, len(targets))
            weights = weights.repeat_interleave(len(actual) // len(targets))
            hit_weights = weights[hit]
        return {
            "hits": actual[hit].bincount(hit_weights, classes),
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
            raise multilabel_error(name, targets)
        elif preds.is_floating_point():
            if classes > 2:
                raise UsageError(
                    f"{name}: num_classes={classes} needs preds with {classes} columns or "
                    f"integer labels, got floating-point preds of shape {tuple(preds.shape)}",
                    code="data-shape",
                    metric=name,
                )
            preds = preds >= self.threshold
        predicted = check_labels(classes, name, preds.flatten(), "preds")
        return predicted, check_labels(classes, name, targets.flatten()), classes

    def _value(self, state):
        state = {key: tensor.double() for key, tensor in state.items()}
        if not state["actual"].sum():
            return torch.tensor(float("nan"))
        average = self.average
        if average == "micro":
            pick = slice(1, 2) if len(state["hits"]) == 2 else slice(None)
            state = {key: tensor[pick].sum() for key, tensor in state.items()}
        mean = sum(state[name] for name in self._denominators) / len(self._denominators)
        value = torch.where(mean > 0, state["hits"] / mean, 0.0)  # 0 / 0 is 0
        if average == "macro":
            value = value[state["predicted"] + state["actual"] > 0].mean()
        elif average == "weighted":
            value = (value * state["actual"]).sum() / state["actual"].sum()
        return value.float()


class Precision(ConfusionMetric):
    """Precision: the fraction of predictions of a class that are correct.

    Predictions with ``C >= 2`` columns are class scores; the highest-scoring class is the
    prediction. One floating-point column, ``(n,)`` or ``(n, 1)``, holds probabilities of class 1,
    which is predicted if they are at least `threshold`. Integer predictions are labels. In an
    Estimator with the loss ``nn.BCEWithLogitsLoss``, the model's output passes through a sigmoid if
    `threshold` is between 0 and 1; any other threshold, such as 0.0, applies to the logits.

    With two classes the result is that of class 1, the positive class, unless `average` is "macro"
    or "weighted". The precision of a class without predictions and the recall of a class without
    rows are 0.

    Parameters
    ----------
    num_classes : int, optional
        Number of classes; default the number of columns if the predictions are class scores, else
        2.
    average : {"micro", "macro", "weighted"}, default "micro"
        "micro": the positive class if there are two classes, else computed from the summed counts
        of all classes. "macro": mean over the classes in predictions or targets. "weighted": the
        same mean, weighted by the number of rows of each class.
    threshold : float, default 0.5
        Smallest score of class 1 if the predictions have one column.

    Raises
    ------
    UsageError
        If a parameter is invalid.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Precision
    >>> precision = Precision(threshold=0.4).get_metric()
    >>> precision(torch.tensor([0.9, 0.5, 0.1, 0.2]), torch.tensor([1, 0, 1, 0]))
    >>> precision.compute()  # one of the two rows predicted as class 1 is correct
    tensor(0.5000)
    """

    _denominators = ("predicted",)


class Recall(ConfusionMetric):
    """Recall: the fraction of a class's rows that are predicted as that class.

    See :class:`Precision` for inputs and parameters.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import Recall
    >>> recall = Recall().get_metric()
    >>> recall(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 1, 1, 1]))
    >>> recall.compute()  # two of the four rows of class 1 are predicted
    tensor(0.5000)
    """

    _denominators = ("actual",)


class F1Score(ConfusionMetric):
    """F1 score: the harmonic mean of precision and recall.

    See :class:`Precision` for inputs and parameters.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import F1Score
    >>> f1 = F1Score().get_metric()
    >>> f1(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 1, 1, 1]))
    >>> f1.compute()  # precision is 1, recall one half
    tensor(0.6667)
    """

    _denominators = ("predicted", "actual")


class CurveMetric(MergedMetric):
    """Base class of metrics that keep all scores and labels in row order.

    The state tensor ``weights`` is empty unless the rows have weights.
    """

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
        counts = state["weights"] > 0  # rows of weight 0 must not add thresholds
        return {key: tensor[counts] for key, tensor in state.items()}

    @staticmethod
    def _counts(state: State) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ascending distinct scores, and the counts of class 1 and of class 0 per score."""
        thresholds, inverse = state["scores"].unique(return_inverse=True)
        weights, is_positive = state["weights"], state["labels"] == 1

        def count(mask):
            masked_weights = weights[mask] if len(weights) else None
            return inverse[mask].bincount(masked_weights, len(thresholds))

        return thresholds, count(is_positive), count(~is_positive)


class AUC(CurveMetric):
    """Exact area under the ROC curve.

    This is the probability that a random row of class 1 has a higher score than a random row of
    class 0; ties count one half (as in ``sklearn.metrics.roc_auc_score``). All scores are kept in
    memory: 5 bytes per row for float32 scores.

    Scores are ``(n,)``, ``(n, 1)`` or ``(n, 2)`` (column 1 is used) and need not be probabilities;
    targets are 0 or 1. In an Estimator with the loss ``nn.CrossEntropyLoss``, the score is the
    difference of the two logit columns. The result is nan if there is only one class or if a score
    is nan.

    Parameters
    ----------
    threshold_num : int, default 200
        Accepted for compatibility with BigDL 2.x and ignored: the result is exact.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import AUC
    >>> auc = AUC().get_metric()
    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> auc.compute()  # three of the four positive-negative pairs are ordered correctly
    tensor(0.7500)
    """

    def __init__(self, threshold_num: int = 200):
        self.threshold_num = threshold_num

    def _value(self, state):
        thresholds, positives, negatives = self._counts(state)
        pairs = positives.sum() * negatives.sum()
        if not pairs or thresholds.isnan().any():
            return torch.tensor(float("nan"))
        below = negatives.cumsum(0) - negatives
        twice_won = (positives * (2 * below + negatives)).sum()  # integers: exact
        return (twice_won.double() / (2 * pairs).double()).float()


class ROC(CurveMetric):
    """ROC curve as a tuple ``(fpr, tpr, thresholds)`` of 1-D tensors.

    There is one point per distinct score, in descending order, after the point ``(0, 0)`` with
    threshold inf, as in ``sklearn.metrics.roc_curve(..., drop_intermediate=False)``. The rate of a
    class without rows is nan.  See :class:`AUC` for the inputs.

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

    def _value(self, state):
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
    """Precision-recall curve as a tuple ``(precision, recall, thresholds)`` of 1-D tensors.

    There is one point per distinct score, in ascending order, followed by the point ``(1, 0)``
    without a threshold, as in ``sklearn.metrics.precision_recall_curve``. Recall is nan without
    rows of class 1.  See :class:`AUC` for the inputs.

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

    def _value(self, state):
        thresholds, positives, negatives = self._counts(state)
        above = positives.flip(0).cumsum(0).flip(0).double()
        chosen = (positives + negatives).flip(0).cumsum(0).flip(0).double()
        end = torch.ones(1, dtype=torch.float64)
        return (
            torch.cat([above / chosen, end]).float(),
            torch.cat([above / positives.sum(), end - 1]).float(),
            thresholds,
        )


# -- conversion and checks of batches ------------------------------------------------------------


def cpu_tensors(name: str, preds: Tensors, targets: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert predictions and targets to detached CPU tensors with at least one dimension."""
    return _cpu_tensor(name, "preds", preds), _cpu_tensor(name, "targets", targets)


def _cpu_tensor(name: str, role: str, value: object) -> torch.Tensor:
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{name}: {role} must be one tensor, got {type(value).__name__}; for a model with "
            "several "
            "inputs or outputs pass a function fn(preds, targets) as the metric",
            code="data-type",
            metric=name,
        )
    value = value.detach().cpu()
    return value.reshape(1) if value.ndim == 0 else value


def row_weights(name: str, weights: Tensors, rows: int) -> torch.Tensor:
    """Return a batch's row weights as a float64 CPU tensor of shape ``(rows,)``."""
    weights = _cpu_tensor(name, "weights", weights).to(torch.float64)
    if weights.numel() != rows:
        raise UsageError(
            f"{name}: expected one weight per row for {rows} rows, got weights of shape "
            f"{tuple(weights.shape)}",
            code="data-shape",
            metric=name,
        )
    weights = weights.reshape(rows)
    if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
        raise UsageError(
            f"{name}: weights must be finite numbers >= 0",
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
    """Drop trailing dimensions of size 1 so that predictions and targets have equal shapes."""
    if preds.shape == targets.shape:
        return preds, targets
    squeezed = _drop_trailing_ones(preds), _drop_trailing_ones(targets)
    if squeezed[0].shape != squeezed[1].shape:
        raise UsageError(
            f"{name}: preds and targets must have the same shape, "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}",
            code="data-shape",
            metric=name,
        )
    return squeezed


def class_scores(
    name: str, preds: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Detect whether predictions have a class dimension, and align the shapes of both tensors.

    Returns
    -------
    preds, targets : torch.Tensor
        ``(..., C)`` and ``(...)`` if there is a class dimension (the last one, of size > 1), else
        of equal shape. Trailing dimensions of size 1 are dropped if that aligns the shapes.
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
        raise multilabel_error(name, targets)
    return preds.flatten(), check_labels(2, name, targets.flatten())


def multilabel_error(name: str, targets: torch.Tensor) -> UsageError:
    """Return the error for targets with more than one column."""
    return UsageError(
        f"{name}: targets must be labels, one per row, got targets of shape "
        f"{tuple(targets.shape)}; for several labels per row pass a torchmetrics metric",
        code="data-shape",
        metric=name,
    )


def check_labels(classes: int, name: str, labels: torch.Tensor, role="targets") -> torch.Tensor:
    """Convert class labels to int64; raise a UsageError if one is not in ``range(classes)``."""
    integers = labels.to(torch.int64)
    wrong = (integers < 0) | (integers >= classes) | (integers != labels)
    if wrong.any():
        raise UsageError(
            f"{name}: {role} must be labels from 0 to {classes - 1}, got {labels[wrong][0].item()}",
            code="data-value",
            metric=name,
        )
    return integers


for _name in __all__:
    register_metric(_name, globals()[_name])
