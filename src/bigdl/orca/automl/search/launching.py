"""From the arguments of ``fit`` to a search that has run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.model.base import Builder
from bigdl.orca.automl.model.data import trial_data
from bigdl.orca.automl.search.algorithms import Strategy
from bigdl.orca.automl.search.folders import latest_search, new_search
from bigdl.orca.automl.search.local import default_processes, run_locally
from bigdl.orca.automl.search.objective import Goal
from bigdl.orca.automl.search.records import Records
from bigdl.orca.automl.search.trial import Job
from bigdl.orca.automl.space import SearchSpace

__all__ = ["Search", "check_count", "check_resources", "chosen_backend"]

logger = logging.getLogger("bigdl.orca")


@dataclass
class Search:
    """What a search is made of; see ``AutoEstimator.fit`` for the arguments.

    Attributes
    ----------
    builder : Builder
    space : SearchSpace
    goal : Goal
    strategy : Strategy
    epochs, n_sampling, seed : int
    columns : tuple
        Of frames: those of features and of targets.
    resources : dict
        Of a trial.
    workers : int
        Of a trial, which share its resources.
    """

    builder: Builder
    space: SearchSpace
    goal: Goal
    strategy: Strategy
    epochs: int
    n_sampling: int
    seed: int
    columns: tuple = (None, None)
    resources: Mapping[str, float] = field(default_factory=dict)
    concurrency: int | None = None
    remote_dir: str | None = None
    workers: int = 1

    @property
    def trials(self) -> int:
        """How many configurations are tried."""
        return self.n_sampling * self.space.grid_size

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each worker of a trial."""
        return [{k: v / self.workers for k, v in self.resources.items()}] * self.workers

    def run(self, folder: Path, data: Any, validation: Any, *, backend: str, resume) -> Records:
        """Run the trials that have yet to be run.

        Parameters
        ----------
        folder : Path
            Of the searches of this name.
        data, validation : object
        backend : {"ray", "local"}
        resume : bool or "auto"
        """
        on_ray = backend == "ray"
        if on_ray:
            self._check_ray()
        elif self.workers > 1:
            raise UsageError(
                f"workers_per_trial={self.workers} needs backend='ray'; on this machine alone a "
                f"trial has threads, such as resources_per_trial={{'cpu': {self.workers}}}"
            )
        finalists = self.strategy.finalists(self.trials)
        with ExitStack() as stack:
            stack.enter_context(_quiet_optuna())
            pruner = None if on_ray else self.strategy.pruner(self.epochs)
            sampler = self._sampler(on_ray)
            job = self._job(data, validation, on_ray, stack.callback)
            records = Records(
                _folder(folder, resume),
                self.space,
                self.goal,
                self.seed,
                is_random=self.strategy.is_random,
                sampler=sampler,
                pruner=pruner,
                description=self._description(),
            )
            stack.callback(records.close)
            records.plan(self.trials)
            self._run_waiting(records, job, on_ray, self.strategy)
            if records.plan_finalists(finalists):
                self._run_waiting(records, job, on_ray, Strategy())
            _check_that_one_is_finished(records)
            return records

    def _run_waiting(self, records: Records, job: Job, on_ray: bool, strategy: Strategy):
        """Run the trials that wait; on this machine the records know who stops them."""
        if not on_ray:
            processes = self.concurrency or default_processes(self.resources)
            threads = max(1, int(self.resources.get("cpu", 1)))
            run_locally(records, job, processes=processes, threads=threads)
        elif records.waiting():
            from bigdl.orca.automl.search.ray_search import run_on_ray

            options = {"concurrency": self.concurrency, "remote_dir": self.remote_dir}
            run_on_ray(records, job, strategy, self.bundles, **options)

    def _check_ray(self):
        """Refuse what cannot work before data is moved; Ray is started if it can be."""
        from bigdl.orca.automl.search.ray_search import check_room
        from bigdl.orca.cluster.ray import RayCluster

        RayCluster.of_program()
        check_room(self.bundles)
        self.strategy.ray_scheduler(self.epochs)

    def _sampler(self, on_ray: bool):
        sampler = self.strategy.sampler(self.seed)
        if sampler is not None or on_ray:
            return sampler
        raise UsageError(
            f"search_alg {self.strategy.text()!r} needs backend='ray'; backend='local' has "
            "'random', 'optuna', 'cmaes', 'nsga2' and the samplers of Optuna"
        )

    def _job(self, data, validation, on_ray: bool, keep: Callable) -> Job:
        features, labels = self.columns
        how = {"on_ray": on_ray, "floats": self.builder.floats, "keep": keep}
        train = trial_data(data, features, labels, name="data", **how)
        if validation is None:
            logger.warning("Without validation_data the metric is that of the training data")
            seen = None
        else:
            seen = trial_data(validation, features, labels, name="validation_data", **how)
        gpus = self.bundles[0].get("gpu", 0)
        return Job(self.builder, train, seen, self.goal, self.epochs, self.seed, gpus, self.workers)

    def _description(self) -> dict:
        return {
            "metric": [metric.name for metric in self.goal.metrics],
            "metric_mode": [metric.mode for metric in self.goal.metrics],
            "epochs": self.epochs,
            "seed": self.seed,
            "search_alg": self.strategy.text(),
            "search_space": repr(self.space),
        }


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna without a line for every study and trial."""
    log = require("optuna", "automl").logging
    before = log.get_verbosity()
    log.set_verbosity(log.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(before)


def _folder(folder: Path, resume) -> Path:
    if resume not in (True, False, "auto"):
        raise UsageError(f"resume must be True, False or 'auto', got {resume!r}")
    found = latest_search(folder) if resume else None
    if resume is True and found is None:
        raise UsageError(
            f"There is no search in {folder} to go on with; check logs_dir and name, or pass "
            "resume='auto'"
        )
    return found or new_search(folder)


def _check_that_one_is_finished(records: Records) -> None:
    if records.finished():
        return
    failed = records.failed()
    if not failed:
        raise UsageError("No trial has finished; the processes of all of them were lost")
    error = failed[0].user_attrs["error"].strip()
    problem = UsageError(
        f"All {len(failed)} trials have failed, the first one by: {error.rpartition(chr(10))[2]}"
    )
    problem.add_note(f"In trial {failed[0].number}:\n{error}")
    raise problem


def chosen_backend(backend: str | None) -> str:
    """Where a search runs: on Ray if it is there, or Spark, on whose nodes it can be started."""
    import importlib.util
    import sys

    if backend is not None:
        return backend
    if importlib.util.find_spec("ray") is None:
        return "local"
    if "ray" in sys.modules:
        from bigdl.orca.cluster.ray import is_connected

        if is_connected():
            return "ray"
    if "pyspark" in sys.modules:
        from bigdl.orca.cluster.spark import active_context

        if active_context() is not None:
            return "ray"
    return "local"


def check_count(name: str, value: Any) -> None:
    """Refuse what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a positive integer, got {value!r}")


def check_resources(resources: Mapping[str, float] | None, workers: int = 1) -> dict[str, float]:
    """What a trial takes of the cluster.

    Parameters
    ----------
    resources : dict, optional
    workers : int
        Who share it.

    Raises
    ------
    UsageError
        If it is no dict of ``"cpu"``, ``"gpu"`` and further resources of Ray to numbers, or cannot
        be shared evenly: what is more than one is whole for Ray.
    """
    given = resources or {}
    found = {"cpu": workers, **given} if isinstance(given, Mapping) else None
    if found is None or not all(_is_amount(value) for value in found.values()):
        raise UsageError(
            "resources_per_trial must be a dict of resources and amounts, such as {'cpu': 2}, got "
            f"{resources!r}"
        )
    if workers > 1:
        for name, amount in found.items():
            if amount > workers and amount % workers:
                raise UsageError(
                    f"resources_per_trial has {amount:g} {name}, which {workers} workers of a "
                    "trial cannot share evenly; pass a multiple of workers_per_trial"
                )
    return found


def _is_amount(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
