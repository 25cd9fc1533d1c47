"""Models on their way to worker processes."""

from __future__ import annotations

import contextlib
import io
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bigdl.common.environment import scratch_directory
from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import InferenceContext, Settings, settings_of
from bigdl.runtime.messages import encode

__all__ = ["ready_in_worker"]


def ready_in_worker(model: torch.nn.Module, threads: int, owner: Any) -> Callable[[], Any]:
    """A function that makes a model in a worker and gives that process the model's settings.

    The model is pickled; if it cannot be, as the sessions of some runtimes, it travels as the
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
        If the model can travel in no way.
    """
    settings = settings_of(model)
    if settings.threads is not None:
        settings = replace(settings, threads=min(settings.threads, threads))
    return partial(_settle, _maker(model, owner), settings)


def _settle(make: Callable[[], Any], settings: Settings) -> Any:
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
    from bigdl.nano.pytorch import InferenceOptimizer

    if not isinstance(model, AcceleratedModel):  # its directory would hold weights only
        raise UsageError(
            f"The model cannot be sent to other processes, since it cannot be pickled: {reason!r}; "
            "accelerate it first, or create what cannot be pickled inside forward"
        )
    folder = str(scratch_directory("bigdl-model-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    source = getattr(model, "nano_source", None)
    try:
        InferenceOptimizer.save(model, folder)
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
    from bigdl.nano.pytorch import InferenceOptimizer

    return InferenceOptimizer.load(folder, model=source)


def _script_bytes(model: torch.jit.ScriptModule) -> bytes:
    file = io.BytesIO()
    torch.jit.save(model, file)
    return file.getvalue()


def _load_script(content: bytes) -> Any:
    return torch.jit.load(io.BytesIO(content))
