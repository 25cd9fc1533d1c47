"""The trials of a search on Ray, by Ray Tune.

Tune starts trials, gives them their resources and stops those that its scheduler gives up.  It asks
a Proposer for configurations and tells a Recorder what comes of them
(:mod:`bigdl.orca.automl.search.ray_driver`); both write to the
:class:`~bigdl.orca.automl.search.records.Records`, which alone know how the search stands.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigdl.common.environment import EnvContext
from bigdl.common.errors import UsageError, first_line
from bigdl.orca.automl.search.algorithms import Strategy
from bigdl.orca.automl.search.records import Records
from bigdl.orca.automl.search.trial import Job

__all__ = ["check_room", "run_on_ray"]

_FOLDER = "ray"
_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the records are ours
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the user's functions
}


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
        If the arguments are wrong, or a trial needs more than a node of Ray has.
    KeyboardInterrupt
        When the user interrupts; what is finished is recorded.
    """
    from ray import tune

    from bigdl.orca.automl.search.ray_driver import Algorithm, Proposer, Recorder, Running, drawing
    from bigdl.orca.automl.search.ray_trial import TuneTrial

    check_room(bundles)
    made = strategy.ray_scheduler(job.epochs)
    foreign = strategy.ray_searcher(records.space, records.goal)
    running, storage = Running(), remote_dir or str(records.folder)
    with _keeper(records, job) as (keeper, name), EnvContext(_SETTINGS), _quiet(), _signals():
        draw = drawing(records, foreign)
        proposer = Proposer(records, running, keeper, name, draw, foreign, concurrency)
        first = records.goal.first
        # a scheduler that was made with a metric does not take another one
        goal = {} if getattr(made, "metric", None) else {"metric": first.name, "mode": first.mode}
        tuner = tune.Tuner(
            tune.with_resources(TuneTrial, _request(bundles)),
            tune_config=tune.TuneConfig(
                **goal,
                search_alg=Algorithm(proposer),
                scheduler=made,
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
                callbacks=[Recorder(records, running, _changing(made))],
            ),
        )
        try:
            tuner.fit()
        except tune.TuneError as error:
            raise UsageError(f"Ray Tune ended the search: {first_line(error)}") from error
        finally:
            if remote_dir is None:
                shutil.rmtree(Path(storage) / _FOLDER, ignore_errors=True)
    if records.waiting() or running.trials:  # Tune has heard Ctrl-C and returned
        raise KeyboardInterrupt


def check_room(bundles: Sequence[Mapping[str, float]]) -> None:
    """Refuse a trial that the nodes have no room for; Tune would wait for one.

    Parameters
    ----------
    bundles : list of dict
        The resources of each worker of a trial, which are the same ones.
    """
    import ray

    names = {"cpu": "CPU", "gpu": "GPU"}
    needed = {names.get(name, name): amount for name, amount in bundles[0].items() if amount}
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


def _request(bundles):
    """The resources of a trial as Tune reserves them: the first worker's are its own."""
    from ray import tune

    if len(bundles) == 1:
        return dict(bundles[0])
    names = {"cpu": "CPU", "gpu": "GPU"}
    found = [{names.get(k, k): v for k, v in bundle.items() if v} for bundle in bundles]
    return tune.PlacementGroupFactory(found, strategy="PACK")


def _name(trial) -> str:
    return f"trial_{trial.trial_id}"


def _changing(scheduler) -> list[str]:
    """Names that a scheduler may give other values."""
    return list(getattr(scheduler, "_hyperparam_mutations", None) or ())


@contextlib.contextmanager
def _keeper(records: Records, job: Job):
    """The actor of a search, and its name; its job leaves Ray's object store with it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from bigdl.orca.automl.search.ray_trial import Keeper

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"bigdl-search-{secrets.token_hex(8)}"
    make = ray.remote(Keeper).options(name=name, num_cpus=0, scheduling_strategy=here)
    keeper = make.remote(str(records.weights_folder.resolve()), [ray.put(job)])
    try:
        yield keeper, name
    finally:
        with contextlib.suppress(Exception):  # Ray may be gone
            ray.kill(keeper)


@contextlib.contextmanager
def _quiet():
    """Tune without its reports of single trials, which the records hold."""
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _signals():
    """The handlers of signals as they were, which Tune leaves changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(kind) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
