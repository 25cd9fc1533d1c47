"""Directories of saved Keras models; see :mod:`bigdl.nano.acceleration.saved`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import keras

from bigdl.common.errors import UsageError, one_line
from bigdl.common.stand_ins import actual
from bigdl.nano.acceleration.saved import directory_of, read_meta, require_files, write_directory
from bigdl.nano.tf.inference import bf16_model, network_models  # noqa: F401 - define classes
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel

__all__ = ["load_model", "save_model"]

_PLAIN = "KerasModel"
_FILE = "saved_model.keras"
_COMPILED = "compile.json"


def save_model(model: Any, path: str | os.PathLike) -> None:
    """Write a model, accelerated or not, to a directory.

    Parameters
    ----------
    model : keras.Model
    path : str or path
        The directory; an earlier model in it is replaced, when the new one is complete.

    Raises
    ------
    UsageError
        If the model is none, or the directory cannot be written.
    """
    model = actual(model)
    if not isinstance(model, keras.Model):
        raise UsageError(f"A Keras model was to be saved, but got a {type(model).__name__}")

    def write(directory: Path) -> dict:
        if not isinstance(model, AcceleratedKerasModel):
            model.save(directory / _FILE)
            return {"ModelType": _PLAIN, "checkpoint": _FILE}
        meta = {"ModelType": type(model).__name__, **model.save_to(directory)}
        return meta | _write_compiled(model, directory)

    write_directory(path, write)


def load_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    model: Any = None,
    device: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    thread_num: int | None = None,
) -> Any:
    """Read a model that :func:`save_model` wrote.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    model : keras.Model, optional
        The original, whose attributes are found on the loaded one again.
    device : str, optional
        OpenVINO's device, instead of the saved one.
    custom_objects : mapping, optional
        Classes and functions by name that Keras does not know.
    thread_num : int, optional
        Threads of the model, instead of those that it was saved with.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, or it holds something else.
    """
    model = actual(model)
    with (
        directory_of(path) as directory,
        keras.saving.custom_object_scope(dict(custom_objects or {})),
    ):
        meta = read_meta(directory)
        require_files(directory, meta)
        if meta["ModelType"] == _PLAIN:
            return _load_plain(directory / meta["checkpoint"])
        cls = AcceleratedKerasModel.nano_classes.get(meta["ModelType"])
        if cls is None:
            raise UsageError(
                f"ModelType {meta['ModelType']} or argument 'model={type(model).__name__}' is not "
                "acceptable for tensorflow loading."
            )
        loaded = cls.load_from(directory, meta, model=model, device=device, threads=thread_num)
        if model is None and meta.get("compile"):
            _compile(loaded, directory / meta["compile"])
        return loaded


def _write_compiled(model: AcceleratedKerasModel, directory: Path) -> dict:
    """What the model was compiled with as JSON, so that a loaded one evaluates."""
    config = model.get_compile_config()
    if not config:
        return {}
    wanted = {key: config[key] for key in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    try:
        (directory / _COMPILED).write_text(json.dumps(wanted), encoding="utf-8")
    except TypeError:  # an object that Keras does not know how to write
        (directory / _COMPILED).unlink(missing_ok=True)
        return {}
    return {"compile": _COMPILED}


def _compile(model: AcceleratedKerasModel, file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    try:
        model.compile(**keras.saving.deserialize_keras_object(config))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The loaded model cannot be compiled as the saved one was: {one_line(error)}; pass "
            "custom_objects, or model"
        ) from error


def _load_plain(file: Path) -> Any:
    try:
        return keras.saving.load_model(file)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Keras cannot load the model: {one_line(error)}") from error
