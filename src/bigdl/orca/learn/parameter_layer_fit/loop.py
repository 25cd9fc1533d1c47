"""The driver's own model and optimizer of a training by the parameter layer.

They make no steps.  The optimizer is there for its schedule: the hyper-parameters of every step of
a group are read off it before the group runs.  Model and optimizer get the state of the ranks when
somebody wants to have it: a checkpoint, a validation, a callback.
"""

import contextlib
import functools
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.cluster.connect import refuse
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.engines.connect import ConnectEngine
from bigdl.orca.learn.parameter_layer_fit.figures import ParameterLayerFigures
from bigdl.orca.learn.parameter_layer_fit.replica import FlatModel, ParameterLayerReplica
from bigdl.orca.parameter_layer.barrier import BarrierTransport
from bigdl.orca.parameter_layer.messages import codec_for
from bigdl.orca.parameter_layer.optimizers import cut_state, joined_state
from bigdl.orca.parameter_layer.plan import LayerPlan, LayerStep, Transport
from bigdl.orca.parameter_layer.rank import RankState, changed
from bigdl.orca.parameter_layer.shuffle import ShuffleTransport
from bigdl.orca.parameter_layer.stragglers import DropStragglers, StragglerLimit
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows
from bigdl.training.batches import BatchLayout, plan_batches
from bigdl.training.checkpoint import Checkpoint, CheckpointDirectory
from bigdl.training.fit import FitLoop, TrainingSession, input_facts
from bigdl.training.position import Position, TriggerState
from bigdl.training.state import dumps, loads

logger = logging.getLogger("bigdl.orca")

T = TypeVar("T")

_RESIDUALS = "residuals.pt"
_TRANSPORTS: dict[str, type[Transport]] = {"shuffle": ShuffleTransport, "barrier": BarrierTransport}
_SAMPLINGS = ("exact", "window")


@dataclass
class ParameterLayerOptions:
    """Options of a training by the parameter layer, checked; names are those of ``fit``.

    Attributes
    ----------
    transport : str
        ``"shuffle"`` or ``"barrier"``.
    group_size : int
        Steps of one Spark job, at most; default 10 and 100.
    compression : str
        Name of a codec.
    sampling : str
        ``"exact"``: every row once per epoch. ``"window"``: a batch is a run of consecutive rows
        of the epoch's order from a random place on, as in BigDL 2.x.
    drop_stragglers : DropStragglers, dict or None
        When contributions that come late are left out.
    min_workers : int or None
        With fewer slots than workers there are fewer slices of the weights, but at least so many;
        None leaves their number as it is.
    """

    transport: str = "shuffle"
    group_size: Any = None
    compression: str = "fp32"
    sampling: str = "exact"
    drop_stragglers: Any = None
    min_workers: int | None = None

    def __post_init__(self):
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
                f"min_workers={self.min_workers} goes with transport='shuffle'; the workers of "
                f"transport={self.transport!r} must all run at once",
                code="argument-conflict",
                argument="min_workers",
            )
        if codec.feedback:
            raise UsageError(
                f"min_workers={self.min_workers} does not go with compression="
                f"{self.compression!r}, where every worker keeps what rounding took; use "
                "compression='bf16'",
                code="argument-conflict",
                argument="min_workers",
            )

    def check(self, ranks: int) -> None:
        """Refuse what does not go with so many workers."""
        if self.drop_stragglers is not None:
            self.drop_stragglers.check(ranks)
        if self.min_workers is not None and self.min_workers > ranks:
            raise UsageError(
                f"min_workers should be at most the number of workers, {ranks}, got "
                f"{self.min_workers}",
                code="argument-value",
                argument="min_workers",
            )


