"""The training loop of PyTorch: one update, one epoch, one fit.

It knows neither which engine runs it nor what the input was: a worker gives it shards, a sync
gives it collectives.  :class:`FitProgram` is what an engine ships; :class:`TorchFit` puts the parts
of a fit together, which :class:`~bigdl.training.fit.EpochRunner` runs.  What all ranks decide
(whether to go on, whether to write a checkpoint) is computed from figures that are equal on all of
them.  A fit by the parameter layer has the same :class:`TorchHooks`, and other steps.
"""

import contextlib
import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

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
    loss_sentence,
    taken_types,
)
from bigdl.orca.learn.pytorch.lightning import LightningForward, dropped_hooks
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts, is_lazy
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.runtime.collectives.base import GradientSync
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
from bigdl.training.loss_form import ProbeResult, agreed
from bigdl.training.metrics import LossRule, Records, Timers, score_of, validation_names
from bigdl.training.position import RunSettings
from bigdl.training.state import (
    RunningState,
    capture_rng,
    device_of,
    isolated_rng,
    move,
    precision_of,
    restore_rng,
    seed_everything,
    to_device,
)


@dataclass(frozen=True)
class Clipping:
    """Limits of the gradients of the whole batch, so that N workers equal one.

    Attributes
    ----------
    minimum, maximum : float or None
        Every element is brought into this range.
    norm : float or None
        All gradients together are scaled down to this L2 norm, after that.
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
        """Limit gradients in place.

        Parameters
        ----------
        parameters : sequence of torch.nn.Parameter
            Those that are the same on all ranks.
        slices : sequence of torch.nn.Parameter
            Those of which every rank has others; their norm is a collective.
        sync : GradientSync, optional
            Of the ranks, where there are slices.
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
            own = [_values(p) for p in slices if p.grad is not None]
            if slices and sync is not None:
                squares = torch.nn.utils.get_total_norm(own).double().square()
                squares = sync.all_reduce(squares).to(total.device)
                total = (total.double().square() + squares).sqrt()
                gradients += own
            scale = torch.clamp(self.norm / (total + 1e-6), max=1.0)
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(scale.to(gradient.device))  # slices stay on the CPU


def _values(parameter):
    """The elements of a gradient; of a sparse one those that it holds."""
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


@dataclass(kw_only=True)
class FitSettings(TorchEvaluationSettings, RunSettings):
    """The arguments of ``fit`` as the workers get them.

    Attributes
    ----------
    accumulate : int
        Batches of an update; k batches of n rows make the update of one batch of k * n rows.
    local_steps : int
        Steps that a worker makes by itself before weights become the mean of all workers'.
    summary : bool
        True if loss, learning rate and throughput of every step are recorded.
    """

    callbacks: Sequence[Any] = ()
    clipping: Clipping = field(default_factory=Clipping)
    accumulate: int = 1
    local_steps: int = 1
    summary: bool = False


