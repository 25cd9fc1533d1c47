"""A fit: its settings, the epochs of a worker, and the driver's retries, progress and state.

A :class:`FitLoop` closes epochs and asks the triggers.  A :class:`WorkerLoop` runs in a worker and
makes the steps itself.  The ``ParameterLayerLoop`` of ``bigdl.orca.learn.parameter_layer_fit`` runs
in the driver and lets the ranks of the parameter layer make them.

:class:`TrainingSession` is what an Estimator carries from one fit to the next.  After every
:class:`~bigdl.common.errors.WorkerLost` it asks the :class:`FailurePolicy`; what user code raised
is never retried and never asked about.
"""

import contextlib
import json
import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.errors import UsageError, WorkerLost, one_line
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.engine import Engine, Leaving
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.jobs import NoRows, WorkersMoved
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.worker import Worker
from bigdl.training.batches import BatchLayout, BatchSource, all_gather_json
from bigdl.training.checkpoint import (
    BackgroundWriter,
    Checkpoint,
    CheckpointDirectory,
    checkpoint_name,
    read_checkpoint,
)
from bigdl.training.figures import EpochSums, headline
from bigdl.training.position import EveryEpoch, Goal, Position, Trigger, TriggerState
from bigdl.training.progress import Progress, progress_of
from bigdl.training.rest import IDS, RestOfEpoch
from bigdl.training.slices import SavedSlices
from bigdl.training.state import RunningState, dumps, loads

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger("bigdl.orca")

_VOTE_S, _VOTE_STEPS = 1.0, 10  # between two votes, whichever is less
_UNSAVED = "unsaved"  # topic of a final state that could not be written
_WARNING = "warning"  # begin of the topics of what workers say to the user


@dataclass
class RunSettings:
    """Arguments of ``fit`` that do not depend on the framework, as the workers get them.

    Attributes
    ----------
    goal : Goal
        Where to stop; epochs and steps are counted on from fit to fit.
    batch_size : int
        Rows of a batch over all workers together.
    seed : int
        Set by :meth:`TrainingSession.fit`: what it was given, else the seed of the fits before.
    shuffle, drop_last : bool
    checkpoint_trigger : Trigger or None
        When to take a checkpoint before the end.
    end_trigger : Trigger or None
        When to stop before the goal. It sees losses and scores at the end of epochs only, since
        those of a batch differ between the workers.
    run_url : str or None
        Folder for checkpoints; None sends them to the driver.
    keep : int
        How many checkpoints stay in that folder.
    pinned_checkpoint : str or None
        Name of a checkpoint that must not be removed during the fit, which reads slices from it.
    data_version : object
        What the Feed says of its version; checkpoints name it.
    data_identity : object
        What the Feed says of its rows beside their name; checkpoints compare it.
    parameter_layer : bigdl.orca.learn.parameter_layer_fit.loop.ParameterLayerOptions, optional
        Of a fit by the parameter layer.
    """

    goal: Goal
    batch_size: int
    seed: int = 0
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    checkpoint_trigger: Trigger | None = field(default_factory=EveryEpoch, kw_only=True)
    end_trigger: Trigger | None = field(default=None, kw_only=True)
    run_url: str | None = field(default=None, kw_only=True)
    keep: int = field(default=2, kw_only=True)
    pinned_checkpoint: str | None = field(default=None, kw_only=True)
    data_version: Any = field(default=None, kw_only=True)
    data_identity: Any = field(default=None, kw_only=True)
    parameter_layer: Any = field(default=None, kw_only=True)


