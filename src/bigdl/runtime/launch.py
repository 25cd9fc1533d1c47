"""Run a function in several fresh Python processes of this machine and collect what it returns.

A launch starts a :class:`~bigdl.runtime.process.WorkerProcess` for each rank, passes on what they
print while it waits for their results, and stops all that are left when the first of them fails,
when the time is up, or when the user interrupts. Nothing stays behind.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO, cast

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import BigDLError, UsageError, WorkerLost
from bigdl.runtime.messages import Message, encode, encoded, opened
from bigdl.runtime.process import CpuSlot, WorkerProcess, cpu_slots

__all__ = ["LaunchTimeout", "launch"]

_GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL
_TICK_S = 0.1  # seconds between two looks at workers that say nothing
_TAIL_LINES = 20
_LONGEST_TAIL_LINE = 2000
_LONGEST_LINE = 1 << 20
# A progress bar ends its lines with a carriage return. One at the end of what was read may be the
# first half of "\r\n" and waits for more.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")


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
    check_positive("nprocs", nprocs)
    if timeout is not None:
        check_number("timeout", timeout, above=0)
    slots = cpu_slots(nprocs, cores)
    make = encoded(partial(_of_rank, fn, tuple(args)), "The function or its arguments")
    with closing(make), _Launch() as running:
        for rank, slot in enumerate(slots):
            running.start(rank, slot, env, log_dir, stream_output)
        return running.results(make, timeout)


def _of_rank(fn: Callable[..., Any], args: tuple) -> Callable[[int], Any]:
    return lambda rank: fn(rank, *args)


class _LaunchedWorker(WorkerProcess):
    """A worker with its output, and what became of its function.

    Attributes
    ----------
    is_done : bool
    returned : object
        What the function returned, once `is_done`.
    failure : tuple of (time, rank, error), or None
    """

    def __init__(
        self,
        rank: int,
        slot: CpuSlot,
        env: Mapping[str, str | None] | None,
        log: BinaryIO | None,
        show: bool,
    ):
        super().__init__(rank, slot, env=env, captured=True, tied=True)
        self.streams = [
            OutputStream(cast("BinaryIO", pipe), name, f"[{rank}] ", log, show)
            for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        ]
        self.is_done = False
        self.returned: Any = None
        self.failure: tuple[float, int, BigDLError] | None = None

    def read(self) -> bool:
        """Take an answer; False when the worker has nothing more to say."""
        try:
            succeeded, message = self.answer()
        except EOFError:
            return False
        content = opened(message)
        if not succeeded:
            self.failure = content.time, self.rank, content.error(self.rank)
        elif self.pending == 0:
            self.is_done, self.returned = True, content
        else:
            return True
        self.hang_up()
        return False

    def note_loss(self) -> None:
        """Set the failure of a worker that has ended before its function returned."""
        if not self.has_ended():
            return
        while not self.is_done and not self.failure and wait([self.line], 0):
            if not self.read():
                break
        if self.is_done or self.failure:
            return
        for stream in self.streams:
            stream.drain()
        tail = self.streams[1].tail()
        last = f"the last lines of its stderr:\n{tail}" if tail else "its stderr was empty"
        loss = WorkerLost(f"worker {self.rank} {self.exit_message()}; {last}")
        # A loss goes before all errors: it is what makes its peers raise.
        self.failure = 0.0, self.rank, loss

    def await_end(self) -> None:
        """Wait for a process that is dying: peers notice before its last thread is gone."""
        import psutil

        with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
            status = None if self.has_ended() else psutil.Process(self.process.pid).status()
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                self.process.wait(_GRACE_S)

    def terminate(self) -> None:
        """Ask the worker to end, unless it is ending by itself."""
        if not self.is_done and not self.failure and not self.has_ended():
            self.process.terminate()


class _Launch:
    """The workers of one launch; a context that none of them and no descriptor leaves."""

    def __init__(self) -> None:
        self._workers: list[_LaunchedWorker] = []
        self._resources = ExitStack()
        self._selector = self._resources.enter_context(selectors.DefaultSelector())

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._resources:
            self._stop()

    def start(
        self,
        rank: int,
        slot: CpuSlot,
        env: Mapping[str, str | None] | None,
        log_dir: str | Path | None,
        show: bool,
    ) -> None:
        """Start a worker."""
        log = None
        if log_dir is not None:
            path = Path(log_dir, f"worker-{rank}.log")
            path.parent.mkdir(parents=True, exist_ok=True)
            log = self._resources.enter_context(path.open("wb", buffering=0))
        worker = _LaunchedWorker(rank, slot, env, log, show)
        self._workers.append(worker)
        self._selector.register(worker.line, selectors.EVENT_READ, worker.read)
        for stream in worker.streams:
            self._resources.enter_context(stream.pipe)
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream.read)

    def results(self, make: Message, timeout: float | None) -> list[Any]:
        """Let all workers make and call their function; raise what went wrong first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.start_call(make)
            worker.start_call(encode(worker.rank))
        while True:
            self._pump()
            # In this order: one that ends in between is seen the next time.
            running = [worker.rank for worker in self._workers if not worker.has_ended()]
            if self._first_failure() is not None:
                # a worker whose loss caused the error is seen now, if it was not yet
                for worker in self._workers:
                    worker.await_end()
                raise cast("BigDLError", self._first_failure())
            if not running:
                return [worker.returned for worker in self._workers]
            if deadline is not None and time.monotonic() > deadline:
                ranks = ", ".join(map(str, running))
                raise LaunchTimeout(
                    f"{len(running)} of {len(self._workers)} workers (rank {ranks}) had not ended "
                    f"after {timeout:g} s and were stopped; raise timeout if they need longer"
                )

    def _first_failure(self) -> BigDLError | None:
        for worker in self._workers:
            worker.note_loss()
        failures = [worker.failure for worker in self._workers if worker.failure]
        return min(failures, key=lambda failure: failure[:2])[2] if failures else None

    def _pump(self) -> None:
        """Pass on what workers print and say, for at most one tick."""
        for key, _ in self._selector.select(_TICK_S):
            if not key.data():
                self._selector.unregister(key.fileobj)

    def _stop(self) -> None:
        try:
            for worker in self._workers:
                worker.terminate()
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                if all(worker.has_ended() for worker in self._workers):
                    break
                self._pump()
        finally:  # also when the user interrupts again
            for worker in self._workers:
                worker.end()
        for worker in self._workers:
            for stream in worker.streams:
                stream.drain()


