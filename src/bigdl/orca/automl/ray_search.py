"""The trials of a search on Ray, by Ray Tune.

Tune starts trials, gives them their resources and stops those that its scheduler ends.  It asks
:class:`_TuneSearch` for configurations and tells it their results, which are written to the
:class:`~bigdl.orca.automl.records.TrialRecords`, which alone know how the search stands.

A :class:`~bigdl.orca.automl.ray_workers.SearchActor` lives on the driver's machine: it hands out
the reference of the job, which is in Ray's object store once, and writes the weights that trials
send where the driver can read them.  So no directory needs to be shared between machines.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.search import SearchAlgorithm, Searcher, SearchGenerator
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError, first_line
from bigdl.orca.automl.ray_workers import ACTOR, SearchActor, TuneTrial
from bigdl.orca.automl.records import TrialRecords
from bigdl.orca.automl.strategy import Strategy, parameters_from_ray
from bigdl.orca.automl.trial import TrialJob
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.engines.ray import kill
from bigdl.tuning import create_sampler
from bigdl.tuning.study import raise_log_level, record_process

if TYPE_CHECKING:
    from optuna.trial import Trial

_FOLDER = "ray"
_RESOURCES = {"cpu": "CPU", "gpu": "GPU"}
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the records are ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the user's functions
}


def run_on_ray(
    records: TrialRecords,
    job: TrialJob,
    strategy: Strategy,
    concurrency: int | None,
    remote_dir: str | None,
) -> None:
    """Run the trials that wait in the records.

    Parameters
    ----------
    records : TrialRecords
    job : TrialJob
    strategy : Strategy
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
    storage = remote_dir or str(records.folder)
    with (
        _search_actor(records, job) as (actor, name),
        EnvContext(_SETTINGS),
        raise_log_level(logging.CRITICAL, "ray.tune"),  # its reports of single trials
        _signals(),
    ):
        search = _TuneSearch(records, actor, name, scheduler, searcher, concurrency)
        first = records.goal.first
        # a scheduler that was made with a metric does not take another one
        has_metric = getattr(scheduler, "metric", None)
        goal: dict[str, Any] = {} if has_metric else {"metric": first.name, "mode": first.mode}
        tuner = tune.Tuner(
            tune.with_resources(TuneTrial, _request(job.bundles)),
            tune_config=tune.TuneConfig(
                **goal,
                search_alg=_Algorithm(search.propose),
                scheduler=scheduler,
                num_samples=-1,  # it is said when there are no more
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name=_FOLDER,
                storage_path=storage,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[search],
            ),
        )
        try:
            tuner.fit()
        except tune.TuneError as error:
            raise UsageError(
                f"Ray Tune ended the search: {first_line(error)}", code="search-failed"
            ) from error
        finally:
            if remote_dir is None:
                shutil.rmtree(Path(storage) / _FOLDER, ignore_errors=True)
    if records.waiting() or search.running:  # Tune has heard Ctrl-C and returned
        raise KeyboardInterrupt


