"""Attributes that are others for a while."""

from __future__ import annotations

from typing import Any

__all__ = ["Replaced", "show_torch_to_dynamo"]

_MISSING = object()


class Replaced:
    """Replaces attributes of modules and classes, and puts them back.

    Attributes
    ----------
    active : bool
        Whether any are replaced.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def active(self) -> bool:
        return bool(self._before)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put all of them back; again does nothing."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def show_torch_to_dynamo() -> None:
    """Let TorchDynamo, which optimizers and ``torch.compile`` load, see torch's own functions.

    It makes a table of them by identity when it is loaded. Were others in their places by then, it
    would take those for torch's, and not know torch's own once they are back.
    """
    import torch._dynamo  # noqa: F401
