"""Objects that stand for models, such as those that are searched before they are made.

What takes a model takes such an object, too: it asks :func:`actual` for the model first.
"""

import abc
from typing import Any


class ModelPlaceholder(abc.ABC):
    """Stands for another object."""

    @abc.abstractmethod
    def _resolve(self) -> Any:
        """The other object; made now if it was not."""


def resolve_placeholder(value: Any) -> Any:
    """Return the object that a stand-in stands for, or `value` itself."""
    return value._resolve() if isinstance(value, ModelPlaceholder) else value