class LocalSteps:
    """Steps of a worker by itself, after which weights and the optimizer's state become means.

    Every worker counts by the rows that it has seen since the last time. With plain SGD the mean
    after a single step is what the mean of the gradients gives (S. U. Stich, "Local SGD Converges
    Fast and Communicates Little", ICLR 2019); other optimizers, and more steps, give other weights
    than one process.

    Parameters
    ----------
    sync : GradientSync
    built : BuiltParts
    steps : int
        From one mean to the next; 1 where gradients are summed in every step.

    Attributes
    ----------
    rows : float
        That this worker has seen since the last mean; its owner adds to it.
    """

    def __init__(self, sync: GradientSync, built: BuiltParts, steps: int):
        self._sync, self._optimizer, self.steps = sync, built.optimizer, steps
        self.rows = 0.0
        self._made = 0
        self._means: list[torch.nn.Parameter] = []  # in the memory of what is averaged

    def count(self, parameters: Sequence[torch.nn.Parameter], *, is_last: bool) -> bool:
        """Count a step; returns True if weights are the mean of all ranks now. A collective."""
        self._made += 1
        if self._made < self.steps and not is_last:
            return False
        self._made = 0
        if self._sync.world_size > 1:
            self._take_mean(parameters)
        self.rows = 0.0
        return True

    def _take_mean(self, parameters):
        rows = sum(row[0] for row in self._sync.all_gather([self.rows]))
        if not rows:
            return
        self._complete(parameters)
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

    def _complete(self, parameters) -> None:
        """Make the state of parameters that have had a gradient on other ranks only."""
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
    """One step of the optimizer from one batch, or from several that add up.

    For each batch call :meth:`begin` and :meth:`backward`, and :meth:`step` when it is due.

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
        self._sparse = may_be_sparse(built.model)
        self._tables = built.tables
        self._clipping, self._accumulate = settings.clipping, settings.accumulate
        steps = settings.local_steps
        self._alone = LocalSteps(sync, built, steps) if steps > 1 else None
        self.check()
        self._reset()

    def check(self) -> None:
        """Refuse local steps of a loss or a model that they do not go with."""
        is_sum = self._loss_weights.is_sum
        if self._alone is not None and (is_sum or self._tables is not None):
            what = "a loss that adds up over rows" if is_sum else "a ShardedEmbedding"
            raise UsageError(
                f"local_steps={self._alone.steps} does not go with {what}: leave local_steps at 1, "
                "which is exact",
                code="argument-conflict",
                argument="local_steps",
            )

    def _reset(self):
        self._batches, self._weight, self._total = 0, 0.0, 0.0

    def begin(self) -> None:
        """Before the forward pass of a batch."""
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
            What the loss was divided by here, and over all ranks.
        """
        self._batches += 1
        self._total += total
        if loss is None:
            return
        if self._alone is not None:
            if counted:
                self._alone.rows += counted
                self._run_backward(loss)
        elif self._accumulate == 1:
            share = counted / total if total else 0.0
            self._weight = 1.0 if self._loss_weights.is_sum else share
            with self._sync.overlap(self.parameters, self._weight, self._sparse):
                self._run_backward(loss)
        elif self._loss_weights.is_sum or counted:
            # the loss of a batch of ignored labels is nan
            self._weight = 1.0
            self._run_backward(loss if self._loss_weights.is_sum else loss * counted)

    @property
    def is_due(self) -> bool:
        """True if the update has all its batches."""
        return self._batches >= self._accumulate

    def step(self, *, is_last: bool) -> bool:
        """Sum the gradients over the ranks, limit them and update the weights; a collective.

        Parameters
        ----------
        is_last : bool
            True if what follows needs one state on all ranks, as the end of an epoch does.

        Returns
        -------
        bool
            True if all ranks have the same weights now.
        """
        parameters = self.parameters
        slices: list[torch.nn.Parameter] = []
        if self._alone is not None:
            self._update(parameters, slices)
            return self._alone.count(parameters, is_last=is_last)
        self._sync.all_reduce_gradients(parameters, self._weight, self._sparse)
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
        """Limit gradients and update the weights."""

        def clip(**limits: float) -> None:
            clipping = Clipping(**limits) if limits else self._clipping
            clipping(parameters, slices, self._sync)

        if self._module is not None:
            self._module.step(self._optimizer, clip)
        else:
            self._clipping(parameters, slices, self._sync)
            self._optimizer.step()
        self._reset()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the optimizer that all ranks have; it may be given more later."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return parameters if self._tables is None else self._tables.without(parameters)

    @contextlib.contextmanager
    def by_hand(self, counted: float, total: float) -> Iterator[None]:
        """Within the block user code calls ``backward`` and the optimizer.

        At the end of every backward pass the gradients are those of the whole batch, and a step of
        the optimizer limits them first.

        Parameters
        ----------
        counted, total : float
            See :meth:`backward`. The weights of the ranks' losses add up to 1, so gradients that an
            earlier pass has summed already stay what they are.
        """
        weight = (
            float(counted > 0) if self._loss_weights.is_sum else counted / total if total else 0.0
        )
        parameters, queued = self.parameters, False

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
            self._reset()


def _holds_nan(value: Any) -> bool:
    """Return True for a tensor with a nan, and for a container of one."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(value.isnan().any())
    parts = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(map(_holds_nan, parts))


def may_be_sparse(model: torch.nn.Module) -> list:
    """Parameters that get sparse gradients: a rank without rows cannot see it."""
    return [
        module.weight
        for module in model.modules()
        if getattr(module, "sparse", False) is True and hasattr(module, "weight")
    ]


class Buffers(RunningState):
    """The buffers of a module, such as running means, merged over the workers."""

    def own(self) -> list:
        """A copy of this worker's buffers."""
        return [buffer.clone() for buffer in self._model.buffers()]

    def put(self, values: list) -> None:
        """Set this worker's buffers, e.g. to what :meth:`own` gave."""
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)


