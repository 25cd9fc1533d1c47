"""PyTorch training loop: updates, epochs and fits.

The loop depends neither on the engine nor on the input type: a worker provides shards, and a sync
provides collectives. An engine ships a :class:`FitProgram`. :class:`TorchFit` builds the components
that :class:`~bigdl.training.fit.EpochRunner` runs. Decisions of all ranks (whether to continue,
whether to write a checkpoint) depend only on metrics that are equal on all ranks. A fit with the
parameter layer uses the same :class:`TorchHooks` but other steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.pytorch.device_batches import DeviceBatches
from bigdl.orca.learn.pytorch.evaluation import (
    TorchEvaluationSettings,
    TorchRunner,
    WorkerBatches,
    evaluate_collectively,
)
from bigdl.orca.learn.pytorch.forward import (
    ForwardPass,
    counts_unevenly,
    is_lightning,
    loss_warning,
    model_input_types,
)
from bigdl.orca.learn.pytorch.lightning import LightningForward, dropped_hooks
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts, is_lazy, sparse_parameters
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.runtime.worker import Worker
from bigdl.training.batches import (
    BatchSource,
    VirtualSource,
    all_gather_json,
    deal_streams,
    plan_batches,
    shuffle_memory,
    zero_column,
)
from bigdl.training.embedding_tables.placement import TablePlacement
from bigdl.training.fit import (
    EpochRunner,
    FitContext,
    Hooks,
    TrainState,
    Triggers,
    WorkerCheckpointer,
    WorkerStep,
    exchange,
    input_facts,
    start,
)
from bigdl.training.in_place import StepGuard, flat_values, joined, sums_vector
from bigdl.training.loss_form import ProbeResult, agreed
from bigdl.training.metrics import LossRule, Records, Timers, score_of, validation_names
from bigdl.training.position import RunSettings
from bigdl.training.sharded_model import local_rows, naming_optimizer
from bigdl.training.state import (
    RunningState,
    capture_rng,
    device_of,
    isolated_rng,
    mixed_seed,
    move,
    parameters_of,
    precision_of,
    restore_rng,
    seed_everything,
    to_device,
)
from bigdl.training.table_rows import in_table_order

if TYPE_CHECKING:
    from bigdl.common.types import Tensors


_MAX_BUFFERS = 1 << 22  # values in buffers, which ranks exchange in every step


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping limits for the whole batch, independent of the number of workers.

    Attributes
    ----------
    minimum, maximum : float or None
        Range that every element is clamped to.
    norm : float or None
        Maximum L2 norm of all gradients together; applied after `minimum` and `maximum`.
    """

    minimum: float | None = None
    maximum: float | None = None
    norm: float | None = None

    def __call__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        slices: Sequence[torch.nn.Parameter] = (),
        sync: GradientSync | None = None,
    ) -> None:
        """Clip gradients in place.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
            Parameters that are replicated on all ranks.
        slices : sequence of torch.nn.Parameter
            Rank-local slices of sharded parameters; computing their norm is a collective.
        sync : GradientSync, optional
            Sync of the ranks, required with slices.
        """
        everything = [*parameters, *slices]
        if self.minimum is not None:
            with torch.no_grad():
                for parameter in everything:
                    if parameter.grad is not None:
                        _values(parameter).clamp_(self.minimum, self.maximum)
        if self.norm is not None:
            gradients = [_values(p) for p in parameters if p.grad is not None]
            total = torch.nn.utils.get_total_norm(gradients)
            local = [_values(p) for p in slices if p.grad is not None]
            if slices and sync is not None:
                squares = torch.nn.utils.get_total_norm(local).double().square()
                squares = sync.all_reduce(squares).to(total.device)
                total = (total.double().square() + squares).sqrt()
                gradients += local
            scale = torch.clamp(self.norm / (total + 1e-6), max=1.0)
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(scale.to(gradient.device))  # slices stay on the CPU


