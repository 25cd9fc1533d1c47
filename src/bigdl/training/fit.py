"""Fits: settings, the epoch loop of a worker, and the driver's retries, progress and state.

An :class:`EpochRunner` runs epochs with three components.  :class:`Hooks` call the callbacks of a
framework.  A :class:`TrainingStep` updates the weights: in a worker, which has a part of every
batch (:class:`WorkerStep`), or from the driver through the ranks of the parameter layer
(``bigdl.orca.parameter_layer.fit``).  A :class:`Checkpointer` saves and restores states.  All share
one :class:`FitContext` with the :class:`TrainState`.

A :class:`TrainingSession` keeps the state of an Estimator between fits.  After every
:class:`~bigdl.common.errors.WorkerLost` it consults the :class:`FailurePolicy`; errors of user code
are never retried.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from bigdl.common.errors import UsageError, WorkerLost, one_line
from bigdl.common.timeouts import VOTE_S
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.engine import Engine, Leaving, PeerLost
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows, WorkersRelocated
from bigdl.runtime.recovery import publish_record, read_record
from bigdl.runtime.shards.table_batches import OrderFacts, resumed_order
from bigdl.runtime.worker import Worker
from bigdl.training.batches import BatchLayout, BatchSource, all_gather_json
from bigdl.training.checkpoint import (
    BackgroundWriter,
    Checkpoint,
    CheckpointDirectory,
    checkpoint_name,
    read_checkpoint,
)
from bigdl.training.in_place import (
    SUMS,
    StepGuard,
    flat_values,
    joined,
    rejoin,
    shaped_values,
    sums_vector,
)
from bigdl.training.journal import FitJournal, settings_of
from bigdl.training.metrics import EpochSums, headline
from bigdl.training.position import (
    Position,
    RunSettings,
    StoppingCriterion,
    TriggerState,
)
from bigdl.training.progress import Progress, progress_of
from bigdl.training.remaining_rows import IDS, RemainingBatches
from bigdl.training.slices import SavedSlices
from bigdl.training.state import RunningState, dumps, loads
from bigdl.training.table_rows import TableRows
from bigdl.training.timing import StepSums, rank_numbers, rank_times

ResultT = TypeVar("ResultT")

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bigdl.runtime.shards.feed import Feed

logger = logging.getLogger("bigdl.orca")

_VOTE_STEPS = 10  # steps between two votes, if these take less than VOTE_S
_UNSAVED = "unsaved"  # topic of a final state that could not be written
_WARNING = "warning"  # prefix of the topics of workers' warnings to the user
_RECORDS = "records"  # prefix of the topics of the epochs' records
_RECORD_INTERVAL = 1.0  # seconds between two messages with records
_KEPT_RECORDS = 200  # number of the newest records that the ranks other than 0 keep


class TrainingSession:
    """Trainer that runs an Estimator's fits with retries and keeps the training state between fits.

    Parameters
    ----------
    model_dir : str, optional
        Folder for checkpoints.
    sync : type
        Class of the GradientSync.
    keep : int
        Number of newest checkpoints to keep in `model_dir`.
    run_call : callable
        Runs a :class:`FitCall` and returns the final state; by default in the engine's workers.

    Attributes
    ----------
    snapshot : Checkpoint or None
        State after the last fit or load.
    journal : FitJournal
        Journal of the last fit.
    """

    def __init__(
        self,
        model_dir: str | None,
        sync: type[GradientSync],
        keep: int = 2,
        run_call: Callable[[FitCall], Checkpoint] | None = None,
    ):
        self.snapshot: Checkpoint | None = None
        self.journal = FitJournal()
        self._model_dir = model_dir
        self._sync, self._keep = sync, keep
        self._run_call = run_call or run_in_workers
        self._seed: int | None = None
        self._lock = threading.RLock()  # held while the state is trained or replaced
        self._run: CheckpointDirectory | None = None  # checkpoints of this run
        self._is_resumed = False  # whether the snapshot is unchanged since `resume`
        # end of the last fit; a resumed run may be further
        self._epochs = self._steps = 0

    @property
    def position(self) -> Position:
        return Position() if self.snapshot is None else self.snapshot.position

    @property
    def seed(self) -> int:
        """Seed of the next fit without an explicit seed; drawn once at random."""
        if self._seed is None:
            self._seed = secrets.randbits(31)
        return self._seed

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context manager that acquires the training state's lock; logs a warning if it waits."""
        if not self._lock.acquire(blocking=False):
            logger.warning(
                "Another thread trains this Estimator: this call waits and continues from its "
                "result; use a separate Estimator in each thread to train at the same time"
            )
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def take(self, snapshot: Checkpoint) -> None:
        """Set the training state to a loaded checkpoint, from which the next fit continues."""
        with self._alone():
            self._resume(snapshot)
            self._epochs = self.position.epochs_with_metrics
            self._steps = self.position.global_step

    def fit(
        self,
        engine: Engine,
        feed: Feed,
        program_of: Callable[[Any], Callable[..., Any]],
        settings: RunSettings,
        *,
        seed: int | None,
        resume: str | None,
        policy: FailurePolicy,
        progress: str,
        journal: FitJournal | None = None,
    ) -> list[dict[str, Any]]:
        """Train to ``settings.stop_at``, which counts from the end of the last fit.

        Parameters
        ----------
        engine : bigdl.runtime.engine.Engine
        feed : bigdl.orca.data.feeds.group.FeedGroup
            Feed ``data`` and optionally ``validation``.
        program_of : callable
            Returns the program that the workers run, for complete settings.
        settings : RunSettings
        progress : str
            A form of :func:`~bigdl.training.progress.progress_form`.
        journal : FitJournal, optional
            Journal of this fit, which replaces :attr:`journal`.

        Returns
        -------
        list of dict
            Metrics of the epochs of this fit.
        """
        with self._alone():
            if resume is None:
                self._is_resumed = False
                self._epochs = self.position.epochs_with_metrics
                self._steps = self.position.global_step
            else:
                self._load_resumed(resume)
                manifest = {} if self.snapshot is None else self.snapshot.manifest
                of_data = manifest.get("data"), manifest.get("data_identity")
                if feed is not None and any(of_data):
                    feed = feed.at(*of_data)
            first, stop_at = self._epochs, settings.stop_at
            stop_at = StoppingCriterion(
                None if stop_at.epochs is None else self._epochs + stop_at.epochs,
                None if stop_at.steps is None else self._steps + stop_at.steps,
                first,
            )
            end = None if resume is None else self.position.end_of(stop_at)
            if end is None:
                if seed is not None:
                    self._seed = seed
                self.journal = journal or FitJournal()
                self.journal.settings = settings_of(settings)
                settings = replace(settings, stop_at=stop_at, seed=self.seed)
                self._train(engine, feed, program_of, settings, policy, progress_of(progress))
                end = self.position.epochs_with_metrics
            metrics = self.position.epoch_metrics(first, end)
            self._epochs = end
            self._steps = metrics[-1]["global_step"] if metrics else self.position.global_step
            return metrics

    def _train(
        self,
        engine: Engine,
        feed: Feed,
        program_of: Callable[[Any], Callable[..., Any]],
        settings: RunSettings,
        policy: FailurePolicy,
        progress: Progress,
    ) -> None:
        """Complete the settings and run the program that is built from them."""
        start = self.snapshot
        if self._is_resumed and start is not None:  # continue inside the interrupted epoch
            start = replace(start, manifest={**start.manifest, "partial": None})
        if self._model_dir is not None:
            here = "" if self.snapshot is None else checkpoint_name(self.snapshot)
            # a failed fit may have left newer checkpoints than this state
            if self._run is None or self._run.newest() > here:
                self._run = CheckpointDirectory.create(self._model_dir)
        if feed is not None:
            settings = replace(settings, data_version=feed.version, data_identity=feed.identity)
        if self._run is not None:
            settings = replace(settings, run_url=self._run.url, keep=self._keep)
            if start is not None and start.slices is not None:
                settings = replace(settings, pinned_checkpoint=checkpoint_name(start))
        elif policy.max_failures == 0:
            # without retries the checkpoints have no use
            settings = replace(settings, checkpoint_trigger=None)
        if policy.max_failures == 0:  # nor has a process that waits for a loss
            settings = replace(settings, recovery="restart")
        program = program_of(settings)
        progress.start(engine.num_workers)

        def keep(snapshot: Checkpoint) -> None:
            self.snapshot = snapshot

        call = FitCall(
            engine,
            feed,
            program,
            start,
            policy,
            progress,
            self._sync,
            self._run,
            keep,
            self.journal,
        )
        try:
            with self.journal.recording():
                self.snapshot = self._run_call(call)
        finally:
            progress.close()
        self._is_resumed = False
        first = settings.stop_at.first
        progress.finish(self.position.epoch_metrics(first, self.position.epochs_with_metrics))

    def _load_resumed(self, resume: object) -> None:
        """Load the checkpoint that `resume` names, if there is one."""
        if not isinstance(resume, str):
            raise UsageError(
                f'resume should be "auto" or the path of a checkpoint, got {resume!r}',
                code="argument-value",
                argument="resume",
            )
        if resume != "auto":
            snapshot = read_checkpoint(resume)
            if snapshot is None:
                raise UsageError(
                    f'resume should be "auto" or the path of a checkpoint such as '
                    f"Estimator.latest_checkpoint gives, got {resume!r}",
                    code="argument-value",
                    argument="resume",
                )
            self._resume(snapshot)
            self._epochs = self._steps = 0
            self._is_resumed = True
            return
        if self._model_dir is None:
            raise UsageError(
                'resume="auto" needs model_dir= in Estimator.from_torch',
                code="argument-missing",
                argument="model_dir",
            )
        run = self._run or CheckpointDirectory.latest_run(self._model_dir)
        latest = run.latest() if run is not None else None
        if run is None or latest is None:
            logger.info("No checkpoint below %s: the training starts from scratch", self._model_dir)
            return
        name, snapshot = latest
        if self.snapshot is None or name > checkpoint_name(self.snapshot):
            self._run, self._is_resumed = run, True
            self._resume(snapshot)
            logger.info("The training resumes from %s/%s", run.url, name)

    def _resume(self, snapshot: Checkpoint) -> None:
        self.snapshot = snapshot
        self._seed = snapshot.manifest.get("seed", self._seed)


