"""One worker: what a program sees of it, and how the engine runs a program in it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.engine.base import PeerLost

__all__ = ["RESULT_LIMIT", "Worker", "execute"]

RESULT_LIMIT = 2 << 30  # bytes that one worker may return through the driver
_POLL = 0.1  # seconds between two looks of the watcher
_BEAT = 0.5  # seconds between two heartbeats


class Worker:
    """What a program knows of the worker that it runs in.

    Attributes
    ----------
    rank : int
        0 ... `world_size` - 1.
    world_size : int
        Number of workers.
    threads : int
        Threads that this worker may use; already set in torch and OpenMP.
    shards : dict of str to Shard
        The worker's rows of every feed, by the feed's name.
    options : dict
        What the driver said of this attempt.
    host : str
        Address of this worker towards the driver.
    local_dir : str
        A directory on this machine that goes with the application.
    timeout : float
        Seconds after which a collective that makes no progress fails.
    """

    def __init__(
        self, rank, world_size, *, threads, shards, options, line, host, local_dir, timeout
    ):
        self.rank = rank
        self.world_size = world_size
        self.threads = threads
        self.shards = shards
        self.options = options
        self.host = host
        self.local_dir = local_dir
        self.timeout = timeout
        self.line = line
        self._progress: dict[str, Any] | None = None
        self._cleanups: list[Callable[[], None]] = []

    @property
    def shard(self):
        """The shard of the only feed, or None."""
        return next(iter(self.shards.values()), None)

    def state(self) -> bytes | None:
        """What the driver gave as `state` of the attempt; for rank 0 only."""
        return self.line.take_bytes("state", delete=False) if self.line.has("state") else None

    def progress(self, **values) -> None:
        """Tell the driver how far this worker is; cheap, the heartbeat takes it along."""
        self._progress = values

    def send(self, topic: str, doc: dict, data: bytes) -> None:
        """Send a message to the driver's ``on_event``; returns when the channel has it."""
        self.line.push("messages", {"topic": topic, "rank": self.rank, **doc}, data)

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Run `cleanup` when the program ends, however it ends, before anything is reported.

        A process group must be destroyed here: as long as it is open, the peers of a failed worker
        stay blocked in their collective.
        """
        self._cleanups.append(cleanup)

    def clean_up(self) -> None:
        while self._cleanups:
            with contextlib.suppress(Exception):
                self._cleanups.pop()()


class _Watcher(threading.Thread):
    """Ends this process on abort or when the driver is gone; carries the heartbeat and the logs.

    Nothing else interrupts a thread that is blocked in a collective.
    """

    def __init__(self, line, rank, worker_ref, log):
        super().__init__(name="bigdl-watcher", daemon=True)
        self._line, self._rank, self._worker, self._log = line, rank, worker_ref, log
        self._stopping = threading.Event()

    def run(self):
        next_beat = 0.0
        while not self._stopping.wait(_POLL):
            try:
                if self._line.has("abort"):
                    self._exit()
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + _BEAT
                    self.flush()
            except Exception as error:
                # a slow or stopped driver answers late; a dead one closes the connection
                if "timeout" not in str(error).lower():
                    self._exit()

    def flush(self):
        worker = self._worker()
        beat = {"time": time.time(), "pid": os.getpid()}
        if worker is not None and worker._progress is not None:
            beat["progress"] = worker._progress
        self._line.set_json(f"beat/{self._rank}", beat)
        lines = self._log.take()
        if lines:
            self._line.push("logs", {"rank": self._rank, "lines": lines})

    def stop(self):
        self._stopping.set()
        self.join(timeout=10)
        with contextlib.suppress(Exception):
            self.flush()

    def _exit(self):
        if not self._stopping.is_set():
            with contextlib.suppress(Exception):
                self._line.count("left", 1)
            os._exit(17)


class _Log:
    """Stands in for stdout and stderr and keeps whole lines for the driver."""

    def __init__(self, stream):
        self._stream = stream
        self._lines: collections.deque[str] = collections.deque(maxlen=10_000)
        self._part = ""

    def write(self, text):
        *whole, self._part = (self._part + text).split("\n")
        self._lines.extend(whole)
        return len(text)

    def take(self):
        out = []
        with contextlib.suppress(IndexError):
            while len(out) < 1000:
                out.append(self._lines.popleft())
        return out

    def flush(self):
        pass

    def __getattr__(self, name):
        return getattr(self._stream, name)


@contextlib.contextmanager
def _captured(active):
    log = _Log(sys.stdout)
    if not active:
        yield log
        return
    out, err = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = log
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = out, err
        if log._part:
            log.write("\n")


def execute(spec, batches, partition: int, local_dir: str):
    """Run one task of a job and return its outcome.

    Parameters
    ----------
    spec : bigdl.orca.engine.spark.TaskSpec
    batches : iterator of pyarrow.RecordBatch
        The input of this task; not read when the spools of an earlier attempt are used.
    partition : int
    local_dir : str

    Returns
    -------
    tuple (rank, kind, detail)
        kind is one of ``"ok"``, ``"error"`` (reported on the channel), ``"peer"`` (another worker
        went away), ``"nospool"`` (spools expected here are gone) and ``"void"`` (the cluster ran
        this task again by itself).
    """
    for path in reversed(spec.sys_path):
        if path not in sys.path and os.path.exists(path):
            sys.path.insert(0, path)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we say ourselves who went away
    line = spec.address.connect(0)
    line = line.at(line.announced())
    if line.count(f"enter/{partition}", 1) > 1:
        return partition, "void", ""
    line.count("entered", 1)
    holder: list[Worker] = []
    with _captured(spec.log_to_driver) as log:
        watcher = _Watcher(
            spec.address.connect(0).at(line.announced()),
            partition,
            lambda: holder[0] if holder else None,
            log,
        )
        watcher.start()
        try:
            return _attempt(spec, batches, partition, local_dir, line, holder)
        finally:
            for worker in holder:
                worker.clean_up()
                worker.shards.clear()
            watcher.stop()
            with contextlib.suppress(Exception):
                line.count("left", 1)


def _attempt(spec, batches, partition, local_dir, line, holder):
    from bigdl.common.cpu import thread_scope

    rank = partition
    try:
        with thread_scope(spec.threads):
            if spec.spools is not None:
                rank = _choose_rank(spec, partition, line)
                if rank is None:
                    return partition, "nospool", ""
                shards = _reopen(spec.spools[rank])
            else:
                shards = _ingest(spec, batches, partition, local_dir, line)
            import cloudpickle

            program = cloudpickle.loads(spec.program)
            worker = Worker(
                rank,
                spec.world_size,
                threads=spec.threads,
                shards=shards,
                options=line.get_json("options"),
                line=line,
                host=_own_address(spec.address),
                local_dir=local_dir,
                timeout=spec.timeout,
            )
            holder.append(worker)
            result = program(worker)
            worker.clean_up()
            _return(worker, line, result)
            return rank, "ok", ""
    except PeerLost as lost:
        return rank, "peer", str(lost)
    except BaseException as error:  # whatever user code raises is an outcome, not a task failure
        for worker in holder:
            worker.clean_up()
        report(line, rank, error)
        for _ in batches:  # Spark ends a task quietly only when its input was read
            pass
        return rank, "error", ""


def report(line, rank, error) -> None:
    """Write an exception to the channel; the first one written is the cause."""
    from bigdl.orca.data.feeds.base import SourceError

    frames = traceback.TracebackException.from_exception(error)
    line.push(
        "errors",
        {
            "rank": rank,
            "kind": type(error).__name__,
            "usage": isinstance(error, UsageError | SourceError),
            "message": str(error),
            "traceback": "".join(_without_engine(frames).format()),
        },
    )


def _without_engine(frames):
    """Drop the engine's own frames from the top of a traceback."""
    own = os.path.dirname(os.path.abspath(__file__))
    while len(frames.stack) > 1 and frames.stack[0].filename.startswith(own):
        frames.stack.pop(0)
    return frames


