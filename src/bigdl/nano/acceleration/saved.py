"""Directories of saved models.

A directory contains the files of one model and ``nano_model_meta.yml``, which has the model class
and its metadata. No file is a pickle. Loading a PyTorch graph runs code; in that case
``nano_model_meta.yml`` contains the digest of the graph and ends with the user's signature.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from bigdl.common.errors import LazyModule, UsageError, as_usage_error
from bigdl.common.private_folders import scratch_folder
from bigdl.common.storage import writing
from bigdl.common.trust import OPTIONS, digest_of, is_signed, untrusted, user_signature

yaml = LazyModule("yaml", "nano")

META_FILE = "nano_model_meta.yml"
# Metadata keys of the thread count, by runtime.
_THREADS = ("thread_num", "intra_op_num_threads", "inter_op_num_threads")
_FILES = ("checkpoint", "onnx_path", "xml_path", "weight_path", "package_path", "compile")
_DIGEST = "code_sha256"
_SIGNATURE = "signature: "


class SavedMeta(dict[str, Any]):
    """Content of ``nano_model_meta.yml``, and a check of whether code files are trusted.

    Parameters
    ----------
    text : str
        Content of the file.
    path : str or path
        Directory name for messages; empty if the model was passed as files.
    trust : bool
        True if the caller trusts the directory.
    """

    def __init__(self, text: str, path: str | os.PathLike = "", trust: bool = False):
        super().__init__(yaml.safe_load(text) or {})
        self.path, self.trust = path, trust
        signed, _, self._signature = text.rpartition(f"\n{_SIGNATURE}")
        self._signed = f"{signed}\n"

    def vouches_for(self, data: bytes) -> bool:
        """Return True if the caller trusts the directory or the signature covers these bytes."""
        return self.trust or (
            self.get(_DIGEST) == digest_of(data)
            and is_signed(_purpose(self._signed), self._signature.strip())
        )


def _purpose(text: str) -> str:
    """Prefix a text so that its signature is valid for saved models only."""
    return f"saved model\n{text}"


def write_code(file: Path, data: bytes) -> dict[str, str]:
    """Write a file with executable code; return its metadata entries."""
    file.write_bytes(data)
    return {_DIGEST: digest_of(data)}


def read_code(file: Path, meta: Mapping[str, Any], content: str) -> bytes:
    """Read a file with executable code if it is trusted.

    Parameters
    ----------
    file : Path
    meta : SavedMeta
    content : str
        Description of the content for the message, e.g. ``"a graph of TorchScript"``.

    Raises
    ------
    UsageError
        If the directory is not trusted and the file is unsigned or has changed.
    """
    data = file.read_bytes()
    if not (isinstance(meta, SavedMeta) and meta.vouches_for(data)):
        path = getattr(meta, "path", "")
        raise untrusted(Path(path, file.name), content)
    return data


def write_directory(path: str | os.PathLike, write: Callable[[Path], Mapping[str, Any]]) -> None:
    """Write a model's directory atomically.

    Parameters
    ----------
    path : str or path
        Target directory; an existing model is replaced.
    write : callable
        Called with an empty directory; writes the model's files and returns the content of
        ``nano_model_meta.yml``, ``ModelType`` first.

    Raises
    ------
    UsageError
        If the directory cannot be written.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    with as_usage_error(
        f"The model cannot be saved at {target}",
        text=attrgetter("strerror"),
        code="path-unusable",
        path=str(target),
    ):
        aside.mkdir(parents=True)
    try:
        with writing("The model", target):
            meta = dict(write(aside))
            text = yaml.safe_dump(meta, sort_keys=False)
            if _DIGEST in meta:
                text += f"{_SIGNATURE}{user_signature(_purpose(text))}\n"
            (aside / META_FILE).write_text(text, encoding="utf-8")
            _move_to_target(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def open_saved_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    thread_num: int | None = None,
    trust: bool = False,
) -> Iterator[tuple[Path, SavedMeta]]:
    """Context manager that opens the directory of a saved model.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    thread_num : int, optional
        Number of threads; overrides the saved value.
    trust : bool
        True to run code from its files without a valid signature.

    Yields
    ------
    directory : Path
    meta : SavedMeta
        The content of ``nano_model_meta.yml``.

    Raises
    ------
    UsageError
        If the directory or a file is missing, the content is invalid, or a link leads to a file
        outside the directory.
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
        meta = _read_meta(directory / META_FILE, "" if isinstance(path, Mapping) else path, trust)
        for name in (meta[key] for key in _FILES if meta.get(key) is not None):
            if not isinstance(name, str) or Path(name).name != name:
                raise UsageError(
                    f"{META_FILE} of {directory} names the file {name!r}, which is not in that "
                    "directory; save the model again",
                    code="file-damaged",
                    path=str(directory),
                )
            if not (directory / name).exists():
                raise UsageError(
                    f"File {name} is required to load model.", code="path-missing", path=name
                )
        if not trust:
            _check_links(directory)
        if thread_num is not None:
            meta |= dict.fromkeys(_THREADS, thread_num)
        yield directory, meta


def _check_links(directory: Path) -> None:
    """Raise UsageError for links to files outside the model's directory.

    A model's answers reveal its weights, and thereby the content of the linked file. Links of a
    mounted ConfigMap or Secret of Kubernetes stay within the directory.
    """
    root = directory.resolve()
    for file in directory.iterdir():
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise UsageError(
                f"{str(file)!r} is a link to a file outside of the directory of the model, whose "
                f"content the model would show; copy the file there, or pass {OPTIONS} if you "
                "trust everybody who can write it",
                code="path-unusable",
                path=str(file),
            )


class SavedModel:
    """Base class of accelerated models of all frameworks.

    Attributes
    ----------
    nano_classes : dict of str to type
        All model classes by name; saved directories store the name as ``ModelType``.
    """

    nano_classes: ClassVar[dict[str, type]] = {}

    nano_inputs: Any
    nano_outputs: Any
    nano_method: str | None
    thread_num: int | None

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        SavedModel.nano_classes[cls.__name__] = cls

    @property
    def forward_args(self) -> list[str]:
        """Names of the model's inputs."""
        return list(self.nano_inputs.names)

    def nano_describe(self) -> dict[str, Any]:
        """Return the model's metadata for its saved directory: signature, method and threads."""
        return {
            "inputs": self.nano_inputs.to_json(),
            "outputs": self.nano_outputs.to_json(),
            "method": self.nano_method,
            "thread_num": self.thread_num,
        }


