"""A trial as Ray Tune runs it, and the actor that gives trials their work and keeps their models.

The keeper lives on the driver's machine: it hands out the reference of the job, which is in Ray's
object store once, and writes the weights that trials send where the driver can read them.  So no
directory needs to be shared between machines.
"""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import ray
from ray import tune

from bigdl.common.errors import WorkerLost
from bigdl.orca.automl.search.folders import write_whole
from bigdl.orca.automl.search.ray_team import Team
from bigdl.orca.automl.search.trial import TrialRun

__all__ = ["KEEPER", "Keeper", "TuneTrial"]

KEEPER = "bigdl_keeper"
"""The entry of Tune's configurations that names the keeper."""

_STATE = "state.pkl"


class Keeper:
    """What the trials of a search have in common; an actor."""

    def __init__(self, folder: str, job: list):
        self._folder, self._job = Path(folder), job
        self._numbers: dict[str, int] = {}

    def job(self) -> list:
        """The reference of the job, in a list, so that it stays one."""
        return self._job

    def name(self, trial_id: str, number: int) -> None:
        """Say which trial one of Tune's is."""
        self._numbers[trial_id] = number

    def save(self, trial_id: str, weights: bytes) -> None:
        """Keep the weights of a trial's best epoch."""
        write_whole(self._folder / f"{self._numbers[trial_id]:05}", weights)


class TuneTrial(tune.Trainable):
    """One trial; a step is an epoch.

    What fails in user code is a result, too: ``failure`` holds the traceback.  A trial of several
    workers is run by a :class:`~bigdl.orca.automl.search.ray_team.Team`, to which this process
    belongs.
    """

    def setup(self, config):
        self._team = None
        self._begin(config)

    def reset_config(self, new_config):
        self._begin(new_config)
        return True

    def _begin(self, config):
        config = dict(config)
        self._keeper = ray.get_actor(config.pop(KEEPER))
        self._values, self._run = config, None

    def step(self):
        try:
            step = self._started().step()
            if step.is_best:
                ray.get(self._keeper.save.remote(self.trial_id, self._run.model.weights()))
        except WorkerLost:  # Tune hears of it as of the loss of this process
            raise
        except Exception:
            self._disband()  # who knows what its other workers wait for
            failure = {"failure": traceback.format_exc(), "done": True}
            return {**dict.fromkeys(self._names(), float("nan")), **failure}
        figures = dict(zip(self._names(), step.figures, strict=True))
        return {**figures, "step": step, "done": step.is_last}

    def save_checkpoint(self, checkpoint_dir):
        state = {**self._started().state(), "trial": self.trial_id}
        Path(checkpoint_dir, _STATE).write_bytes(pickle.dumps(state))

    def load_checkpoint(self, checkpoint):
        state = pickle.loads(Path(checkpoint, _STATE).read_bytes())
        if state.pop("trial") != self.trial_id:
            state["best"] = None  # the weights of that epoch are another trial's
        self._started().restore(state)

    def cleanup(self):
        self._disband()
        self._run = None

    def _started(self) -> TrialRun | Team:
        if self._run is None:
            reference = ray.get(self._keeper.job.remote())
            self._job = ray.get(reference[0]).opened()
            if self._job.workers == 1:
                self._run = TrialRun(self._job, self._values)
            else:
                self._team = self._team or Team(self._job.workers)
                self._team.begin(reference, self._job, self._values)
                self._run = self._team
        return self._run

    def _disband(self):
        if self._team is not None:
            self._team.close()
            self._team = None

    def _names(self):
        return [metric.name for metric in self._job.goal.metrics]
