"""What an Estimator has trained so far of a PyTorch model, and the driver's side of a fit."""

from __future__ import annotations

from bigdl.orca.learn.pytorch.loop import FitProgram
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.training.state import dumps, isolated_rng
from bigdl.training.training import Training

__all__ = ["TorchTraining"]


class TorchTraining(Training):
    """:class:`~bigdl.training.training.Training` of a PyTorch model."""

    def _program(self, parts: ModelParts, settings):
        return FitProgram(parts, settings, self._sync)

    def weights(self, parts: ModelParts) -> bytes:
        """The state dict of the model; before the first fit the one that it would start from."""
        if self.snapshot is not None:
            return self.snapshot.files["model.pt"]
        with isolated_rng(self.seed):
            return dumps(parts.build_model().state_dict())
