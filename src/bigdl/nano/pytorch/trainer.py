"""Lightning's Trainer with the verbs of inference."""

from __future__ import annotations

from typing import Any

import torch

from bigdl.common.errors import require
from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer
from bigdl.nano.pytorch.inference.switchable import SwitchableModel

__all__ = ["Trainer"]

_lightning = require("pytorch_lightning", "nano")


class Trainer(_lightning.Trainer):
    """``pytorch_lightning.Trainer``, all of whose arguments it takes.

    What it adds are static methods of inference; :class:`InferenceOptimizer` has the same and
    more. The class is a Trainer so that a program only changes its import (Dai et al., BigDL 2.0,
    CVPR 2022).
    """

    @staticmethod
    def trace(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.trace`."""
        return InferenceOptimizer.trace(model, *args, **kwargs)

    @staticmethod
    def quantize(
        model: torch.nn.Module, *args: Any, onnx: bool = False, **kwargs: Any
    ) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.quantize`.

        Parameters
        ----------
        model : Module
            Not changed.
        onnx : bool
            Quantize for ONNX Runtime, and return a model that starts as the original and is
            switched by its ``eval_onnx`` and ``exit_onnx``.
        *args, **kwargs
            Of :meth:`InferenceOptimizer.quantize`.

        Returns
        -------
        Module
        """
        if not onnx:
            return InferenceOptimizer.quantize(model, *args, **kwargs)
        kwargs.setdefault("accelerator", "onnxruntime")
        return SwitchableModel(model, InferenceOptimizer.quantize(model, *args, **kwargs))

    @staticmethod
    def save(model: torch.nn.Module, path: Any) -> None:
        """As :meth:`InferenceOptimizer.save`."""
        InferenceOptimizer.save(model, path)

    @staticmethod
    def load(path: Any, model: torch.nn.Module | None = None, **kwargs: Any) -> torch.nn.Module:
        """As :meth:`InferenceOptimizer.load`."""
        return InferenceOptimizer.load(path, model, **kwargs)