def _values(parameter):
    """Return the elements of a gradient on this rank; for a sparse one, its coalesced values."""
    if not parameter.grad.is_sparse:
        return local_rows(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


@dataclass(kw_only=True)
class FitSettings(TorchEvaluationSettings, RunSettings):
    """Arguments of ``fit``, as shipped to the workers.

    Attributes
    ----------
    accumulate : int
        Number of batches per update; k batches of n rows give the update of one batch of k * n
        rows.
    local_steps : int
        Number of local steps before the weights of all workers are averaged.
    summary : bool
        Whether to record loss, learning rate and throughput of every step.
    """

    callbacks: Sequence[Any] = ()
    clipping: Clipping = field(default_factory=Clipping)
    accumulate: int = 1
    local_steps: int = 1
    summary: bool = False


class LocalSteps:
    """Local SGD: average weights and optimizer state over the workers every k steps.

    The average is weighted by the rows of each worker since the last average (S. U. Stich, "Local
    SGD Converges Fast and Communicates Little", ICLR 2019). With plain SGD and a single step, it
    equals an update with averaged gradients. Other optimizers, or more steps, give other weights
    than a single process.

    Parameters
    ----------
    sync : GradientSync
    built : BuiltParts
    steps : int
        Number of steps between two averages; at least 2.

    Attributes
    ----------
    rows : float
        Number of rows of this worker since the last average; the caller adds to it.
    """

    def __init__(self, sync: GradientSync, built: BuiltParts, steps: int):
        self._sync, self._optimizer, self.steps = sync, built.optimizer, steps
        self.rows = 0.0
        self._made = 0
        self._means: list[torch.nn.Parameter] = []  # share the memory of the averaged tensors

    def count(self, parameters: Sequence[torch.nn.Parameter], *, is_last: bool) -> bool:
        """Count a step and average weights if due; return True if all ranks have equal weights."""
        self._made += 1
        if self._made < self.steps and not is_last:
            return False
        self._made = 0
        if self._sync.world_size > 1:
            self._average(parameters)
        self.rows = 0.0
        return True

    def _average(self, parameters):
        rows = sum(row[0] for row in self._sync.all_gather([self.rows]))
        if not rows:
            return
        self._fill_state(parameters)
        tensors = [*parameters, *(t for p in parameters for t in self._state(p))]
        if [t.data_ptr() for t in tensors] != [mean.data_ptr() for mean in self._means]:
            self._means = [torch.nn.Parameter(t.detach(), requires_grad=False) for t in tensors]
        for mean in self._means:
            mean.grad = mean.detach()  # the same memory
        self._sync.all_reduce_gradients(self._means, self.rows / rows)

    def _state(self, parameter) -> list[torch.Tensor]:
        state = self._optimizer.state.get(parameter, {})
        tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def _fill_state(self, parameters) -> None:
        """Create optimizer state for parameters that only had a gradient on other ranks."""
        counts = self._sync.all_gather([len(self._state(p)) for p in parameters])
        largest = [max(of_ranks) for of_ranks in zip(*counts, strict=True)]
        missing = [
            p for p, most in zip(parameters, largest, strict=True) if len(self._state(p)) < most
        ]
        if not missing:
            return
        self._optimizer.zero_grad()
        kept = [p.detach().clone() for p in missing]
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for parameter, weights in zip(missing, kept, strict=True):
                parameter.copy_(weights)


class OptimizerStep:
    """Optimizer step from the gradients of one batch or of several accumulated batches.

    Call :meth:`begin` and :meth:`backward` for each batch, and :meth:`step` when it is due.

    Parameters
    ----------
    sync : GradientSync
    built : BuiltParts
    forward_pass : ForwardPass
    settings : FitSettings
    """

    def __init__(
        self,
        sync: GradientSync,
        built: BuiltParts,
        forward_pass: ForwardPass,
        settings: FitSettings,
    ):
        self._sync, self._optimizer = sync, built.optimizer
        self._loss_weights, self._module = forward_pass.loss_weights, forward_pass.module
        module, run_backward = self._module, operator.methodcaller("backward")
        self._run_backward: Callable[[Any], None] = module.backward if module else run_backward
        self._sparse = sparse_parameters(built.model)
        self._tables = built.tables
        self._sharding = built.sharding
        if self._sharding is not None and not self._sharding.is_divided:
            self._sharding = None
        self._clipping, self._accumulate = settings.clipping, settings.accumulate
        steps = settings.local_steps
        self._local_steps = LocalSteps(sync, built, steps) if steps > 1 else None
        self.guard: StepGuard | None = None
        self.check()
        self.reset()

    def check(self) -> None:
        """Raise an error if local steps are combined with a summed loss or sharded tables."""
        is_sum = self._loss_weights.is_sum
        if self._local_steps is not None and (is_sum or self._tables is not None):
            what = "a loss that is a sum over rows" if is_sum else "a ShardedEmbedding"
            raise UsageError(
                f"local_steps={self._local_steps.steps} does not support {what}; use "
                "local_steps=1, "
                "which is exact",
                code="argument-conflict",
                argument="local_steps",
            )

    def reset(self) -> None:
        """Discard the gradients of an unfinished update."""
        self._batches, self._weight, self._total = 0, 0.0, 0.0

    def begin(self) -> None:
        """Prepare gradients and embedding tables before the forward pass of a batch."""
        if not self._batches and self._module is not None:
            self._module.zero_grad(self._optimizer)
        elif not self._batches:
            self._optimizer.zero_grad()
        if self._tables is not None:
            self._tables.begin()

    def backward(self, loss: torch.Tensor | None, counted: float, total: float) -> None:
        """Compute the gradients of a batch.

        Parameters
        ----------
        loss : tensor or None
            None on a rank without rows.
        counted, total : float
            Divisor of the loss on this rank, and summed over all ranks.
        """
        self._batches += 1
        self._total += total
        if loss is None:
            return
        if self._local_steps is not None:
            if counted:
                self._local_steps.rows += counted
                self._run_backward(loss)
        elif self._sharding is not None:
            # the hooks of the model sum the gradients over the ranks during the backward pass
            self._run_backward(loss * self._factor(counted, total))
        elif self._accumulate == 1:
            share = counted / total if total else 0.0
            self._weight = 1.0 if self._loss_weights.is_sum else share
            with self._sync.overlap(self.parameters, self._weight, self._sparse):
                self._run_backward(loss)
        elif self._loss_weights.is_sum or counted:
            # the loss of a batch of ignored labels is nan
            self._weight = 1.0
            self._run_backward(loss if self._loss_weights.is_sum else loss * counted)

    def _factor(self, counted: float, total: float) -> float:
        """Return the factor of the loss of this rank, so that the sum over ranks is the batch's."""
        if self._loss_weights.is_sum:
            return float(counted > 0)
        if self._accumulate > 1:
            return counted
        return counted / total if total else 0.0

    @property
    def is_due(self) -> bool:
        """True if all batches of the update have been accumulated."""
        return self._batches >= self._accumulate

    @property
    def is_due_next(self) -> bool:
        """True if the update is due after the backward pass of one more batch."""
        return self._batches + 1 >= self._accumulate

    def step(self, *, is_last: bool) -> bool:
        """All-reduce and clip the gradients, and update the weights; a collective call.

        Parameters
        ----------
        is_last : bool
            True if all ranks need equal weights next, as at the end of an epoch.

        Returns
        -------
        bool
            True if all ranks now have equal weights.
        """
        parameters = self.parameters
        slices: list[torch.nn.Parameter] = []
        if self._local_steps is not None:
            self._update(parameters, slices)
            return self._local_steps.count(parameters, is_last=is_last)
        if self._sharding is None:
            self._sync.all_reduce_gradients(parameters, self._weight, self._sparse)
        else:
            slices = self._sharding.sharded(parameters)
            parameters = self._sharding.replicated(parameters)
            if parameters:
                self._sync.all_reduce_gradients(parameters, 1.0)
        if self._tables is not None:
            self._tables.send_gradients(self._weight)
            slices = self._tables.weights
        if self._accumulate > 1 and not self._loss_weights.is_sum and self._total:
            for parameter in [*parameters, *slices]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._total)
        self._update(parameters, slices)
        return True

    def _update(self, parameters: Sequence, slices: Sequence) -> None:
        """Clip the gradients and update the weights."""
        if self.guard is not None:
            self.guard.collect()

        def clip(**limits: float) -> None:
            clipping = Clipping(**limits) if limits else self._clipping
            clipping(parameters, slices, self._sync)

        if self._module is not None:
            self._module.step(self._optimizer, clip)
        else:
            self._clipping(parameters, slices, self._sync)
            is_divided = self._sharding is not None
            with naming_optimizer(self._optimizer) if is_divided else contextlib.nullcontext():
                self._optimizer.step()
        self.reset()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The optimizer's current parameters that are replicated on all ranks."""
        parameters = parameters_of(self._optimizer)
        return parameters if self._tables is None else self._tables.without(parameters)

    @contextlib.contextmanager
    def user_backward(self, counted: float, total: float) -> Iterator[None]:
        """Return a context manager for user code that calls ``backward`` and steps the optimizer.

        At the end of every backward pass the gradients are all-reduced to those of the whole batch,
        and every step of the optimizer clips them first.

        Parameters
        ----------
        counted, total : float
            See :meth:`backward`. The weights of the ranks' losses sum to 1, so gradients that an
            earlier pass has all-reduced are not changed by a further pass.
        """
        weight, parameters, queued = self._factor(counted, total), self.parameters, False

        def reduce():
            nonlocal queued
            queued = False
            self._sync.all_reduce_gradients(parameters, weight, self._sparse)

        def queue(_):
            nonlocal queued
            if not queued:
                queued = True
                torch.autograd.Variable._execution_engine.queue_callback(reduce)

        hooks = [p.register_post_accumulate_grad_hook(queue) for p in parameters if p.requires_grad]
        hooks.append(
            self._optimizer.register_step_pre_hook(lambda *_: self._clipping(self.parameters))
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.reset()


def _holds_nan(value: Any) -> bool:
    """Return True if a tensor, or a tensor in a nested container, has a nan."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    parts = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(map(_holds_nan, parts))


class Buffers(RunningState):
    """Buffers of a module, such as running means, merged over the workers."""

    def local_values(self) -> list:
        """Return a copy of this worker's buffers."""
        return [buffer.clone() for buffer in self._model.buffers()]

    def put(self, values: list) -> None:
        """Set this worker's buffers to values that :meth:`local_values` returned."""
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)


