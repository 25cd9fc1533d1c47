"""Searches whose trials run on the workers of a cluster."""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError, WorkerLost, require
from bigdl.common.timeouts import SEARCH_END_S, WORKERS_JOIN_S

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from bigdl.runtime.channel import AttemptChannel
    from bigdl.runtime.engine import Engine, OpenJob
    from bigdl.tuning.remote import TrialServer

    Objective = Callable[..., float | Sequence[float]]  # of a trial, and of the data if any

logger = logging.getLogger("bigdl.tuning")

_ENGINES = {  # imported when used: this package does not depend on Spark or Ray
    "spark": ("bigdl.orca.engine", "SparkEngine"),
    "ray": ("bigdl.orca.engine", "RayEngine"),
    "local": ("bigdl.runtime.local", "LocalEngine"),
}
_FRUITLESS = 3  # attempts in succession without a finished trial, after which a search is given up


class _SearchEnded(Exception):
    """Raised to end the workers of a search that needs them no longer."""


def optimize(
    study: Study,
    objective: Objective,
    n_trials: int | None = None,
    *,
    backend: str = "spark",
    concurrency: int | None = None,
    cores_per_trial: int = 1,
    workers_per_trial: int = 1,
    timeout: float | None = None,
    catch: type[Exception] | Iterable[type[Exception]] = (),
    callbacks: Iterable[Callable[[Study, FrozenTrial], None]] = (),
    data: object = None,
    engine: Engine | None = None,
    on_upload: Callable[[int, bytes], None] | None = None,
) -> None:
    """Run the trials of a study on Spark executors, on Ray, or in processes of this machine.

    The study stays in this process, with any storage, sampler and pruner of Optuna. A trial's
    suggestions, reports and pruning decisions are messages to this process. With
    ``concurrency=1``, the trials are those of ``study.optimize``, also with a pruner.

    Workers are long-lived: each runs one trial after the other, so a trial starts no Spark job.
    With ``workers_per_trial=k``, each trial runs on k workers, which all call the objective, as
    ``torchrun`` does: ``trial.rank`` and ``trial.world_size`` tell them apart, all see the same
    parameters and pruning decisions, and the reports and the result of rank 0 count.
    ``trial.init_process_group()`` connects them by ``torch.distributed``; ``trial.all_gather``
    exchanges small values. If one of them is lost, the trial is repeated. On
    a Spark with dynamic allocation, waiting workers make Spark add executors, and executors
    without trials are removed. The trial of a lost worker fails, does not count, and is repeated
    once with the same parameters; the attribute ``retry_of`` of the repetition names it.

    Parameters
    ----------
    study : optuna.Study
        A study of Optuna or of :func:`~bigdl.tuning.open_study`.
    objective : callable
        Takes a trial and returns its metrics; raises ``optuna.TrialPruned`` to end it early. It is
        sent by ``cloudpickle``, and its trial has the methods of Optuna's trials. Categories must
        be None, bool, int, float or str.
    n_trials : int, optional
        Number of trials to run.
    backend : {"spark", "ray", "local"}
        Where trials run: on the active Spark, also over Spark Connect; on the active Ray; or in
        processes of this machine.
    concurrency : int, optional
        Maximum number of concurrent trials. By default the cluster's cores divided by the cores of
        a trial; with dynamic allocation, those of its maximum number of executors.
    cores_per_trial : int
        Cores of each worker of a trial, which are its number of threads. On a Spark cluster, more
        cores than ``spark.task.cpus`` need Spark 4.
    workers_per_trial : int
        Number of workers that run each trial together, on any nodes. The objective must call the
        trial's methods in the same order on all of them.
    timeout : float, optional
        Seconds after which the search ends. Running trials are ended and recorded as failed.
    catch : exception types
        Exceptions of the objective that do not end the search, compared by name.
    callbacks : iterable of callable
        Called with the study and each finished trial, one at a time, in a thread of this process.
        They may call ``study.stop()``.
    data : object, optional
        Second argument of the objective, such as a tuple or dict of arrays or a pandas frame. It is
        copied to each machine once, where the trials map its arrays into memory; they are
        read-only.
    engine : bigdl.runtime.engine.Engine, optional
        Engine to run on instead of the one of `backend`, for example one with a fixed port.
    on_upload : callable, optional
        Called with a trial's number and the bytes that it passed to ``trial.upload``, in a thread
        of this process.

    Raises
    ------
    UsageError
        If an argument is invalid, the cluster has no node with `cores_per_trial` cores, or it
        cannot run `workers_per_trial` workers at the same time.
    WorkerLost
        If all workers are lost repeatedly and no trial finishes, or if the workers of a trial have
        not all started within 120 s, or within the `patience` of `engine`, and no trial runs.
    WorkerError
        If the objective raises an exception that is not in `catch`. A builtin exception is raised
        itself.

    Examples
    --------
    >>> import optuna
    >>> from bigdl.tuning import optimize
    >>> study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    >>> def objective(trial):
    ...     return (trial.suggest_float("x", -4, 4) - 1) ** 2
    >>> optimize(study, objective, n_trials=8, backend="local", concurrency=2)
    >>> len(study.trials), study.best_value < 4
    (8, True)
    """
    require("optuna", "automl")
    from bigdl.runtime.shared_objects import SharedObject
    from bigdl.tuning.remote import TrialProgram, TrialServer, needs_end

    if n_trials is not None:
        check_positive("n_trials", n_trials)
    if concurrency is not None:
        check_positive("concurrency", concurrency)
    check_positive("cores_per_trial", cores_per_trial)
    check_positive("workers_per_trial", workers_per_trial)
    if timeout is not None:
        check_number("timeout", timeout, above=0)
    if needs_end(study, n_trials, timeout):
        raise UsageError(
            "A search needs an end: pass n_trials, or timeout in seconds",
            code="argument-missing",
            argument="n_trials",
        )
    deadline = None if timeout is None else time.monotonic() + timeout
    engine = engine or _engine(backend)
    slots = _trial_slots(engine, cores_per_trial, workers_per_trial)
    trials = min(slots or n_trials or 1, n_trials or 1 << 20)
    workers = workers_per_trial * (trials if concurrency is None else min(concurrency, trials))
    caught = (catch,) if isinstance(catch, type) else tuple(catch)
    server = TrialServer(
        study,
        n_trials,
        caught,
        list(callbacks),
        on_upload,
        workers_per_trial,
        None if engine.restarts_workers else workers,
    )
    with ExitStack() as stack:
        stack.callback(server.close)
        serves, reference = [server.serve], None
        if data is not None:
            shared = SharedObject(data, "The data of the search")
            stack.callback(shared.close)
            serves, reference = [server.serve, shared.serve], shared.reference
        program = TrialProgram(objective, reference)
        job = engine.open_independent(program, workers, threads=cores_per_trial)
        stack.enter_context(job)
        stack.callback(server.stop)  # before the channel closes
        patience = float(getattr(engine, "patience", WORKERS_JOIN_S))
        _run(job, server, serves, deadline, workers_per_trial, patience)
    if server.error is not None:
        raise server.error


