"""Directories of saved models.

A directory holds the files of one model and ``nano_model_meta.yml``, which says which class of
model they make and all that it has to know. Nothing in it is a pickle.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.private_folders import scratch_folder
from bigdl.nano.acceleration.quiet import refusing

yaml = LazyModule("yaml", "nano")

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
    target = Path(path)
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    with refusing(
        f"The model cannot be saved at {target}",
        text=attrgetter("strerror"),
        code="path-unusable",
        path=str(target),
    ):
        aside.mkdir(parents=True)
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
            scratch = scratch_folder("nano")
            directory = Path(stack.enter_context(scratch))
            for name, file in path.items():
                (directory / Path(name).name).write_bytes(file.read())
        else:
            directory = Path(path)
            if not directory.exists():
                raise UsageError(
                    f"{directory} doesn't exist.", code="path-missing", path=str(directory)
                )
        meta = _read_meta(directory / META_FILE)
        for key in _FILES:
            if meta.get(key) and not (directory / meta[key]).exists():
                raise UsageError(
                    f"File {meta[key]} is required to load model.",
                    code="path-missing",
                    path=str(meta[key]),
                )
        if thread_num is not None:
            meta |= dict.fromkeys(_THREADS, thread_num)
        yield directory, meta


class SavedModel:
    """Base of the accelerated models of all frameworks.

    Attributes
    ----------
    nano_classes : dict of str to type
        Every class by its name, which stands in saved directories as ``ModelType``.
    """

    nano_classes: ClassVar[dict[str, type]] = {}

    nano_inputs: Any
    nano_outputs: Any
    nano_method: str | None
    thread_num: int | None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        SavedModel.nano_classes[cls.__name__] = cls

    @property
    def forward_args(self) -> list[str]:
        """Names of the inputs."""
        return list(self.nano_inputs.names)

    def nano_describe(self) -> dict[str, Any]:
        """Return facts of the wrapper for the saved directory."""
        return {
            "inputs": self.nano_inputs.to_json(),
            "outputs": self.nano_outputs.to_json(),
            "method": self.nano_method,
            "thread_num": self.thread_num,
        }


def class_of(meta: Mapping, base: type, model: Any, framework: str) -> Any:
    """Return the class of a saved model.

    Raises
    ------
    UsageError
        If the framework, whose models are of the class `base`, has no such class.
    """
    model_class = SavedModel.nano_classes.get(meta["ModelType"], object)
    if not issubclass(model_class, base):
        raise UsageError(
            f"ModelType {meta['ModelType']} or argument 'model={type(model).__name__}' is not "
            f"acceptable for {framework} loading.",
            code="file-format",
        )
    return model_class


def _read_meta(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise UsageError(
            f"File {META_FILE} is required to load model.", code="path-missing", path=META_FILE
        )
    with refusing(f"{file} cannot be read", text=str, code="file-damaged", path=str(file)):
        meta = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or "ModelType" not in meta:
        raise UsageError(
            f"{file} does not say what the model is; save the model again",
            code="file-damaged",
            path=str(file),
        )
    return meta


def _put_in_place(aside: Path, target: Path) -> None:
    """Replace a directory by a complete one; a file or a foreign directory is not removed."""
    if target.is_dir() and not (target / META_FILE).exists() and any(target.iterdir()):
        for file in aside.iterdir():  # the user's directory with other things in it
            os.replace(file, target / file.name)
        return
    if target.exists() and not target.is_dir():
        raise UsageError(
            f"The model cannot be saved at {target}: that is a file",
            code="path-unusable",
            path=str(target),
        )
    old = target.with_name(f"{aside.name}-old")
    if target.exists():
        os.replace(target, old)
    os.replace(aside, target)
    shutil.rmtree(old, ignore_errors=True)
