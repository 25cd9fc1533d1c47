"""The interface of a cluster, which engines, feeds and predictions use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

__all__ = ["BroadcastBytes", "Broadcaster", "Cluster"]


class BroadcastBytes(Protocol):
    """Bytes that every task of a job can read, as a Broadcast of Spark."""

    @property
    def value(self) -> bytes: ...


class Broadcaster(Protocol):
    """Object that distributes bytes to all tasks, as a SparkContext."""

    def broadcast(self, data: bytes, /) -> BroadcastBytes:
        """Distribute bytes; return an object whose ``value`` is the bytes in every process."""


class Cluster(Protocol):
    """Nodes with cores, and methods to run tasks on them outside of engine jobs.

    Implementations: :class:`~bigdl.orca.cluster.spark.SparkCluster` and its subclass for Spark
    Connect, :class:`~bigdl.orca.cluster.ray.RayCluster`, and
    :class:`~bigdl.runtime.local.LocalMachine`.  An Engine may require further methods of its
    cluster.

    Attributes
    ----------
    nodes : int
        Number of machines, or executors, that run workers.
    cores_per_node : int
        Cores that the workers of one node share.
    threads_per_task : int
        Threads of a prediction task.
    is_local : bool
        Whether all workers run on this machine and can use its files and loopback addresses.
    driver_host : str
        Address of this process for the workers.
    temp_dir : str or None
        Folder for files that local workers may read, removed when this process ends.
    moves_rows_by : str
        Transport of rows to other machines: ``"spark"`` is a Spark stage, ``"ray"`` is Ray's object
        store, and with ``"files"`` all workers read files that the driver writes.
    asks_encryption : str
        Name of the setting that requires encryption between processes; "" if there is none.
    broadcaster : Broadcaster
        Its ``broadcast(data)`` distributes bytes to all tasks, as a SparkContext's does.
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
    def broadcaster(self) -> Broadcaster: ...

    def slots(self) -> int:
        """Return the number of tasks that can run concurrently."""

    def map_shards(
        self, func: Callable[[list[Any]], Sequence[Any]], shards: Sequence[Any]
    ) -> list[Any]:
        """Apply ``func([shard])`` to every shard, each in a task, and concatenate the results."""
