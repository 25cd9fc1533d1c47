"""Search spaces: values that are chosen later, in an object of any structure.

A program describes a search by an object that holds domains: in a dict of parameters, in the
arguments of a model, in those of its layers, in lists of these. Such an object is *visited* once,
when each domain gets the name under which its parameter is recorded (:class:`Naming`). For each
trial it is then *resolved*: an :class:`Assignment` gives every domain its value, and lazy objects
are constructed with the values of their arguments (:func:`resolve`). Of choices that hold domains
themselves, only the chosen one is resolved, so a trial has the parameters that matter for it and no
others.

What a trial records of a :class:`Domain` are its *parameters*: numbers and names that a
distribution of Optuna describes, such as the place of a choice in its list. So what a search has
tried can be read again, whatever the values are.

:class:`SearchSpace` is a dict of domains as ``bigdl.orca.automl`` takes it; the spaces of
``bigdl.nano.automl`` are :class:`Lazy`, too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import LazyModule, UsageError
from bigdl.training.state import isolated_rng, mixed_seed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial

distributions = LazyModule("optuna.distributions", "automl")

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
    conditions : dict of str to tuple of (Domain, int)
        Of each domain the choices around it, and the index of the category that holds it.
    """

    def __init__(self, root: Any, separator: str):
        self.domains: dict[str, Domain] = {}
        self.conditions: dict[str, tuple[tuple[Domain, int], ...]] = {}
        self._within: list[tuple[Domain, int]] = []
        self.root, self._separator = root, separator
        self._names: dict[int, str] = {}
        self._visited: dict[int, Lazy] = {}
        visit(root, self, "")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self._separator)  # names belong to the objects of a process

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
        self.conditions[free] = tuple(self._within)

    def visit_categories(self, domain: Domain, categories: Sequence[Any], name: str) -> None:
        """Add the domains in the categories of a domain; they count where theirs is chosen."""
        for place, category in enumerate(categories):
            self._within.append((domain, place))
            visit(category, self, self.join(name, str(place)))
            self._within.pop()

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
    """Values of the parameters of one object.

    Parameters
    ----------
    naming : Naming
    source : optuna.trial.BaseTrial or mapping of str to object
        Suggests parameters, or has them by their names.

    Attributes
    ----------
    calls : list of SampleFrom
        Those whose functions are being called.
    """

    def __init__(self, naming: Naming, source: BaseTrial | Mapping[str, Any]):
        self.naming, self._source = naming, source
        self.calls: list[SampleFrom] = []
        self._resolved: dict[int, Any] = {}

    def parameters_of(self, domain: Domain) -> list[Any]:
        """Return the parameters of a domain, which are the same wherever the domain stands."""
        source: Any = self._source
        parameters = domain.parameters(self.naming.name_of(domain))
        if isinstance(source, Mapping):
            return [source[name] for name in parameters]
        return [source._suggest(name, each) for name, each in parameters.items()]

    def once(self, lazy: Lazy, build: Callable[[], Any]) -> Any:
        """Return the value of a lazy object, which is built once wherever the object stands."""
        if id(lazy) not in self._resolved:
            self._resolved[id(lazy)] = build()
        return self._resolved[id(lazy)]


def random_parameters(
    parameters: Mapping[str, BaseDistribution], rng: np.random.Generator
) -> dict[str, Any]:
    """Return parameters by chance, in place of what a sampler of Optuna suggests."""
    return {name: _drawn(distribution, rng) for name, distribution in parameters.items()}


def _drawn(distribution: Any, rng: np.random.Generator) -> Any:
    if isinstance(distribution, distributions.CategoricalDistribution):
        return distribution.choices[int(rng.integers(len(distribution.choices)))]
    low, high = distribution.low, distribution.high
    number = float if isinstance(distribution, distributions.FloatDistribution) else round
    if distribution.log:
        return number(math.exp(rng.uniform(math.log(low), math.log(high))))
    if number is float:
        return float(rng.uniform(low, high))
    return int(rng.integers(low, high, endpoint=True))


