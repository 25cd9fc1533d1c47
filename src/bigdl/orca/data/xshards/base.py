"""What XShards of any engine can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigdl.orca.data.ray_xshards import RayXShards
    from bigdl.orca.data.xshards.spark import SparkXShards

__all__ = ["XShards"]


class XShards(ABC):
    """A collection of any size as shards: Python objects that plain functions transform.

    A shard is any object that can be pickled, most often a pandas DataFrame or arrays in a dict.
    XShards are made by :meth:`partition`, by the readers of ``bigdl.orca.data`` and from a Spark
    RDD whose elements are the shards.
    """

    @abstractmethod
    def transform_shard(self, func: Callable, *args: Any) -> XShards:
        """New XShards of ``func(shard, *args)`` of every shard."""

    @abstractmethod
    def collect(self) -> list:
        """All shards, in order."""

    @abstractmethod
    def num_partitions(self) -> int:
        """Number of partitions, which are computed in parallel."""

    @staticmethod
    def load_pickle(
        path: str, minPartitions: int | None = None, *, trust: bool = False
    ) -> SparkXShards:
        """Load what ``save_pickle`` wrote.

        Unpickling runs code that the file names, so a file that was not written by this process
        is loaded only on request.

        Parameters
        ----------
        path : str
            Directory, or a pattern of directories.
        minPartitions : int, optional
            Least number of partitions.
        trust : bool, default False
            Load files of others too.

        Raises
        ------
        UsageError
            If the files are of others and `trust` is False.
        """
        from bigdl.orca.data.xshards.pickles import load

        return load(path, minPartitions, trust)

    @staticmethod
    def partition(data: Any, num_shards: int | None = None) -> SparkXShards | RayXShards:
        """Cut arrays in shards of nearly equal numbers of rows; with ``runtime="ray"``, on Ray.

        Parameters
        ----------
        data : numpy.ndarray, or a tuple, list or dict of them, nested or not
            All arrays have the same first dimension.  Every shard is a container like `data`.
        num_shards : int, optional
            Default: the cores of the cluster.

        Raises
        ------
        UsageError
            If there are fewer rows than shards, the arrays differ in their first dimension, or
            `data` holds something else.
        """
        from bigdl.orca.data.xshards.arrays import partition

        return partition(data, num_shards)
