"""Where a parameter is in the flat vector, and which part of the vector a rank owns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bigdl.common.errors import UsageError

__all__ = ["Geometry", "Segment", "slice_bounds"]


def slice_bounds(total: int, ranks: int) -> list[tuple[int, int]]:
    """Cut `total` elements in `ranks` slices; the first ``total % ranks`` have one element more.

    Returns
    -------
    list of (start, stop)
    """
    if total < ranks:
        raise UsageError(
            f"The model has {total} trainable numbers, fewer than the {ranks} workers that would "
            "share them; ask for fewer workers"
        )
    base, extra = divmod(total, ranks)
    starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in a slice.

    Attributes
    ----------
    parameter : int
        Its number in the flat vector's order.
    start, stop : int
        Elements of the slice.
    """

    parameter: int
    start: int
    stop: int


class Geometry:
    """The flat vector of some parameters and its slices.

    Parameters
    ----------
    sizes : sequence of int
        Elements of each parameter, in order.
    ranks : int

    Attributes
    ----------
    total : int
        Elements of the vector.
    bounds : list of (int, int)
        Of each slice.
    """

    def __init__(self, sizes: Sequence[int], ranks: int):
        self.sizes = tuple(sizes)
        self.offsets = [0]
        for size in self.sizes:
            self.offsets.append(self.offsets[-1] + size)
        self.total = self.offsets[-1]
        self.bounds = slice_bounds(self.total, ranks)

    def segments(self, rank: int) -> list[Segment]:
        """What the slice of a rank consists of, in order; a parameter may be in several slices."""
        low, high = self.bounds[rank]
        found = []
        for number, (start, stop) in enumerate(itertools.pairwise(self.offsets)):
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append(Segment(number, first - low, last - low))
        return found

    def flatten(self, arrays):
        """Arrays of the parameters as one vector of float32."""
        import numpy as np

        return np.concatenate([np.asarray(a, dtype=np.float32).reshape(-1) for a in arrays])

    def parts(self, vector) -> list:
        """Views of the parameters, flat, in a vector."""
        return [vector[start:stop] for start, stop in itertools.pairwise(self.offsets)]
