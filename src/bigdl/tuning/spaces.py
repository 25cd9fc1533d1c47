"""Search spaces: values that are chosen later, in an object of any structure.

A program describes a search by an object that holds domains: in a dict of parameters, in the
arguments of a model, in those of its layers, in lists of these. Such an object is *visited* once,
when each domain gets the name under which its parameter is recorded (:class:`Naming`). For each
trial it is then *resolved*: an :class:`Assignment` gives every domain its value, and lazy objects
are constructed with the values of their arguments (:func:`resolve`). Of choices that hold domains
themselves, only the chosen one is resolved, so a trial has the parameters that matter for it and no
others.

A value of a :class:`Domain` is recorded as a *draw*, which JSON can hold: the place of a choice in
its list, for example. So what a search has tried can be read again, whatever the values are.

:class:`SearchSpace` is a dict of domains as ``bigdl.orca.automl`` takes it; the spaces of
``bigdl.nano.automl`` are :class:`Lazy`, too.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import NormalDist
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from optuna.trial import Trial

Draws = dict[str, Any]
"""Draws by the names of their domains; plain numbers and lists of them."""

_EPS = 1e-9
_PREFIX_END = ":"


# Lazy objects ------------------------------------------------------------------------------------


class Lazy(ABC):
    """An object that stands for a value that is chosen later."""

    @abstractmethod
    def visit(self, naming: Naming, name: str) -> None:
        """Add the domains inside; `name` is where the object stands."""

    @abstractmethod
    def resolve(self, assignment: Assignment) -> Any:
        """Return the value."""


class Naming:
    """Names of the domains in an object.

    A domain has the name of the argument that it was given for, after its own prefix if it has one.
    If another domain has that name already, a number is added, since the two are chosen
    independently. The same domain in several places is one parameter.

    Parameters
    ----------
    root : object
        Visited at once.
    separator : str
        Stands between the name of an object and that of its part.

    Attributes
    ----------
    domains : dict of str to Domain
        In the order in which they were visited.
    """

    def __init__(self, root: Any, separator: str):
        self.domains: dict[str, Domain] = {}
        self._root, self._separator = root, separator
        self._names: dict[int, str] = {}
        self._visited: dict[int, Lazy] = {}
        visit(root, self, "")

    def __reduce__(self) -> tuple:
        return type(self), (self._root, self._separator)  # names belong to the objects of a process

    def add(self, domain: Domain, name: str) -> None:
        """Give a domain its name."""
        if id(domain) in self._names:
            return
        wanted = name or "value"
        if domain.prefix:
            wanted = f"{domain.prefix}{_PREFIX_END}{wanted}"
        free, number = wanted, 1
        while free in self.domains:
            number += 1
            free = f"{wanted}_{number}"
        self._names[id(domain)] = free
        self.domains[free] = domain

    def name_of(self, domain: Domain) -> str:
        """Return the name of a domain that was visited."""
        return self._names[id(domain)]

    def join(self, name: str, part: str) -> str:
        """Return the name of a part of something that may have a name."""
        return f"{name}{self._separator}{part}" if name else part

    def is_new(self, lazy: Lazy) -> bool:
        """Return True if an object that holds others is visited for the first time."""
        is_new = id(lazy) not in self._visited
        self._visited[id(lazy)] = lazy
        return is_new


class Assignment:
    """Draws for the domains of one object.

    Parameters
    ----------
    naming : Naming
    draw : callable
        Takes the name of a domain and the domain, and returns a draw.
    """

    def __init__(self, naming: Naming, draw: Callable[[str, Domain], Any]):
        self._naming = naming
        self._draw = draw
        self._draws: Draws = {}
        self._resolved: dict[int, Any] = {}

    @classmethod
    def of_trial(cls, naming: Naming, trial: Trial | RandomTrial) -> Assignment:
        """Return what a trial suggests."""
        return cls(naming, lambda name, domain: domain.suggest(trial, name))

    def draw_of(self, domain: Domain) -> Any:
        """Return the draw of a domain, which is the same wherever the domain stands."""
        name = self._naming.name_of(domain)
        if name not in self._draws:
            self._draws[name] = self._draw(name, domain)
        return self._draws[name]

    def once(self, lazy: Lazy, build: Callable[[], Any]) -> Any:
        """Return the value of a lazy object, which is built once wherever the object stands."""
        if id(lazy) not in self._resolved:
            self._resolved[id(lazy)] = build()
        return self._resolved[id(lazy)]


def visit(value: Any, naming: Naming, name: str) -> None:
    """Name the domains in a value, which may be a container of Python's."""
    if isinstance(value, Lazy):
        value.visit(naming, name)
        return
    for part, inner in _parts(value):
        visit(inner, naming, naming.join(name, part))


