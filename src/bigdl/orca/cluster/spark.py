"""Description of the active Spark cluster.

Feeds and engines get nodes, cores and slots from :class:`SparkCluster`.  Only this module uses
private interfaces of PySpark for that (e.g. for the number of slots).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from bigdl.common.errors import UsageError
from bigdl.common.storage import writing
from bigdl.common.timeouts import EXECUTORS_LOOK_S, EXECUTORS_S
from bigdl.orca.cluster import kubernetes, plan
from bigdl.orca.cluster.jvm import JvmWatch, SparkLost, loss_of
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.spark_calls import TaskWatch, users_errors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from bigdl.runtime.cluster import Broadcaster

logger = logging.getLogger("bigdl.orca")

_LOCALITY_WAIT = "spark.locality.wait.process"
_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.io.encryption.enabled",
)
_MINIMA = (
    "spark.executor.instances",
    "spark.dynamicAllocation.minExecutors",
    "spark.dynamicAllocation.initialExecutors",
)
_UNLIMITED = 2**31 - 1

NO_CONTEXT = "No active SparkContext. Please create a SparkContext first: call init_orca_context"
NEEDS_CONTEXT = (
    "This needs a SparkContext, which Spark Connect sessions do not have; start a classic "
    "Spark with init_orca_context, or see docs/compat.md for what works over Spark Connect"
)


class SparkCluster:
    """Active Spark cluster, described as nodes × cores.

    Create it with :meth:`from_active` when needed and do not store it, because the executors of a
    cluster change.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    sc : pyspark.SparkContext
    master : str
        Spark's master URL, e.g. ``"local[4,4]"``.
    start_local : callable or None
        Function that starts a local SparkContext: :func:`bigdl.orca.init_orca_context`.
    """

    start_local: ClassVar[Callable[[], Any] | None] = None

    moves_rows_by: Literal["spark"] = "spark"

    def __init__(self, sc: SparkContext):
        self.sc = sc
        self.master = cast("str", sc.master)

    @classmethod
    def from_active(cls) -> SparkCluster:
        """Return the cluster of the active SparkContext.

        Raises
        ------
        UsageError
            If there is no active SparkContext.
        SparkLost
            If its JVM is gone.
        """
        sc = active_context()
        if sc is None:
            refuse_lost()
            raise UsageError(
                NO_CONTEXT if connect_session() is None else NEEDS_CONTEXT, code="context-missing"
            )
        JvmWatch.of(sc._gateway)  # also for a context that the program created
        return cls(sc)

    @classmethod
    def active_or_local(cls) -> SparkCluster:
        """Return the cluster of the active SparkContext, or start a local one if there is none."""
        is_none = active_context() is None and connect_session() is None
        if is_none and cls.start_local is not None:
            refuse_lost()
            logger.warning(
                "There is no SparkContext, so a local one is started; call init_orca_context first "
                "to select the cluster, cores and memory"
            )
            cls.start_local()
        return cls.from_active()

    def __repr__(self) -> str:
        return f"SparkCluster({self.master!r}, {self.nodes} nodes × {self.cores_per_node} cores)"

    @property
    def spark(self) -> SparkSession:
        """SparkSession of this context, created if there is none."""
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()

    @property
    def temp_dir(self) -> str | None:
        """PySpark's temporary folder, which is removed however the application ends."""
        path = getattr(self.sc, "_temp_dir", None)
        if path is not None:  # PySpark needs it, too, and it may have been cleaned up
            os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    @property
    def threads_per_task(self) -> int:
        """Number of cores of a task."""
        return int(self._conf("spark.task.cpus", "1"))

    @property
    def job_owner(self) -> SparkContext:
        """SparkContext, which is passed as `owner` to a SparkCall."""
        return self.sc

    @property
    def broadcaster(self) -> Broadcaster:
        """Object whose ``broadcast`` sends bytes to all tasks."""
        return self.sc

    def users_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that raises the original error of a failing user function."""
        return users_errors(self.sc)

    def task_watch(self) -> AbstractContextManager[object]:
        """Return a context manager that cancels jobs whose task fails repeatedly with one error."""
        return contextlib.nullcontext() if plan.is_switched_off() else TaskWatch(self.sc)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that suppresses the JVM's stack traces of failed tasks."""
        return plan.quiet(self.sc)

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """Return the elements of ``func([shard])`` for every shard, computed by Spark tasks."""
        with self.users_errors():
            return self.sc.parallelize(shards, len(shards)).mapPartitions(func).collect()

    @property
    def is_local(self) -> bool:
        """True if tasks run in the driver's JVM (``local[…]``, not ``local-cluster[…]``)."""
        return is_local(self.master)

    def every_task_sees(self, check: Callable[[], bool]) -> bool:
        """Return True if a check of files holds in as many tasks as run concurrently.

        Tasks on this machine see what it sees, so that no task is run for them.
        """
        if self.is_local or simulated_cluster(self.master) is not None:
            return check()
        return all(self.map_shards(lambda shards: [check()], range(max(1, self.slots()))))

    @property
    def is_kubernetes(self) -> bool:
        """True if executors are Kubernetes pods."""
        return self.master.startswith("k8s://")

    @property
    def driver_host(self) -> str:
        """Address at which executors reach the driver."""
        return self._conf("spark.driver.host", "127.0.0.1")

    @property
    def asks_encryption(self) -> str:
        """First setting that requires encryption between processes, or "" if there is none."""
        settings = (f"{name}=true" for name in _ENCRYPTION if self._conf(name) == "true")
        return "" if self.is_local else next(settings, "")

    @property
    def dynamic_allocation(self) -> bool:
        """True if Spark can add and remove executors while a program runs."""
        return not self.is_local and self._conf("spark.dynamicAllocation.enabled") == "true"

    @property
    def nodes(self) -> int:
        """Number of executors; 1 in local mode.

        If the requested number is fixed, it is that number, because executors register over time;
        otherwise it is the number of registered executors. With dynamic allocation it is
        ``spark.dynamicAllocation.maxExecutors``, or if unset, the larger of the initial and the
        registered number.
        """
        if self.is_local:
            return 1
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[0]
        requested = self._conf("spark.executor.instances")
        if requested and not self.dynamic_allocation:
            return int(requested)
        # The driver is included.
        registered = len(self.sc._jsc.sc().statusTracker().getExecutorInfos()) - 1
        if not self.dynamic_allocation:
            return registered
        least = max(int(self._conf(name, "0")) for name in _MINIMA)
        return self.most_executors or max(1, least, registered)

    @property
    def decommissions(self) -> bool:
        """True if Spark announces that an executor is about to be removed."""
        return not self.is_local and self._conf("spark.decommission.enabled") == "true"

    @property
    def most_executors(self) -> int | None:
        """Maximum number of executors with dynamic allocation, or None if unlimited."""
        most = int(self._conf("spark.dynamicAllocation.maxExecutors", str(_UNLIMITED)))
        return None if most >= _UNLIMITED else most

    @property
    def cores_per_node(self) -> int:
        """Number of cores that tasks can use on one executor."""
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[1]
        requested = self._conf("spark.executor.cores")
        if requested and not self.is_local:
            return int(requested)
        return max(1, self.slots() * self.threads_per_task // max(1, self.nodes))

    def slots(self) -> int:
        """Return the number of tasks that can run concurrently on the registered executors."""
        from py4j.protocol import Py4JError

        scala_context = self.sc._jsc.sc()
        try:
            profile = scala_context.resourceProfileManager().defaultResourceProfile()
            return scala_context.maxNumConcurrentTasks(profile)
        except Py4JError as error:  # a private API
            logger.debug("maxNumConcurrentTasks failed, using defaultParallelism: %s", error)
            return self.sc.defaultParallelism

    @property
    def parallelism(self) -> int:
        """Default number of partitions."""
        return self.sc.defaultParallelism

    def await_slots(self, number: int, cancelled: threading.Event | None = None) -> int:
        """Wait, with a timeout, until `number` tasks can run concurrently; return how many can.

        Spark itself checks only every 15 s.
        """
        start = last_check = time.monotonic()
        while (slots := self.slots()) < number and time.monotonic() < start + EXECUTORS_S:
            if (cancelled or threading.Event()).wait(0.1):
                break
            if self.is_kubernetes and time.monotonic() > last_check + EXECUTORS_LOOK_S:
                kubernetes.remove_lost_executors(self.sc)
                last_check = time.monotonic()
        return slots

    def shortage(self) -> str:
        """Return the reason why executors do not start, as the end of a sentence."""
        reasons = kubernetes.shortage(self.sc) if self.is_kubernetes else ""
        return f": {reasons}" if reasons else ""

    @contextlib.contextmanager
    def keep_tasks_local(self) -> Iterator[None]:
        """Temporarily run tasks only on executors that hold their data, even if those are busy.

        By default Spark moves them to another executor after 3 s, which fails if only one executor
        can read the data. A setting of the program is kept.
        """
        conf: Any = None
        with contextlib.suppress(Exception):  # a private API
            conf = self.sc._jsc.sc().conf()
        if conf is None or conf.contains(_LOCALITY_WAIT):
            yield
            return
        conf.set(_LOCALITY_WAIT, "1d")
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the JVM may be gone
                conf.remove(_LOCALITY_WAIT)

    def _conf(self, key: str, default: str = "") -> str:
        # `sc.getConf()` fetches all settings one by one
        return str(self.sc._jsc.sc().conf().get(key, default))


def active_context() -> SparkContext | None:
    """Return this process's SparkContext, or None if there is none or its JVM is gone."""
    if "pyspark" not in sys.modules or connect_session() is not None:
        return None
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    sc = SparkContext._active_spark_context
    if sc is None or sc._jsc is None:
        return None
    try:
        stopped = sc._jsc.sc().isStopped()
    except (Py4JError, OSError, SparkLost):
        stopped = True
    return None if stopped else sc


@contextlib.contextmanager
def spark_writing(what: str, path: str | os.PathLike) -> Iterator[None]:
    """Context manager like :func:`~bigdl.common.storage.writing`, but for writes by Spark.

    Failed writers keep their deleted files open, so a full disk stays full until the JVM collects
    garbage. This triggers garbage collection in the driver's JVM; executors do it eventually.
    """
    try:
        with writing(what, path):
            yield
    except UsageError:
        with contextlib.suppress(Exception):
            for _ in range(2):  # the last task may still be finishing
                time.sleep(0.3)
                cast("Any", active_context())._jvm.System.gc()
        raise


def refuse_lost() -> None:
    """Raise SparkLost if the program's SparkContext has lost its JVM.

    Raises
    ------
    SparkLost
        If the JVM has ended.
    """
    if "pyspark" in sys.modules and connect_session() is None:
        from pyspark import SparkContext

        loss = loss_of(SparkContext._active_spark_context)
        if loss is not None:
            raise loss


def is_local(master: str) -> bool:
    """Return True if `master` runs tasks in the driver's JVM."""
    return master == "local" or master.startswith("local[")


def simulated_cluster(master: str) -> tuple[int, int] | None:
    """Return executors and cores of ``local-cluster[executors,cores,memory]``, else None."""
    match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
    return (int(match[1]), int(match[2])) if match else None
