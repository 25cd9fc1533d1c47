"""Raw bytes through Spark's RDDs: pairs of an integer and bytes in the JVM, no Python pickles.

PySpark's own ``partitionBy`` pickles batches of objects.  Here a Python task yields a key (8 bytes)
and a value in turn, as ``PairwiseRDD`` of PySpark reads them, and the value goes through the JVM as
the byte array that it is.  Everything that reaches into PySpark's private side is in this module.

A group of steps is dozens of RDDs, and for each of them PySpark asks the JVM some thirty questions,
a quarter of a millisecond each, most of which have the same answer every time.  Here what does not
change is asked once.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

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
    are_small : bool
        Whether the values of a partition are a few megabytes at most. Then what counts is how many
        objects a task makes, not how often it copies bytes.
    """

    def __init__(self, sc, partitions: int, *, are_small: bool = False):
        self.sc, self.partitions, self._are_small = sc, partitions, are_small
        self._jvm = _Jvm(sc)
        # the second argument tells partitioners apart: equal ones make no second shuffle
        self._partitioner = sc._jvm.PythonPartitioner(partitions, id(_same))
        # Java's own copies large arrays once more than Kryo does, but a task makes two of Kryo's
        # for itself, which takes longer than all else that it does
        serializers, conf = sc._jvm.org.apache.spark.serializer, sc._jsc.sc().conf()
        self._for_large = serializers.KryoSerializer(conf)
        self._serializer = serializers.JavaSerializer(conf) if are_small else self._for_large

    def tokens(self):
        """Pairs (n, b""): a place to begin with."""

        def begin(index, items):
            for _ in items:
                pass
            yield key(index)
            yield b""

        return self.taken(self.sc.parallelize(range(self.partitions), self.partitions), begin)

    def taken(self, rdd, task: Callable):
        """Pairs from any RDD of PySpark: what ``task(index, items)`` yields, by key."""
        raw = rdd.mapPartitionsWithIndex(task)
        raw._bypass_serializer = True
        return self._by_key(raw._jrdd.rdd(), self._for_large)

    def shuffled(self, pairs, task: Callable):
        """What ``task(index, values)`` yields, each value in the partition of its key."""
        # if it said that it preserves the partitioning, Spark would silently skip the shuffle
        raw = self._jvm.python_rdd(pairs, task, preserves_partitioning=False)
        return self._by_key(raw, self._serializer)

    def mapped(self, pairs, task: Callable):
        """What ``task(index, values)`` yields, all of it in the partition that it runs for."""
        raw = self._jvm.python_rdd(pairs, task, preserves_partitioning=True)
        return self._jvm.pairs_of(raw).asJavaPairRDD()

    def _by_key(self, raw, serializer):
        pairs = self._jvm.pairs_of(raw).asJavaPairRDD().partitionBy(self._partitioner)
        pairs.rdd().setSerializer(serializer)
        return pairs

    def values(self, pairs):
        """The values as an RDD of PySpark, whose tasks get them as bytes."""
        from pyspark.rdd import RDD
        from pyspark.serializers import NoOpSerializer

        return RDD(self._jvm.values_of(pairs), self.sc, NoOpSerializer())

    def on_lines(self, pairs, first: int, last: int):
        """Those whose keys are on some lines, all from 1 on; of small ones all.

        A filter costs the driver more than a task that is given too much and looks for itself.
        """
        if self._are_small:
            return pairs
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

    def remove_shuffles(self, shuffled: Sequence) -> None:
        """Remove the files of shuffles that nobody will read again."""
        with contextlib.suppress(Exception):
            cleaner = self.sc._jsc.sc().cleaner().get()
            for each in shuffled:
                number = each.rdd().dependencies().head().shuffleId()
                cleaner.doCleanupShuffle(number, False)


class _Jvm:
    """Makers of RDDs in the JVM, each looked up once."""

    def __init__(self, sc):
        self._sc = sc
        self.values_of = sc._jvm.PythonRDD.valueOfPair
        self.pairs_of = sc._jvm.PairwiseRDD
        self._python_rdd = sc._jvm.PythonRDD
        self._function = sc._jvm.SimplePythonFunction
        self._given: dict[str, tuple[Any, Any]] = {}  # to functions: in Python, in the JVM

    def python_rdd(self, pairs, task: Callable, *, preserves_partitioning: bool):
        """What a task makes of the values of each partition of `pairs`."""
        from pyspark.core.rdd import _prepare_for_python_RDD
        from pyspark.serializers import NoOpSerializer

        sc, raw = self._sc, NoOpSerializer()
        command, broadcasts, variables, includes = _prepare_for_python_RDD(
            sc, (task, None, raw, raw)
        )
        function = self._function(
            bytearray(command),
            self._kept("variables", dict(variables)),
            self._kept("includes", list(includes)),
            sc.pythonExec,
            sc.pythonVer,
            self._kept("broadcasts", broadcasts),
            sc._javaAccumulator,
        )
        source = self.values_of(pairs).rdd()
        return self._python_rdd(source, function, preserves_partitioning, False)

    def _kept(self, name, value):
        """A list or dict as an object of the JVM, made anew only when it has changed."""
        from py4j.java_collections import ListConverter, MapConverter

        known = self._given.get(name)
        if known is None or known[0] != value:
            converter = MapConverter() if isinstance(value, dict) else ListConverter()
            made = converter.convert(value, self._sc._gateway._gateway_client)
            known = self._given[name] = value, made
        return known[1]