@dataclass(eq=False)
class TorchHooks(Hooks):
    """Callbacks, LightningModule hooks and model files of a PyTorch fit.

    Attributes
    ----------
    context : FitContext
    runner : TorchRunner
        Runner that callbacks get.
    built : BuiltParts
    records : dict of str to Records
        Step records by checkpoint file name; empty if steps are not recorded.
    module : LightningForward, optional
        Caller of LightningModule hooks, in a process that runs steps.
    """

    context: FitContext
    runner: TorchRunner
    built: BuiltParts
    records: Mapping[str, Records]
    module: LightningForward | None = None

    @property
    def are_called(self):
        return bool(self.runner.callbacks)

    def begin_fit(self):
        state, accumulate = self.context.state, self.context.settings.accumulate
        steps = cast("int", state.epoch_steps)
        self.runner.num_epochs = state.stop_at.last_epoch(state.position, steps, accumulate)
        self.runner.call("before_run")
        if self.module is not None:
            self.module.call_hook("on_fit_start")
            self.module.call_hook("on_train_start")

    def end_fit(self):
        if self.module is not None:
            self.module.call_hook("on_train_end")
            self.module.call_hook("on_fit_end")
            self.module.call_hook("teardown", "fit")
        self.runner.call("after_run")
        return False

    def begin_epoch(self):
        self.runner.model.train()
        if self.module is not None:
            self.module.begin_training()
        self.runner.call("before_train_epoch")
        if self.module is not None:
            self.module.call_hook("on_train_epoch_start")

    def validate(self, entry: dict, evaluate: Callable[[], dict]) -> None:
        """Run an evaluation and its callback hooks; add the metrics to the epoch's dict `entry`."""
        runner = self.runner
        runner.call("before_val_epoch")
        evaluation = evaluate()
        if evaluation.get("warning"):
            self.context.warn(evaluation["warning"], "loss")
        metrics = validation_names(evaluation["metrics"])
        entry.update(metrics)
        entry["profile"].update(evaluation["profile"])
        for worker, worker_metrics in zip(
            entry["workers"], evaluation.get("workers", ()), strict=False
        ):
            worker.update(validation_names(worker_metrics))
        runner.epoch_stats, runner.metrics_stats = entry, metrics
        runner.call("after_val_epoch")

    def end_epoch(self, entry, is_whole):
        self.runner.epoch_stats, self.runner.epoch_is_whole = entry, is_whole
        self.runner.call("after_train_epoch")
        return {"loss": entry["train_loss"], "score": score_of(entry)}

    def close_epoch(self, entry):
        self.built.step_scheduler(self.runner, entry)
        if self.module is not None:
            self.module.close_epoch()

    def is_stopped(self, *, in_epoch=False):
        state, sync = self.context.state, self.context.sync
        if self.runner.callbacks and sync is not None and sync.world_size > 1:
            state.stop = any(vote[0] for vote in sync.all_gather([float(state.stop)]))
        return state.stop

    def files(self):
        records = {name: records.dump() for name, records in self.records.items()}
        return {**self.built.files(), **records}

    def load(self, files):
        self.built.load(files)
        for name, records in self.records.items():
            if name in files:
                records.load(files[name])