class ParameterLayerLoop(FitLoop):
    """The driver's part of a fit by the parameter layer, but for what an epoch is.

    A framework makes the model and its optimizer, and says how epochs go on.  :meth:`run` opens
    the rows and puts the ranks where the fit starts; then epochs are made, of groups of steps,
    until :meth:`_is_over`.  Whenever a worker is lost, the fit goes back to the newest snapshot.

    Parameters
    ----------
    program : FitProgram or KerasFitProgram
        What workers would run: model and settings.
    ranks : int
    start : Checkpoint or None
        Where it begins, which the model has loaded; None for the weights that it has.
    flat : FlatModel
        Of the driver's own model.
    optimizer : TorchParameterLayerOptimizer or KerasParameterLayerOptimizer
        The driver's own: ``hyper()`` gives the numbers of the next step, ``pass_step()`` counts
        one, ``state()`` and ``put_state()`` move the state of every trained weight by its number.
        ``updates_rows(widths)`` is True if the next step takes gradients of some rows of tables
        and changes no others, ``is_by_row`` if it looks at whole rows. The other attributes are
        those of :class:`~bigdl.orca.parameter_layer.plan.LayerPlan`.
    loss_is_sum : bool
        True if the loss adds up over the rows.
    weighted : bool
        True if rows count their weights instead of 1.

    Attributes
    ----------
    plan : LayerPlan
    position : Position
    stop : bool
        True if a callback has ended the training.
    """

    replica: type[ParameterLayerReplica]
    _validation: Callable[..., list] | None = None  # evaluates weights
    _snapshots: CheckpointDirectory | None = None
    _pulled: list[RankState] | None = None  # what the ranks have, if the driver's model has it, too

    def __init__(
        self,
        program: Any,
        ranks: int,
        start: Checkpoint | None,
        flat: FlatModel,
        optimizer: Any,
        loss_is_sum: bool,
        weighted: bool = False,
    ):
        self._program, self.settings = program, program.settings
        options: ParameterLayerOptions = self.settings.parameter_layer
        self._options, self._start = options, start
        self._flat, self._optimizer = flat, optimizer
        rule = options.drop_stragglers
        self.plan = LayerPlan(
            flat.sizes,
            optimizer.groups,
            optimizer.sliced,
            ranks,
            options.compression,
            loss_is_sum,
            optimizer.clamp,
            optimizer.norm,
            max_drop=1.0 if rule is None else rule.max_drop_percentage,
            slack=optimizer.slack,
            needs_norms=optimizer.needs_norms,
            widths=self._widths(),
        )
        self.position, self.size = Position(), ranks
        if self.settings.run_url is not None:
            self._snapshots = CheckpointDirectory(self.settings.run_url, self.settings.keep)
        self._limit = StragglerLimit(rule)
        self._new_figures = functools.partial(
            ParameterLayerFigures, ranks, weighted=weighted, loss_is_sum=loss_is_sum
        )
        self._figures = self._new_figures()

    def _widths(self) -> tuple[int, ...]:
        """Return the widths of tables whose rows travel by themselves; empty if none do.

        Raises
        ------
        UsageError
            If they have to, and cannot.
        """
        optimizer, clamp, name = self._optimizer, self._optimizer.clamp, self._options.compression
        if not any(self._flat.widths):
            return ()
        keeps_zeros = not codec_for(name).feedback and (clamp is None or clamp[0] <= 0 <= clamp[1])
        if optimizer.is_by_row and not keeps_zeros:
            raise UsageError(
                f"{optimizer.sliced.__name__} updates the rows that a batch has read alone, and "
                f"with compression={name!r} and gradients clipped to {clamp} others change, too; "
                "use compression='bf16', and a range with 0 in it",
                code="argument-conflict",
                argument="compression",
            )
        widths = self._flat.widths
        return widths if keeps_zeros and optimizer.updates_rows(widths) else ()

    def replicas(self) -> Callable[[int, dict], ParameterLayerReplica]:
        """Return what makes a replica of a rank over its shards; shipped to the ranks."""
        program, weights, widths = self._replica_program(), self._weights(), self.plan.widths
        return functools.partial(self.replica, program, weights, self.size, widths)

    def run(
        self,
        transport: Transport,
        cluster: SparkCluster,
        policy: FailurePolicy,
        on_progress: Callable[[dict], None],
        validation: Callable[..., list] | None = None,
    ) -> Checkpoint:
        """Train to the end and return the final state.

        Parameters
        ----------
        transport : Transport
        cluster : SparkCluster
        policy : FailurePolicy
        on_progress : callable
            Called with a dict after every group.
        validation : callable, optional
            Method ``attempt`` of a job of :meth:`evaluation`.
        """
        self._transport, self._cluster, self._policy = transport, cluster, policy
        self._on_progress, self._validation = on_progress, validation
        self._policy.run(self._open_rows, "trying again")
        self._latest = self._policy.run(lambda: self._begin(self._start), "trying again")
        return self.fit()

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _replica_program(self) -> Any:
        """Return the program from which replicas take model and settings."""

    @abstractmethod
    def evaluation(self, feed: Any, sync: type[GradientSync]) -> Callable:
        """Return the program that evaluates weights on a feed."""

    @abstractmethod
    def _weights(self) -> bytes:
        """Return all weights as they are now, for replicas and evaluations."""

    def _after_group(self, steps: list[LayerStep], seconds: float) -> None:
        """Take note of a group that was made."""

    def _place(self) -> tuple[int, int]:
        """The pass over the rows that the next step belongs to, and its number in there."""
        return self.position.epoch, self.position.batch

    # -- the fit -------------------------------------------------------------------------------

    def _run_epochs(self) -> None:
        """Make all epochs; the driver's model gets the state that they end with."""
        while True:
            try:
                super()._run_epochs()
                self._pull()
                return
            except WorkerLost as error:
                self._restart_from_latest(error)

    def _evaluated(self) -> dict:
        """Evaluate the weights of the ranks."""
        self._pull()
        evaluate, weights = cast("Callable", self._validation), self._weights()
        try:
            return self._policy.run(lambda: evaluate(state=weights)[0], "evaluating again")
        except NoRows:
            raise UsageError(
                "The validation data has no rows", code="data-empty", argument="validation_data"
            ) from None

    def _finish(self) -> Checkpoint:
        """Return the final state."""
        self.position.end_fit(self.settings.goal)
        if self._saved != self.position.to_json():
            self._save_checkpoint()
        return self._latest

    def _groups_of_epoch(self) -> bool:
        """Make the groups that are left of the epoch; returns whether it is whole now."""
        position = self.position
        while position.batch < self._epoch_steps and not self._is_over():
            if self._group() and position.batch < self._epoch_steps:
                self._save_checkpoint()
        return position.batch == self._epoch_steps

    def _close_epoch(self, entry: dict) -> None:
        super()._close_epoch(entry)
        self._figures = self._new_figures()

    def _save_checkpoint(self) -> None:
        self._latest, self._saved = self._snapshot(), self.position.to_json()
        if self._snapshots is not None:
            self._snapshots.write(self._latest)

    # -- groups --------------------------------------------------------------------------------

    def _group(self) -> bool:
        """A group of steps; returns whether a checkpoint is due after it."""
        if self._options.min_workers is not None:
            self._fit_slices_to_slots()
        steps, is_due = self._next_steps()
        began_at, started = time.time(), time.perf_counter()
        self._pulled = None
        records = self._run(steps)
        seconds = time.perf_counter() - started
        self._figures.add(records, seconds, began_at)
        for sources in (record["sources"] for record in records[0]):
            self._limit.add(sources)
            for note in (source["note"] for source in sources if "note" in source):
                self._warn_once(note, "loss")
        self._after_group(steps, seconds)
        epochs = self.settings.goal.last_epoch(self.position, self._epoch_steps)
        self._on_progress(self._progress(epochs, self._epoch_steps, self._figures.mean()))
        return is_due

    def _run(self, steps: list[LayerStep]) -> list[list[dict]]:
        """Run steps until all of them are made; returns their records.

        A step that was discarded is made again, with those after it, and waits for everybody then:
        so no step is discarded twice.
        """
        records_of_owners: list[list[dict]] = [[] for _ in range(self.plan.owners)]
        while steps:
            records = self._ask(
                functools.partial(self._transport.run, steps),
                f"the group of {len(steps)} steps is run again",
            )
            count = sum(not record["is_void"] for record in records[0])
            for all_of_owner, owner_records in zip(records_of_owners, records, strict=True):
                all_of_owner += owner_records[:count]
            steps = steps[count:]
            if steps:
                logger.info("Step %d is discarded: too many were late", steps[0].number)
                self._figures.dropped["discarded_steps"] += 1
                steps = [replace(steps[0], limit=None), *steps[1:]]
        return records_of_owners

    def _ask(self, call: Callable[[], T], consequence: str) -> T:
        """Call the transport; again if a worker is lost meanwhile and that has changed nothing."""
        return self._policy.run(call, consequence, only_if=lambda: self._transport.keeps_state)

    def _fit_slices_to_slots(self) -> None:
        """Cut the weights in as many slices as tasks can run at once."""
        plan, fewest = self.plan, cast("int", self._options.min_workers)
        slices = min(plan.ranks, max(fewest, self._cluster.slots()))
        if slices == plan.owners:
            return
        logger.info("The weights are cut in %d slices instead of %d", slices, plan.owners)
        self._pull()
        self.plan = replace(plan, slices=slices)
        self._push(None)

    def _next_steps(self) -> tuple[list[LayerStep], bool]:
        """The steps up to the end of the group, the epoch or the fit, or up to a checkpoint.

        Position and schedule move along, so every step has the hyper-parameters that it would have
        in a group of its own.
        """
        position, ranks = self.position, self.size
        steps: list[LayerStep] = []
        while len(steps) < self._options.group_size:
            turn, number = self._place()
            ranges = [self._plan.batch(number, rank)[:2] for rank in range(ranks)]
            hyper, limit = self._optimizer.hyper(), self._limit.seconds
            self._check_rows()
            steps.append(LayerStep(turn, number, hyper, tuple(ranges), limit))
            position.batch += 1
            position.global_step += 1
            self._optimizer.pass_step()
            if position.batch == self._epoch_steps:
                break
            settings, state = self.settings, TriggerState(position.epoch, position.global_step)
            self.stop = self.stop or self._fires(settings.end_trigger, state)
            if self._fires(settings.checkpoint_trigger, state):
                return steps, True
            if self.stop or settings.goal.is_reached(position):
                break
        return steps, False

    def _check_rows(self) -> None:
        """Refuse a step that changes rows of tables that nobody has read, if others did not."""
        if self.plan.widths and not self._optimizer.updates_rows(self.plan.widths):
            raise UsageError(
                f"Momentum and weight decay of {self.plan.optimizer.__name__} were 0 when the fit "
                f"began and are not in step {self.position.global_step + 1}, which changes all "
                "rows of embeddings; begin with them, or use backend='spark'",
                code="optimizer-unsupported",
            )

    # -- states --------------------------------------------------------------------------------

    def _open_rows(self):
        self._described = self._transport.rows()
        streams = [(each.get("stream"), each["rows"]) for each in self._described]
        if len(streams) > 1 and streams[0][0] is not None and len(set(streams)) == 1:
            raise UsageError(
                f"All {len(streams)} workers have read the same {streams[0][1]} rows of the "
                "iterable data; pass a function data(config, batch_size) that makes the part "
                "config['rank'] of config['size'], or use a backend other than 'bigdl', which "
                "shares the rows out",
                code="data-order",
            )
        self._plan, self._layout = plan_batches(self.settings, self._described)
        self._epoch_steps = self._plan.steps
        types = next((each["types"] for each in self._described if each["types"]), None)
        self._inputs = types and types[0]

    def _begin(self, snapshot: Checkpoint | None) -> Checkpoint:
        """Put the driver's model and the ranks where a snapshot is."""
        begin = snapshot or Checkpoint({})
        self.position, self._figures = begin.position, self._new_figures()
        self._saved = self.position.to_json()
        if self.position.batch and not self.position.partial:
            begin.need(*BatchLayout.facts, "sums")
            self._layout.check(begin.manifest, 0)
            self._figures.restore(begin.manifest)
        if begin.files:
            self._load(begin.files)
        residuals = begin.files.get(_RESIDUALS)
        kept = None if residuals is None else [each.numpy() for each in loads(residuals)]
        self._push(kept)
        return self._snapshot() if snapshot is None else snapshot

    def _push(self, residuals: Sequence[np.ndarray | None] | None) -> None:
        """Let the ranks go on from the driver's model."""
        states = self._states(residuals)
        self._transport.start(states)
        self._pulled = states

    def _states(self, residuals: Sequence[np.ndarray | None] | None = None) -> list[RankState]:
        """Return the model and optimizer as they are now, cut for the owners of slices.

        Residuals are those of every rank; of another number of ranks they are of no use.
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

    def _pull(self) -> list[RankState]:
        """Bring the state of the ranks to the driver's model, unless it is there."""
        if self._pulled is None:
            states = self._ask(self._transport.states, "the state is asked for again")
            buffers = {number: b for state in states for number, b in state.buffers.items()}
            vector = np.concatenate([state.weights for state in states])
            self._flat.put(vector, self._flat.with_initial(buffers))
            slices = [state.optimizer for state in states]
            self._optimizer.put_state(joined_state(slices, self.plan.geometry, self._flat.shapes))
            self._pulled = states
        return self._pulled

    def _snapshot(self) -> Checkpoint:
        """Return the state of the driver's model, once it is that of the ranks."""
        residuals, position = [state.residual for state in self._pull()], self.position
        manifest = {**position.to_json(), **vars(self._layout)}
        manifest |= input_facts(self.settings, self._inputs)
        if position.batch:
            manifest |= {**self._figures.to_json(), "rows_since_merge": [0] * self.size}
        files = self._files()
        if any(residual is not None for residual in residuals):
            import torch

            kept = [torch.from_numpy(np.array(residual)) for residual in residuals]
            files[_RESIDUALS] = dumps(kept)
        return Checkpoint(manifest, files)

    def _restart_from_latest(self, error: WorkerLost) -> None:
        """Start again from the newest state that is known."""
        self._policy.allow_retry(error)
        logger.warning("%s; going on from %s", error, self._latest.position)
        self.stop = False  # a callback that wanted to stop is asked again

        self._policy.run(lambda: self._begin(self._latest), "trying again")


