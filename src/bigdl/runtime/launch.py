"""Run a function in several fresh Python processes of this machine and collect what it returns.

Each worker is a new interpreter that gets the function by ``cloudpickle``. It is not a fork, which
hangs once the parent has run an OpenMP region, nor ``multiprocessing``'s spawn, which cannot find
what a notebook has defined. A worker never outlives its parent, however the parent ends.

The life of a launch: a :class:`_Crew` starts its workers, passes on what they print while it waits
for their outcomes, and stops all that are left when the first of them fails, when the time is up,
or when the user interrupts. Payload and outcomes travel in unlinked files, so nothing stays behind.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from bigdl.common.cpu import THREAD_VARIABLES, cpu_quota, split_cores, topology, usable_cores
from bigdl.common.errors import BigDLError, UsageError, WorkerError, WorkerLost
from bigdl.runtime._launch_output import WorkerStream

__all__ = ["LaunchTimeout", "launch"]

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_TICK = 0.1  # seconds between two looks at workers that say nothing
# A parent's pinning to cores that are not the worker's defeats the worker's own.
_PINNING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class LaunchTimeout(BigDLError, TimeoutError):
    """Workers were still running when the time given to :func:`launch` was up."""


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    args: Iterable[Any] = (),
    *,
    cores: Sequence[Iterable[int]] | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    log_dir: str | Path | None = None,
    stream_output: bool = True,
) -> list[Any]:
    """Run ``fn(rank, *args)`` in `nprocs` new processes and return the results in rank order.

    `fn`, `args` and the results may hold lambdas, closures, and functions and classes of a script
    or a notebook. The workers import from the same ``sys.path`` as the caller.

    Parameters
    ----------
    fn : callable
        Called in each worker with its rank, 0 to ``nprocs - 1``, and `args`.
    nprocs : int
        Number of workers.
    args : iterable
        Further arguments of `fn`.
    cores : sequence of iterable of int, optional
        Logical cores of each worker; by default :func:`bigdl.common.cpu.split_cores`. A worker is
        pinned to its cores before it imports anything heavy, and its OpenMP and BLAS thread counts
        are set to the number of its physical cores, or to its share of the CPU quota if that is
        less.
    env : mapping of str to str, optional
        Additions to the workers' environment; None removes a variable.
    timeout : float, optional
        Seconds for the whole launch, the start of the interpreters included.
    log_dir : str or Path, optional
        Directory for a file ``worker-<rank>.log`` with what each worker printed. It is created if
        it does not exist.
    stream_output : bool
        Whether the workers' lines appear on the caller's stdout and stderr after ``[rank]``.

    Returns
    -------
    list

    Raises
    ------
    WorkerError
        If `fn` raised in a worker: the first failure, with that worker's traceback.
    WorkerLost
        If a worker was killed or exited before `fn` returned.
    LaunchTimeout
        If a worker was still running after `timeout` seconds.
    UsageError
        If an argument makes no sense, or `fn` or `args` cannot be pickled.

    Notes
    -----
    When one worker fails, when the time is up and on Ctrl-C, the others get SIGTERM and 5 seconds
    later SIGKILL. Processes that a worker started end with it, unless they left its process group.
    """
    if not callable(fn):
        raise UsageError(f"launch runs a function, but fn is {fn!r}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise UsageError(f"nprocs must be an int of at least 1, but it is {nprocs!r}")
    if timeout is not None and timeout <= 0:
        raise UsageError(f"timeout must be a positive number of seconds, but it is {timeout!r}")
    shares = worker_shares(nprocs, cores)
    with _Crew(log_dir, stream_output) as crew:
        crew.start(fn, tuple(args), shares, dict(env or {}))
        return crew.results(timeout)


class _Worker:
    """The parent's view of one worker."""

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen,
        status: int,
        outcome: BinaryIO,
        streams: list[WorkerStream],
    ):
        self.rank = rank
        self.process = process
        self.status = status
        self.streams = streams
        self.outcome: tuple[bool, Any] | None = None
        self._outcome_file = outcome
        self._cleared = False

    def read_status(self) -> bool:
        """Load the outcome once it is complete; False when the worker's end of the pipe closes."""
        try:
            said = os.read(self.status, 1)
        except BlockingIOError:
            return True
        if said:
            self._outcome_file.seek(0)
            self.outcome = pickle.load(self._outcome_file)
        return bool(said)

    def ended(self) -> bool:
        """Whether the process is gone, and then its own children too."""
        if self.process.poll() is None:
            return False
        if not self._cleared:
            self._kill_group()
            self._cleared = True
        return True

    def settle(self) -> None:
        """Wait for a process that is dying: peers notice before its last thread is gone."""
        if not self.ended() and _is_dying(self.process.pid):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)

    def failure(self) -> tuple[float, int, BigDLError] | None:
        """When, where and how the worker failed, if it did."""
        ended = self.ended()
        self.read_status()  # after the line above: one that has ended says nothing more
        if self.outcome is not None:
            succeeded, content = self.outcome
            if succeeded:
                return None
            when, kind, traceback = content
            return when, self.rank, WorkerError(self.rank, kind, traceback)
        if not ended:
            return None
        self.drain()
        # A loss goes before all errors: it is what makes its peers raise.
        return 0.0, self.rank, WorkerLost(self._obituary())

    def interrupt(self) -> None:
        """Ask the worker to end, unless it is ending by itself."""
        if self.outcome is None and not self.ended():
            self.process.terminate()

    def kill(self) -> None:
        """End the worker and its own children now."""
        if not self.ended():
            self._kill_group()
            self.process.kill()  # it may have left its group
            with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, on a dead disk
                self.process.wait(_GRACE)

    def drain(self) -> None:
        for stream in self.streams:
            stream.drain()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _obituary(self) -> str:
        cause = cause_of_end(self.process.returncode)
        tail = self.streams[1].tail()
        last = f"the last lines of its stderr:\n{tail}" if tail else "its stderr was empty"
        return f"worker {self.rank} {cause}; {last}"


