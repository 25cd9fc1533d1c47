"""A PyTorch model on its way to the tasks that predict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bigdl.orca.learn.prediction.shipping import Shipped, digest_of
from bigdl.orca.learn.pytorch.state import load_into
from bigdl.training.device import precision_of, to_device

__all__ = ["TorchReady", "TorchSnapshot", "ship"]


@dataclass(frozen=True)
class TorchReady:
    """A model where it computes.

    Attributes
    ----------
    model : torch.nn.Module
    device : torch.device
    precision : str
        ``"fp32"`` or ``"bf16"``.
    squeezes : bool
        Whether trailing dimensions of size 1 of its outputs are dropped.
    """

    model: Any
    device: Any
    precision: str
    squeezes: ClassVar[bool] = True

    def __call__(self, batch: list):
        """What the model returns for a batch of numpy columns."""
        import torch

        columns = to_device([_tensor(column) for column in batch], self.device)
        with torch.no_grad(), precision_of(self.precision, self.device)():
            return self.model(*columns)


@dataclass(frozen=True)
class TorchSnapshot:
    """A model on its way to the tasks.

    Attributes
    ----------
    parts : ModelParts
    weights : bytes or None
        State dict of the model; None if the model carries its weights itself.
    precision : str
        ``"bf16"`` computes in bfloat16 where torch's autocast does; predictions are float32.
    """

    parts: Any
    weights: bytes | None
    precision: str = "fp32"

    @classmethod
    def of(cls, parts, weights: bytes, precision: str = "fp32") -> TorchSnapshot:
        """The model of an Estimator's parts with these weights."""
        parts = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
        if not parts.is_instance:
            return cls(parts, weights, precision)
        parts = replace(parts, model=parts.build_model())
        load_into(parts.model, weights)
        return cls(parts, None, precision)

    def ready(self, device) -> TorchReady:
        """The model, in a process and on a device."""
        model = self.parts.build_model()
        if self.weights is not None:
            load_into(model, self.weights)
        return TorchReady(model.eval().to(device), device, self.precision)


def ship(parts, weights: bytes, sc, precision: str, previous: Shipped | None = None) -> Shipped:
    """Broadcast a model, unless it is what was broadcast last.

    Parameters
    ----------
    parts : ModelParts
    weights : bytes
        State dict of the model.
    sc : pyspark.SparkContext
    precision : str
        See :class:`TorchSnapshot`.
    previous : Shipped, optional
        What was broadcast last.
    """
    origin = parts, digest_of(weights)
    if previous is not None and previous.is_of(sc, *origin):
        return previous
    return Shipped(TorchSnapshot.of(parts, weights, precision), sc, origin)


def _tensor(column):
    import torch

    if isinstance(column, dict):
        return {key: _tensor(value) for key, value in column.items()}
    return torch.tensor(column)
