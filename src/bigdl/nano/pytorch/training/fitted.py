"""What is still at hand after a fit: the loader that it had, to quantize what it has trained."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import TorchSource

__all__ = ["OfClassOrTrainer", "fitted_loader", "quantize_arguments", "quantize_source"]


class OfClassOrTrainer(staticmethod):
    """A static method that gets the trainer it is called on, if any, as its keyword `trainer`."""

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        function = super().__get__(trainer, kind)
        if trainer is None:
            return function
        return functools.update_wrapper(functools.partial(function, trainer=trainer), function)


def fitted_loader(trainer: Any) -> DataLoader | None:
    """The loader of a trainer's last fit; None if it had none, or several."""
    source = getattr(trainer.strategy, "fitted_on", None)
    if hasattr(source, "train_dataloader"):  # a LightningModule or a LightningDataModule
        # One that was set up in other processes may have none here.
        with suppress(Exception):
            source = source.train_dataloader()
    return source if isinstance(source, DataLoader) else None


def quantize_arguments(
    model: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], trainer: Any = None
) -> dict[str, Any]:
    """Arguments of ``InferenceOptimizer.quantize`` by name.

    Parameters
    ----------
    model, args, kwargs
        As they were given.
    trainer : Trainer, optional
        The loader of its last fit is the calibration data, where some are of use and none are
        given.
    """
    bound = inspect.signature(InferenceOptimizer.quantize).bind(model, *args, **kwargs)
    arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    arguments.pop("kwargs", None)
    is_int8 = arguments.get("precision", "int8") == "int8"
    if trainer is not None and is_int8 and _data_of(arguments) is None:
        arguments["calib_data"] = fitted_loader(trainer)
    return arguments


def quantize_source(arguments: Mapping[str, Any]) -> TorchSource:
    """The model of such arguments, with whatever holds a sample of its input."""
    named = arguments.get("example_kwarg_inputs")
    sample = arguments.get("input_sample")
    return TorchSource(arguments["model"], sample, named, _data_of(arguments))


def _data_of(arguments: Mapping[str, Any]) -> Any:
    data = arguments.get("calib_data")
    return arguments.get("calib_dataloader") if data is None else data
