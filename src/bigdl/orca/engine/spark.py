"""The Spark engine: N workers as the N tasks of one barrier stage.

The stage is always the result stage of its job, collected directly: as such Spark does not run it
again by itself, and the FailurePolicy alone decides about retries.  Rendezvous and everything else
between driver and workers goes through the :mod:`~bigdl.orca.engine.channel`, since Spark's own
``barrier()`` and ``allGather()`` look once a second.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from dataclasses import replace

from bigdl.common.errors import UsageError, WorkerLost, require
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark import SparkCluster, user_import_path
from bigdl.orca.engine.base import Engine, Job
from bigdl.orca.engine.causes import NoRows, job_error, unreachable, user_error, worker_lost
from bigdl.orca.engine.channel import Channel, Unreachable
from bigdl.orca.engine.stage import SparkCall, Watch, settle, vanished
from bigdl.orca.engine.task import TaskSpec
from bigdl.orca.engine.uplink import decode

__all__ = ["NoRows", "SparkEngine"]

logger = logging.getLogger("bigdl.orca")

_ATTEMPT = "bigdl.attempt"
_OUTCOME = "rank int, outcome string, detail string"
_QUIET_S = 0.2  # seconds in which Spark logs that the tasks of a failed stage ended
_SLOTS_S = 120.0  # seconds that executors get to register, or to come back

_lock = threading.Lock()
_numbers = itertools.count()
_active: set[int] = set()


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
        Without an active Spark context, or for an argument that cannot work.
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
        _check_int("workers_per_node", workers_per_node, 1)
        _check_int("channel_port", channel_port, 0, 65535)
        if not timeout > 0:
            raise UsageError(f"timeout should be a positive number of seconds, got {timeout!r}")
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
        """Check, prepare the input, and return the job (no worker runs yet).

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.
        threads : int, optional
            Threads of each worker; default its share of the node's cores.
        """
        num_workers = self.num_workers if num_workers is None else num_workers
        _check_int("num_workers", num_workers, 1)
        if self.cluster.dynamic_allocation:
            raise UsageError(
                "Distributed training needs all its workers at once, which Spark refuses with "
                "dynamic allocation; set spark.dynamicAllocation.enabled=false"
            )
        self._check_slots(num_workers)
        if threads is None:
            per_node = -(-num_workers // max(self.cluster.nodes, 1))
            threads = max(1, self.cluster.cores_per_node // per_node)
        _check_int("threads", threads, 1)
        return SparkJob(self, fn, feed, num_workers, threads)

    def _check_slots(self, num_workers):
        cluster = self.cluster
        slots = cluster.slots()
        if num_workers > slots and not cluster.is_local:
            task_cpus = int(cluster.sc.getConf().get("spark.task.cpus", "1"))
            if num_workers <= cluster.nodes * (cluster.cores_per_node // task_cpus):
                # asked for, but not all executors have registered yet
                call = SparkCall(cluster.sc, lambda: self.await_slots(num_workers, call))
                slots = call.wait()
        if num_workers > slots:
            raise UsageError(
                f"{num_workers} workers were asked for but the cluster can run {slots} tasks at "
                "once; ask for fewer workers (workers_per_node) or for more cores or nodes in "
                "init_orca_context"
            )

    def await_slots(self, num_workers: int, call: SparkCall) -> int:
        """Wait until so many tasks can run at once, but not for ever; returns how many can.

        Spark itself would look every 15 s only.
        """
        end = time.monotonic() + _SLOTS_S
        while (slots := self.cluster.slots()) < num_workers and time.monotonic() < end:
            if call.cancelled.wait(0.1):
                break
        return slots


class SparkJob(Job):
    """One program on the tasks of barrier stages; made by :meth:`SparkEngine.open`."""

    def __init__(self, engine: SparkEngine, fn, feed, num_workers: int, threads: int):
        program = _pickle(fn)
        self._engine = engine
        self._sc, self._spark = engine.cluster.sc, engine.cluster.spark
        self.num_workers = num_workers
        self._ingest = self._channel = None
        self._attempts = 0
        self._rdd = None
        self._spools: list[dict] | None = None
        self._lines: list = []
        self._closed = False
        with _lock:
            self._number = next(_numbers)
            active = tuple(_active)
            _active.add(self._number)
        try:
            if feed is not None:
                prepare = SparkCall(self._sc, lambda: feed.prepare(engine.cluster, num_workers))
                self._ingest = prepare.wait()
            self._channel = Channel(engine.cluster.driver_host, engine._port)
        except BaseException:
            self.close()
            raise
        self._spec = TaskSpec(
            address=self._channel.address,
            job=self._number,
            active_jobs=active,
            world_size=num_workers,
            threads=threads,
            timeout=engine._timeout,
            is_local=engine.cluster.is_local,
            log_to_driver=engine._log_to_driver,
            import_path=tuple(user_import_path()),
            program=program,
            reader=self._ingest.reader if self._ingest else None,
            accept=self._ingest.accept if self._ingest else None,
        )

    def attempt(self, options=None, state=None, on_event=None) -> list:
        while True:
            results = self._attempt(options or {}, state, on_event)
            if results is not None:
                return results

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with _lock:
            _active.discard(self._number)
        if self._ingest:
            from bigdl.orca.data.feeds.spool import remove_spool

            with contextlib.suppress(Exception):  # workers on other machines removed theirs
                for doc in (d for line in self._lines for d in self._spools_of(line).values()):
                    for spool in doc.values():
                        remove_spool(spool["path"])
            self._ingest.close()
        if self._channel:
            self._channel.close()

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self, options, state, on_event):
        """Results in rank order, or None when the input must be read again."""
        self._attempts += 1
        line = self._channel.line(self._attempts)
        self._lines.append(line)
        line.set_json("options", options)
        if state is not None:
            line.put_bytes("state", state)
        call = SparkCall(self._sc, lambda: self._collect(line, call))
        watch = Watch(line, call, on_event)
        rows, failure = [], None
        try:
            rows = call.wait(watch.poll, lambda: line.set("abort", "stopped by the driver"))
        except Exception as error:
            if call.error is not error:  # of `on_event`
                raise
            failure = error
        watch.poll(final=True)
        line.delete_bytes("state")
        if self._spools is None and self._ingest is not None:
            made = self._spools_of(line)
            if len(made) == self.num_workers:
                self._spools = [made[rank] for rank in range(self.num_workers)]
        return self._results(line, watch, rows, failure)

    def _collect(self, line, call):
        """Run the stage; returns when no worker is left, also when one was lost."""
        with quiet(self._sc):
            try:
                # travels with the Spark job: the stage is the same in all attempts
                self._sc.setLocalProperty(_ATTEMPT, str(self._attempts))
                slots = self._engine.await_slots(self.num_workers, call)
                if slots < self.num_workers:
                    raise WorkerLost(
                        f"{self.num_workers} workers are needed but the cluster can only run "
                        f"{slots} tasks at once since executors were lost"
                    )
                return [tuple(row) for row in self._stage().collect()]
            except BaseException:
                with contextlib.suppress(Exception):
                    line.set("abort", "another worker failed")
                    settle(line, self.num_workers)
                    time.sleep(_QUIET_S)
                raise

    def _stage(self):
        """The stage of an attempt: with the input, or without where its spools are known."""
        if self._spools is not None:
            spec = replace(self._spec, reader=None, accept=None, spools=tuple(self._spools))
            return self._empty().mapInArrow(_task(spec), _OUTCOME, barrier=True)
        if self._rdd is None:
            # The same object in each attempt, so that Spark finds its shuffle files again. Not the
            # frame: adaptive execution remembers that its result failed and would not run it again.
            source = self._ingest.frame if self._ingest else self._empty()
            self._rdd = source.mapInArrow(_task(self._spec), _OUTCOME, barrier=True).rdd
        return self._rdd

    def _empty(self):
        return self._spark.range(0, self.num_workers, 1, self.num_workers)

    def _read_otherwise(self):
        """Prepare the input in the other way, after the workers refused its shards."""
        self._ingest.close()
        self._ingest = SparkCall(self._sc, self._ingest.otherwise).wait()
        self._spec = replace(self._spec, reader=self._ingest.reader, accept=self._ingest.accept)
        self._rdd = self._spools = None

    def _spools_of(self, line) -> dict[int, dict]:
        """Spools that the tasks of one attempt made, by rank."""
        keys = {place: f"spool/{place}" for place in range(self.num_workers)}
        return {place: line.get_json(key) for place, key in keys.items() if line.has(key)}

    def _results(self, line, watch, rows, failure):
        ranks = range(self.num_workers)
        if watch.first_error is not None:
            raise user_error(watch.first_error) from None
        if line.has(*(f"result/{rank}/kind" for rank in ranks)):
            return [
                decode(line.get(f"result/{rank}/kind").decode(), line.take_bytes(f"result/{rank}"))
                for rank in ranks
            ]
        gone = vanished(line, self.num_workers)
        if failure is not None:
            raise job_error(failure, gone) from None
        if not rows and self._ingest is not None:
            raise NoRows("The input has no rows")
        outcomes = {outcome for _, outcome, _ in rows}
        if "nospool" in outcomes:
            logger.info("The spooled input is gone; it is read again")
            self._spools = None
            return None
        if "refused" in outcomes:
            self._read_otherwise()
            return None
        detail = next((detail for _, _, detail in rows if detail), "it left no result")
        raise worker_lost(gone, detail)


def _task(spec: TaskSpec):
    def task(batches):
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        from bigdl.orca.engine.task import execute

        context = BarrierTaskContext.get()
        attempt, place = int(context.getLocalProperty(_ATTEMPT)), context.partitionId()
        directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        directory = directories[place % len(directories)] or "/tmp"
        try:
            rank, outcome, detail = execute(spec, attempt, batches, place, directory)
        except Unreachable as error:
            raise unreachable(os.uname().nodename, str(error)) from None
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([outcome]), pa.array([detail])],
            ["rank", "outcome", "detail"],
        )

    return task


def _pickle(fn) -> bytes:
    cloudpickle = require("cloudpickle", "orca")
    if not callable(fn):
        raise UsageError(f"fn should be a function of a worker, got {type(fn).__name__}")
    try:
        return cloudpickle.dumps(fn)
    except Exception as error:
        raise UsageError(
            f"The program cannot be shipped to the workers, since it refers to something that "
            f"cannot be pickled ({error}); create such objects inside the function instead"
        ) from error


def _check_int(name, value, least, most=None):
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < least
        or (most is not None and value > most)
    ):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} should be an integer {bound}, got {value!r}")
