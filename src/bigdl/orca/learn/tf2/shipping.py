"""A Keras model on its way to the tasks that predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bigdl.orca.learn.tf2.data import Assembly
from bigdl.orca.learn.tf2.parts import Packed
from bigdl.orca.learn.tf2.state import put_weights
from bigdl.orca.learn.tf2.steps import steps_of

__all__ = ["KerasReady", "KerasSnapshot", "call_on"]


@dataclass(frozen=True)
class KerasSnapshot:
    """What :class:`~bigdl.orca.learn.prediction.shipping.Shipped` broadcasts of a Keras model.

    Attributes
    ----------
    packed : Packed
        The parts of the model.
    weights : bytes
    names : sequence of str
        Of the feature columns.
    config : dict
    threads : int
        Of each task.
    """

    packed: Packed
    weights: bytes
    names: Sequence[str]
    config: dict
    threads: int

    def ready(self, device) -> KerasReady:
        """The model, in a process; Keras chooses the device itself."""
        (parts,) = self.packed.unpack(self.config, self.threads)
        model = parts.build()
        return KerasReady(model, Assembly.of(model, self.names), self.weights)


class KerasReady:
    """A model where it computes; its outputs keep the shapes that Keras gives them.

    Parameters
    ----------
    model : keras.Model
    assembly : Assembly
    weights : bytes
        Loaded before the first batch, which may tell the model its shapes.
    """

    squeezes: ClassVar[bool] = False

    def __init__(self, model, assembly: Assembly, weights: bytes):
        self.model, self._assembly, self._weights = model, assembly, weights
        self._steps = steps_of(model)
        self._is_loaded = False
        if model.built:
            self._load()

    def __call__(self, batch: list) -> Any:
        """What the model returns for a batch of numpy columns, as arrays."""
        inputs = self._assembly.inputs(batch)
        if not self._is_loaded:
            call_on(self.model, inputs)
            self._load()
        return self._steps.predict(inputs)

    def _load(self):
        put_weights(self.model, self._weights)
        self._is_loaded = True


def call_on(model, inputs: Any) -> None:
    """Let a model make its variables by calling it on the first row of its inputs."""
    import keras

    def first(value):
        return keras.ops.convert_to_tensor(value[:1])

    model(keras.tree.map_structure(first, inputs))
