"""Directories of saved models.

A directory holds the files of one model and ``nano_model_meta.yml``, which says which class of
model they make and all that it has to know. Nothing in it is a pickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from bigdl.common.errors import UsageError, require

T = TypeVar("T")

META_FILE = "nano_model_meta.yml"
# What the runtimes call their threads.
_THREADS = ("thread_num", "intra_op_num_threads", "inter_op_num_threads")
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
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"The model cannot be saved at {target}: {error.strerror}") from error
    try:
        text = yaml.safe_dump(dict(write(aside)), sort_keys=False)
        (aside / META_FILE).write_text(text, encoding="utf-8")
        _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def opened(
    path: str | os.PathLike | Mapping[str, BinaryIO], thread_num: int | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Open the directory of a saved model.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    thread_num : int, optional
        Threads of the model, instead of those that it was saved with.

    Yields
    ------
    directory : Path
    meta : dict
        The content of ``nano_model_meta.yml``.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, or it holds something else.
    """
    with ExitStack() as stack:
        if isinstance(path, Mapping):
            scratch = tempfile.TemporaryDirectory(prefix="bigdl-nano-")
            directory = Path(stack.enter_context(scratch))
            for name, file in path.items():
                (directory / Path(name).name).write_bytes(file.read())
        else:
            directory = Path(path)
            if not directory.exists():
                raise UsageError(f"{directory} doesn't exist.")
        meta = _read_meta(directory / META_FILE)
        for key in _FILES:
            if meta.get(key) and not (directory / meta[key]).exists():
                raise UsageError(f"File {meta[key]} is required to load model.")
        if thread_num is not None:
            meta |= dict.fromkeys(_THREADS, thread_num)
        yield directory, meta


def class_of(meta: Mapping, classes: Mapping[str, T], model: Any, framework: str) -> T:
    """Return the class of a saved model.

    Raises
    ------
    UsageError
        If the framework has no such class.
    """
    if meta["ModelType"] not in classes:
        raise UsageError(
            f"ModelType {meta['ModelType']} or argument 'model={type(model).__name__}' is not "
            f"acceptable for {framework} loading."
        )
    return classes[meta["ModelType"]]


def _read_meta(file: Path) -> dict[str, Any]:
    yaml = require("yaml", "nano")
    if not file.exists():
        raise UsageError(f"File {META_FILE} is required to load model.")
    try:
        meta = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(meta, dict) or "ModelType" not in meta:
        raise UsageError(f"{file} does not say what the model is; save the model again")
    return meta


def _put_in_place(aside: Path, target: Path) -> None:
    """Replace a directory by a complete one; a file or a foreign directory is not removed."""
    if target.is_dir() and not (target / META_FILE).exists() and any(target.iterdir()):
        for file in aside.iterdir():  # the user's directory with other things in it
            os.replace(file, target / file.name)
        return
    if target.exists() and not target.is_dir():
        raise UsageError(f"The model cannot be saved at {target}: that is a file")
    if target.exists():
        old = target.with_name(f"{aside.name}-old")
        os.replace(target, old)
        os.replace(aside, target)
        shutil.rmtree(old)
    else:
        os.replace(aside, target)
