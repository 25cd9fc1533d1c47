"""The latency of a call, measured as BigDL 2.x did."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["latency_calculate_helper"]

_WARM_UP = 2
_PROBE = 3  # runs after which a call that is much slower than the baseline is given up
_MUCH_SLOWER = 4
_TRIMMED = 0.1  # of the runs, at each end


def latency_calculate_helper(
    iterrun: int,
    baseline_time: float,
    func: Callable[..., Any],
    model: Any,
    input_sample: Any,
    *args: Any,
) -> tuple[float, bool]:
    """Mean duration of ``func(model, input_sample, *args)``, the slowest and fastest left out.

    Parameters
    ----------
    iterrun : int
        Number of timed runs; two more come before them.
    baseline_time : float
        Seconds that the call takes without acceleration.
    func : callable
    model, input_sample, *args
        Its arguments.

    Returns
    -------
    latency : float
        Milliseconds; the mean without a tenth of the runs at each end.
    complete : bool
        False if it was given up after three runs, as they took more than four times the baseline.
    """
    for _ in range(_WARM_UP):
        func(model, input_sample, *args)
    durations: list[float] = []
    for _ in range(max(1, iterrun)):
        start = time.perf_counter()
        func(model, input_sample, *args)
        durations.append(time.perf_counter() - start)
        if len(durations) == _PROBE and sum(durations) > _PROBE * _MUCH_SLOWER * baseline_time:
            return statistics.fmean(durations) * 1000, False
    durations.sort()
    cut = int(len(durations) * _TRIMMED)
    return statistics.fmean(durations[cut : len(durations) - cut]) * 1000, True
