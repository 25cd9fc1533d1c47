"""Speed of a model, measured in alternation with the original.

Other programs, the frequency of the processor and its temperature change during a search of
minutes. Each model is therefore timed in rounds, a few calls of the original and a few of its own,
and is judged by the median over the rounds of the ratio of the two. Calls come in blocks, each
after one that is not counted, so that a model does not pay for the caches that the other filled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

__all__ = ["Timing", "time_against", "time_alone"]

_ROUNDS = 10
_WARM_UPS = 2
_PROBES = 3
_FEWEST = 2  # calls in a round
_LEAST = 0.4  # seconds that all rounds take; less tells nothing on a machine with other work
_BUDGET = 10.0  # seconds that they take at most
_HOPELESS = 4.0  # times as slow as the original: not timed further

Block = Callable[[int, float], list[float]]
"""Times at least two and at most `count` calls of a model within `limit` seconds; returns the
seconds of each."""


@dataclass(frozen=True)
class Timing:
    """Speed of a model.

    Attributes
    ----------
    latency : float
        Median of a call, in milliseconds.
    speedup : float
        How many times as fast as the original.
    stopped : bool
        True if timing was given up because the model is far slower than the original.
    """

    latency: float
    speedup: float
    stopped: bool = False


def time_against(original: Block, model: Block, runs: int) -> Timing:
    """Time a model in alternation with the original.

    Parameters
    ----------
    original, model : callable
        See :data:`Block`.
    runs : int
        Calls of the model; fewer, but at least 20, where they would take more than ten seconds,
        and more where they would take less than half of one.
    """
    model(_WARM_UPS, _BUDGET)
    original(1, _BUDGET)
    reference, probe = median(original(_PROBES, _BUDGET)), median(model(_PROBES, _BUDGET))
    if probe > _HOPELESS * reference:
        return Timing(1e3 * probe, reference / probe, stopped=True)
    calls, room = _calls_per_round(runs, reference + probe), _BUDGET / _ROUNDS / 2
    ratios, latencies = [], []
    for number in range(_ROUNDS):
        # the order alternates, so that neither always runs first
        if number % 2:
            theirs, own = original(calls, room), model(calls, room)
        else:
            own, theirs = model(calls, room), original(calls, room)
        ratios.append(median(theirs) / median(own))
        latencies += own
    return Timing(1e3 * median(latencies), median(ratios))


def time_alone(model: Block, runs: int) -> Timing:
    """Time the original."""
    model(_WARM_UPS, _BUDGET)
    calls = _calls_per_round(runs, median(model(_PROBES, _BUDGET)))
    latencies = [s for _ in range(_ROUNDS) for s in model(calls, _BUDGET / _ROUNDS)]
    return Timing(1e3 * median(latencies), 1.0)


def block(call: Callable[[int], object]) -> Block:
    """A block of calls of a function that is given the number of the call."""

    def run(count: int, limit: float) -> list[float]:
        call(0)
        seconds: list[float] = []
        end = time.perf_counter() + limit
        while len(seconds) < count and (len(seconds) < _FEWEST or time.perf_counter() < end):
            begin = time.perf_counter()
            call(len(seconds))
            seconds.append(time.perf_counter() - begin)
        return seconds

    return run


def _calls_per_round(runs: int, seconds: float) -> int:
    """Calls in a round where a call, or one of each model, takes this long."""
    wanted = max(math.ceil(runs / _ROUNDS), math.ceil(_LEAST / _ROUNDS / max(seconds, 1e-6)))
    return max(_FEWEST, min(wanted, int(_BUDGET / _ROUNDS / max(seconds, 1e-6))))
