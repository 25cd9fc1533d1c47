"""The driver's own model and optimizer of a training by the parameter layer.

They make no steps.  The optimizer is there for its schedule: the hyper-parameters of every step of
a group are read off it before the group runs.  Model and optimizer get the state of the ranks when
somebody wants to have it: a checkpoint, a validation, a callback.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import require
from bigdl.orca.learn.checkpoint import Snapshot
from bigdl.orca.learn.layer_fit.options import LayerOptions
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.layer_replica import trained_parameters
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.steps import step_for
from bigdl.orca.learn.state import dumps, isolated_rng, load_into
from bigdl.orca.sync.parameter_layer.optimizers import (
    check_optimizer,
    groups_of,
    joined_state,
)
from bigdl.orca.sync.parameter_layer.plan import LayerPlan
from bigdl.orca.sync.parameter_layer.state import RankState, states_of

__all__ = ["LayerModel"]


class LayerModel:
    """What a training by the parameter layer is about, on the driver.

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
        if snapshot is not None:
            self.load(snapshot)
        self.start = dumps(self.built.model.state_dict())
        self._initial = [buffer.numpy().copy() for buffer in self._buffers]
        columns = BatchColumns(settings.feature_cols, settings.label_cols)
        self.sums = step_for(
            self.built.model, self.built.criterion, weighted=settings.weighted, columns=columns
        ).sums

    def plan(self, ranks: int, options: LayerOptions, clipping) -> LayerPlan:
        """The plan of a training of this model."""
        optimizer = self.built.optimizer
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
            max_drop=1.0 if options.stragglers is None else options.stragglers.max_drop_percentage,
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

    def states(self, plan: LayerPlan, residuals: Sequence | None = None) -> list[RankState]:
        """The model and optimizer as they are now, cut for the ranks of a plan."""
        vector = plan.geometry.flatten([p.detach().numpy() for p in self._parameters])
        state = self.built.optimizer.state_dict()["state"]
        buffers = {
            number: buffer.numpy().copy()
            for number, buffer in enumerate(self._buffers)
            if buffer.numpy().tobytes() != self._initial[number].tobytes()
        }
        return states_of(plan, vector, state, buffers, residuals)

    def take(self, states: Sequence[RankState], plan: LayerPlan) -> None:
        """The inverse of :meth:`states`."""
        import torch

        geometry, optimizer = plan.geometry, self.built.optimizer
        vector = np.concatenate([state.weights for state in states])
        with torch.no_grad():
            for parameter, part in zip(self._parameters, geometry.parts(vector), strict=True):
                parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
            merged = dict(enumerate(self._initial))
            for state in states:
                merged.update(state.buffers)
            for number, buffer in enumerate(self._buffers):
                buffer.copy_(torch.from_numpy(np.array(merged[number])))
        shapes = [p.shape for p in self._parameters]
        found = joined_state([state.optimizer for state in states], geometry, shapes)
        for number, parameter in enumerate(self._parameters):
            if number in found:
                optimizer.state[parameter] = found[number]

    # -- files ---------------------------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""
        files, built = snapshot.files, self.built
        load_into(built.model, files["model.pt"])
        if "optimizer.pt" in files:
            load_into(built.optimizer, files["optimizer.pt"], "optimizer's state", "optimizer")
        if "scheduler.pt" in files and built.scheduler is not None:
            load_into(built.scheduler, files["scheduler.pt"], "scheduler's state", "scheduler")

    def files(self) -> dict[str, bytes]:
        """What a checkpoint holds of the model and the optimizer: the slices of all ranks."""
        built = self.built
        found = {
            "model.pt": dumps(built.model.state_dict()),
            "optimizer.pt": dumps(built.optimizer.state_dict()),
        }
        if built.scheduler is not None:
            found["scheduler.pt"] = dumps(built.scheduler.state_dict())
        return found
