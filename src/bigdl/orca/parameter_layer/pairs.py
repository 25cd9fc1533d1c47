"""Key-value RDDs of raw bytes, and the spooled rows of a training run.

PySpark's ``partitionBy`` pickles batches of objects.  Here a Python task alternately yields a key
(8 bytes) and a value, in the format of PySpark's ``PairwiseRDD``, and the JVM passes the value on
as a byte array.  All uses of PySpark's private API are in this module.

A group of steps has dozens of RDDs.  For each of them PySpark makes about thirty calls to the JVM,
of a quarter of a millisecond each, most with constant results.  Here these results are cached.

One shuffle distributes the rows to N partitions.  A task writes a partition to a memory-mapped
spool in the executor's directory.  Spark caches only a *handle*: the path of the spool and its
executor.  Spark runs the tasks of a step where the handle is cached.  If the executor is lost, the
handle is lost, too, so Spark recomputes it and its spool from the shuffled rows on another one.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.spark_calls import one_row, reported, task_directory
from bigdl.orca.cluster.versions import python_rdd_command
from bigdl.orca.data.feeds.packing import CELL, PackedFeed, packed_reader
from bigdl.orca.parameter_layer.messages import FrameReader, frames_of, pack, unpack
from bigdl.runtime.jobs import active_jobs
from bigdl.runtime.task import describe, read_input, read_to_end

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject, JVMView
    from pyspark import RDD, SparkContext

    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.feeds.group import FeedGroup

_KEY = struct.Struct(">q")
_LANE = 33  # bits; py4j passes a Long instead of an Integer only beyond 32 bits


def key(partition: int, lane: int = 0) -> bytes:
    """Encode a partition number and a lane as the key that a task yields before a value.

    Parameters
    ----------
    partition : int
    lane : int
        Lane of the pair, by which :meth:`Pairs.on_lanes` selects pairs.
    """
    return _KEY.pack((lane << _LANE) + partition)


def _same(number):
    return number


class Pairs:
    """Factory of RDDs of pairs in N partitions; partition n holds the pairs with key n.

    Parameters
    ----------
    sc : pyspark.SparkContext
    partitions : int
    are_small : bool
        True if the values of a partition have at most a few megabytes. Then creating
        fewer objects in a task matters more than copying fewer bytes.
    """

    def __init__(self, sc: SparkContext, partitions: int, *, are_small: bool = False):
        self.sc, self.partitions, self._are_small = sc, partitions, are_small
        # the second argument identifies the partitioner: an equal one avoids a second shuffle
        jvm: JVMView = sc._jvm
        # RDD factories, each looked up once
        self._values_of, self._pairs_of = jvm.PythonRDD.valueOfPair, jvm.PairwiseRDD
        self._jvm_rdd, self._function = jvm.PythonRDD, jvm.SimplePythonFunction
        self._converted: dict[str, tuple[Any, Any]] = {}  # in Python and in the JVM
        self._partitioner = jvm.PythonPartitioner(partitions, id(_same))
        # Java's serializer copies large arrays once more than Kryo, but creating two Kryo
        # serializers per task takes longer than the rest of a small task
        serializers, conf = jvm.org.apache.spark.serializer, sc._jsc.sc().conf()
        self._for_large = serializers.KryoSerializer(conf)
        self._serializer = serializers.JavaSerializer(conf) if are_small else self._for_large

    def tokens(self) -> JavaObject:
        """Create an initial RDD with one empty pair per partition."""

        def begin(index, items):
            read_to_end(items)
            yield key(index)
            yield b""

        return self.taken(self.sc.parallelize(range(self.partitions), self.partitions), begin)

    def taken(self, rdd: RDD, task: Callable) -> JavaObject:
        """Apply ``task(index, items)`` to any PySpark RDD; return the resulting pairs by key."""
        raw: Any = rdd.mapPartitionsWithIndex(task)
        raw._bypass_serializer = True
        return self._by_key(raw._jrdd.rdd(), self._for_large)

    def shuffled(self, pairs: JavaObject, task: Callable) -> JavaObject:
        """Shuffle the results of ``task(index, values)`` to the partitions of their keys."""
        # with preserves_partitioning=True Spark would silently skip the shuffle
        raw = self._python_rdd(pairs, task, preserves_partitioning=False)
        return self._by_key(raw, self._serializer)

    def mapped(self, pairs: JavaObject, task: Callable) -> JavaObject:
        """Apply ``task(index, values)`` to each partition without a shuffle."""
        raw = self._python_rdd(pairs, task, preserves_partitioning=True)
        return self._pairs_of(raw).asJavaPairRDD()

    def _by_key(self, raw, serializer):
        pairs = self._pairs_of(raw).asJavaPairRDD().partitionBy(self._partitioner)
        pairs.rdd().setSerializer(serializer)
        return pairs

    def values(self, pairs: JavaObject) -> RDD:
        """Return the values as a PySpark RDD of bytes."""
        from pyspark.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        return RDD(self._values_of(pairs), self.sc, NoOpSerializer())

    def on_lanes(self, pairs: JavaObject, first: int, last: int) -> JavaObject:
        """Select the pairs whose lane is between `first` and `last`; return small pairs unfiltered.

        For small pairs a filter costs the driver more than unneeded pairs cost a task.
        """
        if self._are_small:
            return pairs
        return pairs.filterByRange(first << _LANE, ((last + 1) << _LANE) - 1)

    def keep(self, pairs: JavaObject, copies: int = 1) -> None:
        """Persist pairs in memory and on disk once they are computed."""
        from pyspark import StorageLevel

        pairs.persist(self.sc._getJavaStorageLevel(StorageLevel(True, True, False, True, copies)))

    def forget_lineage(self, pairs: JavaObject) -> None:
        """Cut the lineage, so that the inputs of the pairs can be removed."""
        pairs.rdd().localCheckpoint()

    def drop(self, pairs: JavaObject) -> None:
        """Unpersist pairs."""
        with contextlib.suppress(Exception):
            pairs.unpersist(False)

    def drop_for_good(self, pairs: JavaObject) -> None:
        """Unpersist pairs that have no lineage, and avoid the warning of ``unpersist``."""
        with contextlib.suppress(Exception):
            self.sc._jsc.sc().unpersistRDD(pairs.rdd().id(), False)

    def remove_shuffles(self, shuffled: Sequence) -> None:
        """Remove the shuffle files of RDDs that are no longer read."""
        with contextlib.suppress(Exception):
            cleaner = self.sc._jsc.sc().cleaner().get()
            for each in shuffled:
                number = each.rdd().dependencies().head().shuffleId()
                cleaner.doCleanupShuffle(number, False)

    def _python_rdd(self, pairs, task: Callable, *, preserves_partitioning: bool):
        """Apply a Python task to the values of each partition of `pairs`."""
        from pyspark.serializers import NoOpSerializer

        sc, raw = self.sc, NoOpSerializer()
        command, broadcasts, variables, includes = python_rdd_command(sc, (task, None, raw, raw))
        function = self._function(
            bytearray(command),
            self._kept("variables", dict(variables)),
            self._kept("includes", list(includes)),
            sc.pythonExec,
            sc.pythonVer,
            self._kept("broadcasts", broadcasts),
            sc._javaAccumulator,
        )
        source = self._values_of(pairs).rdd()
        return self._jvm_rdd(source, function, preserves_partitioning, False)

    def _kept(self, name, value):
        """Convert a list or dict to a JVM object; reuse the previous one if it is unchanged."""
        from py4j.java_collections import ListConverter, MapConverter

        entry = self._converted.get(name)
        if entry is None or entry[0] != value:
            converter = MapConverter() if isinstance(value, dict) else ListConverter()
            converted = converter.convert(value, self.sc._gateway._gateway_client)
            entry = self._converted[name] = value, converted
        return entry[1]


class SpooledRows:
    """Rows of a feed, spooled in N partitions and represented by handles.

    Parameters
    ----------
    cluster : SparkCluster
    pairs : Pairs
    feed : FeedGroup
        Group of one feed.
    job : int
        Job number, which is part of the spools' names.

    Attributes
    ----------
    handles : JavaPairRDD
        One frame per partition, persisted by Spark.
    """

    def __init__(self, cluster: SparkCluster, pairs: Pairs, feed: FeedGroup, job: int):
        self._pairs, self._close = pairs, lambda: None
        source, reader = self._source(cluster, feed)
        self.handles = pairs.mapped(source, _spooler(reader, job, pairs.partitions))
        pairs.keep(self.handles)

    def _source(self, cluster, feed):
        """Return the feed's data as pairs by shard, and the reader that tasks use for it."""
        ((name, only),) = feed.feeds.items()
        if isinstance(only, PackedFeed) and only.needs_packing(cluster):
            frame, specs, self._close = only.cells(0, self._pairs.partitions)
            cells = frame.rdd.map(tuple)
            return self._pairs.taken(cells, _send_cells), packed_reader([name], [specs])
        plan = only.prepare(cluster, self._pairs.partitions, name=name)
        if plan.frame is not None:
            plan.close()
            raise UsageError(
                f"A {only.kind} cannot feed transport='shuffle'; use transport='barrier'",
                code="data-type",
            )
        self._close = plan.close
        return self._pairs.tokens(), plan.reader

    def renew(self) -> None:
        """Discard the handles, so that the spools are written again when needed."""
        self._pairs.drop(self.handles)
        self._pairs.keep(self.handles)

    def close(self) -> None:
        """Remove the spools and unpersist the handles."""

        def remove(frames):
            from bigdl.orca.parameter_layer.rank import close_replicas
            from bigdl.runtime.shards.shard import remove_spool

            close_replicas()
            for frame in frames:
                doc = FrameReader([frame]).document(b"H")
                for spool in doc["spools"].values():
                    remove_spool(spool["path"])
                remove_spool(doc["messages"])

        try:
            self._pairs.values(self.handles).foreachPartition(remove)
        finally:
            self._pairs.drop(self.handles)
            self._close()


