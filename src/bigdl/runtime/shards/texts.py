"""Texts among the columns of a feed, for models that look them up or cut them in words themselves.

A text travels as its UTF-8 bytes, filled up with zero bytes to the width of its chunk: numpy's
dtype ``S16`` and the like.  Widths are powers of two, so that chunks seldom differ, and a spool has
that of its widest chunk.  Fixed widths keep a batch a slice and a shuffled batch a gather; a column
of a few very long texts among short ones pays for them with its size.

Only who can give texts to a model asks for them, by :func:`with_texts`; all others refuse them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.runtime.shards.feed import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

TEXT = "S"
"""The dtype of a column of texts of any width."""

_ASKED = "bigdl.texts"
_NARROWEST, _WIDEST = 8, 1 << 16  # bytes


def with_texts(config: dict[str, Any] | None) -> dict[str, Any]:
    """The config of a feed or a prediction whose model may take texts."""
    return {**(config or {}), _ASKED: True}


def takes_texts(config: dict[str, Any] | None) -> bool:
    """Return True if texts were asked for."""
    return bool((config or {}).get(_ASKED))


def is_text(dtype: str) -> bool:
    """Return True if a leaf of that dtype holds texts."""
    return dtype.startswith(TEXT)


def name_of_dtype(array: np.ndarray) -> str:
    """The dtype of a leaf; ``S16`` for texts, which numpy does not understand by its own name."""
    return f"{TEXT}{array.itemsize}" if array.dtype.kind == TEXT else array.dtype.name


def encoded(texts: pa.Array, name: str) -> np.ndarray:
    """An Arrow array of strings without nulls as an array of one width.

    Parameters
    ----------
    texts : pyarrow.StringArray or pyarrow.LargeStringArray
    name : str
        Of the column, for messages.

    Raises
    ------
    SourceError
        For a zero byte in a text, which would be lost, and for a text that is too long.
    """
    wide = str(texts.type).startswith("large")
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return np.zeros(len(texts), f"{TEXT}{_NARROWEST}")
    start, stop = texts.offset, texts.offset + len(texts)
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[start : stop + 1]
    used = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    if not used.all():
        raise SourceError(
            f"Column '{name}' holds a text with the character U+0000; remove it",
            code="data-value",
            column=name,
        )
    lengths = np.diff(ends)
    longest = int(lengths.max())
    if longest > _WIDEST:
        raise SourceError(
            f"Column '{name}' holds a text of {longest} bytes, and all rows would take as much; "
            f"cut its texts to {_WIDEST} bytes first",
            code="data-size",
            column=name,
        )
    width = max(_NARROWEST, 1 << (longest - 1).bit_length())
    cells = np.zeros((len(texts), width), np.uint8)
    cells[np.arange(width) < lengths[:, None]] = used
    return cells.view(f"{TEXT}{width}")[:, 0]


def are_texts(values: np.ndarray) -> bool:
    """Return True for an array of texts; of objects the first that is not missing decides."""
    if values.dtype.kind == "O":
        first = next((each for each in values.flat if not _is_missing(each)), None)
        return isinstance(first, str | bytes)
    return values.dtype.kind in "US"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def text_array(values: np.ndarray, name: str) -> np.ndarray:
    """Texts of a numpy array, of any shape.

    Parameters
    ----------
    values : ndarray of str, bytes or objects that are such
    name : str
        For messages.

    Raises
    ------
    SourceError
        For anything but texts among them, and what :func:`encoded` refuses.
    """
    import pyarrow as pa

    flat = values.reshape(-1).tolist()
    missing = sum(map(_is_missing, flat))
    if missing:
        raise SourceError(
            f"Column {name} holds nulls ({missing} of {len(flat)}); fill or drop them first",
            code="data-null",
        )
    try:
        texts = pa.array(flat, pa.large_string())
    except (pa.ArrowTypeError, pa.ArrowInvalid, UnicodeEncodeError) as error:
        raise SourceError(
            f"{name} holds other values among its texts: {error}", code="data-dtype"
        ) from None
    return encoded(texts, name.strip("'")).reshape(values.shape)


def widen_texts(values: Any, given: str, wanted: str) -> np.ndarray:
    """The texts in a buffer, in the width of another dtype."""
    return np.frombuffer(values, given).astype(wanted)
