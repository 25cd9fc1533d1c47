"""Search spaces: nested objects whose values are drawn for each trial.

A program describes a search by an object that contains domains: a dict of parameters, the arguments
of a model or of its layers, or lists of them. The object is *visited* once, which names the
parameter of each domain (:class:`Naming`). It is *resolved* for each trial: an :class:`Assignment`
gives every domain its value, and lazy objects are constructed with resolved arguments
(:func:`resolve`). If the categories of a choice contain domains, only the chosen category is
resolved, so a trial has relevant parameters only.

A trial records the *parameters* of a :class:`Domain`: numbers and names with an Optuna
distribution, such as the index of a choice. So finished trials can be read again, even if the
values are arbitrary objects.

:class:`SearchSpace` is the dict of domains of ``bigdl.orca.automl``; the spaces of
``bigdl.nano.automl`` are also :class:`Lazy`.
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
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import LazyModule, UsageError
from bigdl.training.state import isolated_rng, mixed_seed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial

T = TypeVar("T")
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""Value that can be written as JSON."""

distributions = LazyModule("optuna.distributions", "automl")

_EPS = 1e-9
_PREFIX_END = ":"


# Lazy objects ------------------------------------------------------------------------------------


class Lazy(ABC):
    """Base class of objects whose value is chosen later, once per trial."""

    @abstractmethod
    def visit(self, naming: Naming, name: str) -> None:
        """Register the domains in this object with `naming`; `name` is the object's path."""

    @abstractmethod
    def resolve(self, assignment: Assignment) -> object:
        """Return the value of this object for an assignment."""


class Naming:
    """Registry of unique names for the domains in an object.

    A domain is named after its argument or path, with the domain's prefix if it has one. A number
    is appended if another domain has that name. The same domain object in several locations is one
    parameter.

    Parameters
    ----------
    root : object
        The object to visit.
    separator : str
        Separator between the name of an object and of its part.

    Attributes
    ----------
    domains : dict of str to Domain
        Domains by name, in visiting order.
    conditions : dict of str to tuple of (Domain, int)
        For each domain the enclosing choices, with the index of the enclosing category.
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
        return type(self), (self.root, self._separator)  # names refer to object ids of this process

    def add(self, domain: Domain, name: str) -> None:
        """Register a domain under a unique name."""
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
        """Register the domains inside a domain's categories, each conditional on its category."""
        for index, category in enumerate(categories):
            self._within.append((domain, index))
            visit(category, self, self.join(name, str(index)))
            self._within.pop()

    def name_of(self, domain: Domain) -> str:
        """Return the name of a registered domain."""
        return self._names[id(domain)]

    def join(self, name: str, part: str) -> str:
        """Join the path of a container and the name of one of its items with the separator."""
        return f"{name}{self._separator}{part}" if name else part

    def is_new(self, lazy: Lazy) -> bool:
        """Return True on the first visit of a lazy object."""
        is_new = id(lazy) not in self._visited
        self._visited[id(lazy)] = lazy
        return is_new


class Assignment:
    """Parameter values of one trial for the domains in an object.

    Parameters
    ----------
    naming : Naming
    source : optuna.trial.BaseTrial or mapping of str to object
        Suggests parameters, or contains them by name.

    Attributes
    ----------
    calls : list of SampleFrom
        Objects whose functions are running, innermost last.
    """

    def __init__(self, naming: Naming, source: BaseTrial | Mapping[str, Any]):
        self.naming, self._source = naming, source
        self.calls: list[SampleFrom] = []
        self._resolved: dict[int, Any] = {}

    def parameters_of(self, domain: Domain) -> list[Any]:
        """Return a domain's parameter values, which are equal wherever the domain occurs."""
        source: Any = self._source
        parameters = domain.parameters(self.naming.name_of(domain))
        if isinstance(source, Mapping):
            return [source[name] for name in parameters]
        return [source._suggest(name, each) for name, each in parameters.items()]

    def once(self, lazy: Lazy, build: Callable[[], T]) -> T:
        """Return the value of a lazy object; build it on the first call only."""
        if id(lazy) not in self._resolved:
            self._resolved[id(lazy)] = build()
        return cast("T", self._resolved[id(lazy)])


