"""The Spark engine: N workers as the N tasks of one barrier stage.

The stage is always the result stage of its job, collected directly: as such Spark does not run it
again by itself, and the FailurePolicy alone decides about retries.  Rendezvous and everything else
between driver and workers goes through the :mod:`~bigdl.runtime.channel`, since Spark's own
``barrier()`` and ``allGather()`` look once a second.
"""

from __future__ import annotations

import logging
import time

from bigdl.common.checks import check_choice, check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.engines.spark_job import SparkJob
from bigdl.runtime.causes import NoRows, NoWay
from bigdl.runtime.engine import Engine
from bigdl.runtime.stage import SparkCall

__all__ = ["NoRows", "SparkEngine"]

logger = logging.getLogger("bigdl.orca")

_RENDEZVOUS = ("auto", "driver", "rank0")
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

    def open(self, fn, feed=None, num_workers=None, *, threads=None, keep_spools=False) -> SparkJob:
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
