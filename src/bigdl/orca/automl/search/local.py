"""The trials of a search on this machine, without Ray: in this process, or in several."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.cpu import thread_scope
from bigdl.common.errors import UsageError, require
from bigdl.orca.automl.model.rows import Rows, SavedRows
from bigdl.orca.automl.search.records import Records
from bigdl.orca.automl.search.trial import Job, TrialRun

__all__ = ["default_processes", "run_locally"]


def run_locally(records: Records, job: Job, *, processes: int, threads: int = 1) -> None:
    """Run the trials that wait in the records.

    Parameters
    ----------
    records : Records
    job : Job
    processes : int
        Trials at the same time; with one, they run in this process.
    threads : int
        Of a trial in this process; other processes have the threads of their cores.
    """
    from bigdl.tuning import run_trials

    count = records.waiting()
    if not count:
        return
    processes = min(processes, count)
    with contextlib.ExitStack() as stack:
        if processes > 1:
            folder = tempfile.mkdtemp(prefix="bigdl-rows-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            job = replace(
                job,
                train=_saved(job.train, folder, "train"),
                validation=_saved(job.validation, folder, "validation"),
            )
        else:
            stack.enter_context(_own_random_numbers())
            stack.enter_context(thread_scope(threads))
        run_trials(
            records.study,
            _Objective(records, job),
            count,
            processes=processes,
            catch=(Exception,),
        )


class _Objective:
    """What Optuna runs of a trial."""

    def __init__(self, records: Records, job: Job):
        self._records, self._job = records, job
        self._opened: Job | None = None

    def __getstate__(self):
        return {"_records": self._records, "_job": self._job, "_opened": None}

    def __call__(self, trial):
        try:
            return self._run(trial)
        except require("optuna", "automl").TrialPruned:
            raise
        except Exception:
            trial.set_user_attr("error", traceback.format_exc())
            raise

    def _run(self, trial) -> list[float]:
        records = self._records
        config = records.draw(trial, records.proposal(trial))
        run = TrialRun(self._open_job(), config)
        may_stop = records.goal.is_single and records.repeated(trial) is None
        while True:
            step = run.step()
            if step.is_best:
                records.save_weights(trial.number, run.model.weights())
            records.note(trial, step)
            if step.is_last:
                break
            if may_stop and trial.should_prune():
                break
        records.conclude(trial, step)
        problem = records.problem(step)
        if problem is not None:
            raise UsageError(problem)
        if not step.is_last:
            raise require("optuna", "automl").TrialPruned
        return list(step.best)

    def _open_job(self) -> Job:
        if self._opened is None:
            self._opened = self._job.opened()
        return self._opened


def _saved(data: Any, folder: str, name: str) -> Any:
    """Arrays as files, which all processes map."""
    return SavedRows.save(data, Path(folder, name)) if isinstance(data, Rows) else data


@contextlib.contextmanager
def _own_random_numbers():
    """The random numbers of this process as they were, after trials that have seeded them."""
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.set_rng_state(before[2])


def default_processes(resources) -> int:
    """How many trials this machine has cores for."""
    from bigdl.common.cpu import usable_cores

    return max(1, int(len(usable_cores()) // max(resources.get("cpu", 1), 1e-9)))
