"""Accuracy of models: the user's metric, and quantized models that keep it.

A quantized model is built with everything quantized first. If that costs too much accuracy, layers
are left in floating point, the most harmful ones first: their number is doubled until the goal is
met, then it is halved between the last that failed and the first that met it, so that n layers
take about 2 log2(n) models. What one layer costs is the runtime's knowledge: it hands in a
function that ranks them, which is called only if it is needed.
"""

from __future__ import annotations

import bisect
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.structure import as_array

_log = logging.getLogger(__name__)


def score_function(
    metric: Callable[..., Any],
    data: Any,
    predictions: Callable[[Any], Iterable[tuple[Any, Any, int]]],
    *,
    streaming: Any = None,
    target_words: Sequence[str],
) -> Callable[[Any], float]:
    """Return a function from a model to its score on data.

    Parameters
    ----------
    metric : callable
        With parameters for predictions and targets (one name contains "pred", another one of
        `target_words`) it is computed on each batch and averaged over the rows; any other is
        called as ``metric(model, data)``, or as ``metric(model)`` without data.
    data
        As the user gave them.
    predictions : callable
        Called with a model, yields its predictions, the targets and the number of rows of each
        batch of `data`.
    streaming : optional
        What to use instead of calling `metric`: with ``reset``, ``update``, which takes predictions
        and targets, and ``compute``, as a ``torchmetrics.Metric``.
    target_words : sequence of str
    """
    roles = _roles(metric, target_words)
    if streaming is None and roles is None:
        return lambda model: as_number(metric(model) if data is None else metric(model, data))
    if data is None or (isinstance(data, tuple) and any(part is None for part in data[:2])):
        raise UsageError(
            "A metric of predictions and targets needs data that hold targets",
            code="data-structure",
        )

    def score(model: Any) -> float:
        total, rows = 0.0, 0
        if streaming is not None:
            streaming.reset()
        for predicted, target, count in predictions(model):
            if target is None:
                raise UsageError(
                    "The metric compares predictions with targets, but the data hold no targets; "
                    "give batches of the form (input, target)",
                    code="data-structure",
                )
            if streaming is not None:
                streaming.update(predicted, target)
            elif roles is not None:
                result = metric(**{roles[0]: predicted, roles[1]: target})
                total += float(np.mean(np.asarray(as_array(result)))) * count
            rows += count
        if not rows:
            raise UsageError(
                "The data for the metric hold no batch; give at least one", code="data-empty"
            )
        return total / rows if streaming is None else as_number(streaming.compute())

    return score


def as_number(result: Any) -> float:
    """Return what a metric returned as a float, or refuse it."""
    try:
        return float(np.asarray(as_array(result)).item())
    except (TypeError, ValueError):
        raise UsageError(
            f"The metric must return a number, but it returned {result!r}",
            code="metric-unsupported",
        ) from None


