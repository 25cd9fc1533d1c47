"""Choice of a search's backend and folder, and its loops on this machine and on Spark."""

from __future__ import annotations

import functools
import importlib.util
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigdl.common.cpu import thread_scope, usable_cores
from bigdl.common.errors import UsageError, require
from bigdl.common.storage import write_bytes
from bigdl.common.timeouts import CLEAN_UP_S
from bigdl.orca.automl.records import TrialRecords, TrialReporting, latest_search, new_search
from bigdl.orca.automl.trial import EpochResult, TrialJob, TrialRun
from bigdl.orca.cluster.ray import is_connected
from bigdl.orca.cluster.spark import active_context
from bigdl.training.state import isolated_rng
from bigdl.tuning import optimize, run_trials

if TYPE_CHECKING:
    from optuna.trial import Trial

    from bigdl.tuning.groups import TrialGroup
    from bigdl.tuning.remote import RemoteTrial


def choose_backend() -> str:
    """Return ``"ray"`` if Ray is connected or can start on an active Spark, else ``"local"``."""
    has_ray = importlib.util.find_spec("ray") is not None
    return "ray" if has_ray and (is_connected() or active_context() is not None) else "local"


def shared_resources(resources: Mapping[str, float] | None, workers: int) -> list[dict[str, float]]:
    """Divide a trial's resources evenly among its workers.

    Parameters
    ----------
    resources : dict, optional
        Resources of the trial.
    workers : int
        Number of workers of a trial.

    Raises
    ------
    UsageError
        If `resources` is not a dict of ``"cpu"``, ``"gpu"`` and other Ray resources to numbers, or
        cannot be divided evenly: Ray accepts only whole amounts above 1.
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
                f"resources_per_trial has {amount:g} {name}, which cannot be divided evenly among "
                f"the {workers} workers of a trial; pass a multiple of workers_per_trial",
                code="argument-value",
                argument="resources_per_trial",
            )
    return [{name: amount / workers for name, amount in amounts.items()}] * workers


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def search_folder(folder: Path, resume: bool | str) -> Path:
    """Create the folder of a new search, or return the folder of the search to resume."""
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
            f"There is no search to resume in {folder}; check logs_dir and name, or pass "
            "resume='auto'",
            code="checkpoint-missing",
            path=str(folder),
        )
    return latest or new_search(folder)


def check_any_finished(records: TrialRecords) -> None:
    """Raise the first trial's error if no trial has finished."""
    if records.finished():
        return
    failed = records.failed()
    if not failed:
        raise UsageError("No trial finished; all trial processes were lost", code="search-failed")
    error = failed[0].user_attrs["error"].strip()
    summary = UsageError(
        f"All {len(failed)} trials failed, the first with: {error.rpartition(chr(10))[2]}",
        code="search-failed",
    )
    summary.add_note(f"In trial {failed[0].number}:\n{error}")
    raise summary


def run_locally(records: TrialRecords, job: TrialJob, concurrency: int | None) -> None:
    """Run the waiting trials in this process or in several processes.

    Parameters
    ----------
    records : TrialRecords
        Records of the search; the pruner of their study stops trials.
    job : TrialJob
        Settings and data that all trials share.
    concurrency : int, optional
        Number of concurrent trials; with 1, trials run in this process.
    """
    count, cpus = records.waiting(), job.bundles[0]["cpu"]
    processes = concurrency or max(1, int(len(usable_cores()) // max(cpus, 1e-9)))
    processes = min(processes, count)
    with ExitStack() as stack:
        if processes == 1:
            stack.enter_context(isolated_rng(job.seed))
            stack.enter_context(thread_scope(max(1, int(cpus))))
        objective = _TrialObjective(records, functools.partial(_write_weights, records))
        run_trials(
            records.study,
            functools.partial(objective, job=job),
            count,
            processes=processes,
            catch=(Exception,),
            callbacks=[lambda study, trial: records.show(trial)],
        )


def run_on_spark(records: TrialRecords, job: TrialJob, concurrency: int | None) -> None:
    """Run the waiting trials on Spark executors, which share the data of each machine.

    Parameters
    ----------
    records, job, concurrency
        See :func:`run_locally`.
    """

    def save(number: int, weights: bytes) -> None:
        write_bytes(str(records.weights_file(number)), weights)

    optimize(
        records.study,
        _TrialObjective(records.reporting(), _send_weights),
        records.waiting(),
        backend="spark",
        concurrency=concurrency,
        cores_per_trial=max(1, math.ceil(job.bundles[0]["cpu"])),
        workers_per_trial=len(job.bundles),
        catch=(Exception,),
        callbacks=[lambda study, trial: records.show(trial)],
        data=job,
        on_upload=save,
    )


def _write_weights(records: TrialRecords, trial: Trial, weights: bytes) -> None:
    write_bytes(str(records.weights_file(trial.number)), weights)


def _send_weights(trial: RemoteTrial, weights: bytes) -> None:
    trial.upload(weights)


@dataclass
class _TrialObjective:
    """Optuna objective that trains one configuration and saves its weights and result."""

    records: TrialReporting
    save: Callable[..., None]

    def __call__(self, trial: Trial, job: TrialJob) -> list[float]:
        try:
            epoch_result = self._run(trial, job)
            best = self.records.set_result(trial, epoch_result)
        except Exception:
            trial.set_user_attr("error", traceback.format_exc())
            raise
        if not epoch_result.is_last:
            raise require("optuna", "automl").TrialPruned
        return best

    def _run(self, trial: Trial, job: TrialJob) -> EpochResult:
        records = self.records
        group: TrialGroup | None = getattr(trial, "group", None)
        config = records.begin(trial)
        if group is not None and group.world_size == 1:
            group = None
        with _closed(_trial_run(job, config, group)) as run:
            while True:
                step = run.step()
                if step.is_best and (group is None or group.rank == 0):
                    self.save(trial, run.model.weights())
                if group is not None:  # only rank 0 may have the metrics
                    step = EpochResult(**group.broadcast(asdict(step)))
                records.report(trial, step)
                if step.is_last or (records.may_stop(trial) and trial.should_prune()):
                    return step


def _trial_run(job: TrialJob, config: Mapping[str, object], group: TrialGroup | None) -> TrialRun:
    """Create the run of a trial, by this worker or together with the others of a group."""
    if group is None:
        return TrialRun(job, config)
    return TrialRun(job, config, group.rank, group.world_size, **group.connection)


@contextmanager
def _closed(run: TrialRun) -> Iterator[TrialRun]:
    """Context manager that ends a run; after an error, a clean-up that hangs is given up."""
    try:
        yield run
    except BaseException:
        run.close(CLEAN_UP_S)
        raise
    run.close()
