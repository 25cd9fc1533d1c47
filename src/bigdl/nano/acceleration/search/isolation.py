"""Trials in a separate process, so that a hang, a crash or lack of memory ends only one trial.

One process tries all methods, so that frameworks and runtimes are imported once. A watchdog thread
in the caller's process kills it if a method exceeds its time or memory limit; the next method gets
a new process. If a process dies after it has tried other methods, the method is tried once more in
a new process, so that no row depends on earlier trials.
"""

import gc
import os
import pickle
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from bigdl.common.cpu import usable_cores
from bigdl.common.errors import BigDLError, WorkerLost, one_line, user_stacklevel
from bigdl.common.memory import available_memory
from bigdl.common.platform.memory import PeakMeter, be_killed_first, trim
from bigdl.common.private_folders import VARIABLE as SCRATCH
from bigdl.nano.acceleration.method import ORIGINAL
from bigdl.nano.acceleration.search.trial import Bench, SearchOptions, Trial, try_method
from bigdl.runtime.pool import CpuSlot, PoolStage, WorkerPool

_ENDING_PROCESS = ("crashed", "out of memory", "timed out")
"""Statuses after which the process has ended or must be replaced."""
_TICK = 0.1  # seconds between two checks of the process
_RUNS_FOR_MEMORY = 3
_MEGABYTE = 1 << 20
_LEAST_TIME = 300.0  # seconds
_TIMES_OF_ORIGINAL = 20
_SHARE_OF_MEMORY = 0.9
_BENCH, _STAGE, _LOG = "bench.pkl", "stage", "output.log"


class TrialRunner:
    """Executor that runs trials in another process, or in this one if they cannot be pickled.

    Parameters
    ----------
    bench : Bench
    options : SearchOptions
    directory : Path
        Directory for the runner's files.

    Warns
    -----
    UserWarning
        If the bench cannot be pickled, or cannot be loaded in another process.
    """

    def __init__(self, bench: Bench, options: SearchOptions, directory: Path):
        self._bench, self._options, self._directory = bench, options, directory
        self._memory_limit = options.memory_limit or int(_SHARE_OF_MEMORY * available_memory())
        self._pool: Any = None  # None: trials run in this process
        self._is_fresh = True
        failure = "cannot be pickled"
        try:
            with (directory / _BENCH).open("wb") as file:
                cloudpickle.dump(bench, file)
            failure = "cannot be loaded in another process"
            self._pool = self._open(_make_trials)
        except Exception as error:
            warnings.warn(
                "Methods are tried in this process, where a crash or a hang of one ends the whole "
                "search. A separate process needs the model, the data and the metric, but they "
                f"{failure}: {one_line(error)}",
                stacklevel=user_stacklevel(),
            )

    def run(self, name: str, directory: Path, time_limit: float | None) -> Trial:
        """Run the trial of one method.

        Parameters
        ----------
        name : str
            The method.
        directory : Path
            Directory for the method's model.
        time_limit : float or None
            Time limit in seconds.
        """
        if self._pool is None:
            with self._bench.session():
                return try_method(self._bench, name, self._options, directory)
        begin = time.monotonic()
        was_fresh = self._is_fresh
        trial = self._attempt(name, directory, time_limit)
        if self._is_fresh and not was_fresh and trial.status != "timed out":
            trial = self._attempt(name, directory, time_limit)
        trial.seconds = time.monotonic() - begin
        return trial

    def measure_memory(self, trial: Trial, directory: Path, time_limit: float | None) -> None:
        """Measure the memory that a model needs in a fresh process."""
        if self._pool is None:  # the memory of one model is measurable in a fresh process only
            why = "its memory use is unknown, because it ran in the caller's process"
            trial.reason = trial.reason or why
            return
        try:
            pool = self._open(_make_memory_meter)
            with pool, _limited(pool, time_limit, self._memory_limit):
                trial.memory = pool.run([directory if trial.saved else None])[0]
        except BigDLError as error:
            trial.reason = trial.reason or f"its memory use is unknown: {one_line(error)}"

    def close(self) -> None:
        """Stop the process of the trials."""
        if self._pool is not None:
            self._pool.close()

    def _open(self, make: Callable) -> WorkerPool:
        slot = CpuSlot(tuple(usable_cores()), self._bench.library_threads)
        made = partial(make, self._directory, self._options)
        return WorkerPool([PoolStage("optimize", made, [slot])])

    def _attempt(self, name: str, directory: Path, time_limit: float | None) -> Trial:
        """Run one trial; if the trial ended the process, start a new process for the next trial."""
        trial = self._outcome(name, directory, time_limit)
        self._is_fresh = trial.status in _ENDING_PROCESS
        if self._is_fresh:
            self._pool.close()
            self._pool = self._open(_make_trials)
        return trial

    def _outcome(self, name, directory, time_limit) -> Trial:
        stage_file = self._directory / _STAGE
        stage_file.write_text("convert")
        with _limited(self._pool, time_limit, self._memory_limit) as verdicts:
            try:
                return self._pool.run([(name, directory)])[0]
            except BigDLError as error:
                stage = stage_file.read_text() or "convert"
                if isinstance(error, WorkerLost):
                    crash = "crashed", self._exit_message(error)
                    status, reason = verdicts[0] if verdicts else crash
                else:  # for example SystemExit, which is not an Exception
                    status = "fail to convert" if stage == "convert" else "fail to forward"
                    reason = one_line(error)
                return Trial(name, status, f"{reason}, at stage {stage!r}", stage)

    def _exit_message(self, loss: WorkerLost) -> str:
        cause = str(loss).partition(";")[0].replace("worker 0 of optimize", "the process")
        log = self._directory / _LOG
        output = log.read_text(errors="replace") if log.exists() else ""
        fatal = [line for line in output.splitlines() if line.startswith(("Fatal", "terminate"))]
        return f"{cause} ({fatal[-1].strip()})" if fatal else cause


