"""Models that are shipped to the tasks that predict."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks.base import MainCallback
from bigdl.orca.learn.pytorch.evaluation import TorchRunner
from bigdl.orca.learn.pytorch.forward import accepted_inputs, call_model, logits_of
from bigdl.orca.learn.pytorch.lightning import unused_hooks
from bigdl.orca.learn.pytorch.parts import ModelParts, load_into
from bigdl.training.embedding_tables.placement import NO_ROWS
from bigdl.training.embedding_tables.torch_model import SavedRows
from bigdl.training.slices import SavedSlices
from bigdl.training.state import precision_of, to_device

logger = logging.getLogger("bigdl.orca")

_SAID: set[str] = set()
"""What this process was told of models."""


@dataclass(frozen=True)
class LoadedTorchModel:
    """A model loaded on its device in a task.

    Attributes
    ----------
    model : torch.nn.Module
    device : torch.device
    precision : str
        ``"fp32"`` or ``"bf16"``.
    names : tuple of str
        Of the columns of a batch, if they are known.
    squeezes : bool
        True if trailing dimensions of size 1 of its outputs are dropped.
    """

    model: Any
    device: Any
    precision: str
    names: tuple[str, ...] = ()
    squeezes: ClassVar[bool] = True

    def __call__(self, batch: list) -> Any:
        """Return the model's outputs for a batch of numpy columns."""
        return self.outputs([_tensor(column) for column in batch])

    def outputs(self, columns: list) -> Any:
        """Return the model's outputs for columns that are tensors."""
        columns = to_device(columns, self.device)
        with torch.no_grad(), precision_of(self.precision, self.device)():
            return logits_of(call_model(self.model, columns, self.names))

    @property
    def widths(self) -> list[int]:
        """Sizes that the last dimension of an input may have: those of the weights."""
        sizes = [p.shape[-1] for p in self.model.parameters() if p.ndim > 1]
        return list(dict.fromkeys(sizes))[:8]

    def accepted(self, batch: list) -> list:
        """Return a batch of numpy columns in the dtypes in which the model computes with it."""
        self(batch)
        taken = accepted_inputs(self.model, [_tensor(column) for column in batch])
        return [_array(column) for column in taken]


@dataclass(frozen=True)
class TorchSnapshot:
    """Model and weights as they are shipped to the tasks.

    Attributes
    ----------
    parts : ModelParts
    weights : bytes or None
        State dict of the model; None if the model carries its weights itself.
    precision : str
        ``"bf16"`` computes in bfloat16 where torch's autocast does; predictions are float32.
    slices : dict or None
        Of :class:`~bigdl.training.slices.SavedSlices`, from whose files the tasks read the rows of
        sharded embeddings.
    names : tuple of str
        Of the feature columns, which a model of Hugging Face's kind is given by name.
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
        """The model of an Estimator's parts with these weights."""
        parts = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
        if not parts.is_instance:
            return cls(parts, weights, precision, slices, names)
        parts = replace(parts, model=parts.build_model(NO_ROWS if slices else None))
        load_into(parts.model, weights)
        return cls(parts, None, precision, slices, names)

    def load_on(self, device: torch.device) -> LoadedTorchModel:
        """The model, in a process and on a device."""
        model = self.parts.build_model(NO_ROWS if self.slices else None)
        if not self.parts.is_instance:  # of an instance the driver has said it
            _say_unused(model)
        if self.weights is not None:
            load_into(model, self.weights)
        if self.slices:
            inner = model.model if isinstance(model, _Predicting) else model
            SavedRows(SavedSlices(**self.slices), inner)
        return LoadedTorchModel(model.eval().to(device), device, self.precision, names=self.names)


def _say_unused(model: torch.nn.Module) -> None:
    """Name what prediction drops of a LightningModule, once in a process."""
    sentence = unused_hooks(model, "predict")
    if sentence is not None and sentence not in _SAID:
        _SAID.add(sentence)
        logger.warning(sentence)


def _tensor(column):
    if isinstance(column, dict):
        return {key: _tensor(value) for key, value in column.items()}
    return torch.tensor(column)


def _array(column):
    if isinstance(column, dict):
        return {key: _array(value) for key, value in column.items()}
    if column.dtype in (torch.float16, torch.bfloat16):  # the model takes float32 all the same
        column = column.float()
    return column.numpy()


def predicting_parts(parts: ModelParts, main: MainCallback) -> ModelParts:
    """Parts whose model calls `main` instead of the user's model."""
    inner = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
    return ModelParts(functools.partial(_Predicting, inner, main), config=parts.config)


class _Predicting(torch.nn.Module):
    """The user's model, called by a MainCallback; its state is that of the model."""

    def __init__(self, parts, main, config):
        super().__init__()
        self.model = parts.build_model()
        # rows are predicted by many tasks that know nothing of each other
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
    """Return arrays and lists of numbers as tensors, also those in lists, tuples and dicts.

    Raises
    ------
    UsageError
        If an array holds something other than numbers, such as names of classes.
    """
    if isinstance(output, list) and not any(
        isinstance(each, np.ndarray | torch.Tensor | dict) for each in output
    ):
        try:
            output = np.asarray(output)
        except ValueError:  # of different lengths
            return tuple(map(_tensors, output))
    if isinstance(output, np.ndarray):
        if output.dtype.kind not in "biufc":
            raise UsageError(
                f"on_pred_forward of the MainCallback gave an array of {output.dtype}, but "
                "predictions are numbers; return e.g. the indices of the classes",
                code="model-output",
            )
        return torch.from_numpy(np.ascontiguousarray(output))
    if isinstance(output, list | tuple):
        return tuple(_tensors(value) for value in output)
    if isinstance(output, dict):
        return {key: _tensors(value) for key, value in output.items()}
    return output