def _is_dying(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "ZX"
    return False


class _Crew:
    """The workers of one launch; a context that none of them and no descriptor leaves."""

    def __init__(self, log_dir: str | Path | None, stream_output: bool):
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._stream_output = stream_output
        self._workers: list[_Worker] = []
        self._resources = ExitStack()
        self._selector = selectors.DefaultSelector()
        self._resources.callback(self._selector.close)

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *exception) -> None:
        with self._resources:
            self._stop()

    def start(self, fn: Callable, args: tuple, shares: list, env: dict) -> None:
        """Start one worker for each (cores, threads) in `shares`."""
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        environ, header = worker_environ(env)
        payload = self._resources.enter_context(_payload(header, fn, args))
        lifeline = self._lifeline()
        for rank, (cores, threads) in enumerate(shares):
            limits = {name: str(threads) for name in THREAD_VARIABLES if name not in env}
            order = {"payload": payload.fileno(), "lifeline": lifeline, "cores": cores}
            self._start_worker(rank, order, environ | limits)

    def results(self, timeout: float | None) -> list[Any]:
        """Wait for all workers; raise what went wrong first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._pump()
            # In this order: one that ends in between is seen the next time.
            running = [worker.rank for worker in self._workers if not worker.ended()]
            if self._first_failure() is not None:
                # a worker whose loss caused the error is seen now, if it was not yet
                for worker in self._workers:
                    worker.settle()
                raise cast("tuple", self._first_failure())[-1]
            if not running:
                return [cast("tuple", worker.outcome)[1] for worker in self._workers]
            if deadline is not None and time.monotonic() > deadline:
                ranks = ", ".join(map(str, running))
                raise LaunchTimeout(
                    f"{len(running)} of {len(self._workers)} workers (rank {ranks}) had not ended "
                    f"after {timeout:g} s and were stopped; raise timeout if they need longer"
                )

    def _first_failure(self) -> tuple | None:
        failures = [worker.failure() for worker in self._workers]
        return min((failure for failure in failures if failure), default=None)

    def _start_worker(self, rank: int, order: dict, environ: dict) -> None:
        outcome = self._resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        log = None
        if self._log_dir is not None:
            path = self._log_dir / f"worker-{rank}.log"
            log = self._resources.enter_context(path.open("wb", buffering=0))
        status, status_of_worker = os.pipe()
        self._resources.callback(os.close, status)
        os.set_blocking(status, False)
        order = order | {
            "rank": rank,
            "parent": os.getpid(),
            "outcome": outcome.fileno(),
            "status": status_of_worker,
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bigdl.runtime._launch_main", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[order[name] for name in ("payload", "lifeline", "outcome", "status")],
                env=environ,
                # The terminal's Ctrl-C is for the parent, which then stops its workers in order.
                process_group=0,
            )
        finally:
            os.close(status_of_worker)
        streams = []
        pipes = cast("tuple[BinaryIO, BinaryIO]", (process.stdout, process.stderr))
        for name, pipe in zip(("stdout", "stderr"), pipes, strict=True):
            self._resources.enter_context(pipe)
            streams.append(WorkerStream(pipe, name, f"[{rank}] ", log, self._stream_output))
            self._selector.register(pipe, selectors.EVENT_READ, streams[-1].read)
        worker = _Worker(rank, process, status, outcome, streams)
        self._workers.append(worker)
        self._selector.register(status, selectors.EVENT_READ, worker.read_status)

    def _lifeline(self) -> int:
        """The workers' end of a pipe that the kernel closes when this process is gone."""
        ends = os.pipe()
        for end in ends:
            self._resources.callback(os.close, end)
        return ends[0]

    def _pump(self) -> None:
        """Pass on what workers print and say, for at most one tick."""
        for key, _ in self._selector.select(_TICK):
            if not key.data():
                self._selector.unregister(key.fileobj)

    def _stop(self) -> None:
        try:
            for worker in self._workers:
                worker.interrupt()
            deadline = time.monotonic() + _GRACE
            while time.monotonic() < deadline:
                if all(worker.ended() for worker in self._workers):
                    break
                self._pump()
        finally:  # also when the user interrupts again
            for worker in self._workers:
                worker.kill()
        for worker in self._workers:
            worker.drain()


