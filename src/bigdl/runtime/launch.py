"""Run a function in several new Python processes on this machine and collect the results.

A launch starts a :class:`~bigdl.runtime.process.WorkerProcess` for each rank and forwards their
output while it waits for the results. It stops the remaining workers on the first failure, at the
time limit, or on an interrupt, so no process remains.
"""

import io
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import BigDLError, UsageError, WorkerLost
from bigdl.common.timeouts import LAUNCH_GRACE_S, LAUNCH_LOOK_S, OUTPUT_DRAIN_S
from bigdl.runtime.messages import PickledMessage, encode, encoded, opened
from bigdl.runtime.process import CpuSlot, WorkerProcess, cpu_slots

__all__ = ["LaunchTimeout", "launch"]

_TAIL_LINES = 20
_LONGEST_TAIL_LINE = 2000
_LONGEST_LINE = 1 << 20


class LaunchTimeout(BigDLError, TimeoutError):
    """Raised when workers are still running at the time limit of :func:`launch`."""

    code = "timeout"


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
        Seconds for the whole launch, including the start of the interpreters.
    log_dir : str or Path, optional
        Directory for files ``worker-<rank>.log`` with the output of each worker. It is created if
        it does not exist.
    stream_output : bool
        Whether the workers' output appears on the caller's stdout and stderr, prefixed by
        ``[rank]``.

    Returns
    -------
    list

    Raises
    ------
    WorkerError
        If `fn` raised in a worker: the first failure with that worker's traceback.
    WorkerLost
        If a worker was killed or exited before `fn` returned.
    LaunchTimeout
        If a worker was still running after `timeout` seconds.
    UsageError
        If an argument is invalid, or `fn` or `args` cannot be pickled.

    Notes
    -----
    When one worker fails, at the time limit and on Ctrl-C, the other workers get SIGTERM and 5
    seconds later SIGKILL. Child processes of a worker end with it unless they left its process
    group.
    """
    if not callable(fn):
        raise UsageError(
            f"launch runs a function, but fn is {fn!r}", code="argument-type", argument="fn"
        )
    check_positive("nprocs", nprocs)
    if timeout is not None:
        check_number("timeout", timeout, above=0)
    slots = cpu_slots(nprocs, cores)
    make = encoded(partial(_of_rank, fn, tuple(args)), "The function or its arguments")
    with closing(make), ExitStack() as resources:
        workers: list[_LaunchedWorker] = []
        resources.callback(_stop, workers)
        for rank, slot in enumerate(slots):
            log = None
            if log_dir is not None:
                path = Path(log_dir, f"worker-{rank}.log")
                path.parent.mkdir(parents=True, exist_ok=True)
                log = resources.enter_context(path.open("wb", buffering=0))
            workers.append(_LaunchedWorker(rank, slot, make, env, log, stream_output))
        return _results(workers, timeout)


def _of_rank(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[int], Any]:
    return lambda rank: fn(rank, *args)


class _LaunchedWorker(WorkerProcess):
    """A launched worker process with its output and its result.

    Attributes
    ----------
    has_answered : bool
        Whether the function has returned or failed.
    returned : object
        Return value of the function.
    failure : tuple of (time, rank, error), or None
        The failure of the function or the process.
    """

    def __init__(
        self,
        rank: int,
        slot: CpuSlot,
        make: PickledMessage,
        env: Mapping[str, str | None] | None,
        log: FileIO | None,
        show: bool,
    ):
        super().__init__(rank, slot, make, env=env, capture_output=True, dies_with_parent=True)
        self.has_answered = False
        self.returned: Any = None
        self.failure: tuple[float, int, BigDLError] | None = None
        self._output, self._errors = (
            OutputForwarder(cast("FileIO", pipe), name, f"[{rank}] ", log, show)
            for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        )
        self.start_call(encode(rank))

    def poll(self) -> None:
        """Receive available answers; record a loss if the worker ended without an answer."""
        has_ended = self.has_ended()
        while not self.has_answered:
            if wait([self.connection], 0):
                self._take()
            elif has_ended:
                self._note_loss()
            else:
                return

    def _take(self) -> None:
        try:
            answer = self.answer()
        except EOFError:
            self._note_loss()
            return
        content = opened(answer)
        if answer.failed:
            self.failure = content.time, self.rank, content.error(self.rank)
        elif self.pending == 0:
            self.returned = content
        self.has_answered = answer.failed or self.pending == 0
        if self.has_answered:
            self.hang_up()

    def _note_loss(self) -> None:
        self.end(LAUNCH_GRACE_S)
        self.close_output()
        tail = self._errors.tail()
        last = f"the last lines of its stderr:\n{tail}" if tail else "its stderr was empty"
        loss = WorkerLost(f"worker {self.rank} {self.exit_message()}; {last}")
        # A loss sorts before all errors: it makes the peers raise.
        self.failure, self.has_answered = (0.0, self.rank, loss), True

    def await_end(self) -> None:
        """Wait until a terminating process has exited; its peers may detect the loss earlier."""
        import psutil

        with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
            status = None if self.has_ended() else psutil.Process(self.process.pid).status()
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                self.process.wait(LAUNCH_GRACE_S)

    def close_output(self) -> None:
        """Forward the remaining output of an ended worker."""
        for output in (self._output, self._errors):
            output.join(OUTPUT_DRAIN_S)


def _results(workers: Sequence[_LaunchedWorker], timeout: float | None) -> list[Any]:
    """Wait for all workers and return their results; raise the first failure."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        for worker in workers:
            worker.poll()
        if any(worker.failure for worker in workers):
            # the loss that caused the error may not have been noticed yet
            for worker in workers:
                worker.await_end()
                worker.poll()
            raise min(worker.failure for worker in workers if worker.failure)[2]
        running = [worker for worker in workers if not worker.has_ended()]
        if not running:
            return [worker.returned for worker in workers]
        if time.monotonic() > deadline:
            ranks = ", ".join(str(worker.rank) for worker in running)
            raise LaunchTimeout(
                f"{len(running)} of {len(workers)} workers (rank {ranks}) had not ended "
                f"after {timeout:g} s and were stopped; raise timeout if they need longer"
            )
        connections = [worker.connection for worker in running if not worker.has_answered]
        if connections:
            wait(connections, LAUNCH_LOOK_S)
        else:
            with suppress(subprocess.TimeoutExpired):
                running[0].process.wait(LAUNCH_LOOK_S)


