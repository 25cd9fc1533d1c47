"""The backends of an Estimator: an engine, its cluster, and how gradients meet."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.cluster import ray
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.data.feeds import kind_of
from bigdl.orca.engines.connect import ConnectEngine
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.horovod import HorovodSync, require_horovod
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.engine import Engine
from bigdl.runtime.local import LocalEngine

_OF_SPARK = ("Spark DataFrame", "SparkXShards")


class Backend(ABC):
    """The meaning of a ``backend=`` of an Estimator: its engine and its GradientSync."""

    def require(self) -> None:  # noqa: B027  most need none
        """Raise a MissingExtraError if a package is missing."""

    def is_on_ray(self) -> bool:
        """Return True if the workers are Ray's."""
        return False

    def sync(self) -> type[GradientSync]:
        """Return the class by which the workers' gradients meet."""
        return TorchDistributedSync

    @abstractmethod
    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        """Return the engine whose workers train and evaluate.

        Parameters
        ----------
        min_workers : int, optional
            Of Ray; see :class:`~bigdl.orca.engines.ray.RayEngine`.
        **options
            ``workers_per_node`` and ``log_to_driver``.
        """

    def end_workers(self) -> None:  # noqa: B027  tasks of Spark end by themselves
        """End the workers that wait for programs."""


class SparkBackend(Backend):
    """Workers are tasks of the active Spark, also over Spark Connect."""

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return (SparkEngine if connect_session() is None else ConnectEngine)(**options)


class RayBackend(Backend):
    """Workers are Ray's actors."""

    def require(self) -> None:
        require("ray", "ray")

    def is_on_ray(self) -> bool:
        return True

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return RayEngine(ray.RayCluster.of_program(), min_workers=min_workers, **options)

    def end_workers(self) -> None:
        if ray.is_connected():
            RayEngine().shutdown()


class HorovodBackend(Backend):
    """Gradients meet by Horovod; workers are Ray's where the program has a Ray, else Spark's."""

    def require(self) -> None:
        require_horovod()

    def is_on_ray(self) -> bool:
        return ray.is_connected()

    def sync(self) -> type[GradientSync]:
        return HorovodSync

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return self._workers().engine(min_workers, **options)

    def end_workers(self) -> None:
        self._workers().end_workers()

    def _workers(self) -> Backend:
        return RayBackend() if self.is_on_ray() else SparkBackend()


class LocalBackend(Backend):
    """Workers are processes of this machine."""

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return LocalEngine(**options)

    def end_workers(self) -> None:
        LocalEngine().shutdown()


BACKENDS: dict[str, Backend] = {
    "spark": SparkBackend(),
    "bigdl": SparkBackend(),
    "ray": RayBackend(),
    "horovod": HorovodBackend(),
    "local": LocalBackend(),
}


def backend_of(name: str, old_names: Mapping[str, str]) -> str:
    """Return the backend that a name means, if its packages are installed.

    Parameters
    ----------
    name : str
    old_names : mapping of str to str
        Names of BigDL 2.x.

    Raises
    ------
    UsageError
        For another name, or without the packages.
    """
    backend = old_names.get(name, name)
    if backend not in BACKENDS:
        raise UsageError(
            f"The backends are 'spark', 'ray', 'horovod', 'bigdl' (the parameter layer on Spark) "
            f"and 'local' (processes of this machine), got backend={name!r}; use one of them",
            code="name-unknown",
            argument="backend",
            allowed=["spark", "ray", "horovod", "bigdl", "local"],
        )
    BACKENDS[backend].require()
    return backend


def cluster_of(backend: str, data: Any, workers_per_node: int) -> Cluster:
    """Return where `data` is predicted: what Spark has, by Spark."""
    name = "spark" if kind_of(data) in _OF_SPARK else backend
    return BACKENDS[name].engine(workers_per_node=workers_per_node).cluster