@dataclass
class FitCall:
    """Program, input, start state and failure policy of one call of ``fit``.

    Attributes
    ----------
    engine : Engine
    feed : bigdl.orca.data.feeds.group.FeedGroup
    program : callable
        Program that the workers run; it has the attribute ``settings``.
    start : Checkpoint or None
        State to start from; None for the model's initial weights.
    policy : FailurePolicy
    progress : Progress
    sync : type of GradientSync
    run : CheckpointDirectory or None
        Folder to which the workers write their checkpoints.
    keep : callable
        Keeps a state in the Estimator that could not be written.
    journal : FitJournal
        Receives the records of the fit.
    """

    engine: Engine
    feed: Any  # None or a FeedGroup, of a lower layer
    program: Any  # callable with settings
    start: Checkpoint | None
    policy: FailurePolicy
    progress: Progress
    sync: type[GradientSync]
    run: CheckpointDirectory | None
    keep: Callable[[Checkpoint], None]
    journal: FitJournal = field(default_factory=lambda: FitJournal())


def run_in_workers(call: FitCall) -> Checkpoint:
    """Run a program in workers until it ends or its policy gives up; return the final state."""
    kept: dict[str, Checkpoint] = {}  # newest checkpoint of each topic
    latest, warned = call.start, set[str]()

    def on_event(topic: str, value: Any) -> None:
        if topic == "progress":
            call.progress.update(value)
        elif topic == "phase":
            call.progress.phase("building the model" if value == "running" else value)
        elif topic == "message":
            doc, blob = value
            if doc["topic"].startswith(_RECORDS):
                for record in doc["records"]:
                    call.journal.add(record)
                return
            if not doc["topic"].startswith(_WARNING):
                kept[doc["topic"]] = Checkpoint.unpack(doc, blob)
                return
            # show only the first of several workers or about one subject
            subject = doc["text"] if doc["topic"] == _WARNING else doc["topic"]
            if subject not in warned:
                warned.add(subject)
                logger.warning(doc["text"])

    def on_loss(error: WorkerLost) -> bool:
        try:
            reason = call.policy.allow_retry(error)
        except WorkerLost:
            return False
        logger.warning("%s; the workers continue in place (%s)", error, reason)
        return True

    in_place = call.program.settings.recovery != "restart"
    replacing: dict[str, Any] = {"on_loss": on_loss} if in_place else {}
    with call.engine.open(call.program, call.feed) as opened:
        while True:
            options, state = {}, None
            if latest is not None:
                options["snapshot"], state = latest.pack()
            try:
                results = opened.attempt(options, state, on_event, **replacing)
                break
            except NoRows:
                raise UsageError("The training data has no rows", code="data-empty") from None
            except UsageError as error:
                if _UNSAVED not in kept:
                    raise
                call.keep(kept[_UNSAVED])
                raise error.with_message(
                    f"{error}; the trained state is kept in this Estimator, so save() can "
                    "write it elsewhere"
                ) from None
            except WorkerLost as error:
                saved = None if call.run is None else call.run.latest()
                latest = saved[1] if saved else kept.get("checkpoint", latest)
                is_moved = isinstance(error, WorkersRelocated)
                reason = "no step is lost" if is_moved else call.policy.allow_retry(error)
                where = Position() if latest is None else latest.position
                logger.warning("%s; resuming from %s (%s)", error, where, reason)
                call.journal.begin_attempt()
    name = results[0]["checkpoint"]
    return kept["final"] if name is None else cast("CheckpointDirectory", call.run).read(name)


