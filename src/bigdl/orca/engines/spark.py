"""Spark engine: N workers as the N tasks of one barrier stage.

With dynamic allocation, where Spark has no barrier stages, the workers are ordinary tasks (see
:class:`~bigdl.orca.engines.dynamic_workers.DynamicWorkers`).  The stage is always the result stage
of its job and is collected directly, so Spark does not retry it: the FailurePolicy alone decides
about retries.  Rendezvous and all other traffic between driver and workers use the
:mod:`~bigdl.runtime.channel`, since Spark's ``barrier()`` and ``allGather()`` poll once a second.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from bigdl.common.checks import check_choice, check_number
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.common.timeouts import COLLECTIVE_S, FAILED_TASKS_S, WORKERS_JOIN_S
from bigdl.orca.cluster.environment import ship_modules
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.cluster.spark_calls import (
    SparkCall,
    job_error,
    one_row,
    task_directory,
    unreachable,
)
from bigdl.orca.cluster.versions import settings_for_every_task
from bigdl.orca.engines import rank0
from bigdl.orca.engines.dynamic_workers import DecommissionWatch, DynamicWorkers, StageRepeated
from bigdl.runtime.channel import Unreachable
from bigdl.runtime.engine import Engine
from bigdl.runtime.jobs import (
    BY_DRIVER,
    OTHER_FAILED,
    PROCESS_ENDED,
    AttemptMonitor,
    DriverUnreachable,
    Job,
    NoRows,
    WorkersRelocated,
    await_survivors,
    request_stop,
    unfinished,
    worker_lost,
)
from bigdl.runtime.shards.feed import Feed, InputPlan
from bigdl.runtime.task import TaskSpec, execute

logger = logging.getLogger("bigdl.orca")

_RENDEZVOUS = ("auto", "driver", "rank0")
_ATTEMPT = "bigdl.attempt"
_REPEATS = 3  # of a stage before all workers have come, which are no failures
ROWS = "rank int, kind string, detail string, data binary"
"""Spark's schema of what the tasks of a stage return."""

unreachable_applications: set[str] = set()  # whose executors cannot connect to this driver