def _engine(backend: str) -> Engine:
    check_choice("backend", backend, tuple(_ENGINES))
    module, name = _ENGINES[backend]
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine


def _trial_slots(engine: Engine, cores: int, workers: int) -> int | None:
    """Return the number of trials that can run at the same time, None without a limit."""
    slots = engine.capacity(cores)
    if slots is None:
        return None
    if slots < workers:
        raise UsageError(
            f"A trial has {workers} workers with {cores} cores each, but the cluster can run "
            f"{slots} at the same time; pass smaller workers_per_trial or cores_per_trial",
            code="resource-limit",
            argument="workers_per_trial",
        )
    return slots // workers


def _run(
    job: OpenJob,
    server: TrialServer,
    serves: Sequence[Callable[[AttemptChannel], None]],
    deadline: float | None,
    workers_per_trial: int,
    patience: float,
) -> None:
    """Run attempts of a job until the search is done; Spark replaces lost workers itself."""

    def serve(channel: AttemptChannel) -> None:
        for each in serves:
            each(channel)

    done_at = math.inf

    def poll(event: str, value: object) -> None:
        nonlocal done_at
        server.beat()
        now = time.monotonic()
        done_at = min(done_at, now) if server.is_done else math.inf
        is_late = deadline is not None and now > deadline
        if server.seconds_short_of_workers() > patience:
            raise WorkerLost(
                f"Only {server.waiting} of the {workers_per_trial} workers of a trial have started "
                f"within {patience:g} s; the cluster has no room for the others, so pass a "
                "smaller workers_per_trial, or try again later"
            )
        # after the last trial, tasks may still wait for a slot
        if is_late or server.error is not None or now > done_at + SEARCH_END_S:
            raise _SearchEnded

    fruitless = 0
    while not server.is_done and server.error is None:
        before = server.finished
        number = len(job.channel.attempts) + 1
        try:
            job.attempt(None, None, poll, before=serve)
        except _SearchEnded:
            return
        fruitless = 0 if server.finished > before else fruitless + 1
        if fruitless >= _FRUITLESS and not server.is_done:
            raise WorkerLost(
                f"All workers of the search were lost in {number} attempts, the last {fruitless} "
                "without a finished trial; see the logs of the executors for the reason"
            )


class SparkStudy:
    """An Optuna study whose trials run on Spark executors.

    Parameters
    ----------
    study : optuna.Study
        A study with any storage, sampler and pruner; the storage is used by this process only.

    Examples
    --------
    >>> import optuna
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.tuning import SparkStudy
    >>> sc = init_orca_context("local", cores=2)
    >>> study = optuna.create_study(direction="maximize")
    >>> SparkStudy(study).optimize(lambda trial: trial.suggest_int("units", 1, 8), n_trials=6)
    >>> len(study.trials)
    6
    """

    def __init__(self, study: Study):
        self.study = study

    def optimize(
        self,
        objective: Objective,
        n_trials: int | None = None,
        *,
        concurrency: int | None = None,
        cores_per_trial: int = 1,
        workers_per_trial: int = 1,
        timeout: float | None = None,
        catch: type[Exception] | Iterable[type[Exception]] = (),
        callbacks: Iterable[Callable[[Study, FrozenTrial], None]] = (),
        data: object = None,
    ) -> None:
        """Run the study's trials on the active Spark session.

        Parameters
        ----------
        objective, n_trials, concurrency, cores_per_trial, workers_per_trial, timeout, catch, \
        callbacks, data
            See :func:`bigdl.tuning.optimize`.

        Raises
        ------
        UsageError, WorkerLost, WorkerError
            See :func:`bigdl.tuning.optimize`.
        """
        optimize(
            self.study,
            objective,
            n_trials,
            backend="spark",
            concurrency=concurrency,
            cores_per_trial=cores_per_trial,
            workers_per_trial=workers_per_trial,
            timeout=timeout,
            catch=catch,
            callbacks=callbacks,
            data=data,
        )
