"""Conversion of text columns to rows of tokens, for fine-tuning.

A row of tokens is one array of integers: ``2 * id``, plus 1 if the loss predicts the token. Rows
are padded on the right with :data:`PADDING`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError

CAUSAL, CLASSIFICATION, EMBEDDING = "causal_lm", "classification", "embedding"
TASKS = (CAUSAL, CLASSIFICATION, EMBEDDING)
PADDING = -1
TOKENS, LABELS = "bigdl tokens", "bigdl labels"


@dataclass(frozen=True)
class TextColumns:
    """Columns of a table that a fit reads.

    Attributes
    ----------
    text, prompt, completion, messages : str, optional
    labels : str, optional
        Column of the class labels, or of the texts that belong to `text`, for embeddings.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    labels: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of all columns."""
        values = (self.text, self.prompt, self.completion, self.messages, self.labels)
        return [name for name in values if name is not None]

    def check(self, task: str) -> None:
        """Raise an error if the columns do not suit the task."""
        is_pair = self.prompt is not None and self.completion is not None
        if (self.prompt is None) != (self.completion is None):
            raise UsageError(
                "prompt_col and completion_col belong together; pass both",
                code="argument-missing",
                argument="completion_col" if self.completion is None else "prompt_col",
            )
        sources = [self.text is not None, is_pair, self.messages is not None]
        if sum(sources) != 1 or (task != CAUSAL and self.text is None):
            allowed = "text_col"
            if task == CAUSAL:
                allowed = "one of text_col, prompt_col with completion_col, and messages_col"
            raise UsageError(
                f"A fit of task={task!r} needs {allowed}, got {', '.join(self.names) or 'none'}",
                code="argument-missing",
                argument="text_col",
            )
        if (task == CAUSAL) == (self.labels is not None):
            need = (
                "has no label_cols" if task == CAUSAL else "needs label_cols, the name of a column"
            )
            raise UsageError(
                f"A fit of task={task!r} {need}",
                code="argument-conflict" if task == CAUSAL else "argument-missing",
                argument="label_cols",
            )


@dataclass(frozen=True)
class RowTokenizer:
    """Conversion of rows of a table to tokens and labels.

    Attributes
    ----------
    tokenizer : transformers.PreTrainedTokenizerFast
    task : str
    columns : TextColumns
    max_length : int
        Longer rows are truncated: a prompt at its start, other texts at their end.
    chat : bool
        Whether prompts and completions get the tokenizer's chat template.
    classes : tuple of str
        Names of the classes, in their order.
    """

    tokenizer: Any
    task: str
    columns: TextColumns
    max_length: int
    chat: bool = False
    classes: tuple[str, ...] = ()

    @property
    def returns(self) -> dict[str, str]:
        """Names and Spark types of the columns that a call returns."""
        labels = "array<int>" if self.task == EMBEDDING else "bigint"
        return {TOKENS: "array<int>", LABELS: labels}

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
        """Return the tokens and labels of rows.

        Parameters
        ----------
        rows : mapping of str to sequence
            Values by column.

        Raises
        ------
        UsageError
            If a value is null or of another type.
        """
        if self.task == CAUSAL:
            tokens = self._causal(rows)
            return {TOKENS: tokens, LABELS: labelled(tokens).sum(1)}
        texts = self._texts(rows, str(self.columns.text))
        tokens = self._matrix([(ids, 0) for ids in self._ids(texts)])
        name = str(self.columns.labels)
        if self.task == EMBEDDING:
            others = self._ids(self._texts(rows, name))
            return {TOKENS: tokens, LABELS: self._matrix([(ids, 0) for ids in others])}
        index = {label: number for number, label in enumerate(self.classes)}
        labels = [self._class(index, name, value) for value in rows[name]]
        return {TOKENS: tokens, LABELS: np.array(labels, np.int64)}

    def _class(self, index: Mapping[str, int], name: str, value: object) -> int:
        label = label_text(value)
        if label is None or label not in index:
            raise UsageError(
                f"Column '{name}' holds {value!r}, which is no label of the model; it has "
                f"{', '.join(map(repr, self.classes))}",
                code="data-value",
                column=name,
            )
        return index[label]

    def _texts(self, rows: Mapping[str, Sequence[Any]], name: str) -> list[str]:
        values = list(rows[name])
        for value in values:
            if not isinstance(value, str):
                is_null = value is None or value != value
                raise UsageError(
                    f"Column '{name}' holds {'nulls' if is_null else repr(value)}; a fit needs a "
                    "string in every row: drop or fill the others first",
                    code="data-null" if is_null else "data-dtype",
                    column=name,
                )
        return values

    def _ids(self, texts: list[str], *, special: bool = True) -> list[list[int]]:
        """Return the truncated token ids of texts."""
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special,
            truncation=special,
            max_length=self.max_length if special else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(encoded["input_ids"])

    def _causal(self, rows: Mapping[str, Sequence[Any]]) -> np.ndarray:
        columns, eos = self.columns, self.tokenizer.eos_token_id
        if columns.text is not None:
            encoded = []
            for ids in self._ids(self._texts(rows, columns.text)):
                if eos is not None and ids[-1:] != [eos] and len(ids) < self.max_length:
                    ids = [*ids, eos]
                encoded.append((ids, len(ids) - 1))
            return self._matrix(encoded)
        if columns.messages is not None or self.chat:
            return self._matrix([self._chat(each) for each in self._conversations(rows)])
        prompts = self._texts(rows, str(columns.prompt))
        completions = self._texts(rows, str(columns.completion))
        encoded = []
        starts, ends = self._ids_whole(prompts), self._ids(completions, special=False)
        for start, end in zip(starts, ends, strict=True):
            end = [*end, *([] if eos is None else [eos])]
            encoded.append(self._joined(start, end))
        return self._matrix(encoded)

    def _ids_whole(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return list(self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"])

    def _joined(self, start: list[int], end: list[int]) -> tuple[list[int], int]:
        """Return the ids of a prompt and its completion, and the number of labels."""
        end = end[: self.max_length - 1]
        start = start[max(0, len(start) + len(end) - self.max_length) :]
        return [*start, *end], len(end) if start else len(end) - 1

    def _conversations(self, rows: Mapping[str, Sequence[Any]]) -> list[list[dict]]:
        columns = self.columns
        if columns.messages is None:
            prompts = self._texts(rows, str(columns.prompt))
            completions = self._texts(rows, str(columns.completion))
            return [
                [{"role": "user", "content": p}, {"role": "assistant", "content": c}]
                for p, c in zip(prompts, completions, strict=True)
            ]
        return [_messages(value, columns.messages) for value in rows[columns.messages]]

    def _chat(self, messages: list[dict]) -> tuple[list[int], np.ndarray]:
        """Return the ids of a conversation, and a mask of those that the assistant writes."""
        known: list[int] = []
        mask: list[bool] = []
        for number, message in enumerate(messages, 1):
            is_answer = message["role"] == "assistant"
            if is_answer:
                ids = self._rendered(messages[: number - 1], add_generation_prompt=True)
                self._check_prefix(known, ids)
                mask += [False] * (len(ids) - len(known))
                known = ids
            elif number < len(messages):
                continue
            ids = self._rendered(messages[:number])
            self._check_prefix(known, ids)
            mask += [is_answer] * (len(ids) - len(known))
            known = ids
        mask[0:1] = [False]
        first = max(0, len(known) - self.max_length)
        if first:  # the first turns are dropped
            mask[first] = False
        return known[first:], np.array(mask[first:], bool)

    def _rendered(self, messages: list[dict], **options: bool) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True, **options)
        return list(ids["input_ids"] if isinstance(ids, Mapping) or hasattr(ids, "keys") else ids)

    def _check_prefix(self, start: list[int], ids: list[int]) -> None:
        if ids[: len(start)] != start:
            raise UsageError(
                "The chat template of the tokenizer changes earlier messages when others follow, "
                "so the tokens of the answers are unknown; pass prompt_col and completion_col "
                "with chat=False",
                code="unsupported",
                argument="messages_col",
            )

    def _matrix(self, rows: Sequence[tuple[list[int], Any]]) -> np.ndarray:
        """Return ids and labels as a padded matrix.

        Parameters
        ----------
        rows : sequence of (list of int, int or ndarray)
            Ids, and the number of labels at their end, or a mask of the labels.
        """
        matrix = np.full((len(rows), self.max_length), PADDING, np.int32)
        for row, (ids, labels) in zip(matrix, rows, strict=True):
            size = len(ids)
            row[:size] = ids
            row[:size] *= 2
            if isinstance(labels, np.ndarray):
                row[:size] += labels
            elif labels > 0:
                row[size - labels : size] += 1
        return matrix


def label_text(value: object) -> str | None:
    """Return the name of a class label, or None for a null."""
    if value is None or value != value:
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value)


def _messages(cell: object, name: str) -> list[dict]:
    """Return the messages of a cell: a JSON string, or a list of dicts or rows."""
    value: Any = cell
    try:
        if isinstance(cell, str | bytes):
            value = json.loads(cell)
        messages = [dict(each.asDict() if hasattr(each, "asDict") else each) for each in value]
        if messages and all({"role", "content"} <= set(each) for each in messages):
            return messages
    except (ValueError, TypeError):
        pass
    shown = "".join(itertools.islice(repr(cell), 80))
    raise UsageError(
        f"Column '{name}' holds {shown}; a conversation is a list of messages with role and "
        "content, or its JSON",
        code="data-value",
        column=name,
    )


def labelled(tokens: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens that the loss predicts."""
    return (tokens >= 0) & ((tokens & 1) == 1)
