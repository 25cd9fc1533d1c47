"""The Spark engine: N workers as the N tasks of one barrier stage.

The stage is always the result stage of its job, collected directly: as such Spark does not run it
again by itself, and the FailurePolicy alone decides about retries.  Rendezvous and everything else
between driver and workers goes through the :mod:`~bigdl.orca.engine.channel`, since Spark's own
``barrier()`` and ``allGather()`` look once a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bigdl.common.errors import UsageError, WorkerError, WorkerLost, require
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.engine.base import Engine, Job
from bigdl.orca.engine.channel import Address, Channel

__all__ = ["NoRows", "SparkEngine"]

logger = logging.getLogger("bigdl.orca")

_OUTCOME = "rank int, kind string, detail string"
_GRACE = 2.0  # seconds that workers get to end by themselves after the first error
_jobs = itertools.count()
_active: set[int] = set()


class NoRows(UsageError):
    """The input of a job has no rows at all."""


@dataclass(frozen=True)
class TaskSpec:
    """What every task of a job is told; the same for all attempts that read the input."""

    address: Address
    job: int
    active_jobs: tuple[int, ...]
    world_size: int
    threads: int
    timeout: float
    log_to_driver: bool
    sys_path: tuple[str, ...]
    program: bytes
    reader: Callable | None
    spools: tuple[dict, ...] | None = None


class SparkEngine(Engine):
    """Runs programs as barrier stages of the active Spark application.

    Parameters
    ----------
    cluster : SparkCluster, optional
        Default: that of the active context.
    workers_per_node : int, optional
        Workers per node when `num_workers` is not given to :meth:`run`.
    channel_port : int, optional
        Port of the driver that workers connect to; 0 takes any free one.
    timeout : float, optional
        Seconds after which a collective without progress fails. A worker that was only paused goes
        on, so this bounds nothing but the loss of a network; default 1800.
    log_to_driver : bool, optional
        Show what workers print on the driver.

    Raises
    ------
    UsageError
        Without an active Spark context.
    """

    def __init__(
        self,
        cluster: SparkCluster | None = None,
        *,
        workers_per_node: int = 1,
        channel_port: int = 0,
        timeout: float = 1800.0,
        log_to_driver: bool = True,
    ):
        self.cluster = cluster or SparkCluster.from_active()
        self.workers_per_node = workers_per_node
        self._port = channel_port
        self._timeout = timeout
        self._log_to_driver = log_to_driver

    @property
    def num_workers(self) -> int:
        """Workers of a job that does not say otherwise: nodes times workers per node."""
        return self.cluster.nodes * self.workers_per_node

    def open(self, fn, feed=None, num_workers=None, *, threads=None) -> SparkJob:
        num_workers = self.num_workers if num_workers is None else num_workers
        if not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(f"num_workers should be a positive integer, got {num_workers!r}")
        self._check_slots(num_workers)
        if threads is None:
            per_node = -(-num_workers // max(self.cluster.nodes, 1))
            threads = max(1, self.cluster.cores_per_node // per_node)
        return SparkJob(self, fn, feed, num_workers, threads)

    def _check_slots(self, num_workers):
        if self.cluster.dynamic_allocation:
            raise UsageError(
                "Distributed training needs all its workers at once, which Spark refuses with "
                "dynamic allocation; set spark.dynamicAllocation.enabled=false"
            )
        slots = self.cluster.slots()
        if num_workers > slots:
            raise UsageError(
                f"{num_workers} workers were asked for but the cluster can run {slots} tasks at "
                "once; ask for fewer workers (workers_per_node) or for more cores or nodes in "
                "init_orca_context"
            )


class SparkJob(Job):
    """One program on the tasks of barrier stages; made by :meth:`SparkEngine.open`."""

    def __init__(self, engine: SparkEngine, fn, feed, num_workers: int, threads: int):
        cloudpickle = require("cloudpickle", "orca")
        self._engine = engine
        self._sc, self._spark = engine.cluster.sc, engine.cluster.spark
        self.num_workers = num_workers
        self._number = next(_jobs)
        program = _pickle(cloudpickle, fn)
        self._ingest = feed.prepare(engine.cluster, num_workers) if feed is not None else None
        self._channel = Channel(engine.cluster.driver_host, engine._port)
        self._spec = TaskSpec(
            address=self._channel.address,
            job=self._number,
            active_jobs=tuple(_active),
            world_size=num_workers,
            threads=threads,
            timeout=engine._timeout,
            log_to_driver=engine._log_to_driver,
            sys_path=tuple(os.path.abspath(p) for p in sys.path),
            program=program,
            reader=self._ingest.reader if self._ingest else None,
        )
        _active.add(self._number)
        self._attempts = 0
        self._frame = None
        self._spools: list[dict] | None = None
        self._closed = False

    def attempt(self, options=None, state=None, on_event=None) -> list:
        while True:
            results = self._attempt(options or {}, state, on_event)
            if results is not None:
                return results
            logger.info("The spooled input is gone; it is read again")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _active.discard(self._number)
        if self._ingest:
            self._ingest.close()
        if self._spools:
            from bigdl.orca.data.feeds.spool import remove_spool

            for doc in (d for spools in self._spools for d in spools.values()):
                remove_spool(doc["path"])
        self._channel.close()

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self, options, state, on_event):
        """Results in rank order, or None when the spools of an earlier attempt are gone."""
        self._attempts += 1
        line = self._channel.line(self._attempts)
        line.set_json("options", options)
        if state is not None:
            line.put_bytes("state", state)
        self._channel.announce(self._attempts)
        run = _Run(self._sc, self._stage())
        watch = _Watch(line, run, on_event)
        try:
            with _interruptible(), quiet(self._sc):
                run.start()
                while not run.done.wait(0.05):
                    watch.poll()
                watch.poll()
                if run.error is not None:
                    _settle(line)
        except BaseException:  # Ctrl-C above all: free the workers before anything else
            self._stop(line, run)
            raise
        self._remember_spools(line)
        return self._results(line, run, watch)

    def _stage(self):
        """The frame of an attempt: with the input, or without where its spools are known."""
        if self._spools is not None:
            spec = replace(self._spec, reader=None, spools=tuple(self._spools))
            return self._empty().mapInArrow(_task(spec), _OUTCOME, barrier=True)
        if self._frame is None:
            # the same object in each attempt, so that Spark finds its shuffle files again
            source = self._ingest.frame if self._ingest else self._empty()
            self._frame = source.mapInArrow(_task(self._spec), _OUTCOME, barrier=True)
        return self._frame

    def _empty(self):
        return self._spark.range(0, self.num_workers, 1, self.num_workers)

    def _remember_spools(self, line):
        if self._ingest is None or self._spools is not None:
            return
        keys = [f"spool/{p}" for p in range(self.num_workers)]
        if all(line.has(key) for key in keys):
            self._spools = [line.get_json(key) for key in keys]

    def _results(self, line, run, watch):
        if watch.errors:
            raise _user_error(watch.errors)
        if run.error is not None:
            raise _job_error(run.error)
        outcomes = {rank: (kind, detail) for rank, kind, detail in run.rows}
        kinds = {kind for kind, _ in outcomes.values()}
        if not outcomes and self._ingest is not None:
            raise NoRows("The input has no rows")
        if "nospool" in kinds:
            self._spools = None
            return None
        if kinds != {"ok"} or len(outcomes) != self.num_workers:
            detail = next((d for _, d in outcomes.values() if d), "a worker went away")
            raise WorkerLost(f"A worker was lost: {detail}")
        results = []
        for rank in range(self.num_workers):
            kind = line.get(f"result/{rank}/kind")
            data = line.take_bytes(f"result/{rank}")
            results.append(data if kind == b"bytes" else json.loads(data))
        return results

    def _stop(self, line, run):
        line.set("abort", "stopped by the driver")
        run.cancel()
        with quiet(self._sc):
            if not run.done.wait(10):
                logger.warning("The Spark job did not end within 10 s after it was cancelled")
            _settle(line)


def _settle(line, patience: float = 3.0) -> None:
    """Wait for the survivors of a failed stage to leave, all but those that died."""
    end = time.monotonic() + patience
    while line.count("left") < line.count("entered") and time.monotonic() < end:
        if line.count("left") >= line.count("entered") - 1:
            end = min(end, time.monotonic() + 0.3)
        time.sleep(0.05)


class _Run:
    """The collecting thread of one stage."""

    def __init__(self, sc, frame):
        self._sc, self._frame = sc, frame
        self._tag = f"bigdl-{secrets.token_hex(6)}"
        self.done = threading.Event()
        self.rows: list = []
        self.error: BaseException | None = None

    def start(self):
        from pyspark import InheritableThread

        InheritableThread(target=self._collect, daemon=True).start()

    def _collect(self):
        try:
            self._sc.addJobTag(self._tag)
            self.rows = [tuple(row) for row in self._frame.collect()]
        except BaseException as error:  # handed to the calling thread
            self.error = error
        finally:
            with contextlib.suppress(Exception):
                self._sc.removeJobTag(self._tag)
            self.done.set()

    def cancel(self):
        with contextlib.suppress(Exception):
            self._sc.cancelJobsWithTag(self._tag)


class _Watch:
    """What the driver sees of a running stage."""

    def __init__(self, line, run, on_event):
        self._line, self._run, self._on_event = line, run, on_event
        self.errors: list[dict] = []
        self._messages = self._logs = 0
        self._deadline = None
        self._shown = None

    def poll(self):
        for doc in self._line.drain("logs", self._logs):
            self._logs += 1
            for text in doc["lines"]:
                print(f"[worker {doc['rank']}] {text}", flush=True)
        for doc, data in self._line.drain("messages", self._messages, data=True):
            self._messages += 1
            self._emit("message", (doc, data))
        self._progress()
        for doc in self._line.drain("errors", len(self.errors)):
            self.errors.append(doc)
        if self.errors and self._deadline is None:
            self._deadline = time.monotonic() + _GRACE
        if (self._run.error is not None) or (
            self._deadline is not None and time.monotonic() > self._deadline
        ):
            # those that wait for a peer which will not come, or compute without end
            self._line.set("abort", "another worker failed")
            self._deadline = float("inf")

    def _progress(self):
        if self._on_event is None or not self._line.has("beat/0"):
            return
        progress = self._line.get_json("beat/0").get("progress")
        if progress is not None and progress != self._shown:
            self._shown = progress
            self._emit("progress", progress)

    def _emit(self, kind, value):
        if self._on_event is not None:
            self._on_event(kind, value)


@contextlib.contextmanager
def _interruptible():
    """Let Ctrl-C raise KeyboardInterrupt here, and nothing else.

    PySpark's own handler cancels every job of the application, from inside whatever call the main
    thread is in.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _task(spec: TaskSpec):
    def task(batches):
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        from bigdl.orca.engine.worker import execute

        directory = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        partition = BarrierTaskContext.get().partitionId()
        rank, kind, detail = execute(
            spec, batches, partition, directory[partition % len(directory)] or "/tmp"
        )
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([kind]), pa.array([detail])],
            ["rank", "kind", "detail"],
        )

    return task


