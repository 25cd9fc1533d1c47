"""The forms in which Keras models and weights are on disk.

A whole model is a file of Keras (``.keras``, a zip), a file of HDF5, or a folder with a SavedModel
for serving and a ``model.keras`` beside it.  Which one is written is told by the name, or by
``save_format`` where the name has no suffix of its own; which one is read, by the content alone.
"""

from __future__ import annotations

import posixpath
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.training.checkpoint import file_exists, read_bytes

__all__ = [
    "WHOLE",
    "check_place",
    "form_to_write",
    "read_weights",
    "read_whole",
    "short_names",
]

WHOLE = "model.keras"
"""The file of the whole model in a folder."""

_SUFFIXES = {".keras": "keras", ".h5": "h5", ".hdf5": "h5"}
_FILES = {"keras": "a file of Keras", "h5": "a file of HDF5", "tf": "a folder"}
_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"


def form_to_write(filepath: str, save_format: str | None) -> str:
    """``"keras"``, ``"h5"`` or ``"tf"``, a folder.

    Raises
    ------
    UsageError
        For another `save_format`, or one that the suffix of `filepath` contradicts.
    """
    if save_format not in (None, *_FILES):
        raise UsageError(f'save_format should be "keras", "h5" or "tf", got {save_format!r}')
    named = _SUFFIXES.get(posixpath.splitext(filepath)[1])
    if None not in (named, save_format) and named != save_format:
        raise UsageError(
            f"save_format={save_format!r} means {_FILES[save_format]} and the name {filepath!r} "
            f"{_FILES[named]}; leave save_format out, or choose a name without this suffix"
        )
    return save_format or named or "tf"


def check_place(filepath: str, *, overwrite: bool = True, is_folder: bool = False) -> None:
    """Refuse a path where nothing may be written, or nothing of this kind can be."""
    import fsspec

    fs, inner = fsspec.core.url_to_fs(filepath)
    if not fs.exists(inner):
        return
    if not overwrite:
        raise UsageError(f"{filepath!r} is there already; pass overwrite=True")
    if fs.isfile(inner) == is_folder:
        there, new = ("file", "folder") if is_folder else ("folder", "file")
        raise UsageError(
            f"{filepath!r} is a {there}, and a {new} was to be written; remove it, or choose "
            "another name"
        )


def read_whole(filepath: str) -> tuple[bytes, str]:
    """The file of a whole model, or of the one in a folder, and the suffix that it should have.

    Raises
    ------
    UsageError
        If there is none.
    """
    where = filepath
    if _is_folder(filepath):
        where = posixpath.join(filepath, WHOLE)
        if not file_exists(where):
            raise UsageError(_no_model_in(filepath))
    data = read_bytes(where)
    suffix = _suffix_of(data)
    if not suffix:
        raise UsageError(
            f"{where!r} is not a model that can be loaded: it is neither a file of Keras nor one "
            "of HDF5"
        )
    return data, suffix


def read_weights(filepath: str) -> tuple[bytes, str]:
    """The file of weights or of a whole model, and the suffix that Keras knows it by.

    Raises
    ------
    UsageError
        If there is none.
    """
    if not file_exists(filepath):
        if file_exists(f"{filepath}.index"):
            raise UsageError(
                f"The weights in {filepath!r} cannot be loaded: they are a checkpoint of "
                "TensorFlow, which Keras 3 does not read; load them with tf_keras (the Keras of "
                "TensorFlow before 2.16) and write them by save_weights to a file .weights.h5"
            )
        if _is_folder(filepath):
            raise UsageError(
                f"The weights in {filepath!r} cannot be loaded: it is a folder; use load for a "
                "whole model and load_checkpoint for a checkpoint"
            )
    data = read_bytes(filepath)
    suffix = _suffix_of(data)
    if not suffix:
        raise UsageError(
            f"The weights in {filepath!r} cannot be loaded: it is neither a file of Keras nor one "
            "of HDF5"
        )
    return data, suffix if suffix == ".keras" or _is_of_keras_2(data) else ".weights.h5"


def short_names() -> dict[str, Any]:
    """Losses by names that a file of HDF5 may hold and Keras does not find there."""
    import keras

    return {name: keras.losses.get(name) for name in ("mse", "mae", "mape", "msle")}


def _suffix_of(data: bytes) -> str:
    """``.keras`` or ``.h5``, or nothing for a content of neither kind."""
    if data.startswith(_ZIP):
        return ".keras"
    return ".h5" if data.startswith(_HDF5) else ""


def _is_of_keras_2(data: bytes) -> bool:
    """Whether a file of HDF5 has the layout of Keras 2, as that of a whole model always has."""
    import io

    import h5py

    try:
        with h5py.File(io.BytesIO(data)) as file:
            return "layer_names" in file.attrs or "model_weights" in file
    except OSError:  # cut off; loading it tells
        return False


def _is_folder(filepath: str) -> bool:
    import fsspec

    # some stores take long to tell that a file is no folder
    if file_exists(filepath):
        return False
    fs, inner = fsspec.core.url_to_fs(filepath)
    return fs.isdir(inner)


def _no_model_in(folder: str) -> str:
    if file_exists(posixpath.join(folder, "saved_model.pb")):
        return (
            f"{folder!r} is a SavedModel, which Keras 3 cannot load as a model; load it with "
            "tf_keras (the Keras of TensorFlow before 2.16), save it to a file .h5 and load that "
            "with compile=False, or put it into a model as keras.layers.TFSMLayer, which predicts "
            "only"
        )
    return (
        f"{folder!r} is not a model that can be loaded: the folder holds no {WHOLE}; use "
        "load_checkpoint for a checkpoint of fit"
    )
