"""The trials of a search on Ray, by Ray Tune.

Tune starts trials, gives them their resources and stops those that its scheduler ends.  It asks a
:class:`_Proposer` for configurations and tells a :class:`_Recorder` their results; both write to
the :class:`~bigdl.orca.automl.records.Records`, which alone know how the search stands.

A :class:`SearchActor` lives on the driver's machine: it hands out the reference of the job, which
is in Ray's object store once, and writes the weights that trials send where the driver can read
them.  So no directory needs to be shared between machines.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import shutil
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.search import SearchAlgorithm, Searcher, SearchGenerator
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError, WorkerLost, first_line
from bigdl.orca.automl.ray_workers import TrialWorkers
from bigdl.orca.automl.records import Records
from bigdl.orca.automl.strategy import Strategy, draws_from_ray
from bigdl.orca.automl.trial import Job
from bigdl.training.checkpoint import write_bytes
from bigdl.tuning.study import quieter, record_process

if TYPE_CHECKING:
    from optuna.trial import Trial

_FOLDER = "ray"
_STATE = "state.pkl"
_ACTOR = "bigdl_search_actor"  # the entry of Tune's configurations that names the SearchActor
_RESOURCES = {"cpu": "CPU", "gpu": "GPU"}
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the records are ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the user's functions
}

_Running = dict[str, tuple["Trial", dict[str, Any]]]
"""Trials that Tune runs and the configurations that they began with, by Tune's ids of trials."""


def run_on_ray(
    records: Records,
    job: Job,
    strategy: Strategy,
    bundles: Sequence[Mapping[str, float]],
    *,
    concurrency: int | None,
    remote_dir: str | None,
) -> None:
    """Run the trials that wait in the records.

    Parameters
    ----------
    records : Records
    job : Job
    strategy : Strategy
    bundles : list of dict
        The resources of each worker of a trial.
    concurrency : int, optional
        Trials at the same time.
    remote_dir : str, optional
        Where Tune keeps checkpoints.

    Raises
    ------
    UsageError
        If the arguments are wrong.
    KeyboardInterrupt
        When the user interrupts; what is finished is recorded.
    """
    scheduler = strategy.ray_scheduler(job.epochs)
    searcher = strategy.ray_searcher(records.space, records.goal)
    running: _Running = {}
    storage = remote_dir or str(records.folder)
    with (
        _search_actor(records, job) as (actor, name),
        EnvContext(_SETTINGS),
        quieter(logging.CRITICAL, "ray.tune"),  # its reports of single trials
        _signals(),
    ):
        proposer = _Proposer(records, running, actor, name, searcher, concurrency)
        first = records.goal.first
        # a scheduler that was made with a metric does not take another one
        has_metric = getattr(scheduler, "metric", None)
        goal: dict[str, Any] = {} if has_metric else {"metric": first.name, "mode": first.mode}
        tuner = tune.Tuner(
            tune.with_resources(_TuneTrial, _request(bundles)),
            tune_config=tune.TuneConfig(
                **goal,
                search_alg=_Algorithm(proposer),
                scheduler=scheduler,
                num_samples=-1,  # the proposer says when there are no more
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name=_FOLDER,
                storage_path=storage,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[_Recorder(records, running, scheduler)],
            ),
        )
        try:
            tuner.fit()
        except tune.TuneError as error:
            raise UsageError(f"Ray Tune ended the search: {first_line(error)}") from error
        finally:
            if remote_dir is None:
                shutil.rmtree(Path(storage) / _FOLDER, ignore_errors=True)
    if records.waiting() or running:  # Tune has heard Ctrl-C and returned
        raise KeyboardInterrupt


