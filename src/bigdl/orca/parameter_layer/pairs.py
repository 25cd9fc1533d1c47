"""Raw bytes through Spark's RDDs, and the rows of a training in them.

PySpark's own ``partitionBy`` pickles batches of objects.  Here a Python task yields a key (8 bytes)
and a value in turn, as ``PairwiseRDD`` of PySpark reads them, and the value goes through the JVM as
the byte array that it is.  Everything that reaches into PySpark's private side is in this module.

A group of steps is dozens of RDDs, and for each of them PySpark asks the JVM some thirty questions,
a quarter of a millisecond each, most of which have the same answer every time.  Here what does not
change is asked once.

The rows go through one shuffle to N partitions.  A task writes a partition to a memory-mapped spool
in the executor's own directory, and what Spark caches is a *handle*: where the spool is, and on
which executor.  Spark runs the tasks of a step where the handle is cached; when the executor is
lost the handle is lost with it, so Spark computes it again from the shuffled rows, elsewhere, and
with it the spool.
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
    from py4j.java_gateway import JVMView
    from pyspark import RDD, SparkContext

    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.feeds.group import FeedGroup

_KEY = struct.Struct(">q")
_LINE = 33  # py4j gives Java a Long, and no Integer, only for what does not fit in 32 bits


def key(partition: int, line: int = 0) -> bytes:
    """The key of a partition, as a task yields it before a value.

    Parameters
    ----------
    partition : int
    line : int
        Pairs on lines of their own can be picked by :meth:`Pairs.on_lines`.
    """
    return _KEY.pack((line << _LINE) + partition)


def _same(number):
    return number


class Pairs:
    """RDDs of pairs in N partitions, of which number n holds the pairs with key n.

    Parameters
    ----------
    sc : pyspark.SparkContext
    partitions : int
    are_small : bool
        True if the values of a partition are a few megabytes at most. Then what counts is how many
        objects a task makes, not how often it copies bytes.
    """

    def __init__(self, sc: SparkContext, partitions: int, *, are_small: bool = False):
        self.sc, self.partitions, self._are_small = sc, partitions, are_small
        # the second argument tells partitioners apart: equal ones make no second shuffle
        jvm: JVMView = sc._jvm
        # makers of RDDs, each looked up once
        self._values_of, self._pairs_of = jvm.PythonRDD.valueOfPair, jvm.PairwiseRDD
        self._jvm_rdd, self._function = jvm.PythonRDD, jvm.SimplePythonFunction
        self._converted: dict[str, tuple[Any, Any]] = {}  # for functions: in Python, in the JVM
        self._partitioner = jvm.PythonPartitioner(partitions, id(_same))
        # Java's own copies large arrays once more than Kryo does, but a task makes two of Kryo's
        # for itself, which takes longer than all else that it does
        serializers, conf = jvm.org.apache.spark.serializer, sc._jsc.sc().conf()
        self._for_large = serializers.KryoSerializer(conf)
        self._serializer = serializers.JavaSerializer(conf) if are_small else self._for_large

    def tokens(self) -> Any:
        """Pairs (n, b""): a place to begin with."""

        def begin(index, items):
            read_to_end(items)
            yield key(index)
            yield b""

        return self.taken(self.sc.parallelize(range(self.partitions), self.partitions), begin)

    def taken(self, rdd: RDD, task: Callable) -> Any:
        """Pairs from any RDD of PySpark: what ``task(index, items)`` yields, by key."""
        raw: Any = rdd.mapPartitionsWithIndex(task)
        raw._bypass_serializer = True
        return self._by_key(raw._jrdd.rdd(), self._for_large)

    def shuffled(self, pairs: Any, task: Callable) -> Any:
        """Return what ``task(index, values)`` yields, each value in the partition of its key."""
        # if it said that it preserves the partitioning, Spark would silently skip the shuffle
        raw = self._python_rdd(pairs, task, preserves_partitioning=False)
        return self._by_key(raw, self._serializer)

    def mapped(self, pairs: Any, task: Callable) -> Any:
        """Return what ``task(index, values)`` yields, all in the partition that it runs for."""
        raw = self._python_rdd(pairs, task, preserves_partitioning=True)
        return self._pairs_of(raw).asJavaPairRDD()

    def _by_key(self, raw, serializer):
        pairs = self._pairs_of(raw).asJavaPairRDD().partitionBy(self._partitioner)
        pairs.rdd().setSerializer(serializer)
        return pairs

    def values(self, pairs: Any) -> RDD:
        """The values as an RDD of PySpark, whose tasks get them as bytes."""
        from pyspark.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        return RDD(self._values_of(pairs), self.sc, NoOpSerializer())

    def on_lines(self, pairs: Any, first: int, last: int) -> Any:
        """Return the pairs whose keys are on some lines, all from 1 on; of small ones all.

        A filter costs the driver more than a task that is given too much and looks for itself.
        """
        if self._are_small:
            return pairs
        return pairs.filterByRange(first << _LINE, ((last + 1) << _LINE) - 1)

    def keep(self, pairs: Any, copies: int = 1) -> None:
        """Let Spark keep them in memory, or on disk, once they are computed."""
        from pyspark import StorageLevel

        pairs.persist(self.sc._getJavaStorageLevel(StorageLevel(True, True, False, True, copies)))

    def forget_lineage(self, pairs: Any) -> None:
        """Never compute them again: what they were made of may be removed."""
        pairs.rdd().localCheckpoint()

    def drop(self, pairs: Any) -> None:
        """Drop what was kept."""
        with contextlib.suppress(Exception):
            pairs.unpersist(False)

    def drop_for_good(self, pairs: Any) -> None:
        """Drop pairs without lineage; their own ``unpersist`` would warn of what is meant."""
        with contextlib.suppress(Exception):
            self.sc._jsc.sc().unpersistRDD(pairs.rdd().id(), False)

    def remove_shuffles(self, shuffled: Sequence) -> None:
        """Remove the files of shuffles that nobody will read again."""
        with contextlib.suppress(Exception):
            cleaner = self.sc._jsc.sc().cleaner().get()
            for each in shuffled:
                number = each.rdd().dependencies().head().shuffleId()
                cleaner.doCleanupShuffle(number, False)

    def _python_rdd(self, pairs, task: Callable, *, preserves_partitioning: bool):
        """Return the RDD that a task makes of the values of each partition of `pairs`."""
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
        """A list or dict as an object of the JVM, made anew only when it has changed."""
        from py4j.java_collections import ListConverter, MapConverter

        entry = self._converted.get(name)
        if entry is None or entry[0] != value:
            converter = MapConverter() if isinstance(value, dict) else ListConverter()
            converted = converter.convert(value, self.sc._gateway._gateway_client)
            entry = self._converted[name] = value, converted
        return entry[1]


class SpooledRows:
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

    def __init__(self, cluster: SparkCluster, pairs: Pairs, feed: FeedGroup, job: int):
        self._pairs, self._close = pairs, lambda: None
        source, reader = self._source(cluster, feed)
        self.handles = pairs.mapped(source, _spooler(reader, job, pairs.partitions))
        pairs.keep(self.handles)

    def _source(self, cluster, feed):
        """Pairs of cells by shard, and what reads them."""
        ((name, only),) = feed.feeds.items()
        if isinstance(only, PackedFeed) and only.travels(cluster):
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
        """Have the spools written again where they are needed next."""
        self._pairs.drop(self.handles)
        self._pairs.keep(self.handles)

    def close(self) -> None:
        """Remove the spools and what was kept."""

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
    """Cells, each under the number of its shard."""
    for cell in cells:
        yield key(cell[0])
        yield pack(cell)


def _batches(frames):
    """Cells as the record batches that a reader takes."""
    for frame in frames:
        *place, data = unpack(frame)
        yield one_row([*place, data.tobytes()], CELL)


def folder_of_messages(job: int) -> str:
    """Where the tasks of this executor find what they give each other in files.

    By its name a spool, so what is left there is removed when another job begins.
    """
    return os.path.join(task_directory(), f"bigdl-spool-{job}-messages")


def _spooler(reader, job, partitions):
    """The task that writes the rows of a partition to spools and yields the handle."""
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
            "executor": directory,  # of its own
            "messages": folder_of_messages(job),
            "version": [spool["nonce"] for spool in spools.values()],
            "spools": spools,
        }
        (frame,) = frames_of(b"H", index, pack(doc))
        yield key(index)
        yield frame

    return write
