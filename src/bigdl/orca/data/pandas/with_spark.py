"""The backend "spark": files of any size, read and cut by Spark."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.pandas.paths import for_spark
from bigdl.orca.data.xshards.frames import frames_of, quoted
from bigdl.orca.data.xshards.kinds import DATA_FRAME

__all__ = ["read_json", "read_parquet", "spread", "to_xshards"]


def read_json(file_path, options: dict[str, Any]):
    """See :func:`bigdl.orca.data.pandas.read_json`."""
    from bigdl.orca.cluster.spark import SparkCluster

    options = dict(options)
    if "lines" in options:  # as pandas calls it
        options["multiLine"] = not options.pop("lines")
    if options.pop("orient", "records") != "records":
        raise UsageError(
            'Spark reads JSON of orient="records" only; set OrcaContext.pandas_read_backend = '
            '"pandas" for others'
        )
    return to_xshards(SparkCluster.from_active().spark.read.json(for_spark(file_path), **options))


def read_parquet(file_path, columns: list[str] | None, schema, options: dict[str, Any]):
    """See :func:`bigdl.orca.data.pandas.read_parquet`."""
    from bigdl.orca.cluster.spark import SparkCluster

    reader = SparkCluster.from_active().spark.read.options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    frame = reader.parquet(*for_spark(file_path))
    if columns is not None:
        missing = [name for name in columns if name not in frame.columns]
        if missing:
            raise UsageError(f"The files have no columns {missing}, only {frame.columns}")
        frame = frame.select(*map(quoted, columns))
    return to_xshards(frame)


def to_xshards(frame, names=None, finish=None, class_name=DATA_FRAME):
    """XShards of a frame per partition, on which ``finish`` is called, of at least one per node."""
    from bigdl.orca.data.xshards import SparkXShards

    rdd = frames_of(frame, names=names)
    if finish is not None:
        rdd = rdd.map(finish)
    return spread(SparkXShards.lazy(rdd, class_name))


def spread(shards):
    """`shards`, computed at once where that is the setting, with a partition for every node."""
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.xshards import SparkXShards

    nodes = SparkCluster.from_active().nodes
    if shards.num_partitions() < nodes:
        shards = shards.repartition(nodes)
    return SparkXShards(shards.rdd, class_name=shards.type.get("class_name"))
