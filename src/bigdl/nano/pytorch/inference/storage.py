"""Directories of saved models.

A directory holds the files of one model and ``nano_model_meta.yml``, which says which class of
model they make and all that it has to know. Nothing in it is a pickle.
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bigdl.common.errors import UsageError, require
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import Settings, remember_settings
from bigdl.nano.pytorch.inference.weights import load_weights, save_weights

__all__ = ["META_FILE", "load_model", "save_model"]

META_FILE = "nano_model_meta.yml"
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
    yaml = require("yaml", "nano")
    if compression not in _COMPRESSIONS:
        raise UsageError(f"compression must be 'fp32' or 'bf16', not {compression!r}")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"A model was to be saved, but got a {type(model).__name__}")
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UsageError(f"The model cannot be saved at {target}: {error.strerror}") from error
    try:
        if isinstance(model, AcceleratedModel):
            meta = {"ModelType": type(model).__name__, **model.save_to(aside, compression)}
        else:
            save_weights(model, aside / _WEIGHTS, compression)
            meta = {"ModelType": _PLAIN, "checkpoint": _WEIGHTS, "compression": compression}
        text = yaml.safe_dump(meta, sort_keys=False)
        (aside / META_FILE).write_text(text, encoding="utf-8")
        _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
    if isinstance(path, Mapping):
        with tempfile.TemporaryDirectory(prefix="bigdl-nano-") as directory:
            for name, file in path.items():
                inside = Path(directory, Path(name).name)
                inside.write_bytes(file.read())
            return load_model(directory, model, thread_num, **options)
    directory = Path(path)
    if not directory.exists():
        raise UsageError(f"{directory} doesn't exist.")
    meta = _read_meta(directory)
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
    for name in _files_of(meta):
        if not (directory / name).exists():
            raise UsageError(f"File {name} is required to load model.")
    if thread_num is not None:
        meta |= dict.fromkeys(_THREADS, thread_num)
    return cls.load_from(directory, meta, model=model, **options)


def _class_named(kind: str) -> type[AcceleratedModel] | None:
    from bigdl.nano.acceleration.registry import methods

    methods("torch")  # importing them defines their models, but for these
    if kind in _HOMES:
        importlib.import_module(_HOMES[kind])
    return AcceleratedModel.nano_classes.get(kind)


def _files_of(meta: Mapping) -> list[str]:
    named = ("checkpoint", "onnx_path", "xml_path", "weight_path", "package_path")
    return [meta[key] for key in named if meta.get(key)]


def _read_meta(directory: Path) -> dict:
    yaml = require("yaml", "nano")
    file = directory / META_FILE
    if not file.exists():
        raise UsageError(f"File {META_FILE} is required to load model.")
    try:
        meta = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(meta, dict) or "ModelType" not in meta:
        raise UsageError(f"{file} does not say what the model is; save the model again")
    return meta


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


def _put_in_place(aside: Path, target: Path) -> None:
    """Replace a directory by a complete one; a file or a foreign directory is not removed."""
    if target.is_dir() and not (target / META_FILE).exists() and any(target.iterdir()):
        for file in aside.iterdir():  # the user's directory with other things in it
            os.replace(file, target / file.name)
        return
    if target.exists() and not target.is_dir():
        raise UsageError(f"The model cannot be saved at {target}: that is a file")
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        os.replace(target, old / "model")
        os.replace(aside, target)
        shutil.rmtree(old)
    else:
        os.replace(aside, target)
    target.chmod(0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
