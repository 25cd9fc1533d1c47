"""Search loop on Ray, which runs planned trials with Ray Tune and records their results.

Tune starts trials, assigns resources and stops trials when its scheduler decides so.  It gets
configurations from :class:`_TuneSearch` and reports results to it.  The results are written to
:class:`~bigdl.orca.automl.records.TrialRecords`, the only state of the search.

A :class:`~bigdl.orca.automl.ray_workers.SearchActor` runs on the driver's machine.  It returns the
object reference of the job, which is stored once in Ray's object store, and writes weights to the
driver's disk.  So machines need no shared folder.
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
from bigdl.common.platform.processes import tune_signals
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
    from ray.tune.experiment import Trial as RayTrial

_FOLDER = "ray"
_RESOURCES = {"cpu": "CPU", "gpu": "GPU"}
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # BigDL keeps the records
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # keeps relative paths in user functions valid
}


def run_on_ray(
    records: TrialRecords,
    job: TrialJob,
    strategy: Strategy,
    concurrency: int | None,
    remote_dir: str | None,
) -> None:
    """Run all waiting trials with Ray Tune.

    Parameters
    ----------
    records : TrialRecords
    job : TrialJob
    strategy : Strategy
    concurrency : int, optional
        Maximum number of concurrent trials.
    remote_dir : str, optional
        Folder for Tune's checkpoints.

    Raises
    ------
    UsageError
        If the arguments are invalid.
    KeyboardInterrupt
        If the user interrupts; finished trials are recorded.
    """
    scheduler = strategy.ray_scheduler(job.epochs)
    searcher = strategy.ray_searcher(records.space, records.goal)
    storage = remote_dir or str(records.folder)
    with (
        _search_actor(records, job) as (actor, name),
        EnvContext(_SETTINGS),
        raise_log_level(logging.CRITICAL, "ray.tune"),  # reports of single trials
        _preserve_signal_handlers(),
    ):
        search = _TuneSearch(records, actor, name, scheduler, searcher, concurrency)
        first = records.goal.first
        # a scheduler created with a metric rejects another one
        has_metric = getattr(scheduler, "metric", None)
        goal: dict[str, Any] = {} if has_metric else {"metric": first.name, "mode": first.mode}
        tuner = tune.Tuner(
            tune.with_resources(TuneTrial, _request(job.bundles)),
            tune_config=tune.TuneConfig(
                **goal,
                search_alg=_Algorithm(search.propose),
                scheduler=scheduler,
                num_samples=-1,  # the search algorithm signals the end
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
    if records.waiting() or search.running:  # Tune handled Ctrl-C and returned
        raise KeyboardInterrupt


def check_resources(bundles: Sequence[Mapping[str, float]]) -> None:
    """Raise UsageError if the Ray nodes lack resources for a trial; Tune would wait forever.

    Starts Ray if possible.

    Parameters
    ----------
    bundles : list of dict
        Resources of each worker of a trial; all entries are equal.
    """
    RayCluster.of_program()
    needed = _to_ray_resources(bundles[0])
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    capacity = sum(
        min((int(node.get(k, 0) / v + 1e-9) for k, v in needed.items()), default=len(bundles))
        for node in nodes
    )
    if capacity >= len(bundles):
        return
    largest = {k: max((node.get(k, 0) for node in nodes), default=0) for k in needed}
    problem, advice = f"A trial needs {needed}, but no Ray node has that", ""
    if len(bundles) > 1:
        problem = (
            f"A trial has {len(bundles)} workers, each of which takes {needed}, but the nodes of "
            f"Ray have capacity for {capacity}"
        )
        advice = ", or fewer workers in workers_per_trial"
    raise UsageError(
        f"{problem}; the maximum of a node is {largest}; request less in "
        f"resources_per_trial{advice}",
        code="resource-limit",
        argument="resources_per_trial",
    )


def _to_ray_resources(bundle: Mapping[str, float]) -> dict[str, float]:
    return {_RESOURCES.get(name, name): amount for name, amount in bundle.items() if amount}


def _request(
    bundles: Sequence[Mapping[str, float]],
) -> dict[str, float] | tune.PlacementGroupFactory:
    """Return a trial's resources: a dict for one worker, else Tune's PlacementGroupFactory."""
    if len(bundles) == 1:
        return dict(bundles[0])
    return tune.PlacementGroupFactory([_to_ray_resources(b) for b in bundles], strategy="PACK")


def _name(trial: RayTrial) -> str:
    return f"trial_{trial.trial_id}"


@contextlib.contextmanager
def _search_actor(records: TrialRecords, job: TrialJob) -> Iterator[tuple[Any, str]]:
    """Context manager that runs the SearchActor, which keeps the job in Ray's object store."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"bigdl-search-{secrets.token_hex(8)}"
    actor_class = ray.remote(SearchActor).options(
        name=name, num_cpus=0, scheduling_strategy=this_node
    )
    actor: Any = actor_class.remote(str(records.weights_folder.resolve()), [ray.put(job)])
    try:
        yield actor, name
    finally:
        kill(actor)


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Context manager that restores, on exit, the signal handlers that Tune changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in tune_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class _TuneSearch(tune.Callback):
    """Tune callback that supplies configurations of waiting trials and records their results.

    Attributes
    ----------
    records : TrialRecords
    actor : SearchActor
    name : str
        Name of the actor.
    scheduler : ray.tune.schedulers.TrialScheduler or None
        May change values of the configuration during a trial, as PBT does.
    searcher : ray.tune.search.Searcher, optional
        Proposes parameters in place of the study's sampler, and receives the results.
    concurrency : int, optional
        Maximum number of concurrent trials.
    running : dict of str to (Trial, dict)
        Running trials and their initial configurations, by Tune's trial ids.
    epochs : dict of str to int
        Last reported epoch, by Tune's trial ids.
    """

    records: TrialRecords
    actor: Any
    name: str
    scheduler: Any
    searcher: Searcher | None
    concurrency: int | None
    running: dict[str, tuple[Trial, dict[str, Any]]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def propose(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the configuration of a trial, None to wait, or FINISHED at the end."""
        records = self.records
        if not records.waiting():
            # a running trial may get lost and then wait again
            return None if self.running else Searcher.FINISHED
        if self.concurrency and len(self.running) >= self.concurrency:
            return None
        if self.searcher is not None:
            suggested = self.searcher.suggest(trial_id)
            if suggested is None:  # the searcher waits for running trials
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
        self, iteration: int, trials: list, trial: RayTrial, result: dict, **info: object
    ) -> None:
        step = result.get("step")
        if trial.trial_id not in self.running or step is None:
            return
        if self.searcher is not None:
            self.searcher.on_trial_result(trial.trial_id, result)
        record, initial_config = self.running[trial.trial_id]
        if step.epoch > self.epochs.get(trial.trial_id, 0):  # a trial may return to a checkpoint
            self.epochs[trial.trial_id] = step.epoch
            self.records.report(record, step)
        changing = getattr(self.scheduler, "_hyperparam_mutations", None) or ()
        changed = {k: trial.config[k] for k in changing if trial.config[k] != initial_config.get(k)}
        if changed != record.user_attrs.get("changed", {}):
            record.set_user_attr("changed", changed)

    def on_trial_complete(
        self, iteration: int, trials: list, trial: RayTrial, **info: object
    ) -> None:
        last = trial.last_result or {}
        step = None if "failure" in last else last.get("step")
        record = self._remove(trial, None if step is None else last)
        if record is None:
            return
        if step is None:
            error = last.get("failure", "The trial ended before its first epoch")
            self.records.fail(record, error)
        else:
            self.records.end(record, step)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: object) -> None:
        """Retry a trial once if its process was lost."""
        record = self._remove(trial, None)
        if record is not None:
            error = trial.get_error() or "The process of the trial was lost"
            self.records.mark_lost(record, error)

    def _remove(self, trial: RayTrial, result: dict | None) -> Trial | None:
        """Remove a running trial, as failed if `result` is None, and return the trial's record."""
        record, _ = self.running.pop(trial.trial_id, (None, None))
        if record is not None and self.searcher is not None:
            self.searcher.on_trial_complete(trial.trial_id, result, error=result is None)
        return record


class _Algorithm(SearchAlgorithm):
    """Tune search algorithm whose configurations come from a function.

    It delegates to a ``SearchGenerator``, which PBT rejects as a search algorithm.  It saves no
    state, because the records are written immediately.
    """

    def __init__(self, propose: Callable[[str], Any]):
        searcher: Any = Searcher()
        searcher.suggest = propose
        self._generator = SearchGenerator(searcher)

    def add_configurations(self, experiments: Any) -> None:
        self._generator.add_configurations(experiments)

    def next_trial(self) -> RayTrial | None:
        return self._generator.next_trial()

    @property
    def total_samples(self) -> int:
        return self._generator.total_samples

    def is_finished(self) -> bool:
        return self._finished or self._generator.is_finished()
