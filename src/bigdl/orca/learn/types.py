"""Types of annotations that the Estimators share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Criterion: TypeAlias = "Callable[..., torch.Tensor]"
"""Loss function of predictions and targets, such as a module of ``torch.nn``."""


class Loadable(Protocol):
    """An object that loads a state dict: a module, an optimizer or a scheduler."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> object:
        """Replace the state."""
