"""The runner that callbacks receive, and the evaluation of a worker's rows.

Loss and metrics are merged exactly across workers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch

from bigdl.common.errors import UsageError
from bigdl.common.storage import write_bytes
from bigdl.orca.learn.metrics import Metric, merge_states
from bigdl.orca.learn.pytorch.callbacks.base import (
    MainCallback,
    call_legacy_hooks,
    has_legacy_hooks,
)
from bigdl.orca.learn.pytorch.forward import (
    BatchColumns,
    BuiltInLossForward,
    ForwardPass,
    PlainForward,
    WeightedForward,
    has_builtin_loss,
    is_lightning,
    loss_warning,
)
from bigdl.orca.learn.pytorch.lightning import LightningForward, merged_values, unused_hooks
from bigdl.orca.learn.pytorch.parts import BuiltParts, ModelParts
from bigdl.orca.learn.pytorch.sharding import (
    SpareRows,
    build_on_rank_0,
    divide_model,
    joining,
)
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.worker import Worker
from bigdl.training.batches import BatchSettings, BatchSource, VirtualSource, deal_streams
from bigdl.training.embedding_tables.placement import TablePlacement
from bigdl.training.embedding_tables.torch_model import ShardedTables, has_tables
from bigdl.training.fit import FitContext, TrainState
from bigdl.training.loss_form import DIVISOR, ROWS, SUM, UNKNOWN, LossWeights, ProbeResult, agreed
from bigdl.training.metrics import EpochSums, Timers
from bigdl.training.position import Position, StoppingCriterion
from bigdl.training.sharded_model import has_sliced_weights, is_divided
from bigdl.training.slices import SavedSlices
from bigdl.training.state import (
    RunningState,
    device_of,
    dumps,
    loads,
    move,
    precision_of,
    seed_everything,
    to_cpu,
    to_device,
)


class TorchRunner:
    """State of a worker's fit or evaluation, which callbacks receive as ``runner``.

    Attributes
    ----------
    rank, size : int
        Rank of this worker, and number of workers.
    config : dict
        The ``config`` of the Estimator.
    model, optimizer, scheduler, criterion
        Objects of this worker; the optimizer and scheduler are None in an evaluation. ``models``
        and ``optimizers`` are lists with these objects.
    device : torch.device
        Device that this worker computes on.
    epochs : int
        Number of finished epochs in all fits of the Estimator.
    num_epochs : int
        Value of `epochs` at which this fit ends.
    global_step : int
        Number of optimizer steps in all fits of the Estimator.
    num_steps : int or None
        Number of batches in an evaluation.
    updated : bool
        True if the last training batch updated the weights.
    batch, batch_idx, output, target, loss
        Values of the current iteration. All except `batch_idx` are None on a worker without rows in
        this step, and `output` is None in the training step of a LightningModule.
    epoch_stats : dict
        Metrics of the latest epoch, merged over all workers.
    metrics_stats : dict
        Metrics of the latest validation.
    epoch_is_whole : bool
        True if the latest epoch has processed all rows.
    train_loader, val_loader : WorkerBatches or None
        Batches of this worker.
    timers : Timers
        ``with runner.timers.record("augment"):`` adds ``mean_augment_s`` to the ``profile`` of an
        epoch or an evaluation.
    stop : bool
        Set to True on any rank to end the fit after the current step.
    """

    def __init__(
        self,
        worker: Worker,
        config: dict,
        callbacks: Sequence[Any],
        context: FitContext | None = None,
    ):
        if context is None:
            context = FitContext(None, TrainState(StoppingCriterion()), worker)
        self._state, self.settings, self.sync = context.state, context.settings, context.sync
        self.worker = worker
        self.rank, self.size = worker.rank, worker.world_size
        self.config = config
        self.callbacks = list(callbacks)
        self.main = next((c for c in self.callbacks if isinstance(c, MainCallback)), None)
        self._legacy = [c for c in self.callbacks if has_legacy_hooks(c)]
        self.num_epochs = 0
        self.num_steps: int | None = None
        self.updated = False
        self.epoch_is_whole = True
        self.model: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.criterion: Any = None
        self.device: Any = None
        self.batch: Any = None
        self.batch_idx: int | None = None
        self.output: Any = None
        self.target: Any = None
        self.loss: Any = None
        self.epoch_stats: dict = {}
        self.metrics_stats: dict = {}
        self.train_loader: WorkerBatches | None = None
        self.val_loader: WorkerBatches | None = None
        self.timers = Timers()
        self._running: RunningState | None = None
        self._values: dict[str, Any] = {}
        self._forward_by: Callable[[], tuple] | None = None

    def bind(self, built: BuiltParts, running: RunningState | None = None) -> None:
        """Set the model, optimizer, criterion and scheduler as attributes.

        Parameters
        ----------
        built : BuiltParts
        running : RunningState, optional
            The model's buffers, in a fit.
        """
        self.model, self.optimizer = built.model, built.optimizer
        self.criterion, self.scheduler = built.criterion, built.scheduler
        self._running = running

    @property
    def position(self) -> Position:
        return self._state.position

    @property
    def stop(self) -> bool:
        return self._state.stop

    @stop.setter
    def stop(self, value: bool) -> None:
        self._state.stop = value

    @property
    def epochs(self) -> int:
        return self.position.epoch

    @property
    def global_step(self) -> int:
        return self.position.global_step

    @property
    def history(self) -> list[dict]:
        """Metrics of this fit's epochs, including the current one in ``after_train_epoch``."""
        first = self._state.stop_at.first
        entries = [e for e in self.position.history if e["epoch"] > first]
        newest = self.epoch_stats
        is_new = "epoch" in newest and (not entries or newest["epoch"] > entries[-1]["epoch"])
        return [*entries, newest] if is_new and newest["epoch"] > first else entries

    @property
    def models(self) -> list:
        return [self.model]

    @property
    def optimizers(self) -> list:
        return [] if self.optimizer is None else [self.optimizer]

    @property
    def schedulers(self) -> list:
        return [] if self.scheduler is None else [self.scheduler]

    def call(self, hook: str) -> None:
        """Call one hook of every callback, in order."""
        for callback in self.callbacks:
            if callback in self._legacy:
                call_legacy_hooks(callback, hook, self)
            getattr(callback, hook)(self)

    call_hook = call

    def run_forward(self, forward: Callable[[], tuple], hook: str) -> None:
        """Run a forward pass, through the MainCallback's hook if a MainCallback is set.

        Parameters
        ----------
        forward : callable
            Returns output, target and loss; the hook can call it through :meth:`forward`.
        hook : str
            Name of the hook.
        """
        self._forward_by = forward
        if self.main is None:
            self.output, self.target, self.loss = forward()
        else:
            getattr(self.main, hook)(self)

    def forward(self) -> None:
        """Run the default forward pass; set `output`, `target` and `loss` of the batch."""
        if self._forward_by is None:
            raise UsageError(
                "There is no current batch; call forward in on_iter_forward", code="state"
            )
        self.output, self.target, self.loss = self._forward_by()

    # -- values for other callbacks ------------------------------------------------------------

    def put(self, key: str, value: object) -> None:
        """Store a value for other callbacks of this worker under a new key."""
        if key in self._values:
            raise UsageError(
                f"The runner already has {key!r}; use update to replace it",
                code="argument-value",
                argument="key",
            )
        self._values[key] = value

    def get(self, key: str) -> Any:  # the user's object
        """Return the value stored under a key."""
        return self._values[self._known(key)]

    def update(self, key: str, value: object) -> None:
        """Replace the value stored under a key."""
        self._values[self._known(key)] = value

    def remove(self, key: str) -> None:
        """Remove the value stored under a key."""
        del self._values[self._known(key)]

    def _known(self, key):
        if key not in self._values:
            raise UsageError(
                f"The runner has no {key!r}; it has {sorted(self._values)}",
                code="argument-unknown",
                argument=key,
                allowed=list(self._values),
            )
        return key

    # -- the state -----------------------------------------------------------------------------

    def merged_buffers(self) -> contextlib.AbstractContextManager:
        """Return a context manager that sets the model's buffers to values merged over workers."""
        return contextlib.nullcontext() if self._running is None else self._running.merged()

    def state_dict(self) -> dict:
        """Return a dict with the epoch and lists of model, optimizer and scheduler states."""
        self._check_not_sharded()
        state = {
            "epoch": self.position.epochs_with_metrics,
            "models": [m.state_dict() for m in self.models],
        }
        for key in ("optimizers", "schedulers"):
            if getattr(self, key):
                state[key] = [part.state_dict() for part in getattr(self, key)]
        return state

    def save_checkpoint(self, path: str, save_weights_only: bool = False) -> None:
        """Write this worker's state to a file; call it on one rank only."""
        self._check_not_sharded()
        state = self.model.state_dict() if save_weights_only else self.state_dict()
        write_bytes(path, dumps(state))

    def _check_not_sharded(self) -> None:
        if is_divided(self.model):
            raise UsageError(
                "The weights are divided among all workers (shard=), so one worker cannot write "
                "the state; use the checkpoints in model_dir",
                code="unsupported",
            )
        if has_tables(self.model):
            raise UsageError(
                "The rows of a ShardedEmbedding are distributed over all workers, so one worker "
                "cannot "
                "write the state; use the checkpoints in model_dir",
                code="unsupported",
            )