class OutputStream:
    """One output stream of one worker.

    Parameters
    ----------
    pipe : BinaryIO
        The parent's end, unbuffered.
    name : str
        ``"stdout"`` or ``"stderr"``: the stream of the parent that gets the lines, looked up in
        ``sys`` at each write, as notebooks and test runners replace it.
    prefix : str
        Put before each line in the parent's stream.
    log : BinaryIO or None
        Gets the bytes as they are; unbuffered.
    show : bool
        Whether the parent's stream gets the lines.
    """

    def __init__(self, pipe: BinaryIO, name: str, prefix: str, log: BinaryIO | None, show: bool):
        self.pipe = pipe
        self._name = name
        self._prefix = prefix
        self._log = log
        self._show = show
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Pass on what is there; False when the worker has closed the stream."""
        chunk = self.pipe.read(1 << 16)  # None if there is nothing at the moment
        self._take(chunk or b"")
        return chunk != b""

    def drain(self) -> None:
        """Pass on all that a worker which has ended left behind."""
        while chunk := self.pipe.read(1 << 16):
            self._take(chunk)
        if self._rest:
            self._write([self._rest.rstrip(b"\r") + b"\n"])
            self._rest = b""

    def tail(self) -> str:
        """Return the last lines."""
        return "\n".join(self._tail)

    def _take(self, chunk: bytes) -> None:
        if self._log is not None:
            self._log.write(chunk)
        self._rest += chunk
        ends = [0, *(match.end() for match in _LINE_END.finditer(self._rest))]
        lines = [self._rest[start:stop] for start, stop in pairwise(ends)]
        self._rest = self._rest[ends[-1] :]
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest + b"\n")
            self._rest = b""
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        texts = [line.decode("utf-8", errors="replace") for line in lines]
        self._tail.extend(text.rstrip("\r\n")[:_LONGEST_TAIL_LINE] for text in texts)
        target = getattr(sys, self._name)
        if self._show and texts and target is not None:
            target.write("".join(self._prefix + text for text in texts))
            target.flush()
