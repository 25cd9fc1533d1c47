"""Modules in directories and in other processes.

The format of a directory is that of :mod:`bigdl.nano.acceleration.saved`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

import bigdl.nano.pytorch.methods  # noqa: F401 - defines the classes of saved models
from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.saved import (
    META_FILE,
    directory_of,
    read_meta,
    require_files,
    write_directory,
)
from bigdl.nano.pytorch.inference.accelerated import (
    AcceleratedModel,
    InferenceContext,
    LoadOptions,
    Settings,
    module_with_weights,
    remember_settings,
    save_weights,
    settings_of,
)
from bigdl.runtime.messages import encode

__all__ = ["META_FILE", "load_model", "ready_in_worker", "save_model"]


_COMPRESSIONS = ("fp32", "bf16")
_PLAIN = "PytorchModel"
_WEIGHTS = "saved_weight.pt"
# What the runtimes call their threads.
_THREADS = ("thread_num", "intra_op_num_threads", "inter_op_num_threads")


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
        return _load_from(directory, thread_num, LoadOptions(model, **options))


def _load_from(directory: Path, thread_num: int | None, options: LoadOptions) -> torch.nn.Module:
    meta = read_meta(directory)
    model_type = meta["ModelType"]
    if model_type == _PLAIN:
        loaded = module_with_weights(directory / meta.get("checkpoint", _WEIGHTS), options)
        if thread_num is not None:
            remember_settings(loaded, Settings(threads=thread_num))
        return loaded
    model_class = AcceleratedModel.nano_classes.get(model_type)
    if model_class is None:
        raise UsageError(
            f"ModelType {model_type} or argument 'model={type(options.model).__name__}' is not "
            "acceptable for pytorch loading."
        )
    require_files(directory, meta)
    if thread_num is not None:
        meta |= dict.fromkeys(_THREADS, thread_num)
    return model_class.load_from(directory, meta, options)


def ready_in_worker(model: torch.nn.Module, threads: int, owner: Any) -> Callable[[], Any]:
    """A function that makes a model in a worker and gives that process the model's settings.

    The model is pickled; if it cannot be, as the sessions of some runtimes, it is sent as the
    files that ``InferenceOptimizer.save`` writes.

    Parameters
    ----------
    model : Module
        It stays as it is.
    threads : int
        Threads of the worker: a model that asks for more gets these.
    owner : object
        While it lives, the files stay.

    Returns
    -------
    callable
        Without arguments; to be called once in each worker.

    Raises
    ------
    UsageError
        If the model can neither be pickled nor saved.
    """
    settings = settings_of(model)
    if settings.threads is not None:
        settings = replace(settings, threads=min(settings.threads, threads))
    return partial(_ready, _maker(model, owner), settings)


def _ready(make: Callable[[], Any], settings: Settings) -> Any:
    """The model, ready for inference, in a process that does nothing else."""
    model = make()
    with contextlib.suppress(NotImplementedError):  # an exported program has one mode only
        model.eval()
    InferenceContext(settings).__enter__()  # for the life of the worker
    return model


def _maker(model: torch.nn.Module, owner: Any) -> Callable[[], Any]:
    if isinstance(model, torch.jit.ScriptModule):
        return partial(_load_script, _script_bytes(model))
    try:
        encode(model).close()
    except Exception as error:
        return _saved(model, owner, error)
    return partial(_itself, model)


def _saved(model: torch.nn.Module, owner: Any, reason: Exception) -> Callable[[], Any]:
    if not isinstance(model, AcceleratedModel):  # its directory would hold weights only
        raise UsageError(
            f"The model cannot be sent to other processes, since it cannot be pickled: {reason!r}; "
            "accelerate it first, or create what cannot be pickled inside forward"
        )
    folder = str(scratch_directory("bigdl-model-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    source = getattr(model, "nano_source", None)
    try:
        save_model(model, folder)
        with contextlib.suppress(Exception):
            encode(source).close()
            return partial(_load, folder, source, type(model))
    except Exception as error:
        raise UsageError(
            f"The model cannot be sent to other processes: pickling it failed with {reason!r}, "
            f"saving it with {error!r}"
        ) from error
    return partial(_load, folder, None, type(model))


def _itself(model: Any) -> Any:
    return model


def _load(folder: str, source: Any, kind: type) -> Any:
    """A saved model. Its class comes along so that the module that defines it is imported."""
    return load_model(folder, source)


def _script_bytes(model: torch.jit.ScriptModule) -> bytes:
    file = io.BytesIO()
    torch.jit.save(model, file)
    return file.getvalue()


def _load_script(content: bytes) -> Any:
    return torch.jit.load(io.BytesIO(content))
