"""Text models of a server: encoders, classifiers and models that generate text.

The models themselves are in `bigdl.llm`, which is imported when the first text model is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from bigdl.nano.serving.signature import Signature

_HOME = "bigdl.llm.served"  # a higher package, whose class is LoadedText
_TEXT_FILES = ("bigdl_model.json", "modules.json")  # of TextModel.save and sentence-transformers


class GeneratedPart(Protocol):
    """New text of a generation; see :class:`bigdl.llm.generator.TextPart`."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def log_probs(self) -> Sequence[tuple[str, float]]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def error(self) -> str: ...


class TextGenerator(Protocol):
    """A model that generates; see :class:`bigdl.llm.generator.Generator`."""

    @property
    def waiting(self) -> int: ...
    @property
    def cache_usage(self) -> float: ...
    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        arrived: Callable[[GeneratedPart], None],
    ) -> tuple[int, Callable[[], None]]: ...


class ServedText(Protocol):
    """A loaded text model.

    Attributes
    ----------
    task : {"generate", "embed", "classify"}
    labels : list of str
        Labels of a classifier.
    precision : str
    generator : TextGenerator or None
    """

    task: str
    labels: list[str]
    precision: str
    generator: TextGenerator | None

    @property
    def scores_pairs(self) -> bool: ...
    @property
    def signature(self) -> Signature: ...
    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]: ...
    def count_tokens(self, columns: Sequence[list[str]]) -> int: ...
    def close(self) -> None: ...


def text_source(path: Path) -> Path | None:
    """Return the folder or GGUF file of the text model in a folder, or None if it has none."""
    if not path.is_dir():
        return path if path.suffix.lower() == ".gguf" else None
    if any((path / name).is_file() for name in _TEXT_FILES):
        return path
    if (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def load_text(source: Path, threads: int | None) -> ServedText:
    """Load the text model of a source of :func:`text_source`."""
    return cast(ServedText, importlib.import_module(_HOME).LoadedText(source, threads))
