"""Feeds of XShards and Ray Datasets.

Tasks convert the elements of an RDD, or of partitions in Ray's object store, to arrays and pack
them in cells (:mod:`~bigdl.orca.data.feeds.packing`).  So every worker gets its part of the rows
for any number and size of shards, and no rows pass through the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.memory import freeze_modules
from bigdl.orca.data.feeds.packing import (
    CELL,
    ColumnFeed,
    PackedFeed,
    blocks_input,
    cell_table,
    packed_reader,
    rows_packer,
)
from bigdl.orca.data.xshards.connect import frame_of
from bigdl.orca.data.xshards.ray_exchange import ordered_blocks
from bigdl.orca.data.xshards.shards import collected
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import InputPlan, RowPredictor, RowSampler
from bigdl.runtime.shards.values import columns_of, grouped, is_frame

if TYPE_CHECKING:
    import ray.data

    from bigdl.orca.data.xshards import SparkXShards
    from bigdl.orca.data.xshards.ray import RayXShards


class ShardsFeed(ColumnFeed):
    """Base class of feeds whose shards are Python objects, such as feeds of XShards.

    Parameters
    ----------
    shards : SparkXShards, RayXShards or ray.data.Dataset
        Shards of pandas frames, dicts ``{"x": ..., "y": ...}``, or tuples of arrays; see
        :mod:`bigdl.runtime.shards.values`. A shard may have no rows.
    feature_cols, label_cols : sequence of str, optional
        Columns of frames, or keys of dicts, for features and targets.
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating-point values.
    name : str, optional
        Name of the input in messages.
    """

    def __init__(self, shards, feature_cols=None, label_cols=None, config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        self.shards = shards

    def chunker(self) -> Callable[[Iterable], Iterator[tuple[list, list]]]:
        """Return a function that yields the column specs and arrays of every non-empty shard."""
        names, dtypes = (self.feature_cols, self.label_cols), self.dtypes

        def chunks(shards):
            for shard in shards:
                if names[0] and _is_empty(shard):
                    continue  # an empty block of Ray may have no columns
                columns = columns_of(shard, *names, **dtypes)
                if len(columns[0][2]):
                    yield grouped(columns)

        return chunks


def _is_empty(shard: Any) -> bool:
    """Return True for a frame without rows or a dict of arrays without rows."""
    if isinstance(shard, dict):
        return all(hasattr(each, "__len__") and not len(each) for each in shard.values())
    return is_frame(shard) and not len(shard)


class XShardsFeed(ShardsFeed, PackedFeed):
    """Feed of ``SparkXShards``."""

    kind = "SparkXShards"
    is_in_spark = True

    def labelled(self) -> SparkXShards:
        """Return the shards with their targets, for training or evaluation."""
        return self.shards

    def cells(self, number, num_workers, reference=None):
        chunks, pack = self.chunker(), rows_packer(number, self.name, num_workers)

        def pack_shards(source, shards):
            freeze_modules()
            return pack(source, chunks(shards))

        cells = self.labelled().rdd.mapPartitionsWithIndex(pack_shards)
        return frame_of(cells, CELL), (), lambda: None

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> SparkXShards:
        """Return lazy XShards with predictions, in the same partitions and order.

        A dict gets a key ``prediction`` and a pandas frame a column; a tuple or an array becomes
        ``{"x": ..., "prediction": ...}``.
        """
        from bigdl.orca.data.xshards import SparkXShards, persistence

        predict = predictor.shard_predictor(cluster.threads_per_task)
        rdd = self.shards.rdd.mapPartitions(predict, preservesPartitioning=True)
        persistence.hold(rdd, self.shards.rdd)
        return SparkXShards.lazy(rdd)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        return collected(self.shards.rdd.mapPartitions(sampler.take_from_shards), partitions)


class RayXShardsFeed(ShardsFeed):
    """Feed of ``RayXShards``, converted by one Ray task per partition."""

    kind = "RayXShards"

    def partitions(self) -> list:
        """Return object references of the partitions: lists of shards, or single shards."""
        return self.shards.get_partition_refs()

    def check_local(self) -> None:
        raise UsageError(
            f"{self.name or 'data'} is a {self.kind}, which workers of Spark and of "
            'backend="local" cannot read; use Estimator.from_torch(backend="ray"), or convert it',
            code="data-type",
            argument=self.name,
        )

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        if cluster.moves_rows_by != "ray":
            self.check_local()
        import ray

        chunks, feed_name = self.chunker(), self.name

        def pack(partition, number):
            """Pack a partition into one table per worker, or None for a worker without rows."""
            shards = partition if isinstance(partition, list) else [partition]
            cells: list[list] = [[] for _ in range(num_workers)]
            for cell in rows_packer(0, feed_name, num_workers)(number, chunks(shards)):
                cells[cell[0]].append(cell)
            tables = [cell_table(each) if each else None for each in cells]
            return tables[0] if num_workers == 1 else tuple(tables)

        task: Any = ray.remote(pack).options(num_returns=num_workers)
        packed = [task.remote(each, number) for number, each in enumerate(self.partitions())]
        blocks = (
            [packed]
            if num_workers == 1
            else [[p[rank] for p in packed] for rank in range(num_workers)]
        )
        return blocks_input(packed_reader([name], [()]), blocks)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> RayXShards | ray.data.Dataset:
        """Return RayXShards with predictions, computed in the background."""
        predict = predictor.shard_predictor(threads=1)
        return self.shards.map_partitions(lambda partition: list(predict(partition)))

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        import ray

        from bigdl.orca.cluster.ray_launch import ray_get

        task: Any = ray.remote(lambda partition: list(sampler.take_from_shards(partition)))
        calls = [task.remote(each) for each in self.partitions()[:partitions]]
        return list(itertools.chain.from_iterable(ray_get(calls)))


class RayDatasetFeed(RayXShardsFeed):
    """Feed of a ``ray.data.Dataset``, whose blocks are read in order.

    Raises
    ------
    UsageError
        If `feature_cols` is missing.
    """

    kind = "Ray Dataset"

    def __init__(self, data, feature_cols=None, label_cols=None, config=None, *, name=None):
        if not feature_cols:
            raise UsageError(
                "feature_cols is required for a Ray Dataset; pass the names of the feature columns",
                code="argument-missing",
                argument="feature_cols",
            )
        super().__init__(data, feature_cols, label_cols, config, name=name)

    def partitions(self) -> list:
        return ordered_blocks(self.shards)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> ray.data.Dataset:
        """Return a lazy Dataset with predictions, in the same order of rows."""
        predict = predictor.shard_predictor(threads=1)

        def predict_block(block):
            (predicted,) = predict([block])
            return predicted

        return self.shards.map_batches(predict_block, batch_format="pandas", batch_size=None)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        frame = self.shards.limit(sampler.rows).to_pandas()
        return list(sampler.take_from_shards([frame])) if len(frame) else []
