"""What an Estimator has trained so far, and the driver's side of a fit."""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from bigdl.common.errors import UsageError, WorkerLost
from bigdl.runtime.jobs import NoRows
from bigdl.training.checkpoint import (
    CheckpointDirectory,
    Snapshot,
    checkpoint_name,
    read_checkpoint,
)
from bigdl.training.failure import FailurePolicy
from bigdl.training.position import Goal, Position
from bigdl.training.progress import ProgressBar
from bigdl.training.run_settings import RunSettings

__all__ = ["Training"]

logger = logging.getLogger("bigdl.orca")


class Training(ABC):
    """The state that an Estimator carries from one call to the next.

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
    snapshot : Snapshot or None
        What the last fit or load left.
    """

    def __init__(self, model_dir: str | None, sync, keep: int = 2):
        self.snapshot: Snapshot | None = None
        self._model_dir = model_dir
        self._sync, self._keep = sync, keep
        self._seed: int | None = None
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

    def take(self, snapshot: Snapshot) -> None:
        """Go on from a state that was loaded."""
        self.snapshot = snapshot
        self._seed = snapshot.manifest.get("seed", self._seed)
        self._epochs, self._steps = self.position.counted, self.position.global_step

    # -- what a framework says -----------------------------------------------------------------

    @abstractmethod
    def weights(self, parts: Any) -> bytes:
        """The model's weights; before the first fit those that it would start from."""

    @abstractmethod
    def _program(self, parts: Any, settings: RunSettings):
        """What the workers run."""

    # -- fit -----------------------------------------------------------------------------------

    def fit(
        self,
        open_job,
        parts: Any,
        settings: RunSettings,
        *,
        seed: int | None,
        resume: str | None,
        policy: FailurePolicy,
        show_progress: bool,
    ) -> list[dict]:
        """Train to ``settings.goal``, which counts from the end of the last fit.

        Parameters
        ----------
        open_job : callable
            ``open_job(program)`` gives the engine's Job.
        parts : ModelParts or bigdl.orca.learn.tf2.training.OnItsWay
        settings : RunSettings

        Returns
        -------
        list of dict
            Figures of the epochs of this fit.
        """
        if resume is None:
            self._is_resumed = False
            self._epochs, self._steps = self.position.counted, self.position.global_step
        else:
            self._load(resume)
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
            if self._is_resumed:  # goes on inside the epoch that was interrupted
                start = Snapshot({**start.manifest, "partial": None}, start.files)
            self._choose_run()
            settings = replace(settings, goal=goal, seed=self.seed)
            if self._run is not None:
                settings = replace(settings, run_url=self._run.url, keep=self._keep)
            elif policy.max_failures == 0:
                settings = replace(settings, trigger=None)  # nobody would use the checkpoints
            program = self._program(parts, settings)
            self.snapshot = self._train(open_job, program, start, policy, show_progress)
            self._is_resumed = False
            end = self.position.counted
        figures = self.position.figures(first, end)
        self._epochs = end
        self._steps = figures[-1]["global_step"] if figures else self.position.global_step
        return figures

    def _load(self, resume) -> None:
        """Take over the checkpoint that `resume` names, if there is one."""
        if not isinstance(resume, str):
            raise UsageError(f'resume should be "auto" or the path of a checkpoint, got {resume!r}')
        if resume != "auto":
            snapshot = read_checkpoint(resume)
            if snapshot is None:
                raise UsageError(
                    f'resume should be "auto" or the path of a checkpoint such as '
                    f"Estimator.latest_checkpoint gives, got {resume!r}"
                )
            self._resume(snapshot)
            self._epochs = self._steps = 0
            return
        if self._model_dir is None:
            raise UsageError('resume="auto" needs model_dir= in Estimator.from_torch')
        run = self._run or CheckpointDirectory.latest_run(self._model_dir)
        found = run.latest() if run is not None else None
        if found is None:
            logger.info("No checkpoint below %s: the training starts afresh", self._model_dir)
            return
        name, snapshot = found
        if self.snapshot is None or name > checkpoint_name(self.snapshot):
            self._run = run
            self._resume(snapshot)
            logger.info("The training goes on from %s/%s", run.url, name)

    def _resume(self, snapshot):
        self.snapshot = snapshot
        self._seed = snapshot.manifest.get("seed", self._seed)
        self._is_resumed = True

    def _choose_run(self) -> None:
        """A run's folder that holds nothing beyond the state to start from."""
        if self._model_dir is None:
            return
        here = "" if self.snapshot is None else checkpoint_name(self.snapshot)
        # a fit that failed may have left checkpoints that are ahead of this one
        if self._run is None or self._run.newest() > here:
            self._run = CheckpointDirectory.create(self._model_dir)

    def _train(self, open_job, program, start, policy, show_progress) -> Snapshot:
        """Run the program from `start` until it has ended or the policy gives up."""
        latest, final = start, None
        bar = ProgressBar(show_progress)

        def on_event(kind, value):
            nonlocal latest, final
            if kind == "progress":
                bar.update(value)
            elif kind == "message":
                doc, blob = value
                if doc["topic"] == "final":
                    final = Snapshot.unpack(doc, blob)
                else:
                    latest = Snapshot.unpack(doc, blob)

        try:
            with open_job(program) as job:
                while True:
                    options, state = {}, None
                    if latest is not None:
                        doc, state = latest.pack()
                        options = {"snapshot": doc}
                    try:
                        results = job.attempt(options, state, on_event)
                        break
                    except NoRows:
                        raise UsageError("The training data has no rows") from None
                    except WorkerLost as error:
                        if self._run is not None:
                            found = self._run.latest()
                            latest = found[1] if found else latest
                        reason = policy.forgive(error)
                        where = Position() if latest is None else latest.position
                        logger.warning("%s; going on from %s (%s)", error, where, reason)
        finally:
            bar.close()
        name = results[0]["checkpoint"]
        return final if name is None else self._run.read(name)
