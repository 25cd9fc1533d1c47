"""The contract of an Engine.

An **Engine** runs one program on N workers of a cluster at the same time, each with its shard of
the input.  ``fit`` and ``evaluate`` of every Estimator go through it, and ``Engine.run`` is public:

    >>> engine = SparkEngine()                                          # doctest: +SKIP
    >>> engine.run(lambda worker: worker.shard.rows, feed, num_workers=2)   # doctest: +SKIP
    [500, 500]

The life of a job:

1. :meth:`Engine.open` checks what can be known before anything is submitted (free slots, dynamic
   allocation, the input) and prepares the input.  It returns a
   :class:`~bigdl.runtime.jobs.Job`.
2. ``Job.attempt`` runs the program once on all workers and returns their results, or raises
   the first cause of the failure: :class:`~bigdl.common.errors.UsageError` and
   :class:`~bigdl.common.errors.WorkerError` for what the user's code did,
   :class:`~bigdl.common.errors.WorkerLost` when a process or a host went away.  Only the latter is
   worth another attempt, about which a FailurePolicy decides; a later attempt finds the spooled
   input of the first where it survives.
3. ``Job.close`` leaves no process, port, file or persisted frame behind.

A worker never raises into the engine: it returns an *outcome*.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.runtime.cluster import Cluster
    from bigdl.runtime.shards.feed import Feed, InputPlan


class PeerLost(Exception):
    """Raised in a worker when a collective fails because another worker went away.

    It is a symptom: the engine reports the cause, which another worker or the cluster knows.
    """


class Leaving(Exception):
    """Raised in every worker of a fit once its state is kept, when a machine is about to go."""


def user_import_path() -> list[str]:
    """Entries of ``sys.path`` that are not the interpreter's own, such as the script's folder."""
    own = {
        os.path.realpath(sysconfig.get_path(name, vars=variables))
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        for variables in ({}, {"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    }
    folders = []
    for entry in sys.path:
        path = os.path.realpath(entry or os.getcwd())
        is_own = any(path == each or path.startswith(each + os.sep) for each in own)
        if os.path.exists(path) and not is_own and path not in folders and os.pathsep not in path:
            folders.append(path)
    return folders


class OpenJob(Protocol):
    """A job whose input is prepared; see :class:`bigdl.runtime.jobs.Job`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def attempt(
        self,
        options: dict[str, Any] | None = None,
        state: bytes | None = None,
        on_event: Callable[[str, Any], None] | None = None,
    ) -> list[Any]: ...

    def close(self) -> None: ...


class Engine(ABC):
    """Runs programs on the workers of a cluster; every engine has its own class of jobs.

    Parameters
    ----------
    cluster : Cluster
    workers_per_node, channel_port, timeout, log_to_driver
        As each engine describes them.

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
        """Workers of a job that does not say otherwise: nodes times workers per node."""
        return self.cluster.nodes * self.workers_per_node

    @property
    def drops_output(self) -> bool:
        """True if what a worker prints reaches the driver by the channel only."""
        return True

    @property
    def may_leave(self) -> bool:
        """True if the cluster says beforehand that a machine is about to go."""
        return False

    @property
    def cluster_places_tasks(self) -> bool:
        """True if the hosts of the workers are known only once they run."""
        return False

    @property
    def is_encrypted(self) -> bool:
        """True if the cluster asks that what its processes say to each other is encrypted."""
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
        """Check, prepare the input, and return the job (no worker runs yet).

        Parameters
        ----------
        fn, feed, num_workers
            See :meth:`run`.
        threads : int, optional
            Threads of each worker, on Ray also the CPUs that it takes while it works; default its
            share of the node's cores.
        keep_spools : bool
            Whether attempts will follow one that succeeded; spools stay until the job is closed.
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

    def _slots(self, num_workers: int) -> int:
        """Return how many workers can run at once, where `num_workers` are asked for."""
        return self.cluster.slots()

    def prepare(self, feed: Feed, num_workers: int) -> InputPlan:
        """Describe how the workers get the rows of a feed."""
        return feed.prepare(self.cluster, num_workers)

    def run(
        self,
        fn: Callable[..., Any],
        feed: Feed | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """Run ``fn(worker)`` once on every worker and return the results in rank order.

        Parameters
        ----------
        fn : callable
            Takes a :class:`~bigdl.runtime.worker.Worker`; returns bytes or a JSON-able value.
            It is shipped by value, so lambdas and classes of a notebook work.
        feed : Feed, optional
            Its shard is ``worker.shard``.
        num_workers : int, optional
            Default: nodes of the cluster times `workers_per_node`.

        Returns
        -------
        list

        Raises
        ------
        UsageError
            When it cannot be run as asked for, or for bad rows in the input.
        WorkerError
            When `fn` raised: the first worker's own traceback.
        WorkerLost
            When a worker process or its host went away.
        """
        with self.open(fn, feed, num_workers, **options) as job:
            return job.attempt()