def check_room(bundles: Sequence[Mapping[str, float]]) -> None:
    """Refuse a trial that the nodes have no room for; Tune would wait for one.

    Parameters
    ----------
    bundles : list of dict
        The resources of each worker of a trial, which are the same ones.
    """
    needed = _in_names_of_ray(bundles[0])
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(
        min((int(node.get(k, 0) / v + 1e-9) for k, v in needed.items()), default=len(bundles))
        for node in nodes
    )
    if room >= len(bundles):
        return
    largest = {k: max((node.get(k, 0) for node in nodes), default=0) for k in needed}
    if len(bundles) > 1:
        raise UsageError(
            f"A trial has {len(bundles)} workers, each of which takes {needed}, but the nodes of "
            f"Ray have room for {room}; the most that a node has is {largest}; ask for less in "
            "resources_per_trial, or for fewer workers in workers_per_trial"
        )
    raise UsageError(
        f"A trial takes {needed}, but no node of Ray has that; the most that a node has is "
        f"{largest}; ask for less in resources_per_trial"
    )


def _in_names_of_ray(bundle: Mapping[str, float]) -> dict[str, float]:
    return {_RESOURCES.get(name, name): amount for name, amount in bundle.items() if amount}


def _request(bundles: Sequence[Mapping[str, float]]) -> Any:
    """Return the resources of a trial as Tune reserves them: the first worker's are its own."""
    if len(bundles) == 1:
        return dict(bundles[0])
    return tune.PlacementGroupFactory([_in_names_of_ray(b) for b in bundles], strategy="PACK")


def _name(trial: Any) -> str:
    return f"trial_{trial.trial_id}"


@contextlib.contextmanager
def _search_actor(records: Records, job: Job) -> Iterator[tuple[Any, str]]:
    """Start the actor of a search; its job leaves Ray's object store with it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"bigdl-search-{secrets.token_hex(8)}"
    make = ray.remote(SearchActor).options(name=name, num_cpus=0, scheduling_strategy=here)
    actor: Any = make.remote(str(records.weights_folder.resolve()), [ray.put(job)])
    try:
        yield actor, name
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            ray.kill(actor)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Restore the handlers of signals, which Tune leaves changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


# The driver's side -------------------------------------------------------------------------------


class _Proposer(Searcher):
    """Gives Tune the configurations of the trials that wait in the records.

    Parameters
    ----------
    records : Records
    running : dict
    actor : SearchActor
    name : str
        Of the actor.
    searcher : ray.tune.search.Searcher, optional
        Proposes draws in place of the records, and hears of results.
    concurrency : int, optional
        Trials at the same time.
    """

    def __init__(
        self,
        records: Records,
        running: _Running,
        actor: Any,
        name: str,
        searcher: Searcher | None,
        concurrency: int | None,
    ):
        super().__init__()
        self._records, self._running, self._searcher = records, running, searcher
        self._actor, self._name, self._concurrency = actor, name, concurrency

    def suggest(self, trial_id: str) -> Any:
        records = self._records
        if not records.waiting():
            # a trial that runs may be lost, and then waits again
            return None if self._running else Searcher.FINISHED
        if self._concurrency and len(self._running) >= self._concurrency:
            return None
        suggested = None
        if self._searcher is not None:
            suggested = self._searcher.suggest(trial_id)
            if suggested is None:  # it wants to know of those that run first
                return None
        trial = records.study.ask()
        record_process(trial)
        if suggested is None:
            draws = records.proposal(trial)
        else:
            draws = draws_from_ray(records.space.domains, suggested)
        config = records.set_draws(trial, draws)
        ray.get(self._actor.set_number.remote(trial_id, trial.number))
        self._running[trial_id] = trial, config
        return {**config, _ACTOR: self._name}

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        if self._searcher is not None:
            self._searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        if self._searcher is not None:
            failed = error or not result or "failure" in result
            self._searcher.on_trial_complete(trial_id, None if failed else result, failed)

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        return True


class _Algorithm(SearchAlgorithm):
    """A _Proposer for Tune, whatever the scheduler is: PBT refuses a ``SearchGenerator``.

    Nothing has to be saved: the records are written as they are made.
    """

    def __init__(self, proposer: _Proposer):
        self._generator = SearchGenerator(proposer)
        for name in ("add_configurations", "next_trial", "on_trial_result", "on_trial_complete"):
            setattr(self, name, getattr(self._generator, name))

    @property
    def total_samples(self) -> int:
        return self._generator.total_samples

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        return True

    def is_finished(self) -> bool:
        return self._finished or self._generator.is_finished()


class _Recorder(tune.Callback):
    """Writes down what Tune's trials report.

    Parameters
    ----------
    records : Records
    running : dict
    scheduler : ray.tune.schedulers.TrialScheduler or None
        May give names other values on the way, as PBT does.
    """

    def __init__(self, records: Records, running: _Running, scheduler: Any):
        self._records, self._running = records, running
        self._changing = list(getattr(scheduler, "_hyperparam_mutations", None) or ())
        self._epochs: dict[str, int] = {}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        step = result.get("step")
        if trial.trial_id not in self._running or step is None:
            return
        record, began = self._running[trial.trial_id]
        if step.epoch > self._epochs.get(trial.trial_id, 0):  # one may go back to a checkpoint
            self._epochs[trial.trial_id] = step.epoch
            self._records.report(record, step)
        changed = {k: trial.config[k] for k in self._changing if trial.config[k] != began.get(k)}
        if changed:
            record.set_user_attr("changed", changed)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._running:
            return
        record, _ = self._running.pop(trial.trial_id)
        last = trial.last_result or {}
        step = last.get("step")
        if "failure" in last or step is None:
            error = last.get("failure", "The trial ended before its first epoch")
            self._records.fail(record, error)
        else:
            self._records.end(record, step, stopped=not step.is_last)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Let the trial of a process that was lost be tried again, once."""
        if trial.trial_id in self._running:
            record, _ = self._running.pop(trial.trial_id)
            error = trial.get_error() or "The process of the trial was lost"
            self._records.mark_lost(record, error)


