"""Worker processes: new Python interpreters on this machine that call functions.

Workers of :mod:`~bigdl.runtime.launch`, of :mod:`~bigdl.runtime.pool` and of the local engine are
:class:`WorkerProcess` objects. Each is a new interpreter that receives functions by
``cloudpickle``. A fork hangs once the parent has run an OpenMP region, and ``multiprocessing``'s
spawn cannot find the definitions of a notebook. A worker is pinned to its cores before it imports
packages, and never outlives its parent, even if the parent is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bigdl.common.cpu import (
    THREAD_VARIABLES,
    cpu_quota,
    passive_waiting,
    split_cores,
    topology,
    usable_cores,
)
from bigdl.common.errors import UsageError
from bigdl.common.platform.network import disconnect
from bigdl.common.platform.processes import (
    ForkedProcess,
    ProcessGroup,
    describe_start_limit,
    start_worker,
)
from bigdl.common.timeouts import KERNEL_KILL_S
from bigdl.runtime.messages import PickledMessage, encode, opened, receive, send

# Variables that pin to the parent's cores would override the worker's pinning.
_PINNING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# The worker imports this package from the caller's path.
_PROGRAM = """\
import ast, sys
_, path, *numbers = sys.argv
sys.path[:] = dict.fromkeys([*ast.literal_eval(path), *sys.path])
from bigdl.runtime._worker_main import main
main(*map(int, numbers))
"""


@dataclass(frozen=True)
class CpuSlot:
    """The cores and threads of a worker.

    Attributes
    ----------
    cores : tuple of int
        Logical cores to which the worker is pinned.
    threads : int
        Threads of the worker's OpenMP and BLAS libraries.
    """

    cores: tuple[int, ...]
    threads: int


def cpu_slots(count: int, cores: Sequence[Iterable[int]] | None = None) -> list[CpuSlot]:
    """Return the CPU slots of `count` workers.

    Parameters
    ----------
    count : int
    cores : sequence of iterable of int, optional
        Logical cores of each worker; default: :func:`bigdl.common.cpu.split_cores`. A worker has
        one thread per physical core, or its share of the CPU quota if that is less.

    Raises
    ------
    UsageError
        If a worker has no cores, or this process may not use them.
    """
    machine = topology()
    if cores is None:
        shares = split_cores(count, machine)
    else:
        shares = [sorted(set(share)) for share in cores]
    if len(shares) != count:
        raise UsageError(
            f"cores must name the cores of each of {count} workers, not {shares}",
            code="argument-value",
            argument="cores",
        )
    usable = usable_cores()
    for share in shares:
        if not share or not set(share) <= set(usable):
            raise UsageError(
                f"A worker cannot run on cores {share}; choose from {usable}",
                code="argument-value",
                argument="cores",
                allowed=list(usable),
            )
    quota = cpu_quota()
    most = len(usable) if quota is None else max(1, int(quota / count))
    return [CpuSlot(tuple(share), min(machine.physical_count(share), most)) for share in shares]


class WorkerProcess:
    """The parent's handle of one worker process.

    Parameters
    ----------
    rank : int
        Number of the worker, for messages.
    slot : CpuSlot
    make : PickledMessage
        A factory: a function without arguments that returns the function of all calls. Its call is
        the first one, with the answer None.
    env : mapping of str to str or None, optional
        Additions to the environment of this process; None removes a variable.
    capture_output : bool
        Whether the output goes to pipes, in UTF-8, instead of this process's streams.
    dies_with_parent : bool
        Whether the kernel kills it when the thread that started it ends. That also ends a worker
        that never releases the GIL.
    forked : tuple of Connection and ForkedProcess, optional
        Process that was forked (:mod:`bigdl.runtime.forks`), instead of a new one.

    Attributes
    ----------
    process : subprocess.Popen or ForkedProcess
    connection : multiprocessing.connection.Connection
        Readable when an answer has arrived or the worker has ended.
    pending : int
        Number of unanswered calls.
    """

    def __init__(
        self,
        rank: int,
        slot: CpuSlot,
        make: PickledMessage,
        *,
        env: Mapping[str, str | None] | None = None,
        capture_output: bool = False,
        dies_with_parent: bool = False,
        forked: tuple[Connection, ForkedProcess] | None = None,
    ):
        self.rank, self.slot = rank, slot
        self.pending = 0
        self._children_ended = False
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forked is not None:
            self.connection, self.process = forked
            self._group = ProcessGroup(self.process)
            self.start_call(make)
            return
        env = env or {}
        stream = subprocess.PIPE if capture_output else None
        added = env.get("PYTHONPATH") or ""
        paths = [*filter(None, added.split(os.pathsep)), *sys.path]
        path = repr([entry for entry in paths if isinstance(entry, str)])
        with _within_limits(rank):
            self.connection, worker_end = multiprocessing.Pipe()
            with worker_end:
                self.process = start_worker(
                    [sys.executable, "-P", "-c", _PROGRAM, path, str(os.getpid())],
                    worker_end,
                    _environment(slot.threads, env),
                    stream,
                )
                self._group = ProcessGroup(self.process)
            settings = (slot.cores, sys.argv, capture_output, dies_with_parent)
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the answer reports it
                send(self.connection, encode(settings))
            self.start_call(make)

    def call(self, message: PickledMessage) -> None:
        """Call the function with a pickled argument; raise ConnectionError if the worker ended."""
        self.pending += 1
        send(self.connection, message)

    def start_call(self, message: PickledMessage) -> None:
        """Call the function with a pickled argument; if the worker ended, only `answer` raises."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.call(message)

    def answer(self) -> PickledMessage:
        """Receive an answer without unpickling it; raise EOFError if the worker has ended."""
        message = receive(self.connection)
        self.pending -= 1
        return message

    def opened(self, answer: PickledMessage) -> Any:  # the function's result
        """Unpickle an answer and return the result, or raise its WorkerError."""
        content = opened(answer)
        if answer.failed:
            raise content.error(self.rank)
        return content

    def result(self) -> Any:  # the function's result
        """Wait for the result of a call and return it.

        Raises
        ------
        WorkerError
            If the function raised.
        EOFError
            If the worker has ended.
        """
        return self.opened(self.answer())

    def has_ended(self) -> bool:
        """Return True if the process has ended; if so, kill its remaining children."""
        if self.process.poll() is None:
            return False
        if not self._children_ended:  # later another process may have its id
            self._children_ended = True
            self._group.kill()
        return True

    def hang_up(self) -> None:
        """Close the connection; the worker ends after its current call."""
        disconnect(self.connection)

    def kill(self) -> None:
        """Kill the worker and its children; the connection then reports that the worker ended."""
        if not self.has_ended():
            self._group.kill()
            self.process.kill()  # it may have left its process group

    def end(self, grace: float = 0.0) -> None:
        """Close the connection and kill the worker if it runs for more than `grace` seconds."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            self.process.wait(KERNEL_KILL_S)

    def exit_message(self) -> str:
        """Return how the process ended, as a phrase that follows "the worker"."""
        return exit_message(self.process.returncode or 0)


@contextlib.contextmanager
def _within_limits(rank: int) -> Iterator[None]:
    """Context manager that raises a UsageError if a system limit prevents a process start."""
    try:
        yield
    except OSError as error:
        limit = describe_start_limit(error)
        if limit is None:
            raise
        if not all(limit):
            raise UsageError(
                f"Worker {rank} cannot be started: {error.strerror}; end other programs of this "
                "machine or container, or raise its limit of processes and memory",
                code="resource-limit",
            ) from error
        raise UsageError(
            f"Worker {rank} cannot be started: this program {limit[0]} here; raise the "
            f"limit ({limit[1]})",
            code="resource-limit",
        ) from error


def exit_message(code: int) -> str:
    """Describe a worker's exit code after an early end, as a phrase that follows "the worker"."""
    if code >= 0:
        return f"ended with exit code {code} before its function returned"
    names = {number.value: number.name for number in signal.Signals}
    cause = f"was killed by {names.get(-code, f'signal {-code}')}"
    if names.get(-code) == "SIGKILL":
        cause += " (as the kernel does when memory runs out)"
    return cause


def _environment(threads: int, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment variables of a worker."""
    merged: dict[str, str | None] = {
        **{name: os.environ[name] for name in os.environ if name not in _PINNING_VARIABLES},
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **passive_waiting({**os.environ, **{k: v for k, v in changes.items() if v is not None}}),
        **changes,
    }
    return {name: str(value) for name, value in merged.items() if value is not None}
