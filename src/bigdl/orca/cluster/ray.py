"""Description of the connected Ray cluster, and the context that starts a program's Ray.

Feeds and engines get nodes, cores and slots from :class:`RayCluster`, as from SparkCluster.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from bigdl.common.checks import check_choice
from bigdl.common.cpu import check_cores
from bigdl.common.errors import UsageError, require
from bigdl.orca.cluster import connect
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.ray_launch import (
    check_ray_arguments,
    connect_ray,
    nodes_with_cpus,
    ray_calls,
    ray_loss,
    start_on_spark,
    start_ray,
)
from bigdl.orca.cluster.spark import SparkCluster, active_context

logger = logging.getLogger("bigdl.orca")

NO_RAY = (
    'No active Ray. Call init_orca_context(runtime="ray") or '
    "init_orca_context(init_ray_on_spark=True) first"
)


@dataclass(frozen=True)
class RayNode:
    """Ray node that runs tasks.

    Attributes
    ----------
    id : str
        Ray's node id, in hexadecimal.
    address : str
        IP address.
    cores : int
        Number of CPUs that Ray manages on the node.
    """

    id: str
    address: str
    cores: int


class RayCluster:
    """Active Ray cluster, described as nodes × cores.

    Create it with :meth:`from_active` when needed and do not store it, because nodes change.
    """

    moves_rows_by: Literal["ray"] = "ray"

    @classmethod
    def from_active(cls) -> RayCluster:
        """Return the Ray cluster to which this process is connected.

        Raises
        ------
        UsageError
            If it is not connected to Ray.
        """
        refuse_lost()
        if not is_connected():
            raise UsageError(NO_RAY, code="context-missing")
        return cls()

    @classmethod
    def of_program(cls) -> RayCluster:
        """Return the program's Ray cluster; start Ray on the active Spark's nodes if necessary.

        Raises
        ------
        UsageError
            If there is neither a Ray nor an active Spark.
        """
        refuse_lost()
        if not is_connected():
            OrcaRayContext.of_program()
        return cls()

    def __repr__(self) -> str:
        return f"RayCluster({self.nodes} nodes × {self.cores_per_node} cores)"

    @property
    def asks_encryption(self) -> str:
        """Setting that requires encryption between processes, or "" if there is none."""
        return "RAY_USE_TLS=1" if os.environ.get("RAY_USE_TLS") == "1" else ""

    @property
    def members(self) -> list[RayNode]:
        """Live nodes with CPUs, in a stable order."""
        nodes = [
            RayNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"]["CPU"]))
            for node in nodes_with_cpus()
        ]
        return sorted(nodes, key=lambda node: (node.address, node.id))

    @property
    def hosts(self) -> dict[str, str]:
        """Ids and addresses of all live nodes, including nodes without CPUs."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        return {node["NodeID"]: node["NodeManagerAddress"] for node in alive}

    @property
    def nodes(self) -> int:
        """Number of nodes with CPUs."""
        return len(self.members)

    @property
    def cores_per_node(self) -> int:
        """CPUs of the smallest node, so that every node can run an equal number of workers."""
        return min((node.cores for node in self.members), default=1)

    def slots(self) -> int:
        """Return the number of CPUs of all nodes, busy or not."""
        return sum(node.cores for node in self.members)

    def room(self, cores: int) -> int:
        """Return how many workers with `cores` CPUs each fit on the nodes when they are idle."""
        return sum(node.cores // cores for node in self.members)

    @property
    def driver_host(self) -> str:
        """Address at which workers reach this process."""
        import ray

        return ray.util.get_node_ip_address()

    @property
    def is_local(self) -> bool:
        """True if all nodes are on this machine, reached through the loopback interface."""
        return {node.address for node in self.members} <= {"127.0.0.1"}

    @property
    def session(self) -> str:
        """Identity of this connection to Ray."""
        import ray

        context = ray.get_runtime_context()
        return f"{context.get_job_id()}-{context.get_node_id()[:16]}"

    @property
    def temp_dir(self) -> None:
        """Always None: arrays are sent through Ray's object store, not in files."""
        return None

    @property
    def threads_per_task(self) -> int:
        """Number of CPUs of a prediction task."""
        return 1

    @property
    def broadcaster(self) -> RayBroadcaster:
        """Object whose ``broadcast`` sends bytes to all tasks; one per connection."""
        return _broadcaster_of(self.session)

    def map_shards(self, func: Callable, shards: Sequence) -> list:
        """Return the elements of ``func([shard])`` for every shard, computed by Ray tasks."""
        import ray

        task = ray.remote(func)
        calls = [task.remote([shard]) for shard in shards]
        try:
            with ray_calls():
                return [element for elements in ray.get(calls) for element in elements]
        except KeyboardInterrupt:
            _, running = ray.wait(calls, num_returns=len(calls), timeout=0)
            for call in running:
                ray.cancel(call, force=True)
            raise


class RayBroadcaster:
    """Broadcaster for predictions, with the ``broadcast`` method of a SparkContext."""

    def broadcast(self, data: bytes) -> RayBroadcast:
        """Store bytes so that every task can read them."""
        return RayBroadcast(data)


@functools.lru_cache(maxsize=1)
def _broadcaster_of(session: str) -> RayBroadcaster:
    return RayBroadcaster()


class RayBroadcast:
    """Bytes in Ray's object store, with the interface of a Spark broadcast.

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

        with ray_calls():
            return ray.get(self._reference)

    def unpersist(self) -> None:
        """Do nothing: Ray frees an object with its last reference."""


def active_cluster() -> RayCluster | SparkCluster:
    """Return the cluster for new data: Ray if the program has no Spark, else the active Spark."""
    return RayCluster() if is_alone() else active_spark()


def refuse_lost() -> None:
    """Raise RayLost if the Ray instance that this program uses has stopped.

    Raises
    ------
    RayLost
        If Ray has ended.
    """
    loss = ray_loss()
    if loss is not None:
        raise loss


def is_alone() -> bool:
    """Return True if this program has Ray but no Spark, so that data is stored in Ray."""
    refuse_lost()
    return active_context() is None and connect_session() is None and is_connected()


def is_connected() -> bool:
    """Return True if this process is connected to Ray, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class OrcaRayContext:
    """Ray cluster of a program, from ``init_orca_context`` or ``OrcaContext.get_ray_context``.

    Parameters
    ----------
    runtime : {"spark", "ray"}, default "spark"
        ``"spark"`` runs Ray on the nodes of the active SparkContext, in local mode on this
        machine; ``"ray"`` on this machine, or on the cluster at ``address=``.
    cores : int or "*", default 2
        CPUs of Ray on this machine; on Spark's nodes the default is the cores of an executor.
    num_nodes : int, default 1
        Has no effect; accepted for programs of BigDL 2.x.
    **kwargs
        For ``"spark"``: ``sc``, ``num_ray_nodes`` (default: number of executors),
        ``ray_node_cpu_cores`` (default: cores of an executor), ``object_store_memory`` per node
        (``"2g"`` or bytes), ``env`` (environment variables of Ray's processes), ``extra_params``
        (options of ``ray start``), ``system_config``, ``verbose``.
        For ``"ray"``: ``address``, ``object_store_memory``, and all arguments of ``ray.init``.

    Attributes
    ----------
    initialized : bool
    address_info : dict or None
        Ray's address information; nodes join at ``redis_address``.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> sc = init_orca_context("local", cores=2, init_ray_on_spark=True)
    >>> context = OrcaContext.get_ray_context()
    >>> context.initialized, context.num_ray_nodes
    (True, 1)
    """

    _active: ClassVar[OrcaRayContext | None] = None
    _of_program: ClassVar[OrcaRayContext | None] = None  # kept while it is stopped
    _program_options: ClassVar[
        dict[str, Any]
    ] = {}  # arguments of init_orca_context, for Ray on Spark
    _lock: ClassVar[Any] = threading.RLock()

    def __init__(
        self, runtime: str = "spark", cores: int | str = 2, num_nodes: int = 1, **kwargs: Any
    ):
        self.runtime = check_choice("runtime", runtime, ("spark", "ray"))
        self.ray_node_cpu_cores = cores
        self.num_ray_nodes = num_nodes
        self.address_info: dict | None = None
        self._options = dict(kwargs)
        self._cleanup: contextlib.ExitStack | None = None  # callbacks that stop Ray
        if runtime == "ray":
            check_ray_arguments(kwargs)

    def __repr__(self) -> str:
        where = self.cluster if self.initialized else "not initialized"
        return f"OrcaRayContext({self.runtime!r}, {where})"

    @property
    def initialized(self) -> bool:
        """True if this context has connected this process to Ray."""
        return self._cleanup is not None and is_connected()

    @property
    def cluster(self) -> RayCluster:
        """Ray cluster, described as nodes × cores."""
        return RayCluster.from_active()

    @property
    def redis_address(self) -> str | None:
        """Address at which nodes join Ray, under the property name of BigDL 2.x."""
        return None if self.address_info is None else self.address_info["redis_address"]

    @property
    def is_local(self) -> bool:
        """True if all of Ray runs on this machine."""
        return self.initialized and self.cluster.is_local

    def init(self, driver_cores: int = 0) -> dict:
        """Start Ray or connect to it if necessary.

        Parameters
        ----------
        driver_cores : int, default 0
            CPUs of Ray on the driver's machine, in addition to Spark's nodes.

        Returns
        -------
        dict
            Ray's address information.
        """
        with OrcaRayContext._lock:
            if not self.initialized:
                with contextlib.ExitStack() as cleanup:
                    self.address_info = self._launch(cleanup, driver_cores)
                    self._cleanup = cleanup.pop_all()
                OrcaRayContext._active = self
                cluster = self.cluster
                self.num_ray_nodes, self.ray_node_cpu_cores = cluster.nodes, cluster.cores_per_node
                logger.info("Ray is running at %s: %r", self.address_info["address"], cluster)
            return cast("dict", self.address_info)

    def _launch(self, cleanup: contextlib.ExitStack, driver_cores: int) -> dict:
        if is_connected():
            raise UsageError(
                "Ray is already initialized in this process; call ray.shutdown(), or let "
                "init_orca_context connect with address=",
                code="state",
            )
        options = dict(self._options)
        memory = resource_to_bytes(options.pop("object_store_memory", None))
        if self.runtime == "ray":
            address = options.pop("address", None)
            if address not in (None, "local"):
                return connect_ray(cleanup, address=address, **options)
            cores = check_cores(self.ray_node_cpu_cores)
            return start_ray(cleanup, cores, object_store_memory=memory, options=options)
        return start_on_spark(cleanup, options, memory, driver_cores)

    def stop(self) -> None:
        """Stop Ray, or disconnect if this context did not start it."""
        with OrcaRayContext._lock:
            cleanup, self._cleanup, self.address_info = self._cleanup, None, None
            if OrcaRayContext._active is self:
                OrcaRayContext._active = None
            if cleanup is not None:
                cleanup.close()

    @classmethod
    def get(cls, initialize: bool = True) -> OrcaRayContext:
        """Return the Ray context of this program, and start Ray unless `initialize` is False.

        Parameters
        ----------
        initialize : bool, default True
            Start Ray, on the active SparkContext's nodes unless the program has a Ray context.

        Raises
        ------
        UsageError
            If there is neither a Ray context nor an active SparkContext.
        """
        with cls._lock:
            context = cls._active or cls._for_program()
            if context is None:
                raise UsageError(
                    "No active RayContext. Please call init_orca_context to create a RayContext",
                    code="context-missing",
                )
        if initialize:
            context.init()
        return context

    @classmethod
    def of_program(cls) -> OrcaRayContext:
        """Return this program's Ray context; start Ray on Spark's nodes if it is not running.

        Raises
        ------
        UsageError
            If there is neither a Ray nor an active SparkContext.
        """
        require("ray", "ray")
        with cls._lock:
            context = cls._for_program()
            if context is None:
                raise UsageError(
                    NO_RAY if connect_session() is None else connect.NO_RAY, code="context-missing"
                )
            context.init()
            return context

    @classmethod
    def _for_program(cls) -> OrcaRayContext | None:
        """Return this program's context; create it for the active SparkContext if there is none."""
        if cls._of_program is None:
            cls._of_program = cls._active  # a context that the program created
        if cls._of_program is None:
            sc = active_context()
            if sc is not None:
                cls.set_of_program(cls("spark", sc=sc, **cls._program_options))
        return cls._of_program

    @classmethod
    def set_of_program(cls, context: OrcaRayContext) -> None:
        """Register this program's Ray context, which is stopped when the process ends."""
        cls._of_program = context
        atexit.register(cls.stop_of_program, os.getpid())

    @classmethod
    def stop_of_program(cls, pid: int | None = None) -> None:
        """Stop this program's Ray; if `pid` is given, only in the process with this id."""
        if pid in (None, os.getpid()):
            context, cls._of_program = cls._of_program, None
            if context is not None:
                context.stop()


_UNITS = {"b": 1, "k": 1000, "m": 1000**2, "g": 1000**3}


def resource_to_bytes(resource_str: str | int | None) -> int | None:
    """Convert a size such as ``"10g"`` to bytes; units are decimal, so ``"10k"`` is 10000.

    Parameters
    ----------
    resource_str : str, int or None
        Integer with a unit b, k, m or g, or a number of bytes.

    Raises
    ------
    UsageError
        If the size has another form.

    Examples
    --------
    >>> from bigdl.orca.ray.utils import resource_to_bytes
    >>> resource_to_bytes("10g")
    10000000000
    """
    if resource_str is None or type(resource_str) is int:
        return resource_str
    match = re.fullmatch(r"\s*(\d+)\s*([bkmg])\s*", str(resource_str).lower())
    if match is None:
        raise UsageError(
            "object_store_memory can be either b, k, m, g for bytes, kilobytes, megabytes and "
            f'gigabytes, such as "10g", got {resource_str!r}',
            code="argument-value",
            argument="object_store_memory",
        )
    return int(match[1]) * _UNITS[match[2]]
