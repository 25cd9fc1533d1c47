"""XShards as pickle files of Spark."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["load", "save"]

_own: set = set()  # (path, time, length) of each file that this process wrote


def save(shards, path: str, batch_size: int) -> None:
    """Write every shard, and remember which files that made."""
    shards.rdd.saveAsPickleFile(path, batch_size)
    _own.update(_files(path))


def load(path: str, min_partitions: int | None, trust: bool):
    """See :meth:`XShards.load_pickle <bigdl.orca.data.xshards.base.XShards.load_pickle>`."""
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.xshards.spark import SparkXShards

    if not trust and not _files(path) <= _own:
        raise UsageError(
            f"{path} holds pickles that this process did not write, and loading a pickle runs "
            "code that it names; pass trust=True if you trust who wrote them"
        )
    return SparkXShards(SparkCluster.from_active().sc.pickleFile(path, min_partitions))


def _files(path):
    """Path, time of modification and length of each file that Spark would read."""
    from bigdl.orca.cluster.spark import SparkCluster

    spark = SparkCluster.from_active().spark
    found = spark.read.format("binaryFile").load(path)
    return {tuple(row) for row in found.select("path", "modificationTime", "length").collect()}
