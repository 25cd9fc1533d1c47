"""BatchNorm statistics and other buffers, which every rank makes from its own rows.

They are merged after every step, so that they depend neither on the transport nor on the size of
a group.  Only buffers that some rank has changed travel at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["changed", "merge", "merged"]


def changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Those of `after` that differ from `before`, to the last bit."""
    return {
        number: new
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        if old.tobytes() != new.tobytes()
    }


def merge(values: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """One buffer from those of several ranks.

    A floating one becomes the mean weighted by the rows of each rank, an integer one (a counter)
    the largest.
    """
    first = values[0]
    if all(value.tobytes() == first.tobytes() for value in values[1:]):
        return first.copy()
    if not np.issubdtype(first.dtype, np.inexact):
        return np.maximum.reduce(values)
    wide = np.result_type(first.dtype, np.float64)
    total = sum(rows)
    mean = np.zeros(first.shape, wide)
    for value, count in zip(values, rows, strict=True):
        mean += value.astype(wide) * (count / total)
    return mean.astype(first.dtype)


def merged(found: Sequence[tuple[int, Mapping[int, np.ndarray]]]) -> dict[int, np.ndarray]:
    """All buffers that ranks have changed, given the rows and the changes of each."""
    numbers = sorted({number for _, buffers in found for number in buffers})
    return {
        number: merge(
            [buffers[number] for _, buffers in found if number in buffers],
            [rows for rows, buffers in found if number in buffers],
        )
        for number in numbers
    }