def input_facts(settings: RunSettings, inputs: list[Any] | None) -> dict[str, Any]:
    """Return the manifest fields that describe the input.

    Parameters
    ----------
    settings : RunSettings
    inputs : list or None
        Types of the model's inputs, as in ``BatchSource.types``.
    """
    known = {"data": settings.data_version, "data_identity": settings.data_identity}
    return {"inputs": inputs, **{key: each for key, each in known.items() if each is not None}}


@dataclass
class TrainState:
    """Progress of a fit, shared by its step, its hooks and its checkpoints.

    Attributes
    ----------
    stop_at : StoppingCriterion
    position : Position
        Position of the training; replaced when a checkpoint is restored.
    stop : bool
        True if a callback or a trigger has ended the fit.
    layout : BatchLayout
        Layout of an epoch's batches, once the rows are known.
    epoch_steps : int or None
        Steps of an epoch; None if unknown.
    sums : EpochSums
        Sums of this worker in this epoch.
    exchanges : StepSums
        Seconds in collectives of this worker's steps in this epoch.
    remaining : RemainingBatches or None
        Remaining batches of an epoch that another number of workers began.
    is_due : bool
        True while a checkpoint of this position is due but not saved.
    """

    stop_at: StoppingCriterion
    position: Position = field(default_factory=Position)
    stop: bool = False
    layout: Any = None
    epoch_steps: int | None = None
    sums: EpochSums = field(default_factory=EpochSums)
    exchanges: StepSums = field(default_factory=StepSums)
    remaining: RemainingBatches | None = None
    is_due: bool = False
    _first: dict[str, Any] | None = None  # headline of the first finished epoch
    _last: dict[str, Any] | None = None  # headline of the last finished epoch

    def close_epoch(self, entry: dict[str, Any]) -> None:
        """Append the metrics of a finished epoch and reset its sums."""
        self.position.close_epoch(entry)
        self.sums, self.exchanges = EpochSums(), StepSums()
        self._last = {**headline(entry), "epoch": entry["epoch"] - self.stop_at.first}
        self._first = self._first or self._last

    @property
    def shown(self) -> list[dict[str, Any] | None]:
        """Headlines of the first and the last finished epoch."""
        return [self._first, self._last]

    @shown.setter
    def shown(self, headlines: Sequence[dict[str, Any] | None]) -> None:
        self._first, self._last = headlines

    def entry(self) -> dict[str, Any]:
        """Return the epoch and step number for the metrics of the current epoch."""
        return {"epoch": self.position.epoch + 1, "global_step": self.position.global_step}

    def progress(self, epochs: int, steps: int, loss: float | None) -> dict[str, Any]:
        """Return a progress report for :class:`~bigdl.training.progress.Progress`.

        Parameters
        ----------
        epochs : int
            Number of epochs at the end of the fit.
        steps : int
            Steps of an epoch.
        loss : float or None
        """
        return {
            "epoch": self.position.epoch - self.stop_at.first,
            "epochs": epochs - self.stop_at.first,
            "step": self.position.batch,
            "steps": steps,
            "loss": loss,
            "first": self._first,
            "last": self._last,
        }