def visit(value: Any, naming: Naming, name: str) -> None:
    """Name the domains in a value, which may be a container of Python's."""
    if isinstance(value, Lazy):
        value.visit(naming, name)
        return
    if any(map(holds_lazy, _opaque_parts(value))):
        raise UsageError(
            f"{f'{name!r} is' if name else 'There is'} a {type(value).__name__} that holds search "
            "spaces, where they are not found; put them in a dict, a list or a tuple",
            code="search-space",
        )
    for part, inner in _parts(value):
        visit(inner, naming, naming.join(name, part))


def resolve(value: Any, assignment: Assignment) -> Any:
    """Return a value with everything lazy in it resolved; containers are new ones."""
    if isinstance(value, Lazy):
        return value.resolve(assignment)
    return _mapped(value, lambda inner: resolve(inner, assignment))


def resolve_category(value: Any, assignment: Assignment) -> Any:
    """Return a chosen category: the object itself, unless something in it is chosen later."""
    return resolve(value, assignment) if holds_lazy(value) else value


def holds_lazy(value: Any) -> bool:
    """Return True if something in a value is chosen later."""
    return isinstance(value, Lazy) or any(holds_lazy(inner) for _, inner in _parts(value))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    # Exactly these: a named tuple, or a list of a library's own, is not made again.
    if type(value) is dict:
        yield from ((str(name), inner) for name, inner in value.items())
    elif type(value) in (list, tuple):
        yield from ((str(place), inner) for place, inner in enumerate(value))


