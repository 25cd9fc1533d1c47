"""The driver's side of a Keras fit, and what an Estimator has trained so far."""

from __future__ import annotations

from typing import NamedTuple

from bigdl.orca.learn.tf2.loop import KerasFitProgram
from bigdl.orca.learn.tf2.parts import KerasParts, Packed
from bigdl.orca.learn.tf2.state import dump_weights
from bigdl.training.fit import Training

__all__ = ["KerasTraining", "OnItsWay"]


class OnItsWay(NamedTuple):
    """Parts of a model and callbacks, packed for the workers, and the config that these need."""

    packed: Packed
    config: dict


class KerasTraining(Training):
    """:class:`~bigdl.training.fit.Training` of a Keras model."""

    def _program(self, parts: OnItsWay, settings):
        return KerasFitProgram(parts.packed, parts.config, settings, self._sync)

    def weights(self, parts: KerasParts) -> bytes:
        """The weights; before the first fit those that it would start from.

        They are empty for a model that learns its input's shape from the first batch only.
        """
        if self.snapshot is not None:
            return self.snapshot.files["model.pt"]
        model = parts.build_on_driver(self.seed)
        return dump_weights(model) if model.built else b""