class TorchRows:
    """Rows of one worker, divided into the batches of an epoch.

    Parameters
    ----------
    context : FitContext
    config : dict
    criterion : callable or None
        The loss, which may weight rows differently.

    Attributes
    ----------
    data, validation : BatchSource
        Sources of the training and validation rows; `validation` is None without validation.
    types : list or None
        Column types of the training data, if a worker knows them.
    plan : BatchPlan
        The batches of the epoch.
    order : object
        Row order of the epoch, once it is open.
    is_uneven : bool
        True if the loss may weight the rows of the workers differently.
    """

    def __init__(self, context: FitContext, config: dict, criterion: Any):
        worker, sync, settings = context.worker, context.sync, context.settings
        sources = {
            name: settings.open_batches(shard, worker, config)
            for name, shard in worker.shards.items()
        }
        deal_streams(list(sources.values()), sync, context.warn)
        sources["data"] = in_table_order(sources["data"], worker.shards["data"], settings, sync)
        self.data, self.validation = sources["data"], sources.get("validation")
        window = self.data.window(shuffle_memory(config, worker.threads))
        workers, self.types = exchange(
            sync,
            {
                **self.data.facts(window),
                "validation": 1 if self.validation is None else self.validation.rows,
                "uneven": counts_unevenly(criterion)
                and (criterion.weight is not None or self.data.has_label(criterion.ignore_index)),
            },
        )
        self.plan, context.state.layout = plan_batches(settings, workers)
        context.state.epoch_steps = self.plan.steps
        self.is_uneven = settings.weighted or any(each["uneven"] for each in workers)
        if self.validation is not None:
            self.validation.take_types(self.types, self.data)
        self._whole, self._settings, self._state = self.plan, settings, context.state
        self._rank, self.order, self._is_open = worker.rank, None, False

    def one_row(self) -> Tensors:
        """Return a batch of one row, filled with zeros if the column types are known."""
        types = self.data.types or (None if self.data.rows else self.types)
        if types is None:
            if not self.data.rows:
                raise UsageError(
                    "The model has lazy layers, but a worker has no row to infer their sizes from; "
                    "use fewer workers, or pass the sizes",
                    code="model-unbuilt",
                )
            return self.data.batch(0, 1)
        columns = [[zero_column(each, 1) for each in columns] for columns in types]
        inputs, targets = tree_map_only(np.ndarray, torch.from_numpy, columns)
        return [*inputs, targets[0] if len(targets) == 1 else tuple(targets)]

    def open_epoch(self) -> None:
        """Plan the batches of the epoch: all rows, or the remaining rows of a resumed epoch."""
        state, rank = self._state, self._rank
        position, rest = state.position, state.remaining
        self.plan = self._whole if rest is None or rest.epoch != position.epoch else rest
        window = state.layout.windows[rank]
        self.order = self.data.order_of_pass(
            self.plan, self._settings, position.epoch, rank, window, position.batch
        )
        self._is_open = True

    def left(self) -> np.ndarray | None:
        """Return the ids of the epoch's remaining rows, or None before the first epoch starts."""
        if not self._is_open:
            return None
        first = self.plan.batch(self._state.position.batch, self._rank)[0]
        return self.data.ids_from(self.order, first)


