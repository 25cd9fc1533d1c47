"""The local engine: N workers as processes of this machine, with no JVM and no Ray.

The same programs run on the same :mod:`~bigdl.runtime.channel` as on Spark and on Ray, and what a
worker does is the same code.  :class:`LocalProcesses` keeps the workers of a program for the next
one, which then finds torch imported; they end with :meth:`LocalEngine.shutdown` or this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_integer, check_number
from bigdl.common.environment import scratch_home
from bigdl.common.errors import WorkerError, WorkerLost
from bigdl.runtime.channel import Address, Channel, Line
from bigdl.runtime.engine import Engine, Job
from bigdl.runtime.jobs import (
    PROCESS_ENDED,
    CalledJob,
    WorkerCalls,
    active_jobs,
    interruptible,
    job_number,
    pickled,
    user_error,
    worker_lost,
)
from bigdl.runtime.launch import cause_of_end, worker_shares
from bigdl.runtime.pool import CpuSlot, Worker, encoded, opened
from bigdl.runtime.task import TaskSpec, attempt_task, execute
from bigdl.runtime.worker import Uplink, decode

if TYPE_CHECKING:
    from bigdl.runtime.shards.feed import Feed, Ingest

__all__ = ["LocalEngine", "LocalMachine", "LocalProcesses"]

_LOOPBACK = "127.0.0.1"
_EXIT_S = 2.0  # seconds that a process gets to end once it has hung up


class LocalEngine(Engine):
    """Runs programs on processes of this machine.

    Parameters
    ----------
    workers_per_node : int, optional
        Workers when `num_workers` is not given to :meth:`run`.
    channel_port : int, optional
        Port of the loopback interface that workers connect to; 0 takes any free one.
    timeout : float, optional
        Seconds after which a collective without progress fails; default 1800.
    log_to_driver : bool, optional
        Show what workers print on the driver.
    in_process : bool, optional
        Run a single worker in the calling process and thread: for programs that are in a process
        of their own already, such as a trial.  What it prints is not captured, and a crash of the
        process ends the caller.

    Raises
    ------
    UsageError
        For an argument that cannot work.
    """

    def __init__(
        self,
        *,
        workers_per_node: int = 1,
        channel_port: int = 0,
        timeout: float = 1800.0,
        log_to_driver: bool = True,
        in_process: bool = False,
    ):
        self.num_workers = check_integer("workers_per_node", workers_per_node, 1)
        if in_process:
            check_integer("workers_per_node of a worker in this process", workers_per_node, 1, 1)
        self.port = check_integer("channel_port", channel_port, 0, 65535)
        self.timeout = check_number("timeout", timeout, above=0)
        self.log_to_driver = log_to_driver
        self.in_process = in_process
        self.cluster = LocalMachine(workers_per_node)

    def open(
        self,
        fn: Callable,
        feed: Feed | None = None,
        num_workers: int | None = None,
        *,
        threads: int | None = None,
        keep_spools: bool = False,
    ) -> Job:
        """Check, prepare the input, and return the job (no worker runs yet).

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.  There may be more workers than cores.
        threads : int, optional
            Threads of each worker; default its share of the physical cores.
        keep_spools : bool
            Whether attempts will follow one that succeeded; spools stay until the job is closed.
        """
        num_workers = self.num_workers if num_workers is None else num_workers
        check_integer("num_workers", num_workers, 1, 1 if self.in_process else None)
        if threads is not None:
            check_integer("threads", threads, 1)
        make = InProcessJob if self.in_process else LocalJob
        return make(self, fn, feed, num_workers, threads, keep_spools)

    def shutdown(self) -> None:
        """End the workers that wait for programs; another program starts new ones."""
        _processes.close()


class LocalMachine:
    """This machine, with the face of a cluster for feeds and predictions.

    Parameters
    ----------
    workers : int
        Processes that predict at the same time.
    """

    nodes = 1
    is_local = True
    driver_host = _LOOPBACK

    def __init__(self, workers: int = 1):
        self._workers = workers

    def __repr__(self) -> str:
        return f"LocalMachine({self.cores_per_node} cores)"

    @property
    def cores_per_node(self) -> int:
        """Threads of a single worker: the physical cores that this process can keep busy."""
        return worker_shares(1, None)[0][1]

    @property
    def threads_per_task(self) -> int:
        """Threads of a process that predicts."""
        return min(threads for _, threads in worker_shares(self._workers, None))

    def slots(self) -> int:
        """How many processes predict at the same time."""
        return self._workers

    @property
    def temp_dir(self) -> str:
        """A directory that is removed when this process ends."""
        return _session_directory()

    @property
    def broadcaster(self) -> type[SharedFile]:
        """What gives bytes to all processes."""
        return SharedFile

    def map_shards(self, func: Callable[[list], Sequence], shards: Sequence) -> list:
        """The elements of ``func([shard])`` of every shard, each computed by one of the processes.

        Raises
        ------
        WorkerLost
            If a process was killed meanwhile.
        """
        threads = self.threads_per_task
        elements: list = []
        with interruptible(), _processes.lend(self._workers, None) as workers:
            for first in range(0, len(shards), len(workers)):
                part = shards[first : first + len(workers)]
                calls = [(_map_shard, (func, shard, threads)) for shard in part]
                for answer in _answers(workers, calls):
                    elements += answer
        return elements


class SharedFile:
    """Bytes in a file that the processes of this machine read, with the face of a broadcast."""

    def __init__(self, data: bytes):
        handle, self._path = tempfile.mkstemp(dir=_session_directory(), prefix="shared-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)

    @classmethod
    def broadcast(cls, data: bytes) -> SharedFile:
        """Bytes that every process can read."""
        return cls(data)

    @property
    def value(self) -> bytes:
        """The bytes."""
        with open(self._path, "rb") as file:
            return file.read()


def _map_shard(func, shard, threads):
    return list(func([shard]))


def _answers(workers: list[Worker], calls: list[tuple]) -> list:
    """Results of one call of each worker; raises the first error."""
    for worker, call in zip(workers, calls, strict=False):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # said by `hear`
            message = encoded(call, "The model or its input")
            worker.ask(message)
            message.close()
    results: list[Any] = []
    error: WorkerError | WorkerLost | None = None
    for worker, _ in zip(workers, calls, strict=False):
        try:
            succeeded, message = worker.hear()
        except EOFError:
            error = error or worker_lost([], *PROCESS_ENDED)
            continue
        except BaseException:
            for each in workers:
                each.end()
            raise
        answer = opened(message)
        if succeeded:
            results.append(answer)
        else:
            error = error or WorkerError(worker.rank, *answer[:2])
    if error is not None:
        raise error
    return results


# -- jobs -----------------------------------------------------------------------------------------


class LocalJob(CalledJob):
    """One program on processes of this machine; made by :meth:`LocalEngine.open`."""

    def __init__(
        self,
        engine: LocalEngine,
        fn: Callable,
        feed: Feed | None,
        num_workers: int,
        threads: int | None,
        keep_spools: bool,
    ):
        super().__init__(num_workers)
        self._resources = contextlib.ExitStack()
        try:
            spec, self._ingest = _prepared(
                self._resources, engine, fn, feed, num_workers, threads, keep_spools
            )
            self._channel = Channel(_LOOPBACK, engine.port)
            self._resources.callback(self._channel.close)
        except BaseException:
            self.close()
            raise
        self._threads = threads
        self._spec = replace(spec, address=self._channel.address)

    @contextlib.contextmanager
    def _calls(self, line):
        with _processes.lend(self.num_workers, self._threads) as workers:
            yield LocalCalls(workers, line)

    def close(self) -> None:
        self._remove_spools()
        self._resources.close()


class LocalCalls(WorkerCalls):
    """One call of each of some worker processes."""

    def __init__(self, workers: list[Worker], line: Line):
        super().__init__(len(workers), line)
        self._workers = workers
        self._selector = selectors.DefaultSelector()

    def run(self, spec, attempt, poll):
        with self._selector:
            super().run(spec, attempt, poll)

    def _submit(self, spec, attempt):
        for place, worker in enumerate(self._workers):
            self._selector.register(worker.line, selectors.EVENT_READ, place)
            message = encoded((_run_task, (spec, attempt, place, _session_directory())), "The job")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # said by `hear`
                worker.ask(message)
            message.close()

    def _ended(self, timeout):
        for key, _ in self._selector.select(timeout):
            place, worker = key.data, self._workers[key.data]
            self._selector.unregister(worker.line)
            try:
                succeeded, message = worker.hear()
            except EOFError:
                worker.end(grace=_EXIT_S)
                yield place, WorkerLost(PROCESS_ENDED[0])
                continue
            answer = opened(message)
            yield place, answer if succeeded else (place, "failed", f"{answer[0]}: {answer[1]}")

    def _kill(self, place):
        self._workers[place].kill()


def _run_task(spec, attempt, place, local_dir):
    return execute(spec, attempt, iter(()), place, local_dir)


class InProcessJob(Job):
    """One program on a worker in the calling process; made by :meth:`LocalEngine.open`."""

    def __init__(
        self,
        engine: LocalEngine,
        fn: Callable,
        feed: Feed | None,
        num_workers: int,
        threads: int | None,
        keep_spools: bool,
    ):
        self._resources = contextlib.ExitStack()
        try:
            self._spec, _ = _prepared(self._resources, engine, fn, feed, num_workers, threads, True)
        except BaseException:
            self.close()
            raise
        self._attempts = 0
        self._spools: dict | None = None

    def attempt(self, options=None, state=None, on_event=None) -> list:
        from torch.distributed import HashStore

        self._attempts += 1
        line = Line(HashStore(), "", self._attempts)
        spec = self._spec
        if self._spools is not None:
            spec = replace(spec, reader=None, spools=(self._spools,))
        uplink = InProcessUplink(options or {}, state, on_event)
        place = (0, _session_directory(), line, Address(_LOOPBACK, 9, ""))
        _, outcome, detail = attempt_task(spec, *place, uplink, iter(()))
        if line.has("spool/0"):
            self._spools = line.get_json("spool/0")
        if uplink.error is not None:
            if uplink.error["kind"] == "KeyboardInterrupt":
                raise KeyboardInterrupt
            raise user_error(uplink.error) from None
        if outcome == "nospool":
            self._spools = None
            return self.attempt(options, state, on_event)
        if uplink.result is None:
            raise WorkerLost(f"Worker 0 was lost: {detail or outcome}")
        return [uplink.result]

    def close(self) -> None:
        from bigdl.runtime.shards.shard import remove_spool

        for spool in (getattr(self, "_spools", None) or {}).values():
            remove_spool(spool["path"])
        self._resources.close()


class InProcessUplink(Uplink):
    """Hands everything over at once."""

    def __init__(self, options: dict, state: bytes | None, on_event):
        self._options, self._state = options, state
        self._on_event = on_event or (lambda kind, value: None)
        self.result: Any = None
        self.error: dict | None = None

    @property
    def progress(self):
        return None

    @progress.setter
    def progress(self, values):
        self._on_event("progress", values)

    def options(self):
        return self._options

    def state(self):
        return self._state

    def send(self, doc, data):
        self._on_event("message", (doc, data))

    def give(self, rank, kind, data):
        self.result = decode(kind, data)

    def failing(self):
        return 1

    def report(self, doc):
        self.error = doc


def _prepared(
    resources, engine, fn, feed, num_workers, threads, keep_spools
) -> tuple[TaskSpec, Ingest | None]:
    """What the workers are told, and their input; `resources` frees what it takes."""
    program = pickled(fn)
    number = resources.enter_context(job_number())
    ingest: Ingest | None = None
    if feed is not None:
        feed.check_local()
        ingest = feed.prepare(engine.cluster, num_workers)
        resources.callback(ingest.close)
    spec = TaskSpec(
        address=None,
        job=number,
        active_jobs=active_jobs(),
        world_size=num_workers,
        threads=threads or min(n for _, n in worker_shares(num_workers, None)),
        timeout=engine.timeout,
        is_local=True,  # what a program prints comes by the channel
        log_to_driver=engine.log_to_driver,
        import_path=tuple(os.path.abspath(path) for path in sys.path),
        program=program,
        keep_spools=keep_spools,
        reader=ingest.reader if ingest else None,
    )
    return spec, ingest


# -- processes ------------------------------------------------------------------------------------


class LocalProcesses:
    """The worker processes of this program: those that wait for work are used again.

    Executors such as loky's give a task to whichever process is free; here worker r is pinned to
    its cores before it loads anything, one that dies is known by its rank while the others go on,
    and all end with this process, however it ends.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._idle: list[tuple[CpuSlot, Worker]] = []
        self._lifeline: tuple[int, int] | None = None
        self._owner = os.getpid()

    @contextlib.contextmanager
    def lend(self, number: int, threads: int | None) -> Iterator[list[Worker]]:
        """Workers for the time of the block, each on its share of the cores.

        Raises
        ------
        WorkerLost
            When a process does not start.
        """
        slots = [
            CpuSlot(tuple(cores), threads or share) for cores, share in worker_shares(number, None)
        ]
        workers: list[Worker] = []
        try:
            for slot in slots:
                workers.append(self._take(slot, len(workers)))
            for worker in workers:
                if worker.pending:
                    _await_start(worker)
            yield workers
        finally:
            self._give_back(zip(slots, workers, strict=False))

    def close(self) -> None:
        """End the processes that wait for work."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for _, worker in idle:
            worker.hang_up()
        for _, worker in idle:
            worker.end(grace=1.0)

    def _take(self, slot: CpuSlot, rank: int) -> Worker:
        with self._lock:
            if os.getpid() != self._owner:  # a forked child has processes of its own
                self._idle, self._lifeline, self._owner = [], None, os.getpid()
            for i, (place, worker) in enumerate(self._idle):
                if place == slot and worker.process.poll() is None:
                    del self._idle[i]
                    worker.rank = rank
                    return worker
            if self._lifeline is None:
                self._lifeline = os.pipe()
            worker = Worker(0, rank, slot, self._lifeline[0])
        message = encoded(_serve_calls, "The local worker")
        worker.ask(message)
        message.close()
        return worker

    def _give_back(self, workers) -> None:
        for slot, worker in workers:
            if worker.pending:  # interrupted in the middle of a call
                worker.end()
            else:
                with self._lock:
                    self._idle.append((slot, worker))


def _await_start(worker: Worker) -> None:
    try:
        succeeded, message = worker.hear()
    except EOFError:
        worker.end(_EXIT_S)
        cause = cause_of_end(worker.process.returncode or 0)
        raise WorkerLost(f"A worker could not be started: its process {cause}") from None
    answer = opened(message)
    if not succeeded:
        raise WorkerError(worker.rank, *answer[:2])


def _serve_calls():
    """Make the function of a worker: it calls what it gets."""
    import torch  # noqa: F401 - takes seconds, and every program needs it

    def call(item):
        function, arguments = item
        return function(*arguments)

    return call


_processes = LocalProcesses()
_directory: tuple[int, str] | None = None
_directory_lock = threading.Lock()


def _session_directory() -> str:
    """The directory of this process's spools and files; removed when it ends."""
    global _directory
    with _directory_lock:
        if _directory is None or _directory[0] != os.getpid():
            path = tempfile.mkdtemp(prefix=f"bigdl-local-{os.getpid()}-", dir=scratch_home())
            _remove_stale(os.path.dirname(path))
            _directory = os.getpid(), path
            atexit.register(_remove_directory, os.getpid(), path)
        return _directory[1]


def _remove_directory(owner: int, path: str) -> None:
    if os.getpid() == owner:
        _processes.close()
        shutil.rmtree(path, ignore_errors=True)


def _remove_stale(parent: str) -> None:
    """Remove what processes that were killed left."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            words = name.split("-")
            if words[:2] == ["bigdl", "local"] and len(words) > 3 and words[2].isdigit():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(words[2]), 0)
                    continue
                if not os.path.exists(f"/proc/{words[2]}"):
                    shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