class SparkEngine(Engine):
    """Runs programs as barrier stages of the active Spark application.

    Where a session of Spark Connect is active, and no cluster is given, it is a ``ConnectEngine``.

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
    patience : float, optional
        Seconds in which another worker must come, as long as some are missing, on a cluster that
        adds executors by demand; default 120.

    Raises
    ------
    UsageError
        Without an active Spark context, or for an argument that cannot work.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.engine import SparkEngine
    >>> sc = init_orca_context("local", cores=2)
    >>> SparkEngine().run(lambda worker: worker.rank * 10, num_workers=2)
    [0, 10]
    """

    cluster: SparkCluster
    _over_connect: ClassVar[type["SparkEngine"] | None] = None  # which imports this module

    def __new__(cls, cluster: SparkCluster | None = None, **options: Any) -> "SparkEngine":
        is_connect = cls is SparkEngine and cluster is None and connect_session() is not None
        return super().__new__((cls._over_connect if is_connect else None) or cls)

    def __init__(
        self,
        cluster: SparkCluster | None = None,
        *,
        workers_per_node: int = 1,
        channel_port: int = 0,
        timeout: float = COLLECTIVE_S,
        log_to_driver: bool = True,
        rendezvous: str = "auto",
        patience: float = WORKERS_JOIN_S,
    ):
        self._job_class = SparkJob
        self._rendezvous = check_choice("rendezvous", rendezvous, _RENDEZVOUS)
        self.patience = check_number("patience", patience, above=0)
        cluster = cluster or SparkCluster.from_active()
        super().__init__(cluster, workers_per_node, channel_port, timeout, log_to_driver)

    @property
    def drops_output(self) -> bool:
        """True in local mode, where the output of a task is that of the driver."""
        return self.cluster.is_local

    @property
    def cluster_places_tasks(self) -> bool:
        # a gang's first workers read while the others wait for executors
        return not (self.cluster.is_local or self.cluster.dynamic_allocation)

    @property
    def is_driver_reachable(self) -> bool:
        """True if workers meet at the driver, as far as it is known."""
        if self._rendezvous == "auto":
            return self.cluster.sc.applicationId not in unreachable_applications
        return self._rendezvous == "driver"

    @property
    def may_leave(self) -> bool:
        """True if Spark says beforehand that an executor goes, and workers can be told."""
        return self.cluster.decommissions and self.is_driver_reachable

    def give_up_driver(self, error: BaseException) -> bool:
        """Let workers meet elsewhere after an error that asks for it; True if they may."""
        is_free = self._rendezvous == "auto" and not self.cluster.is_local
        is_free = is_free and not self.cluster.dynamic_allocation
        if not (isinstance(error, DriverUnreachable) and is_free):
            return False
        logger.warning("%s. The workers now meet at rank 0", error)
        unreachable_applications.add(self.cluster.sc.applicationId)
        return True

    def _slots(self, num_workers: int) -> int:
        cluster = self.cluster
        if cluster.dynamic_allocation:
            if self._rendezvous == "rank0":
                raise UsageError(
                    'rendezvous="rank0" needs a barrier stage, which Spark refuses with dynamic '
                    "allocation; set spark.dynamicAllocation.enabled=false, or let executors "
                    "connect to the driver",
                    code="cluster-config",
                )
            most = cluster.most_executors
            per_node = max(1, cluster.cores_per_node // cluster.threads_per_task)
            return num_workers if most is None else most * per_node
        slots = cluster.slots()
        if num_workers > slots and not cluster.is_local:
            per_node = cluster.cores_per_node // cluster.threads_per_task
            if num_workers <= cluster.nodes * per_node:
                # asked for, but not all executors have registered yet
                call = SparkCall(
                    cluster.job_owner, lambda: cluster.await_slots(num_workers, call.cancelled)
                )
                slots = call.wait()
                reasons = cluster.shortage() if slots < num_workers else ""
                if reasons:
                    raise UsageError(
                        f"{num_workers} workers were asked for but the cluster can run {slots} "
                        f"tasks at once{reasons}",
                        code="resource-limit",
                    )
        return slots

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        """Describe how the workers get the rows of a feed."""

        def prepare() -> InputPlan:
            with self.cluster.users_errors():
                return feed.prepare(self.cluster, num_workers)

        return SparkCall(self.cluster.job_owner, prepare).wait()


class SparkJob(Job):
    """One program on tasks of Spark; made by :meth:`SparkEngine.open`.

    They are those of barrier stages, or under dynamic allocation ordinary ones that wait for each
    other (a gang).
    """

    def __init__(self, engine: SparkEngine, *order: Any):
        self._sc, self._spark = engine.cluster.sc, engine.cluster.spark
        self._rdd = None
        self._repeats = 0  # of stages that began anew before all workers had come
        self._is_gang = engine.cluster.dynamic_allocation
        super().__init__(engine, *order)

    def _open_channel(self):
        ship_modules(self._sc)
        return super()._open_channel()

    def _attempt(self, line, on_event, options, state):
        stage = self._stage
        if not self._engine.is_driver_reachable:
            spec = replace(self.spec, address=None, options=options, state=state)
            stage = functools.partial(self._planned, spec)
        call = SparkCall(self._engine.cluster.job_owner, lambda: self._collect(call, stage, line))
        watch = AttemptMonitor(line, call.cancel, on_event)
        gang, poll = None, self._poll(watch)
        if self.spec.may_leave:
            poll = DecommissionWatch(line, call).poll_with(poll)
        if self._is_gang:
            cluster, is_first = self._engine.cluster, self._attempts - self._repeats == 1
            patience, world_size = self._engine.patience, self.num_workers
            gang = DynamicWorkers(
                line, world_size, patience, lambda: cluster.slots() > 0, call.cancel, is_first
            )
            poll = gang.poll_with(poll)
        rows, failure = [], None
        try:
            rows = call.wait(poll, lambda: request_stop(line, BY_DRIVER))
        except Exception as error:
            if not call.future.done() or call.future.exception() is not error:  # of `on_event`
                raise
            failure = error
        outcomes, details = rank0.read(rows, line)
        answers = self._answers(line, watch)
        if answers is not None:
            return answers
        if gang is not None and gang.failure is not None:
            if isinstance(gang.failure, StageRepeated) and self._repeats < _REPEATS:
                self._repeats += 1
                logger.info("%s; so the stage is ended, and begins anew", gang.failure)
                return None
            raise gang.failure from None
        gone = unfinished(line, self.num_workers)
        if failure is None:
            return self._without_results(rows, outcomes, details, gone)
        cause = job_error(failure, gone, self._engine.cluster.is_kubernetes)
        if self._engine.give_up_driver(cause):
            return None
        raise cause from None

    def _poll(self, watch):
        """Return what is called until the stage has ended."""
        return watch.poll

    def _rows(self, stage):
        """Return the rows of a stage: rank, kind, detail and data."""
        # travels with the Spark job: the stage is the same in all attempts
        self._sc.setLocalProperty(_ATTEMPT, str(self._attempts))
        watch = self._engine.cluster.task_watch()
        try:
            with watch:
                return [(*row[:3], row[3] and bytes(row[3])) for row in stage().collect()]
        except Exception:
            if getattr(watch, "failure", None) is None:
                raise
            raise RuntimeError(watch.text) from None  # of a function that makes rows

    def _collect(self, call, stage, line):
        """Run the stage; returns when no worker is left, also when one was lost."""
        with self._engine.cluster.quiet():
            try:
                cluster, slots = self._engine.cluster, self.num_workers
                if not self._is_gang:
                    slots = cluster.await_slots(self.num_workers, call.cancelled)
                if slots < self.num_workers:
                    raise WorkerLost(
                        f"{self.num_workers} workers are needed but the cluster can only run "
                        f"{slots} tasks at once since executors were lost"
                        f"{cluster.shortage()}"
                    )
                return self._rows(stage)
            except BaseException:
                with contextlib.suppress(Exception):
                    request_stop(line, OTHER_FAILED)
                    await_survivors(line, self.num_workers)
                    time.sleep(FAILED_TASKS_S)
                raise

    def _stage(self):
        """The stage of an attempt: with the input, or without where its spools are known."""
        if self._spools is not None:
            return self._mapped(self._empty(), self._next_spec())
        if self._rdd is None:
            # The same object in each attempt, so that Spark finds its shuffle files again. Not the
            # frame: adaptive execution remembers that its result failed and would not run it again.
            self._rdd = self._planned(self.spec)
        return self._rdd

    def _planned(self, spec):
        """The stage over the input, planned under the settings that the input asks for."""
        frame = self._input_plan.frame
        source = self._empty() if frame is None else frame
        stage = self._mapped(source, spec)
        with sql_settings(self._spark, self._settings()):
            return stage.rdd  # plans it

    def _settings(self):
        return {**self._input_plan.settings, **settings_for_every_task(self._spark)}

    def _mapped(self, frame, spec):
        is_barrier = not self._is_gang
        return frame.mapInArrow(stage_task(spec, is_barrier=is_barrier), ROWS, barrier=is_barrier)

    def _empty(self):
        return self._spark.range(0, self.num_workers, 1, self.num_workers)

    def _without_results(self, rows, outcomes, details, gone):
        """Act on a stage that ended by itself, but not with a result of every rank."""
        if not rows and self._feed is not None:
            raise NoRows("The input has no rows")
        if "leaving" in outcomes:
            raise WorkersRelocated("The workers have ended before an executor goes")
        if "nospool" in outcomes:
            return self._read_again()
        if "refused" in outcomes:
            self._rdd = None
            owner = self._engine.cluster.job_owner
            return self._read_again(lambda: SparkCall(owner, self._input_plan.otherwise).wait())
        if gone:  # what others say is a symptom of that
            raise worker_lost(gone, *PROCESS_ENDED)
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


def stage_task(spec: TaskSpec, *, is_barrier: bool):
    def task(batches):
        from pyspark import BarrierTaskContext, TaskContext

        context: Any = (BarrierTaskContext if is_barrier else TaskContext).get()
        yield from run_task(spec, context, int(context.getLocalProperty(_ATTEMPT)), batches)

    return task


def run_task(spec: TaskSpec, context: Any, attempt: int, batches: Iterator) -> Iterator:
    """Run one task of a stage; yields its rows as record batches of :data:`ROWS`.

    Parameters
    ----------
    spec : TaskSpec
    context : pyspark.TaskContext
        A BarrierTaskContext where workers meet at rank 0.
    attempt : int
    batches : iterator of pyarrow.RecordBatch
    """
    place = context.partitionId()
    directory = task_directory(place)
    if spec.address is None:
        rows: Iterable = rank0.execute(spec, context, batches, directory)
    else:
        try:
            rows = [(*execute(spec, attempt, batches, place, directory), None)]
        except Unreachable as error:
            raise unreachable(os.uname().nodename, str(error)) from None
    for row in rows:
        yield one_row(row, ROWS)
