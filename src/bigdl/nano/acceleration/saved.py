"""Directories of saved models.

A directory holds the files of one model and ``nano_model_meta.yml``, which says which class of
model they make and all that it has to know. Nothing in it is a pickle. A graph of PyTorch runs
code when it is loaded: ``nano_model_meta.yml`` has its digest then, and ends with a signature of
the user.
"""

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
# What the runtimes call their threads.
_THREADS = ("thread_num", "intra_op_num_threads", "inter_op_num_threads")
_FILES = ("checkpoint", "onnx_path", "xml_path", "weight_path", "package_path", "compile")
_DIGEST = "code_sha256"
_SIGNATURE = "signature: "


class SavedMeta(dict[str, Any]):
    """The content of ``nano_model_meta.yml``, and whether code that it names may be run.

    Parameters
    ----------
    text : str
        Of the file.
    path : str or path
        What messages call the directory; empty if there are only files.
    trust : bool
        Whether the caller vouches for the directory.
    """

    def __init__(self, text: str, path: str | os.PathLike = "", trust: bool = False):
        super().__init__(yaml.safe_load(text) or {})
        self.path, self.trust = path, trust
        signed, _, self._signature = text.rpartition(f"\n{_SIGNATURE}")
        self._signed = f"{signed}\n"

    def vouches_for(self, data: bytes) -> bool:
        """Return True if the content of a file may be run."""
        return self.trust or (
            self.get(_DIGEST) == digest_of(data)
            and is_signed(_purpose(self._signed), self._signature.strip())
        )


def _purpose(text: str) -> str:
    """Return a text that is signed as that of a saved model, and as nothing else."""
    return f"saved model\n{text}"


def write_code(file: Path, data: bytes) -> dict[str, str]:
    """Write a file that runs code when it is loaded; return the entries of it for the meta."""
    file.write_bytes(data)
    return {_DIGEST: digest_of(data)}


def read_code(file: Path, meta: Mapping[str, Any], content: str) -> bytes:
    """Return the content of a file that runs code when it is loaded.

    Parameters
    ----------
    file : Path
    meta : SavedMeta
    content : str
        What the file holds, for the message, e.g. ``"a graph of TorchScript"``.

    Raises
    ------
    UsageError
        If no program of this user has written it, or it has changed, and nobody vouches for it.
    """
    data = file.read_bytes()
    if not (isinstance(meta, SavedMeta) and meta.vouches_for(data)):
        path = getattr(meta, "path", "")
        raise untrusted(Path(path, file.name), content)
    return data


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
            _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def open_saved_model(
    path: str | os.PathLike | Mapping[str, BinaryIO],
    thread_num: int | None = None,
    trust: bool = False,
) -> Iterator[tuple[Path, SavedMeta]]:
    """Open the directory of a saved model.

    Parameters
    ----------
    path : str, path, or dict of str to binary file
        The directory, or its files by name.
    thread_num : int, optional
        Threads of the model, instead of those that it was saved with.
    trust : bool
        Whether files in it may run code that no program of this user has signed.

    Yields
    ------
    directory : Path
    meta : SavedMeta
        The content of ``nano_model_meta.yml``.

    Raises
    ------
    UsageError
        If the directory or a file of it is missing, or it holds something else, or a link to a
        file elsewhere.
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
    """Refuse links to files elsewhere: whoever sees answers of a model can tell its weights.

    Those of a mounted ConfigMap or Secret of Kubernetes stay within the directory.
    """
    root = directory.resolve()
    for file in directory.iterdir():
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise UsageError(
                f"{str(file)!r} is a link to a file outside of the directory of the model, whose "
                f"content the model would show; copy the file there, or pass {OPTIONS} if you "
                "trust whoever can write it",
                code="path-unusable",
                path=str(file),
            )


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


def _read_meta(file: Path, path: str | os.PathLike, trust: bool) -> SavedMeta:
    if not file.exists():
        raise UsageError(
            f"File {META_FILE} is required to load model.", code="path-missing", path=META_FILE
        )
    with as_usage_error(f"{file} cannot be read", text=str, code="file-damaged", path=str(file)):
        meta = SavedMeta(file.read_text(encoding="utf-8"), path, trust)
    if "ModelType" not in meta:
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
