"""The driver's own PyTorch model and optimizer of a training by the parameter layer."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.learn.layer_fit.figures import GroupPhases, LayerFigures
from bigdl.orca.learn.layer_fit.loop import (
    LayerLoop,
    LayerModel,
    LayerOptions,
    LayerRun,
    LayerTraining,
)
from bigdl.orca.learn.layer_fit.replica import LayerReplica
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback
from bigdl.orca.learn.pytorch.evaluation import EvaluateProgram, Runner
from bigdl.orca.learn.pytorch.forward import counts_unevenly
from bigdl.orca.learn.pytorch.loop import FitSettings, TorchEpochs, TorchTraining
from bigdl.orca.learn.pytorch.parts import ModelParts, load_into
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.orca.parameter_layer.optimizers import check_optimizer, groups_of
from bigdl.orca.parameter_layer.plan import LayerPlan
from bigdl.orca.parameter_layer.rank import Contribution
from bigdl.training.checkpoint import Snapshot
from bigdl.training.figures import Records
from bigdl.training.state import dumps, isolated_rng, precision_of, seed_everything

if TYPE_CHECKING:
    import torch


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
        copied = cloudpickle.loads(cloudpickle.dumps(parts))
        copied.initialize = None  # for workers
        with isolated_rng(settings.seed):
            self.built = copied.build(training=True)
        check_optimizer(self.built.optimizer)
        self._parameters = trained_parameters(self.built.optimizer)
        self._buffers = list(self.built.model.buffers())
        self._clipping = settings.clipping
        if snapshot is not None:
            self.load(snapshot)
        self.start = dumps(self.built.model.state_dict())
        self._initial = self._running()
        self.sums = settings.forward_pass(self.built).sums

    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """The plan of a training of this model."""
        optimizer, clipping = self.built.optimizer, self._clipping
        clamp = None
        if clipping.minimum is not None:
            clamp = clipping.minimum, cast("float", clipping.maximum)  # both or none
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
        _put(self._parameters, parts, self._buffers, running)

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
        """Return the files of model and optimizer in a checkpoint: the slices of all ranks."""
        return self.built.files()


def _put(parameters, parts, buffers, running) -> None:
    """Set parameters to flat parts of a vector, and buffers to arrays."""
    import torch

    with torch.no_grad():
        for tensor, values in zip([*parameters, *buffers], [*parts, *running], strict=True):
            tensor.copy_(torch.from_numpy(np.array(values)).reshape(tensor.shape))


def trained_parameters(optimizer: torch.optim.Optimizer) -> list:
    """The parameters of an optimizer, in the order of the flat vector."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass
class TorchReplicaProgram:
    """Makes replicas; shipped to the ranks.

    Attributes
    ----------
    parts : ModelParts
    settings : FitSettings
    model : bytes
        State dict at the start; parameters are replaced in every step, other things are not.
    ranks : int
    sampling : str
        See :class:`~bigdl.orca.learn.layer_fit.loop.LayerOptions`.
    """

    parts: ModelParts
    settings: FitSettings
    model: bytes
    ranks: int
    sampling: str = "exact"

    def __call__(self, rank: int, shards: dict) -> TorchReplica:
        return TorchReplica(self, rank, shards)


class TorchReplica(LayerReplica):
    """A copy of a PyTorch model, and the rows of its rank.

    Parameters
    ----------
    program : TorchReplicaProgram
    rank : int
    shards : dict of str to Shard
    """

    def __init__(self, program: TorchReplicaProgram, rank: int, shards: dict):
        import torch

        super().__init__(program, rank)
        settings, config = self._settings, program.parts.config
        seed_everything(settings.seed)  # creators may draw what is no weight
        built = program.parts.build(training=True)
        load_into(built.model, program.model)
        self._model, self._criterion = built.model, built.criterion
        self._parameters = trained_parameters(built.optimizer)
        self._buffers = list(built.model.buffers())
        self._initial = [buffer.numpy().copy() for buffer in self._buffers]
        self._forward_pass = settings.forward_pass(built)
        self._is_uneven = settings.weighted or counts_unevenly(built.criterion)
        self._precision = precision_of(settings.precision, torch.device("cpu"))
        data = settings.open_batches(shards["data"], self._place, config)
        self._read(data, config)

    def _put(self, weights, running):
        self._model.train()
        ends = np.cumsum([parameter.numel() for parameter in self._parameters])
        _put(self._parameters, np.split(weights, ends[:-1]), self._buffers, running)
        self._model.zero_grad(set_to_none=True)

    def _running(self):
        return [buffer.numpy() for buffer in self._buffers]

    def _gradient(self, batch, rows, step, began):
        with self._precision():
            output, target, loss = self._forward_pass.forward(batch, step.number)
        counted = float(rows)
        if self._is_uneven:
            counted = float(self._forward_pass.denominator(output, target, rows))
        forwarded = time.perf_counter()
        if counted:  # the loss of a batch of ignored labels is nan
            loss.backward()
        vector, absent = self._flat()
        record = {
            "loss": loss.item() if counted else 0.0,
            "forward_s": forwarded - began,
            "backward_s": time.perf_counter() - forwarded,
        }
        return Contribution(vector, counted, rows, absent, record=record)

    def _flat(self):
        """The flat gradient, and the parameters that have none."""
        import torch

        gradients = [
            torch.zeros(p.shape) if p.grad is None else p.grad.to_dense() for p in self._parameters
        ]
        vector = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
        absent = [number for number, p in enumerate(self._parameters) if p.grad is None]
        return vector.numpy(), absent


