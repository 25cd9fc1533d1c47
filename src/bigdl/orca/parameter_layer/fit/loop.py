"""Driver of a parameter-layer fit: its model and optimizer, steps and checkpoints.

The driver's model and optimizer make no steps.  The optimizer provides the schedule: the
hyper-parameters of every step of a group are read from it before the group runs.  Model and
optimizer receive the state of the ranks for a checkpoint, a validation or a callback.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.connect import refuse
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engines.connect import ConnectEngine
from bigdl.orca.parameter_layer.barrier import BarrierTransport
from bigdl.orca.parameter_layer.fit.metrics import ParameterLayerMetrics
from bigdl.orca.parameter_layer.fit.replica import FlatModel, ParameterLayerReplica
from bigdl.orca.parameter_layer.messages import RankState, codec_for
from bigdl.orca.parameter_layer.optimizers import cut_state, joined_state
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep, Transport
from bigdl.orca.parameter_layer.rank import changed
from bigdl.orca.parameter_layer.shuffle import ShuffleTransport
from bigdl.orca.parameter_layer.stragglers import DropStragglers, StragglerLimit
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows
from bigdl.training.batches import BatchLayout, plan_batches
from bigdl.training.checkpoint import Checkpoint, CheckpointDirectory
from bigdl.training.fit import (
    Checkpointer,
    EpochRunner,
    FitCall,
    FitContext,
    Hooks,
    TrainingStep,
    TrainState,
    Triggers,
    input_facts,
)
from bigdl.training.state import dumps, loads
from bigdl.training.timing import rank_numbers, rank_times

if TYPE_CHECKING:
    from bigdl.runtime.shards.feed import Feed

logger = logging.getLogger("bigdl.orca")

T = TypeVar("T")

_RESIDUALS = "residuals.pt"
_TRANSPORTS: dict[str, type[Transport]] = {"shuffle": ShuffleTransport, "barrier": BarrierTransport}
_SAMPLINGS = ("exact", "window")


@dataclass
class ParameterLayerOptions:
    """Validated options of a parameter-layer fit, named as in ``fit``.

    Attributes
    ----------
    transport : str
        ``"shuffle"`` or ``"barrier"``.
    group_size : int
        Maximum number of steps of one Spark job; default 10 for shuffle and 100 for barrier.
    compression : str
        Name of a codec.
    sampling : str
        ``"exact"``: every row once per epoch. ``"window"``: a batch has consecutive rows of the
        epoch's order from a random start, as in BigDL 2.x.
    drop_stragglers : DropStragglers, dict or None
        Rule for dropping late contributions.
    min_workers : int or None
        Minimum number of slices of the weights, which is reduced while the cluster has fewer task
        slots than workers; None keeps one slice per worker.
    """

    transport: str = "shuffle"
    group_size: Any = None
    compression: str = "fp32"
    sampling: str = "exact"
    drop_stragglers: Any = None
    min_workers: int | None = None

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, tuple(_TRANSPORTS))
        check_choice("sampling", self.sampling, _SAMPLINGS)
        codec = codec_for(self.compression)
        if self.group_size is None:
            self.group_size = _TRANSPORTS[self.transport].group_size
        check_integer("group_size", self.group_size, 1)
        if self.drop_stragglers is not None:
            self.drop_stragglers = DropStragglers.of(self.drop_stragglers)
        if self.min_workers is None:
            return
        check_integer("min_workers", self.min_workers, 1)
        if self.transport != "shuffle":
            raise UsageError(
                f"min_workers={self.min_workers} needs transport='shuffle'; the workers of "
                f"transport={self.transport!r} must all run at once",
                code="argument-conflict",
                argument="min_workers",
            )
        if codec.feedback:
            raise UsageError(
                f"min_workers={self.min_workers} is not supported with compression="
                f"{self.compression!r}, where every worker keeps its rounding errors; use "
                "compression='bf16'",
                code="argument-conflict",
                argument="min_workers",
            )

    def check(self, ranks: int) -> None:
        """Raise an error if the options are invalid for the number of workers."""
        if self.drop_stragglers is not None:
            self.drop_stragglers.check(ranks)
        if self.min_workers is not None and self.min_workers > ranks:
            raise UsageError(
                f"min_workers should be at most the number of workers, {ranks}, got "
                f"{self.min_workers}",
                code="argument-value",
                argument="min_workers",
            )


class DriverModel(ABC):
    """Interface to the model and optimizer on the driver, implemented for each framework.

    Attributes
    ----------
    hooks : Hooks
    flat : FlatModel
        Flat view of the model.
    optimizer : TorchParameterLayerOptimizer or KerasParameterLayerOptimizer
        ``hyper()`` returns the hyper-parameters of the next step, ``pass_step()`` advances the
        schedule, ``state()`` and ``put_state()`` get and set the state of every trained weight by
        its number. ``updates_rows(widths)`` is True if the next step accepts sparse gradients of
        tables and changes no other rows, ``is_by_row`` if it updates whole rows. The other
        attributes are those of :class:`~bigdl.orca.parameter_layer.plan.LayerPlan`.
    loss_is_sum : bool
        True if the loss is a sum over the rows, not a mean.
    weighted : bool
        True if rows count by their weights instead of 1.
    replica : type of ParameterLayerReplica
    are_changes_kept : bool
        True if weights that a callback has set are sent to the ranks.
    """

    hooks: Hooks
    flat: FlatModel
    optimizer: Any
    loss_is_sum: bool
    weighted = False
    replica: type[ParameterLayerReplica]
    are_changes_kept = False

    @abstractmethod
    def replica_program(self) -> Any:  # a program of the framework
        """Return the program that holds the model and settings of the replicas."""

    @abstractmethod
    def evaluation(self, feed: Feed, sync: type[GradientSync]) -> Callable:
        """Return the program that evaluates weights on a feed."""

    @abstractmethod
    def weights(self) -> bytes:
        """Serialize all current weights for replicas and evaluations."""

    def load(self, files: dict[str, bytes]) -> None:
        """Load the files of a checkpoint."""
        self.hooks.load(files)

    def open_rows(self, described: Sequence[dict], steps: int) -> int:
        """Prepare for a feed with `steps` batches per pass; return the steps per epoch."""
        return steps

    def pass_and_step(self, steps: int) -> tuple[int, int] | None:
        """Return the next step's data pass and batch index, or None for the current position.

        None selects the current epoch and its position.
        """
        return None

    def after_group(  # noqa: B027 - few have to do it
        self, steps: list[LayerStep], seconds: float, metrics: ParameterLayerMetrics
    ) -> None:
        """Process the metrics of a finished group of steps."""

    def validates(self) -> bool:
        """Return True if a validation follows the current epoch."""
        return True

    @abstractmethod
    def end_epoch(
        self, metrics: ParameterLayerMetrics, evaluate: Callable[[], dict] | None
    ) -> dict | None:
        """Return the epoch's training and validation metrics, or None if no step was run.

        Parameters
        ----------
        metrics : ParameterLayerMetrics
        evaluate : callable or None
            Evaluates the weights of the driver's model, which are up to date; None without
            validation.
        """


class RankStates:
    """Transfer of weights and optimizer state between the driver's model and the ranks.

    Parameters
    ----------
    transport : Transport
    plan : LayerPlan
    model : DriverModel
    policy : FailurePolicy

    Attributes
    ----------
    plan : LayerPlan
        Plan with the current number of slices.
    """

    def __init__(
        self, transport: Transport, plan: LayerPlan, model: DriverModel, policy: FailurePolicy
    ):
        self._transport, self.plan, self._policy = transport, plan, policy
        self._flat, self._optimizer = model.flat, model.optimizer
        self._pulled: list[RankState] | None = None  # states that the driver's model already has

    def run(self, steps: Sequence[LayerStep]) -> list[list[dict]]:
        """Run a group of steps on the ranks; return the record of every owner and step."""
        self._pulled = None
        return self._ask(
            functools.partial(self._transport.run, steps),
            f"the group of {len(steps)} steps is run again",
        )

    def _ask(self, call: Callable[[], T], consequence: str) -> T:
        """Call the transport; retry after a worker loss if the state is unchanged."""
        return self._policy.run(call, consequence, only_if=lambda: self._transport.keeps_state)

    def cut(self, slices: int) -> None:
        """Change the number of slices that the weights are split into."""
        if slices == self.plan.owners:
            return
        logger.info("The weights are split into %d slices instead of %d", slices, self.plan.owners)
        self.pull()
        self.plan = replace(self.plan, slices=slices)
        self.push(None)

    def push(self, residuals: Sequence[np.ndarray | None] | None) -> None:
        """Send the driver's model and optimizer state to the ranks."""
        states = self._states(residuals)
        self._transport.start(states)
        self._pulled = states

    def _states(self, residuals: Sequence[np.ndarray | None] | None = None) -> list[RankState]:
        """Split the current model and optimizer state into one state for each slice of the weights.

        Residuals of another number of ranks are discarded.
        """
        flat, geometry, owners = self._flat, self.plan.geometry, self.plan.owners
        buffers = changed(flat.initial, flat.buffers())
        vector, optimizer = flat.vector(), self._optimizer.state()
        kept = residuals if residuals and len(residuals) == owners else [None] * owners
        return [
            RankState(
                vector[low:high].copy(),
                cut_state(optimizer, geometry, rank),
                {number: b for number, b in buffers.items() if number % owners == rank},
                kept[rank],
            )
            for rank, (low, high) in enumerate(geometry.bounds)
        ]

    def pull(self) -> list[RankState]:
        """Copy the state of the ranks to the driver's model, unless the model is up to date."""
        if self._pulled is None:
            states = self._ask(self._transport.states, "the state is requested again")
            buffers = {number: b for state in states for number, b in state.buffers.items()}
            vector = np.concatenate([state.weights for state in states])
            self._flat.put(vector, self._flat.with_initial(buffers))
            slices = [state.optimizer for state in states]
            self._optimizer.put_state(joined_state(slices, self.plan.geometry, self._flat.shapes))
            self._pulled = states
        return self._pulled