@dataclass(eq=False)
class TorchHooks(Hooks):
    """Callbacks of a PyTorch fit and hooks of a LightningModule, and the files of its model.

    Attributes
    ----------
    context : FitContext
    runner : TorchRunner
        What callbacks see.
    built : BuiltParts
    records : dict of str to Records
        By the name of their file in a checkpoint, if steps are recorded.
    module : LightningForward, optional
        Calls the hooks of a LightningModule, in a process that makes steps.
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
            self.module.on("on_fit_start")
            self.module.on("on_train_start")

    def end_fit(self):
        if self.module is not None:
            self.module.on("on_train_end")
            self.module.on("on_fit_end")
            self.module.on("teardown", "fit")
        self.runner.call("after_run")
        return False

    def begin_epoch(self):
        self.runner.model.train()
        if self.module is not None:
            self.module.begin_training()
        self.runner.call("before_train_epoch")
        if self.module is not None:
            self.module.on("on_train_epoch_start")

    def validate(self, entry: dict, evaluate: Callable[[], dict]) -> None:
        """Add the figures of an evaluation to those of an epoch, among the hooks of both."""
        runner = self.runner
        runner.call("before_val_epoch")
        evaluation = evaluate()
        if evaluation.get("warning"):
            self.context.warn(evaluation["warning"], "loss")
        figures = validation_names(evaluation["figures"])
        entry.update(figures)
        entry["profile"].update(evaluation["profile"])
        for worker, those in zip(entry["workers"], evaluation.get("workers", ()), strict=False):
            worker.update(validation_names(those))
        runner.epoch_stats, runner.metrics_stats = entry, figures
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
    """The rows of one worker, cut in the batches of an epoch.

    Parameters
    ----------
    context : FitContext
    config : dict
    criterion : callable or None
        The loss, which may not count all rows alike.

    Attributes
    ----------
    data, validation : BatchSource
        The latter is None without validation.
    types : list or None
        Of the training data, as far as some worker knows them.
    plan : BatchPlan
        The batches of the epoch.
    order : object
        Of the rows in the epoch, once it is open.
    is_uneven : bool
        True if rows of a batch may count differently on the workers.
    """

    def __init__(self, context: FitContext, config: dict, criterion: Any):
        worker, sync, settings = context.worker, context.sync, context.settings
        sources = {
            name: settings.open_batches(shard, worker, config)
            for name, shard in worker.shards.items()
        }
        deal_streams(list(sources.values()), sync, context.warn)
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

    def one_row(self) -> Any:
        """Return a batch of one row, of zeros where the types of the columns are known."""
        types = self.data.types or (None if self.data.rows else self.types)
        if types is None:
            if not self.data.rows:
                raise UsageError(
                    "The model has lazy layers, and a worker has no row to take their sizes from; "
                    "use fewer workers, or give the sizes",
                    code="model-unbuilt",
                )
            return self.data.batch(0, 1)
        columns = [[zero_column(each, 1) for each in columns] for columns in types]
        inputs, targets = tree_map_only(np.ndarray, torch.from_numpy, columns)
        return [*inputs, targets[0] if len(targets) == 1 else tuple(targets)]

    def open_epoch(self) -> None:
        """Cut the rows of the epoch: all of them, or those that other workers have left."""
        state, rank = self._state, self._rank
        position, rest = state.position, state.rest
        self.plan = self._whole if rest is None or rest.epoch != position.epoch else rest
        window = state.layout.windows[rank]
        self.order = self.data.order_of_pass(
            self.plan, self._settings, position.epoch, rank, window, position.batch
        )
        self._is_open = True

    def left(self) -> np.ndarray | None:
        """Ids of the rows that are left of the epoch; None before one is open."""
        if not self._is_open:
            return None
        first = self.plan.batch(self._state.position.batch, self._rank)[0]
        return self.data.ids_from(self.order, first)


@dataclass(eq=False)
class TorchStep(WorkerStep):
    """An update of a PyTorch model from one batch, or from several that add up."""

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

    def run(self, triggers):
        while not self._run_batch():  # until weights are those of all ranks
            pass
        return not self.is_done and triggers.ask()

    def end_epoch(self):
        state, sync = self.context.state, self.context.sync
        if self.is_done:
            self.running.merge()
        figures = self._epoch_figures()
        if figures is None:
            return None
        if self.hooks.are_called:
            timers = all_gather_json(sync, self.runner.timers.take())
            figures["profile"].update(Timers.means(timers))
        figures["profile"]["ended_at"] = time.time()
        entry = {**state.entry(), **figures}
        if self.rows.validation is not None:
            self.hooks.validate(entry, functools.partial(self._evaluate, self.rows.validation))
        if self.forward_pass.module is not None:
            logged, stop = self.forward_pass.module.end_epoch(sync, entry)
            entry.update(logged)
            state.stop |= stop
        return entry

    def _epoch_figures(self) -> dict | None:
        """Return the metrics of the epoch over all workers; None if no step was made."""
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
        return input_facts(self.context.settings, types and taken_types(self.built.model, types[0]))

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
        return {} if self.built.tables is None else self.built.tables.arrays()

    def load_slices(self, slices):
        if self.built.tables is not None:
            self.built.tables.load(slices)

    # -- a batch -------------------------------------------------------------------------------

    def _run_batch(self) -> bool:
        """Train on a batch; return True if it ended in weights that are those of all ranks."""
        runner, forward_pass, state = self.runner, self.forward_pass, self.context.state
        position, plan, settings = state.position, self.rows.plan, self.context.settings
        module = forward_pass.module
        started = time.perf_counter()
        start, stop, batch_rows = plan.batch(position.batch, self.runner.rank)
        rows = stop - start
        runner.batch_idx = position.batch
        runner.batch = runner.output = runner.target = runner.loss = None
        if rows:
            runner.batch = self._batches.get(position.batch, start, stop, plan, self.rows.order)
        runner.call("before_train_iter")
        if module is not None:
            runner.batch = module.begin_batch(runner.batch, runner.batch_idx, rows)
        self._update.begin()
        fetched = forwarded = time.perf_counter()
        if rows:
            with self._precision():
                self._forward(rows)
            forwarded = time.perf_counter()
        if self.built.tables is not None:
            self.built.tables.finish()
        counted, total = self._counted(rows, batch_rows)
        position.batch += 1
        of_rows = not total and settings.accumulate == 1
        # where nothing counts, gradients are 0, which moves weights that have a momentum
        shares = (float(rows), float(batch_rows)) if of_rows else (counted, total)
        runner.updated, is_shared = self._backward(*shares)
        computed = time.perf_counter()
        self.running.rows += rows
        loss = runner.loss.item() if counted and runner.loss is not None else 0.0
        if math.isnan(loss):
            self.context.warn(self._nan_sentence(), "nan")
        rule = LossRule(settings.weighted, forward_pass.loss_weights.is_sum)
        parts = rule.parts(loss, counted, total, rows, batch_rows)
        if runner.updated:
            position.global_step += 1
            self.built.step_scheduler(runner)
        state.sums.add(
            *parts,
            rows,
            fetch_s=fetched - started,
            forward_s=forwarded - fetched,
            backward_s=computed - forwarded,
            step_s=time.perf_counter() - started,
        )
        if self.summary is not None:
            self.summary.add_batch(runner, parts, batch_rows, time.perf_counter() - started)
        if module is not None:
            module.end_batch(runner.batch)
        runner.call("after_train_iter")
        loss_so_far = state.sums.mean()
        self.context.worker.progress(**state.progress(runner.num_epochs, plan.steps, loss_so_far))
        return is_shared

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
                    "This worker has one row of the batch, which batch normalisation cannot take: "
                    'use a batch_size of two rows for each worker or more, or config={"drop_last": '
                    "True}, which leaves out the last batch if it is not full"
                )
            raise
        if runner.main is not None and not hasattr(runner.loss, "backward"):
            raise UsageError(
                "on_train_forward (or on_iter_forward) of the MainCallback must set runner.loss to "
                f"a tensor, it is {type(runner.loss).__name__}",
                code="function-result",
            )

    def _backward(self, counted, total) -> tuple[bool, bool]:
        """From the loss to gradients, and to new weights if an update is due; a collective.

        Returns
        -------
        updated, is_shared : bool
            Whether there are new weights, and whether they are the same on all ranks.
        """
        runner, update, position = self.runner, self._update, self.context.state.position
        if runner.main is not None and runner.main.owns_backward:
            if runner.loss is None:  # takes part in every pass without having a say
                runner.loss = sum((p * 0).sum() for p in update.parameters if p.requires_grad)
            with update.by_hand(counted, total):
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

    def _nan_sentence(self) -> str:
        """Where the loss is nan, and which columns of the batch are."""
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
                names = [f"part {place} of a batch" for place in range(len(parts))]
            batch = dict(zip(names, parts, strict=True))
        wrong = [name for name, value in batch.items() if _holds_nan(value)]
        if wrong:
            columns = ", ".join(map(repr, wrong))
            return f"{where}, and the rows hold nan in {columns}: fill or drop them"
        return f"{where}, though its rows hold none: a smaller learning rate or clipping may help"

    def _counted(self, rows, batch_rows) -> tuple[float, float]:
        """Return the divisors of the loss on this rank and over all of them; maybe a collective."""
        weights, runner = self.forward_pass.loss_weights, self.runner
        if not weights.is_known and weights.is_due():
            self._find_form(rows)
        if not (self.rows.is_uneven or weights.is_uneven):
            return float(rows), float(batch_rows)
        counted = 0.0
        if rows:
            parts = runner.output, runner.target, rows, runner.loss
            counted = self.forward_pass.denominator(*parts)
            self._warn_of_loss()
        return counted, sum(row[0] for row in self.context.sync.all_gather([counted]))

    def _find_form(self, rows: int) -> None:
        """Find out how the loss follows from rows, with this batch; a collective."""
        weights, finding, runner = self.forward_pass.loss_weights, ProbeResult(), self.runner
        if rows and runner.loss is not None:
            batch = runner.batch, runner.output, runner.target, rows, runner.loss
            finding = self.forward_pass.find(*batch)
        codes = [row[0] for row in self.context.sync.all_gather([finding.code])]
        weights.settle(agreed(codes), finding.reason)
        self._update.check()
        if finding.reason or self.runner.rank == 0:
            self._warn_of_loss()

    def _warn_of_loss(self) -> None:
        """Tell the user once that parts of a batch cannot be weighted as in one process."""
        reason, is_alone = self.forward_pass.loss_weights.reason, self.context.sync.world_size == 1
        if reason and not (is_alone and self.context.settings.accumulate == 1):
            self.context.warn(loss_sentence(self.forward_pass.loss_name, reason), "loss")


class TorchFit:
    """A PyTorch fit in one worker, put together from its parts.

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
        What callbacks see: the model, its optimizer, ...
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
        self.built = built = parts.build(
            training=True, place=TablePlacement.of(worker), is_early=True
        )
        if built.tables is not None:
            _check_tables(runner, settings)
        runner.bind(built)
        forward_pass = settings.forward_pass(built)
        seed_everything(settings.seed, worker.rank + 1)

        writer = start(worker, sync)
        if built.tables is not None:
            built.tables.connect(sync)
        runner.device = device_of(worker, sync)
        move(built, runner.device)
        self._check(context, built)
        rows = self.rows_class(context, parts.config, built.criterion)
        self._configure(context, parts, forward_pass, rows)
        summary = StepSummary() if settings.summary else None
        records = {} if summary is None else {"summary.pt": summary}
        hooks = TorchHooks(context, runner, built, records, forward_pass.module)
        self.step = self.step_class(context, runner, built, forward_pass, rows, hooks, summary)
        checkpointer = WorkerCheckpointer(context, hooks, self.step, writer)
        checkpointer.restore()
        local = settings.batch_size // runner.size
        runner.train_loader = WorkerBatches(rows.data, local)
        if rows.validation is not None:
            runner.val_loader = WorkerBatches(rows.validation, local)
        self.epochs = EpochRunner(context, Triggers(context), hooks, self.step, checkpointer)

    def _check(self, context: FitContext, built: BuiltParts) -> None:
        """Refuse what this form of a fit does not go with; called once the device is known."""

    def _configure(
        self, context: FitContext, parts: ModelParts, forward_pass: ForwardPass, rows: TorchRows
    ) -> None:
        """Let a LightningModule make its optimizer, which may depend on the number of rows."""
        built, runner = self.built, self.runner
        if is_lazy(built.model):
            with isolated_rng(context.settings.seed):
                forward_pass.take_sizes(to_device(rows.one_row(), runner.device))
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
    """Refuse what sharded embeddings do not go with."""
    if settings.run_url is None:
        raise UsageError(
            "A model with a ShardedEmbedding needs model_dir= in Estimator.from_torch, a "
            "folder that the driver and all workers share: workers write their rows there",
            code="argument-missing",
            argument="model_dir",
        )
    if runner.main is not None and runner.main.owns_backward:
        raise UsageError(
            "An on_iter_backward of one's own does not go with a ShardedEmbedding, whose "
            "gradients are sent before the optimizer's step; leave on_iter_backward as it is",
            code="argument-conflict",
            argument="callbacks",
        )


@dataclass
class FitProgram:
    """A fit, as shipped to the workers."""

    parts: ModelParts
    settings: FitSettings
    sync: Any  # class of the GradientSync

    @property
    def config(self) -> dict:
        """The ``config`` of the Estimator."""
        return self.parts.config

    #: the fit of one worker
    fit_class: ClassVar[type[TorchFit]] = TorchFit

    def __call__(self, worker: Worker) -> dict:
        with tuned_allocator():
            fit = self.fit_class(worker, self.sync(worker), self.parts, self.settings)
            return fit.epochs.run()
