"""What a hyper-parameter may be: the domains that :mod:`bigdl.orca.automl.hp` makes.

Every domain speaks of its values by *draws*, which are plain numbers: a value of :class:`Choice` is
drawn as its place in the list.  So what a search has tried can be written as JSON and drawn again,
whatever the values are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError

__all__ = ["Choice", "Domain", "GridSearch", "Normal", "Number", "SampleFrom", "Subset"]


class Domain(ABC):
    """Values of a hyper-parameter, of which one is drawn for each trial."""

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Any:
        """A random draw."""

    @abstractmethod
    def suggest(self, trial, name: str) -> Any:
        """The draw that a trial of Optuna suggests under a name."""

    @abstractmethod
    def value(self, draw: Any) -> Any:
        """What a draw stands for."""

    def sample(self, rng: np.random.Generator | int | None = None) -> Any:
        """A random value.

        Parameters
        ----------
        rng : numpy.random.Generator or int, optional
            Or a seed.
        """
        return self.value(self.draw(np.random.default_rng(rng)))


class Number(Domain):
    """Numbers of an interval.

    Parameters
    ----------
    lower, upper : int or float
        Both can be drawn if `whole` or if the steps of `q` reach them.
    q : int or float, optional
        Values are multiples of it.
    log : bool
        Drawn evenly by their logarithm.
    whole : bool
    """

    def __init__(self, lower, upper, *, q=None, log: bool = False, whole: bool = False):
        for name, bound in (("lower", lower), ("upper", upper)):
            _check_number(name, bound, whole)
        if lower > upper:
            raise UsageError(f"lower must not be above upper, got {lower!r} and {upper!r}")
        if log and lower <= 0:
            raise UsageError(f"lower must be above 0 on a logarithmic scale, got {lower!r}")
        if q is not None:
            _check_number("q", q, whole)
            if q <= 0:
                raise UsageError(f"q must be above 0, got {q!r}")
            if math.floor(upper / q + _EPS) < math.ceil(lower / q - _EPS):
                raise UsageError(f"There is no multiple of {q!r} from {lower!r} to {upper!r}")
        self.lower, self.upper, self.q, self.log, self.whole = lower, upper, q, log, whole

    def __repr__(self):
        step = "" if self.q is None else f", q={self.q}"
        return f"{'log' if self.log else ''}{self.lower}..{self.upper}{step}"

    @property
    def bounds(self) -> tuple:
        """Those of the draws: of the values, or of their multiples of `q`."""
        return (self.lower, self.upper) if self.q is None or self.log else self._steps()

    @property
    def counts(self) -> bool:
        """Whether draws are integers."""
        return self.whole or (self.q is not None and not self.log)

    def draw(self, rng):
        lower, upper = self.bounds
        if self.log:
            return float(math.exp(rng.uniform(math.log(lower), math.log(upper))))
        if self.counts:
            return int(rng.integers(lower, upper, endpoint=True))
        return float(rng.uniform(lower, upper))

    def suggest(self, trial, name):
        if self.counts:
            return trial.suggest_int(name, *self.bounds, log=self.log)
        return trial.suggest_float(name, *self.bounds, log=self.log)

    def value(self, draw):
        if self.q is not None:
            draw = _multiple(draw, self.q) if not self.log else self._nearest(draw)
        return round(draw) if self.whole else float(draw)

    def _nearest(self, number):
        lowest, highest = self._steps()
        return _multiple(min(max(round(number / self.q), lowest), highest), self.q)

    def _steps(self) -> tuple[int, int]:
        """The multiples of `q` at the ends."""
        return math.ceil(self.lower / self.q - _EPS), math.floor(self.upper / self.q + _EPS)


class Normal(Domain):
    """Numbers of a normal distribution; drawn as the part of it that lies below."""

    def __init__(self, mean=0.0, std=1.0, *, q=None):
        for name, number in (("mean", mean), ("std", std), ("q", 1 if q is None else q)):
            _check_number(name, number, whole=False)
        if std <= 0:
            raise UsageError(f"std must be above 0, got {std!r}")
        if q is not None and q <= 0:
            raise UsageError(f"q must be above 0, got {q!r}")
        self.mean, self.std, self.q = mean, std, q

    def __repr__(self):
        return f"normal({self.mean}, {self.std})" + ("" if self.q is None else f", q={self.q}")

    def draw(self, rng):
        return float(rng.uniform(_EPS, 1 - _EPS))

    def suggest(self, trial, name):
        return trial.suggest_float(name, _EPS, 1 - _EPS)

    def value(self, draw):
        found = NormalDist(self.mean, self.std).inv_cdf(draw)
        return found if self.q is None else float(_multiple(round(found / self.q), self.q))


class Choice(Domain):
    """One of several values; drawn as its place."""

    def __init__(self, categories: Sequence):
        self.categories = _listed("categories", categories)

    def __repr__(self):
        return f"one of {_texts(self.categories)}"

    def draw(self, rng):
        return int(rng.integers(len(self.categories)))

    def suggest(self, trial, name):
        return trial.suggest_categorical(name, list(range(len(self.categories))))

    def value(self, draw):
        return self.categories[draw]


class Subset(Domain):
    """Some of several values, in their order; drawn as a number for each.

    The first number of a draw says how many, those with the largest others are taken.
    """

    def __init__(self, categories: Sequence, min_items: int, max_items: int):
        self.categories = _listed("categories", categories)
        count = len(self.categories)
        for name, number in (("min_items", min_items), ("max_items", max_items)):
            _check_number(name, number, whole=True)
        if not 0 <= min_items <= max_items <= count:
            raise UsageError(
                f"min_items and max_items must be from 0 to the {count} categories and in order, "
                f"got {min_items} and {max_items}"
            )
        self.min_items, self.max_items = min_items, max_items

    def __repr__(self):
        return f"{self.min_items}..{self.max_items} of {_texts(self.categories)}"

    def draw(self, rng):
        number = int(rng.integers(self.min_items, self.max_items, endpoint=True))
        return [number, *(float(each) for each in rng.random(len(self.categories)))]

    def suggest(self, trial, name):
        number = trial.suggest_int(f"{name}:number", self.min_items, self.max_items)
        return [
            number,
            *(trial.suggest_float(f"{name}:{i}", 0.0, 1.0) for i in range(len(self.categories))),
        ]

    def value(self, draw):
        number, *weights = draw
        taken = sorted(np.argsort(weights)[::-1][:number])
        return [self.categories[i] for i in taken]


class SampleFrom:
    """A value that a function makes of the others.

    Parameters
    ----------
    func : callable
        ``func(spec)``; ``spec.config`` holds the values of the trial, as attributes and by name.
    """

    def __init__(self, func: Callable):
        if not callable(func):
            raise UsageError(
                f"sample_from takes a function of the configuration, got {type(func).__name__}"
            )
        self.func = func

    def __repr__(self):
        return f"sample_from({getattr(self.func, '__name__', 'function')})"


class GridSearch:
    """All of several values: a trial for each."""

    def __init__(self, values: Sequence):
        self.values = _listed("values", values)

    def __repr__(self):
        return f"each of {_texts(self.values)}"


_EPS = 1e-9


def _check_number(name, number, whole):
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(number, bool) or not isinstance(number, kinds) or not math.isfinite(number):
        wanted = "an integer" if whole else "a number"
        raise UsageError(f"{name} must be {wanted}, got {number!r}")


def _listed(name, values) -> list:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UsageError(f"{name} must be a list of values, got {values!r}")
    values = list(values)
    if not values:
        raise UsageError(f"{name} must hold at least one value")
    return values


def _multiple(steps, q):
    # 3 * 0.1 is 0.30000000000000004
    return round(steps * q, 12) if isinstance(q, float) else steps * q


def _texts(values) -> list[str]:
    return [getattr(value, "__name__", None) or repr(value) for value in values]