def _send_cells(index, cells):
    """Yield each serialized data cell after the key of the shard that it belongs to."""
    for cell in cells:
        yield key(cell[0])
        yield pack(cell)


def _batches(frames):
    """Deserialize data cells and yield each one as an Arrow record batch for the reader."""
    for frame in frames:
        *position, data = unpack(frame)
        yield one_row([*position, data.tobytes()], CELL)


def folder_of_messages(job: int) -> str:
    """Return the folder where tasks of this executor exchange messages in files.

    It is named like a spool, so the next job removes its remaining files.
    """
    return os.path.join(task_directory(), f"bigdl-spool-{job}-messages")


def _spooler(reader, job, partitions):
    """Return the task that spools the rows of a partition and yields their handle."""
    spec = SimpleNamespace(reader=reader, job=job, active_jobs=active_jobs(), world_size=partitions)

    def write(index, frames):
        import socket

        directory = task_directory(index)
        frames = (frame for frame in frames if len(frame))  # a token is empty
        try:
            shards = read_input(spec, _batches(frames), index, directory)
        except UsageError as error:
            raise reported({"rank": index, **describe(error)}) from None
        spools = {name: shard.spool.to_json() for name, shard in shards.items()}
        doc = {
            "host": socket.gethostname(),
            "executor": directory,
            "messages": folder_of_messages(job),
            "version": [spool["nonce"] for spool in spools.values()],
            "spools": spools,
        }
        (frame,) = frames_of(b"H", index, pack(doc))
        yield key(index)
        yield frame

    return write
