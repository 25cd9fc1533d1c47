"""Registries of named objects from BigDL, the program and installed packages.

An installed package offers an object by an entry point in the registry's group. The entry point is
loaded when its name is first looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from bigdl.common.errors import UsageError

T = TypeVar("T")
logger = logging.getLogger(__name__)


def plugin(group: str, name: str) -> object | None:
    """Return the object of a package's entry point, or None if the entry point does not exist.

    Parameters
    ----------
    group : str
        Group of the entry points, such as ``"bigdl.operators"``.
    name : str

    Raises
    ------
    UsageError
        If several packages offer the name, or the object cannot be imported.
    """
    offers = list(entry_points(group=group, name=name))
    if len(offers) > 1:
        packages = sorted(_package_of(each) for each in offers)
        raise UsageError(
            f"{', '.join(packages)} all offer {name!r} as one of {group}; uninstall all but one",
            code="argument-conflict",
            name=name,
        )
    if not offers:
        return None
    try:
        loaded: object = offers[0].load()
    except Exception as error:  # whatever the modules of a package raise
        raise UsageError(
            f"{_package_of(offers[0])} offers {name!r} as one of {group}, but {offers[0].value} "
            f"cannot be imported: {type(error).__name__}: {error}; update or uninstall the package",
            code="plugin-unusable",
            name=name,
        ) from error
    return loaded


def _package_of(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist else offer.value


class Registry(Mapping[str, T], Generic[T]):
    """Mapping of names to registered objects and to entry points of installed packages.

    Iteration includes the names of entry points without loading them.

    Parameters
    ----------
    group : str
        The group of entry points, such as ``"bigdl.metrics"``.
    noun : str
        Noun for an object in messages, with its article: ``"a metric"``.
    check : callable
        ``check(name, value)`` returns the object to register, or raises a UsageError.
    key : callable, optional
        Normalizes names: names with equal ``key(name)`` are one name.

    Examples
    --------
    >>> from bigdl.common.plugins import Registry
    >>> roots = Registry("example.roots", "a root", lambda name, value: value)
    >>> roots.register("square", lambda x: x**0.5) and list(roots)
    ['square']
    >>> roots["square"](9.0)
    3.0
    """

    def __init__(
        self,
        group: str,
        noun: str,
        check: Callable[[str, object], T],
        key: Callable[[str], str] = str,
    ) -> None:
        self.group, self.noun = group, noun
        self._check, self._key = check, key
        self._known: dict[str, T] = {}
        self._names: dict[str, str] = {}

    def register(self, name: str, value: object) -> T:
        """Register an object under a name and return it.

        A class that is defined again, as by a repeated notebook cell, replaces the former one.

        Raises
        ------
        UsageError
            If the object cannot be registered here, or another object has the name.
        """
        checked = self._check(name, value)
        if not isinstance(name, str) or not self._key(name):
            raise UsageError(
                f"The name of {self.noun} should be a text, but got {name!r}",
                code="argument-type",
                argument="name",
            )
        key = self._key(name)
        if key in self._known and not _is_redefinition(self._known[key], checked):
            raise UsageError(
                f"{_named(self._known[key])} already has the name {self._names[key]!r}; give "
                f"{_named(checked)} another one",
                code="argument-conflict",
                name=name,
            )
        self._known[key], self._names[key] = checked, name
        return checked

    def is_registered(self, name: str) -> bool:
        """Return True if the program registered this name; entry points do not count."""
        return self._key(name) in self._known

    def discard(self, name: str) -> None:
        """Remove a registered name, if it exists."""
        self._known.pop(self._key(name), None)
        self._names.pop(self._key(name), None)

    def __getitem__(self, name: str) -> T:
        key = self._key(name)
        if key not in self._known:
            offered = self._offered().get(key)
            if offered is None:
                raise KeyError(name)
            value = plugin(self.group, offered)
            if key not in self._known:  # importing its module may have registered it
                self.register(offered, value)
        return self._known[key]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        key = self._key(name)
        return key in self._known or key in self._offered()

    def __iter__(self) -> Iterator[str]:
        yield from list(self._names.values())
        yield from (name for key, name in self._offered().items() if key not in self._known)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def loaded(self, prefix: str = "") -> dict[str, T]:
        """Load and return all objects whose names begin with a prefix.

        A log warning names each package whose object cannot be used.
        """
        objects: dict[str, T] = {}
        for name in self:
            if name.startswith(prefix):
                try:
                    objects[name] = self[name]
                except UsageError as error:
                    logger.warning("%s", error)
        return objects

    def _offered(self) -> dict[str, str]:
        return {self._key(each.name): each.name for each in entry_points(group=self.group)}


def _is_redefinition(known: object, value: object) -> bool:
    """Return True if a value is the registered object or a redefinition of that object."""
    if known is value or (known == value) is True:
        return True
    if isinstance(known, type) and isinstance(value, type):
        return full_name(known) == full_name(value)
    return type(known) is not type(value) and full_name(type(known)) == full_name(type(value))


def full_name(cls: type) -> str:
    """Return the module and the qualified name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _named(value: object) -> str:
    return full_name(value if isinstance(value, type) else type(value))