@dataclass(eq=False)
class TorchStep(WorkerStep):
    """Update of a PyTorch model from one batch or from several accumulated batches."""

    context: FitContext
    runner: TorchRunner
    built: BuiltParts
    forward_pass: ForwardPass
    rows: TorchRows
    hooks: TorchHooks
    summary: StepSummary | None

    def __post_init__(self) -> None:
        context, built, runner = self.context, self.built, self.runner
        self._precision = precision_of(context.settings.precision, runner.device)
        self._update = OptimizerStep(context.sync, built, self.forward_pass, context.settings)
        self._batches = DeviceBatches(self.rows.data, runner.device, context.worker)
        self.running = Buffers(built.model, context.sync)
        runner.bind(built, self.running)

    # -- an epoch ------------------------------------------------------------------------------

    @property
    def is_done(self):
        return self.context.state.position.batch >= self.rows.plan.steps

    def begin_epoch(self):
        self.rows.open_epoch()
        if self.guard is not None:
            self.guard.begin_epoch()

    def use_guard(self, guard: StepGuard) -> None:
        """Prepare every step for an in-place recovery."""
        self.guard = self._update.guard = guard

    def put_local(self, vector):
        super().put_local(vector)
        self._update.reset()

    def reset_local(self):
        super().reset_local()
        self._update.reset()

    def facts_of_step(self):
        return self.forward_pass.loss_weights.state()

    def put_facts(self, facts):
        self.forward_pass.loss_weights.restore(facts)

    def run(self, triggers):
        while not self._run_batch():  # until all ranks have equal weights
            pass
        return not self.is_done and triggers.ask()

    def end_epoch(self):
        state, sync = self.context.state, self.context.sync
        if self.is_done:
            self.running.merge()
        metrics = self._epoch_metrics()
        if metrics is None:
            return None
        if self.hooks.are_called:
            timers = all_gather_json(sync, self.runner.timers.take())
            metrics["profile"].update(Timers.means(timers))
        metrics["profile"]["ended_at"] = time.time()
        entry = {**state.entry(), **metrics}
        if self.rows.validation is not None:
            self.hooks.validate(entry, functools.partial(self._evaluate, self.rows.validation))
        if self.forward_pass.module is not None:
            logged, stop = self.forward_pass.module.end_epoch(sync, entry)
            entry.update(logged)
            state.stop |= stop
        return entry

    def _epoch_metrics(self) -> dict | None:
        """Return the epoch's metrics over all workers, or None if no step was run."""
        return self.context.state.sums.all_reduce(self.context.sync)

    def _evaluate(self, data: BatchSource | VirtualSource) -> dict:
        with self.running.merged():
            return evaluate_collectively(
                self.runner, self.forward_pass, data, self.context.sync, self.context.settings
            )

    # -- the state -----------------------------------------------------------------------------

    @property
    def source(self):
        return self.rows.data

    def facts(self):
        types = self.rows.types
        inputs = types and model_input_types(self.built.model, types[0])
        return input_facts(self.context.settings, inputs)

    def left(self):
        return self.rows.left()

    def rank_state(self):
        module = self.forward_pass.module
        has_log = module is not None and self.context.state.position.batch
        return {**capture_rng(), "log": module.log_state()} if has_log else capture_rng()

    def put_rank_state(self, state):
        restore_rng(state)
        self.put_sums([state])

    def put_sums(self, states):
        logs = [state["log"] for state in states if "log" in state]
        if logs and self.forward_pass.module is not None:
            self.forward_pass.module.load_log(logs)

    def slices(self):
        return self.built.slices()

    def load_slices(self, slices):
        self.built.load_slices(slices)

    # -- a batch -------------------------------------------------------------------------------

    def _run_batch(self) -> bool:
        """Train on a batch; return True if all ranks now have equal weights."""
        runner, forward_pass, state = self.runner, self.forward_pass, self.context.state
        position, plan, settings = state.position, self.rows.plan, self.context.settings
        module = forward_pass.module
        started, sync, batches = time.perf_counter(), self.context.sync, self._batches
        collective_s, moved_s = sync.collective_s, batches.moved_s
        start, stop, batch_rows = plan.batch(position.batch, self.runner.rank)
        rows = stop - start
        if runner.size > 1:  # a replacement of a lost worker draws the same random numbers
            seed = mixed_seed(settings.seed, position.epoch, position.batch)
            seed_everything(seed, runner.rank, cpu_only=not torch.cuda.is_initialized())
        runner.batch_idx = position.batch
        runner.batch = runner.output = runner.target = runner.loss = None
        if rows:
            runner.batch = batches.get(position.batch, start, stop, plan, self.rows.order)
        runner.call("before_train_iter")
        if module is not None:
            runner.batch = module.begin_batch(runner.batch, runner.batch_idx, rows)
        self._update.begin()
        fetched = forwarded = time.perf_counter()
        before_s = sync.collective_s
        if rows:
            with self._precision():
                self._forward(rows)
            forwarded = time.perf_counter()
        else:
            self._forward_without_rows()
        forwarded_s = sync.collective_s
        if self.built.tables is not None:
            self.built.tables.finish()
        counted, total = self._loss_divisors(rows, batch_rows)
        position.batch += 1
        by_rows = not total and settings.accumulate == 1
        # if nothing counts, zero gradients still move weights that have a momentum
        shares = (float(rows), float(batch_rows)) if by_rows else (counted, total)
        is_last = position.batch == plan.steps
        if self.guard is not None and (is_last or self._update.is_due_next):
            self._offer(self._loss_parts(counted, total, rows, batch_rows)[1], rows)
        runner.updated, is_shared = self._backward(*shares)
        loss, parts = self._loss_parts(counted, total, rows, batch_rows)
        computed = time.perf_counter()  # also on a GPU, since the loss is known
        self.running.rows += rows
        if math.isnan(loss):
            self.context.warn(self._nan_message(), "nan")
        if runner.updated:
            position.global_step += 1
            self.built.step_scheduler(runner)
        state.sums.add(
            *parts,
            rows,
            fetch_s=fetched - started - (batches.moved_s - moved_s) - (before_s - collective_s),
            move_s=batches.moved_s - moved_s,
            forward_s=forwarded - fetched - (forwarded_s - before_s),
            backward_s=computed - forwarded - (sync.collective_s - forwarded_s),
            exchange_s=sync.collective_s - collective_s,
            step_s=time.perf_counter() - started,
        )
        state.exchanges.add(sync.collective_s - collective_s)
        if self.guard is not None and is_shared:
            self.guard.commit()
        if self.summary is not None:
            self.summary.add_batch(runner, parts, batch_rows, time.perf_counter() - started)
        if module is not None:
            module.end_batch(runner.batch)
        runner.call("after_train_iter")
        loss_so_far = state.sums.mean()
        self.context.worker.progress(**state.progress(runner.num_epochs, plan.steps, loss_so_far))
        return is_shared

    def _loss_parts(
        self, counted: float, total: float, rows: int, batch_rows: int
    ) -> tuple[float, tuple[float, float]]:
        """Return the loss of this rank and its parts for the sums of the epoch."""
        loss = self.runner.loss.item() if counted and self.runner.loss is not None else 0.0
        weights = self.forward_pass.loss_weights
        rule = LossRule(self.context.settings.weighted, weights.is_sum)
        return loss, rule.parts(loss, counted, total, rows, batch_rows)

    def _offer(self, parts: tuple[float, float], rows: int) -> None:
        """Start to exchange the state that this rank has after the step."""
        sums = replace(self.context.state.sums)
        sums.add(*parts, rows, step_s=0.0)
        vector = sums_vector(sums, self.running.rows + rows)
        values = self.running.local_values()
        cast("StepGuard", self.guard).offer(joined(vector, flat_values(values)), values)

    def _forward(self, rows: int) -> None:
        runner = self.runner
        try:
            runner.run_forward(
                lambda: self.forward_pass.forward(runner.batch, runner.batch_idx or 0),
                "on_train_forward",
            )
        except ValueError as error:
            if "more than 1 value per channel" in str(error) and rows == 1:
                error.add_note(
                    "This worker has one row of the batch, which batch normalization does not "
                    "support: "
                    'use a batch_size of at least two rows per worker, or config={"drop_last": '
                    "True} to skip an incomplete last batch"
                )
            raise
        if runner.main is not None and not hasattr(runner.loss, "backward"):
            raise UsageError(
                "on_train_forward (or on_iter_forward) of the MainCallback must set runner.loss to "
                f"a tensor, got {type(runner.loss).__name__}",
                code="function-result",
            )

    def _forward_without_rows(self) -> None:
        """Take part in the collectives of the forward passes of other ranks."""
        if hasattr(self.built.model, "join_workers"):
            self.built.model.join_workers()

    def _backward(self, counted, total) -> tuple[bool, bool]:
        """Compute gradients and, if an update is due, update the weights; a collective call.

        Returns
        -------
        updated, is_shared : bool
            Whether the weights were updated, and whether they are equal on all ranks.
        """
        runner, update, position = self.runner, self._update, self.context.state.position
        if runner.main is not None and runner.main.owns_backward:
            if runner.loss is None:  # join every collective with zero gradients
                runner.loss = sum((p * 0).sum() for p in update.parameters if p.requires_grad)
            with update.user_backward(counted, total):
                runner.main.on_iter_backward(runner)
            if runner.batch is None:
                runner.loss = None
            return True, True
        update.backward(runner.loss, counted, total)
        is_last = position.batch == self.rows.plan.steps
        if not (update.is_due or is_last):
            return False, False
        is_last |= position.global_step + 1 == self.context.state.stop_at.steps
        return True, update.step(is_last=is_last)

    def _nan_message(self) -> str:
        """Return an error message with the step of the nan loss and the columns that hold nan."""
        position, settings, batch = (
            self.context.state.position,
            self.context.settings,
            self.runner.batch,
        )
        where = f"The loss is nan at step {position.batch} of epoch {position.epoch + 1}"
        if not isinstance(batch, Mapping):
            parts = batch if isinstance(batch, list | tuple) else [batch]
            names = [*(settings.feature_cols or ()), *(settings.label_cols or ())]
            if len(names) != len(parts):
                names = [f"element {index} of a batch" for index in range(len(parts))]
            batch = dict(zip(names, parts, strict=True))
        wrong = [name for name, value in batch.items() if _holds_nan(value)]
        if wrong:
            columns = ", ".join(map(repr, wrong))
            return f"{where}, and the rows have nan in {columns}; fill or drop them"
        return f"{where}, but its rows have none; try a smaller learning rate or gradient clipping"

    def _loss_divisors(self, rows, batch_rows) -> tuple[float, float]:
        """Return the divisors of the local and the global loss; may be a collective call."""
        weights, runner = self.forward_pass.loss_weights, self.runner
        if not weights.is_known and weights.is_due():
            self._probe_loss(rows)
        if not (self.rows.is_uneven or weights.is_uneven):
            return float(rows), float(batch_rows)
        counted = 0.0
        if rows:
            parts = runner.output, runner.target, rows, runner.loss
            counted = self.forward_pass.denominator(*parts)
            self._warn_about_loss()
        return counted, sum(row[0] for row in self.context.sync.all_gather([counted]))

    def _probe_loss(self, rows: int) -> None:
        """Detect the reduction of the loss with this batch; a collective call."""
        weights, result, runner = self.forward_pass.loss_weights, ProbeResult(), self.runner
        if rows and runner.loss is not None:
            batch = runner.batch, runner.output, runner.target, rows, runner.loss
            result = self.forward_pass.probe_loss(*batch)
        codes = [row[0] for row in self.context.sync.all_gather([result.code])]
        weights.settle(agreed(codes), result.reason)
        self._update.check()
        if result.reason or self.runner.rank == 0:
            self._warn_about_loss()

    def _warn_about_loss(self) -> None:
        """Warn once if the loss is neither a mean nor a sum over the rows of a batch."""
        reason, is_alone = self.forward_pass.loss_weights.reason, self.context.sync.world_size == 1
        if reason and not (is_alone and self.context.settings.accumulate == 1):
            self.context.warn(loss_warning(self.forward_pass.loss_name, reason), "loss")


