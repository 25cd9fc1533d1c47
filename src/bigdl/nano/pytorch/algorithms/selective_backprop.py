"""Selective backpropagation: train only on a batch's samples with high loss.

Jiang et al., Accelerating Deep Learning by Focusing on the Biggest Losers, 2019.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.inference.source import evaluating

__all__ = ["SelectiveBackprop", "select_using_loss", "should_selective_backprop"]

require("pytorch_lightning", "nano")

import pytorch_lightning as pl  # noqa: E402


def should_selective_backprop(
    current_duration: float,
    batch_idx: int,
    start: float = 0.5,
    end: float = 0.9,
    interrupt: int = 2,
) -> bool:
    """Return True if selective backpropagation applies to a batch.

    Parameters
    ----------
    current_duration : float
        Completed fraction of the training, 0 to 1.
    batch_idx : int
        Index of the batch in its epoch.
    start, end, interrupt
        See :class:`SelectiveBackprop`.

    Examples
    --------
    >>> from bigdl.nano.pytorch.algorithms.selective_backprop import should_selective_backprop
    >>> [should_selective_backprop(done, batch_idx=0, start=0.5) for done in (0.4, 0.6, 0.95)]
    [False, True, False]
    >>> [should_selective_backprop(0.6, batch, interrupt=2) for batch in range(4)]
    [True, False, True, False]
    """
    whole = interrupt > 0 and (batch_idx + 1) % interrupt == 0
    return start <= current_duration < end and not whole


def select_using_loss(
    batch: Any,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    keep: float = 0.5,
    scale_factor: float = 1.0,
) -> object:
    """Draw a subset of a batch, preferring samples with a high loss.

    The probability of a sample is proportional to ``percentile ** (1 / keep - 1)`` of its loss.
    Samples are drawn without replacement.

    Parameters
    ----------
    batch : tuple or list of Tensor
        Inputs of the model, then targets; one row per sample.
    model : Module
        Called without gradients and in evaluation mode.
    loss_fn : callable
        ``loss_fn(output, target, reduction="none")`` returns a loss per sample.
    keep : float
        Fraction of samples to keep; the count is rounded down, but at least one.
    scale_factor : float
        Factor by which images ``(N, C, H, W)`` are downscaled to compute losses; 1 keeps their
        size.

    Returns
    -------
    tuple or list of Tensor
        Selected rows, in the type of the batch.

    Raises
    ------
    UsageError
        If the batch is not a tuple or list of tensors with equal numbers of rows.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.algorithms.selective_backprop import select_using_loss
    >>> x = torch.arange(8.0).reshape(8, 1)
    >>> batch = (x, torch.zeros(8, 1))  # the loss grows with x
    >>> loss = torch.nn.functional.mse_loss
    >>> inputs, targets = select_using_loss(batch, torch.nn.Identity(), loss, keep=0.25)
    >>> inputs.shape
    torch.Size([2, 1])
    """
    _check_batch(batch)
    *inputs, target = batch
    with evaluating(model), torch.no_grad():
        losses = loss_fn(model(*_shrink_images(inputs, scale_factor)), target, reduction="none")
        losses = losses.float().flatten(1).mean(1) if losses.dim() > 1 else losses.float()
    count = len(target)
    percentiles = (torch.argsort(torch.argsort(losses)) + 0.5) / count
    kept = torch.multinomial(percentiles ** (1 / keep - 1), max(1, int(keep * count)))
    kept = kept.to(target.device)
    return type(batch)(tensor[kept] for tensor in batch)  # type: ignore[call-arg]


class SelectiveBackprop(pl.Callback):
    """Callback that drops samples with low loss in a given interval of training.

    A pruned batch costs one more forward pass, and a backward pass on fewer samples.

    Parameters
    ----------
    start, end : float
        Fractions of the training, 0 to 1, between which batches are pruned.
    keep : float
        Fraction of each batch to keep, above 0 and at most 1.
    scale_factor : float
        Factor by which images are downscaled to compute losses, above 0 and at most 1.
    interrupt : int
        Every `interrupt`-th batch is not pruned; 0 prunes all batches.
    loss_fn : callable, optional
        Function of output, target and ``reduction="none"``, such as those of
        ``torch.nn.functional``, or a PyTorch loss module. By default the LightningModule's
        ``loss``, ``criterion`` or ``loss_fn``.

    Raises
    ------
    UsageError
        If a value is out of range; at the start of training, if there is no loss function.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import Trainer
    >>> from bigdl.nano.pytorch.algorithms import SelectiveBackprop
    >>> pruning = SelectiveBackprop(start=0.2, end=0.8, keep=0.5, interrupt=2)
    >>> trainer = Trainer(max_epochs=10, algorithms=[pruning])
    >>> pruning in trainer.callbacks
    True
    """

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: float = 0.5,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        loss_fn: Callable[..., torch.Tensor] | None = None,
    ):
        if not 0 <= start < end <= 1:
            raise UsageError(
                f"0 <= start < end <= 1 must hold, not start={start!r}, end={end!r}",
                code="argument-value",
                argument="start",
            )
        check_number("keep", keep, above=0, most=1)
        check_number("scale_factor", scale_factor, above=0, most=1)
        check_integer("interrupt", interrupt, 0)
        self.start, self.end, self.keep = start, end, keep
        self.scale_factor, self.interrupt, self.loss_fn = scale_factor, interrupt, loss_fn

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the module's batch hook to prune its batches."""
        loss_fn = _per_sample(self._loss_of(pl_module))
        transfer = pl_module.on_after_batch_transfer

        def pruned(batch: object, dataloader_idx: int) -> object:
            batch = transfer(batch, dataloader_idx)
            return self._pruned(trainer, pl_module, loss_fn, batch)

        pl_module.__dict__["on_after_batch_transfer"] = pruned

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("on_after_batch_transfer", None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        pl_module.__dict__.pop("on_after_batch_transfer", None)

    def _pruned(
        self, trainer: pl.Trainer, module: torch.nn.Module, loss_fn: Callable, batch: object
    ) -> object:
        if not trainer.training:
            return batch
        index = (
            trainer.fit_loop.epoch_loop.batch_idx + 1
        )  # the loop's counter still shows the previous batch
        done = _progress(trainer, index)
        if not should_selective_backprop(done, index, self.start, self.end, self.interrupt):
            return batch
        return select_using_loss(batch, module, loss_fn, self.keep, self.scale_factor)

    def _loss_of(self, module: torch.nn.Module) -> Callable[..., torch.Tensor]:
        names = ("loss", "criterion", "loss_fn")
        candidates = [self.loss_fn, *(getattr(module, name, None) for name in names)]
        loss_fn = next((each for each in candidates if callable(each)), None)
        if loss_fn is None:
            raise UsageError(
                "SelectiveBackprop needs the loss of each sample; pass loss_fn, e.g. "
                "torch.nn.functional.cross_entropy",
                code="argument-missing",
                argument="loss_fn",
            )
        return loss_fn


def _progress(trainer: pl.Trainer, batch_idx: int) -> float:
    if trainer.max_epochs and trainer.max_epochs > 0:
        epochs = trainer.current_epoch + batch_idx / trainer.num_training_batches
        return epochs / trainer.max_epochs
    return trainer.global_step / trainer.max_steps if trainer.max_steps > 0 else 0.0


def _per_sample(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss function that accepts `reduction`; wrap loss modules, which do not."""
    if not isinstance(loss, nn.Module) or not hasattr(loss, "reduction"):
        return loss
    each: Any = copy.copy(loss)

    def with_reduction(output: object, target: object, reduction: str = "none") -> torch.Tensor:
        each.reduction = reduction
        return each(output, target)

    return with_reduction


def _check_batch(batch: Any) -> None:
    tensors = isinstance(batch, (tuple, list)) and all(map(torch.is_tensor, batch))
    if not tensors or len(batch) < 2 or len({len(tensor) for tensor in batch}) != 1:
        raise UsageError(
            "SelectiveBackprop takes batches that are tuples or lists of tensors with equally many "
            f"rows, inputs first and the target last, not a {type(batch).__name__}",
            code="data-structure",
        )


def _shrink_images(inputs: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    if factor == 1:
        return inputs
    return [
        nn.functional.interpolate(each, scale_factor=factor, mode="bilinear")
        if each.dim() == 4
        else each
        for each in inputs
    ]
