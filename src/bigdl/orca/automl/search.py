"""From the arguments of ``fit`` to a search that has run, on Ray or on this machine."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.cpu import thread_scope, usable_cores
from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.model.base import Builder
from bigdl.orca.automl.model.data import Rows, SavedRows, trial_data
from bigdl.orca.automl.records import Records, latest_search, new_search
from bigdl.orca.automl.strategy import Strategy
from bigdl.orca.automl.trial import Goal, Job, TrialRun
from bigdl.training.checkpoint import write_bytes
from bigdl.training.state import isolated_rng
from bigdl.tuning import run_trials
from bigdl.tuning.spaces import SearchSpace
from bigdl.tuning.study import quieter

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

logger = logging.getLogger("bigdl.orca")


@dataclass
class Search:
    """Parts of a search; see ``AutoEstimator.fit`` for the arguments.

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
        """Number of configurations that are tried."""
        return self.n_sampling * self.space.grid_size

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of each worker of a trial."""
        return [{k: v / self.workers for k, v in self.resources.items()}] * self.workers

    def run(
        self, folder: Path, data: Any, validation: Any, *, backend: str, resume: bool | str
    ) -> Records:
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
            require("optuna", "automl")
            stack.enter_context(quieter(logging.ERROR, "optuna"))
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
                description={
                    "metric": self.goal.names,
                    "metric_mode": [metric.mode for metric in self.goal.metrics],
                    "epochs": self.epochs,
                    "seed": self.seed,
                    "search_alg": self.strategy.algorithm,
                    "search_space": repr(self.space),
                },
            )
            stack.callback(records.close)
            records.plan(self.trials)
            self._run_waiting(records, job, on_ray, self.strategy)
            if records.plan_finalists(finalists):
                self._run_waiting(records, job, on_ray, Strategy())
            _check_that_one_is_finished(records)
            return records

    def _run_waiting(self, records: Records, job: Job, on_ray: bool, strategy: Strategy) -> None:
        """Run the trials that wait; on this machine the study's pruner stops them."""
        if not records.waiting():
            return
        if on_ray:
            from bigdl.orca.automl.ray_search import run_on_ray

            run_on_ray(
                records,
                job,
                strategy,
                self.bundles,
                concurrency=self.concurrency,
                remote_dir=self.remote_dir,
            )
            return
        cpus = self.resources.get("cpu", 1)
        processes = self.concurrency or max(1, int(len(usable_cores()) // max(cpus, 1e-9)))
        _run_locally(records, job, processes=processes, threads=max(1, int(cpus)))

    def _check_ray(self) -> None:
        """Refuse what cannot work before data is moved; Ray is started if it can be."""
        from bigdl.orca.automl.ray_search import check_room
        from bigdl.orca.cluster.ray import RayCluster

        RayCluster.of_program()
        check_room(self.bundles)
        self.strategy.ray_scheduler(self.epochs)

    def _sampler(self, on_ray: bool) -> BaseSampler | None:
        sampler = self.strategy.sampler(self.seed)
        if sampler is not None or on_ray:
            return sampler
        raise UsageError(
            f"search_alg {self.strategy.algorithm!r} needs backend='ray'; backend='local' has "
            "'random', 'optuna', 'cmaes', 'nsga2' and the samplers of Optuna"
        )

    def _job(self, data: Any, validation: Any, on_ray: bool, on_close: Callable) -> Job:
        prepared = functools.partial(
            trial_data, on_ray=on_ray, floats=self.builder.floats, on_close=on_close
        )
        train, seen = prepared(data, *self.columns, name="data"), None
        if validation is None:
            logger.warning("Without validation_data the metric is that of the training data")
        else:
            seen = prepared(validation, *self.columns, name="validation_data")
        gpus = self.bundles[0].get("gpu", 0)
        return Job(self.builder, train, seen, self.goal, self.epochs, self.seed, gpus, self.workers)


def _folder(folder: Path, resume: bool | str) -> Path:
    if resume not in (True, False, "auto"):
        raise UsageError(f"resume must be True, False or 'auto', got {resume!r}")
    latest = latest_search(folder) if resume else None
    if resume is True and latest is None:
        raise UsageError(
            f"There is no search in {folder} to go on with; check logs_dir and name, or pass "
            "resume='auto'"
        )
    return latest or new_search(folder)


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


def choose_backend() -> str:
    """Return ``"ray"`` if it is there, or Spark, on whose nodes it can be started."""
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


def check_resources(resources: Mapping[str, float] | None, workers: int = 1) -> dict[str, float]:
    """Return what a trial takes of the cluster.

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
    requested = resources or {}
    amounts = {"cpu": workers, **requested} if isinstance(requested, Mapping) else None
    if amounts is None or not all(_is_amount(value) for value in amounts.values()):
        raise UsageError(
            "resources_per_trial must be a dict of resources and amounts, such as {'cpu': 2}, got "
            f"{resources!r}"
        )
    for name, amount in amounts.items():
        if workers > 1 and amount > workers and amount % workers:
            raise UsageError(
                f"resources_per_trial has {amount:g} {name}, which {workers} workers of a "
                "trial cannot share evenly; pass a multiple of workers_per_trial"
            )
    return amounts


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


# Trials on this machine --------------------------------------------------------------------------


def _run_locally(records: Records, job: Job, *, processes: int, threads: int) -> None:
    """Run the trials that wait in this process, or in several.

    Parameters
    ----------
    processes : int
        Trials at the same time; with one, they run in this process.
    threads : int
        Of a trial in this process; other processes have the threads of their cores.
    """
    count = records.waiting()
    processes = min(processes, count)
    with ExitStack() as stack:
        if processes > 1:
            folder = Path(tempfile.mkdtemp(prefix="bigdl-rows-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            job = replace(
                job,
                train=_saved(job.train, folder / "train"),
                validation=_saved(job.validation, folder / "validation"),
            )
        else:
            stack.enter_context(isolated_rng(job.seed))
            stack.enter_context(thread_scope(threads))
        objective = _Objective(records, job)
        run_trials(records.study, objective, count, processes=processes, catch=(Exception,))


class _Objective:
    """The objective of Optuna: it trains a configuration, and leaves its weights and result."""

    def __init__(self, records: Records, job: Job):
        self._records, self._job = records, job
        self._opened: Job | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def __call__(self, trial: Trial) -> list[float]:
        try:
            return self._run(trial)
        except require("optuna", "automl").TrialPruned:
            raise
        except Exception:
            trial.set_user_attr("error", traceback.format_exc())
            raise

    def _run(self, trial: Trial) -> list[float]:
        records = self._records
        config = records.set_draws(trial, records.proposal(trial))
        self._opened = self._opened or self._job.opened()
        may_stop = records.goal.is_single and records.repeated(trial) is None
        with closing(TrialRun(self._opened, config)) as run:
            while True:
                step = run.step()
                if step.is_best:
                    write_bytes(str(records.weights_file(trial.number)), run.model.weights())
                records.report(trial, step)
                if step.is_last or (may_stop and trial.should_prune()):
                    break
        problem = records.set_result(trial, step)
        if problem is not None:
            raise UsageError(problem)
        if not step.is_last:
            raise require("optuna", "automl").TrialPruned
        return list(step.best)


def _saved(data: Any, folder: Path) -> Any:
    """Return arrays as files, which all processes map."""
    return SavedRows.save(data, folder) if isinstance(data, Rows) else data
