"""Digest of the rows of a table, computed in parts by the workers that read them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np

_PERIOD = 1 << 14  # rows with distinct factors; their factors fit in the CPU cache
_MASK = (1 << 64) - 1


def digest_of_rows(arrays: Sequence[np.ndarray], first: int) -> int:
    """Return the digest of consecutive rows; that of a table is the sum over its parts.

    Any change of one value changes the digest of the table, as does almost any other change,
    including exchanged rows. It does not depend on the division into parts.

    Parameters
    ----------
    arrays : sequence of ndarray, shape (rows, ...)
        C-contiguous columns.
    first : int
        Number of the first row in the table.

    Returns
    -------
    int
        Integer below ``2 ** 64``, to be added modulo ``2 ** 64``.

    Notes
    -----
    A multilinear function of the 64-bit words of the table, modulo ``2 ** 64``. The factor of a
    word is the product of odd random numbers of its column, its row modulo a period, and the number
    of the period. Zeros that pad texts do not change it.
    """
    total = 0
    words = [_words(each) for each in arrays]
    rows, start = len(arrays[0]) if arrays else 0, 0
    while start < rows:
        period, offset = divmod(first + start, _PERIOD)
        stop = min(rows, start + _PERIOD - offset)
        of_rows = np.zeros(stop - start, np.uint64)
        for number, each in enumerate(words):
            if each.shape[1]:
                of_rows += each[start:stop] @ _factors(number + 1, each.shape[1])
        sum_of_period = int(of_rows @ _factors(0, _PERIOD)[offset : offset + stop - start])
        total += sum_of_period * int(_odd_numbers(period, 1)[0])
        start = stop
    return total & _MASK


def digest_of_chunk(values: np.ndarray, number: int) -> int:
    """Return the digest of a chunk of values of any lengths, to be added to those of other chunks.

    Parameters
    ----------
    values : ndarray
    number : int
        Number of the chunk, such as that of its first row.
    """
    octets = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    factor = int(_odd_numbers(number & _MASK >> 1, 1)[0])
    return (zlib.crc32(octets.data) + (len(octets) << 32)) * factor & _MASK


def _words(array: np.ndarray) -> np.ndarray:
    """Return the rows of an array as 64-bit words, padded with zeros."""
    rows = len(array)
    width = array.nbytes // max(1, rows)
    octets = array.reshape(-1).view(np.uint8).reshape(rows, width)
    if width % 8:
        padded = np.zeros((rows, -(-width // 8) * 8), np.uint8)
        padded[:, :width] = octets
        octets = padded
    return octets.view("<u8")


@functools.lru_cache(256)
def _factors(number: int, count: int) -> np.ndarray:
    return _odd_numbers((number + 1) << 40, count)


def _odd_numbers(first: int, count: int) -> np.ndarray:
    """Return reproducible odd 64-bit random numbers (SplitMix64; Steele et al. 2014)."""
    state = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
