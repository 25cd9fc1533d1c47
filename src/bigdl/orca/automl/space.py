"""A search space: a dict of domains, functions, grids and fixed values, nested in any way.

What a trial draws of it is a dict of path and draw (:mod:`bigdl.orca.automl.domains`), plain
numbers that can be written as JSON; :meth:`SearchSpace.resolve` makes the configuration of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.domains import Domain, GridSearch, SampleFrom

__all__ = ["Draws", "SearchSpace"]

Draws = dict[str, Any]


class SearchSpace:
    """What configurations are drawn from.

    Parameters
    ----------
    space : dict of str to object
        Values of :mod:`bigdl.orca.automl.hp` or of ``ray.tune``, further dicts and lists of them,
        and fixed values.

    Attributes
    ----------
    domains : dict of str to Domain
        By path, such as ``"model/units"``.
    grids : dict of str to GridSearch

    Raises
    ------
    UsageError
        If it is no dict of names.
    """

    def __init__(self, space: Mapping[str, Any]):
        if not isinstance(space, Mapping):
            raise UsageError(
                "search_space must be a dict of names and of values of bigdl.orca.automl.hp, got "
                f"{type(space).__name__}"
            )
        self.domains: dict[str, Domain] = {}
        self.grids: dict[str, GridSearch] = {}
        self._space = self._walk(space, "")

    def __repr__(self):
        found = {**self.domains, **self.grids}
        return f"SearchSpace({', '.join(f'{path}: {each!r}' for path, each in found.items())})"

    @property
    def grid_size(self) -> int:
        """Combinations of the grids' values; 1 without grids."""
        return int(np.prod([len(grid.values) for grid in self.grids.values()], dtype=int))

    def random_draws(self, seed: int, number: int) -> Draws:
        """The draws of a trial: its point of the grid, and random ones that depend on (seed,
        number) alone."""
        rng = np.random.default_rng([seed, number])
        draws = {path: domain.draw(rng) for path, domain in self.domains.items()}
        return {**self.grid_draws(number), **draws}

    def grid_draws(self, number: int) -> Draws:
        """The point of the grid that a trial tries."""
        places = itertools.product(*(range(len(grid.values)) for grid in self.grids.values()))
        point = next(itertools.islice(places, number % self.grid_size, None))
        return dict(zip(self.grids, point, strict=True))

    def suggest(self, trial, number: int) -> Draws:
        """The draws that a trial of Optuna suggests."""
        draws = {path: domain.suggest(trial, path) for path, domain in self.domains.items()}
        return {**self.grid_draws(number), **draws}

    def resolve(self, draws: Draws, seed: int, number: int) -> dict[str, Any]:
        """The configuration of draws.

        Functions of ``hp.sample_from`` find the random numbers of ``random`` and ``numpy.random``
        in a state of (seed, number), so that they make the same again.

        Raises
        ------
        UsageError
            If a function fails, or two need each other.
        """
        config = _filled(self._space, draws)
        functions = dict(_functions(config))
        with _seeded(seed, number):
            while functions:
                values, failures = {}, {}
                for path, function in functions.items():
                    try:
                        values[path] = function.func(SimpleNamespace(config=_View(config)))
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

    def example(self, seed: int) -> dict[str, Any]:
        """A configuration, to see what is made of one."""
        return self.resolve(self.random_draws(seed, 0), seed, 0)

    def text(self, path: str, draw: Any) -> Any:
        """What a draw stands for, as a value of JSON: itself, or its name."""
        domain = self.domains.get(path)
        value = self.grids[path].values[draw] if domain is None else domain.value(draw)
        return plain(value)

    def _walk(self, value, path):
        value = _of_ray(value)
        if isinstance(value, Domain):
            self.domains[path] = value
            return _Place(path, value)
        if isinstance(value, GridSearch):
            self.grids[path] = value
            return _Place(path, value)
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise UsageError(f"search_space must have names as keys, got {key!r}")
            below = f"{path}/" if path else ""
            return {key: self._walk(each, f"{below}{key}") for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._walk(each, f"{path}/{i}") for i, each in enumerate(value))
        return value


def plain(value: Any) -> Any:
    """A value as JSON can write it: numbers, strings and lists of them as they are, others by
    their names."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return getattr(value, "__name__", None) or repr(value)


class _Place:
    """Where a draw goes."""

    def __init__(self, path, source):
        self.path, self.source = path, source

    def value(self, draws):
        draw = draws[self.path]
        if isinstance(self.source, GridSearch):
            return self.source.values[draw]
        return self.source.value(draw)


def _filled(value, draws):
    if isinstance(value, _Place):
        return value.value(draws)
    if isinstance(value, dict):
        return {key: _filled(each, draws) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(each, draws) for each in value)
    return value


def _functions(value, path=()):
    """Paths and functions that wait for the other values."""
    if isinstance(value, SampleFrom):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _functions(each, (*path, key))
    elif type(value) in (list, tuple):
        for place, each in enumerate(value):
            if type(value) is tuple and any(True for _ in _functions(each)):
                raise UsageError("hp.sample_from cannot be in a tuple; write a list")
            yield from _functions(each, (*path, place))


def _put(config, path, value):
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def _refuse(functions, failures):
    names = ", ".join("/".join(map(str, path)) for path in functions)
    for path, error in failures.items():
        name = "/".join(map(str, path))
        raise UsageError(
            f"The function of hp.sample_from for {name!r} failed: {error!r}"
        ) from error
    raise UsageError(f"The functions of hp.sample_from for {names} need each other's values")


class _Unresolved(Exception):
    """A value was asked for that a function has yet to make."""


class _View(dict):
    """A configuration, also by attributes, that says when a value is not known yet."""

    def __getitem__(self, key):
        value = super().__getitem__(key)
        if isinstance(value, SampleFrom):
            raise _Unresolved
        return _View(value) if isinstance(value, dict) else value

    def get(self, key, default=None):
        try:
            return self[key]
        except KeyError:
            return default

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"The configuration has no {name!r}; it has {list(self)}"
            ) from None


class _seeded:
    """The global random numbers in a state of their own for a while."""

    def __init__(self, *seed: int):
        self._seed = seed

    def __enter__(self):
        self._before = random.getstate(), np.random.get_state()
        start = int(np.random.SeedSequence(self._seed).generate_state(1)[0])
        random.seed(start)
        np.random.seed(start)

    def __exit__(self, *_):
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])


def _of_ray(value):
    """A domain of ``ray.tune`` as one of ours; other values as they are."""
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return GridSearch(value["grid_search"])
    if not type(value).__module__.startswith("ray.tune.search"):
        return value
    from bigdl.orca.automl.search.ray_domains import from_ray

    return from_ray(value)