def check_room(bundles: Sequence[Mapping[str, float]]) -> None:
    """Refuse a trial that the nodes have no room for, for which Tune would wait.

    Ray is started if it can be.

    Parameters
    ----------
    bundles : list of dict
        The resources of each worker of a trial, which are the same ones.
    """
    RayCluster.of_program()
    needed = _in_names_of_ray(bundles[0])
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(
        min((int(node.get(k, 0) / v + 1e-9) for k, v in needed.items()), default=len(bundles))
        for node in nodes
    )
    if room >= len(bundles):
        return
    largest = {k: max((node.get(k, 0) for node in nodes), default=0) for k in needed}
    problem, advice = f"A trial takes {needed}, but no node of Ray has that", ""
    if len(bundles) > 1:
        problem = (
            f"A trial has {len(bundles)} workers, each of which takes {needed}, but the nodes of "
            f"Ray have room for {room}"
        )
        advice = ", or for fewer workers in workers_per_trial"
    raise UsageError(
        f"{problem}; the most that a node has is {largest}; ask for less in "
        f"resources_per_trial{advice}",
        code="resource-limit",
        argument="resources_per_trial",
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
def _search_actor(records: TrialRecords, job: TrialJob) -> Iterator[tuple[Any, str]]:
    """Start the actor of a search; its job leaves Ray's object store with it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"bigdl-search-{secrets.token_hex(8)}"
    make = ray.remote(SearchActor).options(name=name, num_cpus=0, scheduling_strategy=here)
    actor: Any = make.remote(str(records.weights_folder.resolve()), [ray.put(job)])
    try:
        yield actor, name
    finally:
        kill(actor)


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


@dataclass(eq=False)
class _TuneSearch(tune.Callback):
    """The trials of the records that Tune runs: gives it their configurations, notes what they do.

    Attributes
    ----------
    records : TrialRecords
    actor : SearchActor
    name : str
        Of the actor.
    scheduler : ray.tune.schedulers.TrialScheduler or None
        May give names other values on the way, as PBT does.
    searcher : ray.tune.search.Searcher, optional
        Proposes parameters in place of the study's sampler, and hears of results.
    concurrency : int, optional
        Trials at the same time.
    running : dict of str to (Trial, dict)
        Trials and the configurations that they began with, by Tune's ids of trials.
    epochs : dict of str to int
        Epochs that are reported.
    """

    records: TrialRecords
    actor: Any
    name: str
    scheduler: Any
    searcher: Searcher | None
    concurrency: int | None
    running: dict[str, tuple[Trial, dict[str, Any]]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def propose(self, trial_id: str) -> Any:
        """Return the configuration of a trial, None while there is none, and at last FINISHED."""
        records = self.records
        if not records.waiting():
            # a trial that runs may be lost, and then waits again
            return None if self.running else Searcher.FINISHED
        if self.concurrency and len(self.running) >= self.concurrency:
            return None
        if self.searcher is not None:
            suggested = self.searcher.suggest(trial_id)
            if suggested is None:  # it wants to know of those that run first
                return None
            parameters = parameters_from_ray(records.space, suggested)
            records.study.sampler = create_sampler("PartialFixed", fixed_params=parameters)
        trial = records.study.ask()
        record_process(trial)
        config = records.begin(trial)
        ray.get(self.actor.set_number.remote(trial_id, trial.number))
        self.running[trial_id] = trial, config
        return {**config, ACTOR: self.name}

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
    ) -> None:
        step = result.get("step")
        if trial.trial_id not in self.running or step is None:
            return
        if self.searcher is not None:
            self.searcher.on_trial_result(trial.trial_id, result)
        record, began = self.running[trial.trial_id]
        if step.epoch > self.epochs.get(trial.trial_id, 0):  # one may go back to a checkpoint
            self.epochs[trial.trial_id] = step.epoch
            self.records.report(record, step)
        changing = getattr(self.scheduler, "_hyperparam_mutations", None) or ()
        changed = {k: trial.config[k] for k in changing if trial.config[k] != began.get(k)}
        if changed != record.user_attrs.get("changed", {}):
            record.set_user_attr("changed", changed)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        last = trial.last_result or {}
        step = None if "failure" in last else last.get("step")
        record = self._ended(trial, None if step is None else last)
        if record is None:
            return
        if step is None:
            error = last.get("failure", "The trial ended before its first epoch")
            self.records.fail(record, error)
        else:
            self.records.end(record, step)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Let the trial of a process that was lost be tried again, once."""
        record = self._ended(trial, None)
        if record is not None:
            error = trial.get_error() or "The process of the trial was lost"
            self.records.mark_lost(record, error)

    def _ended(self, trial: Any, result: dict | None) -> Trial | None:
        """Forget a trial, and return it if it ran; without a result it has failed."""
        record, _ = self.running.pop(trial.trial_id, (None, None))
        if record is not None and self.searcher is not None:
            self.searcher.on_trial_complete(trial.trial_id, result, error=result is None)
        return record


class _Algorithm(SearchAlgorithm):
    """Trials of configurations that a function proposes.

    A ``SearchGenerator`` makes them, but PBT refuses one.  Nothing has to be saved: the records are
    written as they are made.
    """

    def __init__(self, propose: Callable[[str], Any]):
        searcher: Any = Searcher()
        searcher.suggest = propose
        self._generator = SearchGenerator(searcher)

    def add_configurations(self, experiments: Any) -> None:
        self._generator.add_configurations(experiments)

    def next_trial(self) -> Any:
        return self._generator.next_trial()

    @property
    def total_samples(self) -> int:
        return self._generator.total_samples

    def is_finished(self) -> bool:
        return self._finished or self._generator.is_finished()
