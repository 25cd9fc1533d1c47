"""The driver's own PyTorch model and optimizer of a training by the parameter layer."""

from __future__ import annotations

import copy

import numpy as np

from bigdl.common.errors import require
from bigdl.orca.learn.layer_fit.model import LayerModel
from bigdl.orca.learn.layer_fit.options import LayerOptions
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.layer_replica import trained_parameters
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.steps import step_for
from bigdl.orca.parameter_layer.optimizers import check_optimizer, groups_of
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.training.checkpoint import Snapshot
from bigdl.training.state import dumps, isolated_rng

__all__ = ["TorchLayerModel"]


class TorchLayerModel(LayerModel):
    """A PyTorch model and its optimizer.

    Parameters
    ----------
    parts : ModelParts
        Instances in it are copied.
    settings : FitSettings
    snapshot : Snapshot, optional
        What to start from.
    """

    def __init__(self, parts: ModelParts, settings: FitSettings, snapshot: Snapshot | None):
        cloudpickle = require("cloudpickle", "orca")
        own = cloudpickle.loads(cloudpickle.dumps(parts))
        own.initialize = None  # for workers
        with isolated_rng(settings.seed):
            self.built = own.build(training=True)
        check_optimizer(self.built.optimizer)
        self._parameters = trained_parameters(self.built.optimizer)
        self._buffers = list(self.built.model.buffers())
        self._clipping = settings.clipping
        if snapshot is not None:
            self.load(snapshot)
        self.start = dumps(self.built.model.state_dict())
        self._initial = self._running()
        columns = BatchColumns(settings.feature_cols, settings.label_cols)
        self.sums = step_for(
            self.built.model, self.built.criterion, weighted=settings.weighted, columns=columns
        ).sums

    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """The plan of a training of this model."""
        optimizer, clipping = self.built.optimizer, self._clipping
        clamp = None if clipping.minimum is None else (clipping.minimum, clipping.maximum)
        return LayerPlan(
            tuple(p.numel() for p in self._parameters),
            groups_of(optimizer),
            type(optimizer),
            ranks,
            options.compression,
            self.sums,
            clamp,
            clipping.norm,
            max_drop=options.max_drop,
        )

    def hyper(self) -> tuple[dict, ...]:
        """The optimizer's groups as they are now, without their parameters."""
        groups = self.built.optimizer.param_groups
        return tuple(
            {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups
        )

    def pass_step(self) -> None:
        """Let the optimizer count a step, without gradients; schedulers look at that."""
        self.built.optimizer.zero_grad()
        self.built.optimizer.step()

    # -- the state of the ranks ----------------------------------------------------------------

    def vector(self, plan: LayerPlan) -> np.ndarray:
        """The parameters as they are now, in the order of the flat vector."""
        return plan.geometry.flatten([p.detach().numpy() for p in self._parameters])

    def _shapes(self):
        return [tuple(p.shape) for p in self._parameters]

    def _running(self):
        return [buffer.numpy().copy() for buffer in self._buffers]

    def _put(self, parts, running):
        import torch

        with torch.no_grad():
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
            for buffer, values in zip(self._buffers, running, strict=True):
                buffer.copy_(torch.from_numpy(np.array(values)))

    def _optimizer_state(self):
        return self.built.optimizer.state_dict()["state"]

    def _put_optimizer_state(self, state):
        for number, parameter in enumerate(self._parameters):
            if number in state:
                self.built.optimizer.state[parameter] = state[number]

    # -- files ---------------------------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""
        self.built.load(snapshot.files)

    def files(self) -> dict[str, bytes]:
        """What a checkpoint holds of the model and the optimizer: the slices of all ranks."""
        return self.built.files()
