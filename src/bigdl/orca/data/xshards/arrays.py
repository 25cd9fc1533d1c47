"""Arrays, and containers of them, cut in shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.arguments import whole_number

__all__ = ["arrays_of", "even_cut", "map_arrays", "partition"]


def arrays_of(data: Any) -> Iterator:
    """The arrays of nested tuples, lists and dicts."""
    if isinstance(data, dict):
        for value in data.values():
            yield from arrays_of(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from arrays_of(value)
    else:
        yield data


def map_arrays(data: Any, func) -> Any:
    """A container like `data` of ``func(array)``."""
    if isinstance(data, dict):
        return {key: map_arrays(value, func) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(value, func) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_arrays(value, func) for value in data)
    return func(data)


def partition(data: Any, num_shards: int | None = None):
    """See :meth:`XShards.partition <bigdl.orca.data.xshards.base.XShards.partition>`."""
    import numpy as np

    from bigdl.orca.cluster.ray import RayCluster, is_alone
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.xshards.spark import SparkXShards

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
    on_ray = is_alone()
    cluster = RayCluster.from_active() if on_ray else SparkCluster.from_active()
    if num_shards is None:
        num_shards = cluster.nodes * cluster.cores_per_node
    number = whole_number(num_shards)
    if number is None or number < 1:
        raise UsageError(f"num_shards must be a whole number of at least 1, got {num_shards!r}")
    if sizes[0] < number:
        raise UsageError(
            f"The size of the data, {sizes[0]} rows, is smaller than the total number of shards, "
            f"{number}; pass a smaller num_shards"
        )
    shards = [
        map_arrays(data, lambda array, low=low, high=high: array[low:high])
        for low, high in even_cut(sizes[0], number)
    ]
    if on_ray:
        import ray

        from bigdl.orca.data.ray_xshards import RayXShards

        return RayXShards([ray.put([shard]) for shard in shards])
    return SparkXShards(cluster.sc.parallelize(shards, number))


def even_cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of `parts` ranges of `rows` rows, as equal as can be, the larger ones first."""
    size, larger = divmod(rows, parts)
    ends = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


def _describe(data):
    if isinstance(data, dict):
        return "{" + ", ".join(f"{k!r}: {_describe(v)}" for k, v in data.items()) + "}"
    if isinstance(data, list | tuple):
        return "(" + ", ".join(map(_describe, data)) + ")"
    return f"array of shape {data.shape}"
