"""Saving and loading of models in directories.

:mod:`bigdl.nano.acceleration.saved` defines the format of a directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import bigdl.nano.pytorch.inference.methods  # noqa: F401 - defines the classes of saved models
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import check_threads
from bigdl.nano.acceleration.saved import class_of, open_saved_model, write_directory
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    LoadOptions,
    Settings,
    module_with_weights,
    remember_settings,
    save_weights,
)

if TYPE_CHECKING:
    from typing import BinaryIO

_COMPRESSIONS = ("fp32", "bf16")
_PLAIN = "PytorchModel"
_WEIGHTS = "saved_weight.pt"


def save_model(model: torch.nn.Module, path: str | os.PathLike, compression: str = "fp32") -> None:
    """Save a model, accelerated or not, to a directory.

    Parameters
    ----------
    model : Module
    path : str or path
        The directory; an existing model is replaced atomically.
    compression : str
        ``"fp32"``, or ``"bf16"`` for half the size.

    Raises
    ------
    UsageError
        If the compression is unknown, `model` is not a module, or the directory cannot be written.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> x = torch.tensor([[-1.0, 2.0]])
    >>> fast = InferenceOptimizer.trace(torch.nn.ReLU(), input_sample=x, accelerator="openvino")
    >>> InferenceOptimizer.save(fast, "fast_model")
    >>> InferenceOptimizer.load("fast_model")(x)
    tensor([[0., 2.]])
    """
    if compression not in _COMPRESSIONS:
        raise UsageError(
            f"compression must be 'fp32' or 'bf16', not {compression!r}",
            code="argument-value",
            argument="compression",
            allowed=["fp32", "bf16"],
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model should be a torch.nn.Module, but got a {type(model).__name__}",
            code="model-type",
        )

    def write(directory: Path) -> dict:
        if isinstance(model, AcceleratedModel):
            return {"ModelType": type(model).__name__, **model.save_to(directory, compression)}
        save_weights(model, directory / _WEIGHTS, compression)
        return {"ModelType": _PLAIN, "checkpoint": _WEIGHTS, "compression": compression}

    write_directory(path, write)


def load_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    model: torch.nn.Module | None = None,
    input_sample: object = None,
    inplace: bool = False,
    device: str | None = None,
    cache_dir: str | None = None,
    shapes: str | None = None,
    thread_num: int | None = None,
    *,
    trust: bool = False,
) -> torch.nn.Module:
    """Load a model from a directory that :func:`save_model` wrote.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    model : Module, optional
        The original. Required if the directory contains weights only. Otherwise optional: the
        loaded model forwards unknown attributes to it.
    input_sample : optional
        Sample of the input; required for models of other runtimes that were saved with
        ``compression="bf16"``.
    inplace : bool
        Load into `model` in place instead of a copy.
    device : str, optional
        OpenVINO device; overrides the saved one.
    cache_dir : str, optional
        Directory for OpenVINO's cache of compiled models.
    shapes : str, optional
        Input shapes for OpenVINO, e.g. ``"x[1,3,224,224],y[1,4]"``.
    thread_num : int, optional
        Number of threads; overrides the saved value, except for graphs compiled by TorchInductor.
    trust : bool
        True to load an unsigned or changed PyTorch graph (TorchScript or compiled code), although
        it can run arbitrary code. Not needed for weights and networks of other runtimes.

    Returns
    -------
    Module

    Raises
    ------
    UsageError
        If a file or an argument is missing, or an executable file is neither signed nor trusted.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> model = torch.nn.Linear(2, 1)
    >>> InferenceOptimizer.save(model, "plain_model")
    >>> again = InferenceOptimizer.load("plain_model", model=torch.nn.Linear(2, 1))
    >>> torch.equal(again.weight, model.weight)
    True
    """
    load_options = LoadOptions(model, input_sample, inplace, device, cache_dir, shapes)
    with open_saved_model(path, check_threads(thread_num), trust) as (directory, meta):
        if meta["ModelType"] != _PLAIN:
            model_class = class_of(meta, AcceleratedModel, model, "pytorch")
            return model_class.load_from(directory, meta, load_options)
        loaded = module_with_weights(directory / meta.get("checkpoint", _WEIGHTS), load_options)
    if thread_num is not None:
        remember_settings(loaded, Settings(threads=thread_num))
    return loaded
