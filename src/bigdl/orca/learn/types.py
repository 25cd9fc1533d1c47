"""Types of annotations that the Estimators share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

Criterion: TypeAlias = "Callable[..., torch.Tensor]"
"""Loss function of predictions and targets, such as a module of ``torch.nn``."""


class ScheduleRunner(Protocol):
    """Runner whose progress determines when a scheduler is stepped."""

    main: Any

    @property
    def epochs(self) -> int:
        """Number of finished epochs."""

    @property
    def global_step(self) -> int:
        """Number of optimizer steps."""


class Loadable(Protocol):
    """An object that loads a state dict: a module, an optimizer or a scheduler."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> object:
        """Replace the state."""
