"""The Spark engine: N workers as the N tasks of one barrier stage.

The stage is always the result stage of its job, collected directly: as such Spark does not run it
again by itself, and the FailurePolicy alone decides about retries.  Rendezvous and everything else
between driver and workers goes through the :mod:`~bigdl.runtime.channel`, since Spark's own
``barrier()`` and ``allGather()`` look once a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.spark import SparkCluster, user_import_path
from bigdl.orca.cluster.spark_calls import SparkCall, job_error, unreachable
from bigdl.orca.engines import rank0
from bigdl.runtime.channel import Channel, Unreachable
from bigdl.runtime.engine import Engine
from bigdl.runtime.jobs import (
    ChannelJob,
    NoRows,
    NoWay,
    Watch,
    active_jobs,
    job_number,
    pickled,
    settle,
    user_error,
    vanished,
    worker_lost,
)
from bigdl.runtime.task import TaskSpec

__all__ = ["NoRows", "SparkEngine", "SparkJob"]

logger = logging.getLogger("bigdl.orca")

_RENDEZVOUS = ("auto", "driver", "rank0")
_ATTEMPT = "bigdl.attempt"
_ROWS = "rank int, kind string, detail string, data binary"
_QUIET_S = 0.2  # seconds in which Spark logs that the tasks of a failed stage ended
_SLOTS_S = 120.0  # seconds that executors get to register, or to come back

_unreachable: set[str] = set()  # applications whose executors cannot connect to this driver


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
    rendezvous : str, optional
        Where workers meet: ``"driver"``, ``"rank0"`` for clusters whose executors cannot connect to
        the driver (no progress, no output, and of the messages of a topic only the last; a retry
        reads the input again and needs ``model_dir`` to go on from a checkpoint), or ``"auto"``,
        the default: at the driver until a worker cannot connect to it within 5 s.

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
        rendezvous: str = "auto",
    ):
        check_integer("workers_per_node", workers_per_node, 1)
        check_integer("channel_port", channel_port, 0, 65535)
        check_number("timeout", timeout, above=0)
        check_choice("rendezvous", rendezvous, _RENDEZVOUS)
        self.cluster = cluster or SparkCluster.from_active()
        self.workers_per_node = workers_per_node
        self._port = channel_port
        self._timeout = timeout
        self._log_to_driver = log_to_driver
        self._rendezvous = rendezvous

    @property
    def is_driver_reachable(self) -> bool:
        """Whether workers meet at the driver, as far as it is known."""
        if self._rendezvous == "auto":
            return self.cluster.sc.applicationId not in _unreachable
        return self._rendezvous == "driver"

    def give_up_driver(self, error: NoWay) -> bool:
        """Let workers meet elsewhere from now on, if they may."""
        if self._rendezvous != "auto" or self.cluster.is_local:
            return False
        logger.warning("%s. The workers now meet at rank 0", error)
        _unreachable.add(self.cluster.sc.applicationId)
        return True

    @property
    def num_workers(self) -> int:
        """Workers of a job that does not say otherwise: nodes times workers per node."""
        return self.cluster.nodes * self.workers_per_node

    def open(  # type: ignore[override]  # each engine has options of its own
        self, fn, feed=None, num_workers=None, *, threads=None, keep_spools=False
    ) -> SparkJob:
        """Check, prepare the input, and return the job (no worker runs yet).

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.
        threads : int, optional
            Threads of each worker; default its share of the node's cores.
        keep_spools : bool
            Whether attempts will follow one that succeeded; spools stay until the job is closed.
        """
        num_workers = self.num_workers if num_workers is None else num_workers
        check_integer("num_workers", num_workers, 1)
        if self.cluster.dynamic_allocation:
            raise UsageError(
                "Distributed training needs all its workers at once, which Spark refuses with "
                "dynamic allocation; set spark.dynamicAllocation.enabled=false"
            )
        self._check_slots(num_workers)
        if threads is None:
            per_node = -(-num_workers // max(self.cluster.nodes, 1))
            threads = max(1, self.cluster.cores_per_node // per_node)
        check_integer("threads", threads, 1)
        return SparkJob(self, fn, feed, num_workers, threads, keep_spools)

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


class SparkJob(ChannelJob):
    """One program on the tasks of barrier stages; made by :meth:`SparkEngine.open`."""

    def __init__(
        self, engine: SparkEngine, fn, feed, num_workers: int, threads: int, keep_spools: bool
    ):
        super().__init__(num_workers)
        program = pickled(fn)
        self._engine = engine
        self._sc, self._spark = engine.cluster.sc, engine.cluster.spark
        self._rdd = None
        self._closed = False
        self._numbered = contextlib.ExitStack()
        number = self._numbered.enter_context(job_number())
        try:
            if feed is not None:
                prepare = SparkCall(self._sc, lambda: feed.prepare(engine.cluster, num_workers))
                self._ingest = prepare.wait()
            self._channel = Channel(engine.cluster.driver_host, engine._port)
            ship_modules(self._sc)
        except BaseException:
            self.close()
            raise
        self._spec = TaskSpec(
            address=self._channel.address,
            job=number,
            active_jobs=active_jobs(),
            world_size=num_workers,
            threads=threads,
            timeout=engine._timeout,
            is_local=engine.cluster.is_local,
            log_to_driver=engine._log_to_driver,
            import_path=tuple(user_import_path()),
            program=program,
            keep_spools=keep_spools,
            reader=self._ingest.reader if self._ingest else None,
            accept=self._ingest.accept if self._ingest else None,
        )

    def attempt(self, options=None, state=None, on_event=None) -> list:
        while True:
            try:
                at_driver = self._engine.is_driver_reachable
                attempt = self._attempt if at_driver else self._attempt_at_rank_0
                results = attempt(options or {}, state, on_event)
            except NoWay as error:
                if not self._engine.give_up_driver(error):
                    raise
            else:
                if results is not None:
                    return results

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._numbered.close()
        if self._ingest:
            self._remove_spools()
            self._ingest.close()
        if self._channel:
            self._channel.close()

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self, options, state, on_event):
        """Results in rank order, or None when the input must be read again."""
        line = self._open_line(options, state)
        call = SparkCall(self._sc, lambda: self._collect(call, self._stage, line))
        watch = Watch(line, call, on_event)
        rows, failure = [], None
        try:
            rows = call.wait(watch.poll, lambda: line.set("abort", "stopped by the driver"))
        except Exception as error:
            if call.error is not error:  # of `on_event`
                raise
            failure = error
        self._note_end(line, watch)
        answers = self._answers(line, watch)
        if answers is not None:
            return answers
        gone = vanished(line, self.num_workers)
        if failure is not None:
            raise job_error(failure, gone) from None
        details = [detail for _, _, detail, _ in rows if detail]
        return self._without_results(rows, {kind for _, kind, _, _ in rows}, details, gone)

    def _attempt_at_rank_0(self, options, state, on_event):
        """The same, where the workers cannot reach the driver."""
        spec = replace(self._spec, address=None, options=options, state=state)

        call = SparkCall(self._sc, lambda: self._collect(call, lambda: self._planned(spec)))
        try:
            rows = call.wait()
        except Exception as error:
            raise job_error(error, []) from None
        results, errors, outcomes, details = rank0.read(rows, on_event)
        if errors:
            raise user_error(min(errors, key=lambda doc: doc["place"]))
        if len(results) == self.num_workers:
            return [results[rank] for rank in range(self.num_workers)]
        return self._without_results(rows, outcomes, details, [])

    def _collect(self, call, stage, line=None):
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
                return [tuple(row) for row in stage().collect()]
            except BaseException:
                with contextlib.suppress(Exception):
                    if line is not None:
                        line.set("abort", "another worker failed")
                        settle(line, self.num_workers)
                    time.sleep(_QUIET_S)
                raise

    def _stage(self):
        """The stage of an attempt: with the input, or without where its spools are known."""
        if self._spools is not None:
            spec = replace(self._spec, reader=None, accept=None, spools=tuple(self._spools))
            return self._empty().mapInArrow(_task(spec), _ROWS, barrier=True)
        if self._rdd is None:
            # The same object in each attempt, so that Spark finds its shuffle files again. Not the
            # frame: adaptive execution remembers that its result failed and would not run it again.
            self._rdd = self._planned(self._spec)
        return self._rdd

    def _planned(self, spec):
        """The stage over the input, planned under the settings that the input asks for."""
        frame = self._ingest.frame if self._ingest else None
        source = self._empty() if frame is None else frame
        stage = source.mapInArrow(_task(spec), _ROWS, barrier=True)
        with sql_settings(self._spark, self._ingest.settings if self._ingest else {}):
            return stage.rdd  # plans it

    def _empty(self):
        return self._spark.range(0, self.num_workers, 1, self.num_workers)

    def _read_otherwise(self):
        """Prepare the input in the other way, after the workers refused its shards."""
        self._ingest.close()
        self._ingest = SparkCall(self._sc, self._ingest.otherwise).wait()
        self._spec = replace(self._spec, reader=self._ingest.reader, accept=self._ingest.accept)
        self._rdd = self._spools = None

    def _without_results(self, rows, outcomes, details, gone):
        """What a stage that ended by itself, but not with a result of every rank, calls for."""
        if not rows and self._ingest is not None:
            raise NoRows("The input has no rows")
        if "nospool" in outcomes:
            logger.info("The spooled input is gone; it is read again")
            self._spools = None
            return None
        if "refused" in outcomes:
            self._read_otherwise()
            return None
        raise worker_lost(gone, *(details[:1] or ("it left no result", "they left no result")))


@contextlib.contextmanager
def sql_settings(spark, settings: dict[str, str]):
    """Other SQL settings of a session for a while."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def _task(spec: TaskSpec):
    def task(batches):
        import pyarrow as pa
        from pyspark import BarrierTaskContext

        from bigdl.orca.engines import rank0
        from bigdl.runtime.task import execute

        context = BarrierTaskContext.get()
        attempt, place = int(context.getLocalProperty(_ATTEMPT)), context.partitionId()
        directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        directory = directories[place % len(directories)] or "/tmp"
        if spec.address is None:
            rows = rank0.execute(spec, context, batches, directory)
        else:
            try:
                rows = [(*execute(spec, attempt, batches, place, directory), None)]
            except Unreachable as error:
                raise unreachable(os.uname().nodename, str(error)) from None
        types = (pa.int32(), pa.string(), pa.string(), pa.binary())
        for row in rows:
            arrays = [pa.array([v], t) for v, t in zip(row, types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, ["rank", "kind", "detail", "data"])

    return task
