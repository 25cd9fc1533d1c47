"""LightningModule for image classification with a backbone and a head."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, require

require("pytorch_lightning", "nano")

from pytorch_lightning import LightningModule  # noqa: E402


class ImageClassifier(LightningModule):
    """Image classifier: a backbone and a classification head.

    A subclass adds ``configure_optimizers``. Batches are pairs of images and labels. Training logs
    ``train_loss``, testing ``test_loss`` and ``test_acc``, validation ``val_loss`` and ``val_acc``.
    Epoch metrics are means over images.

    Parameters
    ----------
    backbone : torch.nn.Module
        Module from images to features: a model of :mod:`bigdl.nano.pytorch.vision.models`, another
        module with ``get_output_size()``, or any module if `head` is given.
    num_classes : int
        Number of classes.
    head : torch.nn.Module, optional
        Module from features to scores ``(N, num_classes)``; by default a linear layer on the
        flattened features.
    criterion : callable, optional
        ``criterion(scores, labels)`` returns the loss; cross entropy by default.

    Raises
    ------
    UsageError
        If `num_classes` is not a positive int, or no head can be created for the backbone.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.models import ImageClassifier, mobilenet_v3_small
    >>> class Pets(ImageClassifier):
    ...     def configure_optimizers(self):
    ...         return torch.optim.Adam(self.head.parameters())
    >>> model = Pets(mobilenet_v3_small(freeze=True), num_classes=37)
    >>> model(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 37])
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        head: nn.Module | None = None,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__()
        check_positive("num_classes", num_classes)
        if head is None:
            if not hasattr(backbone, "get_output_size"):
                raise UsageError(
                    f"The backbone, a {type(backbone).__name__}, has no get_output_size() to "
                    "create a head from; pass `head`.",
                    code="argument-missing",
                    argument="head",
                )
            size = cast("Any", backbone).get_output_size()
            head = nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))
        self.num_classes = num_classes
        self.backbone = backbone
        self.head = head
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores, float ``(N, num_classes)``, of images ``(N, 3, H, W)``."""
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = self.criterion(self(images), labels)
        self.log("train_loss", loss, batch_size=len(images))
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        self._log_metrics("val", batch)

    def test_step(self, batch, batch_idx: int) -> None:
        self._log_metrics("test", batch)

    def predict_step(self, batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def _log_metrics(self, stage: str, batch) -> None:
        images, labels = batch
        scores = self(images)
        right = (scores.argmax(dim=1) == labels).float().mean()
        metrics = {f"{stage}_loss": self.criterion(scores, labels), f"{stage}_acc": right}
        self.log_dict(metrics, batch_size=len(images), prog_bar=True)
