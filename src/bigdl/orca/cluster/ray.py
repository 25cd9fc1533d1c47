"""Describe the Ray that this process is connected to, whoever started it.

Feeds and engines ask :class:`RayCluster` for nodes, cores and slots, as they ask a SparkCluster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigdl.common.errors import UsageError

__all__ = ["RayCluster", "RayNode", "Shared", "is_alone", "is_connected"]

NO_RAY = (
    'No active Ray. Call init_orca_context(runtime="ray") or '
    "init_orca_context(init_ray_on_spark=True) first"
)


@dataclass(frozen=True)
class RayNode:
    """A node that runs tasks.

    Attributes
    ----------
    id : str
        Ray's name of it, in hexadecimal.
    address : str
    cores : int
        CPUs that Ray may give away there.
    """

    id: str
    address: str
    cores: int


class RayCluster:
    """The active Ray, as nodes × cores.

    Build it with :meth:`from_active` at the time of use and do not keep it: nodes come and go.
    """

    @classmethod
    def from_active(cls) -> RayCluster:
        """Describe the Ray of this process.

        Raises
        ------
        UsageError
            If it is connected to none.
        """
        if not is_connected():
            raise UsageError(NO_RAY)
        return cls()

    @classmethod
    def of_program(cls) -> RayCluster:
        """The same; Ray is started on the nodes of the active Spark where there is none yet.

        Raises
        ------
        UsageError
            If there is neither.
        """
        if not is_connected():
            from bigdl.orca.settings import OrcaContext

            OrcaContext.get_ray_context()
        return cls()

    def __repr__(self) -> str:
        return f"RayCluster({self.nodes} nodes × {self.cores_per_node} cores)"

    @property
    def members(self) -> list[RayNode]:
        """The nodes with CPUs that are alive now, in an order that stays."""
        import ray

        found = [
            RayNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"]["CPU"]))
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        ]
        return sorted(found, key=lambda node: (node.address, node.id))

    @property
    def hosts(self) -> list[str]:
        """The ids of all nodes that are alive, also of those without CPUs."""
        import ray

        return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])

    @property
    def nodes(self) -> int:
        """Number of nodes with CPUs."""
        return len(self.members)

    @property
    def cores_per_node(self) -> int:
        """CPUs of the smallest node, so that every node can hold an equal share of workers."""
        return min((node.cores for node in self.members), default=1)

    def slots(self) -> int:
        """CPUs of all nodes, busy or not."""
        return sum(node.cores for node in self.members)

    def room(self, cores: int) -> int:
        """How many workers of so many CPUs fit on the nodes, were they idle."""
        return sum(node.cores // cores for node in self.members)

    @property
    def driver_host(self) -> str:
        """The address at which workers reach this process."""
        import ray

        return ray.util.get_node_ip_address()

    @property
    def is_local(self) -> bool:
        """Whether all nodes are this machine, reached by the loopback interface."""
        return {node.address for node in self.members} <= {"127.0.0.1"}

    @property
    def session(self) -> str:
        """What tells this connection to Ray from every other one."""
        import ray

        context = ray.get_runtime_context()
        return f"{context.get_job_id()}-{context.get_node_id()[:16]}"

    @property
    def threads_per_task(self) -> int:
        """CPUs of a task that predicts."""
        return 1

    @property
    def broadcaster(self) -> Broadcaster:
        """What sends bytes to all tasks; the same object as long as this process is connected."""
        global _broadcaster
        if _broadcaster is None or _broadcaster.session != self.session:
            _broadcaster = Broadcaster(self.session)
        return _broadcaster

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """The elements of ``func([shard])`` of every shard, each computed by a task of Ray."""
        import ray

        task = ray.remote(func)
        found = _patiently([task.remote([shard]) for shard in shards])
        return [element for each in found for element in each]


class Broadcaster:
    """Has the face of a SparkContext for what prediction needs of one."""

    def __init__(self, session: str):
        self.session = session

    def broadcast(self, data: bytes) -> Shared:
        """Bytes that every task can read."""
        return Shared(data)


_broadcaster: Broadcaster | None = None


class Shared:
    """Bytes in Ray's object store, with the face of a Spark broadcast.

    Attributes
    ----------
    value : bytes
    """

    def __init__(self, data: bytes):
        import ray

        self._reference = ray.put(data)

    @property
    def value(self) -> bytes:
        import ray

        return ray.get(self._reference)

    def unpersist(self) -> None:
        """Nothing: Ray frees an object with its last reference."""


def _patiently(calls: list) -> list:
    """The values of calls; on Ctrl-C they are cancelled."""
    import ray

    try:
        return ray.get(calls)
    except KeyboardInterrupt:
        for call in calls:
            ray.cancel(call, force=True)
        raise


def is_alone() -> bool:
    """Whether this program has a Ray and no Spark, so that data belongs on Ray."""
    from bigdl.orca.cluster.spark import active_context

    return active_context() is None and is_connected()


def is_connected() -> bool:
    """Whether this process is connected to a Ray; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
