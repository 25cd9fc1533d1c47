"""Helper functions of BigDL 2.x."""

from __future__ import annotations

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards import SparkXShards
from bigdl.orca.data.xshards.frames import frames_of
from bigdl.orca.data.xshards.shards import DATA_FRAME, class_name
from bigdl.orca.settings import OrcaContext
from bigdl.runtime.shards.values import join_shards

__all__ = [
    "get_class_name",
    "partition_get_data_label",
    "process_spark_xshards",
    "spark_df_to_pd_sparkxshards",
]


def get_class_name(obj: object) -> str:
    """Return the class name of `obj` with its module, e.g. ``"pandas.core.frame.DataFrame"``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca.data.utils import get_class_name
    >>> get_class_name(pd.DataFrame())
    'pandas.core.frame.DataFrame'
    """
    return class_name(obj)


def spark_df_to_pd_sparkxshards(df, shard_size: int | None = None):
    """Convert a Spark DataFrame to XShards of pandas frames.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    shard_size : int, optional
        Rows per shard, by default ``OrcaContext._shard_size``; if that is None, one shard per
        partition.

    Returns
    -------
    SparkXShards

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.data.utils import spark_df_to_pd_sparkxshards
    >>> sc = init_orca_context("local", cores=2)
    >>> frame = OrcaContext.get_spark_session().range(0, 5, 1, 1)
    >>> shards = spark_df_to_pd_sparkxshards(frame, shard_size=2)
    >>> [shard["id"].tolist() for shard in shards.collect()]
    [[0, 1], [2, 3], [4]]
    """
    size = OrcaContext._shard_size if shard_size is None else shard_size
    return SparkXShards(frames_of(df, size), class_name=DATA_FRAME)


def process_spark_xshards(spark_xshards, num_workers: int):
    """Repartition XShards to at least `num_workers` partitions, so every worker gets one.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import XShards
    >>> from bigdl.orca.data.utils import process_spark_xshards
    >>> sc = init_orca_context("local", cores=2)
    >>> one = XShards.partition({"x": np.arange(4)}, num_shards=1)
    >>> process_spark_xshards(one, num_workers=2).num_partitions()
    2
    """
    if spark_xshards.num_partitions() < num_workers:
        return spark_xshards.repartition(num_workers)
    return spark_xshards


def partition_get_data_label(
    partition_data: list, allow_tuple: bool = True, allow_list: bool = True, has_label: bool = True
) -> tuple:
    """Concatenate features and labels of all shards of a partition.

    Parameters
    ----------
    partition_data : list of dict
        Shards ``{"x": ..., "y": ...}`` of arrays, or of tuples or lists of arrays.
    allow_tuple, allow_list : bool, default True
        Keep ``"x"`` and ``"y"`` that are tuples, or lists; otherwise convert them to the other
        type.
    has_label : bool, default True
        True if the shards have ``"y"``.

    Returns
    -------
    data, label
        Values with the structure of one shard; `label` is None without labels.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.utils import partition_get_data_label
    >>> first = {"x": np.array([1, 2]), "y": np.array([0, 1])}
    >>> second = {"x": np.array([3]), "y": np.array([1])}
    >>> partition_get_data_label([first, second])
    (array([1, 2, 3]), array([0, 1, 1]))
    """
    if not partition_data or not isinstance(partition_data[0], dict):
        raise UsageError(
            "partition_data must be a list of dicts with the key 'x', and 'y' if any",
            code="data-structure",
            argument="partition_data",
        )

    def joined(key):
        value = join_shards([shard[key] for shard in partition_data])
        if isinstance(value, tuple) and not allow_tuple:
            return list(value)
        if isinstance(value, list) and not allow_list:
            return tuple(value)
        return value

    return joined("x"), joined("y") if has_label else None
