"""Text models that a model server loads: their inputs and outputs, and their threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bigdl.common.cpu import usable_cores
from bigdl.common.errors import UsageError
from bigdl.llm.encoder import Text, TextEncoder
from bigdl.llm.facts import GENERATE
from bigdl.llm.generator import Generator
from bigdl.llm.model import TextModel
from bigdl.nano.serving.signature import Signature, TensorSpec

_NEW_TOKENS = 64  # of an answer by the Open Inference Protocol, which has no field for it


class LoadedText:
    """A loaded text model.

    Parameters
    ----------
    source : Path
        Folder or GGUF file. Hugging Face files are converted once, into the cache of
        :class:`bigdl.llm.TextModel`.
    threads : int, optional
        Threads of the model. Default: the cores of this process.

    Attributes
    ----------
    task : {"generate", "embed", "classify"}
    labels : list of str
        Labels of a classifier.
    precision : str
    generator : Generator or None
    encoder : TextEncoder or None
    """

    def __init__(self, source: Path, threads: int | None = None):
        model = TextModel(source)
        self.task, self.labels, self.precision = model.task, model.labels, model.precision
        self.generator: Generator | None = None
        self.encoder: TextEncoder | None = None
        threads = threads or len(usable_cores())
        if self.task == GENERATE:
            self.generator = Generator(model.path, model.facts, threads)
        else:
            self.encoder = TextEncoder(model.path, model.facts, threads)

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder, which computes the score of a query and a text."""
        return len(self.labels) == 1

    @property
    def signature(self) -> Signature:
        """Inputs and outputs by the Open Inference Protocol."""
        texts, numbers = np.dtype(object), np.dtype("float32")
        names = ["query", "text"] if self.scores_pairs else ["text"]
        inputs = tuple(TensorSpec(name, texts, (-1,)) for name in names)
        if self.encoder is None:
            return Signature(inputs, (TensorSpec("answer", texts, (-1,)),))
        name = "logits" if self.labels else "embedding"
        shape = (-1, self.encoder.dimension)
        return Signature(inputs, (TensorSpec(name, numbers, shape),))

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Compute embeddings, logits or answers of UTF-8 texts.

        Raises
        ------
        UsageError
            If a text is not valid UTF-8, or too long for a model that generates.
        """
        columns = [[_decoded(each) for each in array] for array in arrays]
        if self.encoder is not None:
            texts: Sequence[Text] = columns[0]
            if self.scores_pairs:
                texts = list(zip(*columns, strict=True))
            outputs, errors = self.encoder.run(texts)
            _check(errors)
            return [outputs]
        assert self.generator is not None
        answers = np.empty(len(columns[0]), object)
        reasons: list[str | None] = []
        finished = threading.Event()

        def deliver(rows: Sequence[int], values: Sequence, errors: Sequence[str | None]) -> None:
            for row, value, error in zip(rows, values, errors, strict=True):
                answers[row] = b"" if error is not None else value.text.encode()
                reasons.append(error)
            if len(reasons) == len(answers):
                finished.set()

        self.generator.start(columns[0], {"max_new_tokens": _NEW_TOKENS}, deliver)
        finished.wait()
        _check(reasons)
        return [answers]

    def count_tokens(self, columns: Sequence[list[str]]) -> int:
        """Return the number of tokens of texts, or of pairs of texts."""
        assert self.encoder is not None
        texts: Sequence[Text] = columns[0]
        if len(columns) > 1:
            texts = list(zip(*columns, strict=True))
        return self.encoder.tokenizer.count(texts)

    def close(self) -> None:
        """End the threads of the model."""
        if self.generator is not None:
            self.generator.close()


def _decoded(value: object) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode()  # type: ignore[call-overload, no-any-return]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"A text is not valid UTF-8 at byte {error.start}", code="request-invalid"
        ) from None


def _check(errors: Sequence[str | None]) -> None:
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        raise UsageError(f"A text cannot be computed: {first}", code="request-invalid")
