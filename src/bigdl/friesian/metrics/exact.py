"""Exact sums of floats, which do not depend on the order or grouping of the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

__all__ = ["ExactMoments", "exact_sum"]

# The lowest bit of the smallest float64 is 2 ** -1074. frexp returns the exponent -1073 for it.
# With an integer mantissa of 53 bits, all terms are integer multiples of 2 ** -1126.
_SCALE = 1126
_MANTISSA = 53
_LOW_BITS = 26


def exact_sum(values: np.ndarray) -> int:
    """Return the sum of float64 values as an integer multiple of ``2 ** -1126``.

    Parameters
    ----------
    values : numpy.ndarray of float64, shape (n,)
        Finite; at most 2 ** 26 values.

    Returns
    -------
    int
        Sum without any rounding, so that sums of parts add up to the sum of the whole.
    """
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, _MANTISSA).astype(np.int64)
    lowest = int(exponents.min()) if len(exponents) else 0
    bins = exponents - lowest
    # Partial sums stay below 2 ** 53, where float64 is exact: 27 bits of a term times 2 ** 26.
    high = np.bincount(bins, weights=mantissas >> _LOW_BITS)
    low = np.bincount(bins, weights=mantissas & ((1 << _LOW_BITS) - 1))
    total = 0
    for position in np.flatnonzero((high != 0) | (low != 0)):
        part = (int(high[position]) << _LOW_BITS) + int(low[position])
        total += part << (int(position) + lowest - _MANTISSA + _SCALE)
    return total


@dataclass
class ExactMoments:
    """Count, sum and sum of squares of numbers, which can be merged without rounding.

    Attributes
    ----------
    count : int
    total, squares : int
        Multiples of ``2 ** -1126``; the squares of the terms are rounded to float64 first.
    """

    count: int = 0
    total: int = 0
    squares: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> ExactMoments:
        """Return the moments of float64 values."""
        return cls(len(values), exact_sum(values), exact_sum(values * values))

    def __add__(self, other: ExactMoments) -> ExactMoments:
        return ExactMoments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """Mean, rounded correctly to float64; NaN if there are no values."""
        return self.total / (self.count << _SCALE) if self.count else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean; NaN for fewer than two values."""
        if self.count < 2:
            return math.nan
        total = Fraction(self.total, 1 << _SCALE)
        squares = Fraction(self.squares, 1 << _SCALE)
        variance = max((squares - total * total / self.count) / (self.count - 1), Fraction(0))
        return math.sqrt(variance / self.count)
