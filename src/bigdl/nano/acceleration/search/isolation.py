"""Trials in a process of their own: a hang, a crash or a lack of memory ends that and no more.

One process takes the methods in turn, so that frameworks and runtimes are imported once. A watch
in the caller's process kills it when a method takes too long or too much memory; the next method
gets a new one. A method whose process was lost after it had served others is tried once more in a
new one, so that no row depends on what ran before it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cloudpickle
import psutil

from bigdl.common.cpu import usable_cores
from bigdl.common.environment import VARIABLE as SCRATCH
from bigdl.common.errors import BigDLError, UsageError, WorkerLost, one_line
from bigdl.common.memory import available_memory
from bigdl.nano.acceleration.method import ORIGINAL
from bigdl.nano.acceleration.search.trial import Bench, Plan, Trial, try_method
from bigdl.runtime.pool import CpuSlot, Stage, WorkerPool

_ENDING_PROCESS = ("crashed", "out of memory", "timed out")
"""Statuses after which the process is gone, or had better go."""
_TICK = 0.1  # seconds between two looks at the process
_MEMORY_KILLED_FIRST = 1000  # of oom_score_adj, from -1000 to 1000
_RUNS_TO_WEIGH = 3
_MEGABYTE = 1 << 20


class TrialsInProcess:
    """Runs trials where it is called, without limits: for models that cannot be pickled."""

    def __init__(self, bench: Bench, plan: Plan):
        self._bench = bench
        self._plan = plan

    def run(self, name: str, directory: Path, time_limit: float | None) -> Trial:
        """One trial."""
        with self._bench.session():
            return try_method(self._bench, name, self._plan, directory)

    def weigh(self, trial: Trial, directory: Path, time_limit: float | None) -> None:
        """Nothing: only a process of its own tells what one model takes."""
        trial.reason = trial.reason or "its memory is not known, as it ran in the caller's process"

    def close(self) -> None:
        """Nothing."""


class TrialProcess:
    """Runs trials in another process.

    Parameters
    ----------
    bench : Bench
    plan : Plan
    directory : Path
        For its files.
    threads : int
        Threads of the numeric libraries there.
    memory_limit : int or None
        Bytes of resident memory of that process.
    show : bool
        Whether what it prints appears on this process's streams.

    Raises
    ------
    UsageError
        If the bench cannot be pickled, or not be loaded in another process.
    """

    def __init__(
        self,
        bench: Bench,
        plan: Plan,
        directory: Path,
        threads: int,
        memory_limit: int | None,
        show: bool,
    ):
        self._memory_limit = memory_limit
        self._slots = [CpuSlot(tuple(usable_cores()), threads)]
        self._bench_file = directory / "bench.pkl"
        self._stage_file = directory / "stage"
        self._log = None if show else directory / "output.log"
        try:
            with self._bench_file.open("wb") as file:
                cloudpickle.dump(bench, file)
        except Exception as error:
            raise UsageError(f"they cannot be pickled: {one_line(error)}") from error
        self._make = partial(_make_trials, str(self._bench_file), plan, self._stage_file, self._log)
        try:
            self._pool = self._open()
        except BigDLError as error:
            raise UsageError(
                f"they cannot be loaded in another process: {one_line(error)}"
            ) from error
        self._is_fresh = True

    def run(self, name: str, directory: Path, time_limit: float | None) -> Trial:
        """One trial.

        Parameters
        ----------
        name : str
            The method.
        directory : Path
            Where its model is saved.
        time_limit : float or None
            Seconds.
        """
        begin = time.monotonic()
        was_fresh = self._is_fresh
        trial = self._attempt(name, directory, time_limit)
        if not self._keep_process(trial) and not was_fresh and trial.status != "timed out":
            trial = self._attempt(name, directory, time_limit)
            self._keep_process(trial)
        trial.seconds = time.monotonic() - begin
        return trial

    def weigh(self, trial: Trial, directory: Path, time_limit: float | None) -> None:
        """Measure the memory of a model in a fresh process, which is all that it does."""
        saved = directory if trial.saved else None
        make = partial(_make_scale, str(self._bench_file), self._log)
        try:
            pool = WorkerPool([Stage("optimize", make, self._slots)])
            with pool, _limited(pool, time_limit, self._memory_limit):
                trial.memory = pool.run([saved])[0]
        except BigDLError as error:
            trial.reason = trial.reason or f"its memory is not known: {one_line(error)}"

    def close(self) -> None:
        """End the process."""
        self._pool.close()

    def _keep_process(self, trial: Trial) -> bool:
        """Return True if the process goes on; else start another before the next clock starts."""
        self._is_fresh = trial.status in _ENDING_PROCESS
        if self._is_fresh:
            self._pool.close()
            self._pool = self._open()
        return not self._is_fresh

    def _open(self) -> WorkerPool:
        return WorkerPool([Stage("optimize", self._make, self._slots)])

    def _attempt(self, name, directory, time_limit) -> Trial:
        self._stage_file.write_text("convert")
        with _limited(self._pool, time_limit, self._memory_limit) as verdicts:
            try:
                return self._pool.run([(name, directory)])[0]
            except BigDLError as error:
                stage = self._stage_file.read_text() or "convert"
                if isinstance(error, WorkerLost):
                    crash = "crashed", self._exit_message(error)
                    status, reason = verdicts[0] if verdicts else crash
                else:  # what was raised is no Exception but SystemExit, say
                    status = "fail to convert" if stage == "convert" else "fail to forward"
                    reason = one_line(error)
                return Trial(name, status, f"{reason}, at stage {stage!r}", stage)

    def _exit_message(self, loss: WorkerLost) -> str:
        cause = str(loss).partition(";")[0].replace("worker 0 of optimize", "the process")
        output = self._log.read_text(errors="replace") if self._log and self._log.exists() else ""
        fatal = [line for line in output.splitlines() if line.startswith(("Fatal", "terminate"))]
        return f"{cause} ({fatal[-1].strip()})" if fatal else cause


@contextmanager
def _limited(
    pool: WorkerPool, time_limit: float | None, memory_limit: int | None
) -> Iterator[list[tuple[str, str]]]:
    """Kill the process of a pool that takes too long or too much memory.

    Yields
    ------
    list of tuple of str
        Gets the status and the reason if it was killed.
    """
    verdicts: list[tuple[str, str]] = []
    begin = time.monotonic()
    over = threading.Event()

    def exceeded() -> tuple[str, str] | None:
        if time_limit is not None and time.monotonic() - begin > time_limit:
            return "timed out", f"it took more than {time_limit:g} s"
        if memory_limit is not None:
            with suppress(psutil.Error):  # it has just ended
                used = max(psutil.Process(pid).memory_info().rss for pid in pool.pids[0])
                if used > memory_limit:
                    megabytes = memory_limit // _MEGABYTE
                    return "out of memory", f"the process took more than {megabytes} MB"
        return None

    def watch() -> None:
        while not over.wait(_TICK):
            if verdict := exceeded():
                verdicts.append(verdict)
                pool.kill()
                return

    thread = threading.Thread(target=watch, name="bigdl-watch", daemon=True)
    thread.start()
    try:
        yield verdicts
    finally:
        over.set()
        thread.join()


# What follows runs in the other process.


def _make_trials(bench_file: str, plan: Plan, stage_file: Path, log: Path | None) -> Callable:
    _set_up(log, Path(bench_file).parent)
    bench = _read(bench_file)

    def run(order: tuple[str, Path]) -> Trial:
        name, directory = order
        with bench.session():
            trial = try_method(bench, name, plan, directory, stage_file.write_text)
        _give_memory_back()
        return trial

    return run


def _make_scale(bench_file: str, log: Path | None) -> Callable[[Path | None], float]:
    _set_up(log, Path(bench_file).parent)
    return partial(_weigh, bench_file)


def _weigh(bench_file: str, saved: Path | None) -> float:
    """Megabytes that loading and running a model adds to a process with its framework in it."""
    _read(bench_file)  # imports what it needs
    _give_memory_back()
    before = psutil.Process().memory_info().rss
    bench = _read(bench_file)
    with bench.session():
        if saved is None:
            candidate = bench.build(bench.methods[ORIGINAL], bench.thread_num)
        else:
            candidate = bench.load(saved)
            bench.drop_original()
        _give_memory_back()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        for _ in range(_RUNS_TO_WEIGH):
            with candidate.context():
                bench.call(candidate.model, bench.batches()[0])
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    rss = int(peak[1]) << 10 if peak else psutil.Process().memory_info().rss
    return (rss - before) / _MEGABYTE


def _set_up(log: Path | None, directory: Path) -> None:
    """Be the first to go when the machine runs out of memory, leave no file, print to one."""
    os.environ[SCRATCH] = str(directory)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_MEMORY_KILLED_FIRST))
    if log is not None:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)


def _read(bench_file: str) -> Bench:
    with open(bench_file, "rb") as file:
        return pickle.load(file)


def _give_memory_back() -> None:
    gc.collect()
    with suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


_LEAST_TIME = 300.0  # seconds
_TIMES_OF_ORIGINAL = 20
_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True)
class Limits:
    """Limits of one method.

    Attributes
    ----------
    seconds : float or None
        None: 20 times what the original took, and at least five minutes; the original may take as
        long as it needs.
    memory : int or None
        Bytes of resident memory of the process in which methods are tried; None: 90 % of what is
        free at the beginning.
    """

    seconds: float | None = None
    memory: int | None = None

    def after(self, original: Trial) -> float:
        """Seconds for each method but the original."""
        if self.seconds is not None:
            return self.seconds
        return max(_LEAST_TIME, _TIMES_OF_ORIGINAL * original.seconds)

    @property
    def bytes(self) -> int:
        """Bytes of resident memory."""
        return self.memory or int(_SHARE_OF_MEMORY * available_memory())


def search(
    bench: Bench,
    names: Sequence[str],
    plan: Plan,
    limits: Limits,
    directory: Path,
    *,
    threads: int,
    show: bool = False,
    progress: Callable[[Trial | str], None] = lambda event: None,
) -> list[Trial]:
    """Try methods one after the other.

    Parameters
    ----------
    bench : Bench
    names : sequence of str
        The original first.
    plan : Plan
    limits : Limits
    directory : Path
        Gets a directory ``<name>`` for each model that was saved.
    threads : int
        Threads of the numeric libraries in the process in which methods are tried.
    show : bool
        Whether the output of that process appears.
    progress : callable
        Told the name of each method as its trial begins, and the trial when it is over.

    Returns
    -------
    list of Trial
        If the original does not work, it is the only one.
    """
    files = directory / ".work"
    files.mkdir()
    runner = _runner(bench, plan, files, threads, limits, show)
    trials: list[Trial] = []
    try:
        for name in names:
            progress(name)
            seconds = limits.after(trials[0]) if trials else limits.seconds
            trial = runner.run(name, directory / name, seconds)
            if plan.objective == "memory" and trial.usable:
                runner.weigh(trial, directory / name, seconds)
            if not trial.saved:
                shutil.rmtree(directory / name, ignore_errors=True)
            trials.append(trial)
            if trial.usable:
                trial.on_the_scale_of(trials[0])
            progress(trial)
            if not trials[0].usable:
                break
    finally:
        runner.close()
        shutil.rmtree(files, ignore_errors=True)
    return trials


def _runner(bench, plan, files, threads, limits, show) -> TrialProcess | TrialsInProcess:
    try:
        return TrialProcess(bench, plan, files, threads, limits.bytes, show)
    except UsageError as error:
        warnings.warn(
            "Methods are tried in this process, where a crash or a hang of one ends the whole "
            f"search, as the model, the data and the metric have to go to another one and {error}",
            stacklevel=4,
        )
        return TrialsInProcess(bench, plan)
