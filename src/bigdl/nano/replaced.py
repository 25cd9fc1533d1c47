"""Attributes that are replaced for some time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class _Missing:
    """Stands for an attribute that an object did not have itself."""


class Replaced:
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
