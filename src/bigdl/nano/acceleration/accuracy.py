"""The search for a quantized model that keeps the accuracy of the original.

A quantized model is built with everything quantized first. If that costs too much accuracy, layers
are left in floating point, the most harmful ones first: their number is doubled until the goal is
met, then it is halved between the last that failed and the first that met it, so that n layers
take about 2 log2(n) models. What one layer costs is the runtime's knowledge: it hands in a
function that ranks them, which is called only if it is needed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.options import AccuracyGoal

__all__ = ["Trial", "keep_accuracy", "relative_error"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """One quantized model that was scored.

    Attributes
    ----------
    model
        What was built.
    excluded : tuple of str
        Layers that were left in floating point.
    score : float
    """

    model: Any
    excluded: tuple[str, ...]
    score: float


def keep_accuracy(
    build: Callable[[tuple[str, ...]], Any],
    rank: Callable[[], Sequence[str]],
    goal: AccuracyGoal,
    original: Any,
) -> Any:
    """The quantized model with the fewest layers in floating point that meets a goal.

    Parameters
    ----------
    build : callable
        Called with names of layers, returns a model with all but these quantized. It is something
        that ``goal.score`` can be called with.
    rank : callable
        Returns the names of all layers that are quantized, the most harmful one first. It is
        called at most once, and only if leaving out none does not meet the goal.
    goal : AccuracyGoal
        Its ``max_trials`` counts models; after its ``timeout`` no further one is begun.
    original
        The model whose score is to be kept.

    Returns
    -------
    What `build` returned.

    Raises
    ------
    UsageError
        If no model that was tried meets the goal. It says the original's score, the best one and
        the bound. A model with no layer quantized is not tried.
    """
    search = _Search(build, goal, _checked(goal.score(original), "the original model"))
    if search.meets(()):
        return search.accepted.model
    if search.may_go_on():
        layers = tuple(rank())
        search.fewest_of(layers)
    if search.accepted is None:
        raise UsageError(search.refusal())
    return search.accepted.model


def relative_error(expected: Sequence[np.ndarray], given: Sequence[np.ndarray]) -> float:
    """Size of the difference between two lists of arrays relative to the first one.

    Returns
    -------
    float
        ``|given - expected| / |expected|`` in the Euclidean norm over all arrays of floating-point
        numbers; infinite if a number of `given` is not finite.
    """
    difference = size = 0.0
    for one, other in zip(expected, given, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if not np.issubdtype(one.dtype, np.floating):
            continue
        one, other = one.astype(np.float64), other.astype(np.float64)
        if not np.isfinite(other).all():
            return math.inf
        difference += float(np.square(other - one).sum())
        size += float(np.square(one).sum())
    return math.sqrt(difference / size) if size else math.sqrt(difference)


class _Search:
    """The trials so far, and what limits further ones."""

    def __init__(self, build, goal: AccuracyGoal, original: float):
        self._build = build
        self._goal = goal
        self._original = original
        self._began = time.monotonic()
        self._best: Trial | None = None
        self._count = 0
        self.accepted: Trial | None = None

    def may_go_on(self) -> bool:
        """Whether the limits allow another trial."""
        goal = self._goal
        in_time = not goal.timeout or time.monotonic() - self._began < goal.timeout
        return in_time and (not goal.max_trials or self._count < goal.max_trials)

    def meets(self, excluded: tuple[str, ...]) -> bool:
        """Try a model without these layers; one that meets the goal is accepted."""
        model = self._build(excluded)
        self._count += 1
        trial = Trial(model, excluded, _checked(self._goal.score(model), "a quantized model"))
        _log.info(
            "Quantized with %d layers in floating point: score %.6g, the original's is %.6g",
            len(excluded),
            trial.score,
            self._original,
        )
        if self._best is None or self._drop(trial) < self._drop(self._best):
            # Only the score of a model that is not good enough is of use.
            self._best = Trial(None, excluded, trial.score)
        met = self._goal.met(self._original, trial.score)
        if met:
            self.accepted = trial
        return met

    def fewest_of(self, layers: tuple[str, ...]) -> None:
        """Accept the model with the shortest beginning of `layers` in floating point."""
        failed, tried, most = 0, 1, len(layers) - 1
        while self.accepted is None and failed < most and self.may_go_on():
            tried = min(tried, most)
            if not self.meets(layers[:tried]):
                failed, tried = tried, 2 * tried
        met = tried
        while self.accepted is not None and met - failed > 1 and self.may_go_on():
            middle = (failed + met) // 2
            if self.meets(layers[:middle]):
                met = middle
            else:
                failed = middle

    def refusal(self) -> str:
        """Why nothing was accepted."""
        goal, best = self._goal, self._best
        allowed = goal.allowed(self._original)
        bound = self._original - allowed if goal.higher_is_better else self._original + allowed
        return (
            f"The accuracy cannot be kept: the original model scores {self._original:.6g}, the "
            f"best of {self._count} quantized models {best.score:.6g} (with {len(best.excluded)} "
            f"layers in floating point), but at {'least' if goal.higher_is_better else 'most'} "
            f"{bound:.6g} is asked for; allow a larger drop, give more calibration data, or use "
            "precision='bf16'"
        )

    def _drop(self, trial: Trial) -> float:
        return self._goal.drop(self._original, trial.score)


def _checked(score: Any, of: str) -> float:
    score = float(score)
    if math.isnan(score):
        raise UsageError(f"The metric gives no number for {of}, but NaN; check metric and data")
    return score