def class_of(meta: Mapping, base: type, model: object, framework: str) -> Any:  # of type[base]
    """Return the class that the metadata of a saved model names.

    Raises
    ------
    UsageError
        If the class is unknown or not a subclass of `base`, the framework's model class.
    """
    model_class = SavedModel.nano_classes.get(meta["ModelType"], object)
    if not issubclass(model_class, base):
        raise UsageError(
            f"ModelType {meta['ModelType']} or argument 'model={type(model).__name__}' is not "
            f"acceptable for {framework} loading.",
            code="file-format",
        )
    return model_class


def _read_meta(file: Path, path: str | os.PathLike, trust: bool) -> SavedMeta:
    if not file.exists():
        raise UsageError(
            f"File {META_FILE} is required to load model.", code="path-missing", path=META_FILE
        )
    with as_usage_error(f"{file} cannot be read", text=str, code="file-damaged", path=str(file)):
        meta = SavedMeta(file.read_text(encoding="utf-8"), path, trust)
    if "ModelType" not in meta:
        raise UsageError(
            f"{file} has no ModelType; save the model again",
            code="file-damaged",
            path=str(file),
        )
    return meta


def _move_to_target(aside: Path, target: Path) -> None:
    """Move a complete directory to the target; delete only the directory of an earlier model."""
    if target.is_dir() and not (target / META_FILE).exists() and any(target.iterdir()):
        for file in aside.iterdir():  # the target has other files of the user
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
