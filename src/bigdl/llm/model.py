"""``TextModel``: a language or embedding model in a folder, converted once into a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.common.private_folders import private_cache
from bigdl.llm.conversion import convert_decoder, convert_encoder, link_gguf, task_of
from bigdl.llm.engine import ModelReference
from bigdl.llm.facts import FACTS, GENERATE, TASKS
from bigdl.llm.sent_files import locked_model

logger = logging.getLogger("bigdl.llm")

PRECISIONS = ("auto", "fp32", "int8", "int4")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HASHED = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".xml", ".gguf")
_CONVERSION = "1"  # changes with each incompatible change of the converted files


class TextModel:
    """A language or embedding model with its tokenizer, for :func:`embed` and its siblings.

    The files are converted to OpenVINO once, into ``~/.cache/bigdl/llm``, by a key of their
    content. Nothing is downloaded, unless `folder` is the id of a model on the Hugging Face hub.

    Parameters
    ----------
    folder : str or Path
        Folder with the files of a Hugging Face model (also of sentence-transformers), a GGUF file,
        a folder that :meth:`save` wrote, or the id of a model on the hub.
    precision : {"auto", "fp32", "int8", "int4"}
        Precision of the weights. ``"auto"`` is int8 for models that generate and fp32 for others.
        int8 encoders also have int8 activations. A GGUF file keeps its precision.
    task : {"generate", "embed", "classify"}, optional
        Default: by the files.
    calibration : list of str, optional
        Typical texts for the activations of an int8 encoder; default: 128 English paragraphs.

    Attributes
    ----------
    task : str
    precision : str
    digest : str
        Hash of the model's files and its precision.
    path : Path
        Folder of the converted files.
    labels : list of str
        Labels of a classifier.

    Raises
    ------
    UsageError
        If the files cannot be read, or the model is not supported.

    Examples
    --------
    >>> from bigdl.llm import TextModel
    >>> model = TextModel("all-MiniLM-L6-v2", precision="int8")  # doctest: +SKIP
    >>> model.save("minilm-int8")  # loads without PyTorch  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        precision: str = "auto",
        *,
        task: str | None = None,
        calibration: Sequence[str] | None = None,
    ):
        check_choice("precision", precision, PRECISIONS)
        if task is not None:
            check_choice("task", task, TASKS)
        source = _local_source(folder)
        saved = source / FACTS
        if saved.exists():
            self._open(source)
            if precision not in ("auto", self.precision):
                raise UsageError(
                    f"{str(source)!r} was saved in {self.precision}; leave precision= out, or pass "
                    "the original files",
                    code="argument-conflict",
                    argument="precision",
                )
            return
        self._open(_converted(source, precision, task, calibration))

    def _open(self, path: Path) -> None:
        with as_usage_error(f"{str(path)!r} is damaged", code="file-damaged", path=str(path)):
            facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        self.path, self.facts = path, facts
        self.task, self.precision = str(facts["task"]), str(facts["precision"])
        self.digest = str(facts["digest"])
        self.labels = list(facts.get("labels", ()))

    def __repr__(self) -> str:
        return f"TextModel({str(self.path)!r}, task={self.task!r}, precision={self.precision!r})"

    def reference(self) -> ModelReference:
        """Return a picklable reference to the converted files."""
        return ModelReference(str(self.path), self.facts)

    def save(self, folder: str | os.PathLike) -> None:
        """Copy the converted files to a new folder, which loads without PyTorch.

        Parameters
        ----------
        folder : str or Path
            A folder that does not exist, or is empty.

        Raises
        ------
        UsageError
            If the folder is not empty.
        """
        target = Path(folder)
        if target.exists() and any(target.iterdir()):
            raise UsageError(
                f"{str(target)!r} is not empty; choose another folder",
                code="path-exists",
                path=str(target),
            )
        shutil.copytree(self.path, target, dirs_exist_ok=True)


def _local_source(folder: str | os.PathLike) -> Path:
    """Return the folder or GGUF file on this machine, downloaded if it is the id of a model."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(
            f"A model is a folder, a GGUF file or a hub id, got {type(folder).__name__}",
            code="argument-type",
            argument="folder",
        )
    path = Path(folder).expanduser()
    if path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path
    if path.exists():
        raise UsageError(
            f"{str(path)!r} is neither a folder nor a GGUF file", code="file-format", path=str(path)
        )
    name = os.fspath(folder)
    if not _HUB_ID.fullmatch(name):
        raise UsageError(
            f"There is no folder or GGUF file {str(path)!r}", code="path-missing", path=str(path)
        )
    hub = require("huggingface_hub", "llm")
    logger.info("Downloading %s from the Hugging Face hub, unless it is in its cache", name)
    with as_usage_error(
        f"There is no folder {name!r} here, and the hub has no such model or cannot be reached",
        code="path-missing",
        path=name,
    ):
        return Path(hub.snapshot_download(name))


def _digest(source: Path, *settings: str) -> str:
    """Return the hash of a model's files and settings."""
    total = hashlib.blake2b(digest_size=16)
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    safe = any(each.suffix == ".safetensors" for each in files)
    for each in files:
        name = each.relative_to(source).as_posix()
        hidden = any(part.startswith(".") for part in each.relative_to(source).parts)
        if hidden or each.suffix.lower() not in _HASHED or (safe and each.suffix == ".bin"):
            continue
        failure = f"{str(each)!r} cannot be read"
        with (
            as_usage_error(failure, code="path-unusable", path=str(each)),
            each.open("rb") as file,
        ):
            content = hashlib.file_digest(file, "blake2b").hexdigest()
        total.update(f"{name}\0{content}\0".encode())
    total.update(repr((_CONVERSION, settings)).encode())
    return total.hexdigest()


def _converted(
    source: Path, precision: str, task: str | None, calibration: Sequence[str] | None
) -> Path:
    """Return the folder of the cache with the converted model, which is created if needed."""
    task = task or (GENERATE if source.is_file() else task_of(source))
    precision = _resolved_precision(source, precision, task)
    texts = json.dumps(list(calibration)) if calibration is not None else ""
    digest = _digest(source, task, precision, texts)
    cache = private_cache("llm")
    target = cache / digest
    with locked_model(cache, digest):
        if (target / FACTS).exists():
            return target
        logger.info("Converting %s to OpenVINO in %s, once, into %s", source, precision, target)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as scratch:
            new = Path(scratch, "model")
            new.mkdir()
            facts = _convert(source, new, task, precision, calibration)
            facts = {**facts, "task": task, "precision": precision, "digest": digest}
            (new / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(new, target)
    return target


def _convert(
    source: Path, new: Path, task: str, precision: str, calibration: Sequence[str] | None
) -> dict[str, Any]:
    if source.is_file():
        return link_gguf(source, new)
    if task == GENERATE:
        return convert_decoder(source, new, precision)
    return convert_encoder(source, new, task, precision, calibration)


def _resolved_precision(source: Path, precision: str, task: str) -> str:
    if source.is_file():
        if precision == "auto":
            return "gguf"
        raise UsageError(
            f"{str(source)!r} has the precision that it was written with; leave precision= out, or "
            "pass the original Hugging Face folder",
            code="argument-conflict",
            argument="precision",
        )
    if precision == "auto":
        return "int8" if task == GENERATE else "fp32"
    if precision == "int4" and task != GENERATE:
        raise UsageError(
            f"int4 is for models that generate text; {str(source)!r} is for {task!r}; use "
            "precision='int8'",
            code="argument-conflict",
            argument="precision",
        )
    return precision