@dataclass(eq=False)
class ParameterLayerStep(TrainingStep):
    """Training step in which the ranks of the parameter layer run a group of updates.

    Attributes
    ----------
    context : FitContext
    model : DriverModel
    ranks : RankStates
    described : list of dict
        Descriptions of the ranks' rows.
    cluster : SparkCluster
    policy : FailurePolicy
    on_progress : callable
        Called with a dict after every group.
    evaluate : callable, optional
        Method ``attempt`` of a job of :meth:`DriverModel.evaluation`.
    """

    context: FitContext
    model: DriverModel
    ranks: RankStates
    described: Sequence[dict]
    cluster: SparkCluster
    policy: FailurePolicy
    on_progress: Callable[[dict], None]
    evaluate: Callable[..., list] | None = None

    def __post_init__(self) -> None:
        state = self.context.state
        self._options: ParameterLayerOptions = self.context.settings.parameter_layer
        self._batches, state.layout = plan_batches(self.context.settings, self.described)
        state.epoch_steps = self.model.open_rows(self.described, self._batches.steps)
        self._limit = StragglerLimit(self._options.drop_stragglers)
        self._before: np.ndarray | None = None  # weights before callbacks were called
        self.metrics = self._new_metrics()

    def _new_metrics(self) -> ParameterLayerMetrics:
        model = self.model
        return ParameterLayerMetrics(
            self.ranks.plan.ranks, weighted=model.weighted, loss_is_sum=model.loss_is_sum
        )

    def restore(self, manifest: dict | None) -> None:
        """Restore the metrics of a mid-epoch checkpoint; None resets them."""
        self.metrics = self._new_metrics()
        if manifest is not None:
            self.metrics.restore(manifest)

    # -- an epoch ------------------------------------------------------------------------------

    @property
    def is_done(self):
        return self.context.state.position.batch >= self.context.state.epoch_steps

    def begin_epoch(self):
        if not self.context.state.position.batch:
            self.metrics = self._new_metrics()

    def run(self, triggers):
        ranks, state = self.ranks, self.context.state
        if self._options.min_workers is not None:
            slots = max(self._options.min_workers, self.cluster.slots())
            ranks.cut(min(ranks.plan.ranks, slots))
        self._before = None
        steps, is_due = self._next_steps(triggers)
        began_at, started = time.time(), time.perf_counter()
        records = self._run(steps)
        seconds = time.perf_counter() - started
        self.metrics.add(records, seconds, began_at)
        for sources in (record["sources"] for record in records[0]):
            self._limit.add(sources)
            for note in (source["note"] for source in sources if "note" in source):
                self.context.warn(note, "loss")
        self.model.after_group(steps, seconds, self.metrics)
        epochs = state.stop_at.last_epoch(state.position, state.epoch_steps)
        self.on_progress(state.progress(epochs, state.epoch_steps, self.metrics.mean()))
        return is_due

    def end_epoch(self):
        evaluate = None
        if self.evaluate is not None and self.model.validates():
            self.ranks.pull()
            evaluate = self._evaluated
        return self.model.end_epoch(self.metrics, evaluate)

    def _evaluated(self) -> dict:
        """Evaluate the current weights and return the metrics."""
        evaluate, weights = cast("Callable", self.evaluate), self.model.weights()
        try:
            return self.policy.run(lambda: evaluate(state=weights)[0], "evaluating again")
        except NoRows:
            raise UsageError(
                "The validation data has no rows", code="data-empty", argument="validation_data"
            ) from None

    def times(self, spent):
        metrics = self.metrics
        numbers = [rank_numbers(sums, spent) for sums in metrics.of_ranks]
        times = rank_times(numbers, [exchanges.values for exchanges in metrics.exchanges])
        return [{**each, "memory": m} for each, m in zip(times, metrics.memory, strict=True)]

    def pull_model(self):
        self.ranks.pull()
        if self.model.are_changes_kept:
            self._before = self.model.flat.vector()

    def push_model(self):
        before, self._before = self._before, None
        if before is not None and not np.array_equal(before, self.model.flat.vector()):
            self.ranks.push([state.residual for state in self.ranks.pull()])

    # -- groups --------------------------------------------------------------------------------

    def _run(self, steps: list[LayerStep]) -> list[list[dict]]:
        """Run all steps, and repeat discarded ones; return their records.

        A discarded step is repeated together with the later ones, and then waits for all ranks, so
        no step is discarded twice.
        """
        records_of_owners: list[list[dict]] = [[] for _ in range(self.ranks.plan.owners)]
        while steps:
            records = self.ranks.run(steps)
            count = sum(not record["is_void"] for record in records[0])
            for all_of_owner, owner_records in zip(records_of_owners, records, strict=True):
                all_of_owner += owner_records[:count]
            steps = steps[count:]
            if steps:
                logger.info(
                    "Step %d is discarded: too many contributions were late", steps[0].number
                )
                self.metrics.dropped["discarded_steps"] += 1
                steps = [replace(steps[0], limit=None), *steps[1:]]
        return records_of_owners

    def _next_steps(self, triggers: Triggers) -> tuple[list[LayerStep], bool]:
        """Return the next group of steps, and whether a checkpoint is due after it.

        The group ends with the epoch, the fit, or a checkpoint. Position and schedule advance with
        each step, so hyper-parameters do not depend on the group size.
        """
        state, model, optimizer = self.context.state, self.model, self.model.optimizer
        position, batches, ranks = state.position, self._batches, self.ranks.plan.ranks
        steps: list[LayerStep] = []
        while len(steps) < self._options.group_size:
            here = position.epoch, position.batch
            turn, number = model.pass_and_step(batches.steps) or here
            ranges = [batches.batch(number, rank)[:2] for rank in range(ranks)]
            hyper, limit = optimizer.hyper(), self._limit.seconds
            self._check_rows()
            steps.append(LayerStep(turn, number, hyper, tuple(ranges), limit))
            position.batch += 1
            position.global_step += 1
            optimizer.pass_step()
            if position.batch == state.epoch_steps:
                break
            if triggers.ask():
                return steps, True
            if state.stop or state.stop_at.is_reached(position):
                break
        return steps, False

    def _check_rows(self) -> None:
        """Raise an error if the next step would change table rows that no batch has read."""
        plan, number = self.ranks.plan, self.context.state.position.global_step + 1
        if plan.widths and not self.model.optimizer.updates_rows(plan.widths):
            raise UsageError(
                f"Momentum and weight decay of {plan.optimizer.__name__} were 0 when the fit "
                f"began and are not in step {number}, which changes all "
                "rows of embeddings; start with non-zero values, or use backend='spark'",
                code="optimizer-unsupported",
            )


