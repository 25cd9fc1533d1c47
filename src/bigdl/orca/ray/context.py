"""The Ray of a program: on this machine, on a cluster of its own, or on Spark's nodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from bigdl.common.errors import UsageError
from bigdl.orca.ray.utils import resource_to_bytes

if TYPE_CHECKING:
    from bigdl.orca.cluster.ray import RayCluster

__all__ = ["OrcaRayContext"]

logger = logging.getLogger("bigdl.orca")

_WITHOUT_EFFECT = {
    "redis_port": "Ray has no Redis any more",
    "redis_password": "Ray makes a token of its own",
    "password": "Ray makes a token of its own",
    "include_webui": "Ray's dashboard stays off",
}


class OrcaRayContext:
    """The Ray of a program; made by ``init_orca_context`` and ``OrcaContext.get_ray_context``.

    Parameters
    ----------
    runtime : {"spark", "ray"}, default "spark"
        ``"spark"``: on the nodes of the active SparkContext; in local mode on this machine.
        ``"ray"``: on this machine, or the cluster at ``address=``.
    cores : int or "*", default 2
        CPUs of Ray on this machine; on Spark's nodes, those of an executor are the default.
    num_nodes : int, default 1
        Accepted for programs of BigDL 2.x: Ray knows its nodes.
    **kwargs
        For Spark: ``sc``, ``num_ray_nodes`` (default: the executors), ``ray_node_cpu_cores``
        (default: the cores of an executor), ``object_store_memory`` of a node (``"2g"`` or bytes),
        ``env`` (variables of Ray's processes), ``extra_params`` (further options of ``ray start``),
        ``system_config``, ``verbose``.
        For Ray: ``address``, ``object_store_memory``, and every argument of ``ray.init``.

    Attributes
    ----------
    initialized : bool
    address_info : dict or None
        What Ray says of itself; ``redis_address`` is the address at which nodes join.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> context = init_orca_context(runtime="ray", cores=4)          # doctest: +SKIP
    """

    _active: ClassVar[OrcaRayContext | None] = None
    _lock: ClassVar[Any] = threading.RLock()

    def __init__(
        self, runtime: str = "spark", cores: int | str = 2, num_nodes: int = 1, **kwargs: Any
    ):
        if runtime not in ("spark", "ray"):
            raise UsageError(f'runtime must be "spark" or "ray", got {runtime!r}')
        self.runtime = runtime
        self.ray_node_cpu_cores = cores
        self.num_ray_nodes = num_nodes
        self.address_info: dict | None = None
        self._options = dict(kwargs)
        self._launched: Any = None
        if runtime == "ray":
            from bigdl.orca.cluster.ray_launch import check_ray_arguments

            check_ray_arguments(kwargs)

    def __repr__(self) -> str:
        where = self.cluster if self.initialized else "not initialized"
        return f"OrcaRayContext({self.runtime!r}, {where})"

    @property
    def initialized(self) -> bool:
        """Whether this process is connected to Ray by this context."""
        from bigdl.orca.cluster.ray import is_connected

        return self._launched is not None and is_connected()

    @property
    def cluster(self) -> RayCluster:
        """Ray as nodes × cores."""
        from bigdl.orca.cluster.ray import RayCluster

        return RayCluster.from_active()

    @property
    def redis_address(self) -> str | None:
        """The address at which nodes join Ray, under its old name."""
        return self.address_info and self.address_info["redis_address"]

    @property
    def is_local(self) -> bool:
        """Whether all of Ray is on this machine."""
        return self.initialized and self.cluster.is_local

    def init(self, driver_cores: int = 0) -> dict:
        """Start Ray, or connect to it, unless that is done.

        Parameters
        ----------
        driver_cores : int, default 0
            CPUs of Ray on the driver's machine, beside Spark's nodes.

        Returns
        -------
        dict
            What Ray says of itself.
        """
        with OrcaRayContext._lock:
            if not self.initialized:
                self._launched = self._launch(driver_cores)
                info = {"redis_address": self._launched.address, **self._launched.info}
                self.address_info = {"address": self._launched.address, **info}
                OrcaRayContext._active = self
                cluster = self.cluster
                self.num_ray_nodes, self.ray_node_cpu_cores = cluster.nodes, cluster.cores_per_node
                logger.info("Ray runs at %s: %r", self._launched.address, cluster)
            return self.address_info

    def _launch(self, driver_cores):
        from bigdl.orca.cluster.ray import is_connected
        from bigdl.orca.cluster.ray_launch import LaunchedRay

        if is_connected():
            raise UsageError(
                "Ray is initialized in this process already; call ray.shutdown(), or leave it to "
                "init_orca_context to connect with address="
            )
        options = dict(self._options)
        memory = resource_to_bytes(options.pop("object_store_memory", None))
        if self.runtime == "ray":
            from bigdl.orca.arguments import check_cores

            address = options.pop("address", None)
            if address not in (None, "local"):
                return LaunchedRay.connect(address, options)
            cores = check_cores(self.ray_node_cpu_cores)
            return LaunchedRay.start(cores, object_store_memory=memory, options=options)
        return self._launch_on_spark(options, memory, driver_cores)

    def _launch_on_spark(self, options: Mapping[str, Any], memory, driver_cores):
        from bigdl.orca.cluster.ray_launch import LaunchedRay
        from bigdl.orca.cluster.ray_on_spark import RayOnSpark
        from bigdl.orca.cluster.spark import SparkCluster

        for name, reason in _WITHOUT_EFFECT.items():
            if options.get(name) is not None:
                logger.info("%s: no effect, since %s", name, reason)
        sc = options.get("sc")
        cluster = SparkCluster(sc) if sc is not None else SparkCluster.from_active()
        cores = options.get("ray_node_cpu_cores") or cluster.cores_per_node
        config = {"_system_config": options.get("system_config")}
        config = {name: value for name, value in config.items() if value}
        if cluster.is_local:
            return LaunchedRay.start(cores, object_store_memory=memory, options=config)
        return RayOnSpark.start(
            cluster,
            nodes=options.get("num_ray_nodes") or cluster.nodes,
            cores=cores,
            driver_cores=driver_cores,
            object_store_memory=memory,
            env=options.get("env") or {},
            extra_params=options.get("extra_params") or {},
            options=config,
        )

    def stop(self) -> None:
        """Stop Ray, or disconnect from one that others started."""
        with OrcaRayContext._lock:
            launched, self._launched, self.address_info = self._launched, None, None
            if OrcaRayContext._active is self:
                OrcaRayContext._active = None
            if launched is not None:
                launched.stop()

    @classmethod
    def get(cls, initialize: bool = True) -> OrcaRayContext:
        """The Ray context of this program.

        Parameters
        ----------
        initialize : bool, default True
            Start it if that has not been done.

        Raises
        ------
        UsageError
            If there is none.
        """
        context = OrcaRayContext._active
        if context is None:
            raise UsageError(
                "No active RayContext. Please call init_orca_context to create a RayContext"
            )
        if initialize:
            context.init()
        return context