def _ingest(spec, batches, partition, local_dir, line):
    from bigdl.orca.data.feeds.spool import SpoolWriter, remove_stale_spools

    if spec.reader is None:
        for _ in batches:  # the engine's own empty frame
            pass
        return {}
    remove_stale_spools(local_dir, spec.job, set(spec.active_jobs))
    writers = []

    def open_spool(name, specs):
        writers.append(SpoolWriter(local_dir, spec.job, f"{name}-{partition}", specs))
        return writers[-1]

    try:
        shards = spec.reader(batches, open_spool)
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    line.set_json(f"spool/{partition}", {k: s.spool.to_json() for k, s in shards.items()})
    return shards


def _reopen(spools):
    from bigdl.orca.data.feeds.shard import Shard
    from bigdl.orca.data.feeds.spool import Spool

    return {name: Shard(Spool.from_json(doc)) for name, doc in spools.items()}


def _choose_rank(spec, partition, line):
    """Which shard this task takes, of those whose spools its machine sees; None if it cannot be.

    Every task says what it sees and computes the same assignment.
    """
    from bigdl.orca.data.feeds.spool import Spool

    seen = [
        rank
        for rank, spools in enumerate(spec.spools)
        if all(Spool.from_json(doc).is_here() for doc in spools.values())
    ]
    line.set_json(f"seen/{partition}", seen)
    line.meet("seen", spec.world_size)
    views = [line.get_json(f"seen/{p}") for p in range(spec.world_size)]
    return match(views).get(partition)


def match(views: list[list[int]]) -> dict[int, int]:
    """Give every task one of the shards that it sees, each to one task.

    Returns
    -------
    dict of task to shard; empty when there is no complete assignment
    """
    owner: dict[int, int] = {}

    def place(task, tried):
        # the shard of its own number first, so that nothing moves without need
        for shard in sorted(views[task], key=lambda s: (s != task, s)):
            if shard not in tried:
                tried.add(shard)
                if shard not in owner or place(owner[shard], tried):
                    owner[shard] = task
                    return True
        return False

    if not all(place(task, set()) for task in range(len(views))):
        return {}
    return {task: shard for shard, task in owner.items()}


def _return(worker, line, result):
    if isinstance(result, bytes | bytearray | memoryview):
        data, kind = bytes(result), "bytes"
    else:
        try:
            data, kind = json.dumps(result).encode(), "json"
        except TypeError as error:
            raise UsageError(
                "A program run by an engine must return bytes or JSON-able values, got "
                f"{type(result).__name__} ({error})"
            ) from None
    if len(data) > RESULT_LIMIT:
        raise UsageError(
            f"The result of {len(data) >> 20} MB is too large to come back through the driver "
            f"(limit {RESULT_LIMIT >> 20} MB); pass model_dir= so that it is written there"
        )
    line.set(f"result/{worker.rank}/kind", kind)
    line.put_bytes(f"result/{worker.rank}", data)


def _own_address(address) -> str:
    """The address that this machine uses towards the driver."""
    with socket.socket(
        socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((address.host, address.port))
        return probe.getsockname()[0]