def resolve(value: Any, assignment: Assignment) -> Any:
    """Return a value with everything lazy in it resolved; containers are new ones."""
    if isinstance(value, Lazy):
        return value.resolve(assignment)
    return _mapped(value, lambda inner: resolve(inner, assignment))


def holds_lazy(value: Any) -> bool:
    """Return True if something in a value is chosen later."""
    return isinstance(value, Lazy) or any(holds_lazy(inner) for _, inner in _parts(value))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    # Exactly these: a named tuple, or a list of a library's own, is not made again.
    if type(value) is dict:
        yield from ((str(name), inner) for name, inner in value.items())
    elif type(value) in (list, tuple):
        yield from ((str(place), inner) for place, inner in enumerate(value))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container with a function's results in the places of its parts."""
    if type(value) is dict:
        return {name: function(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


# Domains -----------------------------------------------------------------------------------------


class Domain(Lazy):
    """Values of one parameter, of which one is drawn for each trial.

    Attributes
    ----------
    prefix : str or None
        Begin of the parameter's name.
    """

    prefix: str | None = None

    @abstractmethod
    def suggest(self, trial: Trial | RandomTrial, name: str) -> Any:
        """Return the draw that a trial suggests under a name."""

    @abstractmethod
    def value(self, draw: Any) -> Any:
        """Return what a draw stands for."""

    def visit(self, naming: Naming, name: str) -> None:
        naming.add(self, name)

    def resolve(self, assignment: Assignment) -> Any:
        return self.value(assignment.draw_of(self))

    def sample(self, rng: np.random.Generator | int | None = None) -> Any:
        """Return a random value; `rng` may be a seed."""
        return self.value(self.suggest(RandomTrial(np.random.default_rng(rng)), ""))


class RandomTrial:
    """Suggests by chance what a trial of Optuna suggests by a sampler."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Return a number from `low` to `high`."""
        if log:
            return float(math.exp(self._rng.uniform(math.log(low), math.log(high))))
        return float(self._rng.uniform(low, high))

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """Return an integer from `low` to `high`, both included."""
        if log:
            return round(self.suggest_float(name, low, high, log=True))
        return int(self._rng.integers(low, high, endpoint=True))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        return choices[int(self._rng.integers(len(choices)))]


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
        Integers.
    """

    def __init__(
        self,
        lower: float,
        upper: float,
        *,
        q: float | None = None,
        log: bool = False,
        whole: bool = False,
    ):
        check = check_integer if whole else check_number
        check("lower", lower)
        check("upper", upper)
        if lower > upper:
            raise UsageError(f"lower must not be above upper, got {lower!r} and {upper!r}")
        if log and lower <= 0:
            raise UsageError(f"lower must be above 0 on a logarithmic scale, got {lower!r}")
        if q is not None:
            check("q", q)
            check_number("q", q, above=0)
            if math.floor(upper / q + _EPS) < math.ceil(lower / q - _EPS):
                raise UsageError(f"There is no multiple of {q!r} from {lower!r} to {upper!r}")
        self.lower, self.upper, self.q, self.log, self.whole = lower, upper, q, log, whole

    def __repr__(self) -> str:
        step = "" if self.q is None else f", q={self.q}"
        return f"{'log' if self.log else ''}{self.lower}..{self.upper}{step}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the draws: of the values, or of their multiples of `q`."""
        return (self.lower, self.upper) if self.q is None or self.log else self._steps()

    @property
    def has_integer_draws(self) -> bool:
        """True if draws are integers."""
        return self.whole or (self.q is not None and not self.log)

    def suggest(self, trial: Trial | RandomTrial, name: str) -> float:
        suggest: Any = trial.suggest_int if self.has_integer_draws else trial.suggest_float
        return suggest(name, *self.bounds, log=self.log)

    def value(self, draw: float) -> float:
        if self.q is not None:
            if self.log:
                lowest, highest = self._steps()
                draw = min(max(round(draw / self.q), lowest), highest)
            draw = _multiple(cast("int", draw), self.q)
        return round(draw) if self.whole else float(draw)

    def _steps(self) -> tuple[int, int]:
        """Return the multiples of `q` at the ends."""
        q = cast("float", self.q)
        return math.ceil(self.lower / q - _EPS), math.floor(self.upper / q + _EPS)


class Normal(Domain):
    """Numbers of a normal distribution; a draw is the part of it that lies below."""

    def __init__(self, mean: float = 0.0, std: float = 1.0, *, q: float | None = None):
        check_number("mean", mean)
        check_number("std", std, above=0)
        check_number("q", 1 if q is None else q, above=0)
        self.mean, self.std, self.q = mean, std, q

    def __repr__(self) -> str:
        return f"normal({self.mean}, {self.std})" + ("" if self.q is None else f", q={self.q}")

    def suggest(self, trial: Trial | RandomTrial, name: str) -> float:
        return trial.suggest_float(name, _EPS, 1 - _EPS)

    def value(self, draw: float) -> float:
        number = NormalDist(self.mean, self.std).inv_cdf(draw)
        return number if self.q is None else float(_multiple(round(number / self.q), self.q))


class Choice(Domain):
    """One of several values; a draw is its place."""

    def __init__(self, categories: Sequence[Any]):
        self.categories = _checked_list("categories", categories)

    def __repr__(self) -> str:
        return f"one of {_texts(self.categories)}"

    def suggest(self, trial: Trial | RandomTrial, name: str) -> int:
        return trial.suggest_categorical(name, list(range(len(self.categories))))

    def value(self, draw: int) -> Any:
        return self.categories[draw]


class GridSearch(Choice):
    """All of several values: a trial for each."""

    def __init__(self, values: Sequence[Any]):
        self.categories = _checked_list("values", values)

    def __repr__(self) -> str:
        return f"each of {_texts(self.categories)}"


class Subset(Domain):
    """Some of several values, in their order; a draw is a number for each.

    The first number of a draw is the count, and the values with the largest others are taken.
    """

    def __init__(self, categories: Sequence[Any], min_items: int, max_items: int):
        self.categories = _checked_list("categories", categories)
        count = len(self.categories)
        check_integer("min_items", min_items)
        check_integer("max_items", max_items)
        if not 0 <= min_items <= max_items <= count:
            raise UsageError(
                f"min_items and max_items must be from 0 to the {count} categories and in order, "
                f"got {min_items} and {max_items}"
            )
        self.min_items, self.max_items = min_items, max_items

    def __repr__(self) -> str:
        return f"{self.min_items}..{self.max_items} of {_texts(self.categories)}"

    def suggest(self, trial: Trial | RandomTrial, name: str) -> list[float]:
        count = trial.suggest_int(f"{name}:number", self.min_items, self.max_items)
        places = range(len(self.categories))
        return [count, *(trial.suggest_float(f"{name}:{i}", 0.0, 1.0) for i in places)]

    def value(self, draw: Sequence[float]) -> list[Any]:
        count, *weights = draw
        return [self.categories[i] for i in sorted(np.argsort(weights)[::-1][:count])]


class SampleFrom(Lazy):
    """A value that a function makes of the others.

    Parameters
    ----------
    func : callable
        ``func(spec)``; ``spec.config`` holds the values of the trial, as attributes and by name.
    """

    def __init__(self, func: Callable[[Any], Any]):
        if not callable(func):
            raise UsageError(
                f"sample_from takes a function of the configuration, got {type(func).__name__}"
            )
        self.func = func

    def __repr__(self) -> str:
        return f"sample_from({getattr(self.func, '__name__', 'function')})"

    def visit(self, naming: Naming, name: str) -> None:
        """Add nothing: the value is not drawn."""

    def resolve(self, assignment: Assignment) -> SampleFrom:
        """Return the object itself; :class:`SearchSpace` calls it when the others are known."""
        return self


def _checked_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UsageError(f"{name} must be a list of values, got {values!r}")
    values = list(values)
    if not values:
        raise UsageError(f"{name} must hold at least one value")
    return values


def _multiple(steps: int, q: float) -> float:
    # 3 * 0.1 is 0.30000000000000004
    return round(steps * q, 12) if isinstance(q, float) else steps * q


def _texts(values: Sequence[Any]) -> list[str]:
    return [getattr(value, "__name__", None) or repr(value) for value in values]


# Search spaces -----------------------------------------------------------------------------------


class SearchSpace:
    """A dict of domains, functions, grids and fixed values, nested in any way.

    Parameters
    ----------
    space : dict of str to object
        Domains, :class:`SampleFrom`, further dicts and lists of them, and fixed values. A domain
        in two places is two parameters.
    convert : callable, optional
        Makes one of these of a value of another library, and returns other values as they are.

    Attributes
    ----------
    domains : dict of str to Domain
        By path, such as ``"model/units"``; those that are drawn.
    grids : dict of str to GridSearch

    Raises
    ------
    UsageError
        If it is no dict of names.
    """

    def __init__(
        self, space: Mapping[str, Any], convert: Callable[[Any], Any] = lambda value: value
    ):
        if not isinstance(space, Mapping):
            raise UsageError(
                "search_space must be a dict of names and of values of bigdl.orca.automl.hp, got "
                f"{type(space).__name__}"
            )
        self._space = _own_copy(space, convert)
        self._naming = Naming(self._space, "/")
        every = self._naming.domains
        self.grids = {p: domain for p, domain in every.items() if isinstance(domain, GridSearch)}
        self.domains = {p: domain for p, domain in every.items() if p not in self.grids}

    def __repr__(self) -> str:
        every = {**self.domains, **self.grids}
        return f"SearchSpace({', '.join(f'{path}: {each!r}' for path, each in every.items())})"

    @property
    def grid_size(self) -> int:
        """Number of combinations of the grids' values; 1 without grids."""
        return math.prod(len(grid.categories) for grid in self.grids.values())

    def random_draws(self, seed: int, number: int) -> Draws:
        """Return the point of the grid and the random draws of a trial, which depend on (seed,
        number) alone."""
        return self.suggest(RandomTrial(np.random.default_rng([seed, number])), number)

    def suggest(self, trial: Trial | RandomTrial, number: int) -> Draws:
        """Return the draws that a trial suggests."""
        draws = {path: domain.suggest(trial, path) for path, domain in self.domains.items()}
        return {**self._grid_draws(number), **draws}

    def _grid_draws(self, number: int) -> Draws:
        places = itertools.product(*(range(len(grid.categories)) for grid in self.grids.values()))
        point = next(itertools.islice(places, number % self.grid_size, None))
        return dict(zip(self.grids, point, strict=True))

    def resolve(self, draws: Draws, seed: int, number: int) -> dict[str, Any]:
        """Return the configuration of draws.

        Functions of ``hp.sample_from`` find the random numbers of ``random`` and ``numpy.random``
        in a state of (seed, number), so that they make the same again.

        Raises
        ------
        UsageError
            If a function fails, or two need each other.
        """
        config = resolve(self._space, Assignment(self._naming, lambda name, _: draws[name]))
        functions = dict(_functions(config))
        with _seeded(seed, number):
            while functions:
                values, failures = {}, {}
                for path, function in functions.items():
                    try:
                        values[path] = function.func(SimpleNamespace(config=_ConfigView(config)))
                    except _Unresolved:
                        continue
                    except Exception as error:
                        failures[path] = error
                for path, value in values.items():
                    _put(config, path, value)
                    del functions[path]
                if not values:
                    _refuse(functions, failures)
        return config

    def json_draw(self, path: str, draw: Any) -> Any:
        """Return what a draw stands for as a value of JSON: itself, or its name."""
        return json_value(self._naming.domains[path].value(draw))


def json_value(value: Any) -> Any:
    """Return numbers, strings, and lists and dicts of them as JSON has them, and the names of
    other values."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    return getattr(value, "__name__", None) or repr(value)


def _own_copy(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a space with domains of its own, so that each is a parameter by itself."""
    value = convert(value)
    if isinstance(value, Domain):
        return copy.copy(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"search_space must have names as keys, got {key!r}")
        value = dict(value)
    return _mapped(value, lambda inner: _own_copy(inner, convert))


def _functions(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, SampleFrom]]:
    """Yield the paths and functions that wait for the other values."""
    if isinstance(value, SampleFrom):
        yield path, value
    elif type(value) is tuple and any(True for each in value for _ in _functions(each)):
        raise UsageError("hp.sample_from cannot be in a tuple; write a list")
    elif type(value) in (dict, list):
        for key, each in value.items() if type(value) is dict else enumerate(value):
            yield from _functions(each, (*path, key))


def _put(config: Any, path: tuple, value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def _refuse(functions: Mapping[tuple, SampleFrom], failures: Mapping[tuple, Exception]) -> None:
    for path, error in failures.items():
        name = "/".join(map(str, path))
        raise UsageError(
            f"The function of hp.sample_from for {name!r} failed: {error!r}"
        ) from error
    names = ", ".join("/".join(map(str, path)) for path in functions)
    raise UsageError(f"The functions of hp.sample_from for {names} need each other's values")


class _Unresolved(Exception):
    """A value was asked for that a function has yet to make."""


class _ConfigView(dict):
    """A configuration, also by attributes, that raises where a value is not known yet."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, SampleFrom):
            raise _Unresolved
        return _ConfigView(value) if isinstance(value, dict) else value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"The configuration has no {name!r}; it has {list(self)}")
        return self[name]


@contextmanager
def _seeded(*seed: int) -> Iterator[None]:
    """Put the global random numbers into a state of their own for a while."""
    before = random.getstate(), np.random.get_state()
    start = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(start)
    np.random.seed(start)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
