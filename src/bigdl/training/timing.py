"""Durations of the phases of an epoch on every rank, and the time that ranks wait for each other.

Each step of a rank records how long it loads its batch, computes and takes part in collectives.  A
collective ends on all ranks at the same time, so the rank with the shortest collective has arrived
last: the difference to it is the time that another rank has waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bigdl.common.platform.memory import peak_memory

if TYPE_CHECKING:
    from bigdl.training.metrics import EpochSums

MAX_SUMS = 128
"""Maximum number of sums that one rank sends per epoch."""

MEASURED = ("fetch_s", "move_s", "forward_s", "backward_s", "exchange_s")
"""Phases of a step that :class:`~bigdl.training.metrics.EpochSums` adds up."""

SPENT = ("checkpoint_s", "evaluate_s", "wall_s")
"""Durations outside of steps, and the whole duration."""


class StepSums:
    """Sums of a duration over consecutive steps; the number of sums is limited.

    All ranks make the same steps, so the sums of all ranks cover the same steps.

    Examples
    --------
    >>> from bigdl.training.timing import StepSums
    >>> sums = StepSums(limit=2)
    >>> for seconds in (1.0, 2.0, 3.0, 4.0):
    ...     sums.add(seconds)
    >>> sums.values
    [3.0, 7.0]
    """

    def __init__(self, limit: int = MAX_SUMS) -> None:
        self.values: list[float] = []
        self._limit, self._stride, self._count = limit, 1, 0

    def add(self, seconds: float) -> None:
        """Add the duration of the next step."""
        if self._count % self._stride == 0:
            if len(self.values) == self._limit:
                pairs = zip(self.values[::2], self.values[1::2], strict=True)
                self.values = [first + second for first, second in pairs]
                self._stride *= 2
            self.values.append(0.0)
        self.values[-1] += seconds
        self._count += 1


def rank_numbers(sums: EpochSums, spent: Mapping[str, float]) -> list[float]:
    """Return the rows, memory and durations of this rank as numbers for an all-gather."""
    measured = [getattr(sums, name) for name in MEASURED]
    return [sums.rows, float(peak_memory()), *measured, *(spent.get(name, 0.0) for name in SPENT)]


def rank_times(
    numbers: Sequence[Sequence[float]], exchanges: Sequence[Sequence[float]]
) -> list[dict[str, float]]:
    """Return the rows, memory and durations of each rank in an epoch.

    Parameters
    ----------
    numbers : sequence of sequence of float
        :func:`rank_numbers` of every rank.
    exchanges : sequence of sequence of float
        For every rank, the values of its :class:`StepSums` of the time in collectives.

    Returns
    -------
    list of dict
        ``rows``, ``memory``, the names in :data:`MEASURED` and :data:`SPENT`, ``wait_s`` (the time
        that the rank has waited for the slowest) and ``other_s``. ``exchange_s`` excludes
        ``wait_s``; all phases add up to ``wall_s``.
    """
    least = [min(values) for values in zip(*exchanges, strict=True)]
    out = []
    for (rows, memory, *durations), values in zip(numbers, exchanges, strict=True):
        times = dict(zip((*MEASURED, *SPENT), durations, strict=True))
        wait_s = sum(value - low for value, low in zip(values, least, strict=True))
        wait_s = min(wait_s, times["exchange_s"])
        times["exchange_s"] -= wait_s
        known = sum(times.values()) - times["wall_s"] + wait_s
        other_s = max(0.0, times["wall_s"] - known)
        out.append({"rows": rows, "memory": memory, **times, "wait_s": wait_s, "other_s": other_s})
    return out
