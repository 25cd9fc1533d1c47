"""The local engine: workers as processes on this machine, without a JVM or Ray.

Programs, :mod:`~bigdl.runtime.channel` and worker code are the same as on Spark and on Ray.
:class:`LocalProcesses` reuses the workers of a program for the next one, where torch is already
imported; they end with :meth:`LocalEngine.shutdown` or with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

from bigdl.common.checks import check_integer
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.common.platform.cores import pin_process
from bigdl.common.platform.files import read_whole
from bigdl.common.platform.processes import ForkedProcess, can_adopt_forks
from bigdl.common.private_folders import process_folder
from bigdl.common.timeouts import COLLECTIVE_S, LOCAL_EXIT_S
from bigdl.runtime.channel import AttemptChannel, Channel, Unreachable
from bigdl.runtime.engine import Engine
from bigdl.runtime.forks import ForkServer
from bigdl.runtime.jobs import (
    PROCESS_ENDED,
    AttemptMonitor,
    CalledJob,
    DriverUnreachable,
    Job,
    OnEvent,
    WorkerCalls,
    interruptible,
    worker_lost,
)
from bigdl.runtime.messages import encoded
from bigdl.runtime.process import CpuSlot, WorkerProcess, cpu_slots
from bigdl.runtime.shards.feed import Feed, InputPlan
from bigdl.runtime.task import Task, TaskSpec, execute
from bigdl.runtime.worker import ChannelConnection

_LOOPBACK = "127.0.0.1"


class LocalEngine(Engine):
    """Engine that runs programs in processes on this machine.

    Parameters
    ----------
    workers_per_node : int, optional
        Default of `num_workers` in :meth:`run`.
    channel_port : int, optional
        Port on the loopback interface that workers connect to; 0 selects a free one.
    timeout : float, optional
        Seconds after which a collective without progress fails; default: 1800.
    log_to_driver : bool, optional
        Show the workers' output on the driver.
    in_process : bool, optional
        Run a single worker in the calling process and thread, for programs that already have a
        separate process, such as a trial.  Its output is not captured, and a crash ends the caller.

    Raises
    ------
    UsageError
        For an invalid argument.

    Examples
    --------
    >>> from bigdl.orca.engine import LocalEngine
    >>> LocalEngine().run(lambda worker: worker.rank * 10, num_workers=2)
    [0, 10]
    """

    def __init__(
        self,
        *,
        workers_per_node: int = 1,
        channel_port: int = 0,
        timeout: float = COLLECTIVE_S,
        log_to_driver: bool = True,
        in_process: bool = False,
    ):
        cluster = LocalMachine(workers_per_node)
        super().__init__(cluster, workers_per_node, channel_port, timeout, log_to_driver)
        if in_process:
            check_integer("workers_per_node of a worker in this process", workers_per_node, 1, 1)
        self.in_process = in_process
        self._job_class = InProcessJob if in_process else LocalJob

    def _slots(self, num_workers: int) -> int:
        """Return the number of worker slots, which may exceed the number of cores."""
        return check_integer("num_workers", num_workers, 1, 1 if self.in_process else None)

    @property
    def can_replace(self) -> bool:
        return not self.in_process

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        feed.check_local()
        return super().prepare(feed, num_workers)

    def shutdown(self) -> None:
        """End the idle worker processes; the next program starts new ones."""
        _processes.close()


class LocalMachine:
    """The local machine as a cluster, for feeds and predictions.

    Parameters
    ----------
    workers : int
        Number of processes that predict concurrently.
    """

    nodes = 1
    is_local = True
    moves_rows_by: Literal["files"] = "files"
    asks_encryption = ""
    driver_host = _LOOPBACK

    def __init__(self, workers: int = 1):
        self._workers = workers

    def __repr__(self) -> str:
        return f"LocalMachine({self.cores_per_node} cores)"

    @property
    def cores_per_node(self) -> int:
        """Number of threads of a single worker: the physical cores that this process can use."""
        return cpu_slots(1)[0].threads

    @property
    def threads_per_task(self) -> int:
        """Number of threads of each prediction process."""
        return max(1, self.cores_per_node // self._workers)

    def slots(self) -> int:
        """Return the number of processes that predict concurrently."""
        return self._workers

    @property
    def temp_dir(self) -> str:
        """Directory for temporary files that is removed when this process ends."""
        return session_directory()

    @property
    def broadcaster(self) -> type[FileBroadcast]:
        """The class that broadcasts bytes to all processes."""
        return FileBroadcast

    def map_shards(
        self, func: Callable[[list[Any]], Sequence[Any]], shards: Sequence[Any]
    ) -> list[Any]:
        """Apply ``func([shard])`` to every shard in worker processes and concatenate the results.

        Raises
        ------
        WorkerLost
            If a process was killed during the call.
        """
        elements: list[Any] = []
        with interruptible(), _processes.borrow(self._workers, self.threads_per_task) as workers:
            for first in range(0, len(shards), len(workers)):
                busy = []
                for worker, shard in zip(workers, shards[first:], strict=False):
                    worker.submit(_map_shard, func, shard)
                    busy.append(worker)
                for answer in _results(busy):
                    elements += answer
        return elements


class FileBroadcast:
    """Bytes in a file for the processes on this machine, like a Spark broadcast.

    It may live as long as the program. If the file is removed from the directory for temporary
    files, it is written again.
    """

    def __init__(self, data: bytes):
        handle, self._path = tempfile.mkstemp(dir=session_directory(), prefix="shared-")
        self._descriptor: int | None = handle
        weakref.finalize(self, os.close, handle)
        with open(handle, "wb", closefd=False) as file:
            file.write(data)

    def __getstate__(self) -> str:
        if self._descriptor is not None and not os.path.exists(self._path):
            session_directory()
            with open(self._path, "xb", opener=_private) as copy:
                copy.write(self.value)
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path, self._descriptor = path, None

    @classmethod
    def broadcast(cls, data: bytes) -> FileBroadcast:
        """Write bytes to a file that every process can read."""
        return cls(data)

    @property
    def value(self) -> bytes:
        """The broadcast bytes, read from the file."""
        if self._descriptor is not None:
            return read_whole(self._descriptor)
        with open(self._path, "rb") as file:
            return file.read()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _map_shard(func: Callable[[list[Any]], Iterable[Any]], shard: object) -> list[Any]:
    return list(func([shard]))


def _results(workers: Sequence[LocalWorker]) -> list[Any]:
    """Wait for all workers and return their results; raise the first error."""
    results: list[Any] = []
    errors: list[WorkerError | WorkerLost] = []
    for worker in workers:
        try:
            results.append(worker.result())
        except WorkerError as error:
            errors.append(error)
        except EOFError:
            errors.append(worker_lost([], *PROCESS_ENDED))
    if errors:
        raise errors[0]
    return results


# -- jobs -----------------------------------------------------------------------------------------


class LocalJob(CalledJob):
    """A job on processes of this machine; created by :meth:`LocalEngine.open`."""

    @contextlib.contextmanager
    def _calls(self, channel: AttemptChannel) -> Iterator[WorkerCalls]:
        with (
            Replacements(_processes) as replacements,
            _processes.borrow(self.num_workers, self.spec.threads) as workers,
            ThreadPoolExecutor(self.num_workers) as threads,
        ):
            spec, directory = self._next_spec(), session_directory()
            for task_index, worker in enumerate(workers):
                worker.submit(execute_task, spec, self._attempts, task_index, directory)
            answers = [threads.submit(worker.result) for worker in workers]
            kills = [worker.kill for worker in workers]

            slots = [worker.slot for worker in workers]

            def replace(
                lost: int, rank: int, group: int
            ) -> tuple[Future[tuple[int, str, str]], Callable[[], None]]:
                slot, task_index = slots[lost], len(slots)
                slots.append(slot)
                replacing, is_killed = self._replacing_spec(rank, group), threading.Event()
                started: list[LocalWorker] = []

                def run() -> tuple[int, str, str]:
                    try:
                        started.append(replacements.start(rank, slot))
                        workers.extend(started)
                        if started[0].pending:
                            started[0].await_start()
                        started[0].move_to(slot)
                    except WorkerLost as error:
                        raise EOFError from error
                    if is_killed.is_set():
                        raise EOFError
                    arguments = replacing, self._attempts, task_index, directory
                    started[0].submit(execute_task, *arguments)
                    return cast("tuple[int, str, str]", started[0].result())

                def kill() -> None:
                    is_killed.set()
                    for worker in started:
                        worker.kill()

                return threads.submit(run), kill

            self._replacements = replace
            self._prepare_replacement = functools.partial(replacements.prepare, workers[0].slot)
            with WorkerCalls(channel, answers, kills, EOFError) as calls:
                yield calls

    def _failure(
        self, channel: AttemptChannel, calls: WorkerCalls, outcomes: dict[str, str]
    ) -> Exception:
        if "unreachable" in outcomes:
            return DriverUnreachable(
                f"A worker cannot connect to the driver at {outcomes['unreachable']}; see what "
                "else connects to that port, or give another one with channel_port="
            )
        return super()._failure(channel, calls, outcomes)


def execute_task(
    spec: TaskSpec, attempt: int, task_index: int, directory: str
) -> tuple[int, str, str]:
    """Run one task of a job; see :func:`bigdl.runtime.task.execute`."""
    try:
        return execute(spec, attempt, iter(()), task_index, directory)
    except Unreachable as error:
        return task_index, "unreachable", str(error)


class InProcessJob(Job):
    """A job on a worker in the calling process; created by :meth:`LocalEngine.open`."""

    def __init__(
        self,
        engine: Engine,
        fn: Callable[..., Any],
        feed: Feed | None,
        num_workers: int,
        threads: int,
        keep_spools: bool,
    ):
        # spools stay for further attempts; close() removes them
        super().__init__(engine, fn, feed, num_workers, threads, True)

    def _open_channel(self) -> Channel:
        return Channel(None)

    def _attempt(
        self, channel: AttemptChannel, on_event: OnEvent | None, *ignored: object
    ) -> list[Any] | None:
        watch = AttemptMonitor(channel, lambda: None, on_event)
        driver = InProcessConnection(channel, watch.poll)
        spec = self._next_spec()
        task = Task(spec, 0, session_directory(), channel, self.channel.address, driver)
        _, outcome, detail = task.run(iter(()))
        watch.poll(final=True)
        if watch.errors and watch.errors[0]["kind"] == "KeyboardInterrupt":
            raise KeyboardInterrupt
        answers = self._answers(channel, watch)
        if answers is None and outcome == "nospool":
            self._read_again()
            return None
        if answers is None:
            raise WorkerLost(f"Worker 0 was lost: {detail or outcome}")
        return answers


class InProcessConnection(ChannelConnection):
    """Driver connection of an in-process worker; it delivers progress and messages immediately."""

    def __init__(self, channel: AttemptChannel, poll: Callable[[], None]):
        super().__init__(channel)
        self._poll = poll

    def note_progress(self, values: dict[str, Any]) -> None:
        self._channel.set_json("progress/0", values)
        self._poll()

    def send(self, doc: dict[str, Any], data: bytes) -> None:
        super().send(doc, data)
        self._poll()


# -- processes ------------------------------------------------------------------------------------


class LocalWorker(WorkerProcess):
    """A worker process that calls the functions it receives."""

    def __init__(
        self, rank: int, slot: CpuSlot, forked: tuple[Connection, ForkedProcess] | None = None
    ):
        self.is_forked = forked is not None
        with contextlib.closing(encoded(_make_caller, "The local worker")) as make:
            super().__init__(rank, slot, make, forked=forked)

    def submit(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function in the worker, in the program's current directory."""
        call = (function, arguments, _working_directory())
        message = encoded(call, "The function or its arguments")
        with contextlib.closing(message):
            self.start_call(message)

    def await_start(self) -> None:
        """Wait until the process accepts calls.

        Raises
        ------
        WorkerLost
            If it has ended.
        """
        try:
            self.result()
        except EOFError:
            self.end(LOCAL_EXIT_S)
            cause = self.exit_message()
            raise WorkerLost(f"A worker could not be started: its process {cause}") from None

    def move_to(self, slot: CpuSlot) -> None:
        """Pin an unused worker to other cores."""
        if self.slot != slot:
            self.submit(pin_process, slot.cores)
            self.result()
            self.slot = slot