def check_hooks(callback: Any, base: type, hooks: Sequence[str], refused: str = "") -> None:
    """Refuse a callback that has hooks of steps.

    Parameters
    ----------
    callback : object
    base : type
        The class whose hooks do nothing.
    hooks : sequence of str
    refused : str
        What else it is that does not go, without any hook.
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


class ParameterLayerTraining(TrainingSession):
    """:class:`~bigdl.training.fit.TrainingSession` by the parameter layer.

    The program of a fit does not run; the loop takes model and settings from it.
    """

    loop: Callable[..., ParameterLayerLoop]

    def _attempt_until_done(self, engine, feed, program, start, policy, progress):
        options = program.settings.parameter_layer
        options.check(engine.num_workers)
        if options.transport == "shuffle" and isinstance(engine, ConnectEngine):
            refuse('backend="bigdl" with transport="shuffle"', 'pass transport="barrier" to fit')
        loop = self.loop(program, engine.num_workers, start)
        feeds = dict(feed.feeds)
        validation = feeds.pop("validation", None)
        with contextlib.ExitStack() as opened:
            transport = opened.enter_context(
                _TRANSPORTS[options.transport](engine, loop.plan, loop.replicas(), FeedGroup(feeds))
            )
            evaluate = None
            if validation is not None:
                evaluation = loop.evaluation(validation, self._sync)
                evaluate = opened.enter_context(
                    engine.open(evaluation, validation, keep_spools=True)
                ).attempt
            return loop.run(transport, engine.cluster, policy, progress.update, evaluate)