def _pickle(cloudpickle, fn) -> bytes:
    try:
        return cloudpickle.dumps(fn)
    except Exception as error:
        raise UsageError(
            f"The program cannot be shipped to the workers, since it refers to something that "
            f"cannot be pickled ({error}); create such objects inside the function instead"
        ) from error


def _user_error(errors):
    first = errors[0]
    if first["usage"]:
        return UsageError(first["message"])
    return WorkerError(first["rank"], first["kind"], first["traceback"])


_LOST = re.compile(
    r"Python worker exited unexpectedly|ExecutorLostFailure|Executor heartbeat timed out"
    r"|executor.* (was )?lost|Connection reset|Broken pipe|worker lost|FetchFailed"
    r"|Remote RPC client disassociated|Python worker keepalive",
    re.IGNORECASE,
)
_PYTHON = re.compile(
    r"(Traceback \(most recent call last\):.*?)(?=\n\s*at [\w.$]+\(|\Z)", re.DOTALL
)


def _job_error(error):
    """A failed Spark job as one of our errors: a lost worker, or the input's own failure."""
    text = str(error)
    if _LOST.search(text) and "Traceback (most recent call last)" not in text:
        reason = _LOST.search(text).group(0)
        return WorkerLost(f"A worker was lost: {reason}")
    found = _PYTHON.search(text)
    cause = found.group(1).strip() if found else text.strip().split("\n\tat ")[0].strip()
    lost = WorkerError(-1, type(error).__name__, cause)
    lost.args = (f"The input could not be computed:\n{cause}",)
    return lost
