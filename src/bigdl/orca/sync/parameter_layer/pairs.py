"""Raw bytes through Spark's RDDs: pairs of an integer and bytes in the JVM, no Python pickles.

PySpark's own ``partitionBy`` pickles batches of objects.  Here a Python task yields a key (8 bytes)
and a value in turn, as ``PairwiseRDD`` of PySpark reads them, and the value goes through the JVM as
the byte array that it is.  Everything that reaches into PySpark's private side is in this module.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

__all__ = ["Pairs", "key"]

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
    """

    def __init__(self, sc, partitions: int):
        self.sc, self.partitions = sc, partitions
        # the second argument tells partitioners apart: equal ones make no second shuffle
        self._partitioner = sc._jvm.PythonPartitioner(partitions, id(_same))
        # Java's own copies large arrays once more than Kryo does
        kryo = sc._jvm.org.apache.spark.serializer.KryoSerializer
        self._serializer = kryo(sc._jsc.sc().conf())

    def tokens(self):
        """Pairs (n, b""): a place to begin with."""

        def begin(index, items):
            for _ in items:
                pass
            yield key(index)
            yield b""

        return self.shuffled(self.sc.parallelize(range(self.partitions), self.partitions), begin)

    def shuffled(self, rdd, task: Callable):
        """What ``task(index, items)`` yields, each value in the partition of its key."""
        pairs = self._paired(rdd, task, keep=False).partitionBy(self._partitioner)
        pairs.rdd().setSerializer(self._serializer)
        return pairs

    def mapped(self, pairs, task: Callable):
        """What ``task(index, values)`` yields, all of it in the partition that it runs for."""
        return self._paired(self.values(pairs), task, keep=True)

    def values(self, pairs):
        """The values as an RDD of PySpark, whose tasks get them as bytes."""
        from pyspark.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        return RDD(self.sc._jvm.PythonRDD.valueOfPair(pairs), self.sc, NoOpSerializer())

    def on_lines(self, pairs, first: int, last: int):
        """Those whose keys are on some lines, all from 1 on; Python has no part in it."""
        return pairs.filterByRange(first << _LINE, ((last + 1) << _LINE) - 1)

    def beside(self, pairs, others):
        """Both in one: partition n holds those of n of both, where the first ones are cached."""
        return pairs.union(others)

    def keep(self, pairs, copies: int = 1) -> None:
        """Let Spark keep them in memory, or on disk, once they are computed."""
        from pyspark import StorageLevel

        pairs.persist(self.sc._getJavaStorageLevel(StorageLevel(True, True, False, True, copies)))

    def forget_lineage(self, pairs) -> None:
        """Never compute them again: what they were made of may be removed."""
        pairs.rdd().localCheckpoint()

    def drop(self, pairs) -> None:
        """Let go of what was kept."""
        with contextlib.suppress(Exception):
            pairs.unpersist(False)

    def drop_for_good(self, pairs) -> None:
        """Let go of pairs without lineage; their own ``unpersist`` would warn of what is meant."""
        with contextlib.suppress(Exception):
            self.sc._jsc.sc().unpersistRDD(pairs.rdd().id(), False)

    def remove_shuffle(self, shuffled) -> None:
        """Remove the files of a shuffle that nobody will read again."""
        with contextlib.suppress(Exception):
            number = shuffled.rdd().dependencies().head().shuffleId()
            self.sc._jsc.sc().cleaner().get().doCleanupShuffle(number, False)

    def _paired(self, rdd, task, keep):
        # with preservesPartitioning an equal partitioner silently skips the shuffle
        raw = rdd.mapPartitionsWithIndex(task, preservesPartitioning=keep)
        raw._bypass_serializer = True
        return self.sc._jvm.PairwiseRDD(raw._jrdd.rdd()).asJavaPairRDD()
