"""The contract of a cluster: what engines, feeds and predictions ask of where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

__all__ = ["Cluster"]


class Cluster(Protocol):
    """Nodes with cores, and the two ways to bring work to them besides an Engine's jobs.

    Implementations: :class:`~bigdl.orca.cluster.spark.SparkCluster` and its subclass for Spark
    Connect, :class:`~bigdl.orca.cluster.ray.RayCluster`, and
    :class:`~bigdl.runtime.local.LocalMachine`.  An Engine adds what it alone asks of its own.

    Attributes
    ----------
    nodes : int
        Machines, or executors, that run workers.
    cores_per_node : int
        That workers on one of them share.
    threads_per_task : int
        Of a task that predicts.
    is_local : bool
        Whether all of it is this machine, so that files and loopback addresses reach every worker.
    driver_host : str
        The address at which workers reach this process.
    temp_dir : str or None
        A folder for files that workers here may read, removed when this process ends.
    moves_rows_by : str
        How rows reach workers of other machines: ``"spark"``, by a stage of Spark; ``"ray"``, by
        Ray's object store; ``"files"``, all workers read the files that the driver writes.
    asks_encryption : str
        The setting that asks that what processes say to each other is encrypted; "" if none does.
    broadcaster : object
        Its ``broadcast(data)`` gives bytes to all tasks, as a SparkContext's does.
    """

    @property
    def nodes(self) -> int: ...

    @property
    def cores_per_node(self) -> int: ...

    @property
    def threads_per_task(self) -> int: ...

    @property
    def is_local(self) -> bool: ...

    @property
    def driver_host(self) -> str: ...

    @property
    def temp_dir(self) -> str | None: ...

    @property
    def moves_rows_by(self) -> Literal["spark", "ray", "files"]: ...

    @property
    def asks_encryption(self) -> str: ...

    @property
    def broadcaster(self) -> Any: ...

    def slots(self) -> int:
        """Return the number of tasks that can run at the same time."""

    def map_shards(
        self, func: Callable[[list[Any]], Sequence[Any]], shards: Sequence[Any]
    ) -> list[Any]:
        """Return the elements of ``func([shard])`` of every shard, each computed by a task."""
