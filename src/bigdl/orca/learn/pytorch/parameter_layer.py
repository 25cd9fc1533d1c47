"""PyTorch fit with the parameter layer: the driver's model and the ranks' replicas."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback
from bigdl.orca.learn.pytorch.evaluation import TorchEvaluateProgram, TorchRunner
from bigdl.orca.learn.pytorch.forward import counts_unevenly, is_lightning, loss_warning
from bigdl.orca.learn.pytorch.lightning import dropped_hooks
from bigdl.orca.learn.pytorch.loop import Clipping, FitProgram, TorchHooks
from bigdl.orca.learn.pytorch.parts import BuiltParts, load_into, sparse_parameters
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.orca.parameter_layer.fit.loop import (
    DriverModel,
    ParameterLayerRun,
    check_hooks,
)
from bigdl.orca.parameter_layer.fit.metrics import GROUP_PHASES
from bigdl.orca.parameter_layer.fit.replica import (
    FlatModel,
    ParameterLayerReplica,
    TouchedRows,
)
from bigdl.orca.parameter_layer.optimizers import (
    check_optimizer,
    groups_of,
    is_by_row,
    updates_rows,
)
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.embedding_tables.growing import GrowingEmbedding
from bigdl.training.fit import FitContext
from bigdl.training.loss_form import DIVISOR, ROWS
from bigdl.training.metrics import Records
from bigdl.training.state import (
    dumps,
    isolated_rng,
    parameters_of,
    precision_of,
    seed_everything,
)


class TorchParameterLayerOptimizer:
    """Driver-side optimizer that computes no updates but counts steps for its schedule.

    Parameters
    ----------
    built : BuiltParts
        The optimizer and its scheduler.
    clipping : Clipping
    runner : TorchRunner
        Position of the fit, for schedulers.

    Raises
    ------
    UsageError
        If the optimizer does not support slices of parameters.

    Attributes
    ----------
    sliced, groups, clamp, norm, slack, needs_norms, is_by_row
        See :class:`~.loop.DriverModel`.
    """

    slack = 1e-6  # as in torch.nn.utils.clip_grad_norm_

    def __init__(self, built: BuiltParts, clipping: Clipping, runner: TorchRunner):
        optimizer = cast("torch.optim.Optimizer", built.optimizer)
        check_optimizer(optimizer)
        self._built, self._runner = built, runner
        self._optimizer, self.sliced = optimizer, type(optimizer)
        self.needs_norms = getattr(self.sliced, "needs_norms", False)
        self.is_by_row = is_by_row(self.sliced)
        self.groups, self.norm = groups_of(optimizer), clipping.norm
        limits = clipping.minimum, clipping.maximum  # either both or none are set
        self.clamp = None if None in limits else limits

    def hyper(self) -> tuple[dict, ...]:
        """Return the current hyperparameters of the parameter groups."""
        groups = self._optimizer.param_groups
        return tuple(
            {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in groups
        )

    def updates_rows(self, widths: Sequence[int]) -> bool:
        """Return True if the next step only changes embedding rows that have a gradient."""
        return updates_rows(self._optimizer, widths)

    def pass_step(self) -> None:
        """Advance the step count and the scheduler without updating weights."""
        self._optimizer.zero_grad()
        self._optimizer.step()
        self._built.step_scheduler(self._runner)

    def state(self) -> dict[int, dict]:
        """Return the optimizer state of every parameter by its index."""
        return self._optimizer.state_dict()["state"]

    def put_state(self, state: dict[int, dict]) -> None:
        """Set the state of the given parameters; keep the state of all others."""
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            if number in state:
                self._optimizer.state[parameter] = state[number]


def _flat(
    built: BuiltParts, widths: Sequence[int], share: Callable[..., None] | None = None
) -> FlatModel:
    parameters = parameters_of(cast("Any", built.optimizer))
    return FlatModel(parameters, list(built.model.buffers()), _array, _assign, widths, share)


def _widths(built: BuiltParts) -> list[int]:
    """Return each weight's row width if only sparse embeddings read the weight, else 0.

    Embeddings with ``max_norm`` are excluded, since their forward pass modifies weights.
    """
    tables = {id(weight) for weight in sparse_parameters(built.model) if weight is not None}
    for module in built.model.modules():
        is_plain = getattr(module, "sparse", False) is True
        if not is_plain or getattr(module, "max_norm", None) is not None:
            tables.difference_update(id(each) for each in module.parameters(recurse=False))
    parameters = parameters_of(cast("Any", built.optimizer))
    return [each.shape[1] if id(each) in tables else 0 for each in parameters]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _assign(tensor: torch.Tensor, values: np.ndarray) -> None:
    if not values.flags.writeable:  # torch warns about read-only arrays
        values = values.copy()
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(values))


def _share(tensor: torch.Tensor, values: np.ndarray) -> None:
    if tensor.data_ptr() != values.ctypes.data:
        tensor.data = torch.from_numpy(values)


class TorchReplica(ParameterLayerReplica):
    """Copy of a PyTorch model on a rank, with the rank's rows."""

    def _open(self, program, weights, shard):
        settings = self._settings
        seed_everything(settings.seed)  # creators may use random values other than weights
        self._built = built = program.parts.build(training=True)
        load_into(built.model, weights)
        self._parameters = parameters_of(built.optimizer)
        self._is_by_row = is_by_row(type(built.optimizer))
        self._forward_pass = settings.forward_pass(built)
        self._is_uneven = settings.weighted or counts_unevenly(built.criterion)
        # ranks probe the loss independently, with equal results
        self._weights = self._forward_pass.loss_weights
        self._precision = precision_of(settings.precision, torch.device("cpu"))
        data = settings.open_batches(shard, self, self._config)
        return data, _flat(built, self._widths, _share)

    def _gradient(self, batch, rows, step, began):
        before = self._versions()
        if self._forward_pass.module is not None:
            batch = self._forward_pass.module.prepare_batch(batch, rows)
        self._built.model.train()
        self._built.model.zero_grad(set_to_none=True)
        with self._precision():
            output, target, loss = self._forward_pass.forward(batch, step.number)
        counted, record = self._loss_divisor(batch, output, target, rows, loss)
        forwarded = time.perf_counter()
        if counted:  # the loss of a batch of ignored labels is nan
            if self._weights.is_sum and not self._weights.is_known:
                # the parameter layer averages losses that are not yet known to be sums
                begins, ends = zip(*step.ranges, strict=True)
                (loss * ((sum(ends) - sum(begins)) / rows)).backward()
                loss = loss / rows
            else:
                loss.backward()
        if self._versions() != before:  # the memory is shared with the next step
            raise UsageError(
                "The model modifies the weights of an embedding with sparse=True, but with "
                "backend='bigdl' only the optimizer may; use sparse=False, or backend='spark'",
                code="model-unsupported",
            )
        gradients = [self._gradient_of(number) for number in range(len(self._parameters))]
        record |= {
            "loss": loss.item() if counted else 0.0,
            "forward_s": forwarded - began,
            "backward_s": time.perf_counter() - forwarded,
        }
        return gradients, counted, record

    def _loss_divisor(self, batch, output, target, rows, loss) -> tuple[float, dict]:
        """Return the divisor of the loss, and a dict with a warning for the driver, if any."""
        weights, forward_pass = self._weights, self._forward_pass
        if not weights.is_known and weights.is_due():
            result = forward_pass.probe_loss(batch, output, target, rows, loss)
            weights.settle(result.reduction, result.reason)
        counted, notes = float(rows), {}
        if weights.is_known and (self._is_uneven or weights.is_uneven):
            counted = float(forward_pass.denominator(output, target, rows, loss))
        elif weights.reduction in (ROWS, DIVISOR):  # another rank may detect the other one
            counted = weights.divisor_of(loss, rows)
        if weights.reason and self.world_size > 1:
            notes["note"] = loss_warning(forward_pass.loss_name, weights.reason)
        return counted, notes

    def _versions(self) -> list[int]:
        """Return the number of writes to each embedding table."""
        tables = zip(self._parameters, self._flat.widths, strict=True)
        return [table._version for table, width in tables if width]

    def _gradient_of(self, number: int) -> np.ndarray | TouchedRows | None:
        """Return the gradient of parameter `number`; for a table, only the rows with a gradient."""
        gradient, is_table = self._parameters[number].grad, bool(self._flat.widths[number])
        if gradient is None:
            return None
        if gradient.is_sparse and is_table:
            return TouchedRows.of(gradient)
        if self._is_by_row and is_table:
            raise UsageError(
                f"Parameter {number} of the model is the weight of an embedding with sparse=True "
                "but has a dense gradient, e.g. from a penalty on all rows, which "
                f"{type(self._built.optimizer).__name__} applies differently; use sparse=False, "
                "or backend='spark'",
                code="model-unsupported",
            )
        if gradient.is_sparse and self._is_by_row:
            raise UsageError(
                f"Parameter {number} of the model has a sparse gradient, but "
                f"{type(self._built.optimizer).__name__} can only update rows of embeddings with "
                "sparse=True and without max_norm=; use backend='spark'",
                code="model-unsupported",
            )
        return _array(gradient.to_dense())


