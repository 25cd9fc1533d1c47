"""Attributes that are replaced for some time, in this process and in those that it starts."""

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


class _Missing:
    """Stands for an attribute that an object did not have itself."""


class AttributePatch:
    """Replaces attributes of modules, classes and other objects, and puts them back.

    Attributes
    ----------
    active : bool
        Whether any is replaced.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._before)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, vars(owner).get(name, _Missing)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put all of them back; again does nothing."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is not _Missing:
                setattr(owner, name, value)
            else:
                with suppress(AttributeError):  # somebody else has put it back
                    delattr(owner, name)


class Patch(AttributePatch):
    """Replacements that the processes of a training are to make, too.

    Attributes
    ----------
    call : (function, tuple)
        The function, and its arguments, by which another process makes them; set with the first.
    """

    call: tuple[Callable[..., Any], tuple]

    def __init__(self) -> None:
        super().__init__()
        _patches.append(self)


_patches: list[Patch] = []


class Patches:
    """The patches of this process.

    Where an object of this class is unpickled, they are in force from then on, so that what is
    unpickled after it finds them: modules of the user's are imported for that, too.

    Parameters
    ----------
    *others : (function, tuple)
        Calls that the other process makes after them.
    """

    def __init__(self, *others: tuple[Callable[..., Any], tuple]):
        self._others = others

    def __reduce__(self) -> tuple:
        active = [patch.call for patch in _patches if patch.active]
        return _repeat, ([*active, *self._others],)


def _repeat(calls: Iterable[tuple[Callable[..., Any], tuple]]) -> None:
    for function, arguments in calls:
        function(*arguments)


class ForwardOverride:
    """Another way of a module's forward; a copy of the module has its own, as it is written."""

    def __init__(self, module: Any):
        self.module: Any = module
        self.forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self):
        return _as_written, (self.forward,)


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
