"""Temporary replacement of attributes, in this process and in the processes that it starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


class _Missing:
    """Marker for an attribute that the object itself did not define."""


class AttributePatch:
    """Undoable replacement of attributes of modules, classes and other objects.

    Attributes
    ----------
    active : bool
        True while any attribute is replaced.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._before)

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, vars(owner).get(name, _Missing)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all replaced attributes; a second call has no effect."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is not _Missing:
                setattr(owner, name, value)
            else:
                with suppress(AttributeError):  # other code has already restored it
                    delattr(owner, name)


class Patch(AttributePatch):
    """Attribute replacements that the worker processes of a training run repeat.

    Attributes
    ----------
    call : (function, tuple)
        Function and arguments that repeat the replacements in another process. Set it together
        with the first replacement.
    """

    call: tuple[Callable[..., Any], tuple]

    def __init__(self) -> None:
        super().__init__()
        _patches.append(self)


_patches: list[Patch] = []


class Patches:
    """Picklable object that applies the active patches in the process that unpickles it.

    Pickle it before objects whose unpickling depends on the patches, for example because it
    imports modules of the user.

    Parameters
    ----------
    *others : (function, tuple)
        Further calls for the other process, made after the patches.
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
    """Callable that replaces a module's ``forward``; copies and pickles restore the original."""

    def __init__(self, module: Any):
        self.module: Any = module
        self.forward: Callable[..., Any] = module.forward
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # as the user's forward
        return self.forward(*args, **kwargs)

    def __reduce__(self):
        return _as_written, (self.forward,)


def _as_written(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
