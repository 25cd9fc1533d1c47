"""Text columns of feeds, for models that look texts up or tokenize them.

Texts are stored as UTF-8 bytes, padded with zero bytes to the width of their chunk: numpy dtypes
such as ``S16``.  Widths are powers of two, so that chunks rarely differ; a spool has the width of
its widest chunk.  With fixed widths a batch is a slice and a shuffled batch is a gather.  A few
long texts make a whole column large.

Callers whose models accept texts enable them by :func:`with_texts`; otherwise texts are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.runtime.shards.feed import SourceError

if TYPE_CHECKING:
    import pyarrow as pa

TEXT = "S"
"""The dtype of a text column of any width."""

_CONFIG_KEY = "bigdl.texts"
_NARROWEST, _WIDEST = 8, 1 << 16  # bytes


def with_texts(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return a config that enables text columns for a feed or a prediction."""
    return {**(config or {}), _CONFIG_KEY: True}


def takes_texts(config: dict[str, Any] | None) -> bool:
    """Return True if a config enables text columns."""
    return bool((config or {}).get(_CONFIG_KEY))


def is_text(dtype: str) -> bool:
    """Return True if a dtype is a text dtype."""
    return dtype.startswith(TEXT)


def name_of_dtype(array: np.ndarray) -> str:
    """Return the dtype name of an array, such as ``S16`` for texts."""
    return f"{TEXT}{array.itemsize}" if array.dtype.kind == TEXT else array.dtype.name


def encoded(texts: pa.Array, name: str) -> np.ndarray:
    """Encode an Arrow array of strings without nulls as a fixed-width bytes array.

    Parameters
    ----------
    texts : pyarrow.StringArray or pyarrow.LargeStringArray
    name : str
        Name of the column, for messages.

    Raises
    ------
    SourceError
        For a zero byte in a text, which numpy would drop, and for a text that is too long.
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
            f"Column '{name}' holds a text of {longest} bytes, and all rows would need as much; "
            f"cut its texts to {_WIDEST} bytes first",
            code="data-size",
            column=name,
        )
    width = max(_NARROWEST, 1 << (longest - 1).bit_length())
    cells = np.zeros((len(texts), width), np.uint8)
    cells[np.arange(width) < lengths[:, None]] = used
    return cells.view(f"{TEXT}{width}")[:, 0]


def are_texts(values: np.ndarray) -> bool:
    """Return True for an array of texts; the first non-missing object decides."""
    if values.dtype.kind == "O":
        first = next((each for each in values.flat if not _is_missing(each)), None)
        return isinstance(first, str | bytes)
    return values.dtype.kind in "US"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def text_array(values: np.ndarray, name: str) -> np.ndarray:
    """Encode a numpy array of texts, of any shape, as a fixed-width bytes array.

    Parameters
    ----------
    values : ndarray of str, bytes or objects of these types
    name : str
        Name of the column, for messages.

    Raises
    ------
    SourceError
        For other values than texts, and for texts that :func:`encoded` refuses.
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


def widen_texts(values: np.ndarray | bytes, dtype: str, wanted: str) -> np.ndarray:
    """Convert a buffer of texts to the width of another dtype."""
    return np.frombuffer(values, dtype).astype(wanted)