class TorchFit:
    """A PyTorch fit on one worker.

    Parameters
    ----------
    worker : Worker
    sync : GradientSync
    parts : ModelParts
    settings : FitSettings

    Attributes
    ----------
    state : TrainState
    runner : TorchRunner
        Runner that callbacks get.
    built : BuiltParts
    step : TorchStep
    epochs : EpochRunner
    """

    rows_class: ClassVar[type[TorchRows]] = TorchRows
    step_class: ClassVar[type[TorchStep]] = TorchStep

    def __init__(
        self, worker: Worker, sync: GradientSync, parts: ModelParts, settings: FitSettings
    ):
        self.state = state = TrainState(settings.stop_at)
        context = FitContext(settings, state, worker, sync)
        self.runner = runner = TorchRunner(worker, parts.config, settings.callbacks, context)

        # creators run under one seed, so that all ranks start from the same weights
        seed_everything(settings.seed)
        self.built = built = self._build(worker, parts)
        if built.tables is not None:
            _check_tables(runner, settings)
        runner.bind(built)
        forward_pass = settings.forward_pass(built)
        seed_everything(settings.seed, worker.rank + 1)

        writer = start(worker, sync)
        if built.tables is not None:
            built.tables.connect(sync)
        if hasattr(built.model, "connect_workers"):  # a loss that compares rows of all workers
            built.model.connect_workers(sync)
        runner.device = device_of(worker, sync)
        self._distribute(context, parts)
        self._check(context, built)
        rows = self.rows_class(context, parts.config, built.criterion)
        self._configure(context, parts, forward_pass, rows)
        summary = StepSummary() if settings.summary else None
        records = {} if summary is None else {"summary.pt": summary}
        hooks = TorchHooks(context, runner, built, records, forward_pass.module)
        self.step = self.step_class(context, runner, built, forward_pass, rows, hooks, summary)
        if self._recovers_in_place(context):
            self.step.use_guard(StepGuard(sync, state, self.step))
        checkpointer = WorkerCheckpointer(context, hooks, self.step, writer)
        checkpointer.restore()
        local = settings.batch_size // runner.size
        runner.train_loader = WorkerBatches(rows.data, local)
        if rows.validation is not None:
            runner.val_loader = WorkerBatches(rows.validation, local)
        self.epochs = EpochRunner(context, Triggers(context), hooks, self.step, checkpointer)

    def _build(self, worker: Worker, parts: ModelParts) -> BuiltParts:
        """Build the components, before the worker is connected to the others."""
        return parts.build(training=True, placement=TablePlacement.of(worker), is_early=True)

    def _distribute(self, context: FitContext, parts: ModelParts) -> None:
        """Move the model to the device of the worker."""
        move(self.built, self.runner.device)

    def _recovers_in_place(self, context: FitContext) -> bool:
        """Return True if lost workers are replaced; raise an error if they cannot but must be."""
        if context.settings.recovery == "restart":
            return False
        built, runner, settings = self.built, self.runner, context.settings
        buffers = sum(buffer.numel() for buffer in built.model.buffers())
        reasons = {
            "there is one worker": runner.size == 1,
            "a GPU is used": runner.device.type != "cpu",
            "the model has a ShardedEmbedding": built.tables is not None,
            "shard= divides the model among the workers": built.sharding is not None,
            "the model is a LightningModule": is_lightning(built.model),
            "a MainCallback calls backward": runner.main is not None and runner.main.owns_backward,
            "local_steps is more than 1": settings.local_steps > 1,
            "a summary is recorded": settings.summary,
            "the model has too many values in buffers": buffers > _MAX_BUFFERS,
            "the rows of a table are on several machines": self.step.rows.data.fetches_rows,
            "the workers cannot connect again": not context.sync.can_rejoin,
            "the input is a loader": any(
                isinstance(shard, LoaderShard) for shard in context.worker.shards.values()
            ),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), "")
        if reason and context.settings.recovery == "in_place":
            raise UsageError(
                f'recovery="in_place" is not possible, since {reason}; remove recovery, so that a '
                "lost worker restarts the fit from the latest checkpoint",
                code="argument-conflict",
                argument="recovery",
            )
        return not reason

    def _check(self, context: FitContext, built: BuiltParts) -> None:
        """Raise an error for unsupported settings; called once the device is known."""

    def _configure(
        self, context: FitContext, parts: ModelParts, forward_pass: ForwardPass, rows: TorchRows
    ) -> None:
        """Infer the sizes of lazy layers and create the optimizer, once the rows are known."""
        built, runner = self.built, self.runner
        if is_lazy(built.model):
            with isolated_rng(context.settings.seed):
                forward_pass.infer_sizes(to_device(rows.one_row(), runner.device))
        if is_lightning(built.model):
            built.model.trainer.begin_fit(runner, context, rows.plan.steps)
        if built.optimizer is None:
            with isolated_rng(context.settings.seed):
                parts.configure(built)
        if runner.rank == 0 and is_lightning(built.model):
            dropped = dropped_hooks(built.model, has_loss=built.criterion is not None)
            if dropped is not None:
                context.warn(dropped)