class TrainingSession:
    """Runs the fits of an Estimator with their retries, and keeps its state between calls.

    Parameters
    ----------
    model_dir : str, optional
        Folder for checkpoints.
    sync : type
        Class of the GradientSync.
    keep : int
        How many of the newest checkpoints stay in `model_dir`.

    Attributes
    ----------
    snapshot : Checkpoint or None
        What the last fit or load left.
    """

    def __init__(self, model_dir: str | None, sync: type[GradientSync], keep: int = 2):
        self.snapshot: Checkpoint | None = None
        self._model_dir = model_dir
        self._sync, self._keep = sync, keep
        self._seed: int | None = None
        self._lock = threading.RLock()  # of what trains or replaces the state
        self._run: CheckpointDirectory | None = None  # where the checkpoints of this run are
        self._is_resumed = False  # whether the snapshot is as `resume` found it
        # where the last fit ended; the run that was resumed may be further
        self._epochs = self._steps = 0

    @property
    def position(self) -> Position:
        return Position() if self.snapshot is None else self.snapshot.position

    @property
    def seed(self) -> int:
        """The seed of the next fit that names none; chosen at random once."""
        if self._seed is None:
            self._seed = secrets.randbits(31)
        return self._seed

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other thread trains or loads; the state would be that of the last one."""
        if not self._lock.acquire(blocking=False):
            logger.warning(
                "Another thread trains this Estimator: this call waits, and goes on from where "
                "that one ends; use an Estimator of its own in each thread to train them at the "
                "same time"
            )
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def take(self, snapshot: Checkpoint) -> None:
        """Go on from a state that was loaded."""
        with self._alone():
            self._resume(snapshot)
            self._epochs = self.position.epochs_with_figures
            self._steps = self.position.global_step

    def fit(
        self,
        engine: Engine,
        feed: Any,
        program_of: Callable[[Any], Callable],
        settings: RunSettings,
        *,
        seed: int | None,
        resume: str | None,
        policy: FailurePolicy,
        progress: str,
    ) -> list[dict]:
        """Train to ``settings.goal``, which counts from the end of the last fit.

        Parameters
        ----------
        engine : bigdl.runtime.engine.Engine
        feed : bigdl.orca.data.feeds.group.FeedGroup
            ``data`` and perhaps ``validation``.
        program_of : callable
            Returns the program that the workers run, with settings that are complete.
        settings : RunSettings
        progress : str
            A form of :func:`~bigdl.training.progress.progress_form`.

        Returns
        -------
        list of dict
            Figures of the epochs of this fit.
        """
        with self._alone():
            return self._fit(engine, feed, program_of, settings, seed, resume, policy, progress)

    def _fit(
        self, engine, feed, program_of, settings, seed, resume, policy, progress
    ) -> list[dict]:
        if resume is None:
            self._is_resumed = False
            self._epochs, self._steps = self.position.epochs_with_figures, self.position.global_step
        else:
            self._load_resumed(resume)
            manifest = {} if self.snapshot is None else self.snapshot.manifest
            of_data = manifest.get("data"), manifest.get("data_identity")
            if feed is not None and any(of_data):
                feed = feed.at(*of_data)
        first, goal = self._epochs, settings.goal
        goal = Goal(
            None if goal.epochs is None else self._epochs + goal.epochs,
            None if goal.steps is None else self._steps + goal.steps,
            first,
        )
        end = None if resume is None else self.position.end_of(goal)
        if end is None:
            if seed is not None:
                self._seed = seed
            start = self.snapshot
            if self._is_resumed and start is not None:  # goes on inside the interrupted epoch
                start = replace(start, manifest={**start.manifest, "partial": None})
            self._choose_run()
            known = (None, None) if feed is None else (feed.version, feed.identity)
            version, identity = known
            settings = replace(
                settings,
                goal=goal,
                seed=self.seed,
                data_version=version,
                data_identity=identity,
            )
            if self._run is not None:
                settings = replace(settings, run_url=self._run.url, keep=self._keep)
                if start is not None and start.slices is not None:
                    settings = replace(settings, pinned_checkpoint=checkpoint_name(start))
            elif policy.max_failures == 0:
                # nobody would use the checkpoints
                settings = replace(settings, checkpoint_trigger=None)
            program = program_of(settings)
            shown = progress_of(progress)
            shown.start(engine.num_workers)
            try:
                self.snapshot = self._attempt_until_done(
                    engine, feed, program, start, policy, shown
                )
            finally:
                shown.close()
            self._is_resumed = False
            end = self.position.epochs_with_figures
            shown.finish(self.position.figures(first, end))
        figures = self.position.figures(first, end)
        self._epochs = end
        self._steps = figures[-1]["global_step"] if figures else self.position.global_step
        return figures

    def _load_resumed(self, resume) -> None:
        """Take over the checkpoint that `resume` names, if there is one."""
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
            logger.info("No checkpoint below %s: the training starts afresh", self._model_dir)
            return
        name, snapshot = latest
        if self.snapshot is None or name > checkpoint_name(self.snapshot):
            self._run, self._is_resumed = run, True
            self._resume(snapshot)
            logger.info("The training goes on from %s/%s", run.url, name)

    def _resume(self, snapshot):
        self.snapshot = snapshot
        self._seed = snapshot.manifest.get("seed", self._seed)

    def _choose_run(self) -> None:
        """Take a run's folder that holds nothing beyond the state to start from."""
        if self._model_dir is None:
            return
        here = "" if self.snapshot is None else checkpoint_name(self.snapshot)
        # a fit that failed may have left checkpoints that are ahead of this one
        if self._run is None or self._run.newest() > here:
            self._run = CheckpointDirectory.create(self._model_dir)

    def _attempt_until_done(
        self, engine, feed, program, start, policy, progress: Progress
    ) -> Checkpoint:
        """Run the program from `start` until it has ended or the policy gives up."""
        kept: dict[str, Any] = {"checkpoint": start}  # the newest of each topic
        warned: set[str] = set()

        def on_event(topic, value):
            if topic == "progress":
                progress.update(value)
            elif topic == "message":
                doc, blob = value
                if not doc["topic"].startswith(_WARNING):
                    kept[doc["topic"]] = Checkpoint.unpack(doc, blob)
                    return
                # of several workers and about one subject the first
                what = doc["text"] if doc["topic"] == _WARNING else doc["topic"]
                if what not in warned:
                    warned.add(what)
                    logger.warning(doc["text"])

        with engine.open(program, feed) as opened:
            while True:
                options, state = {}, None
                if kept["checkpoint"] is not None:
                    doc, state = kept["checkpoint"].pack()
                    options = {"snapshot": doc}
                try:
                    results = opened.attempt(options, state, on_event)
                    break
                except NoRows:
                    raise UsageError("The training data has no rows", code="data-empty") from None
                except UsageError as error:
                    if _UNSAVED not in kept:
                        raise
                    self.snapshot = kept[_UNSAVED]
                    raise error.with_message(
                        f"{error}; what was trained is kept in this Estimator, so save() can "
                        "write it elsewhere"
                    ) from None
                except WorkerLost as error:
                    saved = None if self._run is None else self._run.latest()
                    latest = kept["checkpoint"] = saved[1] if saved else kept["checkpoint"]
                    is_moved = isinstance(error, WorkersMoved)
                    reason = "no step is lost" if is_moved else policy.allow_retry(error)
                    where = Position() if latest is None else latest.position
                    logger.warning("%s; going on from %s (%s)", error, where, reason)
        name = results[0]["checkpoint"]
        if name is None:
            return kept["final"]
        return cast("CheckpointDirectory", self._run).read(name)


