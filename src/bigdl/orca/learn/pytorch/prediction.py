"""PyTorch models as shipped to prediction tasks."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.orca.learn.prediction.classes import Scores, unknown_scores
from bigdl.orca.learn.pytorch.callbacks.base import MainCallback
from bigdl.orca.learn.pytorch.evaluation import TorchRunner
from bigdl.orca.learn.pytorch.forward import accepted_inputs, call_model, logits_of
from bigdl.orca.learn.pytorch.lightning import unused_hooks
from bigdl.orca.learn.pytorch.parts import ModelParts, load_into
from bigdl.training.embedding_tables.placement import NO_ROWS
from bigdl.training.embedding_tables.torch_model import SavedRows
from bigdl.training.sharded_model import has_sliced_weights, load_whole
from bigdl.training.slices import SavedSlices
from bigdl.training.state import loads, precision_of, to_device

if TYPE_CHECKING:
    from bigdl.common.types import Tensors

logger = logging.getLogger("bigdl.orca")

_WARNED: set[str] = set()
"""Warnings that this process has logged."""


@dataclass(frozen=True)
class LoadedTorchModel:
    """A PyTorch model loaded on its device in a task.

    Attributes
    ----------
    model : torch.nn.Module
    device : torch.device
    precision : str
        ``"fp32"`` or ``"bf16"``.
    names : tuple of str
        Names of the columns of a batch, if known.
    squeezes : bool
        Whether to drop trailing dimensions of size 1 from the outputs.
    """

    model: Any
    device: Any
    precision: str
    names: tuple[str, ...] = ()
    squeezes: ClassVar[bool] = True

    def __call__(self, batch: list) -> Tensors:
        """Return the model's outputs for a batch of numpy columns."""
        return self.outputs([_tensor(column) for column in batch])

    def outputs(self, columns: list) -> Tensors:
        """Return the model's outputs for a batch of tensor columns."""
        columns = to_device(columns, self.device)
        with torch.no_grad(), precision_of(self.precision, self.device)():
            return logits_of(call_model(self.model, columns, self.names))

    @property
    def widths(self) -> list[int]:
        """Candidate sizes of an input's last dimension, taken from the weights."""
        sizes = [p.shape[-1] for p in self.model.parameters() if p.ndim > 1]
        return list(dict.fromkeys(sizes))[:8]

    def accepted(self, batch: list) -> list:
        """Convert a batch of numpy columns to the dtypes that the model computes with."""
        self(batch)
        taken = accepted_inputs(self.model, [_tensor(column) for column in batch])
        return [_array(column) for column in taken]


@dataclass(frozen=True)
class TorchSnapshot:
    """Model and weights as shipped to tasks.

    Attributes
    ----------
    parts : ModelParts
    weights : bytes or None
        State dict of the model; None if `parts` contain the weights.
    precision : str
        ``"bf16"`` computes with torch's bfloat16 autocast; predictions are float32.
    slices : dict or None
        Arguments of :class:`~bigdl.training.slices.SavedSlices`, whose files the tasks read rows of
        sharded embeddings or the weights of a divided model from.
    names : tuple of str
        Names of the feature columns, which Hugging Face models take as keyword arguments.
    """

    parts: Any
    weights: bytes | None
    precision: str = "fp32"
    slices: dict | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        parts: ModelParts,
        weights: bytes,
        precision: str = "fp32",
        slices: dict | None = None,
        names: tuple[str, ...] = (),
    ) -> TorchSnapshot:
        """Create a snapshot of an Estimator's model with the given weights."""
        parts = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
        if not parts.is_instance or has_sliced_weights(SavedSlices.from_json(slices)):
            return cls(parts, weights, precision, slices, names)
        parts = replace(parts, model=parts.build_model(NO_ROWS if slices else None))
        load_into(parts.model, weights)
        return cls(parts, None, precision, slices, names)

    def load_on(self, device: torch.device) -> LoadedTorchModel:
        """Load the model on a device in this process."""
        slices = SavedSlices.from_json(self.slices)
        is_sharded = has_sliced_weights(slices)
        model = self.parts.build_model(NO_ROWS if slices and not is_sharded else None)
        if not self.parts.is_instance:  # for an instance, the driver has already warned
            _warn_unused_hooks(model)
        inner = model.model if isinstance(model, _Predicting) else model
        if is_sharded and slices is not None:
            load_whole(inner, loads(self.weights or b""), slices)
        elif self.weights is not None:
            load_into(model, self.weights)
        if slices is not None and not is_sharded:
            SavedRows(slices, inner)
        return LoadedTorchModel(model.eval().to(device), device, self.precision, names=self.names)


