"""The training loop of PyTorch: one update, one epoch, one fit.

It knows neither which engine runs it nor what the input was: a worker gives it shards, a sync
gives it collectives.  :class:`FitProgram` is what an engine ships.  What all ranks decide (whether
to go on, whether to write a checkpoint) is computed from figures that are equal on all of them.
:class:`TorchEpochs` is the part that a fit by the parameter layer has in common with it.
"""

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.pytorch.device_batches import DeviceBatches
from bigdl.orca.learn.pytorch.evaluation import (
    EvaluationSettings,
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
from bigdl.orca.learn.pytorch.lightning import dropped_hooks
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts, is_lazy
from bigdl.orca.learn.pytorch.summaries import StepSummary
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.worker import Worker
from bigdl.training.batches import (
    all_gather_json,
    deal_streams,
    plan_batches,
    shuffle_memory,
    zero_column,
)
from bigdl.training.figures import LossRule, Records, Timers, score_of, validation_names
from bigdl.training.fit import FitLoop, RunSettings, WorkerLoop
from bigdl.training.loss_form import Finding, agreed
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
from bigdl.training.tables.place import Place


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
class FitSettings(EvaluationSettings, RunSettings):
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
        self._forward_pass = forward_pass
        self._sparse = may_be_sparse(built.model)
        self._tables = built.tables
        self._clipping, self._accumulate = settings.clipping, settings.accumulate
        self._alone = LocalSteps(sync, built, settings.local_steps)
        self.check()
        self._reset()

    def check(self) -> None:
        """Refuse local steps of a loss or a model that they do not go with."""
        is_sum = self._loss_is_sum
        if self._alone.steps > 1 and (is_sum or self._tables):
            what = "a loss that adds up over rows" if is_sum else "a ShardedEmbedding"
            raise UsageError(
                f"local_steps={self._alone.steps} does not go with {what}: leave local_steps at 1, "
                "which is exact",
                code="argument-conflict",
                argument="local_steps",
            )

    @property
    def _loss_is_sum(self) -> bool:
        return self._forward_pass.loss_is_sum

    def _reset(self):
        self._batches, self._weight, self._total = 0, 0.0, 0.0

    def begin(self) -> None:
        """Before the forward pass of a batch."""
        if not self._batches:
            self._forward_pass.zero_grad(self._optimizer)
        self._tables.begin()

    def end_forward(self) -> None:
        """After the forward pass of a batch, or without one; a collective."""
        self._tables.finish()

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
        if self._alone.steps > 1:
            if counted:
                self._alone.rows += counted
                self._forward_pass.backward(loss)
        elif self._loss_is_sum:
            self._weight = 1.0
            self._last_backward(loss)
        elif self._accumulate == 1:
            self._weight = counted / total if total else 0.0
            self._last_backward(loss)
        elif counted:  # the loss of a batch of ignored labels is nan
            self._weight = 1.0
            self._forward_pass.backward(loss * counted)

    def _last_backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, and send them meanwhile unless further batches add to them."""
        if self._accumulate > 1:
            self._forward_pass.backward(loss)
            return
        with self._sync.overlap(self.parameters, self._weight, self._sparse):
            self._forward_pass.backward(loss)

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
        if self._alone.steps > 1:
            self._update(parameters, ())
            return self._alone.count(parameters, is_last=is_last)
        self._sync.all_reduce_gradients(parameters, self._weight, self._sparse)
        self._tables.send_gradients(self._weight)
        slices = self._tables.weights
        if self._accumulate > 1 and not self._loss_is_sum and self._total:
            for parameter in [*parameters, *slices]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._total)
        self._update(parameters, slices)
        return True

    def _update(self, parameters: Sequence, slices: Sequence) -> None:
        """Limit gradients and update the weights."""

        def clip(**limits: float):
            clipping = Clipping(**limits) if limits else self._clipping
            clipping(parameters, slices, self._sync)

        self._forward_pass.step(self._optimizer, clip)
        self._reset()

    @property
    def parameters(self) -> list:
        """The parameters of the optimizer that all ranks have; it may be given more later."""
        groups = self._optimizer.param_groups
        return self._tables.without([p for group in groups for p in group["params"]])

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
        weight = float(counted > 0) if self._loss_is_sum else counted / total if total else 0.0
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


class TorchEpochs(TorchRunner, FitLoop):
    """Epochs of a PyTorch fit: hooks, validation and figures around steps that a subclass makes."""

    settings: FitSettings
    _built: BuiltParts
    _plan: BatchPlan
    _records: Mapping[str, Records]  # files of a checkpoint, if steps are recorded
    _validation: Any = None  # what an evaluation works on, if there is one
    _forward_pass: ForwardPass | None = None  # of this process, if it makes steps

    @abstractmethod
    def _run_steps(self) -> bool:
        """Make the steps that are left of the epoch; returns True if it is whole now."""

    @abstractmethod
    def _epoch_figures(self) -> dict | None:
        """Return the figures of the epoch's training, or None if no step was made."""

    @abstractmethod
    def _evaluate(self) -> dict | None:
        """Return what an evaluation of the validation data gave."""

    def fit(self) -> Any:
        """Train to the end; returns what :meth:`_finish` does."""
        settings = self.settings
        self.first_epoch = settings.goal.first
        self.num_epochs = settings.goal.last_epoch(
            self.position, self._plan.steps, settings.accumulate
        )
        self.call("before_run")
        self._on("on_fit_start")
        self._on("on_train_start")
        self._run_epochs()
        self._on("on_train_end")
        self._on("on_fit_end")
        self._on("teardown", "fit")
        self.call("after_run")
        return self._finish()

    def _on(self, hook: str, *arguments: Any) -> None:
        """Call a hook of a LightningModule."""
        if self._forward_pass is not None:
            self._forward_pass.on(hook, *arguments)

    def _epoch(self) -> None:
        position = self.position
        self.model.train()
        if self._forward_pass is not None:
            self._forward_pass.begin_training()
        self.call("before_train_epoch")
        self._on("on_train_epoch_start")
        is_whole = self._run_steps()
        figures = self._epoch_figures()
        if figures is None:  # it was stopped before the first step
            return
        entry = {"epoch": position.epoch + 1, "global_step": position.global_step, **figures}
        if self._validation is not None:
            self._validate(entry)
        self._take_log(entry)
        self.epoch_stats, self.epoch_is_whole = entry, is_whole
        if self.callbacks:
            self._pull()
        self.call("after_train_epoch")
        self._end_epoch(entry, is_whole, loss=entry["train_loss"], score=score_of(entry))

    def _take_log(self, entry: dict) -> None:
        """Add what the module logged in the epoch; it may also end the fit here."""

    def _validate(self, entry: dict) -> None:
        self.call("before_val_epoch")
        evaluation = cast("dict", self._evaluate())
        if evaluation.get("warning"):
            self._warn_once(evaluation["warning"], "loss")
        figures = validation_names(evaluation["figures"])
        entry.update(figures)
        entry["profile"].update(evaluation["profile"])
        for worker, those in zip(entry["workers"], evaluation.get("workers", ()), strict=False):
            worker.update(validation_names(those))
        self.epoch_stats, self.metrics_stats = entry, figures
        self.call("after_val_epoch")

    def _close_epoch(self, entry: dict) -> None:
        super()._close_epoch(entry)
        self._built.step_scheduler(self, entry)
        if self._forward_pass is not None:
            self._forward_pass.close_epoch()

    def _files(self) -> dict[str, bytes]:
        records = {name: records.dump() for name, records in self._records.items()}
        return {**self._built.files(), **records}

    def _load(self, files: dict[str, bytes]) -> None:
        self._built.load(files)
        for name, records in self._records.items():
            if name in files:
                records.load(files[name])


class TorchLoop(TorchEpochs, WorkerLoop):
    """The training loop of PyTorch in one worker."""

    _records: Mapping[str, StepSummary]
    _read: tuple[BatchPlan, Any] | None = None  # batches and order of the epoch that is read

    def __init__(
        self, worker: Worker, sync: GradientSync, parts: ModelParts, settings: FitSettings
    ):
        super().__init__(worker, parts.config, settings.callbacks)
        self.worker, self.sync, self.settings = worker, sync, settings

        # creators run under one seed, so that all ranks start from the same weights
        seed_everything(settings.seed)
        self._built = built = parts.build(training=True, place=Place.of(worker), is_early=True)
        self._check_tables()
        self._bind(built)
        self._forward_pass: ForwardPass = settings.forward_pass(built)
        seed_everything(settings.seed, self.rank + 1)

        self._start(worker, sync)
        built.tables.connect(sync)
        self.device = device_of(worker, sync)
        move(built, self.device)
        self._precision = precision_of(settings.precision, self.device)
        self._prepare_data()
        self._configure(parts)
        self._update = OptimizerStep(sync, built, self._forward_pass, settings)
        self._batches = DeviceBatches(self._data, self.device, worker)
        self._running = Buffers(self.model, sync)
        self._records = {"summary.pt": StepSummary()} if settings.summary else {}
        self._restore()
        local = settings.batch_size // self.size
        self.train_loader = WorkerBatches(self._data, local)
        if self._validation is not None:
            self.val_loader = WorkerBatches(self._validation, local)

    def _configure(self, parts: ModelParts) -> None:
        """Let a LightningModule make its optimizer, which may depend on the number of rows."""
        built, settings = self._built, self.settings
        if is_lazy(built.model):
            with isolated_rng(settings.seed):
                self._forward_pass.take_sizes(to_device(self._one_row(), self.device))
        if is_lightning(built.model):
            built.model.trainer.begin_fit(self, self._whole.steps)
        if built.optimizer is None:
            with isolated_rng(settings.seed):
                parts.configure(built)
            self._bind(built)
        if self.rank == 0 and is_lightning(built.model):
            dropped = dropped_hooks(built.model, has_loss=built.criterion is not None)
            if dropped is not None:
                self.warn_once(dropped)

    def _check_tables(self) -> None:
        """Refuse what sharded embeddings do not go with."""
        if not self._built.tables:
            return
        if self.settings.run_url is None:
            raise UsageError(
                "A model with a ShardedEmbedding needs model_dir= in Estimator.from_torch, a "
                "folder that the driver and all workers share: workers write their rows there",
                code="argument-missing",
                argument="model_dir",
            )
        if self.main is not None and self.main.owns_backward:
            raise UsageError(
                "An on_iter_backward of one's own does not go with a ShardedEmbedding, whose "
                "gradients are sent before the optimizer's step; leave on_iter_backward as it is",
                code="argument-conflict",
                argument="callbacks",
            )

    # -- the fit -------------------------------------------------------------------------------

    def _run_steps(self) -> bool:
        self._plan = self._plan_of_epoch(self._whole)
        position, order = self.position, self._order()
        self._read = self._plan, order
        while position.batch < self._plan.steps and not self._is_over():
            while not self._iteration(order):
                pass
            if position.batch < self._plan.steps:
                self._apply_triggers()
        return position.batch == self._plan.steps

    def _epoch_figures(self) -> dict | None:
        if self.position.batch == self._plan.steps:
            self._running.merge()
        figures = self._sums.all_reduce(self.sync)
        if figures is not None:
            if self.callbacks:
                timers = all_gather_json(self.sync, self.timers.take())
                figures["profile"].update(Timers.means(timers))
            figures["profile"]["ended_at"] = time.time()
        return figures

    def _evaluate(self) -> dict:
        data = self._validation
        with self._running.merged():
            return evaluate_collectively(self, self._forward_pass, data, self.sync, self.settings)

    def merged_buffers(self) -> contextlib.AbstractContextManager:
        return self._running.merged()

    # -- the state -----------------------------------------------------------------------------

    def _take_log(self, entry):
        logged = self._forward_pass.end_epoch(self.sync, entry)
        if logged is not None:
            entry.update(logged["figures"])
            self.stop |= logged["stop"]

    def _own(self):
        log = self._forward_pass.log_state() if self.position.batch else None
        return capture_rng() if log is None else {**capture_rng(), "log": log}

    def _put_own(self, state):
        restore_rng(state)
        if "log" in state:
            self._forward_pass.load_log([state["log"]])

    def _put_sums(self, states):
        logs = [state["log"] for state in states if "log" in state]
        if logs:
            self._forward_pass.load_log(logs)

    @property
    def _source(self):
        return self._data

    def _left(self):
        if self._read is None:
            return None
        plan, order = self._read
        return self._data.ids_from(order, plan.batch(self.position.batch, self.rank)[0])

    def _slices(self):
        return self._built.tables.arrays()

    def _load_slices(self, slices):
        self._built.tables.load(slices)

    def _is_stopped(self) -> bool:
        """Return True if a callback has stopped the training, on any rank; a collective."""
        if self.callbacks and self.size > 1:
            self.stop = any(vote[0] for vote in self.sync.all_gather([float(self.stop)]))
        return self.stop

    # -- a batch -------------------------------------------------------------------------------

    def _iteration(self, order) -> bool:
        """One batch; returns whether it ended in weights that are those of all ranks."""
        position = self.position
        started = time.perf_counter()
        start, stop, batch_rows = self._plan.batch(position.batch, self.rank)
        rows = stop - start
        self.batch_idx = position.batch
        self.batch = self.output = self.target = self.loss = None
        if rows:
            self.batch = self._batches.get(position.batch, start, stop, self._plan, order)
        self.call("before_train_iter")
        self.batch = self._forward_pass.begin_batch(self.batch, self.batch_idx, rows)
        self._forward_pass.rows = rows
        self._update.begin()
        fetched = forwarded = time.perf_counter()
        if rows:
            with self._precision():
                self._forward()
            forwarded = time.perf_counter()
        self._update.end_forward()
        counted, total = self._counted(rows, batch_rows)
        position.batch += 1
        of_rows = not total and self.settings.accumulate == 1
        # where nothing counts, gradients are 0, which moves weights that have a momentum
        shares = (float(rows), float(batch_rows)) if of_rows else (counted, total)
        self.updated, is_shared = self._backward(*shares)
        computed = time.perf_counter()
        self._running.rows += rows
        loss = self.loss.item() if counted and self.loss is not None else 0.0
        if math.isnan(loss):
            self._warn_of_nan(self._nan_sentence())
        rule = LossRule(self.settings.weighted, self._forward_pass.loss_is_sum)
        parts = rule.parts(loss, counted, total, rows, batch_rows)
        if self.updated:
            position.global_step += 1
            self._built.step_scheduler(self)
        self._sums.add(
            *parts,
            rows,
            fetch_s=fetched - started,
            forward_s=forwarded - fetched,
            backward_s=computed - forwarded,
            step_s=time.perf_counter() - started,
        )
        for summary in self._records.values():
            summary.add_batch(self, parts, batch_rows, time.perf_counter() - started)
        self._forward_pass.end_batch(self.batch)
        self.call("after_train_iter")
        self.worker.progress(**self._progress(self.num_epochs, self._plan.steps, self._sums.mean()))
        return is_shared

    def _forward(self):
        try:
            self.run_forward(
                lambda: self._forward_pass.forward(self.batch, self.batch_idx), "on_train_forward"
            )
        except ValueError as error:
            if "more than 1 value per channel" in str(error) and self._forward_pass.rows == 1:
                error.add_note(
                    "This worker has one row of the batch, which batch normalisation cannot take: "
                    'use a batch_size of two rows for each worker or more, or config={"drop_last": '
                    "True}, which leaves out the last batch if it is not full"
                )
            raise
        if self.main is not None and not hasattr(self.loss, "backward"):
            raise UsageError(
                "on_train_forward (or on_iter_forward) of the MainCallback must set runner.loss to "
                f"a tensor, it is {type(self.loss).__name__}",
                code="function-result",
            )

    def _backward(self, counted, total) -> tuple[bool, bool]:
        """From the loss to gradients, and to new weights if an update is due; a collective.

        Returns
        -------
        updated, is_shared : bool
            Whether there are new weights, and whether they are the same on all ranks.
        """
        if self.main is not None and self.main.owns_backward:
            if self.loss is None:  # takes part in every pass without having a say
                self.loss = sum((p * 0).sum() for p in self._update.parameters if p.requires_grad)
            with self._update.by_hand(counted, total):
                self.main.on_iter_backward(self)
            if self.batch is None:
                self.loss = None
            return True, True
        self._update.backward(self.loss, counted, total)
        is_last = self.position.batch == self._plan.steps
        if not (self._update.is_due or is_last):
            return False, False
        is_last |= self.position.global_step + 1 == self.settings.goal.steps
        return True, self._update.step(is_last=is_last)

    def _nan_sentence(self) -> str:
        """Where the loss is nan, and which columns of the batch are."""
        position, settings, batch = self.position, self.settings, self.batch
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
        weights = self._forward_pass.loss_weights
        if weights.is_due():
            self._find_form(rows)
        if not (self._is_uneven or weights.is_uneven):
            return float(rows), float(batch_rows)
        counted = 0.0
        if rows:
            parts = self.output, self.target, rows, self.loss
            counted = self._forward_pass.denominator(*parts)
            self._warn_of_loss()
        return counted, sum(row[0] for row in self.sync.all_gather([counted]))

    def _find_form(self, rows: int) -> None:
        """Find out how the loss follows from rows, with this batch; a collective."""
        weights, finding = self._forward_pass.loss_weights, Finding()
        if rows and self.loss is not None:
            batch = self.batch, self.output, self.target, rows, self.loss
            finding = self._forward_pass.find(*batch)
        codes = [row[0] for row in self.sync.all_gather([finding.code])]
        weights.settle(agreed(codes), finding.reason)
        self._update.check()
        if finding.reason or self.rank == 0:
            self._warn_of_loss()

    def _warn_of_loss(self) -> None:
        """Tell the user once that parts of a batch cannot be weighted as in one process."""
        reason, is_alone = self._forward_pass.loss_weights.reason, self.size == 1
        if reason and not (is_alone and self.settings.accumulate == 1):
            self._warn_once(loss_sentence(self._forward_pass.loss_name, reason), "loss")

    # -- data ----------------------------------------------------------------------------------

    def _prepare_data(self) -> None:
        settings, criterion = self.settings, self.criterion
        sources = {
            name: settings.open_batches(shard, self.worker, self.config)
            for name, shard in self.worker.shards.items()
        }
        deal_streams(list(sources.values()), self.sync, self.warn_once)
        self._data, self._validation = sources["data"], sources.get("validation")
        window = self._data.window(shuffle_memory(self.config, self.worker.threads))
        described = {
            **self._data.facts(window),
            "validation": 1 if self._validation is None else self._validation.rows,
            "uneven": counts_unevenly(criterion)
            and (criterion.weight is not None or self._data.has_label(criterion.ignore_index)),
        }
        workers = self._exchange(described)
        self._whole, self._layout = plan_batches(settings, workers)
        self._plan = self._whole
        self._is_uneven = settings.weighted or any(each["uneven"] for each in workers)
        if self._validation is not None:
            self._validation.take_types(self._types, self._data)

    def _taken_types(self, types: list) -> list:
        return taken_types(self.model, types)

    def _one_row(self) -> Any:
        """Return a batch of one row, of zeros where the types of the columns are known."""
        types = self._data.types or (None if self._data.rows else self._types)
        if types is None:
            if not self._data.rows:
                raise UsageError(
                    "The model has lazy layers, and a worker has no row to take their sizes from; "
                    "use fewer workers, or give the sizes",
                    code="model-unbuilt",
                )
            return self._data.batch(0, 1)
        columns = [[zero_column(each, 1) for each in columns] for columns in types]
        inputs, targets = tree_map_only(np.ndarray, torch.from_numpy, columns)
        return [*inputs, targets[0] if len(targets) == 1 else tuple(targets)]

    def _order(self):
        rank, window = self.rank, self._layout.windows[self.rank]
        return self._data.order_of_pass(
            self._plan, self.settings, self.epochs, rank, window, self.position.batch
        )


@dataclass
class FitProgram:
    """A fit, as shipped to the workers."""

    parts: ModelParts
    settings: FitSettings
    sync: Any  # class of the GradientSync

    def __call__(self, worker: Worker) -> dict:
        with tuned_allocator():
            return TorchLoop(worker, self.sync(worker), self.parts, self.settings).fit()