def input_facts(settings: RunSettings, inputs: list | None) -> dict:
    """Return what the manifest of a checkpoint says of the input.

    Parameters
    ----------
    settings : RunSettings
    inputs : list or None
        Types of the model's inputs, as in ``BatchSource.types``.
    """
    known = {"data": settings.data_version, "data_identity": settings.data_identity}
    return {"inputs": inputs, **{key: each for key, each in known.items() if each is not None}}


class FitLoop(ABC):
    """Epochs of a fit, its end and its checkpoints, as triggers ask for them."""

    settings: RunSettings
    position: Position
    stop = False  # whether a callback or a trigger has ended the fit
    _warned: tuple[str, ...] = ()  # what the user was told of
    _last: dict | None = None  # what is shown of the epoch that was finished last
    _first: dict | None = None  # the same of the first epoch
    _saved: dict | None = None  # position of the newest checkpoint

    # -- what the framework says -----------------------------------------------------------------

    @abstractmethod
    def fit(self) -> Any:
        """Train to the end; returns what :meth:`_finish` does."""

    @abstractmethod
    def _epoch(self) -> None:
        """Go on to the end of the epoch."""

    @abstractmethod
    def _files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that are the same for all ranks."""

    @abstractmethod
    def _load(self, files: dict[str, bytes]) -> None:
        """Take over what :meth:`_files` of any backend returned, or the model's file alone."""

    # -- the fit -------------------------------------------------------------------------------

    def _pull(self) -> Any:
        """Bring the model of this process up to date where other processes train it."""
        return None

    def _run_epochs(self) -> None:
        """Make all epochs."""
        if self.position.partial:  # an earlier fit ended inside this epoch
            self._close_epoch(self.position.partial)
        while not self._is_over():
            self._epoch()

    @abstractmethod
    def _finish(self) -> Any:
        """Leave the final state where the driver finds it."""

    @abstractmethod
    def _save_checkpoint(self) -> None:
        """Keep the state as it is now."""

    def _is_over(self) -> bool:
        """Return True if the fit ends here, the same on every rank; maybe a collective."""
        return self.settings.goal.is_reached(self.position) or self._is_stopped()

    def _is_stopped(self) -> bool:
        """Return True if a callback or a trigger has ended the fit; maybe a collective."""
        return self.stop

    def _progress(self, epochs: int, steps: int, loss: float | None) -> dict:
        """Return how far the fit is, as :class:`~bigdl.training.progress.Progress` takes it.

        Parameters
        ----------
        epochs : int
            At the end of the fit.
        steps : int
            Of an epoch.
        loss : float or None
        """
        position, first = self.position, self.settings.goal.first
        return {
            "epoch": position.epoch - first,
            "epochs": epochs - first,
            "step": position.batch,
            "steps": steps,
            "loss": loss,
            "first": self._first,
            "last": self._last,
        }

    def _fires(self, trigger: Trigger | None, state: TriggerState) -> bool:
        return trigger is not None and bool(trigger(state))

    def _close_epoch(self, entry: dict) -> None:
        """Count an epoch that is whole, with its figures."""
        self.position.close_epoch(entry)
        number = entry["epoch"] - self.settings.goal.first
        self._last = {**headline(entry), "epoch": number}
        self._first = self._first or self._last

    def _end_epoch(self, entry: dict, is_whole: bool, **figures: Any) -> None:
        """Keep the figures of an epoch; one that is whole is closed and triggers are asked.

        Parameters
        ----------
        entry : dict
        is_whole : bool
        **figures
            See :meth:`_apply_triggers`.
        """
        loss = figures.get("loss")
        if loss is not None and math.isnan(loss):
            self._warn_of_nan(f"The loss of epoch {entry['epoch']} is nan")
        if is_whole:
            self._close_epoch(entry)
            self._apply_triggers(epoch_finished=True, **figures)
        else:
            self.position.partial = entry

    def _warn_of_nan(self, text: str) -> None:
        """Tell the user once that the loss is no number."""
        self._warn_once(text, "nan")

    def _warn_once(self, text: str, about: str) -> None:
        """Tell the user something, once about each subject."""
        if about not in self._warned:
            self._warned = (*self._warned, about)
            self._warn(text, about)

    def _warn(self, text: str, about: str) -> None:
        logger.warning(text)

    def warn_once(self, text: str) -> None:
        """Warn the user; of equal texts of a fit only the first is shown."""
        logger.warning(text)

    def _apply_triggers(self, **figures: Any) -> None:
        """Take a checkpoint after a step, or stop there, if triggers say so.

        Parameters
        ----------
        **figures
            At the end of an epoch, see :class:`~bigdl.training.position.TriggerState`.
        """
        state = TriggerState(self.position.epoch, self.position.global_step, **figures)
        if self._fires(self.settings.end_trigger, state):
            self.stop = True
        if self._fires(self.settings.checkpoint_trigger, state):
            self._save_checkpoint()