def _check_tables(runner: TorchRunner, settings: FitSettings) -> None:
    """Raise an error for settings that sharded embeddings do not support."""
    if settings.run_url is None:
        raise UsageError(
            "A model with a ShardedEmbedding needs model_dir= in Estimator.from_torch, a folder on "
            "storage that the driver and all workers share; workers write their rows to it",
            code="argument-missing",
            argument="model_dir",
        )
    if runner.main is not None and runner.main.owns_backward:
        raise UsageError(
            "A custom on_iter_backward does not support a ShardedEmbedding, whose gradients are "
            "sent "
            "before the optimizer's step; do not override on_iter_backward",
            code="argument-conflict",
            argument="callbacks",
        )


@dataclass
class FitProgram:
    """Program of a fit, as it is sent to the workers."""

    parts: ModelParts
    settings: FitSettings
    sync: Any  # class of the GradientSync

    @property
    def config(self) -> dict:
        """The ``config`` of the Estimator."""
        return self.parts.config

    # : class of the fit on one worker
    fit_class: ClassVar[type[TorchFit]] = TorchFit
    # : whether freed memory is returned to the system during the fit
    returns_blocks: ClassVar[bool] = False

    def __call__(self, worker: Worker) -> dict:
        with tuned_allocator(returns_blocks=self.returns_blocks):
            fit = self.fit_class(worker, self.sync(worker), self.parts, self.settings)
            return fit.epochs.run()