def worker_environ(changes: Mapping[str, str | None]) -> tuple[dict[str, str], dict[str, Any]]:
    """Environment in which a fresh interpreter finds what this one finds.

    Parameters
    ----------
    changes : mapping of str to str
        Additions to the environment of this process; None removes a variable.

    Returns
    -------
    environ : dict
        Without the pinning of this process.
    header : dict
        What :func:`bigdl.runtime._launch_main.restore` takes to undo in the worker what only its
        start needed.
    """
    environ = {name: os.environ[name] for name in os.environ if name not in _PINNING_VARIABLES}
    environ = _updated(environ, changes)
    header = {"argv": sys.argv, "pythonpath": environ.get("PYTHONPATH")}
    # The worker finds this package where the caller found it, then restores the variable.
    paths = [changes.get("PYTHONPATH"), *sys.path]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if isinstance(path, str))
    return environ, header


def cause_of_end(code: int) -> str:
    """What the exit code of a worker that ended too early tells, to follow "the worker"."""
    if code >= 0:
        return f"ended with exit code {code} before its function returned"
    names = {number.value: number.name for number in signal.Signals}
    cause = f"was killed by {names.get(-code, f'signal {-code}')}"
    if -code == signal.SIGKILL:
        cause += " (as the kernel does when memory runs out)"
    return cause


def worker_shares(
    nprocs: int, cores: Sequence[Iterable[int]] | None
) -> list[tuple[list[int], int]]:
    """Cores and thread count of each worker."""
    machine = topology()
    if cores is None:
        shares = split_cores(nprocs, machine)
    else:
        shares = [sorted(set(share)) for share in cores]
    if len(shares) != nprocs:
        raise UsageError(f"cores must name the cores of each of {nprocs} workers, not {shares}")
    usable = usable_cores()
    for share in shares:
        if not share or not set(share) <= set(usable):
            raise UsageError(f"A worker cannot run on cores {share}; choose from {usable}")
    quota = cpu_quota()
    most = len(usable) if quota is None else max(1, int(quota / nprocs))
    return [(share, min(machine.physical_count(share), most)) for share in shares]


def _payload(header: dict, fn: Callable, args: tuple) -> BinaryIO:
    """An unlinked file for the workers to map, which is all gone when the last of them is."""
    import cloudpickle

    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is the result
    try:
        pickle.dump(header, file)
        cloudpickle.dump((fn, args), file)
        file.flush()
    except Exception as error:
        file.close()
        raise UsageError(
            f"The function or its arguments cannot be sent to the workers: {error}"
        ) from error
    return file


def _updated(environ: dict[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**environ, **changes}
    return {name: str(value) for name, value in merged.items() if value is not None}
