"""The driver's own model and optimizer of a training by the parameter layer.

They make no steps.  The optimizer is there for its schedule: the hyper-parameters of every step of
a group are read off it before the group runs.  Model and optimizer get the state of the ranks when
somebody wants to have it: a checkpoint, a validation, a callback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from bigdl.orca.learn.layer_fit.options import LayerOptions
from bigdl.orca.parameter_layer.buffers import changed
from bigdl.orca.parameter_layer.optimizers import joined_state
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.orca.parameter_layer.state import RankState, states_of
from bigdl.training.checkpoint import Snapshot

__all__ = ["LayerModel"]


class LayerModel(ABC):
    """What a training by the parameter layer is about, on the driver.

    Attributes
    ----------
    sums : bool
        Whether the loss adds up over the rows.
    start : bytes
        The weights at the start.
    """

    sums: bool
    start: bytes
    _initial: list[np.ndarray]  # what layers change, as it was at the start

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """The plan of a training of this model."""

    @abstractmethod
    def hyper(self) -> tuple[dict, ...]:
        """The hyper-parameters of the optimizer's groups for the next step."""

    @abstractmethod
    def vector(self, plan: LayerPlan) -> np.ndarray:
        """The trained weights as they are now, in the order of the flat vector."""

    @abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """What a checkpoint holds of the model and the optimizer: the slices of all ranks."""

    @abstractmethod
    def _shapes(self) -> list[tuple[int, ...]]:
        """Of the trained weights."""

    @abstractmethod
    def _running(self) -> list[np.ndarray]:
        """A copy of what layers change besides the trained weights."""

    @abstractmethod
    def _put(self, parts: Sequence[np.ndarray], running: Sequence[np.ndarray]) -> None:
        """Set the trained weights, of which the parts are flat, and what layers change."""

    @abstractmethod
    def _optimizer_state(self) -> Mapping[int, Mapping]:
        """The optimizer's state of every trained weight by its number."""

    @abstractmethod
    def _put_optimizer_state(self, state: Mapping[int, Mapping]) -> None:
        """The inverse of :meth:`_optimizer_state`; what is not given stays."""

    # -- the state of the ranks ----------------------------------------------------------------

    def states(self, plan: LayerPlan, residuals: Sequence | None = None) -> list[RankState]:
        """The model and optimizer as they are now, cut for the ranks of a plan."""
        buffers = changed(self._initial, self._running())
        return states_of(plan, self.vector(plan), self._optimizer_state(), buffers, residuals)

    def take(self, states: Sequence[RankState], plan: LayerPlan) -> None:
        """The inverse of :meth:`states`."""
        vector = np.concatenate([state.weights for state in states])
        running = dict(enumerate(self._initial))
        for state in states:
            running.update(state.buffers)
        self._put(plan.geometry.parts(vector), list(running.values()))
        optimizer = [state.optimizer for state in states]
        self._put_optimizer_state(joined_state(optimizer, plan.geometry, self._shapes()))