@dataclass(eq=False)
class ParameterLayerCheckpointer(Checkpointer[Checkpoint]):
    """Checkpointer that saves a parameter-layer fit and restores it to driver and ranks."""

    context: FitContext
    step: ParameterLayerStep
    model: DriverModel
    ranks: RankStates
    policy: FailurePolicy

    def __post_init__(self) -> None:
        settings = self.context.settings
        self._latest = Checkpoint({})
        self._saved: dict | None = None  # position of the latest checkpoint
        self._directory: CheckpointDirectory | None = None
        if settings.run_url is not None:
            self._directory = CheckpointDirectory(settings.run_url, settings.keep)

    def start(self, snapshot: Checkpoint | None) -> None:
        """Initialize the driver's model and the ranks from a snapshot, or with initial weights."""
        self._latest = self.policy.run(lambda: self._begin(snapshot), "trying again")

    def _begin(self, snapshot: Checkpoint | None) -> Checkpoint:
        begin, state = snapshot or Checkpoint({}), self.context.state
        state.position = begin.position
        self._saved = state.position.to_json()
        is_within_epoch = state.position.batch and not state.position.partial
        if is_within_epoch:
            begin.need(*BatchLayout.facts, "sums")
            state.layout.check(begin.manifest, 0)
        self.step.restore(begin.manifest if is_within_epoch else None)
        if begin.files:
            self.model.load(begin.files)
        residuals = begin.files.get(_RESIDUALS)
        kept = None if residuals is None else [each.numpy() for each in loads(residuals)]
        self.ranks.push(kept)
        return self._snapshot() if snapshot is None else snapshot

    def _snapshot(self) -> Checkpoint:
        state, position = self.context.state, self.context.state.position
        residuals = [each.residual for each in self.ranks.pull()]
        types = next((each["types"] for each in self.step.described if each["types"]), None)
        manifest = {**position.to_json(), **vars(state.layout)}
        manifest |= input_facts(self.context.settings, types and types[0])
        if position.batch:
            count = self.ranks.plan.ranks
            manifest |= {**self.step.metrics.to_json(), "rows_since_merge": [0] * count}
        files = self.model.hooks.files()
        if any(residual is not None for residual in residuals):
            import torch

            kept = [torch.from_numpy(np.array(residual)) for residual in residuals]
            files[_RESIDUALS] = dumps(kept)
        return Checkpoint(manifest, files)

    def save(self, *, is_last):
        self._latest, self._saved = self._snapshot(), self.context.state.position.to_json()
        if self._directory is not None:
            self._directory.write(self._latest)

    def recover(self, error):
        self.policy.allow_retry(error)
        logger.warning("%s; resuming from %s", error, self._latest.position)
        self.context.state.stop = False  # the callbacks decide again
        self.start(self._latest)

    def finish(self, is_changed: bool) -> Checkpoint:
        self.context.state.position.end_fit(self.context.state.stop_at)
        if is_changed or self._saved != self.context.state.position.to_json():
            self.save(is_last=True)
        return self._latest


