"""Execution of a study's trials in one or several processes.

With several processes, Optuna's threads in this process create trials. Each thread passes its trial
to a free process of a :class:`TrialPool`, which has the objective and a connection to the study's
storage. There the trial suggests its parameters and reports its epochs. Its metrics are returned to
this process, where Optuna records them and runs callbacks. So one process calls ask and tell, as if
the trials ran in it.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from bigdl.common.checks import check_positive
from bigdl.common.errors import LazyModule, UsageError, WorkerError, WorkerLost
from bigdl.runtime.messages import encode
from bigdl.runtime.pool import PoolStage, PoolWorker, TaskError, WorkerManager
from bigdl.runtime.process import cpu_slots
from bigdl.tuning.study import propose_again, record_process

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

    Objective = Callable[[Trial], float | Sequence[float]]

optuna = LazyModule("optuna", "automl")


def run_trials(
    study: Study,
    objective: Objective,
    n_trials: int | None = None,
    *,
    processes: int = 1,
    threads: int = 1,
    cores: Sequence[Iterable[int]] | None = None,
    timeout: float | None = None,
    catch: type[Exception] | Iterable[type[Exception]] = (),
    callbacks: Iterable[Callable[[Study, FrozenTrial], None]] = (),
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
) -> None:
    """Run the trials of a study like ``study.optimize``, in one or several processes.

    Parameters
    ----------
    study : optuna.Study
        A study of :func:`~bigdl.tuning.open_study`.
    objective : callable
        Takes a trial and returns its metrics. Raises ``optuna.TrialPruned`` to end it early.
    n_trials : int, optional
        Number of trials to run.
    processes : int
        Number of processes. With more than one, trials run in new interpreters, each on its share
        of the cores, and the study must be in a database. The objective is sent by
        ``cloudpickle``. The trial of a killed process fails, does not count, and is repeated once
        with the same parameters.
    threads : int
        Number of concurrent trials in this process.
    cores : sequence of iterable of int, optional
        Logical cores of each process; default: a split of this process's cores.
    timeout : float, optional
        Seconds after which no trial starts.
    catch : exception types
        Exceptions of an objective that do not end the search.
    callbacks : iterable of callable
        Called in this process with the study and each finished trial.
    gc_after_trial : bool
        Run the garbage collector after each trial.
    show_progress_bar : bool
        Show a progress bar in this process.

    Raises
    ------
    UsageError
        If an argument is invalid, or several processes shall share an in-memory study.
    WorkerLost
        If all processes were killed before they finished a trial.
    Exception
        An exception of the objective, unless it is in `catch`.

    Examples
    --------
    >>> from bigdl.tuning import create_sampler, open_study, run_trials
    >>> sampler = create_sampler("grid", search_space={"x": [-1, 0, 1, 2]})
    >>> study = open_study(sampler=sampler)
    >>> run_trials(study, lambda trial: (trial.suggest_int("x", -1, 2) - 1) ** 2)
    >>> len(study.trials), study.best_params
    (4, {'x': 1})
    """
    if n_trials is not None:
        check_positive("n_trials", n_trials)
    check_positive("processes", processes)
    check_positive("threads", threads)
    exhaustive = optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler
    if n_trials is None and timeout is None and not isinstance(study.sampler, exhaustive):
        raise UsageError(
            "A search needs an end: pass n_trials, or timeout in seconds",
            code="argument-missing",
            argument="n_trials",
        )
    settings: dict[str, Any] = {
        "catch": (catch,) if isinstance(catch, type) else tuple(catch),
        "callbacks": list(callbacks),
        "gc_after_trial": gc_after_trial,
        "show_progress_bar": show_progress_bar,
    }
    record_process(study)
    if processes == 1:
        recorded = functools.partial(_recorded, objective)
        study.optimize(recorded, n_trials, timeout, n_jobs=threads, **settings)
        return
    if isinstance(study._storage, optuna.storages.InMemoryStorage):
        raise UsageError(
            f"{processes} processes cannot share a study in memory; pass a storage such as "
            "'sqlite:///search.db'",
            code="argument-missing",
            argument="storage",
        )
    if threads > 1:
        raise UsageError(
            f"Trials run in {processes} processes or {threads} threads, not in both",
            code="argument-conflict",
            argument="processes",
        )
    if n_trials is not None and cores is None:
        processes = min(processes, n_trials)
    with contextlib.closing(TrialPool(study, objective, processes, cores)) as pool:
        pool.run(n_trials, timeout, **settings)


def _recorded(objective: Objective, trial: Trial) -> float | Sequence[float]:
    """Record that this process runs a trial, then run the objective."""
    record_process(trial)
    return objective(trial)


class TrialPool:
    """Pool of processes, callable as an Optuna objective that runs each trial in a free process.

    Parameters
    ----------
    study : optuna.Study
        A study in a database.
    objective : callable
        The objective of the study.
    count : int
        Number of processes.
    cores : sequence of iterable of int, optional
        Logical cores of each process.

    Attributes
    ----------
    lost : TrialLost or None
        The latest loss of a process.
    has_finished : bool
        Whether a process has finished a trial.
    """

    def __init__(
        self,
        study: Study,
        objective: Objective,
        count: int,
        cores: Sequence[Iterable[int]] | None = None,
    ):
        make = functools.partial(_TrialProcess, study, objective)
        self._study, self._count = study, count
        stage = PoolStage("the search", make, cpu_slots(count, cores))
        self._manager = WorkerManager([stage], TaskError)
        self._idle: queue.SimpleQueue[PoolWorker] = queue.SimpleQueue()
        self._interrupted = threading.Event()
        self._retries = 0
        self._lock = threading.Lock()
        self.lost: TrialLost | None = None
        self.has_finished = False

    def __call__(self, trial: Trial) -> float | Sequence[float]:
        """Run one trial in a free process; Optuna calls this in several threads."""
        self._check_not_interrupted()
        record_process(trial)
        worker = self._idle.get()
        try:
            if worker.has_ended():
                worker = self._manager.replace(worker)
            worker.call(encode(trial.number))
            answer = worker.answer()
        except (EOFError, OSError):  # the process has ended
            self._check_not_interrupted()
            self.lost = self._mark_lost(worker, trial)
            raise self.lost from None
        finally:
            self._idle.put(worker)
        self.has_finished = True
        try:
            is_pruned, result = worker.opened(answer)
        except WorkerError as error:
            raise error.as_original(f"In the process of trial {trial.number}") from None
        # Optuna's copy of the trial lacks the parameters that the process suggested.
        trial._cached_frozen_trial = self._frozen(trial)
        if is_pruned:
            raise optuna.TrialPruned(result)
        return cast("float | Sequence[float]", result)

    def run(
        self,
        n_trials: int | None,
        timeout: float | None,
        *,
        catch: tuple[Any, ...],
        **settings: Any,  # of run_trials
    ) -> None:
        """Start the processes and run trials in as many Optuna threads; see :func:`run_trials`."""
        self._manager.fill()
        for worker in self._manager.all_workers():
            self._idle.put(worker)
        settings |= {"catch": (*catch, TrialLost), "n_jobs": self._count}
        deadline = None if timeout is None else time.monotonic() + timeout
        # In another thread: this one must receive interrupts while the trials run.
        with ThreadPoolExecutor(1, "bigdl-search") as thread:
            while n_trials is None or n_trials > 0:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    thread.submit(self._study.optimize, self, n_trials, left, **settings).result()
                except BaseException:
                    self._interrupt()
                    raise
                # Only the queued repetitions of lost trials remain.
                n_trials = self._retries if left is None or left > 0 else 0
                self._retries = 0
        if self.lost is not None and not self.has_finished:
            raise self.lost

    def close(self) -> None:
        """End the trial processes of the pool."""
        self._manager.end()

    def _interrupt(self) -> None:
        """End all running trials and their processes."""
        self._interrupted.set()
        for worker in self._manager.all_workers():
            worker.end()

    def _mark_lost(self, worker: PoolWorker, trial: Trial) -> TrialLost:
        """Queue a lost trial again and return the error to raise."""
        with self._lock:
            self._retries += propose_again(self._study, self._frozen(trial))
        cause = str(self._manager.loss(worker)).partition(";")[0]
        return TrialLost(f"{cause}, at trial {trial.number}")

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[trial.number]

    def _check_not_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise _SearchInterrupted("the search was interrupted")


class TrialLost(WorkerLost):
    """Raised when the process of a trial was killed or ended."""


class _SearchInterrupted(KeyboardInterrupt):
    """Raised when an interrupted search ends a trial's process; do not catch this exception."""


class _TrialProcess:
    """Callable that runs the study's trial with a given number in a process of the pool."""

    def __init__(self, study: Study, objective: Objective):
        study.sampler.reseed_rng()  # all processes received the same random state
        self._study = study
        self._objective = objective

    def __call__(self, number: int) -> tuple[bool, Any]:
        """Run a trial; return (True, reason) if it was pruned, else (False, metrics)."""
        # Reading all trials also adds the new one to the storage's cache.
        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        try:
            return False, self._objective(trial)
        except optuna.TrialPruned as pruned:
            return True, str(pruned)
        finally:
            self._study._storage.remove_session()