# The workers' side -------------------------------------------------------------------------------


class SearchActor:
    """The job of a search and the weights of its trials; an actor."""

    def __init__(self, folder: str, job: list):
        self._folder, self._job = Path(folder), job
        self._numbers: dict[str, int] = {}

    def job(self) -> list:
        """Return the reference of the job, in a list, so that it stays one."""
        return self._job

    def set_number(self, trial_id: str, number: int) -> None:
        """Set the number in the records of one of Tune's trials."""
        self._numbers[trial_id] = number

    def save(self, trial_id: str, weights: bytes) -> None:
        """Keep the weights of a trial's best epoch."""
        write_bytes(str(self._folder / f"{self._numbers[trial_id]:05}"), weights)


class _TuneTrial(tune.Trainable):
    """One trial of Tune; a step is an epoch.

    What fails in user code is a result, too: ``failure`` holds the traceback.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._workers = TrialWorkers()
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._values = dict(new_config)
        self._actor = ray.get_actor(self._values.pop(_ACTOR))
        self._is_begun = False
        return True

    def step(self) -> dict[str, Any]:
        try:
            step = self._begun().step()
            if step.is_best:
                ray.get(self._actor.save.remote(self.trial_id, self._workers.weights()))
        except WorkerLost:  # Tune hears of it as of the loss of this process
            raise
        except Exception:
            self._workers.close()  # who knows what its other workers wait for
            failure = {"failure": traceback.format_exc(), "done": True}
            return {**dict.fromkeys(self._workers.job.goal.names, float("nan")), **failure}
        figures = dict(zip(self._workers.job.goal.names, step.figures, strict=True))
        return {**figures, "step": step, "done": step.is_last}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {**self._begun().state(), "trial": self.trial_id}
        Path(checkpoint_dir, _STATE).write_bytes(pickle.dumps(state))

    def load_checkpoint(self, checkpoint: Any) -> None:
        state = pickle.loads(Path(checkpoint, _STATE).read_bytes())
        if state.pop("trial") != self.trial_id:
            state["best"] = None  # the weights of that epoch are another trial's
        self._begun().restore(state)

    def cleanup(self) -> None:
        self._workers.close()

    def _begun(self) -> TrialWorkers:
        if not self._is_begun:
            self._workers.begin(ray.get(self._actor.job.remote()), self._values)
            self._is_begun = True
        return self._workers