class ParameterLayerFit:
    """Parameter-layer fit, assembled from its components.

    Parameters
    ----------
    program : FitProgram or KerasFitProgram
        Program with model and settings.
    ranks : int
    start : Checkpoint or None
        State to start from; None for the model's initial weights.
    driver_model : callable
        ``driver_model(program, ranks, start, context)`` returns the :class:`DriverModel`,
        which has loaded the checkpoint.
    step : type of ParameterLayerStep

    Attributes
    ----------
    state : TrainState
    model : DriverModel
    plan : LayerPlan
    """

    def __init__(
        self,
        program: Any,
        ranks: int,
        start: Checkpoint | None,
        driver_model: Callable[..., DriverModel],
        step: Callable[..., ParameterLayerStep] = ParameterLayerStep,
    ):
        self.state = TrainState(program.settings.stop_at)
        self._context = FitContext(program.settings, self.state)
        self._start, self._step = start, step
        self.model = driver_model(program, ranks, start, self._context)
        flat, optimizer = self.model.flat, self.model.optimizer
        options: ParameterLayerOptions = program.settings.parameter_layer
        rule = options.drop_stragglers
        self.plan = LayerPlan(
            flat.sizes,
            optimizer.groups,
            optimizer.sliced,
            ranks,
            options.compression,
            self.model.loss_is_sum,
            optimizer.clamp,
            optimizer.norm,
            max_drop=1.0 if rule is None else rule.max_drop_percentage,
            slack=optimizer.slack,
            needs_norms=optimizer.needs_norms,
            widths=_row_widths(flat, optimizer, options.compression),
        )

    def replicas(self) -> Callable[[int, dict], ParameterLayerReplica]:
        """Return a picklable function that builds the replica of a rank from its shards."""
        program, weights = self.model.replica_program(), self.model.weights()
        return functools.partial(
            self.model.replica, program, weights, self.plan.ranks, self.plan.widths
        )

    def run(
        self,
        transport: Transport,
        cluster: SparkCluster,
        policy: FailurePolicy,
        on_progress: Callable[[dict], None],
        evaluate: Callable[..., list] | None = None,
        on_record: Callable[[dict], None] | None = None,
    ) -> Checkpoint:
        """Train to the end and return the final state.

        Parameters
        ----------
        transport : Transport
        cluster : SparkCluster
        policy : FailurePolicy
        on_progress : callable
            Called with a dict after every group.
        evaluate : callable, optional
            Method ``attempt`` of a job of :meth:`DriverModel.evaluation`.
        on_record : callable, optional
            Called with the records of the fit.
        """
        context, model = self._context, self.model
        context.on_record = on_record
        described = policy.run(lambda: _described(transport), "trying again")
        ranks = RankStates(transport, self.plan, model, policy)
        step = self._step(context, model, ranks, described, cluster, policy, on_progress, evaluate)
        checkpointer = ParameterLayerCheckpointer(context, step, model, ranks, policy)
        checkpointer.start(self._start)
        return EpochRunner(context, Triggers(context), model.hooks, step, checkpointer).run()


