"""The interface of an Engine, which runs programs on the workers of a cluster.

An **Engine** runs one program on N workers of a cluster concurrently, each with its shard of the
input.  ``fit`` and ``evaluate`` of every Estimator use it, and ``Engine.run`` is public:

    >>> engine = SparkEngine()                                          # doctest: +SKIP
    >>> engine.run(lambda worker: worker.shard.rows, feed, num_workers=2)   # doctest: +SKIP
    [500, 500]

The life cycle of a job:

1. :meth:`Engine.open` checks the arguments before anything is submitted (free slots, dynamic
   allocation, the input) and prepares the input.  It returns a
   :class:`~bigdl.runtime.jobs.Job`.
2. ``Job.attempt`` runs the program once on all workers and returns their results, or raises
   the first cause of the failure: :class:`~bigdl.common.errors.UsageError` and
   :class:`~bigdl.common.errors.WorkerError` for errors of the user's code,
   :class:`~bigdl.common.errors.WorkerLost` for a lost process or host.  Only a loss can be retried;
   a FailurePolicy decides.  A later attempt reuses the spooled input of the first if it survives.
3. ``Job.close`` releases all processes, ports, files and persisted frames.

A worker never raises into the engine: it returns an *outcome*.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, WorkerLost

if TYPE_CHECKING:
    from bigdl.runtime.cluster import Cluster
    from bigdl.runtime.shards.feed import Feed, InputPlan


class PeerLost(Exception):
    """Raised when a collective operation failed in this worker because another worker was lost.

    This is a symptom: the engine reports the cause, which another worker or the cluster knows.
    """


class Leaving(Exception):
    """Raised in the workers of a fit that saved its state before a machine is decommissioned."""


def user_import_path() -> list[str]:
    """Return the entries of ``sys.path`` outside of the Python installation."""
    installation = {
        os.path.realpath(sysconfig.get_path(name, vars=variables))
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for variables in ({}, {"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    }
    folders = []
    for entry in sys.path:
        path = os.path.realpath(entry or os.getcwd())
        is_installed = any(path == each or path.startswith(each + os.sep) for each in installation)
        if (
            os.path.exists(path)
            and not is_installed
            and path not in folders
            and os.pathsep not in path
        ):
            folders.append(path)
    return folders


class OpenJob(Protocol):
    """Protocol of a job with a prepared input; see :class:`bigdl.runtime.jobs.Job`."""

    channel: Any
    spec: Any

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def attempt(
        self,
        options: dict[str, Any] | None = None,
        state: bytes | None = None,
        on_event: Callable[[str, Any], None] | None = None,
        *,
        before: Callable[[Any], None] | None = None,
        on_loss: Callable[[WorkerLost], bool] | None = None,
    ) -> list[Any]: ...

    def close(self) -> None: ...


class Engine(ABC):
    """Base class of engines, which run programs on the workers of a cluster.

    Parameters
    ----------
    cluster : Cluster
    workers_per_node, channel_port, timeout, log_to_driver
        See each engine.

    Examples
    --------
    >>> from bigdl.orca.engine import LocalEngine
    >>> def who(worker):  # runs in each worker
    ...     return {"rank": worker.rank, "of": worker.world_size}
    >>> LocalEngine().run(who, num_workers=2)
    [{'rank': 0, 'of': 2}, {'rank': 1, 'of': 2}]
    """

    _job_class: Callable[..., OpenJob]

    def __init__(
        self,
        cluster: Cluster,
        workers_per_node: int,
        channel_port: int,
        timeout: float,
        log_to_driver: bool,
    ):
        self.cluster = cluster
        self.workers_per_node = check_integer("workers_per_node", workers_per_node, 1)
        self.port = check_integer("channel_port", channel_port, 0, 65535)
        self.timeout = check_number("timeout", timeout, above=0)
        self.log_to_driver = log_to_driver

    @property
    def num_workers(self) -> int:
        """Default number of workers of a job: nodes times workers per node."""
        return self.cluster.nodes * self.workers_per_node

    @property
    def drops_output(self) -> bool:
        """True if a worker's output reaches the driver only through the channel."""
        return True

    @property
    def may_leave(self) -> bool:
        """True if the cluster announces which machines are being decommissioned."""
        return False

    @property
    def can_replace(self) -> bool:
        """True if a lost worker can be replaced while the others run."""
        return False

    @property
    def restarts_workers(self) -> bool:
        """True if the cluster starts lost independent workers again."""
        return False

    @property
    def cluster_places_tasks(self) -> bool:
        """True if the workers' hosts are unknown until the workers run."""
        return False

    @property
    def is_encrypted(self) -> bool:
        """True if the cluster requires encryption between processes."""
        return self.cluster.asks_encryption != ""

    def open(
        self,
        fn: Callable[..., Any],
        feed: Feed | None = None,
        num_workers: int | None = None,
        *,
        threads: int | None = None,
        keep_spools: bool = False,
    ) -> OpenJob:
        """Check the arguments, prepare the input, and return a job without starting workers.

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.
        threads : int, optional
            Threads of each worker, on Ray also its CPUs; default: its share of the node's cores.
        keep_spools : bool
            Whether attempts may follow a successful one; spools stay until the job is closed.
        """
        if num_workers is None:
            num_workers = self.num_workers
        check_integer("num_workers", num_workers, 1)
        slots = self._slots(num_workers)
        if num_workers > slots:
            raise UsageError(
                f"{num_workers} workers were asked for but the cluster can run {slots} tasks at "
                "once; ask for fewer workers (workers_per_node) or for more cores or nodes in "
                "init_orca_context",
                code="resource-limit",
            )
        if threads is None:
            per_node = -(-num_workers // max(self.cluster.nodes, 1))
            threads = max(1, self.cluster.cores_per_node // per_node)
        check_integer("threads", threads, 1)
        return self._job_class(self, fn, feed, num_workers, threads, keep_spools)

    def open_independent(
        self, fn: Callable[..., Any], num_workers: int, *, threads: int = 1
    ) -> OpenJob:
        """Return a job whose workers do not depend on each other.

        Such workers never wait for each other and need not run at the same time. The loss of a
        worker does not end the others, and the cluster may replace it: the new worker has a rank
        of at least `num_workers`. An attempt ends when all workers have ended, also lost ones, and
        returns no results. Its ``on_event`` is also called with ``("poll", None)`` until then.

        Parameters
        ----------
        fn : callable
            See :meth:`run`.
        num_workers : int
            Maximum number of concurrent workers.
        threads : int
            Threads and cores of each worker; see :meth:`capacity`.
        """
        check_integer("num_workers", num_workers, 1)
        job = self._job_class(self, fn, None, num_workers, threads, False)
        job.spec = replace(job.spec, is_independent=True, by_host=False)
        return job

    def capacity(self, threads: int) -> int | None:
        """Return the number of workers with `threads` cores that the cluster can run, or None.

        None means that the cluster adds nodes without a limit.

        Raises
        ------
        UsageError
            If no node has as many cores.
        """
        per_node = self.cluster.cores_per_node // threads
        if not per_node:
            raise UsageError(
                f"A worker needs {threads} cores, but the nodes have "
                f"{self.cluster.cores_per_node}; ask for fewer cores",
                code="resource-limit",
            )
        return self.cluster.nodes * per_node

    def _slots(self, num_workers: int) -> int:
        """Return the number of workers that can run concurrently."""
        return self.cluster.slots()

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        """Return the input plan that distributes a feed's rows to the workers."""
        return feed.prepare(self.cluster, num_workers)

    def run(
        self,
        fn: Callable[..., Any],
        feed: Feed | None = None,
        num_workers: int | None = None,
        **options: Any,  # of `open`
    ) -> list[Any]:
        """Run ``fn(worker)`` once on every worker and return the results in rank order.

        Parameters
        ----------
        fn : callable
            Takes a :class:`~bigdl.runtime.worker.Worker`; returns bytes or a JSON value.
            It is pickled by value, so lambdas and classes of a notebook work.
        feed : Feed, optional
            The input; its shard is ``worker.shard``.
        num_workers : int, optional
            Default: nodes of the cluster times `workers_per_node`.

        Returns
        -------
        list

        Raises
        ------
        UsageError
            If the arguments are invalid, or the input has invalid rows.
        WorkerError
            If `fn` raised, with the traceback of the first failed worker.
        WorkerLost
            If a worker process or its host was lost.
        """
        with self.open(fn, feed, num_workers, **options) as job:
            return job.attempt()