_OF_STEPS = ("before_train_iter", "after_train_iter", "before_iter", "after_iter")


class TorchLayerLoop(TorchEpochs, LayerLoop):
    """A fit by the parameter layer; what callbacks see as their runner.

    Parameters
    ----------
    run : LayerRun
    config : dict
    """

    _layer: TorchLayerModel

    def __init__(self, run: LayerRun, config: dict):
        settings = cast("FitSettings", run.settings)
        place: Any = SimpleNamespace(rank=0, world_size=run.plan.ranks)
        Runner.__init__(self, place, config, settings.callbacks)
        LayerLoop.__init__(self, run)
        self._built, self._validation = self._layer.built, run.validate
        self._take(self._built)
        self.device = next(self.model.parameters()).device
        self._summary, self._phases = StepSummary(), GroupPhases()
        self._records: dict[str, Records] = {}  # files of a checkpoint, if steps are recorded
        if settings.summary:
            self._records = {"summary.pt": self._summary, "phases.pt": self._phases}
        self.begin(run.start)
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(self.position, self._plan.steps)

    # -- the fit -------------------------------------------------------------------------------

    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""
        self.call("before_run")
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        states = self._train()
        self.call("after_run")
        return self._finish(states)

    def _run_steps(self) -> bool:
        return self._groups_of_epoch()

    def _epoch_figures(self) -> dict | None:
        figures = self._figures.entry()
        if figures is not None and self._options.stragglers is not None:
            figures |= self._figures.dropped
        return figures

    def _evaluate(self) -> dict:
        self._pull()
        return self._validation(dumps(self.model.state_dict()))

    def _end_training_epoch(self) -> None:
        if self.callbacks:
            self._pull()
        super()._end_training_epoch()

    @property
    def _epochs_of_fit(self):
        return self.num_epochs - self.settings.goal.first

    def _pass_step(self):
        self._layer.pass_step()
        self._layer.built.step_scheduler(self)

    # -- figures -------------------------------------------------------------------------------

    def _no_figures(self):
        weighted, sums = self.settings.weighted, self._layer.sums
        return LayerFigures(self._layer_plan.ranks, weighted=weighted, sums=sums)

    def _after_group(self, steps, seconds):
        if not self._records:
            return
        first = self.position.global_step - len(steps) + 1
        pairs = zip(steps, self._figures.rows, strict=True)
        for number, (step, (loss, counted, rows)) in enumerate(pairs, first):
            mean = loss / counted if counted else float("nan")
            throughput = rows * len(steps) / seconds
            self._summary.add(number, [mean, float(step.hyper[0]["lr"]), throughput])
        self._phases.add_group(self.position.global_step, self._figures.phases)

    def _kept(self):
        return {name: records.dump() for name, records in self._records.items()}

    def _put_kept(self, files):
        for name, records in self._records.items():
            if name in files:
                records.load(files[name])


def check_callbacks(callbacks: Sequence[Any], accumulate: int) -> None:
    """Refuse what the steps of the parameter layer do not do."""
    for callback in callbacks:
        callback_type = type(callback)
        hooks = [
            h for h in _OF_STEPS if getattr(callback_type, h, None) is not getattr(Callback, h)
        ]
        if isinstance(callback, MainCallback) or hooks:
            what = "is a MainCallback" if not hooks else f"has {', '.join(hooks)}"
            raise UsageError(
                f"{callback_type.__name__} {what}, but the steps of backend='bigdl' run in Spark "
                "tasks that call no callbacks; use hooks of epochs, or backend='spark'"
            )
    if accumulate > 1:
        raise UsageError(
            "accumulate_grad_batches does not go with backend='bigdl'; pass a batch_size that is "
            f"{accumulate} times as large, which is the same update"
        )


class TorchLayerTraining(LayerTraining, TorchTraining):
    """:class:`~bigdl.orca.learn.pytorch.loop.TorchTraining` by the parameter layer."""

    def _unpacked(self, program):
        settings = program.settings
        check_callbacks(settings.callbacks, settings.accumulate)
        return program.parts, settings.callbacks

    def _model(self, parts, settings, start):
        return TorchLayerModel(parts, settings, start)

    def _replicas(self, program, parts, model, ranks, sampling):
        settings = replace(program.settings, callbacks=(), metrics=(), trigger=None)
        return TorchReplicaProgram(parts, settings, model.start, ranks, sampling)

    def _evaluation(self, program, parts, feed):
        settings = replace(program.settings, callbacks=(), trigger=None)
        parts = replace(parts, optimizer=None, scheduler_creator=None)
        return EvaluateProgram(parts, settings, (), self._sync)

    def _loop(self, run, parts, callbacks):
        return TorchLayerLoop(run, parts.config)
