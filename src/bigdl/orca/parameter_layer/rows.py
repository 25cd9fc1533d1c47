"""The rows of a training in memory-mapped spools on the executors, re-created by Spark's lineage.

The rows go through one shuffle to N partitions.  A task writes a partition to a spool in the
executor's own directory, and what Spark caches is a *handle*: where the spool is, and on which
executor.  Spark runs the tasks of a step where the handle is cached; when the executor is lost the
handle is lost with it, so Spark computes it again from the shuffled rows, elsewhere, and with it
the spool.
"""

from __future__ import annotations

import os

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.frames import Inbox, frames_of
from bigdl.orca.parameter_layer.messages import pack, unpack
from bigdl.orca.parameter_layer.pairs import Pairs, key

__all__ = ["Rows", "is_here", "shards_of"]


class Rows:
    """The rows of a feed as handles in N partitions.

    Parameters
    ----------
    cluster : SparkCluster
    pairs : Pairs
    feed : FeedGroup
        Of one feed.
    job : int
        Number of the job, which names the spools.

    Attributes
    ----------
    handles : JavaPairRDD
        One frame per partition, kept by Spark.
    """

    def __init__(self, cluster, pairs: Pairs, feed, job: int):
        self._pairs, self._close = pairs, lambda: None
        source, reader = self._source(cluster, feed)
        self.handles = pairs.mapped(source, _spooler(reader, job, pairs.partitions))
        pairs.keep(self.handles)

    def _source(self, cluster, feed):
        """Pairs of cells by shard, and what reads them."""
        from bigdl.orca.data.feeds.packing import packed_reader
        from bigdl.runtime.shards.feed import PackedFeed

        ((name, only),) = feed.feeds.items()
        if isinstance(only, PackedFeed) and only.travels(cluster):
            frame, specs, self._close = only.cells(0, self._pairs.partitions)
            cells = frame.rdd.map(tuple)
            return self._pairs.taken(cells, _send_cells), packed_reader([name], [specs])
        ingest = only.prepare(cluster, self._pairs.partitions, name=name)
        if ingest.frame is not None:
            ingest.close()
            raise UsageError(
                f"A {only.kind} cannot feed transport='shuffle'; use transport='barrier'"
            )
        self._close = ingest.close
        return self._pairs.tokens(), ingest.reader

    def renew(self) -> None:
        """Have the spools written again where they are needed next."""
        self._pairs.drop(self.handles)
        self._pairs.keep(self.handles)

    def close(self) -> None:
        """Remove the spools and what was kept."""

        def remove(frames):
            from bigdl.orca.parameter_layer.replicas import close_replicas
            from bigdl.runtime.shards.shard import remove_spool

            close_replicas()
            for frame in frames:
                for spool in _handle(frame)["spools"].values():
                    remove_spool(spool["path"])

        try:
            self._pairs.values(self.handles).foreachPartition(remove)
        finally:
            self._pairs.drop(self.handles)
            self._close()


def is_here(handle: dict) -> bool:
    """Whether this machine sees the spools of a handle."""
    from bigdl.runtime.shards.shard import Spool

    return all(Spool.from_json(doc).is_here() for doc in handle["spools"].values())


def shards_of(handle: dict) -> dict:
    """The shards over the spools of a handle, by name of the feed."""
    from bigdl.runtime.task import reopen

    return reopen(handle["spools"])


def _handle(frame) -> dict:
    return unpack(Inbox([frame]).message(b"H"))[0]


def _send_cells(index, cells):
    """Cells, each under the number of its shard."""
    for target, *place, data in cells:
        yield key(target)
        yield pack(place, [data])


def _batches(frames):
    """Cells as the record batches that a reader takes."""
    import pyarrow as pa

    from bigdl.orca.data.feeds.packing import CELL

    names = [field.split()[0] for field in CELL.split(", ")][1:]
    types = (pa.int32(), pa.int32(), pa.int64(), pa.string(), pa.binary())
    for frame in frames:
        place, (data,) = unpack(frame)
        values = [*place, data.tobytes()]
        arrays = [pa.array([v], t) for v, t in zip(values, types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names)


def _spooler(reader, job, partitions):
    """The task that writes the rows of a partition to spools and yields the handle."""

    def write(index, frames):
        import socket

        from bigdl.orca.cluster.spark_calls import reported
        from bigdl.runtime.shards.feed import SourceError
        from bigdl.runtime.shards.shard import SpoolWriter
        from bigdl.runtime.task import describe

        directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
        directory = directories[index % len(directories)] or "/tmp"
        writers = []

        def open_spool(name, specs):
            writers.append(SpoolWriter(directory, job, f"{name}-{index}", specs))
            return writers[-1]

        open_spool.place, open_spool.world_size = index, partitions
        frames = (frame for frame in frames if len(frame))  # a token is empty
        try:
            shards = reader(_batches(frames), open_spool)
            for _ in frames:
                pass
        except BaseException as error:
            for writer in writers:
                writer.discard()
            if isinstance(error, SourceError | UsageError):
                raise reported({"rank": index, **describe(error)}) from None
            raise
        spools = {name: shard.spool.to_json() for name, shard in shards.items()}
        doc = {
            "partition": index,
            "host": socket.gethostname(),
            "executor": directory,  # of its own
            "version": [spool["nonce"] for spool in spools.values()],
            "spools": spools,
        }
        (frame,) = frames_of(b"H", index, pack(doc))
        yield key(index)
        yield frame

    return write
