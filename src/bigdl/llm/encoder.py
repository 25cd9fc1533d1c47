"""Encoders and classifiers in OpenVINO: texts in, one vector or row of logits for each text out.

Texts are sorted by their number of tokens and divided into batches with a token budget, so that
batches have little padding. Rows are returned in the order of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule
from bigdl.llm.facts import NETWORK

if TYPE_CHECKING:
    import openvino as ov
    import tokenizers
else:
    ov = LazyModule("openvino", "llm")
    tokenizers = LazyModule("tokenizers", "llm")

_TOKENS_OF_BATCH = 4096  # padding included
_ROWS_OF_BATCH = 64

Text = str | tuple[str, str]
"""A text, or a pair of texts, of which a cross-encoder computes a score."""


class TextTokenizer:
    """The tokenizer of a converted folder, with its limit of tokens.

    Parameters
    ----------
    folder : Path
        Folder with ``tokenizer.json``.
    facts : mapping
        Facts of the model, see :data:`bigdl.llm.facts.FACTS`.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.max_length = int(facts["max_length"])
        self._special = self._tokenizer.num_special_tokens_to_add(False)
        self._facts = facts

    def encode(self, texts: Sequence[Text], *, truncate: bool = True) -> list[Any]:
        """Return the encodings of texts, truncated to the limit of the model by default."""
        if truncate:
            self._tokenizer.enable_truncation(self.max_length)
        else:
            self._tokenizer.no_truncation()
        prepared = [self._prepared(text) for text in texts]
        return self._tokenizer.encode_batch_fast(prepared)

    def count(self, texts: Sequence[Text]) -> int:
        """Return the number of tokens of texts, truncated to the limit of the model."""
        return sum(len(each.ids) for each in self.encode(texts))

    def _prepared(self, text: Text) -> Text:
        if isinstance(text, tuple):
            return text
        prefixed: str = self._facts["prefix"] + text
        return prefixed.lower() if self._facts["lower"] else prefixed

    def arrays(self, texts: Sequence[Text], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the padded arrays of texts, by input name."""
        return self.padded(self.encode(texts), names)

    def padded(self, encodings: Sequence[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the arrays of encodings, padded on the right."""
        longest = max(1, *(len(each.ids) for each in encodings))
        arrays = {name: np.zeros((len(encodings), longest), np.int64) for name in names}
        arrays["input_ids"][:] = self._facts["pad_token"]
        for row, each in enumerate(encodings):
            count = len(each.ids)
            arrays["input_ids"][row, :count] = each.ids
            arrays["attention_mask"][row, :count] = 1
            if "token_type_ids" in arrays:
                arrays["token_type_ids"][row, :count] = each.type_ids
        return arrays

    def batches(self, texts: Sequence[Text], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Return the arrays of texts in batches of similar length."""
        encodings = self.encode(texts)
        return [
            self.padded([encodings[row] for row in rows], names)
            for rows in length_sorted([len(each.ids) for each in encodings])
        ]


def length_sorted(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield row indices in batches of similar length, the longest rows first."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    start = 0
    while start < len(order):
        longest = max(1, lengths[order[start]])
        count = min(_ROWS_OF_BATCH, max(1, _TOKENS_OF_BATCH // longest))
        yield order[start : start + count]
        start += count


class TextEncoder:
    """A compiled encoder or classifier.

    Parameters
    ----------
    folder : Path
        Converted folder.
    facts : dict
    threads : int
        Threads, each of which runs a batch by itself.

    Attributes
    ----------
    dimension : int
        Length of a vector, or number of logits.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], threads: int):
        from bigdl.nano.openvino.network import core, read_network

        self.tokenizer = TextTokenizer(folder, facts)
        self._names = list(facts["inputs"])
        self.dimension = int(facts["dimension"])
        config = {
            "INFERENCE_PRECISION_HINT": "f32",  # bf16 is slower without AMX, and not exact
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": threads,
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled = core().compile_model(read_network(folder / NETWORK), "CPU", config)
        self._threads = threads

    def start(
        self, items: Sequence[Text], options: Mapping[str, Any], deliver: Callable[..., None]
    ) -> None:
        """Compute texts and deliver all outputs at once."""
        outputs, errors = self.run(items, **options)
        deliver(range(len(items)), outputs, errors)

    def cancel(self, deliver: Callable[..., None]) -> None:
        """Do nothing: texts are computed at once."""

    def run(self, texts: Sequence[Text], *, truncate: bool = True) -> tuple[np.ndarray, list]:
        """Return the outputs of texts in their order, and the error of each text or None.

        Parameters
        ----------
        texts : sequence of str or (str, str)
        truncate : bool
            Truncate texts that are longer than the model's limit; otherwise that is their error.
        """
        outputs = np.zeros((len(texts), self.dimension), np.float32)
        errors: list[str | None] = [None] * len(texts)
        encodings = self.tokenizer.encode(texts, truncate=truncate)
        lengths = [len(each.ids) for each in encodings]
        limit = self.tokenizer.max_length
        for row, length in enumerate(lengths):
            if length > limit:
                errors[row] = f"the text has {length} tokens, more than the model's {limit}"
        rows = [row for row, error in enumerate(errors) if error is None]
        queue = ov.AsyncInferQueue(self._compiled, self._threads)

        def store(request: ov.InferRequest, indices: list[int]) -> None:
            outputs[indices] = request.get_output_tensor(0).data

        queue.set_callback(store)
        for batch in length_sorted([lengths[row] for row in rows]):
            indices = [rows[index] for index in batch]
            arrays = self.tokenizer.padded([encodings[i] for i in indices], self._names)
            queue.start_async(arrays, indices)
        queue.wait_all()
        return outputs, errors
