"""Running the trials of a study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.tuning._by_name import optuna
from bigdl.tuning.crew import Crew, TrialLost
from bigdl.tuning.lost import mark
from bigdl.tuning.study import is_in_memory

__all__ = ["run_trials"]


def run_trials(
    study: Any,
    objective: Callable[[Any], float | Sequence[float]],
    n_trials: int | None = None,
    *,
    processes: int = 1,
    threads: int = 1,
    cores: Sequence[Iterable[int]] | None = None,
    timeout: float | None = None,
    catch: type[Exception] | Iterable[type[Exception]] = (),
    callbacks: Iterable[Callable[[Any, Any], None]] = (),
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
) -> None:
    """Run trials, as ``study.optimize`` does, in this process or in several.

    Parameters
    ----------
    study : optuna.Study
        Of :func:`~bigdl.tuning.open_study`.
    objective : callable
        Takes a trial and returns its figures. Raises ``optuna.TrialPruned`` to give it up.
    n_trials : int, optional
        How many trials to run.
    processes : int
        With more than one, trials run in so many fresh interpreters, each on its share of the
        cores, and the study must be in a database. The objective travels by ``cloudpickle``. A
        process that is killed loses the trial it was at: that one fails, is tried again with the
        same parameters once, and does not count.
    threads : int
        Trials at the same time in this process.
    cores : sequence of iterable of int, optional
        Logical cores of each process; by default this process's own are split.
    timeout : float, optional
        Seconds after which no trial is begun.
    catch : exception types
        What an objective may raise without ending the search.
    callbacks : iterable of callable
        Called in this process with the study and each trial that has ended.
    gc_after_trial : bool
        Whether the garbage is collected after each trial.
    show_progress_bar : bool

    Raises
    ------
    UsageError
        If an argument is wrong, or several processes are to share a study in memory.
    WorkerLost
        If all processes were killed before they had finished a trial.
    Exception
        What the objective has raised, unless it is in `catch`.
    """
    for name, value in (("n_trials", n_trials), ("processes", processes), ("threads", threads)):
        _check_count(name, value)
    _check_that_it_ends(study, n_trials, timeout)
    settings = {
        "catch": catch if isinstance(catch, type) else tuple(catch),
        "callbacks": list(callbacks),
        "gc_after_trial": gc_after_trial,
        "show_progress_bar": show_progress_bar,
    }
    if processes == 1:
        marked = objective if is_in_memory(study) else _Marked(objective)
        study.optimize(marked, n_trials, timeout, n_jobs=threads, **settings)
        return
    if is_in_memory(study):
        raise UsageError(
            f"{processes} processes cannot share a study that is in memory; give a storage such as "
            "'sqlite:///search.db'"
        )
    if threads > 1:
        raise UsageError(f"Trials run in {processes} processes or {threads} threads, not in both")
    if n_trials is not None and cores is None:
        processes = min(processes, n_trials)
    with Crew(study, objective, processes, cores) as crew:
        _run_in_processes(study, crew, processes, n_trials, timeout, settings)


class _Marked:
    """An objective whose trials are known to be of this process."""

    def __init__(self, objective: Callable[[Any], Any]):
        self._objective = objective

    def __call__(self, trial: Any) -> Any:
        mark(trial)
        return self._objective(trial)


def _run_in_processes(
    study: Any,
    crew: Crew,
    processes: int,
    n_trials: int | None,
    timeout: float | None,
    settings: dict[str, Any],
) -> None:
    """Let threads of Optuna each wait for a process."""
    catch = settings["catch"] if isinstance(settings["catch"], tuple) else (settings["catch"],)
    settings = settings | {"catch": (*catch, TrialLost), "n_jobs": processes}
    deadline = None if timeout is None else time.monotonic() + timeout
    # Not in this thread, which must hear of an interrupt while the others wait.
    with ThreadPoolExecutor(1, "bigdl-search") as pool:
        while n_trials is None or n_trials > 0:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                pool.submit(study.optimize, crew, n_trials, left, **settings).result()
            except BaseException:
                crew.end()
                raise
            # Those that were lost come first, and only they are left.
            n_trials = crew.count_proposed_again() if left is None or left > 0 else 0
    if crew.loss is not None and not crew.has_finished:
        raise crew.loss


def _check_count(name: str, value: Any) -> None:
    if value is None and name == "n_trials":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be an int of at least 1, but it is {value!r}")


def _check_that_it_ends(study: Any, n_trials: int | None, timeout: float | None) -> None:
    samplers = optuna().samplers
    exhaustive = isinstance(study.sampler, (samplers.GridSampler, samplers.BruteForceSampler))
    if n_trials is None and timeout is None and not exhaustive:
        raise UsageError("A search needs to know when to end: give n_trials, or timeout in seconds")
