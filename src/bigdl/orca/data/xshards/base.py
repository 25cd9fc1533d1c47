"""XShards of any engine, and values that all of their tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.ray import active_cluster, is_alone
from bigdl.orca.data.xshards.shards import arrays_of, even_cut, map_arrays

if TYPE_CHECKING:
    from bigdl.orca.data.xshards.ray import RayXShards
    from bigdl.orca.data.xshards.spark import SparkXShards


class XShards(ABC):
    """A collection of any size as shards: Python objects that plain functions transform.

    A shard is any object that can be pickled, most often a pandas DataFrame or arrays in a dict.
    XShards are made by :meth:`partition`, by the readers of ``bigdl.orca.data`` and from a Spark
    RDD whose elements are the shards.
    """

    _engines: ClassVar[dict[str, type[XShards]]] = {}

    def __init_subclass__(cls, engine: str | None = None, **options: Any):
        super().__init_subclass__(**options)
        if engine is not None:
            XShards._engines[engine] = cls

    @classmethod
    def _from_shards(cls, shards: list) -> XShards:
        """XShards of objects of this process, each in a partition of its own."""
        raise NotImplementedError

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
        spark: Any = XShards._engines["spark"]
        return spark._load_pickle(path, minPartitions, trust)

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
        rows = _count_rows(data)
        cluster = active_cluster()
        if num_shards is None:
            num_shards = cluster.nodes * cluster.cores_per_node
        number = check_positive("num_shards", num_shards)
        if rows < number:
            raise UsageError(
                f"The size of the data, {rows} rows, is smaller than the total number of shards, "
                f"{number}; pass a smaller num_shards"
            )
        shards = [
            map_arrays(data, lambda array, low=low, high=high: array[low:high])
            for low, high in even_cut(rows, number)
        ]
        engine: Any = XShards._engines["ray" if is_alone() else "spark"]
        return engine._from_shards(shards)


def _count_rows(data: Any) -> int:
    """Return the first dimension of all arrays in `data`."""
    import numpy as np

    arrays = list(arrays_of(data))
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise UsageError(
                "The data should be a numpy array, or a tuple, list or dict of them, but got "
                f"{type(array).__name__} in it"
            )
        if array.ndim == 0:
            raise UsageError("The arrays must have at least one dimension, but one has none")
    if not arrays:
        raise UsageError("There is no array in the data to partition")
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) > 1:
        raise UsageError(
            "The arrays must all have the same size in first dimension, but they have "
            f"{sizes}; got {_describe(data)}"
        )
    return sizes[0]


def _describe(data):
    if isinstance(data, dict):
        return "{" + ", ".join(f"{k!r}: {_describe(v)}" for k, v in data.items()) + "}"
    if isinstance(data, list | tuple):
        return "(" + ", ".join(map(_describe, data)) + ")"
    return f"array of shape {data.shape}"


class SharedValue:
    """A value for the functions given to ``transform_shard``, sent to every executor once.

    In a program with ``runtime="ray"`` it is in Ray's object store instead.

    ``transform_shard`` passes its :attr:`value` in the place of a SharedValue.

    Parameters
    ----------
    data : object
        Anything that cloudpickle can pickle, also of a class of the main program.

    Examples
    --------
    >>> index = SharedValue({"a": 1, "b": 2})
    >>> shards.transform_shard(lambda df, index: df.assign(code=df["name"].map(index)), index)
    """

    def __init__(self, data: Any):
        import cloudpickle

        # As bytes: Spark's own pickler does not know the classes of the main program.
        self.broadcast_data = active_cluster().broadcaster.broadcast(cloudpickle.dumps(data))
        self._data: tuple[Any] | None = (data,)

    def __getstate__(self) -> dict[str, Any]:
        return {"broadcast_data": self.broadcast_data, "_data": None}

    @property
    def value(self) -> Any:
        """The value; on a worker it is unpickled once per process."""
        if self._data is None:
            import cloudpickle

            broadcast: Any = self.broadcast_data
            if not hasattr(broadcast, "_bigdl_value"):  # lives as long as Spark keeps the bytes
                broadcast._bigdl_value = (cloudpickle.loads(broadcast.value),)
            self._data = broadcast._bigdl_value
        return self._data[0]

    def unpersist(self) -> None:
        """Free the copies on the executors; they are sent again when needed."""
        self.broadcast_data.unpersist()


def unwrap(argument: Any) -> Any:
    """The value of a SharedValue, and anything else as it is."""
    return argument.value if isinstance(argument, SharedValue) else argument
