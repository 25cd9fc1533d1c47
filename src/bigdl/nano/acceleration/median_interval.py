"""Median of repeated measurements, with an interval that separates signal from noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, Self


class MedianInterval(NamedTuple):
    """Median of measurements, with the interval that omits the lowest and highest fifth.

    For ten independent measurements, the interval contains the true median with probability 0.89.

    Attributes
    ----------
    middle, low, high : float

    Examples
    --------
    >>> from bigdl.nano.acceleration.median_interval import MedianInterval
    >>> fast = MedianInterval.of([1.8, 1.9, 2.0, 2.0, 9.0])
    >>> slow = MedianInterval.of([1.0, 1.1, 1.1, 1.2, 1.9])
    >>> fast
    MedianInterval(middle=2.0, low=1.9, high=2.0)
    >>> fast.exceeds(slow), slow.exceeds(fast)
    (True, False)
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the MedianInterval of one or more measurements."""
        ordered = sorted(values)
        outer = len(ordered) // 5
        return cls(median(ordered), ordered[outer], ordered[-1 - outer])

    def exceeds(self, other: MedianInterval | float) -> bool:
        """Return True if the lower end of this interval exceeds the other's upper end."""
        return self.low > (other.high if isinstance(other, MedianInterval) else other)

    def __format__(self, form: str) -> str:
        """Format the median, followed by the interval in brackets if its width is not zero."""
        middle, low, high = (format(value, form) for value in self)
        return middle if self.low == self.high else f"{middle} ({low}–{high})"
