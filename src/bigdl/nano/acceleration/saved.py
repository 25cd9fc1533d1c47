"""Directories of saved models.

A directory holds the files of one model and ``nano_model_meta.yml``, which says which class of
model they make and all that it has to know. Nothing in it is a pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bigdl.common.errors import UsageError, require

__all__ = ["META_FILE", "directory_of", "read_meta", "require_files", "write_directory"]

META_FILE = "nano_model_meta.yml"
_FILES = ("checkpoint", "onnx_path", "xml_path", "weight_path", "package_path")


def write_directory(path: str | os.PathLike, write: Callable[[Path], Mapping[str, Any]]) -> None:
    """Make a directory of a model; it appears when it is complete.

    Parameters
    ----------
    path : str or path
        An earlier model there is replaced.
    write : callable
        Called with an empty directory, writes the model's files and returns what goes into
        ``nano_model_meta.yml``, ``ModelType`` first.

    Raises
    ------
    UsageError
        If the directory cannot be written.
    """
    yaml = require("yaml", "nano")
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise UsageError(f"The model cannot be saved at {target}: {error.strerror}") from error
    try:
        text = yaml.safe_dump(dict(write(aside)), sort_keys=False)
        (aside / META_FILE).write_text(text, encoding="utf-8")
        _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def directory_of(path: str | os.PathLike | Mapping[str, BinaryIO]) -> Iterator[Path]:
    """The directory of a saved model, while the context lasts.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.

    Raises
    ------
    UsageError
        If it does not exist.
    """
    if isinstance(path, Mapping):
        with tempfile.TemporaryDirectory(prefix="bigdl-nano-") as scratch:
            for name, file in path.items():
                Path(scratch, Path(name).name).write_bytes(file.read())
            yield Path(scratch)
        return
    directory = Path(path)
    if not directory.exists():
        raise UsageError(f"{directory} doesn't exist.")
    yield directory


def read_meta(directory: Path) -> dict:
    """Return the content of ``nano_model_meta.yml``.

    Raises
    ------
    UsageError
        If it is missing or cannot be read.
    """
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


def require_files(directory: Path, meta: Mapping[str, Any]) -> None:
    """Refuse a directory that lacks a file which its description names.

    Raises
    ------
    UsageError
    """
    for key in _FILES:
        if meta.get(key) and not (directory / meta[key]).exists():
            raise UsageError(f"File {meta[key]} is required to load model.")


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