def _opaque_parts(value: Any) -> Iterator[Any]:
    """Yield what an object holds that :func:`_parts` does not look into."""
    if type(value) in (dict, list, tuple):
        return
    if isinstance(value, functools.partial):
        yield from (*value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container with a function's results in the places of its parts."""
    if type(value) is dict:
        return {name: function(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


# Domains -----------------------------------------------------------------------------------------


class Domain(Lazy):
    """Values of which one is drawn for each trial.

    Attributes
    ----------
    prefix : str or None
        Begin of the parameter's name.
    """

    prefix: str | None = None

    @property
    @abstractmethod
    def distribution(self) -> BaseDistribution:
        """The distribution of the parameter."""

    def parameters(self, name: str) -> dict[str, BaseDistribution]:
        """Return the distributions of all parameters, for a domain of a name."""
        return {name: self.distribution}

    @abstractmethod
    def value(self, parameter: Any) -> Any:
        """Return what a parameter stands for."""

    def visit(self, naming: Naming, name: str) -> None:
        naming.add(self, name)

    def resolve(self, assignment: Assignment) -> Any:
        return self.value(*assignment.parameters_of(self))


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
            raise UsageError(
                f"lower must not be above upper, got {lower!r} and {upper!r}",
                code="search-space",
                argument="lower",
            )
        if log and lower <= 0:
            raise UsageError(
                f"lower must be above 0 on a logarithmic scale, got {lower!r}",
                code="search-space",
                argument="lower",
            )
        if q is not None:
            check("q", q)
            check_number("q", q, above=0)
            if math.floor(upper / q + _EPS) < math.ceil(lower / q - _EPS):
                raise UsageError(
                    f"There is no multiple of {q!r} from {lower!r} to {upper!r}",
                    code="search-space",
                    argument="q",
                )
        self.lower, self.upper, self.q, self.log, self.whole = lower, upper, q, log, whole

    def __repr__(self) -> str:
        step = "" if self.q is None else f", q={self.q}"
        return f"{'log' if self.log else ''}{self.lower}..{self.upper}{step}"

    @property
    def distribution(self) -> BaseDistribution:
        """The distribution of the values, or of their multiples of `q`."""
        if self.q is not None and not self.log:
            return cast("BaseDistribution", distributions.IntDistribution(*self._steps()))
        kind = distributions.IntDistribution if self.whole else distributions.FloatDistribution
        return cast("BaseDistribution", kind(self.lower, self.upper, log=self.log))

    def value(self, parameter: float) -> float:
        if self.q is not None:
            if self.log:
                lowest, highest = self._steps()
                parameter = min(max(round(parameter / self.q), lowest), highest)
            parameter = _multiple(cast("int", parameter), self.q)
        return round(parameter) if self.whole else float(parameter)

    def _steps(self) -> tuple[int, int]:
        """Return the multiples of `q` at the ends."""
        q = cast("float", self.q)
        return math.ceil(self.lower / q - _EPS), math.floor(self.upper / q + _EPS)


class Normal(Domain):
    """Numbers of a normal distribution; the parameter is the part of it that lies below."""

    def __init__(self, mean: float = 0.0, std: float = 1.0, *, q: float | None = None):
        check_number("mean", mean)
        check_number("std", std, above=0)
        check_number("q", 1 if q is None else q, above=0)
        self.mean, self.std, self.q = mean, std, q

    def __repr__(self) -> str:
        return f"normal({self.mean}, {self.std})" + ("" if self.q is None else f", q={self.q}")

    @property
    def distribution(self) -> BaseDistribution:
        return cast("BaseDistribution", distributions.FloatDistribution(_EPS, 1 - _EPS))

    def value(self, parameter: float) -> float:
        number = NormalDist(self.mean, self.std).inv_cdf(parameter)
        return number if self.q is None else float(_multiple(round(number / self.q), self.q))


class Choice(Domain):
    """One of several values; the parameter is its place.

    A value may hold domains itself, which are drawn where that value is chosen.
    """

    def __init__(self, categories: Sequence[Any]):
        self.categories = _checked_list("categories", categories)

    def __repr__(self) -> str:
        return f"one of {_texts(self.categories)}"

    @property
    def distribution(self) -> BaseDistribution:
        return cast(
            "BaseDistribution",
            distributions.CategoricalDistribution(list(range(len(self.categories)))),
        )

    def value(self, parameter: int) -> Any:
        return self.categories[parameter]

    def visit(self, naming: Naming, name: str) -> None:
        super().visit(naming, name)
        naming.visit_categories(self, self.categories, name)

    def chosen(self, assignment: Assignment) -> Any:
        """Return the category of a trial, in which domains may be left."""
        return self.value(*assignment.parameters_of(self))

    def resolve(self, assignment: Assignment) -> Any:
        return resolve_category(self.chosen(assignment), assignment)


class GridSearch(Choice):
    """All of several values: a trial for each."""

    def __init__(self, values: Sequence[Any]):
        self.categories = _checked_list("values", values)

    def __repr__(self) -> str:
        return f"each of {_texts(self.categories)}"


class Subset(Domain):
    """Some of several values, in their order: so many of those with the largest weights."""

    def __init__(self, categories: Sequence[Any], min_items: int, max_items: int):
        self.categories = _checked_list("categories", categories)
        count = len(self.categories)
        check_integer("min_items", min_items)
        check_integer("max_items", max_items)
        if not 0 <= min_items <= max_items <= count:
            raise UsageError(
                f"min_items and max_items must be from 0 to the {count} categories and in order, "
                f"got {min_items} and {max_items}",
                code="search-space",
                argument="min_items",
            )
        self.min_items, self.max_items = min_items, max_items

    def __repr__(self) -> str:
        return f"{self.min_items}..{self.max_items} of {_texts(self.categories)}"

    @property
    def distribution(self) -> BaseDistribution:
        """The distribution of the number of values."""
        return cast(
            "BaseDistribution", distributions.IntDistribution(self.min_items, self.max_items)
        )

    def parameters(self, name: str) -> dict[str, BaseDistribution]:
        weight = distributions.FloatDistribution(0.0, 1.0)
        weights = {f"{name}:{place}": weight for place in range(len(self.categories))}
        return {f"{name}:number": self.distribution, **weights}

    def value(self, parameter: int, *weights: float) -> list[Any]:
        return [self.categories[i] for i in sorted(np.argsort(weights)[::-1][:parameter])]

    def visit(self, naming: Naming, name: str) -> None:
        super().visit(naming, name)
        naming.visit_categories(self, self.categories, name)

    def resolve(self, assignment: Assignment) -> Any:
        chosen = self.value(*assignment.parameters_of(self))
        return [resolve_category(each, assignment) for each in chosen]


class SampleFrom(Lazy):
    """A value that a function makes of the others.

    Parameters
    ----------
    func : callable
        ``func(spec)``; ``spec.config`` holds the values of the trial, as attributes and by name.
    """

    name = ""

    def __init__(self, func: Callable[[Any], Any]):
        if not callable(func):
            raise UsageError(
                f"sample_from takes a function of the configuration, got {type(func).__name__}",
                code="argument-type",
                argument="func",
            )
        self.func = func

    def __repr__(self) -> str:
        return f"sample_from({getattr(self.func, '__name__', 'function')})"

    def visit(self, naming: Naming, name: str) -> None:
        """Keep the name for messages; the value is not drawn."""
        self.name = name

    def resolve(self, assignment: Assignment) -> Any:
        if self in assignment.calls:
            names = ", ".join(each.name for each in assignment.calls)
            raise _Circle(f"The functions of hp.sample_from for {names} need each other's values")
        return assignment.once(self, lambda: self._result(assignment))

    def _result(self, assignment: Assignment) -> Any:
        config = _ConfigView(assignment.naming.root, assignment)
        assignment.calls.append(self)
        try:
            result = self.func(SimpleNamespace(config=config))
        except _Circle:
            raise
        except Exception as error:
            raise UsageError(
                f"The function of hp.sample_from for {self.name!r} failed: {error!r}",
                code="search-space",
                argument=self.name,
            ) from error
        finally:
            assignment.calls.pop()
        if holds_lazy(result):
            raise UsageError(
                f"The function of hp.sample_from for {self.name!r} returned {result!r}, which is a "
                "search space; return a value, or use hp.choice of the spaces",
                code="search-space",
                argument=self.name,
            )
        return result


def _checked_list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UsageError(
            f"{name} must be a list of values, got {values!r}", code="argument-type", argument=name
        )
    values = list(values)
    if not values:
        raise UsageError(f"{name} must hold at least one value", code="search-space", argument=name)
    return cast("list[Any]", values)


def _multiple(steps: int, q: float) -> float:
    # 3 * 0.1 is 0.30000000000000004
    return round(steps * q, 12) if isinstance(q, float) else steps * q


def _texts(values: Sequence[Any]) -> list[str]:
    return [getattr(value, "__name__", None) or repr(value) for value in values]


def _shown(value: Any, assignment: Assignment) -> Any:
    """Return a value with what its domains have drawn; functions stay."""
    if isinstance(value, Domain):
        return _shown(value.value(*assignment.parameters_of(value)), assignment)
    return _mapped(value, lambda inner: _shown(inner, assignment))


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
        By path, such as ``"model/units"``.
    grids : dict of str to GridSearch
        Those of the domains that are not drawn.

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
                f"{type(space).__name__}",
                code="search-space",
                argument="search_space",
            )
        self._naming = Naming(_own_copy(space, convert), "/")
        self.domains = self._naming.domains
        self.grids = {p: each for p, each in self.domains.items() if isinstance(each, GridSearch)}

    def __repr__(self) -> str:
        domains = ", ".join(f"{path}: {each!r}" for path, each in self.domains.items())
        return f"SearchSpace({domains})"

    @functools.cached_property
    def _grid_points(self) -> Sequence[tuple[int, ...]]:
        """The combinations of the grids' values that differ, as indices of categories.

        A grid in a category of another grid counts where that category is tried, and stays at its
        first value elsewhere.
        """
        numbers = {id(grid): number for number, grid in enumerate(self.grids.values())}
        around = [
            [(numbers[id(d)], place) for d, place in self._naming.conditions[n] if id(d) in numbers]
            for n in self.grids
        ]
        product = _Product([len(grid.categories) for grid in self.grids.values()])
        if not any(around):
            return product

        def differs(point: Any) -> bool:
            return all(
                not index or all(point[other] == place for other, place in conditions)
                for index, conditions in zip(point, around, strict=True)
            )

        return list(filter(differs, product))

    @property
    def grid_size(self) -> int:
        """Number of combinations of the grids' values; 1 without grids."""
        return len(self._grid_points)

    @property
    def drawn_parameters(self) -> dict[str, BaseDistribution]:
        """Distributions of all parameters but those of grids."""
        return {
            name: distribution
            for path, domain in self.domains.items()
            for name, distribution in domain.parameters(path).items()
            if path not in self.grids
        }

    def grid_point(self, number: int) -> dict[str, Any]:
        """Return the parameters of the grids in a trial."""
        point = self._grid_points[number % self.grid_size]
        return dict(zip(self.grids, point, strict=True))

    def random_parameters(self, seed: int, number: int) -> dict[str, Any]:
        """Return the parameters of a trial, by chance; they depend on (seed, number) alone."""
        rng = np.random.default_rng([seed, number])
        return {**self.grid_point(number), **random_parameters(self.drawn_parameters, rng)}

    def resolve(
        self, source: BaseTrial | Mapping[str, Any], seed: int, number: int
    ) -> dict[str, Any]:
        """Return the configuration of a trial, or of parameters by their names.

        Functions of ``hp.sample_from`` find the random numbers of ``random`` and ``numpy.random``
        in a state of (seed, number), so that they make the same again.

        Raises
        ------
        UsageError
            If a function fails, or two need each other.
        """
        with isolated_rng(mixed_seed(seed, number)):
            return cast(
                "dict[str, Any]", resolve(self._naming.root, Assignment(self._naming, source))
            )

    def json_values(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return what parameters stand for by the paths of their domains, as values of JSON."""
        values = {}
        assignment = Assignment(self._naming, parameters)
        for path, domain in self.domains.items():
            names = domain.parameters(path)
            if parameters.keys() >= names.keys():
                chosen = domain.value(*(parameters[name] for name in names))
                if holds_lazy(chosen) or (type(chosen) is list and any(map(holds_lazy, chosen))):
                    chosen = _shown(chosen, assignment)
                values[path] = json_value(chosen)
        return values


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
    if isinstance(value, Lazy):
        value = copy.copy(value)
        if isinstance(value, Choice | Subset):
            value.categories = [_own_category(each, convert) for each in value.categories]
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(
                    f"search_space must have names as keys, got {key!r}",
                    code="search-space",
                    argument="search_space",
                )
        value = dict(value)
    return _mapped(value, lambda inner: _own_copy(inner, convert))


def _own_category(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a category with domains of its own, or the category itself if it holds none."""

    def converted(inner: Any) -> Any:
        inner = convert(inner)
        return _mapped(dict(inner) if isinstance(inner, Mapping) else inner, converted)

    copied = converted(value)
    return _own_copy(copied, convert) if holds_lazy(copied) else value


class _Product(Sequence[Any]):
    """The combinations of some numbers, the last one changing fastest; none is kept."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        point = []
        for size in reversed(self._sizes):
            number, place = divmod(number, size)
            point.append(place)
        return tuple(reversed(point))


class _Circle(UsageError):
    """A function needs a value that needs its own."""

    code = "search-space"


class _ConfigView(Mapping[str, Any]):
    """The values of a trial by name and as attributes; each is resolved when it is asked for."""

    def __init__(self, space: dict[str, Any], assignment: Assignment):
        self._space, self._assignment = space, assignment

    def __getitem__(self, key: str) -> Any:
        value = self._space[key]
        is_category = isinstance(value, Choice)
        while isinstance(value, Choice):
            value = value.chosen(self._assignment)
        if type(value) is dict:
            return _ConfigView(value, self._assignment)
        return (resolve_category if is_category else resolve)(value, self._assignment)

    def __iter__(self) -> Iterator[str]:
        return iter(self._space)

    def __len__(self) -> int:
        return len(self._space)

    def __getattr__(self, name: str) -> Any:
        if name not in self._space:
            raise AttributeError(f"The configuration has no {name!r}; it has {list(self)}")
        return self[name]
