"""LightningModule that wraps an ordinary module; the result of ``Trainer.compile``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchmetrics import Metric

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.inference.source import forward_signature, named_parameters

__all__ = ["LightningModule"]

require("pytorch_lightning", "nano")

import pytorch_lightning as pl  # noqa: E402


class LightningModule(pl.LightningModule):
    """LightningModule that trains, validates, tests and predicts with an ordinary module.

    Batches are tuples or lists: first the module's inputs, last the target. It logs
    ``train/loss``, ``val/loss`` and ``test/loss``, and for each metric ``val/Name_i`` and
    ``test/Name_i``, where ``Name`` is the metric's class and ``i`` its index in the list.

    Parameters
    ----------
    model : Module
        The wrapped module, available as attribute ``model``.
    loss : callable, optional
        Called with output and target. Required for training.
    optimizer : torch.optim.Optimizer, optional
        Optimizer of the module's parameters. Required for training.
    scheduler : LRScheduler, optional
        Scheduler that is stepped after each epoch.
    metrics : sequence of torchmetrics.Metric, optional

    Raises
    ------
    UsageError
        If an argument has a wrong type.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import Trainer
    >>> from bigdl.nano.pytorch.lightning import LightningModule
    >>> net = torch.nn.Linear(2, 1)
    >>> model = LightningModule(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    >>> rows = torch.utils.data.TensorDataset(torch.rand(8, 2), torch.zeros(8, 1))
    >>> trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False,
    ...                   enable_progress_bar=False, enable_model_summary=False)
    >>> trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    >>> list(trainer.callback_metrics)
    ['train/loss']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: object = None,
        metrics: Sequence[Metric] | None = None,
    ):
        super().__init__()
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"The model must be a torch.nn.Module, not a {type(model).__name__}",
                code="model-type",
            )
        self.model = model
        #: Names of the inputs, taken from the module's forward; can be set.
        self.forward_args = [each.name for each in named_parameters(model)]
        self.compile(loss, optimizer, scheduler, metrics)

    def compile(
        self,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: object = None,
        metrics: Sequence[Metric] | None = None,
    ) -> None:
        """Replace loss, optimizer, scheduler and metrics; see the class for the parameters."""
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}",
                code="argument-type",
                argument="optimizer",
            )
        if loss is not None and not callable(loss):
            raise UsageError(
                f"loss must be callable, but it is {loss!r}", code="argument-type", argument="loss"
            )
        metrics = [] if metrics is None else list(metrics)
        wrong = [type(metric).__name__ for metric in metrics if not isinstance(metric, Metric)]
        if wrong:
            raise UsageError(
                f"metrics must be metrics of torchmetrics, not {', '.join(wrong)}",
                code="argument-type",
                argument="metrics",
            )
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.metrics = nn.ModuleList(metrics)

    @property
    def forward_signature(self) -> inspect.Signature:
        """Signature of the module's forward, restricted to `forward_args`."""
        signature = forward_signature(self.model)
        if list(self.forward_args) == [each.name for each in named_parameters(self.model)]:
            return signature
        kept = [signature.parameters.get(name) for name in self.forward_args]
        return signature.replace(parameters=[each for each in kept if each is not None])

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # types of the user's module
        """Return the module's output; extra positional arguments such as targets are dropped."""
        return self.model(*args[: len(self.forward_args) or None], **kwargs)

    def on_train_start(self) -> None:
        """Raise UsageError if loss or optimizer is missing."""
        if self.loss is None:
            raise UsageError(
                "Loss must not be None for training.", code="argument-missing", argument="loss"
            )
        if self.optimizer is None:
            raise UsageError(
                "Optimizer must not be None for training.",
                code="argument-missing",
                argument="optimizer",
            )

    def training_step(self, batch: Sequence, batch_idx: int) -> torch.Tensor:
        loss = cast("torch.Tensor", self._evaluate(batch)[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence, batch_idx: int) -> None:
        self._log_metrics("val", batch)

    def test_step(self, batch: Sequence, batch_idx: int) -> None:
        self._log_metrics("test", batch)

    def predict_step(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> object:
        return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizers = [] if self.optimizer is None else [self.optimizer]
        return optimizers, [] if self.scheduler is None else [self.scheduler]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> object:  # args: of torch
        """Load the state dict of this module or of the wrapped module.

        The latter comes from ``model.state_dict()`` of a program without Lightning.
        """
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError:
            return self.model.load_state_dict(state_dict)

    def _evaluate(self, batch: Sequence) -> tuple[Any, torch.Tensor | None]:
        *inputs, target = batch
        output = self(*inputs)
        return output, None if self.loss is None else self.loss(output, target)

    def _log_metrics(self, stage: str, batch: Sequence) -> None:
        output, loss = self._evaluate(batch)
        if loss is not None:
            self.log(f"{stage}/loss", loss, prog_bar=True)
        for index, metric in enumerate(self.metrics):
            metric(output, batch[-1])
            name = f"{stage}/{type(metric).__name__}_{index}"
            self.log(name, cast("Metric", metric), prog_bar=True)
