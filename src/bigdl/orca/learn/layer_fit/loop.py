"""The driver's own model and optimizer of a training by the parameter layer.

They make no steps.  The optimizer is there for its schedule: the hyper-parameters of every step of
a group are read off it before the group runs.  Model and optimizer get the state of the ranks when
somebody wants to have it: a checkpoint, a validation, a callback.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.data.feeds.group import FeedGroup
from bigdl.orca.learn.layer_fit.figures import LayerFigures
from bigdl.orca.parameter_layer.messages import codec_for
from bigdl.orca.parameter_layer.optimizers import joined_state
from bigdl.orca.parameter_layer.plan import LayerPlan, Step, Transport
from bigdl.orca.parameter_layer.rank import RankState, changed, states_of
from bigdl.orca.parameter_layer.stragglers import DropStragglers, StragglerLimit
from bigdl.runtime.jobs import NoRows
from bigdl.training.batches import plan_batches
from bigdl.training.checkpoint import CheckpointDirectory, Snapshot
from bigdl.training.figures import EpochSums
from bigdl.training.fit import FailurePolicy, FitLoop, ProgressBar, RunSettings, Training
from bigdl.training.position import Position, TriggerState
from bigdl.training.state import dumps, loads

_GROUPS = {"shuffle": 10, "barrier": 100}
_SAMPLINGS = ("exact", "window")


@dataclass(frozen=True)
class LayerOptions:
    """Options of a training by the parameter layer.

    Attributes
    ----------
    transport : str
        ``"shuffle"`` or ``"barrier"``.
    group_size : int
        Steps of one Spark job, at most.
    compression : str
        Name of a codec.
    sampling : str
        ``"exact"``: every row once per epoch. ``"window"``: a batch is a run of consecutive rows
        of the epoch's order from a random place on, as in BigDL 2.x.
    stragglers : DropStragglers or None
        When contributions that come late are left out.
    min_workers : int or None
        With fewer slots than workers there are fewer slices of the weights, but at least so many;
        None leaves their number as it is.
    """

    transport: str = "shuffle"
    group_size: int = 10
    compression: str = "fp32"
    sampling: str = "exact"
    stragglers: DropStragglers | None = None
    min_workers: int | None = None

    @property
    def max_drop(self) -> float:
        """The largest share of a step's contributions that may be left out."""
        return 1.0 if self.stragglers is None else self.stragglers.max_drop_percentage

    def check(self, ranks: int) -> None:
        """Refuse what does not go with so many workers."""
        if self.stragglers is not None:
            self.stragglers.check(ranks)
        if self.min_workers is not None and self.min_workers > ranks:
            raise UsageError(
                f"min_workers should be at most the number of workers, {ranks}, got "
                f"{self.min_workers}"
            )


def layer_options(options: dict[str, Any]) -> LayerOptions:
    """Check the options that were given to ``fit``; those that were not have their defaults."""
    transport = check_choice("transport", options.get("transport", "shuffle"), tuple(_GROUPS))
    sampling = check_choice("sampling", options.get("sampling", "exact"), _SAMPLINGS)
    compression = options.get("compression", "fp32")
    codec_for(compression)
    size = check_integer("group_size", options.get("group_size", _GROUPS[transport]), 1)
    stragglers = options.get("drop_stragglers")
    if stragglers is not None:
        stragglers = DropStragglers.of(stragglers)
    fewest = options.get("min_workers")
    if fewest is not None:
        _check_elastic(check_integer("min_workers", fewest, 1), transport, compression)
    return LayerOptions(transport, size, compression, sampling, stragglers, fewest)


def _check_elastic(fewest: int, transport: str, compression: str) -> None:
    if transport != "shuffle":
        raise UsageError(
            f"min_workers={fewest} goes with transport='shuffle'; the workers of transport="
            f"{transport!r} must all run at once"
        )
    if codec_for(compression).feedback:
        raise UsageError(
            f"min_workers={fewest} does not go with compression={compression!r}, where every "
            "worker keeps what rounding took; use compression='bf16'"
        )