_STEP_HOOKS = ("before_train_iter", "after_train_iter", "before_iter", "after_iter")


class TorchDriverModel(DriverModel):
    """PyTorch model on the driver, with the runner that callbacks get.

    Parameters
    ----------
    program : FitProgram
        Its instances are copied.
    ranks : int
    start : Checkpoint or None
    context : FitContext
    """

    replica = TorchReplica

    def __init__(
        self,
        program: FitProgram,
        ranks: int,
        start: Checkpoint | None,
        context: FitContext,
    ):
        settings = program.settings
        for callback in settings.callbacks:
            is_main = isinstance(callback, MainCallback)
            check_hooks(callback, Callback, _STEP_HOOKS, "is a MainCallback" if is_main else "")
        if settings.accumulate > 1:
            raise UsageError(
                "accumulate_grad_batches is not supported with backend='bigdl'; pass a batch_size "
                f"that is {settings.accumulate} times as large for the same update",
                code="unsupported",
                argument="accumulate_grad_batches",
            )
        if settings.local_steps > 1:
            raise UsageError(
                "local_steps is not supported with backend='bigdl', whose workers have no local "
                "optimizer; use another backend, or leave it at 1",
                code="unsupported",
                argument="local_steps",
            )
        parts = cloudpickle.loads(cloudpickle.dumps(program.parts))
        parts.initialize = None  # only workers call it
        with isolated_rng(settings.seed):
            built = parts.build(training=True)
        worker: Any = SimpleNamespace(rank=0, world_size=ranks)
        runner = TorchRunner(worker, program.parts.config, settings.callbacks, context)
        if any(isinstance(module, GrowingEmbedding) for module in built.model.modules()):
            raise UsageError(
                "A GrowingEmbedding cannot grow with backend='bigdl', whose workers hold all rows; "
                "use another backend, or a ShardedEmbedding",
                code="unsupported",
            )
        runner.bind(built)
        if is_lightning(built.model):
            has_loss = built.criterion is not None
            dropped = dropped_hooks(built.model, has_loss=has_loss, in_driver=True)
            if dropped is not None:
                context.warn(dropped)
        self._program, self._state, self._model = program, context.state, built.model
        self.optimizer = TorchParameterLayerOptimizer(built, settings.clipping, runner)
        self._records: dict[str, Records] = {}
        if settings.summary:
            self._records = {"summary.pt": StepSummary(), "phases.pt": Records(GROUP_PHASES)}
        self.hooks: TorchHooks = TorchHooks(context, runner, built, self._records)
        if start is not None:
            self.load(start.files)
        self.flat = _flat(built, _widths(built))
        self.loss_is_sum = settings.forward_pass(built).loss_weights.is_sum
        self.weighted = settings.weighted
        runner.device = next(built.model.parameters()).device

    def replica_program(self):
        program = self._program
        settings = replace(program.settings, callbacks=(), metrics=(), checkpoint_trigger=None)
        return replace(program, settings=settings)

    def evaluation(self, feed, sync):
        """Return the program that evaluates weights on a feed."""
        settings = replace(self._program.settings, callbacks=(), checkpoint_trigger=None)
        parts = replace(self._program.parts, optimizer=None, scheduler_creator=None)
        return TorchEvaluateProgram(parts, settings, (), sync)

    def weights(self):
        return dumps(self._model.state_dict())

    def after_group(self, steps, seconds, metrics):
        if not self._records:
            return
        summary, phases = self._records.values()
        last = self._state.position.global_step
        pairs = zip(steps, metrics.rows, strict=True)
        for number, (step, (loss, counted, rows)) in enumerate(pairs, last - len(steps) + 1):
            mean = loss / counted if counted else float("nan")
            throughput = rows * len(steps) / seconds
            summary.add(number, [mean, float(step.hyper[0]["lr"]), throughput])
        phases.add(last, [metrics.phases[name] for name in GROUP_PHASES])

    def end_epoch(self, metrics, evaluate):
        merged = metrics.entry()
        if merged is None:
            return None
        entry = {**self._state.entry(), **merged}
        if self._program.settings.parameter_layer.drop_stragglers is not None:
            entry |= metrics.dropped
        if evaluate is not None:
            self.hooks.validate(entry, evaluate)
        return entry


run_by_parameter_layer = ParameterLayerRun(TorchDriverModel)
