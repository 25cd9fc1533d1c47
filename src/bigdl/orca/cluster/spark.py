"""Describe the Spark that is active, whoever started it.

Feeds and engines ask :class:`SparkCluster` for nodes, cores and slots.  What PySpark does not offer
publicly for that (the number of slots, for one) is looked up in this module only.
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
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger("bigdl.orca")

_PATIENCE = "spark.locality.wait.process"
_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.io.encryption.enabled",
)
_AT_LEAST = (
    "spark.executor.instances",
    "spark.dynamicAllocation.minExecutors",
    "spark.dynamicAllocation.initialExecutors",
)
_UNLIMITED = 2**31 - 1

NO_CONTEXT = "No active SparkContext. Please create a SparkContext first: call init_orca_context"
NEEDS_CONTEXT = (
    "This needs a SparkContext, which a session of Spark Connect does not have; start a classic "
    "Spark by init_orca_context, or see docs/compat.md for what works over Spark Connect"
)


class SparkCluster:
    """The active Spark, as nodes × cores.

    Build it with :meth:`from_active` at the time of use and do not keep it: on a real cluster
    executors come and go.

    Parameters
    ----------
    sc : pyspark.SparkContext

    Attributes
    ----------
    sc : pyspark.SparkContext
    master : str
        Spark's master URL, e.g. ``"local[4,4]"``.
    start_local : callable or None
        What starts a SparkContext on this machine: :func:`bigdl.orca.init_orca_context`.
    """

    start_local: ClassVar[Callable[[], Any] | None] = None

    moves_rows_by: Literal["spark"] = "spark"

    def __init__(self, sc: SparkContext):
        self.sc = sc
        self.master = cast("str", sc.master)

    @classmethod
    def from_active(cls) -> SparkCluster:
        """Describe the active SparkContext.

        Raises
        ------
        UsageError
            If there is none.
        SparkLost
            If its JVM is gone.
        """
        sc = active_context()
        if sc is None:
            refuse_lost()
            raise UsageError(
                NO_CONTEXT if connect_session() is None else NEEDS_CONTEXT, code="context-missing"
            )
        JvmWatch.of(sc._gateway)  # also where the program has made the context
        return cls(sc)

    @classmethod
    def active_or_local(cls) -> SparkCluster:
        """Describe the active SparkContext; start one on this machine if there is none."""
        is_none = active_context() is None and connect_session() is None
        if is_none and cls.start_local is not None:
            refuse_lost()
            logger.warning(
                "There is no SparkContext: one is started on this machine; call init_orca_context "
                "first to choose where, how many cores and how much memory"
            )
            cls.start_local()
        return cls.from_active()

    def __repr__(self) -> str:
        return f"SparkCluster({self.master!r}, {self.nodes} nodes × {self.cores_per_node} cores)"

    @property
    def spark(self) -> SparkSession:
        """The SparkSession on this context, made if there is none."""
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()

    @property
    def temp_dir(self) -> str | None:
        """PySpark's own folder: it goes with the application, also when this process is killed."""
        path = getattr(self.sc, "_temp_dir", None)
        if path is not None:  # PySpark needs it, too, and a cleaner may have removed it
            os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    @property
    def threads_per_task(self) -> int:
        """Cores that the cluster gives to a task."""
        return int(self._conf("spark.task.cpus", "1"))

    @property
    def job_owner(self) -> Any:
        """The owner of tagged jobs, for a :class:`~bigdl.orca.cluster.spark_calls.SparkCall`."""
        return self.sc

    @property
    def broadcaster(self) -> SparkContext:
        """The object whose ``broadcast`` sends bytes to all tasks."""
        return self.sc

    def users_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raise for a user's function that fails in a job of a block its own error."""
        return users_errors(self.sc)

    def task_watch(self) -> Any:
        """A watch that cancels the jobs of a block when a task fails by the same error again."""
        return contextlib.nullcontext() if plan.is_switched_off() else TaskWatch(self.sc)

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Keep the driver's JVM from printing stack traces of failed tasks, for a block."""
        return plan.quiet(self.sc)

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """The elements of ``func([shard])`` of every shard, each computed by a task of Spark."""
        with self.users_errors():
            return self.sc.parallelize(shards, len(shards)).mapPartitions(func).collect()

    @property
    def is_local(self) -> bool:
        """Return True if tasks run in the driver's JVM (``local[…]``, not ``local-cluster[…]``)."""
        return is_local(self.master)

    @property
    def is_kubernetes(self) -> bool:
        """Return True if executors are pods of Kubernetes."""
        return self.master.startswith("k8s://")

    @property
    def driver_host(self) -> str:
        """The address at which executors reach the driver."""
        return self._conf("spark.driver.host", "127.0.0.1")

    @property
    def asks_encryption(self) -> str:
        """The first setting that asks that what processes say to each other is encrypted."""
        asked = (f"{name}=true" for name in _ENCRYPTION if self._conf(name) == "true")
        return "" if self.is_local else next(asked, "")

    @property
    def dynamic_allocation(self) -> bool:
        """Return True if Spark may add and remove executors while a program runs."""
        return not self.is_local and self._conf("spark.dynamicAllocation.enabled") == "true"

    @property
    def nodes(self) -> int:
        """Number of executors; 1 in local mode.

        It is the number that was asked for where that is fixed, since executors register over
        time, and otherwise the number that has registered so far. With dynamic allocation it is
        ``spark.dynamicAllocation.maxExecutors``, and where that is not set what Spark starts with
        or has by now.
        """
        if self.is_local:
            return 1
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[0]
        asked = self._conf("spark.executor.instances")
        if asked and not self.dynamic_allocation:
            return int(asked)
        # The driver is one of them.
        registered = len(self.sc._jsc.sc().statusTracker().getExecutorInfos()) - 1
        if not self.dynamic_allocation:
            return registered
        least = max(int(self._conf(name, "0")) for name in _AT_LEAST)
        return self.most_executors or max(1, least, registered)

    @property
    def decommissions(self) -> bool:
        """Return True if Spark says beforehand that an executor is about to go."""
        return not self.is_local and self._conf("spark.decommission.enabled") == "true"

    @property
    def most_executors(self) -> int | None:
        """The most executors that dynamic allocation may start; None if that is not limited."""
        most = int(self._conf("spark.dynamicAllocation.maxExecutors", str(_UNLIMITED)))
        return None if most >= _UNLIMITED else most

    @property
    def cores_per_node(self) -> int:
        """Cores that tasks may use on one executor."""
        simulated = simulated_cluster(self.master)
        if simulated:
            return simulated[1]
        asked = self._conf("spark.executor.cores")
        if asked and not self.is_local:
            return int(asked)
        return max(1, self.slots() * self.threads_per_task // max(1, self.nodes))

    def slots(self) -> int:
        """Number of tasks that can run at the same time on the executors registered now."""
        from py4j.protocol import Py4JError

        scala_context = self.sc._jsc.sc()
        try:
            profile = scala_context.resourceProfileManager().defaultResourceProfile()
            return scala_context.maxNumConcurrentTasks(profile)
        except Py4JError as error:  # not public in Spark: it may change
            logger.debug("maxNumConcurrentTasks failed, using defaultParallelism: %s", error)
            return self.sc.defaultParallelism

    @property
    def parallelism(self) -> int:
        """Number of partitions of what is cut without a wish."""
        return self.sc.defaultParallelism

    def await_slots(self, number: int, cancelled: threading.Event | None = None) -> int:
        """Wait until so many tasks can run at once, but not for ever; returns how many can.

        Spark itself would look every 15 s only.
        """
        begin = looked = time.monotonic()
        while (slots := self.slots()) < number and time.monotonic() < begin + EXECUTORS_S:
            if (cancelled or threading.Event()).wait(0.1):
                break
            if self.is_kubernetes and time.monotonic() > looked + EXECUTORS_LOOK_S:
                kubernetes.remove_lost_executors(self.sc)
                looked = time.monotonic()
        return slots

    def shortage(self) -> str:
        """Return the reason why executors do not start, as the end of a sentence."""
        reasons = kubernetes.shortage(self.sc) if self.is_kubernetes else ""
        return f": {reasons}" if reasons else ""

    @contextlib.contextmanager
    def tasks_stay(self) -> Iterator[None]:
        """Let tasks wait for the executor that has what they read, however long it is busy.

        By default Spark gives them to another one after 3 s, which is of no use where only that
        executor can read it. What the program has set stays.
        """
        conf: Any = None
        with contextlib.suppress(Exception):  # not public in Spark: it may change
            conf = self.sc._jsc.sc().conf()
        if conf is None or conf.contains(_PATIENCE):
            yield
            return
        conf.set(_PATIENCE, "1d")
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the JVM may be gone
                conf.remove(_PATIENCE)

    def _conf(self, key: str, default: str = "") -> str:
        # `sc.getConf()` fetches all settings, one after the other
        return str(self.sc._jsc.sc().conf().get(key, default))


def active_context() -> SparkContext | None:
    """The SparkContext of this process, or None if there is none or its JVM is gone."""
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
    """Do what :func:`~bigdl.common.storage.writing` does, for files that Spark writes.

    Writers that have failed keep their files open, so that a full disk stays full though they are
    removed, until the JVM collects its garbage. The driver's is asked to; executors do so sometime.
    """
    try:
        with writing(what, path):
            yield
    except UsageError:
        with contextlib.suppress(Exception):
            for _ in range(2):  # the last task may still be on its way out
                time.sleep(0.3)
                cast("Any", active_context())._jvm.System.gc()
        raise


def refuse_lost() -> None:
    """Refuse to go on in a program whose SparkContext has lost its JVM.

    Raises
    ------
    SparkLost
    """
    if "pyspark" in sys.modules and connect_session() is None:
        from pyspark import SparkContext

        loss = loss_of(SparkContext._active_spark_context)
        if loss is not None:
            raise loss


def is_local(master: str) -> bool:
    """Return True if `master` runs its tasks in the driver's JVM."""
    return master == "local" or master.startswith("local[")


def simulated_cluster(master: str) -> tuple[int, int] | None:
    """Executors and cores per executor of ``local-cluster[executors,cores,memory]``."""
    match = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master)
    return (int(match[1]), int(match[2])) if match else None