class LayerModel(ABC):
    """The driver's own model and optimizer of a training by the parameter layer.

    Attributes
    ----------
    sums : bool
        True if the loss adds up over the rows.
    start : bytes
        The weights at the start.
    """

    sums: bool
    start: bytes
    _initial: list[np.ndarray]  # what layers change, as it was at the start

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def plan(self, ranks: int, options: LayerOptions) -> LayerPlan:
        """The plan of a training of this model."""

    @abstractmethod
    def hyper(self) -> tuple[dict, ...]:
        """The hyper-parameters of the optimizer's groups for the next step."""

    @abstractmethod
    def vector(self, plan: LayerPlan) -> np.ndarray:
        """The trained weights as they are now, in the order of the flat vector."""

    @abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, of this or of another backend."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the files of model and optimizer in a checkpoint: the slices of all ranks."""

    @abstractmethod
    def _shapes(self) -> list[tuple[int, ...]]:
        """Of the trained weights."""

    @abstractmethod
    def _running(self) -> list[np.ndarray]:
        """A copy of what layers change besides the trained weights."""

    @abstractmethod
    def _put(self, parts: Sequence[np.ndarray], running: Sequence[np.ndarray]) -> None:
        """Set the trained weights, of which the parts are flat, and what layers change."""

    @abstractmethod
    def _optimizer_state(self) -> Mapping[int, Mapping]:
        """The optimizer's state of every trained weight by its number."""

    @abstractmethod
    def _put_optimizer_state(self, state: Mapping[int, Mapping]) -> None:
        """The inverse of :meth:`_optimizer_state`; what is not given stays."""

    # -- the state of the ranks ----------------------------------------------------------------

    def states(self, plan: LayerPlan, residuals: Sequence | None = None) -> list[RankState]:
        """The model and optimizer as they are now, cut for the ranks of a plan."""
        buffers = changed(self._initial, self._running())
        return states_of(plan, self.vector(plan), self._optimizer_state(), buffers, residuals)

    def take(self, states: Sequence[RankState], plan: LayerPlan) -> None:
        """The inverse of :meth:`states`."""
        vector = np.concatenate([state.weights for state in states])
        running = dict(enumerate(self._initial))
        for state in states:
            running.update(state.buffers)
        self._put(plan.geometry.parts(vector), list(running.values()))
        optimizer = [state.optimizer for state in states]
        self._put_optimizer_state(joined_state(optimizer, plan.geometry, self._shapes()))


logger = logging.getLogger("bigdl.orca")

T = TypeVar("T")

_RESIDUALS = "residuals.pt"


@dataclass
class LayerRun:
    """Everything that a fit by the parameter layer works with on the driver.

    Attributes
    ----------
    model : LayerModel
    plan : LayerPlan
    transport : Transport
    options : LayerOptions
    cluster : SparkCluster
    settings : RunSettings
    start : Snapshot or None
        Where it begins; None for the weights that the model has.
    policy : FailurePolicy
    on_progress : callable
        Called with a dict after every group.
    validate : callable, optional
        ``validate(weights)`` gives what an evaluation of these weights found.
    """

    model: LayerModel
    plan: LayerPlan
    transport: Transport
    options: LayerOptions
    cluster: SparkCluster
    settings: RunSettings
    start: Snapshot | None
    policy: FailurePolicy
    on_progress: Callable[[dict], None]
    validate: Callable[[bytes], dict] | None = None