@dataclass
class FitContext:
    """Settings, state and worker of a fit, shared by its components.

    Attributes
    ----------
    settings : RunSettings
    state : TrainState
    worker : Worker or None
        Worker that runs the fit; None in the driver.
    sync : GradientSync or None
        Gradient synchronization of the workers.
    on_record : callable, optional
        Called with a record of the fit in the driver.
    """

    settings: Any
    state: TrainState
    worker: Any = None
    sync: Any = None
    on_record: Callable[[dict[str, Any]], None] | None = None
    _warned: set[str] = field(default_factory=set)
    _records: list[dict[str, Any]] = field(default_factory=list)  # not sent yet
    _sent_at: float = 0.0
    _messages: int = 0

    def record(self, record: dict[str, Any], *, is_last: bool = False) -> None:
        """Record a fact about the fit for its report; the driver gets all records of rank 0.

        They are sent once per second, before each checkpoint and with the last one, since epochs
        can be short.
        """
        if self.worker is None:
            if self.on_record is not None:
                self.on_record(record)
            return
        self._records.append(record)
        if self.worker.rank:  # in case rank 0 is lost before it sends them
            self._records = self._records[-_KEPT_RECORDS:]
            return
        if is_last or time.monotonic() - self._sent_at > _RECORD_INTERVAL:
            self.send_records()

    def send_records(self) -> None:
        """Send the waiting records; before a checkpoint, so a resumed fit has those it covers."""
        if not self._records:
            return
        # unique topics: a message replaces another one of its topic
        self.worker.send(f"{_RECORDS} {self._messages}", {"records": self._records}, b"")
        self._records, self._sent_at = [], time.monotonic()
        self._messages += 1

    def warn(self, text: str, about: str = "") -> None:
        """Log a warning once per subject; if several workers send the same warning, log it once."""
        if about in self._warned:
            return
        if about:
            self._warned.add(about)
        if self.worker is None:
            logger.warning(text)
        else:
            self.worker.send(f"{_WARNING} of {about}" if about else _WARNING, {"text": text}, b"")


@dataclass
class Triggers:
    """Triggers that decide when a fit ends and when it saves a checkpoint.

    The answer of rank 0 counts for triggers that are not reproducible.
    """

    context: FitContext

    def ask(self, **metrics: Any) -> bool:
        """Evaluate the triggers after a step; return True if a checkpoint is due.

        Parameters
        ----------
        **metrics
            Fields of :class:`~bigdl.training.position.TriggerState` at the end of an epoch.
        """
        settings, state = self.context.settings, self.context.state
        seen = TriggerState(state.position.epoch, state.position.global_step, **metrics)
        answers = []
        for trigger in (settings.end_trigger, settings.checkpoint_trigger):
            answer, sync = trigger is not None and bool(trigger(seen)), self.context.sync
            if sync is not None and trigger is not None and not trigger.is_reproducible:
                answer = bool(sync.all_gather([float(answer)])[0][0])
            answers.append(answer)
        state.stop |= answers[0]
        return answers[1]


