"""Where the verbs of an Estimator run: the engine and the cluster of its ``backend``."""

from __future__ import annotations

from typing import Any

from bigdl.orca.data.feeds import kind_of
from bigdl.orca.engine.base import Engine

__all__ = ["cluster_of", "end_workers", "engine_of"]

_OF_SPARK = ("Spark DataFrame", "SparkXShards")


def engine_of(
    backend: str, workers_per_node: int, log_to_driver: bool, min_workers: int | None = None
) -> Engine:
    """The engine whose workers train and evaluate.

    Parameters
    ----------
    backend : str
        ``"ray"``; all others run on Spark.
    workers_per_node : int
    log_to_driver : bool
    min_workers : int, optional
        Of Ray; see :class:`~bigdl.orca.engine.ray.RayEngine`.
    """
    options = {"workers_per_node": workers_per_node, "log_to_driver": log_to_driver}
    if backend == "ray":
        from bigdl.orca.cluster.ray import RayCluster
        from bigdl.orca.engine.ray import RayEngine

        return RayEngine(RayCluster.of_program(), min_workers=min_workers, **options)
    from bigdl.orca.engine.spark import SparkEngine

    return SparkEngine(**options)


def cluster_of(backend: str, data: Any):
    """Where `data` is predicted: what Spark has, by Spark.

    Returns
    -------
    SparkCluster or RayCluster
    """
    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.cluster.spark import SparkCluster

    on_ray = backend == "ray" and kind_of(data) not in _OF_SPARK
    return RayCluster.of_program() if on_ray else SparkCluster.from_active()


def end_workers(backend: str) -> None:
    """End the workers that wait for programs."""
    from bigdl.orca.cluster.ray import is_connected

    if backend == "ray" and is_connected():
        from bigdl.orca.engine.ray import RayEngine

        RayEngine().shutdown()