class LayerLoop(FitLoop):
    """The driver's part of a fit by the parameter layer, but for what an epoch is.

    :meth:`begin` opens the rows and puts the ranks where a snapshot is; then epochs are made, of
    groups of steps, until :meth:`_is_over`.  Whenever a worker is lost, the fit goes back to the
    newest snapshot.

    Parameters
    ----------
    run : LayerRun

    Attributes
    ----------
    position : Position
    stop : bool
        True if a callback has ended the training.
    """

    def __init__(self, run: LayerRun):
        self._layer, self._layer_plan, self._transport = run.model, run.plan, run.transport
        self._options, self._cluster, self.settings = run.options, run.cluster, run.settings
        self._policy, self._on_progress, self._validate_weights = (
            run.policy,
            run.on_progress,
            run.validate,
        )
        self.position, self.size = Position(), run.plan.ranks
        self._directory = None
        if self.settings.run_url is not None:
            self._directory = CheckpointDirectory(self.settings.run_url, self.settings.keep)
        self._limit = StragglerLimit(self._options.stragglers)
        self._figures = self._no_figures()

    def begin(self, start: Snapshot | None) -> None:
        """Open the rows, and bring the ranks where the fit starts."""
        self._policy.run(self._open_rows, "trying again")
        self._is_current = True  # whether the driver's model is that of the ranks
        self._latest = self._policy.run(lambda: self._begin(start), "trying again")

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def fit(self) -> Snapshot:
        """Train to the end; returns the final state."""

    @abstractmethod
    def _epoch(self) -> None:
        """Go on to the end of the epoch."""

    @abstractmethod
    def _no_figures(self) -> LayerFigures:
        """The figures of an epoch that has not begun."""

    @abstractmethod
    def _pass_step(self) -> None:
        """Let schedules count a step."""

    @abstractmethod
    def _kept(self) -> dict[str, bytes]:
        """Files of a checkpoint besides those of the model."""

    @abstractmethod
    def _put_kept(self, files: dict[str, bytes]) -> None:
        """The inverse of :meth:`_kept`."""

    def _after_group(self, steps: list[Step], seconds: float) -> None:
        """Take note of a group that was made."""

    @property
    def _epoch_steps(self) -> int:
        """Steps of an epoch."""
        return self._plan.steps

    def _place(self) -> tuple[int, int]:
        """The pass over the rows that the next step belongs to, and its number in there."""
        return self.position.epoch, self.position.step

    @property
    def _epochs_of_fit(self) -> int:
        """Epochs that the fit is to make, for the progress bar."""
        return (self.settings.goal.epochs or 0) - self.settings.goal.first

    # -- the fit -------------------------------------------------------------------------------

    def _train(self) -> list | None:
        """Make all epochs; returns the ranks' states, or None where a snapshot has them."""
        while True:
            try:
                while not self._is_over():
                    self._epoch()
                return None if self._is_saved() else self._pull()
            except WorkerLost as error:
                self._restart_from_latest(error)

    def _finish(self, states: list | None) -> Snapshot:
        """The final state."""
        self.position.end_fit(self.settings.goal)
        if states is not None:
            self._keep(states)
        return self._latest

    def _is_saved(self) -> bool:
        """Return True if the newest snapshot is the state that the fit ends with."""
        manifest = self._latest.manifest
        is_newest = manifest == {**manifest, **self.position.to_json()}
        return is_newest and self.settings.goal.is_reached(self.position)

    def _is_over(self) -> bool:
        return self.settings.goal.is_reached(self.position) or self.stop

    def _groups_of_epoch(self) -> bool:
        """Make the groups that are left of the epoch; returns whether it is whole now."""
        position = self.position
        while position.step < self._epoch_steps and not self._is_over():
            if self._group() and position.step < self._epoch_steps:
                self._save_checkpoint()
        return position.step == self._epoch_steps

    def _close_epoch(self, entry: dict) -> None:
        super()._close_epoch(entry)
        self._figures = self._no_figures()

    def _save_checkpoint(self) -> None:
        self._keep(self._pull())

    # -- groups --------------------------------------------------------------------------------

    def _group(self) -> bool:
        """A group of steps; returns whether a checkpoint is due after it."""
        if self._options.min_workers is not None:
            self._fit_slices_to_slots()
        steps, is_due = self._next_steps()
        began_at, started = time.time(), time.perf_counter()
        self._is_current = False
        records = self._run(steps)
        seconds = time.perf_counter() - started
        self._figures.add(records, seconds, began_at)
        for sources in (record["sources"] for record in records[0]):
            self._limit.add(sources)
        self._after_group(steps, seconds)
        position = self.position
        self._on_progress(
            {
                "epoch": position.epoch - self.settings.goal.first,
                "epochs": self._epochs_of_fit,
                "step": position.step,
                "steps": self._epoch_steps,
                "loss": self._figures.mean(),
            }
        )
        return is_due

    def _run(self, steps: list[Step]) -> list[list[dict]]:
        """Run steps until all of them are made; returns their records.

        A step that was discarded is made again, with those after it, and waits for everybody then:
        so no step is discarded twice.
        """
        records_of_owners: list[list[dict]] = [[] for _ in range(self._layer_plan.owners)]
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
        plan, fewest = self._layer_plan, cast("int", self._options.min_workers)
        slices = min(plan.ranks, max(fewest, self._cluster.slots()))
        if slices == plan.owners:
            return
        logger.info("The weights are cut in %d slices instead of %d", slices, plan.owners)
        self._pull()
        self._layer_plan = replace(plan, slices=slices)
        self._transport.recut(self._layer.states(self._layer_plan))

    def _next_steps(self) -> tuple[list[Step], bool]:
        """The steps up to the end of the group, the epoch or the fit, or up to a checkpoint.

        Position and schedule move along, so every step has the hyper-parameters that it would have
        in a group of its own.
        """
        position, ranks = self.position, self.size
        steps: list[Step] = []
        while len(steps) < self._options.group_size:
            turn, number = self._place()
            ranges = [self._plan.batch(number, rank)[:2] for rank in range(ranks)]
            hyper, limit = self._layer.hyper(), self._limit.seconds
            steps.append(Step(turn, number, hyper, tuple(ranges), limit))
            position.step += 1
            position.global_step += 1
            self._pass_step()
            if position.step == self._epoch_steps:
                break
            settings, state = self.settings, TriggerState(position.epoch, position.global_step)
            self.stop = self.stop or self._fires(settings.end, state)
            if self._fires(settings.trigger, state):
                return steps, True
            if self.stop or settings.goal.is_reached(position):
                break
        return steps, False

    # -- states --------------------------------------------------------------------------------

    def _open_rows(self):
        described = self._transport.rows()
        self._plan, self._batches = plan_batches(self.settings, described)
        self._inputs = next((each["inputs"] for each in described if each["inputs"]), None)

    def _begin(self, snapshot: Snapshot | None) -> Snapshot:
        """Put the ranks where a snapshot is; the driver's model is there already."""
        manifest = {} if snapshot is None else snapshot.manifest
        self.position = Position.of(manifest)
        self._figures = self._no_figures()
        if self.position.step and not self.position.partial:
            self._batches.check(manifest, 0)
            self._figures.of_ranks = [EpochSums(**values) for values in manifest["sums"]]
            self._figures.dropped.update(manifest.get("dropped", {}))
        files = {} if snapshot is None else snapshot.files
        self._put_kept(files)
        states = self._layer.states(self._layer_plan, _residuals(files))
        self._transport.start(states)
        self._is_current = True
        return self._snapshot(states) if snapshot is None else snapshot

    def _pull(self) -> list:
        """Bring the state of the ranks to the driver's model."""
        states = self._ask(self._transport.states, "the state is asked for again")
        if not self._is_current:
            self._layer.take(states, self._layer_plan)
            self._is_current = True
        return states

    def _keep(self, states):
        self._latest = self._snapshot(states)
        if self._directory is not None:
            self._directory.write(self._latest)

    def _snapshot(self, states) -> Snapshot:
        position = self.position
        manifest = {**position.to_json(), **vars(self._batches), "inputs": self._inputs}
        if position.step:
            manifest["sums"] = [sums.to_json() for sums in self._figures.of_ranks]
            manifest["rows_since_merge"] = [0] * self.size
            manifest["dropped"] = dict(self._figures.dropped)
        files = {**self._layer.files(), **self._kept()}
        if any(state.residual is not None for state in states):
            import torch

            kept = [torch.from_numpy(np.array(state.residual)) for state in states]
            files[_RESIDUALS] = dumps(kept)
        return Snapshot(manifest, files)

    def _restart_from_latest(self, error: WorkerLost) -> None:
        """Start again from the newest state that is known."""
        self._policy.allow_retry(error)
        logger.warning("%s; going on from %s", error, self._latest.position)
        self.stop = False  # a callback that wanted to stop is asked again

        def begin():
            self._layer.load(self._latest)
            self._begin(self._latest)

        self._policy.run(begin, "trying again")


