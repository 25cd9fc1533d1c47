"""The function ``xxhash64`` of Spark for texts: XXH64 with the seed 42.

Texts of equal length are hashed together, as the rows of a matrix of bytes.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md describes the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

NULL = 42
"""The hash of null: the seed."""

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(each)
    for each in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_SEED = np.uint64(42)


def hashes(texts: Sequence[bytes]) -> np.ndarray:
    """Hash texts.

    Parameters
    ----------
    texts : list of bytes

    Returns
    -------
    numpy.ndarray of int64
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    results = np.empty(len(texts), np.uint64)
    order = np.argsort(lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    with np.errstate(over="ignore"):
        for places in np.split(order, starts[1:]) if len(texts) else ():
            data = b"".join([texts[place] for place in places])
            rows = np.frombuffer(data, np.uint8).reshape(len(places), -1)
            results[places] = _of_rows(rows)
    return results.view(np.int64)


def _of_rows(rows: np.ndarray) -> np.ndarray:
    count, length = rows.shape
    at, result = 0, np.full(count, _SEED + _P5)
    if length >= 32:
        at = length - length % 32
        result = _of_stripes(np.ascontiguousarray(rows[:, :at]).view("<u8"))
    result += np.uint64(length)
    for start in range(at, length - 7, 8):
        word = np.ascontiguousarray(rows[:, start : start + 8]).view("<u8")[:, 0]
        result = _rotated(result ^ _round(np.uint64(0), word), 27) * _P1 + _P4
        at = start + 8
    if length - at >= 4:
        word = np.ascontiguousarray(rows[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)
        result = _rotated(result ^ (word * _P1), 23) * _P2 + _P3
        at += 4
    for place in range(at, length):
        result = _rotated(result ^ (rows[:, place].astype(np.uint64) * _P5), 11) * _P1
    for shift, factor in ((33, _P2), (29, _P3), (32, np.uint64(1))):
        result = (result ^ (result >> np.uint64(shift))) * factor
    return result


def _of_stripes(words: np.ndarray) -> np.ndarray:
    """Four lanes over the words, merged."""
    count = len(words)
    lanes = [np.full(count, each) for each in (_SEED + _P1 + _P2, _SEED + _P2, _SEED, _SEED - _P1)]
    for start in range(0, words.shape[1], 4):
        lanes = [_round(lane, words[:, start + i]) for i, lane in enumerate(lanes)]
    turned = (_rotated(lane, turn) for lane, turn in zip(lanes, (1, 7, 12, 18), strict=True))
    merged = cast("np.ndarray", sum(turned, np.uint64(0)))
    for lane in lanes:
        merged = (merged ^ _round(np.uint64(0), lane)) * _P1 + _P4
    return merged


def _round(lane: np.ndarray | np.uint64, word: np.ndarray) -> np.ndarray:
    return _rotated(lane + word * _P2, 31) * _P1


def _rotated(values: np.ndarray, by: int) -> np.ndarray:
    return (values << np.uint64(by)) | (values >> np.uint64(64 - by))