class Hooks(ABC):
    """Interface to a framework's callbacks during a fit, and to the files of its model."""

    @property
    @abstractmethod
    def are_called(self) -> bool:
        """True if there are callbacks, which might inspect the model after an epoch."""

    @abstractmethod
    def begin_fit(self) -> None:
        """Run callbacks before the first epoch."""

    @abstractmethod
    def end_fit(self) -> bool:
        """Run callbacks after the last epoch; return True if they may have changed weights."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Run callbacks before the steps of an epoch."""

    @abstractmethod
    def end_epoch(self, entry: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        """Run callbacks after the steps of an epoch; return the epoch's ``loss`` and ``score``."""

    def close_epoch(self, entry: dict[str, Any]) -> None:  # noqa: B027 - few have to do it
        """Run callbacks after an epoch has been counted as finished."""

    @abstractmethod
    def is_stopped(self, *, in_epoch: bool = False) -> bool:
        """Return True if a callback or trigger has ended the fit; may be a collective operation."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the checkpoint files that are the same on all ranks."""

    @abstractmethod
    def load(self, files: dict[str, bytes]) -> None:
        """Restore what :meth:`files` returned on any backend, or the model's file alone."""


class TrainingStep(ABC):
    """Training step of a fit: one update, or a group of updates that run together."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if the epoch has no more steps."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Start reading the remaining batches of the epoch."""

    @abstractmethod
    def run(self, triggers: Triggers) -> bool:
        """Run the step and advance the position; return True if a checkpoint is due."""

    @abstractmethod
    def end_epoch(self) -> dict[str, Any] | None:
        """Return the epoch's training and validation metrics, or None if no step was run."""

    @abstractmethod
    def times(self, spent: dict[str, float]) -> list[dict[str, float]]:
        """Return rows, memory and durations of each rank in the epoch; may be a collective.

        Parameters
        ----------
        spent : dict of str to float
            Durations of this process by the names in :data:`bigdl.training.timing.SPENT`.

        Returns
        -------
        list of dict
            See :func:`bigdl.training.timing.rank_times`.
        """

    def pull_model(self) -> None:  # noqa: B027 - few have to do it
        """Copy the current weights from other processes to this process's model."""

    def push_model(self) -> None:  # noqa: B027 - few have to do it
        """Send the changes that callbacks made to the model to the other processes."""


class Checkpointer(ABC, Generic[ResultT]):
    """Interface for saving and restoring the states of a fit.

    `ResultT` is what :meth:`finish` returns, which becomes the result of the fit's program.

    Attributes
    ----------
    keeps_end : bool
        True if the checkpoint at the end of a fit is saved in addition to its result.
    """

    keeps_end = True

    @abstractmethod
    def save(self, *, is_last: bool) -> None:
        """Save the current state."""

    def must_leave(self) -> bool:
        """Return True if a worker's machine will soon shut down; may be a collective operation."""
        return False

    def leave(self) -> None:
        """Save the state and stop the workers."""

    def recover(self, error: WorkerLost) -> None:
        """Restore the newest state after the loss of a worker, or raise the error."""
        raise error

    def rejoin(self, error: PeerLost) -> bool:
        """Continue in place with the other workers, or raise the error.

        Returns
        -------
        bool
            True if this rank has the newest state and the state of rank 0 was lost.
        """
        raise error

    @abstractmethod
    def finish(self, is_changed: bool) -> ResultT:
        """Save the final state; return the information that the driver needs to find it.

        Parameters
        ----------
        is_changed : bool
            True if weights may have changed since the newest checkpoint.
        """


@dataclass
class EpochRunner(Generic[ResultT]):
    """Loop over the epochs of a fit, which all workers run together."""

    context: FitContext
    triggers: Triggers
    hooks: Hooks
    step: TrainingStep
    checkpointer: Checkpointer[ResultT]
    _spent: dict[str, float] = field(default_factory=dict)  # since the last record
    _recorded_at: float = 0.0
    _is_changed: bool | None = None  # by the hooks of the end; None before

    def run(self) -> ResultT:
        """Train until the fit is over; return the result of :meth:`Checkpointer.finish`."""
        state = self.context.state
        if not getattr(self.context.worker, "group", 0):
            self._record_workers()
        self.hooks.begin_fit()
        lost: PeerLost | None = None
        while True:
            try:
                if lost is None and state.position.partial:  # an earlier fit ended in this epoch
                    self._close_epoch(state.position.partial)
                if state.is_due:
                    self._keep(True)
                while not self._is_over():
                    self.run_epoch()
                self.step.pull_model()
                result = self.checkpointer.finish(self._end_fit())
                break
            except WorkerLost as error:
                self.checkpointer.recover(error)
            except PeerLost as error:
                # the traceback of `error` refers to the group of workers
                lost = PeerLost(str(error))
            self._rejoin(lost)
        self.context.record({"ended_at": time.time()}, is_last=True)
        return result

    def _rejoin(self, lost: PeerLost | None) -> None:
        """Continue in place after the loss of another worker, if there was one."""
        if lost is not None and self.checkpointer.rejoin(lost):
            self.context.send_records()

    def _end_fit(self) -> bool:
        """Call the hooks of the end once; return True if they may have changed weights."""
        if self._is_changed is None:
            self._is_changed = self.hooks.end_fit()
        return self._is_changed

    def _record_workers(self) -> None:
        """Record the workers and the durations of their start; a collective operation."""
        worker, sync, workers = self.context.worker, self.context.sync, []
        if worker is not None:
            known = {"host": worker.host, "threads": worker.threads, "read_s": worker.read_s}
            workers = all_gather_json(sync, {**known, "began_at": worker.began_at})
        self.context.record({"ready_at": time.time(), "workers": workers})
        self._recorded_at = time.perf_counter()

    def _record_epoch(self, entry: dict[str, Any]) -> None:
        """Record the metrics of an epoch and the durations on all ranks; a collective operation."""
        now = time.perf_counter()
        ranks = self.step.times({**self._spent, "wall_s": now - self._recorded_at})
        self._spent, self._recorded_at = {}, now
        kept = {name: value for name, value in entry.items() if name != "workers"}
        self.context.record({"entry": kept, "ranks": ranks})

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Context manager that adds the duration of its block to the next record."""
        started = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started

    def run_epoch(self) -> None:
        """Train to the end of the current epoch."""
        state, hooks, step = self.context.state, self.hooks, self.step
        position = state.position
        hooks.begin_epoch()
        step.begin_epoch()
        while not (step.is_done or self._is_over(in_epoch=True)):
            is_due = step.run(self.triggers)
            if not step.is_done:
                self._keep(is_due)
        is_whole = step.is_done
        with self._timed("evaluate_s"):
            entry = step.end_epoch()
        if entry is None:  # it was stopped before the first step
            return
        if hooks.are_called:
            step.pull_model()
        metrics = hooks.end_epoch(entry, is_whole)
        step.push_model()
        loss = metrics["loss"]
        if loss is not None and math.isnan(loss):
            self.context.warn(f"The loss of epoch {entry['epoch']} is nan", "nan")
        self._record_epoch(entry)
        if is_whole:
            self._close_epoch(entry)
            self._keep(self.triggers.ask(epoch_finished=True, **metrics))
        else:
            position.partial = entry

    def _close_epoch(self, entry: dict[str, Any]) -> None:
        self.context.state.close_epoch(entry)
        self.hooks.close_epoch(entry)

    def _keep(self, is_due: bool) -> None:
        """Save a checkpoint if it is due; stop the workers if a machine is about to shut down."""
        self.context.state.is_due = is_due
        if is_due:
            is_over = self._is_over()
            if self.checkpointer.keeps_end or not is_over:
                self.context.send_records()
                with self._timed("checkpoint_s"):
                    self.checkpointer.save(is_last=is_over)
        self.context.state.is_due = False
        if self.checkpointer.must_leave() and not self._is_over():
            self.context.send_records()
            self.checkpointer.leave()

    def _is_over(self, *, in_epoch: bool = False) -> bool:
        """Return True on every rank if the fit ends now; may be a collective operation."""
        state = self.context.state
        return state.stop_at.is_reached(state.position) or self.hooks.is_stopped(in_epoch=in_epoch)


def start(worker: Worker, sync: GradientSync) -> BackgroundWriter:
    """Connect to the other workers; return the writer of this worker's checkpoints."""
    writer = BackgroundWriter()
    worker.at_exit(writer.wait)  # run after the sync has stopped, since a peer may wait for it
    if worker.group:  # a replacement, which joins the others later
        sync.replay(read_record(worker.channel))
    else:
        sync.start()
        if sync.can_rejoin:
            sync.start_recording()
    return writer


def exchange(
    sync: GradientSync, known: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Exchange facts about the workers' rows; return all facts and the training data's dtypes.

    Parameters
    ----------
    sync : GradientSync
    known : dict
        JSON-serializable facts about this worker: ``types`` and ``rows`` of its training data;
        ``validation``, its number of validation rows, or 1 without validation data; and other
        facts that the framework needs from all workers.
    """
    everyone = all_gather_json(sync, known)
    if not sum(each["validation"] for each in everyone):
        raise UsageError(
            "The validation data has no rows", code="data-empty", argument="validation_data"
        )
    return everyone, next((each["types"] for each in everyone if each["types"]), None)


class WorkerStep(TrainingStep):
    """Training step of a worker, which processes its part of every batch.

    Attributes
    ----------
    context : FitContext
    running : RunningState
        State that layers change without training.
    source : BatchSource
        Training data of this worker.
    """

    context: FitContext
    running: RunningState
    guard: StepGuard | None = None  # for an in-place recovery

    def times(self, spent: dict[str, float]) -> list[dict[str, float]]:
        state = self.context.state
        numbers = rank_numbers(state.sums, spent)
        everyone = self.context.sync.all_gather([*numbers, *state.exchanges.values])
        count = len(numbers)
        return rank_times([row[:count] for row in everyone], [row[count:] for row in everyone])

    @property
    @abstractmethod
    def source(self) -> BatchSource:
        """Training data of this worker."""

    @abstractmethod
    def rank_state(self) -> dict[str, Any]:
        """Return the state that differs between ranks."""

    @abstractmethod
    def put_rank_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`rank_state` returned."""

    def put_all_ranks(self, states: list[dict[str, Any]]) -> bool:
        """Restore the states of all ranks, for any number of ranks; return True if supported.

        Parameters
        ----------
        states : list of dict
            Results of :meth:`rank_state` of each rank, within an epoch.
        """
        return False

    # -- for an in-place recovery

    def local_vector(self) -> torch.Tensor:
        """Return the state that differs between ranks as a vector of float64."""
        values = flat_values(self.running.local_values())
        return joined(sums_vector(self.context.state.sums, self.running.rows), values)

    def put_local(self, vector: torch.Tensor) -> None:
        """Restore the state that :meth:`local_vector` returned, and discard an unfinished step."""
        sums, (rows,), values = vector.tensor_split([SUMS, SUMS + 1])
        self.context.state.sums = EpochSums(*sums.tolist())
        self.running.rows = int(rows)
        self.running.put(shaped_values(values, self.running.local_values()))

    def reset_local(self) -> None:
        """Return to the state at the start of an epoch, and discard an unfinished step."""
        self.context.state.sums = EpochSums()
        self.running.reset()

    def facts_of_step(self) -> object:
        """Return JSON facts that steps may change and that are equal on all ranks."""
        return None

    def put_facts(self, facts: object) -> None:
        """Restore the facts that :meth:`facts_of_step` returned."""

    def use_layout(self, layout: BatchLayout) -> None:
        """Read the rows in the batches of the other ranks."""
        self.context.state.layout = layout
        if layout.order:
            cast("TableRows", self.source).use_order(layout.order)

    def put_sums(self, states: list[dict[str, Any]]) -> None:
        """Add the partial epoch metrics of all ranks' states to the sums of this rank."""

    def slices(self) -> dict[str, np.ndarray]:
        """Return this rank's rows of sharded tables, under the same names on all ranks."""
        return {}

    def load_slices(self, slices: SavedSlices) -> None:
        """Load this rank's rows of sharded tables."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the manifest fields of the input, see :func:`input_facts`."""

    @abstractmethod
    def left(self) -> np.ndarray | None:
        """Return the ids of this worker's remaining rows in the epoch; None if rows have no ids."""


class WorkerCheckpointer(Checkpointer[dict[str, Any]]):
    """Checkpoints and resume in a worker; all ranks call its methods together.

    Parameters
    ----------
    context : FitContext
    hooks : Hooks
    step : WorkerStep
    writer : BackgroundWriter
    """

    def __init__(
        self, context: FitContext, hooks: Hooks, step: WorkerStep, writer: BackgroundWriter
    ):
        self._worker, self._sync = context.worker, context.sync
        self._settings, self._state = context.settings, context.state
        self._hooks, self._step, self._writer = hooks, step, writer
        self._warn = context.warn
        self._directory: CheckpointDirectory | None = None  # None sends the snapshots to the driver
        self.keeps_end = context.settings.run_url is not None
        self._checkpoint: str | None = None  # name of the newest checkpoint, on rank 0
        self._saved: dict[str, Any] | None = None  # position of the newest checkpoint
        self._next_vote = self._voted_step = 0  # steps of the votes to leave
        self._voted_at = time.monotonic()
        self._guard = step.guard

    # -- the start -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the driver's state, or the initial model of rank 0, on every rank.

        Raises
        ------
        UsageError
            On rank 0, if the worker cannot read the driver's folder.
        """
        settings, rank, state, step = self._settings, self._sync.rank, self._state, self._step
        record = self._sync.end_recording()
        if settings.run_url is not None:
            self._directory = CheckpointDirectory(settings.run_url, settings.keep)
            self._directory.pinned = settings.pinned_checkpoint
            if rank == 0 and not self._directory.is_shared():
                raise UsageError(
                    f"The worker on {self._worker.host} cannot read model_dir "
                    f"{settings.run_url!r}; pass a folder that the driver and all workers share",
                    code="path-missing",
                    path=settings.run_url,
                )
        if self._worker.group:
            self._sync.replay(None)
            self._rejoin(None)
            return
        snapshot = self._agree_on_start()
        files, manifest = snapshot.files, snapshot.manifest
        self._hooks.load(files)
        step.running.restart()
        if snapshot.slices is not None:
            step.load_slices(snapshot.slices)
        self._restore_rank(files.get("rng.pt"), step.put_rank_state)
        state.position = snapshot.position
        if "windows" in manifest and manifest.get("rows") == list(state.layout.rows):
            # window sizes depend on free memory; a resumed run keeps its sizes
            state.layout = replace(state.layout, windows=manifest["windows"])
        saved_order = manifest.get("order")
        if saved_order and state.layout.order and manifest["shuffle"] == state.layout.shuffle:
            order = resumed_order(state.layout.order, saved_order)
            state.layout = replace(state.layout, order=order)
            cast("TableRows", step.source).use_order(order)
        elif state.layout.order and not saved_order and state.position.global_step:
            self._finish_pass_of_parts(manifest)
        if state.position.batch and not state.position.partial:
            self._restore_epoch(snapshot)
        if self._guard is not None and record is not None and rank == 0:
            publish_record(self._worker.channel, record)

    def rejoin(self, error: PeerLost) -> bool:
        if self._guard is None or self._state.remaining is not None:
            raise error
        return self._rejoin(error)

    def _rejoin(self, error: PeerLost | None) -> bool:
        guard = cast("StepGuard", self._guard)
        is_first = rejoin(self._worker, self._sync, guard, self._hooks, error)
        self._next_vote = self._voted_step = self._state.position.global_step
        return is_first

    def _finish_pass_of_parts(self, manifest: dict[str, Any]) -> None:
        """Finish a pass that has no order of the table; steps_per_epoch may end an epoch in it."""
        layout, position = self._state.layout, self._state.position
        if not getattr(self._settings, "steps_per_epoch", None) or position.partial:
            return
        if not self._current_pass()[1]:
            return
        if all(manifest.get(key) == getattr(layout, key) for key in BatchLayout.facts):
            self._state.remaining = self._epoch_of_parts(layout.rows, first=0)
            return
        self._warn(
            "The checkpoint has no order of the table's rows, since an earlier version or a fit on "
            "other data or with other workers wrote it. With steps_per_epoch, the current pass "
            "over the data may repeat or miss rows; later passes read each row once",
            "order",
        )

    def _current_pass(self) -> tuple[int, int]:
        """Return the number of the current pass over the rows, and its finished batches."""
        layout, position = self._state.layout, self._state.position
        if not getattr(self._settings, "steps_per_epoch", None):
            return position.epoch, position.batch
        rows = sum(layout.rows) if layout.drop_last else sum(layout.rows) + layout.batch_size - 1
        number, done = divmod(position.global_step, max(1, rows // layout.batch_size))
        return int(number), int(done)

    def _restore_epoch(self, snapshot: Checkpoint) -> None:
        """Resume within an epoch, from its next batch or with only its remaining rows."""
        files, manifest, rank = snapshot.files, snapshot.manifest, self._sync.rank
        layout, running = self._state.layout, self._step.running
        snapshot.need(*BatchLayout.facts, "rows_since_merge", "sums")
        if self._step.put_all_ranks(loads(files["rng.pt"])):
            layout.check(manifest, rank)
            return
        has_others = manifest.get("is_rest") or manifest["rows"] != list(layout.rows)
        if manifest.get("order"):
            self._restore_order(manifest)
        elif has_others and snapshot.left is not None:
            layout.check(manifest, rank, rows=False)
            self._state.remaining = self._remaining_batches(snapshot.left)
        else:
            layout.check(manifest, rank)
            if layout.order:  # an earlier version began the epoch, in the order of the parts
                self._state.remaining = self._epoch_of_parts(layout.rows, first=0)
        since_merge, sums = manifest["rows_since_merge"], manifest["sums"]
        if len(sums) == self._sync.world_size:
            self._restore_rank(files.get("buffers.pt"), running.put)
            running.rows, self._state.sums = since_merge[rank], EpochSums(**sums[rank])
            return
        running.rows = sum(since_merge) // self._sync.world_size
        if rank == 0:
            self._state.sums = EpochSums.total(EpochSums(**each) for each in sums)
            self._step.put_sums(loads(files["rng.pt"]))

    def _restore_order(self, manifest: dict[str, OrderFacts]) -> None:
        """Resume after the last row of a table's order."""
        layout, source = self._state.layout, self._step.source
        if not isinstance(source, TableRows):
            layout.check(manifest, self._sync.rank)  # raises an error
            return
        source.check_table(manifest["order"])
        layout.check(manifest, self._sync.rank, rows=False)

    def _remaining_batches(self, left: SavedSlices) -> RemainingBatches:
        """Distribute the epoch's remaining rows over the workers; a collective operation."""
        return self._batches_of_shares(*self._step.source.share_of_remaining(left, self._sync))

    def _batches_of_shares(self, count: int, share: np.ndarray) -> RemainingBatches:
        rows = [int(row[0]) for row in self._sync.all_gather([float(count)])]
        return self._epoch_of_parts(rows, first=self._state.position.batch, share=share)

    def _epoch_of_parts(
        self, rows: Sequence[int], *, first: int, share: np.ndarray | None = None
    ) -> RemainingBatches:
        layout, (epoch, _) = self._state.layout, self._current_pass()
        return RemainingBatches(
            rows, layout.batch_size, layout.drop_last, epoch=epoch, first=first, share=share
        )

    def _agree_on_start(self) -> Checkpoint:
        message = blob = None
        if self._sync.rank == 0:
            blob = self._worker.state()
            if blob is None:
                doc, blob = Checkpoint(Position().to_json(), self._hooks.files()).pack()
            else:
                doc = self._worker.options["snapshot"]
            message = json.dumps(doc).encode()
        doc = json.loads(cast("bytes", self._sync.broadcast(message)))
        return Checkpoint.unpack(doc, cast("bytes", self._sync.broadcast(blob)))

    def _restore_rank(self, data: bytes | None, restore: Callable[..., Any]) -> None:
        """Restore this rank's state if the number of ranks is unchanged."""
        everyone = loads(data) if data else []
        if len(everyone) != self._sync.world_size:
            return
        try:
            restore(everyone[self._sync.rank])
        except UsageError:
            raise
        except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                "The checkpoint was taken by another program: its state of this worker (random "
                f"generators, metrics, callbacks, layers) does not fit: {one_line(error)}; resume "
                "with that program, or load only the weights and fit without resume",
                code="checkpoint-mismatch",
            ) from error

    # -- during the fit --------------------------------------------------------------------------

    def must_leave(self) -> bool:
        """Ask all ranks, about once a second, whether a machine is about to shut down."""
        step = self._state.position.global_step
        if not self._worker.may_leave or step < self._next_vote:
            return False
        now = time.monotonic()
        pace = (now - self._voted_at) / max(1, step - self._voted_step)
        votes = self._sync.all_gather([float(self._worker.is_leaving()), pace])
        slowest = max(seconds for _, seconds in votes)
        self._voted_at, self._voted_step = now, step
        self._next_vote = step + max(1, int(min(VOTE_S / max(slowest, 1e-6), _VOTE_STEPS)))
        return any(is_leaving for is_leaving, _ in votes)

    def leave(self) -> None:
        if self._saved != self._state.position.to_json():
            self.save(is_last=False)
        self._writer.wait()
        raise Leaving

    def save(self, *, is_last: bool, topic: str = "checkpoint") -> None:
        """Write a checkpoint or send it to the driver.

        The state is copied and written by a background thread; the next checkpoint waits for it.
        """
        directory, aside, slices = self._directory, None, self._step.slices()
        if directory is not None:
            left = self._left_everywhere(directory)
            if slices or left:
                aside, described = self._write_slices(directory, {**slices, **left})
        snapshot = self._snapshot()
        self._saved = self._state.position.to_json()
        if aside is not None and snapshot is not None:
            if IDS in described:
                snapshot.manifest[IDS] = described.pop(IDS)
            snapshot.manifest["slices"] = described

        if snapshot is None:
            return
        if directory is None:
            self._worker.send(topic, *snapshot.pack())
            return

        def write(directory: CheckpointDirectory, snapshot: Checkpoint) -> None:
            try:
                self._checkpoint = directory.write(snapshot, aside)
            except UsageError:
                if is_last and aside is None:  # keep the trained state
                    self._worker.send(_UNSAVED, *snapshot.pack())
                raise

        self._writer.start(partial(write, directory, snapshot))

    def _left_everywhere(self, directory: CheckpointDirectory) -> dict[str, np.ndarray]:
        """Return this worker's remaining row ids by array name; empty unless all ranks have ids."""
        if not self._state.position.batch:
            return {}
        left = self._step.left() if directory.is_shared() else None
        if all(row[0] for row in self._sync.all_gather([float(left is not None)])):
            return {IDS: cast("np.ndarray", left)}
        return {}

    def _write_slices(
        self, directory: CheckpointDirectory, slices: dict[str, np.ndarray]
    ) -> tuple[str, dict[str, list[dict[str, Any]]]]:
        """Write this rank's slices; return the common folder and the descriptions of all slices."""
        aside = None
        if self._sync.rank == 0:
            self._writer.wait()  # it removes unfinished folders
            name = checkpoint_name(Checkpoint(self._state.position.to_json()))
            aside = directory.prepare(name).encode()
        folder = cast("bytes", self._sync.broadcast(aside)).decode()
        described = directory.write_slices(folder, slices, self._sync.rank)
        everyone = all_gather_json(self._sync, described)
        return folder, {name: [each[name] for each in everyone] for name in slices}

    def finish(self, is_changed: bool) -> dict[str, Any]:
        self._state.position.end_fit(self._state.stop_at)
        if is_changed or self._directory is None or self._saved != self._state.position.to_json():
            self.save(is_last=True, topic="final")
        self._writer.wait()
        return {"checkpoint": self._checkpoint}

    def _snapshot(self) -> Checkpoint | None:
        """Return the whole state on rank 0, None on other ranks; a collective operation."""
        sync, state, step, running = self._sync, self._state, self._step, self._step.running
        position = state.position
        manifest = {**position.to_json(), **vars(state.layout), **step.facts()}
        files = {"rng.pt": sync.gather(dumps(step.rank_state()))}
        is_rest = False
        if state.remaining is not None:
            number, done = self._current_pass()
            if done and state.remaining.epoch == number:
                manifest["order"] = None
                is_rest = state.remaining.share is not None
        if position.batch:
            everyone = sync.all_gather([*astuple(state.sums), float(running.rows)])
            manifest["sums"] = [EpochSums(*values[:-1]).to_json() for values in everyone]
            manifest["rows_since_merge"] = [int(values[-1]) for values in everyone]
            manifest["is_rest"] = is_rest
            if sync.world_size > 1:
                files["buffers.pt"] = sync.gather(dumps(running.local_values()))
        with running.merged():
            shared = self._hooks.files() if sync.rank == 0 else {}
        if sync.rank != 0:
            return None
        gathered = cast("dict[str, list[bytes]]", files)  # None on the other ranks
        packed = {name: dumps([loads(d) for d in data]) for name, data in gathered.items()}
        return Checkpoint(manifest, packed | shared)
