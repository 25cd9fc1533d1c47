"""How the rows of every kind of Feed reach the workers of Ray: through its object store.

Arrays are put there as one block for each worker.  XShards and datasets of Ray, whose partitions
are there already, are cut by a Ray task per partition in a block of cells
(:mod:`~bigdl.orca.data.feeds.packing`) for each worker.  Spark's tasks pack the same cells and put
them there themselves (:mod:`bigdl.orca.data.ray_exchange`).  Loaders and paths of files travel as
they are.  So only rows that the driver has go through the driver, and a shard is the same whatever
engine reads it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.ray import RayCluster
from bigdl.orca.data.feeds.group import FeedGroup, combined, packed_cells
from bigdl.orca.data.feeds.in_memory import ArrayFeed
from bigdl.orca.data.feeds.packing import cell_table, packed_reader, rows_packer
from bigdl.orca.data.feeds.xshards import ShardsFeed, chunks_of
from bigdl.runtime.shards.feed import Feed, Ingest, PackedFeed, SourceError
from bigdl.runtime.shards.shard import Shard


def prepare_on_ray(feed: Feed, cluster, num_workers: int, *, name: str = "data") -> Ingest:
    """What :meth:`Feed.prepare` is for Spark.

    Parameters
    ----------
    feed : Feed
    cluster : RayCluster
    num_workers : int
    name : str
    """
    if isinstance(feed, FeedGroup):
        feeds = feed.feeds
        if len(feeds) > 1 and all(map(_comes_from_spark, feeds.values())):
            return _from_spark(feeds, cluster, num_workers)
        return combined([prepare_on_ray(f, cluster, num_workers, name=k) for k, f in feeds.items()])
    if isinstance(feed, ArrayFeed):
        return _from_arrays(feed, num_workers, name)
    if _comes_from_spark(feed):
        return _from_spark({name: feed}, cluster, num_workers)
    return feed.prepare(cluster, num_workers, name=name)


def _comes_from_spark(feed: Feed) -> bool:
    return isinstance(feed, PackedFeed) and not isinstance(feed, ArrayFeed)


def _from_arrays(feed: ArrayFeed, num_workers: int, name: str) -> Ingest:
    import ray

    blocks = [ray.put(feed.part(rank, num_workers)) for rank in range(num_workers)]

    def read(batches, open_spool):
        import ray

        rows, leaves, arrays = ray.get(blocks[open_spool.place])
        writer = open_spool(name, [])
        writer.append(0, 0, rows, leaves, arrays)
        return {name: Shard(writer.finish())}

    return Ingest(None, read)


def _from_spark(feeds, cluster, num_workers) -> Ingest:
    """Rows of DataFrames and XShards of Spark."""
    from bigdl.orca.data.ray_exchange import cells_to_ray

    cells, specs, close = packed_cells(feeds, num_workers)
    try:
        blocks = cells_to_ray(cells, cluster, num_workers)
    finally:
        close()  # the rows are in Ray
    return Ingest(None, _block_reader(list(feeds), specs, blocks))


def _block_reader(names: Sequence[str], specs: Sequence, blocks: Sequence[Sequence]):
    """What reads the cells of a worker, of tables of them in Ray's object store."""
    read_cells = packed_reader(list(names), list(specs))

    def read(batches, open_spool):
        import ray

        def tables():
            for block in blocks[open_spool.place]:
                table = ray.get(block)
                if table is not None:
                    yield from table.to_batches()

        return read_cells(tables(), open_spool)

    return read


class _PartitionFeed(ShardsFeed):
    """Rows that are in partitions in Ray's object store."""

    @abstractmethod
    def partitions(self) -> list:
        """References of the partitions: lists of shards, or a shard each."""

    def check_local(self) -> None:
        raise UsageError(
            f"{self.name or 'data'} is a {self.kind}, which the workers of Spark and of "
            'backend="local" cannot read; use Estimator.from_torch(backend="ray"), or convert it '
            "first"
        )

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        if not isinstance(cluster, RayCluster):
            self.check_local()
        import ray

        chunks = _chunks(*self._named, self._dtypes)
        pack = ray.remote(_pack).options(num_returns=num_workers)
        made: list[Any] = [
            pack.remote(partition, number, chunks, self.name, num_workers)
            for number, partition in enumerate(self.partitions())
        ]
        packed = [[each] if num_workers == 1 else each for each in made]
        blocks = [[each[rank] for each in packed] for rank in range(num_workers)]
        return Ingest(None, _block_reader([name], [()], blocks))


class RayXShardsFeed(_PartitionFeed):
    """``RayXShards`` as input: like :class:`~bigdl.orca.data.feeds.xshards.XShardsFeed`."""

    kind = "RayXShards"

    def partitions(self):
        return self.shards.get_partition_refs()


class RayDatasetFeed(_PartitionFeed):
    """A ``ray.data.Dataset`` as input, whose blocks are read in their order.

    Raises
    ------
    UsageError
        Without `feature_cols`.
    """

    kind = "Ray Dataset"

    def __init__(self, data, feature_cols=None, label_cols=None, config=None, *, name=None):
        if not feature_cols:
            raise UsageError(
                "feature_cols is required for a Ray Dataset; pass the names of the columns that "
                "the model takes"
            )
        super().__init__(data, feature_cols, label_cols, config, name=name)

    def partitions(self):
        from bigdl.orca.data.ray_exchange import ordered_blocks

        return ordered_blocks(self.shards)


def _chunks(feature_cols, label_cols, dtypes) -> Callable:
    def chunks(shards):
        try:
            yield from chunks_of(shards, feature_cols, label_cols, dtypes)
        except UsageError as error:
            raise SourceError(str(error)) from None

    return chunks


def _pack(partition, number, chunks, name, num_workers):
    """The cells of a partition, as a table for every worker, or None where there are none."""
    shards = partition if isinstance(partition, list) else [partition]
    cells = [[] for _ in range(num_workers)]
    for targets, *values in rows_packer(0, name, num_workers)(number, chunks(shards)):
        for target in targets:
            cells[target].append(([target], *values))
    tables = [cell_table(each) if each else None for each in cells]
    return tables[0] if num_workers == 1 else tuple(tables)
