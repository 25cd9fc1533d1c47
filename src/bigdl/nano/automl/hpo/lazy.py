"""Values that are chosen later: what spaces and lazy objects have in common.

A program describes a search by an object that holds search spaces: in the arguments of a model, in
those of its layers, in lists of these. Such an object is *visited* once, when each simple space
gets the name under which its parameter is reported (:class:`Naming`). For each trial it is then
*taken*: a :class:`Choice` gives every simple space its value, and lazy objects are constructed with
the values of their arguments (:func:`take`). Of choices that are spaces themselves, only the chosen
one is taken, so a trial has the parameters that matter for it and no others.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.nano.automl.hpo.space import SimpleSpace

__all__ = [
    "SPLITTER",
    "Choice",
    "Lazy",
    "Naming",
    "Searchable",
    "holds_spaces",
    "joined",
    "take",
    "visit",
]

SPLITTER = "▁"
"""Stands in names between that of a nested space and that of its part."""

_PREFIX_END = ":"


class Lazy(abc.ABC):
    """What stands for a value that is chosen later."""

    @abc.abstractmethod
    def visit(self, naming: Naming, name: str) -> None:
        """Add the simple spaces inside; `name` is where the object was found."""

    @abc.abstractmethod
    def take(self, choice: Choice) -> Any:
        """The value."""


class Searchable(Lazy):
    """What a user can look at by itself: its spaces, and values for some choices."""

    @property
    def kwspaces(self) -> dict[str, SimpleSpace]:
        """The simple spaces inside by name."""
        return Naming(self).spaces

    @property
    def default(self) -> Any:
        """The value where nothing was chosen: that of the defaults of all spaces."""
        return self.sample()

    @property
    def rand(self) -> Any:
        """A value at random, of Python's generator."""
        return take(self, Choice(Naming(self), lambda name, space: space.at_random()))

    def sample(self, **config: Any) -> Any:
        """The value for some choices.

        Parameters
        ----------
        **config
            Values by the names of :attr:`kwspaces`; all others are the defaults.
        """
        return take(self, Choice.of_config(Naming(self), config))


class Naming:
    """The names of the simple spaces in an object.

    A space has the name of the argument that it was given for, after its own prefix if it has one.
    If another space has that name already, a number is added, since the two are chosen
    independently. The same space in several places is one parameter.

    Parameters
    ----------
    root : object
        Visited at once.

    Attributes
    ----------
    spaces : dict of str to SimpleSpace
        In the order in which they were found.
    """

    def __init__(self, root: Any):
        self.spaces: dict[str, SimpleSpace] = {}
        self._names: dict[int, str] = {}
        self._visited: dict[int, Lazy] = {}
        visit(root, self, "")

    def add(self, space: SimpleSpace, name: str) -> None:
        """Give a space its name."""
        if id(space) in self._names:
            return
        wanted = name or "value"
        if space.prefix:
            wanted = f"{space.prefix}{_PREFIX_END}{wanted}"
        free, number = wanted, 1
        while free in self.spaces:
            number += 1
            free = f"{wanted}_{number}"
        self._names[id(space)] = free
        self.spaces[free] = space

    def of(self, space: SimpleSpace) -> str:
        """The name of a space that was found."""
        return self._names[id(space)]

    def is_new(self, lazy: Lazy) -> bool:
        """Whether an object that holds others is visited for the first time."""
        known = id(lazy) in self._visited
        self._visited[id(lazy)] = lazy
        return not known


class Choice:
    """Values for the simple spaces of one object.

    Parameters
    ----------
    naming : Naming
    choose : callable
        Takes the name of a space and the space, and returns its value.

    Attributes
    ----------
    chosen : dict of str to object
        What was chosen, by name, as it is reported.
    """

    def __init__(self, naming: Naming, choose: Callable[[str, SimpleSpace], Any]):
        self._naming = naming
        self._choose = choose
        self._built: dict[int, Any] = {}
        self.chosen: dict[str, Any] = {}

    @classmethod
    def of_config(cls, naming: Naming, config: dict[str, Any]) -> Choice:
        """Values by name, and the default of each space that has none.

        Raises
        ------
        UsageError
            If there is no space of a name.
        """
        unknown = sorted(set(config) - set(naming.spaces))
        if unknown:
            raise UsageError(
                f"There is no search space called {', '.join(map(repr, unknown))}; there are "
                f"{', '.join(map(repr, naming.spaces)) or 'none'}"
            )

        def choose(name: str, space: SimpleSpace) -> Any:
            return config.get(name, space.reported_default)

        return cls(naming, choose)

    @classmethod
    def of_trial(cls, naming: Naming, trial: Any) -> Choice:
        """What an Optuna trial proposes."""
        return cls(naming, lambda name, space: space.suggest(trial, name))

    def value(self, space: SimpleSpace) -> Any:
        """What is reported for a space."""
        name = self._naming.of(space)
        if name not in self.chosen:
            self.chosen[name] = self._choose(name, space)
        return self.chosen[name]

    def built(self, lazy: Lazy, build: Callable[[], Any]) -> Any:
        """What a lazy object is in this choice: the same wherever it was given."""
        if id(lazy) not in self._built:
            self._built[id(lazy)] = build()
        return self._built[id(lazy)]


def visit(value: Any, naming: Naming, name: str) -> None:
    """Name the spaces in a value, which may be a container of Python's."""
    if isinstance(value, Lazy):
        value.visit(naming, name)
        return
    for part, inner in _parts(value):
        visit(inner, naming, joined(name, part))


def take(value: Any, choice: Choice) -> Any:
    """A value with everything lazy in it chosen."""
    if isinstance(value, Lazy):
        return value.take(choice)
    if not holds_spaces(value):
        return value
    if isinstance(value, dict):
        return {name: take(inner, choice) for name, inner in value.items()}
    return type(value)(take(inner, choice) for inner in value)


def holds_spaces(value: Any) -> bool:
    """Whether something in a value is chosen later."""
    if isinstance(value, Lazy):
        return True
    return any(holds_spaces(inner) for _, inner in _parts(value))


def joined(name: str, part: str) -> str:
    """The name of a part of something that may have a name."""
    return f"{name}{SPLITTER}{part}" if name else part


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    # Exactly these: a named tuple, or a list of a library's own, is not made again.
    if type(value) is dict:
        yield from ((str(name), inner) for name, inner in value.items())
    elif type(value) in (list, tuple):
        yield from ((str(place), inner) for place, inner in enumerate(value))