class WorkerBatches:
    """Sized iterable over one worker's batches, in the worker's row order.

    Parameters
    ----------
    data : BatchSource
    batch_size : int
        Number of rows per batch of this worker.
    """

    def __init__(self, data: BatchSource, batch_size: int):
        self._data, self.batch_size = data, max(1, batch_size)

    def __len__(self) -> int:
        return -(-self._data.rows // self.batch_size)

    def __iter__(self) -> Iterator:
        return (batch for _, batch in self._data.in_batches(self.batch_size))


@dataclass
class TorchEvaluationSettings(BatchSettings):
    """Arguments of ``evaluate``, as shipped to the workers.

    Attributes
    ----------
    metrics : sequence
        Metrics as the user passed them.
    per_worker : bool
        Whether to also return the metrics of each worker.
    precision : str
        ``"fp32"`` or ``"bf16"``.
    virtual_shards : int
        Number of virtual shards, for equal bits with any number of workers; 0 disables them.
    """

    metrics: Sequence[Any] = ()
    per_worker: bool = False
    precision: str = "fp32"
    virtual_shards: int = field(default=0, kw_only=True)

    def forward_pass(self, built: BuiltParts) -> ForwardPass:
        """Return the forward pass for a model, its loss and these settings."""
        columns = BatchColumns(self.feature_cols, self.label_cols)
        model, criterion, weight = built.model, built.criterion, built.loss_weight
        loss_weights = None if weight is None else LossWeights(loss_weight=weight)
        if criterion is None and is_lightning(model):
            if self.weighted:
                raise UsageError(
                    "weight_col needs a loss; pass loss= to Estimator.from_torch, or use the "
                    "weights in the training_step of the LightningModule",
                    code="argument-missing",
                    argument="loss",
                )
            return LightningForward(model, columns, loss_weights)
        if criterion is None and has_builtin_loss(model):
            if self.weighted:
                raise UsageError(
                    "weight_col needs a loss; pass loss= to Estimator.from_torch, since the "
                    "model's "
                    "built-in loss cannot be computed per row",
                    code="argument-missing",
                    argument="loss",
                )
            return BuiltInLossForward(model, columns, loss_weights)
        if self.weighted:
            return WeightedForward(model, criterion, columns)
        return PlainForward(model, criterion, columns, loss_weights)


def evaluate_collectively(
    runner: TorchRunner,
    forward_pass: ForwardPass,
    data: BatchSource | VirtualSource,
    sync: GradientSync,
    settings: TorchEvaluationSettings,
) -> dict:
    """Evaluate the rows of all workers; return the same result on every rank.

    Returns
    -------
    dict
        ``metrics``: ``num_samples``, ``val_loss`` (if there is a loss), values that a
        LightningModule logged, and each metric under its name. ``profile``: seconds.
        ``workers`` and ``profiles``: the metrics and seconds of each worker, if requested.
        ``warning``: a warning about the loss for the user, or None.
    """
    measures = Metric.convert_metrics_dict(list(settings.metrics), backend="pytorch")
    started = time.perf_counter()
    shard_results: list[tuple[EpochSums, list[Any]]] = []
    shards = data.shards if isinstance(data, VirtualSource) else [data]
    spare: SpareRows | None = None
    if is_divided(forward_pass.model):
        spare = SpareRows(cast("BatchSource", data), sync, runner.device)
    with torch.no_grad(), forward_pass.validation():
        for source in shards:
            for measure in measures.values():
                measure.reset()
            with joining(forward_pass, spare, sync, _count_steps(runner, source, settings)):
                sums, losses = _sums(runner, forward_pass, source, settings, measures)
            states = {name: measure.state() for name, measure in measures.items()}
            shard_results.append((sums, [{}, states, {}, losses.to_json()]))
        if has_tables(forward_pass.model):
            ShardedTables(forward_pass.model).finish()
        logged = {} if forward_pass.module is None else forward_pass.module.end_validation(sync)
    shard_results[0][0].epoch_s = time.perf_counter() - started
    shard_results[0][1][0], shard_results[0][1][2] = logged, runner.timers.take()
    gathered = sync.gather(dumps([[sums.to_json(), *rest] for sums, rest in shard_results]))
    evaluation: dict[str, Any] | None = None
    if sync.rank == 0:
        with_loss = forward_pass.criterion is not None
        parts = [part for each in cast("list[bytes]", gathered) for part in loads(each)]
        warning = _settle_losses(parts, forward_pass)
        workers = [(EpochSums(**sums), logged, states) for sums, logged, states, *_ in parts]
        times = [(worker[0], part[3]) for worker, part in zip(workers, parts, strict=True)]
        evaluation = {
            "metrics": _merge_metrics(workers, measures, with_loss),
            "profile": _profile(times),
            "warning": warning,
        }
        if settings.per_worker:
            evaluation["workers"] = [_merge_metrics([w], measures, with_loss) for w in workers]
            evaluation["profiles"] = [_profile([each]) for each in times]
    shared = sync.broadcast(None if evaluation is None else json.dumps(evaluation).encode())
    return json.loads(cast("bytes", shared))


def _settle_losses(parts: Sequence[list], forward_pass: ForwardPass) -> str | None:
    """Infer the loss reduction from all workers' results; select the matching loss sums.

    Returns
    -------
    str or None
        Warning for the user, or None.
    """
    losses = [part[4] for part in parts]
    if not any(each["sums"] for each in losses):
        return None
    agreed_reduction = agreed([each["code"] for each in losses])
    for part, each in zip(parts, losses, strict=True):
        reduction = agreed_reduction if agreed_reduction in each["sums"] else ROWS
        part[0]["loss"], part[0]["counted"] = each["sums"].get(reduction, (0.0, 0.0))
    reason = next((each["reason"] for each in losses if each["reason"]), "")
    if agreed_reduction == UNKNOWN:
        reason = reason or "workers detect different reductions"
    return loss_warning(forward_pass.loss_name, reason) if reason and len(parts) > 1 else None


class _Losses:
    """Sums of one worker's losses, one sum for each possible reduction of the loss.

    Each worker probes the loss independently; the results are compared at the end.

    Parameters
    ----------
    forward_pass : ForwardPass
    """

    def __init__(self, forward_pass: ForwardPass):
        self._forward_pass = forward_pass
        self._weights = copy.copy(
            forward_pass.loss_weights
        )  # a copy: those of a fit have counted batches
        self._sums: dict[str, list[float]] = {}

    def add(self, runner, rows: int) -> tuple[float, float]:
        """Add a batch; return its loss multiplied by the loss's divisor, and the divisor."""
        loss, weights, forward_pass = runner.loss, self._weights, self._forward_pass
        batch = runner.output, runner.target, rows, loss
        if weights.is_known:
            counted = forward_pass.denominator(*batch)
            value = float(loss)
            # a batch of ignored labels has a loss of nan
            return (value * (1.0 if weights.is_sum else counted) if counted else 0.0), counted
        if weights.is_due():
            result = forward_pass.probe_loss(runner.batch, *batch)
            weights.settle(result.reduction, result.reason)
        value, divisor = float(loss), weights.divisor_of(loss, rows)
        products = {ROWS: (value * rows, float(rows)), SUM: (value, float(rows))}
        products[DIVISOR] = (value * divisor if divisor else 0.0, divisor)
        for reduction, product in products.items():
            sums = self._sums.setdefault(reduction, [0.0, 0.0])
            sums[:] = [total + part for total, part in zip(sums, product, strict=True)]
        return products.get(weights.reduction, products[ROWS])

    def to_json(self) -> dict:
        return {
            "sums": self._sums,
            "code": ProbeResult(self._weights.reduction).code,
            "reason": self._weights.reason,
        }


def _rows_per_batch(runner, settings) -> int:
    return max(1, settings.batch_size // (settings.virtual_shards or runner.size))


def _count_steps(runner, data, settings) -> int:
    """Return the number of batches of this worker in an evaluation."""
    steps = -(-data.rows // _rows_per_batch(runner, settings))
    return steps if settings.num_steps is None else min(steps, settings.num_steps)


def _sums(runner, forward_pass, data, settings, measures) -> tuple[EpochSums, _Losses]:
    """Evaluate this worker's rows; return sums of rows and durations, and sums of losses."""
    sums, losses = EpochSums(), _Losses(forward_pass)
    local = _rows_per_batch(runner, settings)
    runner.num_steps = _count_steps(runner, data, settings)
    precision = precision_of(settings.precision, runner.device)
    for index, (rows, batch) in enumerate(islice(data.in_batches(local), runner.num_steps)):
        runner.batch_idx, runner.batch = index, to_device(batch, runner.device)
        runner.output = runner.target = runner.loss = None
        runner.call("before_val_iter")
        if forward_pass.module is not None:
            runner.batch = forward_pass.module.begin_batch(runner.batch, index, rows)
        weights = forward_pass.weights(runner.batch) if measures else None
        started = time.perf_counter()
        with precision():
            runner.run_forward(
                lambda: forward_pass.evaluate(
                    runner.batch, runner.batch_idx or 0, need_output=bool(measures)
                ),
                "on_val_forward",
            )
        forward_s = time.perf_counter() - started
        output, target = runner.output, runner.target
        summed = 0.0, 0.0
        if runner.loss is not None:
            summed = losses.add(runner, rows)
        sums.add(*summed, rows, step_s=0.0, forward_s=forward_s)
        if measures and output is None:
            raise UsageError(
                "metrics= needs a model whose forward returns predictions",
                code="model-output",
                argument="metrics",
            )
        if measures:
            whole = to_cpu(output), to_cpu(target), None if weights is None else to_cpu(weights)
            counted = forward_pass.drop_ignored(*whole, runner.loss)
            for measure in measures.values():
                # user functions and third-party metrics get the complete batch
                drops_ignored = getattr(measure, "drops_ignored_labels", False)
                raw, truth, row_weights = counted if drops_ignored else whole
                weighted = () if row_weights is None else (row_weights,)
                prediction = forward_pass.prediction(raw, getattr(measure, "takes", ""))
                measure(prediction, truth, *weighted)
        if forward_pass.module is not None:
            forward_pass.module.end_batch(runner.batch)
        runner.call("after_val_iter")
    return sums, losses


def _merge_metrics(workers, measures: Mapping[str, Any], with_loss: bool) -> dict:
    """Merge the metrics of several workers; `measures` compute values from the merged states."""
    sums, logs, states = zip(*workers, strict=True)
    total = EpochSums.total(sums)
    out: dict[str, Any] = {"num_samples": int(total.rows)}
    if with_loss or total.counted:
        out["val_loss"] = total.mean()
    out.update(merged_values(logs))
    for name, measure in measures.items():
        measure.load_state(merge_states([s[name] for s in states], measure.reductions))
        out[name] = _plain(measure.compute())
    return out


def _profile(times: Sequence[tuple[EpochSums, dict]]) -> dict[str, float]:
    """Return the durations of validation phases in seconds, averaged over the workers."""
    total = EpochSums.total(sums for sums, _ in times)
    return {
        "mean_validation_s": total.epoch_s / len(times),
        "mean_eval_fwd_s": total.forward_s / max(1, total.batches),
        **Timers.means(timers for _, timers in times),
    }


def _plain(value):
    """Convert a metric value to JSON; a tuple of tensors (a curve) becomes ``{"items": [...]}``."""
    if isinstance(value, list | tuple):
        return {"items": [_plain(v) for v in value]}
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass
class TorchEvaluateProgram:
    """An evaluation program, as shipped to the workers."""

    parts: ModelParts
    settings: TorchEvaluationSettings
    callbacks: Sequence[Any]
    sync: Any  # class of the GradientSync

    def __call__(self, worker: Worker) -> dict:
        seed_everything(0)
        settings, config = self.settings, self.parts.config
        slices = SavedSlices.from_json(worker.options.get("slices"))
        if self.parts.shard:
            built = build_on_rank_0(self.parts, worker)
        else:
            built = self.parts.build(training=False, placement=TablePlacement.of(worker))
        sync = self.sync(worker)
        sync.start()
        if built.tables is not None:
            built.tables.connect(sync)
        runner = TorchRunner(worker, config, self.callbacks)
        runner.device = device_of(worker, sync)
        if self.parts.shard:
            divide_model(built, self.parts, sync, runner.device)
        else:
            move(built, runner.device)
        state = sync.broadcast(worker.state() if worker.rank == 0 else None)
        built.load_model(cast("bytes", state), is_partial=has_sliced_weights(slices))
        if slices is not None:
            built.load_slices(slices)
        runner.bind(built)
        data = settings.open_batches(worker.shard, worker, config)
        deal_streams([data], sync, lambda text: print(text, flush=True))
        runner.val_loader = WorkerBatches(data, settings.batch_size // runner.size)
        forward_pass = settings.forward_pass(built)
        runner.call("before_val_epoch")
        evaluation = evaluate_collectively(runner, forward_pass, data, sync, settings)
        runner.epoch_stats = runner.metrics_stats = evaluation["metrics"]
        runner.call("after_val_epoch")
        evaluation["unused"] = unused_hooks(built.model, "evaluate")
        return evaluation