def _described(transport: Transport) -> list[dict]:
    """Return the ranks' descriptions of their rows."""
    described = transport.rows()
    streams = [(each.get("stream"), each["rows"]) for each in described]
    if len(streams) > 1 and streams[0][0] is not None and len(set(streams)) == 1:
        raise UsageError(
            f"All {len(streams)} workers have read the same {streams[0][1]} rows of the "
            "iterable data; pass a function data(config, batch_size) that creates the part "
            "config['rank'] of config['size'], or use a backend other than 'bigdl', which "
            "splits the rows",
            code="data-order",
        )
    return described


def _row_widths(flat: FlatModel, optimizer: Any, compression: str) -> tuple[int, ...]:
    """Return the row widths of tables that send only touched rows; empty if no table does.

    Raises
    ------
    UsageError
        If the optimizer requires it and the options prevent it.
    """
    clamp, name = optimizer.clamp, compression
    if not any(flat.widths):
        return ()
    keeps_zeros = not codec_for(name).feedback and (clamp is None or clamp[0] <= 0 <= clamp[1])
    if optimizer.is_by_row and not keeps_zeros:
        raise UsageError(
            f"{optimizer.sliced.__name__} updates only the rows that a batch has read, and "
            f"with compression={name!r} and gradients clipped to {clamp} others change, too; "
            "use compression='bf16', and a range that contains 0",
            code="argument-conflict",
            argument="compression",
        )
    widths = flat.widths
    return widths if keeps_zeros and optimizer.updates_rows(widths) else ()