def _make_caller() -> Callable[[tuple[Callable[..., Any], tuple[Any, ...], str | None]], Any]:
    import torch  # noqa: F401 - takes seconds, and every program needs it

    def run(call: tuple[Callable[..., Any], tuple[Any, ...], str | None]) -> object:
        function, arguments, directory = call
        if directory is not None and directory != _working_directory():
            os.chdir(directory)  # resolve relative paths as the program does
        return function(*arguments)

    return run


def _working_directory() -> str | None:
    """Return the current directory; None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


class LocalProcesses:
    """Pool of this program's worker processes, which are reused.

    Executors such as loky assign a task to any free process. A worker needs more: it is pinned to
    its cores before it imports anything, its death is noticed at once with its rank, and it ends
    with this process, even if that is killed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LocalWorker] = []
        self._owner = os.getpid()

    @contextlib.contextmanager
    def borrow(self, number: int, threads: int) -> Iterator[list[LocalWorker]]:
        """Context manager that yields `number` workers and divides the cores among them.

        Raises
        ------
        WorkerLost
            If a process does not start.
        """
        workers: list[LocalWorker] = []
        try:
            for rank, slot in enumerate(cpu_slots(number)):
                workers.append(self.take(rank, CpuSlot(slot.cores, threads)))
            for worker in workers:
                if worker.pending:
                    worker.await_start()
            yield workers
        finally:
            for worker in workers:
                if worker.pending or worker.is_forked:  # interrupted during a call, or short-lived
                    worker.end()
            most = max(number, 2 * len(usable_cores()))
            with self._lock:
                kept = [each for each in workers if not (each.pending or each.is_forked)]
                self._idle += kept
                surplus, self._idle = self._idle[:-most], self._idle[-most:]
            _end(surplus)

    def close(self) -> None:
        """End the idle worker processes."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            idle, self._idle = self._idle, []
        _end(idle)

    def take(self, rank: int, slot: CpuSlot) -> LocalWorker:
        """Return an idle worker with these cores, or one that is starting."""
        with self._lock:
            if os.getpid() != self._owner:  # a forked child starts separate processes
                self._idle, self._owner = [], os.getpid()
            for worker in self._idle:
                if worker.slot == slot and not worker.has_ended():
                    self._idle.remove(worker)
                    worker.rank = rank
                    return worker
        return LocalWorker(rank, slot)


class Replacements(contextlib.AbstractContextManager["Replacements", None]):
    """Context manager of the processes that replace lost workers of a job.

    At the end of the block, or with this process, they end.  A forked child of this process leaves
    them alone.

    Parameters
    ----------
    pool : LocalProcesses
        Gives workers if none was prepared.
    """

    def __init__(self, pool: LocalProcesses) -> None:
        self._pool, self._owner = pool, os.getpid()
        self._lock = threading.Lock()
        self._spare: LocalWorker | None = None  # without forks
        self._server: ForkServer | None = None

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            waiting = self._spare, self._server
            self._spare = self._server = None
        for each in waiting:
            if each is not None:
                each.end()

    def prepare(self, slot: CpuSlot, modules: Sequence[str]) -> None:
        """Prepare for a loss, since a process needs seconds to start.

        A server is started that has imported the program's modules and forks replacements; without
        forks one process that waits.

        Parameters
        ----------
        slot : CpuSlot
            Threads of the workers.
        modules : sequence of str
            Modules that a worker imports.
        """
        with self._lock:
            if self._server is not None or self._spare is not None:
                return
            if can_adopt_forks():
                cores = CpuSlot(tuple(usable_cores()), slot.threads)
                self._server = ForkServer(cores, modules)
            else:
                self._spare = LocalWorker(0, slot)

    def start(self, rank: int, slot: CpuSlot) -> LocalWorker:
        """Return a worker for the place of a lost one; it may still be starting.

        It may have other cores, see :meth:`LocalWorker.move_to`.
        """
        with self._lock:
            server = self._server
            spare, self._spare = self._spare, None
        if server is not None and server.slot.threads == slot.threads:
            with contextlib.suppress(EOFError, OSError, WorkerError):
                return LocalWorker(rank, slot, server.fork(slot.cores))
        if spare is not None and spare.slot.threads == slot.threads and not spare.has_ended():
            spare.rank = rank
            return spare
        if spare is not None:
            spare.end()
        return self._pool.take(rank, slot)


def _end(workers: Sequence[LocalWorker]) -> None:
    for worker in workers:
        worker.hang_up()
    for worker in workers:
        worker.end(grace=1.0)


_processes = LocalProcesses()


def session_directory() -> str:
    """Return the directory for this process's spools and files, which is removed at exit."""
    path = process_folder()
    _close_at_exit()
    return path


@functools.cache
def _close_at_exit() -> None:
    """Register a shutdown of the worker processes that runs before their folder is removed."""
    atexit.register(_processes.close)
