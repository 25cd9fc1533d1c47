"""The Ray engine: N workers as actors that live from one program to the next.

The same programs run on the same :mod:`~bigdl.runtime.channel` as on Spark, and what a worker
does is the same code.  Ray starts and ends processes and says which one died; a FailurePolicy
alone decides about retries, for which lost actors are replaced.
"""

from __future__ import annotations

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.engines.ray_job import RayJob
from bigdl.orca.engines.ray_pool import RayPool
from bigdl.runtime.engine import Engine

__all__ = ["RayEngine"]


class RayEngine(Engine):
    """Runs programs on actors of the Ray that this process is connected to.

    Parameters
    ----------
    cluster : RayCluster, optional
        Default: that of this process.
    workers_per_node : int, optional
        Workers per node when `num_workers` is not given to :meth:`run`.
    min_workers : int, optional
        After the loss of nodes, go on with fewer workers, but at least so many.
        The input is shared out anew. Default: all workers are needed.
    channel_port : int, optional
        Port of the driver that workers connect to; 0 takes any free one.
    timeout : float, optional
        Seconds after which a collective without progress fails; default 1800.
    patience : float, optional
        Seconds to wait for CPUs that others use; default 120.
    log_to_driver : bool, optional
        Show what workers print on the driver.

    Raises
    ------
    UsageError
        Without an active Ray, or for an argument that cannot work.
    """

    def __init__(
        self,
        cluster: RayCluster | None = None,
        *,
        workers_per_node: int = 1,
        min_workers: int | None = None,
        channel_port: int = 0,
        timeout: float = 1800.0,
        patience: float = 120.0,
        log_to_driver: bool = True,
    ):
        check_integer("workers_per_node", workers_per_node, 1)
        check_integer("channel_port", channel_port, 0, 65535)
        if min_workers is not None:
            check_integer("min_workers", min_workers, 1)
        check_number("timeout", timeout, above=0)
        check_number("patience", patience, above=0)
        self.cluster = cluster or RayCluster.from_active()
        self.workers_per_node = workers_per_node
        self.min_workers = min_workers
        self.port = channel_port
        self.timeout = timeout
        self.patience = patience
        self.log_to_driver = log_to_driver

    @property
    def num_workers(self) -> int:
        """Workers of a job that does not say otherwise: nodes times workers per node."""
        return self.cluster.nodes * self.workers_per_node

    @property
    def pool(self) -> RayPool:
        """The actors of this driver."""
        return RayPool.of(self.cluster)

    def open(self, fn, feed=None, num_workers=None, *, threads=None, keep_spools=False) -> RayJob:
        """Check, prepare the input, and return the job (no worker runs yet).

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.
        threads : int, optional
            Threads of each worker, and CPUs of Ray's that it takes while it works; default its
            share of the node's cores.
        keep_spools : bool
            Whether attempts will follow one that succeeded; spools stay until the job is closed.
        """
        num_workers = self.num_workers if num_workers is None else num_workers
        check_integer("num_workers", num_workers, 1)
        slots = self.cluster.slots()
        if num_workers > slots:
            raise UsageError(
                f"{num_workers} workers were asked for but the cluster can run {slots} tasks at "
                "once; ask for fewer workers (workers_per_node) or for more cores or nodes in "
                "init_orca_context"
            )
        if threads is None:
            per_node = -(-num_workers // max(self.cluster.nodes, 1))
            threads = max(1, self.cluster.cores_per_node // per_node)
        check_integer("threads", threads, 1)
        return RayJob(self, fn, feed, num_workers, threads, keep_spools)

    def shutdown(self) -> None:
        """End the workers that wait for programs; another program starts new ones."""
        self.pool.close()