def check_hooks(callback: object, base: type, hooks: Sequence[str], refused: str = "") -> None:
    """Raise an error for a callback with step hooks.

    Parameters
    ----------
    callback : object
    base : type
        Class whose hooks do nothing.
    hooks : sequence of str
    refused : str
        Another reason for the error, for a callback without step hooks.
    """
    cls = type(callback)
    names = [h for h in hooks if getattr(cls, h, None) is not getattr(base, h)]
    names += [h for h in hooks if h in vars(callback)]
    if names or refused:
        has = f"has {', '.join(names)}" if names else refused
        raise UsageError(
            f"{cls.__name__} {has}, but the steps of backend='bigdl' run in Spark tasks that call "
            "no callbacks; use hooks of epochs, or backend='spark'",
            code="unsupported",
        )


@dataclass(frozen=True)
class ParameterLayerRun:
    """Callable that runs the fit of a :class:`~bigdl.training.fit.FitCall` on the parameter layer.

    The program itself does not run; the driver uses its model and settings.

    Attributes
    ----------
    driver_model : callable
        See :class:`ParameterLayerFit`.
    step : type of ParameterLayerStep
    """

    driver_model: Callable[..., DriverModel]
    step: Callable[..., ParameterLayerStep] = ParameterLayerStep

    def __call__(self, call: FitCall) -> Checkpoint:
        engine, program = call.engine, call.program
        options = program.settings.parameter_layer
        options.check(engine.num_workers)
        if options.transport == "shuffle" and isinstance(engine, ConnectEngine):
            refuse('backend="bigdl" with transport="shuffle"', 'pass transport="barrier" to fit')
        fit = ParameterLayerFit(
            program, engine.num_workers, call.start, self.driver_model, self.step
        )
        feeds = dict(call.feed.feeds)
        validation = feeds.pop("validation", None)
        open_transport: Callable[..., Transport] = _TRANSPORTS[options.transport]
        with contextlib.ExitStack() as opened:
            transport = opened.enter_context(
                open_transport(engine, fit.plan, fit.replicas(), FeedGroup(feeds))
            )
            evaluate = None
            if validation is not None:
                evaluation = fit.model.evaluation(validation, call.sync)
                evaluate = opened.enter_context(
                    engine.open(evaluation, validation, keep_spools=True)
                ).attempt
            cluster = cast("SparkCluster", engine.cluster)
            return fit.run(
                transport,
                cluster,
                call.policy,
                call.progress.update,
                evaluate,
                call.journal.add,
            )
