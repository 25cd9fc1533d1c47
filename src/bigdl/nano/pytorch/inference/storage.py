"""Directories of saved modules; see :mod:`bigdl.nano.acceleration.saved`."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.saved import (
    META_FILE,
    directory_of,
    read_meta,
    require_files,
    write_directory,
)
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import Settings, remember_settings
from bigdl.nano.pytorch.inference.weights import load_weights, save_weights

__all__ = ["META_FILE", "load_model", "save_model"]

_COMPRESSIONS = ("fp32", "bf16")
_PLAIN = "PytorchModel"
_WEIGHTS = "saved_weight.pt"
# What the runtimes call their threads.
_THREADS = ("thread_num", "intra_op_num_threads", "inter_op_num_threads")
# Modules that methods import only when they build.
_HOMES = {
    "PytorchOpenVINOModel": "bigdl.nano.pytorch.inference.openvino_model",
    "PytorchONNXRuntimeModel": "bigdl.nano.pytorch.inference.onnxruntime_model",
}


def save_model(model: torch.nn.Module, path: str | os.PathLike, compression: str = "fp32") -> None:
    """Write a model, accelerated or not, to a directory.

    Parameters
    ----------
    model : Module
    path : str or path
        The directory; an earlier model in it is replaced, when the new one is complete.
    compression : str
        ``"fp32"``, or ``"bf16"`` for half of the size.

    Raises
    ------
    UsageError
        If the compression is unknown, the model is none, or the directory cannot be written.
    """
    if compression not in _COMPRESSIONS:
        raise UsageError(f"compression must be 'fp32' or 'bf16', not {compression!r}")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"A model was to be saved, but got a {type(model).__name__}")

    def write(directory: Path) -> dict:
        if isinstance(model, AcceleratedModel):
            return {"ModelType": type(model).__name__, **model.save_to(directory, compression)}
        save_weights(model, directory / _WEIGHTS, compression)
        return {"ModelType": _PLAIN, "checkpoint": _WEIGHTS, "compression": compression}

    write_directory(path, write)


def load_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    model: torch.nn.Module | None = None,
    thread_num: int | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Read a model that :func:`save_model` wrote.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    model : Module, optional
        The original; it is not changed unless ``inplace=True``.
    thread_num : int, optional
        Threads of the model, instead of those that it was saved with.
    **options
        See ``InferenceOptimizer.load``.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, it holds something else, or `model` or the
        input's sample is needed and not given.
    """
    with directory_of(path) as directory:
        return _load_from(directory, model, thread_num, options)


def _load_from(directory: Path, model, thread_num: int | None, options: dict) -> torch.nn.Module:
    meta = read_meta(directory)
    kind = meta["ModelType"]
    if kind == _PLAIN:
        loaded = _load_plain(directory, meta, model, options.get("inplace", False))
        if thread_num is not None:
            remember_settings(loaded, Settings(threads=thread_num))
        return loaded
    cls = _class_named(kind)
    if cls is None:
        raise UsageError(
            f"ModelType {kind} or argument 'model={type(model).__name__}' is not acceptable for "
            "pytorch loading."
        )
    require_files(directory, meta)
    if thread_num is not None:
        meta |= dict.fromkeys(_THREADS, thread_num)
    return cls.load_from(directory, meta, model=model, **options)


def _class_named(kind: str) -> type[AcceleratedModel] | None:
    from bigdl.nano.acceleration.registry import methods

    methods("torch")  # importing them defines their models, but for these
    if kind in _HOMES:
        importlib.import_module(_HOMES[kind])
    return AcceleratedModel.nano_classes.get(kind)


def _load_plain(directory, meta, model, inplace):
    if model is None:
        raise UsageError(
            "You must pass model when loading a plain PyTorch model: its directory holds weights "
            "only"
        )
    file = directory / meta.get("checkpoint", _WEIGHTS)
    if not file.exists():
        raise UsageError(f"File {file.name} is required to load model.")
    return load_weights(model if inplace else copy.deepcopy(model), file)