def random_parameters(
    parameters: Mapping[str, BaseDistribution], rng: np.random.Generator
) -> dict[str, Any]:
    """Draw random parameters without an Optuna sampler."""
    return {name: _random_value(distribution, rng) for name, distribution in parameters.items()}


def _random_value(distribution: Any, rng: np.random.Generator) -> object:
    """Draw a random value of a distribution."""
    if isinstance(distribution, distributions.CategoricalDistribution):
        return distribution.choices[int(rng.integers(len(distribution.choices)))]
    low, high = distribution.low, distribution.high
    number = float if isinstance(distribution, distributions.FloatDistribution) else round
    if distribution.log:
        return number(math.exp(rng.uniform(math.log(low), math.log(high))))
    if number is float:
        return float(rng.uniform(low, high))
    return int(rng.integers(low, high, endpoint=True))


def visit(value: object, naming: Naming, name: str) -> None:
    """Name the domains in a search-space value, which may be a Python container."""
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


def resolve(value: Any, assignment: Assignment) -> Any:  # the value without search spaces
    """Return a copy of a search-space value with all lazy objects resolved."""
    if isinstance(value, Lazy):
        return value.resolve(assignment)
    return _map_parts(value, lambda inner: resolve(inner, assignment))


def resolve_category(value: Any, assignment: Assignment) -> Any:  # the value without search spaces
    """Return a chosen category; resolve it only if it contains lazy objects."""
    return resolve(value, assignment) if holds_lazy(value) else value


def holds_lazy(value: object) -> bool:
    """Return True if a value contains lazy objects."""
    return isinstance(value, Lazy) or any(holds_lazy(inner) for _, inner in _parts(value))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    # Exact types only: named tuples and subclasses of list are not copied.
    if type(value) is dict:
        yield from ((str(name), inner) for name, inner in value.items())
    elif type(value) in (list, tuple):
        yield from ((str(index), inner) for index, inner in enumerate(value))


def _opaque_parts(value: Any) -> Iterator[Any]:
    """Yield the contents of a container that :func:`_parts` skips, such as a set or a dataclass."""
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