@contextmanager
def _limited(
    pool: WorkerPool, time_limit: float | None, memory_limit: int
) -> Iterator[list[tuple[str, str]]]:
    """Kill a pool's process if it exceeds the time or memory limit.

    Yields
    ------
    list of tuple of str
        Receives the status and the reason if the process is killed.
    """
    verdicts: list[tuple[str, str]] = []
    begin = time.monotonic()
    over = threading.Event()

    def exceeded() -> tuple[str, str] | None:
        if time_limit is not None and time.monotonic() - begin > time_limit:
            return "timed out", f"it took more than {time_limit:g} s"
        with suppress(psutil.Error):  # the process has just ended
            if max(psutil.Process(pid).memory_info().rss for pid in pool.pids[0]) > memory_limit:
                megabytes = memory_limit // _MEGABYTE
                return "out of memory", f"the process took more than {megabytes} MB"
        return None

    def watch() -> None:
        while not over.wait(_TICK):
            if verdict := exceeded():
                verdicts.append(verdict)
                pool.kill()
                return

    thread = threading.Thread(target=watch, name="bigdl-watchdog", daemon=True)
    thread.start()
    try:
        yield verdicts
    finally:
        over.set()
        thread.join()


# The following functions run in the separate process.


def _make_trials(files: Path, options: SearchOptions) -> Callable[[tuple[str, Path]], Trial]:
    _set_up(files, options)
    bench = _read(files)

    def run(task: tuple[str, Path]) -> Trial:
        name, directory = task
        with bench.session():
            trial = try_method(bench, name, options, directory, (files / _STAGE).write_text)
        _release_memory()
        return trial

    return run


def _make_memory_meter(files: Path, options: SearchOptions) -> Callable[[Path | None], float]:
    _set_up(files, options)
    return partial(_measure_memory, files)


def _measure_memory(files: Path, saved: Path | None) -> float:
    """Return the megabytes that loading and running a model adds to a process."""
    _read(files)  # imports the framework
    _release_memory()
    before = psutil.Process().memory_info().rss
    bench = _read(files)
    with bench.session():
        if saved is None:
            candidate = bench.build(bench.methods[ORIGINAL], bench.thread_num)
        else:
            candidate = bench.load(saved)
            bench.drop_original()
        _release_memory()
        with PeakMeter() as meter:
            for _ in range(_RUNS_FOR_MEMORY):
                candidate(bench.batches()[0])
    return (meter.peak - before) / _MEGABYTE


def _set_up(files: Path, options: SearchOptions) -> None:
    """Raise the OOM score, use a scratch directory and redirect output to a log file."""
    os.environ[SCRATCH] = str(files)
    be_killed_first()
    if not options.logging:
        with (files / _LOG).open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)


def _read(files: Path) -> Bench:
    with (files / _BENCH).open("rb") as file:
        return pickle.load(file)


def _release_memory() -> None:
    gc.collect()
    trim()


def search(
    bench: Bench,
    names: Sequence[str],
    options: SearchOptions,
    directory: Path,
    progress: Callable[[Trial | str], None],
) -> list[Trial]:
    """Run the trials of a search, one method after the other.

    Parameters
    ----------
    bench : Bench
    names : sequence of str
        Names of the methods, the original first.
    options : SearchOptions
    directory : Path
        Directory for the models; each is saved in a subdirectory ``<name>``.
    progress : callable
        Called with the name of each method when its trial starts, and with the trial when it ends.

    Returns
    -------
    list of Trial
        Finished trials; only the original's if the original does not run.
    """
    files = directory / ".work"
    files.mkdir()
    runner = TrialRunner(bench, options, files)
    trials: list[Trial] = []
    seconds = options.time_limit
    try:
        for name in names:
            progress(name)
            trial = runner.run(name, directory / name, seconds)
            if options.objective == "memory" and trial.usable:
                runner.measure_memory(trial, directory / name, seconds)
            if not trial.saved:
                shutil.rmtree(directory / name, ignore_errors=True)
            trials.append(trial)
            progress(trial)
            if not trials[0].usable:
                break
            if seconds is None:
                seconds = max(_LEAST_TIME, _TIMES_OF_ORIGINAL * trial.seconds)
    finally:
        runner.close()
        shutil.rmtree(files, ignore_errors=True)
    return trials
