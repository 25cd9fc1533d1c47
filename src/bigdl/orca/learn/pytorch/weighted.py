"""Rows that count more than others: loss and metrics are weighted by a column."""

from __future__ import annotations

import copy
import functools
import inspect

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.steps import PlainStep, counts_unevenly

__all__ = ["WeightedStep", "check_weighted"]

# their means are not over the rows or the elements
_OTHER_MEANS = ("CTCLoss", "AdaptiveLogSoftmaxWithLoss")


def check_weighted(loss, metrics) -> None:
    """Refuse a loss that cannot be taken row by row, and metrics that cannot be weighted."""
    from torch import nn

    from bigdl.orca.learn.metrics import Metric

    if isinstance(loss, nn.Module):
        _per_row(loss)
    for name, measure in Metric.convert_metrics_dict(metrics, backend="pytorch").items():
        if not getattr(measure, "takes_weights", False):
            raise UsageError(
                f"weight_col cannot weight the metric {name}, which has no notion of rows that "
                "count more than others; leave it out, or use a metric of "
                "bigdl.orca.learn.metrics"
            )


class WeightedStep(PlainStep):
    """``sum(w * loss) / sum(w)`` over the rows; the last target of a batch is w.

    Class weights and ignored labels of a loss over classes multiply w. A loss that adds up over the
    rows becomes ``sum(w * loss)``.
    """

    def __init__(self, model, criterion, columns=None):
        super().__init__(model, criterion, columns)
        self._each, self.sums = _per_row(criterion)
        self._counted = 0.0

    def denominator(self, output, target, rows: int) -> float:
        return self._counted

    def weights(self, batch):
        """The weights of a batch's rows, of shape (rows,)."""
        import torch

        *_, weights = self.columns.split(batch)[-1]
        weights = weights.reshape(len(weights))
        if bool((weights < 0).any()) or not bool(torch.isfinite(weights).all()):
            raise UsageError("The column weight_col has negative numbers or none; weights are >= 0")
        return weights

    def _weighted_loss(self, output, target, weights):
        losses = self._call(self._each, output, target)
        rows = len(weights)
        if losses.ndim == 0 or losses.shape[0] != rows:
            raise UsageError(
                f"weight_col needs a loss of every row, but with reduction='none' the loss has the "
                f"shape {tuple(losses.shape)} for {rows} rows"
            )
        weights = weights.to(losses.dtype)
        counts = self._counts(target[0] if isinstance(target, tuple) else target, losses)
        weights = weights.reshape(rows, *[1] * (losses.ndim - 1))
        total = (weights * losses).sum()
        counted = (weights * counts).sum()
        self._counted = float(counted)
        if self.sums:
            return total
        return total / counted if self._counted else total * 0.0

    def _counts(self, target, losses):
        """What every element of a loss counts in its mean."""
        import torch

        criterion = self.criterion
        if getattr(criterion, "reduction", "mean") != "mean":  # over the rows, not the elements
            return torch.full_like(losses, losses.shape[0] / max(1, losses.numel()))
        if not counts_unevenly(criterion):
            return torch.ones_like(losses)
        labels = target.to(torch.int64)
        if labels.shape != losses.shape:  # class probabilities
            return torch.ones_like(losses)
        kept = labels != criterion.ignore_index
        if criterion.weight is None:
            return kept.to(losses.dtype)
        return torch.where(kept, criterion.weight[labels.clamp(min=0)].to(losses.dtype), 0.0)

    def forward(self, batch, index: int):
        """Output, target and loss of a training batch."""
        inputs, named, (*targets, _) = self.columns.split(batch)
        output = self.model(*inputs, **self._accepted(named))
        target = targets[0] if len(targets) == 1 else tuple(targets)
        return output, target, self._weighted_loss(output, target, self.weights(batch))

    def evaluate(self, batch, index: int, *, need_output: bool):
        """Output, target and loss of a validation batch."""
        return self.forward(batch, index)


def _per_row(criterion):
    """A loss that does not reduce, and whether the given one adds up over the rows."""
    reduction = getattr(criterion, "reduction", None)
    known = reduction in ("mean", "sum", "batchmean")
    if known and type(criterion).__name__ not in _OTHER_MEANS:
        each = copy.copy(criterion)
        each.reduction = "none"
        return each, reduction == "sum"
    try:
        parameters = inspect.signature(criterion).parameters
    except (TypeError, ValueError):
        parameters = {}
    if "reduction" in parameters and not known:
        return functools.partial(criterion, reduction="none"), False
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise UsageError(
        "weight_col needs a loss that can be taken row by row, that is one with a reduction such "
        f"as torch.nn.MSELoss(), got {name}"
    )
