"""Parts of a search: where it runs, its folder, its trials on this machine, its outcome."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.cpu import thread_scope, usable_cores
from bigdl.common.errors import UsageError, require
from bigdl.common.storage import write_bytes
from bigdl.orca.automl.records import TrialRecords, latest_search, new_search
from bigdl.orca.automl.trial import EpochResult, TrialJob, TrialRun
from bigdl.orca.cluster.ray import is_connected
from bigdl.orca.cluster.spark import active_context
from bigdl.training.state import isolated_rng
from bigdl.tuning import run_trials

if TYPE_CHECKING:
    from optuna.trial import Trial


def choose_backend() -> str:
    """Return ``"ray"`` if it is there, or Spark, on whose nodes it can be started."""
    has_ray = importlib.util.find_spec("ray") is not None
    return "ray" if has_ray and (is_connected() or active_context() is not None) else "local"


def shared_resources(resources: Mapping[str, float] | None, workers: int) -> list[dict[str, float]]:
    """Return what each worker of a trial takes of the cluster.

    Parameters
    ----------
    resources : dict, optional
        Of the trial.
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
            f"{resources!r}",
            code="argument-type",
            argument="resources_per_trial",
        )
    for name, amount in amounts.items():
        if workers > 1 and amount > workers and amount % workers:
            raise UsageError(
                f"resources_per_trial has {amount:g} {name}, which {workers} workers of a "
                "trial cannot share evenly; pass a multiple of workers_per_trial",
                code="argument-value",
                argument="resources_per_trial",
            )
    return [{name: amount / workers for name, amount in amounts.items()}] * workers


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def search_folder(folder: Path, resume: bool | str) -> Path:
    """Return the directory of a new search below a folder, or of the one that is to go on."""
    if resume not in (True, False, "auto"):
        raise UsageError(
            f"resume must be True, False or 'auto', got {resume!r}",
            code="argument-value",
            argument="resume",
            allowed=[True, False, "auto"],
        )
    latest = latest_search(folder) if resume else None
    if resume is True and latest is None:
        raise UsageError(
            f"There is no search in {folder} to go on with; check logs_dir and name, or pass "
            "resume='auto'",
            code="checkpoint-missing",
            path=str(folder),
        )
    return latest or new_search(folder)


def check_that_one_is_finished(records: TrialRecords) -> None:
    """Raise the first error of the trials if none of them has finished."""
    if records.finished():
        return
    failed = records.failed()
    if not failed:
        raise UsageError(
            "No trial has finished; the processes of all of them were lost", code="search-failed"
        )
    error = failed[0].user_attrs["error"].strip()
    problem = UsageError(
        f"All {len(failed)} trials have failed, the first one by: {error.rpartition(chr(10))[2]}",
        code="search-failed",
    )
    problem.add_note(f"In trial {failed[0].number}:\n{error}")
    raise problem


def run_locally(records: TrialRecords, job: TrialJob, concurrency: int | None) -> None:
    """Run the trials that wait in this process, or in several.

    Parameters
    ----------
    records : TrialRecords
        Their study's pruner stops trials.
    job : TrialJob
    concurrency : int, optional
        Trials at the same time; with one, they run in this process.
    """
    count, cpus = records.waiting(), job.bundles[0]["cpu"]
    processes = concurrency or max(1, int(len(usable_cores()) // max(cpus, 1e-9)))
    processes = min(processes, count)
    with ExitStack() as stack:
        if processes == 1:
            stack.enter_context(isolated_rng(job.seed))
            stack.enter_context(thread_scope(max(1, int(cpus))))
        objective = _TrialObjective(records, job)
        run_trials(
            records.study,
            objective,
            count,
            processes=processes,
            catch=(Exception,),
            callbacks=[lambda study, trial: records.show(trial)],
        )


@dataclass
class _TrialObjective:
    """The objective of Optuna: it trains a configuration, and leaves its weights and result."""

    records: TrialRecords
    job: TrialJob

    def __call__(self, trial: Trial) -> list[float]:
        try:
            step = self._run(trial)
            best = self.records.set_result(trial, step)
        except Exception:
            trial.set_user_attr("error", traceback.format_exc())
            raise
        if not step.is_last:
            raise require("optuna", "automl").TrialPruned
        return best

    def _run(self, trial: Trial) -> EpochResult:
        records = self.records
        config = records.begin(trial)
        with closing(TrialRun(self.job, config)) as run:
            while True:
                step = run.step()
                if step.is_best:
                    write_bytes(str(records.weights_file(trial.number)), run.model.weights())
                records.report(trial, step)
                if step.is_last or (records.may_stop(trial) and trial.should_prune()):
                    return step
