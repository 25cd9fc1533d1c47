"""Spark engine: N workers as the N tasks of one barrier stage.

With dynamic allocation, where Spark has no barrier stages, the workers are ordinary tasks (see
:class:`~bigdl.orca.engines.dynamic_workers.DynamicWorkers`).  The stage is always the result stage
of its job and is collected directly, so Spark does not retry it: the FailurePolicy alone decides
about retries.  Rendezvous and all other traffic between driver and workers use the
:mod:`~bigdl.runtime.channel`, since Spark's ``barrier()`` and ``allGather()`` poll once a second.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from bigdl.common.checks import check_choice, check_number
from bigdl.common.errors import UsageError, WorkerLost
from bigdl.common.platform.network import host_name
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
from bigdl.orca.cluster.versions import all_tasks_settings
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

if TYPE_CHECKING:
    from pyspark import TaskContext

logger = logging.getLogger("bigdl.orca")

_RENDEZVOUS = ("auto", "driver", "rank0")
_ATTEMPT = "bigdl.attempt"
_REPEATS = 3  # restarts of a stage before all workers have started, which are no failures
ROWS = "rank int, kind string, detail string, data binary"
"""Spark schema of the rows that the tasks of a stage return."""

unreachable_applications: set[str] = set()  # ids; their executors cannot connect to this driver


class SparkEngine(Engine):
    """Engine that runs programs as barrier stages of the active Spark application.

    With an active Spark Connect session and without `cluster`, it creates a ``ConnectEngine``.

    Parameters
    ----------
    cluster : SparkCluster, optional
        Cluster to run on; default that of the active context.
    workers_per_node : int, optional
        Workers per node if :meth:`run` is called without `num_workers`.
    channel_port : int, optional
        Port of the driver that workers connect to; 0 selects a free port.
    timeout : float, optional
        Seconds after which a collective without progress fails; default 1800. It only matters when
        the network is lost: a paused worker continues.
    log_to_driver : bool, optional
        Print the output of workers on the driver.
    rendezvous : str, optional
        Process that workers connect to: ``"driver"``, or ``"rank0"`` for clusters whose executors
        cannot connect to the driver. Then there is no progress or output, only the last message of
        a topic is kept, and a retry reads the input again and needs ``model_dir`` to resume from a
        checkpoint. The default ``"auto"`` uses the driver until a worker cannot connect to it
        within 5 s.
    patience : float, optional
        Seconds to wait for the next worker to start on a cluster that adds executors on demand;
        default 120.

    Raises
    ------
    UsageError
        If there is no active Spark context, or an argument is invalid.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.engine import SparkEngine
    >>> sc = init_orca_context("local", cores=2)
    >>> SparkEngine().run(lambda worker: worker.rank * 10, num_workers=2)
    [0, 10]
    """

    cluster: SparkCluster
    _over_connect: ClassVar[type[SparkEngine] | None] = None  # set by its module

    def __new__(cls, cluster: SparkCluster | None = None, **options: object) -> SparkEngine:
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
        """True in local mode, where tasks share the output of the driver."""
        return self.cluster.is_local

    @property
    def cluster_places_tasks(self) -> bool:
        # with dynamic allocation the first workers read while others wait for executors
        return not (self.cluster.is_local or self.cluster.dynamic_allocation)

    @property
    def restarts_workers(self) -> bool:
        """True, since Spark repeats lost tasks."""
        return True

    def capacity(self, threads: int) -> int | None:
        """Return the number of workers with `threads` cores, None with unlimited allocation."""
        cluster = self.cluster
        if threads % cluster.threads_per_task and threads < cluster.threads_per_task:
            threads = cluster.threads_per_task
        number = super().capacity(threads)
        if cluster.dynamic_allocation and cluster.most_executors is None:
            return None
        return number

    @property
    def is_driver_reachable(self) -> bool:
        """True if workers connect to the driver, which is assumed until a connection fails."""
        if self._rendezvous == "auto":
            return self.cluster.sc.applicationId not in unreachable_applications
        return self._rendezvous == "driver"

    @property
    def may_leave(self) -> bool:
        """True if Spark announces executor removals and workers can be notified."""
        return self.cluster.decommissions and self.is_driver_reachable

    def give_up_driver(self, error: BaseException) -> bool:
        """Switch the rendezvous to rank 0 if the error requires it; return True if switched."""
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
                # requested, but not all executors have registered yet
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
        """Plan how the workers read the rows of a feed."""

        def prepare() -> InputPlan:
            with self.cluster.users_errors():
                return feed.prepare(self.cluster, num_workers)

        return SparkCall(self.cluster.job_owner, prepare).wait()


class SparkJob(Job):
    """Job that runs one program in Spark tasks, created by :meth:`SparkEngine.open`.

    The tasks belong to barrier stages. With dynamic allocation they are ordinary tasks that wait
    for each other (:class:`~bigdl.orca.engines.dynamic_workers.DynamicWorkers`).
    """

    def __init__(self, engine: SparkEngine, *order: Any):  # order: of the base class
        self._sc, self._spark = engine.cluster.sc, engine.cluster.spark
        self._rdd = None
        self._repeats = 0  # restarts before all workers had started
        self._is_dynamic = engine.cluster.dynamic_allocation
        super().__init__(engine, *order)

    def _open_channel(self):
        ship_modules(self._sc)
        return super()._open_channel()

    def _attempt(self, channel, on_event, options, state):
        if self.spec.is_independent:
            return self._attempt_independent(channel, on_event)
        stage = self._stage
        if not self._engine.is_driver_reachable:
            spec = replace(self.spec, address=None, options=options, state=state)
            stage = functools.partial(self._planned, spec)
        call = SparkCall(
            self._engine.cluster.job_owner, lambda: self._collect(call, stage, channel)
        )
        watch = AttemptMonitor(channel, call.cancel, on_event)
        dynamic, poll = None, self._poll(watch)
        if self.spec.may_leave:
            poll = DecommissionWatch(channel, call).poll_with(poll)
        if self._is_dynamic:
            cluster, is_first = self._engine.cluster, self._attempts - self._repeats == 1
            patience, world_size = self._engine.patience, self.num_workers
            dynamic = DynamicWorkers(
                channel, world_size, patience, lambda: cluster.slots() > 0, call.cancel, is_first
            )
            poll = dynamic.poll_with(poll)
        rows, failure = [], None
        try:
            rows = call.wait(poll, lambda: request_stop(channel, BY_DRIVER))
        except Exception as error:
            if not call.future.done() or call.future.exception() is not error:  # of `on_event`
                raise
            failure = error
        outcomes, details = rank0.read(rows, channel)
        answers = self._answers(channel, watch)
        if answers is not None:
            return answers
        if dynamic is not None and dynamic.failure is not None:
            if isinstance(dynamic.failure, StageRepeated) and self._repeats < _REPEATS:
                self._repeats += 1
                logger.info("%s; the stage is restarted", dynamic.failure)
                return None
            raise dynamic.failure from None
        gone = unfinished(channel, self.num_workers)
        if failure is None:
            return self._without_results(rows, outcomes, details, gone)
        cause = job_error(failure, gone, self._engine.cluster.is_kubernetes)
        if self._engine.give_up_driver(cause):
            return None
        raise cause from None

    def _attempt_independent(self, channel, on_event):
        """Run the workers as ordinary tasks, which Spark repeats if they are lost.

        Pending tasks make dynamic allocation add executors.
        """

        def collect():
            with self._engine.cluster.quiet():
                self._rows(self._independent_stage)

        call = SparkCall(self._engine.cluster.job_owner, collect)
        watch = AttemptMonitor(channel, call.cancel, on_event)
        failure = None
        try:
            call.wait(self._polls(watch, on_event), lambda: request_stop(channel, BY_DRIVER))
        except Exception as error:
            if not call.future.done() or call.future.exception() is not error:  # of `on_event`
                raise
            failure = error
        self._end_independent(watch)
        if failure is not None and not channel.has("abort"):
            gone = unfinished(channel, self.num_workers)
            cause = job_error(failure, gone, self._engine.cluster.is_kubernetes)
            if not isinstance(cause, WorkerLost):
                raise cause from None
            logger.info("%s", cause)
        return []

    def _independent_stage(self):
        # an RDD, since a SQL query takes several times as long to start
        tasks = self._sc.parallelize(range(self.num_workers), self.num_workers)
        tasks = tasks.mapPartitions(independent_task(self.spec))
        profile = self._task_cores(self.spec.threads)
        return tasks.withResources(profile["profile"]) if profile else tasks

    def _rows(self, stage):
        """Run a stage and return its rows, see :data:`ROWS`."""
        # sent with the Spark job, since the stage is the same in all attempts
        self._sc.setLocalProperty(_ATTEMPT, str(self._attempts))
        watch = self._engine.cluster.task_watch()
        try:
            with watch:
                return [(*row[:3], row[3] and bytes(row[3])) for row in stage().collect()]
        except Exception:
            if getattr(watch, "failure", None) is None:
                raise
            raise RuntimeError(watch.text) from None  # error of a function that makes rows

    def _collect(self, call, stage, channel):
        """Run the stage and return its rows; after an error, stop the remaining workers."""
        with self._engine.cluster.quiet():
            try:
                cluster, slots = self._engine.cluster, self.num_workers
                if not self._is_dynamic:
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
                    request_stop(channel, OTHER_FAILED)
                    await_survivors(channel, self.num_workers)
                    time.sleep(FAILED_TASKS_S)
                raise

    def _stage(self):
        """Return the stage of the next attempt; it reads the input unless spools exist."""
        if self._spools is not None:
            return self._mapped(self._empty(), self._next_spec())
        if self._rdd is None:
            # The same RDD in each attempt, so that Spark reuses its shuffle files. Not the frame:
            # adaptive execution remembers its failure and would not run it again.
            self._rdd = self._planned(self.spec)
        return self._rdd

    def _planned(self, spec):
        """Build the stage that reads the input, with the SQL settings that the input needs."""
        frame = self._input_plan.frame
        source = self._empty() if frame is None else frame
        stage = self._mapped(source, spec)
        with sql_settings(self._spark, self._settings()):
            return stage.rdd  # plans the query

    def _settings(self):
        return {**self._input_plan.settings, **all_tasks_settings(self._spark)}

    def _mapped(self, frame, spec):
        is_barrier = not self._is_dynamic
        task = stage_task(spec, is_barrier=is_barrier)
        return frame.mapInArrow(task, ROWS, barrier=is_barrier)

    def _task_cores(self, cores):
        """Return the keywords of ``mapInArrow`` that give each task `cores` cores."""
        cluster = self._engine.cluster
        if cluster.is_local or cores == cluster.threads_per_task:
            return {}
        return task_cores(cores)

    def _empty(self):
        return self._spark.range(0, self.num_workers, 1, self.num_workers)

    def _without_results(self, rows, outcomes, details, gone):
        """Raise an error or read the input again, since some ranks returned no results."""
        if not rows and self._feed is not None:
            raise NoRows("The input has no rows")
        if "leaving" in outcomes:
            raise WorkersRelocated("The workers have ended before an executor is removed")
        if "nospool" in outcomes:
            return self._read_again()
        if "refused" in outcomes:
            self._rdd = None
            owner = self._engine.cluster.job_owner
            return self._read_again(lambda: SparkCall(owner, self._input_plan.otherwise).wait())
        if gone:  # other reports are symptoms of that
            raise worker_lost(gone, *PROCESS_ENDED)
        no_result = "it returned no result", "they returned no result"
        raise worker_lost(gone, *(details[:1] or no_result))


def task_cores(cores: int) -> dict[str, Any]:
    """Return the keywords of ``mapInArrow`` that give each task of the stage `cores` cores.

    Raises
    ------
    UsageError
        If this Spark cannot do so.
    """
    from pyspark.sql import DataFrame

    if "profile" not in inspect.signature(DataFrame.mapInArrow).parameters:
        raise UsageError(
            f"Tasks with {cores} cores need Spark 4; with this Spark, set spark.task.cpus={cores} "
            "for the whole application",
            code="version-unsupported",
            package="pyspark",
        )
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    return {"profile": ResourceProfileBuilder().require(TaskResourceRequests().cpus(cores)).build}


@contextlib.contextmanager
def sql_settings(spark, settings: dict[str, str]):
    """Temporarily override SQL settings of a session."""
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


def independent_task(spec: TaskSpec):
    def task(numbers):
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        attempt = int(context.getLocalProperty(_ATTEMPT))
        yield from task_rows(spec, context, attempt, iter(()))

    return task


def run_task(spec: TaskSpec, context: TaskContext, attempt: int, batches: Iterator) -> Iterator:
    """Run one task of a stage; yield its rows as record batches of :data:`ROWS`."""
    for row in task_rows(spec, context, attempt, batches):
        yield one_row(row, ROWS)


def task_rows(
    spec: TaskSpec, context: TaskContext, attempt: int, batches: Iterator
) -> Iterable[tuple[int, str, str, bytes | None]]:
    """Run one task of a stage and return its rows, see :data:`ROWS`.

    Parameters
    ----------
    spec : TaskSpec
    context : pyspark.TaskContext
        A BarrierTaskContext if workers meet at rank 0.
    attempt : int
    batches : iterator of pyarrow.RecordBatch
    """
    rank = context.partitionId()
    directory = task_directory(rank)
    if spec.address is None:
        return rank0.execute(spec, context, batches, directory)
    try:
        return [(*execute(spec, attempt, batches, rank, directory), None)]
    except Unreachable as error:
        raise unreachable(host_name(), str(error)) from None