class WorkerLoop(FitLoop):
    """Checkpoints, resume and ends of epochs in a worker; all ranks call its methods together."""

    worker: Worker
    sync: GradientSync
    _running: RunningState
    _layout: BatchLayout
    _types: list | None  # of the training data, see BatchSource
    _sums: EpochSums
    _directory: CheckpointDirectory | None = None  # without one the snapshots go to the driver
    _checkpoint: str | None = None  # name of the newest one, on rank 0
    _rest: RestOfEpoch | None = None
    _next_vote = _voted_step = 0  # steps of the votes to leave
    _voted_at = 0.0

    # -- what the framework keeps ----------------------------------------------------------------

    @abstractmethod
    def _own(self) -> dict:
        """Return the state that is this rank's alone."""

    @abstractmethod
    def _put_own(self, state: dict) -> None:
        """The inverse of :meth:`_own`."""

    def _slices(self) -> "dict[str, np.ndarray]":
        """Return this rank's rows of tables that lie in slices; of the same names on all ranks."""
        return {}

    def _load_slices(self, slices: SavedSlices) -> None:
        """Take over this rank's rows of tables that lie in slices."""

    def _facts(self) -> dict:
        """Return what the manifest of a checkpoint says of the input, JSON-able."""
        return input_facts(self.settings, self._types and self._taken_types(self._types[0]))

    def _taken_types(self, types: list) -> list:
        """Return the types in which the model takes features of the training data's."""
        return types

    @property
    @abstractmethod
    def _source(self) -> BatchSource:
        """The training data of this worker."""

    @abstractmethod
    def _left(self) -> "np.ndarray | None":
        """Ids of the rows that are left of this epoch to this worker; None if there are none."""

    def _put_sums(self, states: list[dict]) -> None:
        """Add up on this rank what :meth:`_own` of all ranks has of an epoch's figures."""

    # -- the start -------------------------------------------------------------------------------

    def _start(self, worker: Worker, sync: GradientSync) -> None:
        """Meet the other workers."""
        self._writer = BackgroundWriter()
        self._voted_at = time.monotonic()
        worker.at_exit(self._writer.wait)  # after the sync has stopped: a peer may wait for it
        sync.start()

    def _exchange(self, known: dict) -> list[dict]:
        """Return what the workers know of their rows, by rank.

        Parameters
        ----------
        known : dict
            Of this worker, JSON-able: ``types`` and ``rows`` of its training data;
            ``validation``, the number of its rows of the validation data, 1 if there is no such
            data; and whatever else the framework needs to know of all workers.
        """
        everyone = all_gather_json(self.sync, known)
        if not sum(each["validation"] for each in everyone):
            raise UsageError(
                "The validation data has no rows", code="data-empty", argument="validation_data"
            )
        self._types = next((each["types"] for each in everyone if each["types"]), None)
        return everyone

    def _restore(self) -> None:
        """Start from the driver's state, or from the model of rank 0: the same on every rank.

        Raises
        ------
        UsageError
            On rank 0, if the worker does not see the folder of the driver.
        """
        settings, rank = self.settings, self.sync.rank
        if settings.run_url is not None:
            self._directory = CheckpointDirectory(settings.run_url, settings.keep)
            self._directory.pinned = settings.pinned_checkpoint
            if rank == 0 and not self._directory.is_shared():
                raise UsageError(
                    f"The worker on {self.worker.host} does not see model_dir "
                    f"{settings.run_url!r}; pass a folder that the driver and all workers share",
                    code="path-missing",
                    path=settings.run_url,
                )
        snapshot = self._agree_on_start()
        files, manifest = snapshot.files, snapshot.manifest
        self._load(files)
        if snapshot.slices is not None:
            self._load_slices(snapshot.slices)
        self._restore_own(files.get("rng.pt"), self._put_own)
        self.position, self._sums = snapshot.position, EpochSums()
        if "windows" in manifest and manifest.get("rows") == list(self._layout.rows):
            # they depend on the memory that was free; a run goes on with those that it had
            self._layout = replace(self._layout, windows=manifest["windows"])
        if self.position.batch and not self.position.partial:
            self._restore_epoch(snapshot)

    def _restore_epoch(self, snapshot: Checkpoint) -> None:
        """Go on within an epoch, with the batches that were to come or with the rows of them."""
        files, manifest, rank = snapshot.files, snapshot.manifest, self.sync.rank
        snapshot.need(*BatchLayout.facts, "rows_since_merge", "sums")
        has_others = manifest.get("is_rest") or manifest["rows"] != list(self._layout.rows)
        if has_others and snapshot.left is not None:
            self._layout.check(manifest, rank, rows=False)
            self._rest = self._rest_of_epoch(snapshot.left)
        else:
            self._layout.check(manifest, rank)
        since_merge, sums = manifest["rows_since_merge"], manifest["sums"]
        if len(sums) == self.sync.world_size:
            self._restore_own(files.get("buffers.pt"), self._running.put)
            self._running.rows, self._sums = since_merge[rank], EpochSums(**sums[rank])
            return
        self._running.rows = sum(since_merge) // self.sync.world_size
        if rank == 0:
            self._sums = EpochSums.total(EpochSums(**each) for each in sums)
            self._put_sums(loads(files["rng.pt"]))

    def _rest_of_epoch(self, left: SavedSlices) -> RestOfEpoch:
        """Share the rows that are left of an epoch among the workers; a collective."""
        count, share = self._source.share_of_rest(left, self.sync)
        rows = [int(row[0]) for row in self.sync.all_gather([float(count)])]
        layout, position = self._layout, self.position
        return RestOfEpoch(
            rows,
            layout.batch_size,
            layout.drop_last,
            epoch=position.epoch,
            first=position.batch,
            share=share,
        )

    def _plan_of_epoch(self, whole: BatchPlan) -> BatchPlan:
        """The batches of this epoch: `whole`, or what another number of workers has left of it."""
        rest = self._rest
        return whole if rest is None or rest.epoch != self.position.epoch else rest

    def _agree_on_start(self) -> Checkpoint:
        message = blob = None
        if self.sync.rank == 0:
            blob = self.worker.state()
            if blob is None:
                doc, blob = Checkpoint(Position().to_json(), self._files()).pack()
            else:
                doc = self.worker.options["snapshot"]
            message = json.dumps(doc).encode()
        doc = json.loads(cast("bytes", self.sync.broadcast(message)))
        return Checkpoint.unpack(doc, cast("bytes", self.sync.broadcast(blob)))

    def _restore_own(self, data: bytes | None, restore: Callable) -> None:
        """Give this rank what it had, if there were as many ranks."""
        everyone = loads(data) if data else []
        if len(everyone) != self.sync.world_size:
            return
        try:
            restore(everyone[self.sync.rank])
        except UsageError:
            raise
        except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                "The checkpoint was taken by another program: what it has of this worker (random "
                f"numbers, figures, callbacks, layers' own state) does not fit: {one_line(error)}; "
                "go on with that program, or load the weights alone and fit without resume",
                code="checkpoint-mismatch",
            ) from error

    # -- on the way ------------------------------------------------------------------------------

    def _warn(self, text: str, about: str) -> None:
        self.worker.send(f"{_WARNING} of {about}", {"text": text}, b"")

    def warn_once(self, text: str) -> None:
        self.worker.send(_WARNING, {"text": text}, b"")

    def _fires(self, trigger: Trigger | None, state: TriggerState) -> bool:
        answer = super()._fires(trigger, state)
        if trigger is not None and not trigger.is_reproducible:  # that of rank 0 counts
            answer = bool(self.sync.all_gather([float(answer)])[0][0])
        return answer

    def _close_epoch(self, entry: dict) -> None:
        super()._close_epoch(entry)
        self._sums = EpochSums()

    def _apply_triggers(self, **figures: Any) -> None:
        super()._apply_triggers(**figures)
        if self.worker.may_leave and self.position.global_step >= self._next_vote:
            self._vote_to_leave()

    def _vote_to_leave(self) -> None:
        """Ask all ranks, every second or more often, if one knows that a machine is about to go."""
        now, step = time.monotonic(), self.position.global_step
        pace = (now - self._voted_at) / max(1, step - self._voted_step)
        votes = self.sync.all_gather([float(self.worker.is_leaving()), pace])
        slowest = max(seconds for _, seconds in votes)
        self._voted_at, self._voted_step = now, step
        self._next_vote = step + max(1, int(min(_VOTE_S / max(slowest, 1e-6), _VOTE_STEPS)))
        if any(is_leaving for is_leaving, _ in votes) and not self._is_over():
            if self._saved != self.position.to_json():
                self._save("checkpoint")
            self._writer.wait()
            raise Leaving

    def _save_checkpoint(self) -> None:
        if self._directory is not None or not self._is_over():
            self._save("checkpoint")  # else the result of the fit is the same state

    def _save(self, topic: str) -> None:
        """Write a checkpoint or send it to the driver.

        The state is copied here and written by a thread; the next checkpoint waits for it.
        """
        directory, aside, slices = self._directory, None, self._slices()
        if directory is not None:
            left = self._left_everywhere(directory)
            if slices or left:
                aside, described = self._write_slices(directory, {**slices, **left})
        snapshot = self._snapshot()
        self._saved = self.position.to_json()
        if aside is not None and snapshot is not None:
            if IDS in described:
                snapshot.manifest[IDS] = described.pop(IDS)
            snapshot.manifest["slices"] = described

        is_last = topic == "final" or self._is_over()

        def write():
            try:
                self._checkpoint = directory.write(snapshot, aside)
            except UsageError:
                if is_last and aside is None:  # what was trained is not lost
                    self.worker.send(_UNSAVED, *snapshot.pack())
                raise

        if snapshot is not None:
            if directory is not None:
                self._writer.start(write)
            else:
                self.worker.send(topic, *snapshot.pack())

    def _left_everywhere(self, directory: CheckpointDirectory) -> "dict[str, np.ndarray]":
        """Return ids of the rows that are left of this epoch, if all ranks can write theirs."""
        if not self.position.batch:
            return {}
        left = self._left() if directory.is_shared() else None
        if all(row[0] for row in self.sync.all_gather([float(left is not None)])):
            return {IDS: cast("np.ndarray", left)}
        return {}

    def _write_slices(
        self, directory: CheckpointDirectory, slices: "dict[str, np.ndarray]"
    ) -> tuple[str, dict[str, list[dict]]]:
        """Write the slices of all ranks at once; returns the folder and their descriptions."""
        aside = None
        if self.sync.rank == 0:
            self._writer.wait()  # it removes folders that are not finished
            name = checkpoint_name(Checkpoint(self.position.to_json()))
            aside = directory.prepare(name).encode()
        folder = cast("bytes", self.sync.broadcast(aside)).decode()
        described = directory.write_slices(folder, slices, self.sync.rank)
        everyone = all_gather_json(self.sync, described)
        return folder, {name: [each[name] for each in everyone] for name in slices}

    def _finish(self) -> dict:
        """Leave the final state where the driver finds it, and say where."""
        self.position.end_fit(self.settings.goal)
        if self._directory is None or self._saved != self.position.to_json():
            self._save("final")
        self._writer.wait()
        return {"checkpoint": self._checkpoint}

    def _snapshot(self) -> Checkpoint | None:
        """Return the whole state, on rank 0."""
        sync, position = self.sync, self.position
        manifest = {**position.to_json(), **vars(self._layout), **self._facts()}
        files = {"rng.pt": sync.gather(dumps(self._own()))}
        if position.batch:
            everyone = sync.all_gather([*self._sums.values(), float(self._running.rows)])
            manifest["sums"] = [EpochSums(*values[:-1]).to_json() for values in everyone]
            manifest["rows_since_merge"] = [int(values[-1]) for values in everyone]
            manifest["is_rest"] = self._rest is not None and self._rest.epoch == position.epoch
            if sync.world_size > 1:
                files["buffers.pt"] = sync.gather(dumps(self._running.own()))
        with self._running.merged():
            shared = self._files() if sync.rank == 0 else {}
        if sync.rank != 0:
            return None
        gathered = cast("dict[str, list[bytes]]", files)  # None on the other ranks
        packed = {name: dumps([loads(d) for d in data]) for name, data in gathered.items()}
        return Checkpoint(manifest, packed | shared)