def _map_parts(value: Any, function: Callable[[Any], Any]) -> object:
    """Apply a function to the items of a dict, list or tuple and return a new container."""
    if type(value) is dict:
        return {name: function(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


# Domains -----------------------------------------------------------------------------------------


class Domain(Lazy):
    """Base class of domains, from which one value is drawn per trial.

    Attributes
    ----------
    prefix : str or None
        Prefix of the parameter's name.
    """

    prefix: str | None = None

    @property
    @abstractmethod
    def distribution(self) -> BaseDistribution:
        """Optuna distribution of the parameter."""

    def parameters(self, name: str) -> dict[str, BaseDistribution]:
        """Return the Optuna distributions of all parameters of this domain."""
        return {name: self.distribution}

    @abstractmethod
    def value(self, parameter: Any) -> object:
        """Convert the value of an Optuna parameter to the value that it represents."""

    def visit(self, naming: Naming, name: str) -> None:
        naming.add(self, name)

    def resolve(self, assignment: Assignment) -> object:
        return self.value(*assignment.parameters_of(self))


class Number(Domain):
    """Numeric interval, uniform or logarithmic, optionally restricted to multiples of `q`.

    Parameters
    ----------
    lower, upper : int or float
        Bounds, included if `whole` or if they are multiples of `q`.
    q : int or float, optional
        Step: values are its multiples.
    log : bool
        Whether the logarithm is uniformly distributed.
    whole : bool
        Whether values are integers.
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
        """Optuna distribution of the values, or of their multiples of `q`."""
        if self.q is not None and not self.log:
            return cast("BaseDistribution", distributions.IntDistribution(*self._steps()))
        distribution = (
            distributions.IntDistribution if self.whole else distributions.FloatDistribution
        )
        return cast("BaseDistribution", distribution(self.lower, self.upper, log=self.log))

    def value(self, parameter: float) -> float:
        if self.q is not None:
            if self.log:
                lowest, highest = self._steps()
                parameter = min(max(round(parameter / self.q), lowest), highest)
            parameter = _multiple(cast("int", parameter), self.q)
        return round(parameter) if self.whole else float(parameter)

    def _steps(self) -> tuple[int, int]:
        """Return the integers n for which ``n * q`` is the smallest and the largest value."""
        q = cast("float", self.q)
        return math.ceil(self.lower / q - _EPS), math.floor(self.upper / q + _EPS)


class Normal(Domain):
    """Normally distributed number, whose Optuna parameter is the cumulative probability."""

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
    """Categorical domain, whose Optuna parameter is the index of the chosen value.

    A value may contain domains, which are drawn if that value is chosen.
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

    def value(self, parameter: int) -> object:
        return self.categories[parameter]

    def visit(self, naming: Naming, name: str) -> None:
        super().visit(naming, name)
        naming.visit_categories(self, self.categories, name)

    def chosen(self, assignment: Assignment) -> object:
        """Return the category chosen in a trial; it may contain further domains."""
        return self.value(*assignment.parameters_of(self))

    def resolve(self, assignment: Assignment) -> object:
        return resolve_category(self.chosen(assignment), assignment)


class GridSearch(Choice):
    """Grid dimension: every value is tried in a separate trial."""

    def __init__(self, values: Sequence[Any]):
        self.categories = _checked_list("values", values)

    def __repr__(self) -> str:
        return f"each of {_texts(self.categories)}"


class Subset(Domain):
    """Random subset of categories in their original order, selected by random weights."""

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
        """Optuna distribution of the number of chosen values."""
        return cast(
            "BaseDistribution", distributions.IntDistribution(self.min_items, self.max_items)
        )

    def parameters(self, name: str) -> dict[str, BaseDistribution]:
        weight = distributions.FloatDistribution(0.0, 1.0)
        weights = {f"{name}:{index}": weight for index in range(len(self.categories))}
        return {f"{name}:number": self.distribution, **weights}

    def value(self, parameter: int, *weights: float) -> list[Any]:
        return [self.categories[i] for i in sorted(np.argsort(weights)[::-1][:parameter])]

    def visit(self, naming: Naming, name: str) -> None:
        super().visit(naming, name)
        naming.visit_categories(self, self.categories, name)

    def resolve(self, assignment: Assignment) -> list[Any]:
        chosen = self.value(*assignment.parameters_of(self))
        return [resolve_category(each, assignment) for each in chosen]


class SampleFrom(Lazy):
    """A value that a function computes from the other values.

    Parameters
    ----------
    func : callable
        ``func(spec)``; ``spec.config`` has the values of the trial, as attributes and by key.
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
        """Store `name` for error messages; there is no domain to register."""
        self.name = name

    def resolve(self, assignment: Assignment) -> object:
        if self in assignment.calls:
            names = ", ".join(each.name for each in assignment.calls)
            raise _CircularDependency(
                f"The functions of hp.sample_from for {names} depend on each other"
            )
        return assignment.once(self, lambda: self._result(assignment))

    def _result(self, assignment: Assignment) -> object:
        config = _ConfigView(assignment.naming.root, assignment)
        assignment.calls.append(self)
        try:
            result = self.func(SimpleNamespace(config=config))
        except _CircularDependency:
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


def _with_drawn_values(value: object, assignment: Assignment) -> object:
    """Replace the domains in a value with their drawn values; keep ``sample_from`` functions."""
    if isinstance(value, Domain):
        return _with_drawn_values(value.value(*assignment.parameters_of(value)), assignment)
    return _map_parts(value, lambda inner: _with_drawn_values(inner, assignment))


# Search spaces -----------------------------------------------------------------------------------


class SearchSpace:
    """Nested dict of domains, functions, grids and fixed values.

    Parameters
    ----------
    space : dict of str to object
        Domains, :class:`SampleFrom`, fixed values, and dicts and lists of them. A domain in two
        locations is two parameters.
    convert : callable, optional
        Converts domains of another library, and returns other values unchanged.

    Attributes
    ----------
    domains : dict of str to Domain
        By path, such as ``"model/units"``.
    grids : dict of str to GridSearch
        The grid domains, which are not drawn.

    Raises
    ------
    UsageError
        If `space` is no dict with string keys.
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
        self._naming = Naming(_copy_domains(space, convert), "/")
        self.domains = self._naming.domains
        self.grids = {p: each for p, each in self.domains.items() if isinstance(each, GridSearch)}

    def __repr__(self) -> str:
        domains = ", ".join(f"{path}: {each!r}" for path, each in self.domains.items())
        return f"SearchSpace({domains})"

    @functools.cached_property
    def _grid_points(self) -> Sequence[tuple[int, ...]]:
        """Distinct combinations of the grids' values, as indices of categories.

        A grid inside a category of another grid varies only if that category is tried; otherwise
        it keeps its first value.
        """
        numbers = {id(grid): number for number, grid in enumerate(self.grids.values())}
        around = [
            [(numbers[id(d)], index) for d, index in self._naming.conditions[n] if id(d) in numbers]
            for n in self.grids
        ]
        product = _Product([len(grid.categories) for grid in self.grids.values()])
        if not any(around):
            return product

        def differs(point: Sequence[int]) -> bool:
            return all(
                not index or all(point[other] == category for other, category in conditions)
                for index, conditions in zip(point, around, strict=True)
            )

        return list(filter(differs, product))

    @property
    def grid_size(self) -> int:
        """Number of combinations of the grids' values; 1 without grids."""
        return len(self._grid_points)

    @property
    def drawn_parameters(self) -> dict[str, BaseDistribution]:
        """Optuna distributions of all parameters except those of grids."""
        return {
            name: distribution
            for path, domain in self.domains.items()
            for name, distribution in domain.parameters(path).items()
            if path not in self.grids
        }

    def grid_point(self, number: int) -> dict[str, Any]:
        """Return the grid parameters of the trial with this number."""
        point = self._grid_points[number % self.grid_size]
        return dict(zip(self.grids, point, strict=True))

    def random_parameters(self, seed: int, number: int) -> dict[str, Any]:
        """Draw the parameters of a trial, determined by (seed, number)."""
        rng = np.random.default_rng([seed, number])
        return {**self.grid_point(number), **random_parameters(self.drawn_parameters, rng)}

    def resolve(
        self, source: BaseTrial | Mapping[str, Any], seed: int, number: int
    ) -> dict[str, Any]:
        """Return the configuration for a trial, or for a mapping of parameter names to values.

        ``random`` and ``numpy.random`` are seeded by (seed, number) for functions of
        ``hp.sample_from``, so that their values are reproducible.

        Raises
        ------
        UsageError
            If a function fails, or two functions depend on each other.
        """
        with isolated_rng(mixed_seed(seed, number)):
            return cast(
                "dict[str, Any]", resolve(self._naming.root, Assignment(self._naming, source))
            )

    def json_values(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON value of each domain whose parameters are given, by domain path."""
        values = {}
        assignment = Assignment(self._naming, parameters)
        for path, domain in self.domains.items():
            names = domain.parameters(path)
            if parameters.keys() >= names.keys():
                chosen = domain.value(*(parameters[name] for name in names))
                if holds_lazy(chosen) or (type(chosen) is list and any(map(holds_lazy, chosen))):
                    chosen = _with_drawn_values(chosen, assignment)
                values[path] = json_value(chosen)
        return values


def json_value(value: Any) -> JsonValue:
    """Convert a value to JSON-serializable values; replace other objects with their names."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    return getattr(value, "__name__", None) or repr(value)


def _copy_domains(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Copy a space with new domain objects, so that each domain is a separate parameter."""
    value = convert(value)
    if isinstance(value, Lazy):
        value = copy.copy(value)
        if isinstance(value, Choice | Subset):
            value.categories = [_copy_category(each, convert) for each in value.categories]
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
    return _map_parts(value, lambda inner: _copy_domains(inner, convert))


def _copy_category(value: object, convert: Callable[[Any], Any]) -> object:
    """Copy a category with new domain objects; return it unchanged if it has no domains."""

    def converted(inner: Any) -> object:
        inner = convert(inner)
        return _map_parts(dict(inner) if isinstance(inner, Mapping) else inner, converted)

    copied = converted(value)
    return _copy_domains(copied, convert) if holds_lazy(copied) else value


class _Product(Sequence[Any]):
    """Lazy Cartesian product of ranges, with the last index changing fastest."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        point = []
        for size in reversed(self._sizes):
            number, index = divmod(number, size)
            point.append(index)
        return tuple(reversed(point))


class _CircularDependency(UsageError):
    """Raised when functions of ``hp.sample_from`` depend on each other's values."""

    code = "search-space"


class _ConfigView(Mapping[str, Any]):
    """Lazy view of a trial's values, which are read by key or as attributes."""

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