def _roles(metric: Callable[..., Any], target_words: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the parameters for predictions and for targets."""
    try:
        names = list(inspect.signature(metric).parameters)
    except (TypeError, ValueError):
        return None
    predicted = next((name for name in names if "pred" in name), None)
    others = (name for name in names if "pred" not in name)
    target = next((name for name in others if any(word in name for word in target_words)), None)
    return (predicted, target) if predicted and target else None


@dataclass(frozen=True)
class AccuracyOptions:
    """Arguments of ``quantize`` about the accuracy to keep; they mean what they do there."""

    metric: Any = None  # of the framework, or a callable
    eval_func: Callable[[Any], float] | None = None
    accuracy_criterion: Mapping[str, Any] | None = None
    timeout: float | None = None
    max_trials: int | None = None


@dataclass(frozen=True)
class AccuracyGoal:
    """The accuracy that a quantized model has to keep.

    Attributes
    ----------
    score : callable
        Called with a model, returns its accuracy as a float.
    higher_is_better : bool
    relative : float or None
        Largest drop as a fraction of the original's score, e.g. 0.01.
    absolute : float or None
        Largest drop in units of the score.
    max_trials : int or None
        How many quantized models are built and scored at most.
    timeout : float or None
        Seconds after which no further one is tried; 0 and None set no limit.

    Examples
    --------
    >>> from bigdl.nano.acceleration import AccuracyGoal
    >>> scores = {"all layers in int8": 0.87, "two layers in float": 0.896}
    >>> goal = AccuracyGoal(scores.get, absolute=0.005)
    >>> goal.drop(0.90, 0.896) < goal.allowed(0.90)
    True
    >>> [name for name in scores if goal.met(0.90, goal.score(name))]
    ['two layers in float']
    """

    score: Callable[[Any], float]
    higher_is_better: bool = True
    relative: float | None = 0.01
    absolute: float | None = None
    max_trials: int | None = None
    timeout: float | None = None

    @classmethod
    def of(
        cls, score: Callable[[Any], float] | None, options: AccuracyOptions
    ) -> AccuracyGoal | None:
        """Return the goal that a user asks for; None if there is nothing to score with.

        Parameters
        ----------
        score : callable or None
            What `metric` or `eval_func` mean.
        options : AccuracyOptions
            The criterion is ``{"relative": 0.01}`` by default.

        Raises
        ------
        UsageError
            If the criterion is not of a known form, or stands alone.
        """
        criterion = options.accuracy_criterion
        if score is None:
            if criterion is not None:
                raise UsageError(
                    "accuracy_criterion needs a metric or an eval_func to measure the "
                    "accuracy with",
                    code="argument-missing",
                    argument="metric",
                )
            return None
        criterion = dict(criterion or {"relative": 0.01})
        higher = criterion.pop("higher_is_better", True)
        if set(criterion) not in ({"relative"}, {"absolute"}):
            raise UsageError(
                "accuracy_criterion must be {'relative': 0.01} or {'absolute': 0.5}, with "
                f"'higher_is_better' if you like, not {criterion}",
                code="argument-value",
                argument="accuracy_criterion",
            )
        relative, absolute = criterion.get("relative"), criterion.get("absolute")
        return cls(score, bool(higher), relative, absolute, options.max_trials, options.timeout)

    def drop(self, original: float, score: float) -> float:
        """Return by how much a score is worse than the original's; negative if it is better."""
        return original - score if self.higher_is_better else score - original

    def allowed(self, original: float) -> float:
        """Return the largest drop that is accepted, in units of the score."""
        if self.absolute is not None:
            return self.absolute
        return abs(original) * (0.01 if self.relative is None else self.relative)

    def met(self, original: float, score: float) -> bool:
        """Return True if a score is good enough."""
        return self.drop(original, score) <= self.allowed(original)


def keep_accuracy(
    build: Callable[[tuple[str, ...]], Any],
    rank: Callable[[], Sequence[str]],
    goal: AccuracyGoal | None,
    original: Any,
    *,
    refuse: bool = True,
) -> Any:
    """Return the quantized model with the fewest layers in floating point that meets a goal.

    Parameters
    ----------
    build : callable
        Called with names of layers, returns a model with all but these quantized. It is something
        that ``goal.score`` can be called with.
    rank : callable
        Returns the names of all layers that are quantized, the most harmful one first. It is
        called at most once, and only if leaving out none does not meet the goal.
    goal : AccuracyGoal or None
        None asks for nothing. Its ``max_trials`` counts models; after its ``timeout`` no further
        one is begun.
    original
        The model whose score is to be kept.
    refuse : bool
        Raise an error if no model that was tried meets the goal. Else all layers may be left out,
        and the best model is returned.

    Returns
    -------
    What `build` returned.

    Raises
    ------
    UsageError
        If no model that was tried meets the goal. It says the original's score, the best one and
        the bound. A model with no layer quantized is not tried.
    """
    if goal is None:
        return build(())
    reference = _checked(goal.score(original), "the original model")
    end = time.monotonic() + goal.timeout if goal.timeout else math.inf
    count = 0
    accepted: list[Any] = []  # the last one
    best = _ScoredModel(None, -math.inf if goal.higher_is_better else math.inf, 0)

    def may_go_on() -> bool:
        """Return True if the limits allow another model."""
        return time.monotonic() < end and (not goal.max_trials or count < goal.max_trials)

    def meets(excluded: tuple[str, ...]) -> bool:
        """Score a model without these layers; return True, and accept it, if it meets the goal."""
        nonlocal count, best
        model = build(excluded)
        score = _checked(goal.score(model), "a quantized model")
        _log.info(
            "Quantized with %d layers in floating point: score %.6g, the original's is %.6g",
            len(excluded),
            score,
            reference,
        )
        count += 1
        if goal.drop(best.score, score) < 0:
            best = _ScoredModel(None if refuse else model, score, len(excluded))
        met = goal.met(reference, score)
        if met:
            accepted[:] = [model]
        return met

    if not meets(()) and may_go_on():
        layers = tuple(rank())
        most = len(layers) - refuse
        failed, tried = 0, min(1, most)
        while failed < most and may_go_on() and not meets(layers[:tried]):
            failed, tried = tried, min(2 * tried, most)
        if accepted:
            between = range(failed + 1, tried)
            bisect.bisect_left(between, True, key=lambda n: not may_go_on() or meets(layers[:n]))
    if refuse and not accepted:
        raise UsageError(_refusal(goal, reference, best, count), code="accuracy")
    return accepted[0] if accepted else best.model


def relative_error(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """Return the size of the difference between two lists of arrays relative to the first one.

    Returns
    -------
    float
        ``|actual - expected| / |expected|`` in the Euclidean norm over all arrays of floating-point
        numbers; infinite if a number of `actual` is not finite.
    """
    difference = size = 0.0
    for one, other in zip(expected, actual, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if not np.issubdtype(one.dtype, np.floating):
            continue
        one, other = one.astype(np.float64), other.astype(np.float64)
        if not np.isfinite(other).all():
            return math.inf
        difference += float(np.square(other - one).sum())
        size += float(np.square(one).sum())
    return math.sqrt(difference / size) if size else math.sqrt(difference)


class _ScoredModel(NamedTuple):
    """A quantized model, its score, and how many layers it has in floating point."""

    model: Any
    score: float
    excluded: int


def _refusal(goal: AccuracyGoal, original: float, best: _ScoredModel, count: int) -> str:
    """Return why no model was accepted."""
    allowed = goal.allowed(original)
    bound = original - allowed if goal.higher_is_better else original + allowed
    return (
        f"The accuracy cannot be kept: the original model scores {original:.6g}, the "
        f"best of {count} quantized models {best.score:.6g} (with {best.excluded} "
        f"layers in floating point), but at {'least' if goal.higher_is_better else 'most'} "
        f"{bound:.6g} is asked for; allow a larger drop, give more calibration data, or use "
        "precision='bf16'"
    )


def _checked(score: Any, of: str) -> float:
    score = float(score)
    if math.isnan(score):
        raise UsageError(
            f"The metric gives no number for {of}, but NaN; check metric and data",
            code="metric-unsupported",
        )
    return score
