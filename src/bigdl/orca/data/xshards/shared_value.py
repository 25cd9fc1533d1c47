"""A value that every worker reads and that is sent to each of them once."""

from __future__ import annotations

from typing import Any

__all__ = ["SharedValue", "unwrap"]


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

        from bigdl.orca.cluster.ray import RayCluster, is_alone
        from bigdl.orca.cluster.spark import SparkCluster

        on_ray = is_alone()
        broadcaster = RayCluster().broadcaster if on_ray else SparkCluster.from_active().sc
        # As bytes: Spark's own pickler does not know the classes of the main program.
        self.broadcast_data = broadcaster.broadcast(cloudpickle.dumps(data))
        self._data = (data,)

    def __reduce__(self):
        return _received, (self.broadcast_data,)

    @property
    def value(self) -> Any:
        """The value; on a worker it is unpickled once per process."""
        if self._data is None:
            import cloudpickle

            broadcast = self.broadcast_data
            if not hasattr(broadcast, "_bigdl_value"):  # lives as long as Spark keeps the bytes
                broadcast._bigdl_value = (cloudpickle.loads(broadcast.value),)
            self._data = broadcast._bigdl_value
        return self._data[0]

    def unpersist(self) -> None:
        """Free the copies on the executors; they are sent again when needed."""
        self.broadcast_data.unpersist()


def _received(broadcast) -> SharedValue:
    shared = SharedValue.__new__(SharedValue)
    shared.broadcast_data = broadcast
    shared._data = None
    return shared


def unwrap(argument: Any) -> Any:
    """The value of a SharedValue, and anything else as it is."""
    return argument.value if isinstance(argument, SharedValue) else argument
