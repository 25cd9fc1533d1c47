"""Spark Connect engine: N workers as the N tasks of a barrier stage of a remote session.

It is the Spark engine without a SparkContext.  The plan of a stage contains its data, or refers to
a session file if they are large.  Each attempt has a separate plan, so it reads the input again
unless spools of an earlier attempt exist.  Workers connect to this process if their machines can
reach it, which is tried once per session, and otherwise to rank 0.
"""

import contextlib
import logging
import time
from typing import Any

import cloudpickle

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import CONNECT_SERVER_LOOK_S, CONNECT_SERVER_S
from bigdl.orca.cluster.connect import (
    ConnectBytes,
    ConnectCluster,
    ServerLost,
    is_gone,
)
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.versions import to_arrow
from bigdl.orca.engines.spark import ROWS, SparkEngine, SparkJob, run_task, sql_settings
from bigdl.runtime.certificate import Certificate
from bigdl.runtime.channel import Channel
from bigdl.runtime.jobs import DriverUnreachable
from bigdl.runtime.key_value_store import listen

logger = logging.getLogger("bigdl.orca")


class ConnectEngine(SparkEngine):
    """Engine that runs programs as barrier stages of the active Spark Connect session.

    Parameters
    ----------
    cluster : ConnectCluster, optional
        Cluster to run on; default that of the active session.
    workers_per_node, channel_port, timeout, log_to_driver
        As for :class:`~bigdl.orca.engine.SparkEngine`.
    rendezvous : str, optional
        Process that workers connect to: ``"driver"``, this process; ``"rank0"`` if their machines
        cannot connect to it (no progress or output of workers, and a retry needs ``model_dir`` to
        resume from a checkpoint); or ``"auto"``, the default: a task tries to connect, once per
        session.

    Raises
    ------
    UsageError
        If there is no active session, or an argument is invalid.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.engine import ConnectEngine
    >>> session = init_orca_context(
    ...     "spark-connect", master="sc://server:15002"
    ... )  # doctest: +SKIP
    >>> ConnectEngine().run(lambda worker: worker.rank * 10, num_workers=2)  # doctest: +SKIP
    [0, 10]
    """

    cluster: ConnectCluster

    def __init__(self, cluster: ConnectCluster | None = None, **options):
        session = connect_session() if cluster is None else cluster.spark
        if session is None:
            raise UsageError(
                "There is no active session of Spark Connect; start one with "
                'init_orca_context("spark-connect", master="sc://host:15002")',
                code="context-missing",
            )
        super().__init__(cluster or ConnectCluster(session), **options)
        self._job_class = ConnectJob

    @property
    def is_driver_reachable(self) -> bool:
        """True if workers connect to this process, which is assumed until a connection fails."""
        if self._rendezvous == "auto":
            return self.cluster.is_client_reachable is not False
        return self._rendezvous == "driver"

    def give_up_driver(self, error: BaseException) -> bool:
        """Switch the rendezvous to rank 0 if the error requires it; return True if switched."""
        if self._rendezvous != "auto" or not isinstance(error, DriverUnreachable):
            return False
        logger.warning("%s. The workers now meet at rank 0", error)
        self.cluster.is_client_reachable = False
        return True

    @property
    def may_leave(self) -> bool:
        """False, since Spark Connect does not announce executor removals."""
        return False

    def open_channel(self, certificate: Certificate | None) -> Channel:
        """Open a channel that workers connect to if they can, else an in-process channel."""
        if self.is_driver_reachable:
            host = self.cluster.driver_host
            if self._rendezvous == "driver" or self._is_reached(host):
                return Channel(host, self.port, None, certificate)
            logger.info("The executors cannot connect to this process; workers meet at rank 0")
        return Channel(None)

    def _is_reached(self, host: str) -> bool:
        """Return True if a Spark task can connect to the port that the channel will use."""
        known = self.cluster.is_client_reachable
        if known is not None:
            return known
        with listen(host, self.port) as listener:
            return self.cluster.reaches(host, listener.getsockname()[1])

    def _slots(self, num_workers: int) -> int:
        if self.cluster.dynamic_allocation:
            raise UsageError(
                "Distributed training over Spark Connect needs all its workers at once, which the "
                "server's dynamic allocation refuses; start the server with "
                "spark.dynamicAllocation.enabled=false",
                code="cluster-config",
            )
        return super()._slots(num_workers)


SparkEngine._over_connect = ConnectEngine


class ConnectJob(SparkJob):
    """Job that runs one program in barrier stages, created by :meth:`ConnectEngine.open`."""

    def __init__(self, engine: ConnectEngine, *order):
        self._cluster, self._spark = engine.cluster, engine.cluster.spark
        self._cluster.ship_modules()
        self._is_dynamic = False
        super(SparkJob, self).__init__(engine, *order)

    def _open_channel(self):
        return self._engine.open_channel(self._certificate)

    def _poll(self, watch):
        """Return a function that polls `watch` and raises an error if the server is lost."""
        seen = looked = time.monotonic()

        def poll():
            nonlocal seen, looked
            watch.poll()
            now = time.monotonic()
            if now < looked + CONNECT_SERVER_LOOK_S:
                return
            looked = now
            if self._cluster.has_server():
                seen = now
            elif now > seen + CONNECT_SERVER_S:
                raise ServerLost(self._cluster.host)

        return poll

    def _rows(self, stage):
        with self._server_errors(), sql_settings(self._spark, self._settings()):
            table = to_arrow(stage())
        columns = (column.to_pylist() for column in table.columns)
        return list(zip(*columns, strict=True))

    @contextlib.contextmanager
    def _server_errors(self):
        try:
            yield
        except Exception as error:
            if is_gone(error):
                raise ServerLost(self._cluster.host) from error
            raise

    def _stage(self):
        if self._spools is None:
            return self._planned(self.spec)
        return self._empty().mapInArrow(self._task(self._next_spec()), ROWS, barrier=True)

    def _independent_stage(self):
        task = self._task(self.spec, is_barrier=False)
        return self._empty().mapInArrow(task, ROWS, **self._task_cores(self.spec.threads))

    def _planned(self, spec):
        frame = self._input_plan.frame
        source = self._empty() if frame is None else frame
        return source.mapInArrow(self._task(spec), ROWS, barrier=True)

    def _task(self, spec, *, is_barrier=True):
        packed = self._cluster.broadcast(cloudpickle.dumps(spec))
        return _task(packed, self._attempts, is_barrier=is_barrier)


def _task(packed: ConnectBytes, attempt: int, *, is_barrier: bool):
    def task(batches):
        from pyspark import BarrierTaskContext, TaskContext

        context: Any = (BarrierTaskContext if is_barrier else TaskContext).get()
        yield from run_task(cloudpickle.loads(packed.value), context, attempt, batches)

    return task
