"""Prediction by the ``on_pred_forward`` of a MainCallback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.runner import Runner

__all__ = ["predicting_parts"]


def predicting_parts(parts: ModelParts, main) -> ModelParts:
    """Parts whose model calls `main` instead of the user's model."""
    inner = replace(parts, loss=None, optimizer=None, scheduler_creator=None)
    return ModelParts(_Creator(inner, main), config=parts.config)


@dataclass
class _Creator:
    parts: ModelParts
    main: Any

    def __call__(self, config):
        return _Predicting(self.parts.build_model(), self.main, config)


@dataclass
class _Alone:
    """Stands for the worker: rows are predicted by many tasks that know nothing of each other."""

    rank: int = 0
    world_size: int = 1


class _Predicting(torch.nn.Module):
    """The user's model, called by a MainCallback; its state is that of the model."""

    def __init__(self, model, main, config):
        super().__init__()
        self.model = model
        self._runner = Runner(_Alone(), config, [main])
        self._runner.model = model

    def forward(self, *features):
        runner = self._runner
        runner.batch, runner.output = list(features), None
        runner.device = next((p.device for p in self.model.parameters()), None)
        runner.main.on_pred_forward(runner)
        if runner.output is None:
            raise UsageError("on_pred_forward of the MainCallback must set runner.output")
        return _tensors(runner.output)

    def state_dict(self, *args, **options):
        return self.model.state_dict(*args, **options)

    def load_state_dict(self, state, *args, **options):
        return self.model.load_state_dict(state, *args, **options)


def _tensors(output):
    """Arrays as tensors, in lists, tuples and dicts too."""
    if isinstance(output, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(output))
    if isinstance(output, list | tuple):
        return tuple(_tensors(value) for value in output)
    if isinstance(output, dict):
        return {key: _tensors(value) for key, value in output.items()}
    return output
