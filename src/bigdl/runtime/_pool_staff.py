"""The workers of a :class:`~bigdl.runtime.pool.WorkerPool`, from their start to their end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.cpu import THREAD_VARIABLES
from bigdl.common.errors import UsageError, WorkerError, WorkerLost
from bigdl.runtime._pool_main import RESULT
from bigdl.runtime.launch import cause_of_end, worker_environ
from bigdl.runtime.messages import Message, decode, encode, receive, send

__all__ = ["Seat", "Staff", "Stage", "TaskError", "Worker", "encoded", "opened"]

_GRACE = 2.0  # seconds that a worker has to end by itself


@dataclass(frozen=True)
class Seat:
    """Where a worker runs.

    Attributes
    ----------
    cores : tuple of int
        Logical cores that it is pinned to.
    threads : int
        Threads of its OpenMP and BLAS libraries.
    """

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Stage:
    """Workers that hold the same function.

    Attributes
    ----------
    name : str
        For messages.
    make : callable
        Called once in each worker without arguments; returns the function of one item. It travels
        by ``cloudpickle``; the arrays and tensors in it are mapped by all workers, so that they
        are in memory once until somebody writes to them.
    seats : sequence of Seat
        One worker runs on each.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    seats: Sequence[Seat]


class TaskError(WorkerError):
    """The function of a stage raised an exception.

    Attributes
    ----------
    stage : str
        Name of the stage.
    item : int or None
        Position of the item; None if the function could not be made.
    rank : int
        Number of the worker in its stage.
    kind, traceback : str
        Class name and the worker's own traceback of the exception.
    original : Exception or None
        The exception, if it could travel.
    """

    def __init__(
        self,
        stage: str,
        item: int | None,
        rank: int,
        kind: str,
        traceback: str,
        original: BaseException | None = None,
    ):
        super().__init__(rank, kind, traceback)
        self.stage = stage
        self.item = item
        self.original = original

    def __reduce__(self):
        content = (self.stage, self.item, self.rank, self.kind, self.traceback)
        return type(self), content


class Worker:
    """The parent's view of one worker."""

    def __init__(self, stage: int, rank: int, seat: Seat, lifeline: int):
        self.stage = stage
        self.rank = rank
        self.pending = 0  # messages that it has not answered
        self._ended = False
        self.line, theirs = socket.socketpair()
        environ, header = worker_environ({})
        environ |= dict.fromkeys(THREAD_VARIABLES, str(seat.threads))
        order = {
            "parent": os.getpid(),
            "line": theirs.fileno(),
            "lifeline": lifeline,
            "cores": list(seat.cores),
            "header": header,
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bigdl.runtime._pool_main", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), lifeline],
                env=environ,
                # The terminal's Ctrl-C is for the parent.
                process_group=0,
            )

    def ask(self, message: Message) -> None:
        self.pending += 1
        send(self.line, 0, message)

    def hear(self) -> tuple[bool, Message]:
        """Whether the call succeeded, and what came of it; EOFError if the worker is gone."""
        kind, message = receive(self.line)
        self.pending -= 1
        return kind == RESULT, message

    def hang_up(self) -> None:
        """Let the worker end by itself."""
        # Also where a forked process holds the socket too, which close() alone would not reach.
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()

    def end(self, grace: float = 0.0) -> None:
        """End the worker and its own children; again does nothing."""
        self.hang_up()
        if self._ended:
            return  # its process id may be another's by now
        self._ended = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            self.process.wait(_GRACE)

    def kill(self) -> None:
        """Kill the worker and its own children; the line then says that it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have left its group

    def loss(self, stage: str) -> WorkerLost:
        """Why a worker that has hung up is gone; it is ended for sure."""
        self.end(_GRACE)
        cause = cause_of_end(self.process.returncode or 0)
        return WorkerLost(f"worker {self.rank} of {stage} {cause}; the next call starts a new one")


class Staff:
    """All workers of a pool, and what it takes to replace them."""

    def __init__(self, stages: Sequence[Stage], error: type[TaskError]):
        self._error = error
        self.names = [stage.name for stage in stages]
        self._seats = [list(stage.seats) for stage in stages]
        self._owner = os.getpid()
        self.workers: list[list[Worker]] = [[] for _ in stages]
        self._functions: list[Message] = []
        try:
            for stage in stages:
                self._functions.append(encoded(stage.make, f"The function of {stage.name}"))
        except BaseException:
            self._close_functions()
            raise
        self._lifeline = os.pipe()

    def everyone(self) -> Iterator[Worker]:
        return (worker for rank in self.workers for worker in rank)

    def fill(self) -> None:
        """Start the workers that are missing, and wait until they are ready."""
        fresh = []
        try:
            # Their interpreters start at the same time, and load their functions so.
            for stage, seats in enumerate(self._seats):
                for rank in range(len(seats)):
                    if self._is_missing(stage, rank):
                        fresh.append(self._start(stage, rank))
            for worker in fresh:
                self._await(worker)
        except BaseException:
            for worker in fresh:
                worker.end()
            raise

    def replace(self, worker: Worker) -> Worker:
        """Another worker in the place of one that is gone."""
        worker.end()
        worker = self._start(worker.stage, worker.rank)
        try:
            self._await(worker)
        except BaseException:
            worker.end()
            raise
        return worker

    def task_error(self, worker: Worker, item: int | None, content: tuple) -> TaskError:
        """The exception for what a worker said of its failure."""
        kind, text, pickled = content
        original = None
        if pickled is not None:
            with contextlib.suppress(Exception):  # its class may be found in the worker only
                original = pickle.loads(pickled)
        stage = self.names[worker.stage]
        error = self._error(stage, item, worker.rank, kind, text, original)
        error.__cause__ = original
        return error

    def dismiss(self) -> None:
        """End all workers."""
        if os.getpid() != self._owner:
            return  # a forked child has no say here
        for worker in self.everyone():
            worker.hang_up()
        deadline = time.monotonic() + _GRACE
        for worker in self.everyone():
            worker.end(max(0.0, deadline - time.monotonic()))
        for end in self._lifeline:
            os.close(end)
        self._close_functions()

    def _close_functions(self) -> None:
        for function in self._functions:
            function.close()

    def _is_missing(self, stage: int, rank: int) -> bool:
        worker = self.workers[stage][rank] if rank < len(self.workers[stage]) else None
        if worker is not None and worker.process.poll() is not None:
            worker.end()
            worker = None
        return worker is None

    def _start(self, stage: int, rank: int) -> Worker:
        worker = Worker(stage, rank, self._seats[stage][rank], self._lifeline[0])
        self.workers[stage][rank : rank + 1] = [worker]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_await` will say why
            worker.ask(self._functions[stage])
        return worker

    def _await(self, worker: Worker) -> None:
        stage = self.names[worker.stage]
        try:
            succeeded, message = worker.hear()
        except EOFError:
            raise worker.loss(stage) from None
        content = opened(message)
        if not succeeded:
            raise self.task_error(worker, None, content)


def encoded(value: Any, what: str) -> Message:
    """A message, or an error that says what could not be sent."""
    try:
        return encode(value)
    except Exception as error:
        raise UsageError(f"{what} cannot be sent to a worker: {error}") from error


def opened(message: Message) -> Any:
    """The object in a message that is not needed any more."""
    try:
        return decode(message)
    finally:
        message.close()