def _residuals(files: dict[str, bytes]) -> list | None:
    """Return what encoding had taken from the gradients of every rank."""
    data = files.get(_RESIDUALS)
    return None if data is None else [residual.numpy() for residual in loads(data)]


class LayerTraining(Training):
    """:class:`~bigdl.training.fit.Training` by the parameter layer.

    The program of a fit does not run; a framework says what takes its place.
    """

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def _unpacked(self, program: Any) -> tuple[Any, Sequence[Any]]:
        """The parts of a program's model and its callbacks, if the parameter layer takes them."""

    @abstractmethod
    def _model(self, parts: Any, settings: RunSettings, start) -> LayerModel:
        """The driver's own model."""

    @abstractmethod
    def _replicas(self, program: Any, parts: Any, model: LayerModel, ranks: int, sampling: str):
        """``replicas(rank, shards)`` makes a replica in a rank."""

    @abstractmethod
    def _evaluation(self, program: Any, parts: Any, feed):
        """The program that evaluates weights on the validation data."""

    @abstractmethod
    def _loop(self, run: LayerRun, parts: Any, callbacks: Sequence[Any]) -> LayerLoop:
        """The loop of epochs; its method ``fit`` gives the final state."""

    # ------------------------------------------------------------------------------------------

    def _train(self, job, program, start, policy, show_progress):
        options, settings, engine = job.layer, program.settings, job.engine
        parts, callbacks = self._unpacked(program)
        model = self._model(parts, settings, start)
        ranks = engine.num_workers
        options.check(ranks)
        plan = model.plan(ranks, options)
        replicas = self._replicas(program, parts, model, ranks, options.sampling)
        feeds = dict(job.feed.feeds)
        validation = feeds.pop("validation", None)
        bar = ProgressBar(show_progress)
        with contextlib.ExitStack() as opened:
            opened.callback(bar.close)
            transport = opened.enter_context(
                _open_transport(options, engine, plan, replicas, FeedGroup(feeds))
            )
            validate = None
            if validation is not None:
                evaluation = self._evaluation(program, parts, validation)
                validate = _validate_by(
                    opened.enter_context(engine.open(evaluation, validation, keep_spools=True)),
                    policy,
                )
            run = LayerRun(
                model,
                plan,
                transport,
                options,
                engine.cluster,
                settings,
                start,
                policy,
                bar.update,
                validate,
            )
            return self._loop(run, parts, callbacks).fit()


def _open_transport(options: LayerOptions, engine, plan, program, feed: FeedGroup):
    """The transport that was chosen.

    Parameters
    ----------
    options : LayerOptions
    engine : Engine
    plan : LayerPlan
    program : callable
        ``program(rank, shards)`` makes a replica.
    feed : FeedGroup
        Of one feed.
    """
    if options.transport == "barrier":
        from bigdl.orca.parameter_layer.barrier import BarrierTransport

        return BarrierTransport(engine, plan, program, feed)
    from bigdl.orca.parameter_layer.shuffle import ShuffleTransport

    cluster = engine.cluster
    per_node = -(-plan.ranks // max(cluster.nodes, 1))
    threads = max(1, cluster.cores_per_node // per_node)
    return ShuffleTransport(cluster, plan, program, feed, threads=threads)


def _validate_by(job, policy):
    """A function of weights that evaluates them by a job, as often as the policy allows."""

    def validate(weights):
        try:
            return policy.run(lambda: job.attempt(state=weights)[0], "evaluating again")
        except NoRows:
            raise UsageError("The validation data has no rows") from None

    return validate