def _stop(workers: Sequence[_LaunchedWorker]) -> None:
    """Stop the running workers by SIGTERM, then by SIGKILL after a grace period."""
    try:
        import psutil

        for worker in workers:
            if not worker.has_answered and not worker.has_ended():
                worker.process.terminate()
        psutil.wait_procs([worker.process for worker in workers], LAUNCH_GRACE_S)
    finally:  # also when the user interrupts again
        for worker in workers:
            worker.end()
    for worker in workers:
        worker.close_output()


class _LoggingReader(io.BufferedReader):
    """Buffered reader that copies the bytes it reads to an optional log file."""

    def __init__(self, raw: FileIO, log: FileIO | None):
        super().__init__(raw)
        self._log = log

    def read1(self, size: int = -1, /) -> bytes:
        chunk = super().read1(size)
        if self._log is not None:
            self._log.write(chunk)
        return chunk


class OutputForwarder(threading.Thread):
    """Thread that forwards the output lines of one worker until the stream is closed.

    Parameters
    ----------
    pipe : FileIO
        The parent's end of the pipe, unbuffered.
    name : str
        ``"stdout"`` or ``"stderr"``: the parent's stream for the lines. It is looked up in ``sys``
        at each write, because notebooks and test runners replace it.
    prefix : str
        Prefix of each line in the parent's stream.
    log : FileIO or None
        File for the unmodified bytes; unbuffered.
    show : bool
        Whether lines are written to the parent's stream.
    hidden : collection of str
        Lines that are not written to the parent's stream.
    """

    def __init__(
        self,
        pipe: FileIO,
        name: str,
        prefix: str = "",
        log: FileIO | None = None,
        show: bool = True,
        hidden: Collection[str] = (),
    ):
        super().__init__(name=f"bigdl-{name}", daemon=True)
        self._pipe = _LoggingReader(pipe, log)
        self._stream, self._prefix, self._show, self._hidden = name, prefix, show, hidden
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.start()

    def run(self) -> None:
        # Progress bars end lines with a carriage return: keep all line ends.
        with io.TextIOWrapper(self._pipe, "utf-8", "replace", newline="") as lines:
            while text := lines.readline(_LONGEST_LINE):
                self._tail.append(text.rstrip("\r\n")[:_LONGEST_TAIL_LINE])
                target = getattr(sys, self._stream)
                if self._show and target is not None and text.rstrip() not in self._hidden:
                    end = "" if text.endswith(("\r", "\n")) else "\n"
                    with suppress(ValueError, OSError):  # the stream was closed
                        target.write(f"{self._prefix}{text}{end}")
                        target.flush()

    def tail(self) -> str:
        """Return the last lines of the worker's output."""
        return "\n".join(self._tail)
