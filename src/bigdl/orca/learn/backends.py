"""What the ``backend`` of an Estimator names: an engine, its cluster, and how gradients meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.feeds import kind_of
from bigdl.runtime.engine import Engine

if TYPE_CHECKING:
    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.runtime.local import LocalMachine

_BACKENDS = ("spark", "bigdl", "ray", "horovod", "local")
_OF_SPARK = ("Spark DataFrame", "SparkXShards")


def backend_of(given: str, old_names: Mapping[str, str]) -> str:
    """The backend that a name means, if its packages are installed.

    Parameters
    ----------
    given : str
    old_names : mapping of str to str
        Names of BigDL 2.x.

    Raises
    ------
    UsageError
        For another name, or without the packages.
    """
    backend = old_names.get(given, given)
    if backend not in _BACKENDS:
        raise UsageError(
            f"Only horovod, ray and spark backends are supported for now, got backend: {given!r}; "
            "use one of them, backend='bigdl' (the parameter layer on Spark), or backend='local' "
            "(processes of this machine)"
        )
    if backend == "ray":
        require("ray", "ray")
    if backend == "horovod":
        from bigdl.runtime.collectives.horovod import require_horovod

        require_horovod()
    return backend


def is_on_ray(backend: str) -> bool:
    """Whether the workers are Ray's; those of ``"horovod"`` are where the program has a Ray."""
    from bigdl.orca.cluster.ray import is_connected

    return backend == "ray" or (backend == "horovod" and is_connected())


def sync_of(backend: str) -> type:
    """The class of GradientSync by which the workers' gradients meet."""
    if backend == "horovod":
        from bigdl.runtime.collectives.horovod import HorovodSync

        return HorovodSync
    from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

    return TorchDistributedSync


def engine_of(
    backend: str, workers_per_node: int, log_to_driver: bool, min_workers: int | None = None
) -> Engine:
    """The engine whose workers train and evaluate.

    Parameters
    ----------
    backend : str
        See :func:`is_on_ray`.
    workers_per_node : int
    log_to_driver : bool
    min_workers : int, optional
        Of Ray; see :class:`~bigdl.orca.engines.ray.RayEngine`.
    """
    options: dict[str, Any] = {"workers_per_node": workers_per_node, "log_to_driver": log_to_driver}
    if is_on_ray(backend):
        from bigdl.orca.cluster.ray import RayCluster
        from bigdl.orca.engines.ray import RayEngine

        return RayEngine(RayCluster.of_program(), min_workers=min_workers, **options)
    if backend == "local":
        from bigdl.runtime.local import LocalEngine

        return LocalEngine(**options)
    from bigdl.orca.engines.spark import SparkEngine

    return SparkEngine(**options)


def cluster_of(
    backend: str, data: Any, workers_per_node: int
) -> SparkCluster | RayCluster | LocalMachine:
    """Where `data` is predicted: what Spark has, by Spark."""
    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.cluster.spark import SparkCluster

    if kind_of(data) not in _OF_SPARK:
        if is_on_ray(backend):
            return RayCluster.of_program()
        if backend == "local":
            from bigdl.runtime.local import LocalMachine

            return LocalMachine(workers_per_node)
    return SparkCluster.from_active()


def end_workers(backend: str) -> None:
    """End the workers that wait for programs."""
    from bigdl.orca.cluster.ray import is_connected

    if backend == "local":
        from bigdl.runtime.local import LocalEngine

        LocalEngine().shutdown()
    if backend in ("ray", "horovod") and is_connected():
        from bigdl.orca.engines.ray import RayEngine

        RayEngine().shutdown()