def _warn_unused_hooks(model: torch.nn.Module) -> None:
    """Warn once per process about LightningModule hooks that prediction does not call."""
    sentence = unused_hooks(model, "predict")
    if sentence is not None and sentence not in _WARNED:
        _WARNED.add(sentence)
        logger.warning(sentence)


def _tensor(column):
    if isinstance(column, dict):
        return {key: _tensor(value) for key, value in column.items()}
    return torch.tensor(column)


def _array(column):
    if isinstance(column, dict):
        return {key: _array(value) for key, value in column.items()}
    if column.dtype in (torch.float16, torch.bfloat16):  # the model also accepts float32
        column = column.float()
    return column.numpy()


def predicting_parts(parts: ModelParts, main: MainCallback) -> ModelParts:
    """Return ModelParts whose model calls the MainCallback instead of the user's model."""
    inner = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
    return ModelParts(functools.partial(_Predicting, inner, main), config=parts.config)


class _Predicting(torch.nn.Module):
    """Module that predicts through a MainCallback and has the state of the user's model."""

    def __init__(self, parts, main, config):
        super().__init__()
        self.model = parts.build_model()
        # each task predicts independently, like a single worker
        alone: Any = SimpleNamespace(rank=0, world_size=1)
        self._runner = TorchRunner(alone, config, [main])
        self._runner.model = self.model

    def forward(self, *features):
        runner = self._runner
        runner.batch, runner.output = list(features), None
        runner.device = next((p.device for p in self.model.parameters()), None)
        returned = runner.main.on_pred_forward(runner)
        if returned is not None:
            runner.output = returned
        if runner.output is None:
            raise UsageError(
                "on_pred_forward of the MainCallback must set runner.output, or return it",
                code="function-result",
            )
        return _tensors(runner.output)

    def state_dict(self, *args, **options):
        return self.model.state_dict(*args, **options)

    def load_state_dict(self, state, *args, **options):
        return self.model.load_state_dict(state, *args, **options)


def _tensors(output):
    """Convert all arrays and lists of numbers in a possibly nested output to tensors.

    Raises
    ------
    UsageError
        If an array does not hold numbers, e.g. class names.
    """
    if isinstance(output, list) and not any(
        isinstance(each, np.ndarray | torch.Tensor | dict) for each in output
    ):
        try:
            output = np.asarray(output)
        except ValueError:  # lists of different lengths
            return tuple(map(_tensors, output))
    if isinstance(output, np.ndarray):
        if output.dtype.kind not in "biufc":
            raise UsageError(
                f"on_pred_forward of the MainCallback returned an array of {output.dtype}, but "
                "predictions must be numbers; return e.g. class indices",
                code="model-output",
            )
        return torch.from_numpy(np.ascontiguousarray(output))
    if isinstance(output, list | tuple):
        return tuple(_tensors(value) for value in output)
    if isinstance(output, dict):
        return {key: _tensors(value) for key, value in output.items()}
    return output


_SCORES: dict[Any, Scores] = {
    **dict.fromkeys((nn.CrossEntropyLoss, F.cross_entropy), Scores("logits", True)),
    **dict.fromkeys((nn.NLLLoss, F.nll_loss), Scores("log_probabilities", True)),
    **dict.fromkeys(
        (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, nn.MultiLabelSoftMarginLoss),
        Scores("logits", False),
    ),
    **dict.fromkeys((nn.BCELoss, F.binary_cross_entropy), Scores("probabilities", False)),
}
"""Meaning of a model's outputs, by its loss."""


def torch_scores(parts: ModelParts, output: str) -> Scores:
    """Infer from the loss or Hugging Face config whether outputs are logits or probabilities.

    Parameters
    ----------
    parts : ModelParts
    output : str
        Requested form of the predictions, for the error message.

    Raises
    ------
    UsageError
        If the loss does not determine it.
    """
    loss = parts.build_loss()
    if loss is None:
        config = getattr(parts.build_model(), "config", None)
        problem = getattr(config, "problem_type", None)
        labels = getattr(config, "num_labels", 0)
        if problem == "multi_label_classification":
            return Scores("logits", False)
        if problem != "regression" and labels > 1:
            return Scores("logits", True)
        raise unknown_scores(output, "that of the model")
    key = loss if loss in _SCORES else next((c for c in type(loss).__mro__ if c in _SCORES), None)
    if key is None:
        raise unknown_scores(output, getattr(loss, "__name__", type(loss).__name__))
    return _SCORES[key]
