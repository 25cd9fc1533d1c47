"""Accuracy goals: scoring with the user's metric, and quantization within an allowed drop.

The first quantized model has all layers quantized. If it loses too much accuracy, layers stay in
floating point, those with the largest error first. Their number doubles until the goal is met. A
binary search then runs between the last failure and the first success, so that n layers take
about 2 log2(n) models. Each runtime provides the function that ranks layers by
error; it is called only if needed.
"""

from __future__ import annotations

import bisect
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.structure import as_array

ModelT = TypeVar("ModelT")
_log = logging.getLogger(__name__)


def score_function(
    metric: Callable[..., Any],
    data: Any,
    predictions: Callable[[Any], Iterable[tuple[Any, Any, int]]],
    *,
    streaming: Any = None,
    target_words: Sequence[str],
) -> Callable[[Any], float]:
    """Return a function that scores a model on data.

    Parameters
    ----------
    metric : callable
        If one parameter name contains "pred" and another one of `target_words`, it is computed on
        each batch and averaged over the rows. Otherwise it is called as ``metric(model, data)``, or
        as ``metric(model)`` without data.
    data
        The user's data, unchanged.
    predictions : callable
        Called with a model. Yields predictions, targets and number of rows for each batch of
        `data`.
    streaming : optional
        A streaming metric that replaces calls of `metric`. It has ``reset``, ``update(predictions,
        targets)`` and ``compute``, as ``torchmetrics.Metric``.
    target_words : sequence of str
        Parts of parameter names that mean targets.
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


def as_number(result: object) -> float:
    """Convert a metric's result to a float, or raise UsageError."""
    try:
        return float(np.asarray(as_array(result)).item())
    except (TypeError, ValueError):
        raise UsageError(
            f"The metric must return a number, but it returned {result!r}",
            code="metric-unsupported",
        ) from None


def _roles(metric: Callable[..., Any], target_words: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of a metric's parameters for predictions and targets, or None."""
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
    """Arguments of ``quantize`` that define the accuracy goal; see ``quantize`` for details."""

    metric: Any = None  # of the framework, or a callable
    eval_func: Callable[[Any], float] | None = None
    accuracy_criterion: Mapping[str, Any] | None = None
    timeout: float | None = None
    max_trials: int | None = None


@dataclass(frozen=True)
class AccuracyGoal:
    """Accuracy that a quantized model has to keep.

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
        Largest number of quantized models that are built and scored.
    timeout : float or None
        Seconds after which no further model is tried; 0 and None set no limit.

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
        """Return the goal for a score function and options, or None if there is no score function.

        Parameters
        ----------
        score : callable or None
            Score function made from `metric` or `eval_func`.
        options : AccuracyOptions
            The criterion is ``{"relative": 0.01}`` by default.

        Raises
        ------
        UsageError
            If the criterion has an unknown form, or is passed without a metric.
        """
        criterion = options.accuracy_criterion
        if score is None:
            if criterion is not None:
                raise UsageError(
                    "accuracy_criterion needs a metric or an eval_func that measures the "
                    "accuracy; pass one",
                    code="argument-missing",
                    argument="metric",
                )
            return None
        criterion = dict(criterion or {"relative": 0.01})
        higher = criterion.pop("higher_is_better", True)
        if set(criterion) not in ({"relative"}, {"absolute"}):
            raise UsageError(
                "accuracy_criterion must be {'relative': 0.01} or {'absolute': 0.5}, with "
                f"'higher_is_better' optionally, not {criterion}",
                code="argument-value",
                argument="accuracy_criterion",
            )
        relative, absolute = criterion.get("relative"), criterion.get("absolute")
        return cls(score, bool(higher), relative, absolute, options.max_trials, options.timeout)

    def drop(self, original: float, score: float) -> float:
        """Return how much worse a score is than the original's; negative if the score is better."""
        return original - score if self.higher_is_better else score - original

    def allowed(self, original: float) -> float:
        """Return the largest accepted drop, in the units of the score."""
        if self.absolute is not None:
            return self.absolute
        return abs(original) * (0.01 if self.relative is None else self.relative)

    def met(self, original: float, score: float) -> bool:
        """Return True if a score is within the allowed drop from the original's."""
        return self.drop(original, score) <= self.allowed(original)


def keep_accuracy(
    build: Callable[[tuple[str, ...]], ModelT],
    rank: Callable[[], Sequence[str]],
    goal: AccuracyGoal | None,
    original: object,
    *,
    refuse: bool = True,
) -> ModelT:
    """Return the quantized model that meets a goal with the fewest layers in floating point.

    Parameters
    ----------
    build : callable
        Called with layer names; returns a model with all other layers quantized. ``goal.score``
        must accept the model.
    rank : callable
        Returns the names of all quantized layers, largest error first. It is called at most once,
        and only if the fully quantized model misses the goal.
    goal : AccuracyGoal or None
        None accepts the fully quantized model. ``max_trials`` limits the number of models; after
        ``timeout`` seconds no further model is built.
    original
        The reference model.
    refuse : bool
        True to raise an error if no model meets the goal. False to allow all layers in floating
        point and return the best model.

    Returns
    -------
    The model that `build` returned.

    Raises
    ------
    UsageError
        If no model meets the goal. The message has the original's score, the best score and the
        bound. A model without any quantized layer is not tried.
    """
    if goal is None:
        return build(())
    reference = _checked(goal.score(original), "the original model")
    end = time.monotonic() + goal.timeout if goal.timeout else math.inf
    count = 0
    accepted: list[Any] = []  # only the latest model
    best = _ScoredModel(None, -math.inf if goal.higher_is_better else math.inf, 0)

    def may_go_on() -> bool:
        """Return True if the limits on time and trials allow building another model."""
        return time.monotonic() < end and (not goal.max_trials or count < goal.max_trials)

    def meets(excluded: tuple[str, ...]) -> bool:
        """Score a model that keeps `excluded` layers in float; return True if the goal is met."""
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
    """Return the relative L2 error between two lists of arrays.

    Returns
    -------
    float
        ``|actual - expected| / |expected|`` in the Euclidean norm over all floating-point arrays;
        infinite if `actual` has a value that is not finite.
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
    """A quantized model, its score, and its number of layers in floating point."""

    model: Any
    score: float
    excluded: int


def _refusal(goal: AccuracyGoal, original: float, best: _ScoredModel, count: int) -> str:
    """Return the error message for a goal that no model met."""
    allowed = goal.allowed(original)
    bound = original - allowed if goal.higher_is_better else original + allowed
    return (
        f"The accuracy cannot be kept: the original model scores {original:.6g}, the "
        f"best of {count} quantized models {best.score:.6g} (with {best.excluded} "
        f"layers in floating point), but at {'least' if goal.higher_is_better else 'most'} "
        f"{bound:.6g} is required; allow a larger drop, give more calibration data, or use "
        "precision='bf16'"
    )


def _checked(score: float, of: str) -> float:
    score = float(score)
    if math.isnan(score):
        raise UsageError(
            f"The metric returned NaN for {of}; check metric and data",
            code="metric-unsupported",
        )
    return score
