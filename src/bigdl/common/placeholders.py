"""Placeholders for models that are built later, such as those of a hyper-parameter search.

A function that accepts a model also accepts a placeholder: it calls :func:`resolve_placeholder`
first.
"""

from __future__ import annotations

import abc
from typing import Any


class ModelPlaceholder(abc.ABC):
    """Placeholder for an object that is built when it is first needed."""

    @abc.abstractmethod
    def _resolve(self) -> Any:
        """Return the represented object; build it first if necessary."""


def resolve_placeholder(value: object) -> Any:  # as the caller knows
    """Return the object that a placeholder represents; return any other `value` unchanged."""
    return value._resolve() if isinstance(value, ModelPlaceholder) else value
