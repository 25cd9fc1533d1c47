"""What one batch means: forward pass and loss.

The convention of a batch is that its last element is the target and everything before are the
model's inputs: ``*features, target = batch``. A batch that is a dict is taken apart by the names of
its columns (:mod:`~bigdl.orca.learn.pytorch.batch_columns`).
"""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns, check_keywords
from bigdl.orca.learn.pytorch.lightning import LightningStep, is_lightning

__all__ = ["PlainStep", "step_for"]


def step_for(model, criterion, *, weighted: bool = False, columns: BatchColumns | None = None):
    """The kind of step that belongs to a model, with or without weights of the rows.

    Parameters
    ----------
    model : torch.nn.Module
    criterion : callable, optional
    weighted : bool
        Whether the last target of a batch holds weights.
    columns : BatchColumns, optional
        For batches that are dicts.
    """
    if is_lightning(model) and criterion is None:
        if weighted:
            raise UsageError(
                "weight_col needs a loss; pass loss= to Estimator.from_torch, or use the weights "
                "in the training_step of the LightningModule"
            )
        return LightningStep(model, columns)
    if weighted:
        from bigdl.orca.learn.pytorch.weighted import WeightedStep

        return WeightedStep(model, criterion, columns)
    return PlainStep(model, criterion, columns)


class PlainStep:
    """``criterion(model(*features), target)``."""

    def __init__(self, model, criterion, columns: BatchColumns | None = None):
        self.model = model
        self.criterion = criterion
        self.columns = columns or BatchColumns()
        #: whether the loss adds up over samples instead of averaging
        self.sums = getattr(criterion, "reduction", "mean") == "sum"
        self._elementwise = isinstance(criterion, _elementwise_losses())
        self._over_classes = isinstance(criterion, _class_losses())

    def forward(self, batch, index: int):
        """Output, target and loss of a training batch."""
        output, target = self._output(batch)
        return output, target, self._loss(output, target)

    def evaluate(self, batch, index: int, *, need_output: bool):
        """Output, target and loss (None without a criterion) of a validation batch."""
        output, target = self._output(batch)
        loss = None if self.criterion is None else self._loss(output, target)
        return output, target, loss

    def weights(self, batch):
        """The weights of a batch's rows, or None where each counts once."""
        return None

    def _output(self, batch):
        inputs, named, target = self.columns.split(batch)
        return self.model(*inputs, **self._accepted(named)), target

    def _accepted(self, named: dict) -> dict:
        """Keyword arguments after a look at whether the model takes them."""
        if named:
            check_keywords(self.model, named)
        return named

    def denominator(self, output, target, rows: int) -> float:
        """What the loss of a batch was divided by, up to a factor that all batches share.

        That is the number of rows, except where classes have weights or labels are ignored.
        """
        import torch

        criterion = self.criterion
        if not counts_unevenly(criterion):
            return rows
        if not (isinstance(target, torch.Tensor) and isinstance(output, torch.Tensor)):
            return rows
        if target.ndim == output.ndim:  # class probabilities: divided by the rows
            return rows
        labels = target.to(torch.int64)
        counted = labels[labels != criterion.ignore_index]
        if criterion.weight is None:
            return float(counted.numel())
        return float(criterion.weight.double()[counted].sum())

    def logged(self) -> dict[str, float]:
        """What the module logged since the last call."""
        return {}

    def _loss(self, output, target):
        return self._call(self.criterion, output, target)

    def _call(self, criterion, output, target):
        outputs = output if isinstance(output, list | tuple) else (output,)
        targets = target if isinstance(target, list | tuple) else (target,)
        if len(outputs) == len(targets) == 1:
            targets = (self._like(targets[0], outputs[0]),)
        return criterion(*outputs, *targets)

    def _like(self, target, output):
        """A target in the shape and dtype that the loss takes for this output.

        * A target (n,) meets an output (n, 1), and the reverse: a loss over elements would
          broadcast the two to (n, n) and be wrong without a word.
        * Labels of integers (0, 1) are numbers of the output's dtype for a loss over elements.
        * Labels of floats (Spark ML's 0.0, 1.0, ...) are class indices for a loss over classes.
        """
        import torch

        if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
            return target
        if self._over_classes and target.is_floating_point() and target.ndim == output.ndim - 1:
            labels = target.to(torch.int64)
            return labels if torch.equal(labels.to(target.dtype), target) else target
        if self._elementwise and not target.is_floating_point():
            target = target.to(output.dtype)
        if target.is_floating_point() and output.shape != target.shape:
            longer, shorter = sorted((output.shape, target.shape), key=len, reverse=True)
            if longer[: len(shorter)] == shorter and set(longer[len(shorter) :]) == {1}:
                return target.reshape(output.shape)
        return target


def counts_unevenly(criterion) -> bool:
    """Whether a mean loss may be divided by something else than its rows."""
    # a subclass may compute something else
    return type(criterion) in _class_losses() and criterion.reduction == "mean"


def _class_losses():
    from torch import nn

    return nn.CrossEntropyLoss, nn.NLLLoss


def _elementwise_losses():
    from torch import nn

    return nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss
