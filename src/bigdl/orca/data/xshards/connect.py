"""RDD-like collections of Python objects over Spark Connect, stored in a DataFrame.

Spark Connect has no RDDs.  Here objects are pickled into the rows of a DataFrame, large ones into
several rows, and functions are applied with ``mapInArrow``.  Consecutive functions run in one task
without pickling in between, as with RDDs.  Persisting elements persists the DataFrame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import cloudpickle

from bigdl.orca.cluster.connect import ConnectCluster, active_spark, refuse
from bigdl.orca.cluster.pieces import PIECES, pieces, pieces_frame, whole_values
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.spark_calls import one_row
from bigdl.orca.cluster.versions import by_partition, frame_of_rows, to_arrow

if TYPE_CHECKING:
    from pyspark import RDD, StorageLevel
    from pyspark.sql import DataFrame

Function = Callable[[int, Iterable], Iterable]
Decode = Callable[[Iterable], Iterator]


def _unpickled(batches: Iterable) -> Iterator:
    for _, data in whole_values(batches):
        yield cloudpickle.loads(data)


def _rows(batches: Iterable) -> Iterator[tuple]:
    """Convert record batches to Spark ``Row`` objects."""
    from pyspark.sql import Row

    for batch in batches:
        row = Row(*batch.schema.names)
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield row(*values)


class ConnectShards:
    """RDD-like collection of elements of any type, stored in the partitions of a DataFrame.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Frame whose rows are decoded to elements.
    functions : sequence of callable
        Functions ``function(partition, elements)`` that are applied in this order.
    partitions : int, optional
        Number of partitions, if known.
    decode : callable
        Function that decodes the record batches of a partition to elements.
    """

    context: None = None
    """Always None: Spark Connect has no SparkContext."""

    def __init__(
        self,
        frame: DataFrame,
        functions: Sequence[Function] = (),
        partitions: int | None = None,
        decode: Decode = _unpickled,
    ):
        self._source, self._functions, self._decode = frame, tuple(functions), decode
        self._partitions = partitions
        self._cached_frame: DataFrame | None = None
        self.is_cached = False

    @classmethod
    def of_rows(cls, frame: DataFrame) -> ConnectShards:
        """Create a collection of a DataFrame's rows; vectors become dicts of their fields."""
        return cls(frame, decode=_rows)

    # -- narrow functions --------------------------------------------------------------------------

    def mapPartitionsWithIndex(
        self, func: Function, preservesPartitioning: bool = False
    ) -> ConnectShards:
        """Return the elements of ``func(partition, elements)`` for each partition."""
        if self.is_cached:
            return ConnectShards(self._frame(), (func,), self._partitions)
        functions = (*self._functions, func)
        return ConnectShards(self._source, functions, self._partitions, self._decode)

    def mapPartitions(self, func: Callable, preservesPartitioning: bool = False) -> ConnectShards:
        """Return the elements of ``func(elements)`` for each partition."""
        return self.mapPartitionsWithIndex(lambda partition, elements: func(elements))

    def map(self, func: Callable) -> ConnectShards:
        """Return ``func(element)`` for every element."""
        return self.mapPartitions(lambda elements: map(func, elements))

    def flatMap(self, func: Callable) -> ConnectShards:
        """Return the elements of ``func(element)`` for every element."""
        return self.mapPartitions(
            lambda elements: itertools.chain.from_iterable(map(func, elements))
        )

    def filter(self, func: Callable) -> ConnectShards:
        """Return the elements for which `func` is true."""
        return self.mapPartitions(lambda elements: filter(func, elements))

    # -- between partitions ------------------------------------------------------------------------

    def partitionBy(self, number: int, func: Callable[[Any], int] = int) -> ConnectShards:
        """Move each ``(key, value)`` pair to partition ``func(key)``."""
        moved = by_partition(self._cells(lambda pair: func(pair[0])), number, "target")
        return ConnectShards(moved, (), number)

    def zip(self, other: ConnectShards) -> ConnectShards:
        """Return pairs of the elements of two collections with equal partitions."""
        number = self.getNumPartitions()
        if number != other.getNumPartitions():
            raise ValueError("Can only zip with RDD which has the same number of partitions")

        def tag_elements(side: int) -> Function:
            return lambda partition, elements: (
                (partition, ((i, side), element)) for i, element in enumerate(elements)
            )

        cells = [
            shards.mapPartitionsWithIndex(tag_elements(side))._cells(lambda pair: pair[0])
            for side, shards in enumerate((self, other))
        ]

        def pairs(moved: Iterable) -> Iterator[tuple]:
            ordered = sorted((value for _, value in moved), key=lambda each: each[0])
            for left, right in itertools.zip_longest(ordered[::2], ordered[1::2]):
                if right is None or left[0][0] != right[0][0]:
                    raise ValueError(
                        "Can only zip RDDs with same number of elements in each partition"
                    )
                yield left[1], right[1]

        moved = by_partition(cells[0].union(cells[1]), number, "target")
        return ConnectShards(moved, (), number).mapPartitions(pairs)

    def reduceByKey(self, func: Callable) -> ConnectShards:
        """Reduce the values of each key with `func`; return all pairs in one partition."""

        def reduced(pairs: Iterable) -> Iterator[tuple]:
            by_key: dict = {}
            for key, value in pairs:
                by_key[key] = func(by_key[key], value) if key in by_key else value
            yield from by_key.items()

        def with_one_key(pairs: Iterable) -> Iterator[tuple]:
            return ((0, pair) for pair in pairs)

        moved = self.mapPartitions(reduced).mapPartitions(with_one_key).partitionBy(1)
        return moved.map(lambda pair: pair[1]).mapPartitions(reduced)

    # -- actions -----------------------------------------------------------------------------------

    def getNumPartitions(self) -> int:
        """Return the number of partitions; if it is unknown, a job counts them."""
        if self._partitions is None:
            counted = self.mapPartitions(lambda elements: [sum(1 for _ in elements)])
            self._partitions = len(counted.collect())
        return self._partitions

    def collect(self) -> list:
        """Return all elements, in order."""
        return list(_unpickled(to_arrow(self._frame()).to_batches()))

    def take(self, number: int) -> list:
        """Return the first elements, fetched from every partition."""
        some = self.mapPartitions(lambda elements: itertools.islice(elements, number))
        return some.collect()[:number]

    def toLocalIterator(self) -> Iterator:
        """Return an iterator over the elements, in order."""
        return iter(self.collect())

    def to_frame(self, schema: str) -> DataFrame:
        """Convert elements, which must be tuples, to a DataFrame with a simple DDL schema."""
        run = self._run()

        def work(batches: Iterable) -> Iterator:
            for element in run(batches):
                yield one_row(element, schema)

        return self._source_frame().mapInArrow(work, schema)

    def saveAsPickleFile(self, path: str, batchSize: int = 10) -> NoReturn:
        """Raise UsageError: Spark Connect cannot write Hadoop sequence files."""
        refuse("save_pickle", "write the rows as Parquet by to_spark_df().write.parquet(path)")

    # -- persistence -------------------------------------------------------------------------------

    def persist(self, level: StorageLevel) -> None:
        """Persist the elements when they are computed."""
        self._frame().persist(level)
        self.is_cached = True

    def unpersist(self) -> None:
        """Release the persisted elements."""
        self._frame().unpersist()
        self.is_cached = False

    @property
    def ctx(self) -> SimpleNamespace:
        """Object that reports whether the session is running, like a SparkContext."""
        session: Any = self._source.sparkSession
        return SimpleNamespace(_jsc=None if session.is_stopped else session)

    @property
    def _jrdd(self) -> DataFrame:
        """DataFrame whose ``unpersist`` releases the elements."""
        return self._frame()

    # -- as DataFrames -----------------------------------------------------------------------------

    def _source_frame(self) -> DataFrame:
        return self._frame() if self.is_cached else self._source

    def _run(self) -> Callable[[Iterable], Iterator]:
        """Return a picklable function that computes a partition's elements from its batches."""
        functions = () if self.is_cached else self._functions
        decode = _unpickled if self.is_cached else self._decode

        def run(batches: Iterable) -> Iterator:
            from pyspark import TaskContext

            context: Any = TaskContext.get()
            elements: Iterable = decode(batches)
            for function in functions:
                elements = function(context.partitionId(), elements)
            yield from elements

        return run

    def _frame(self) -> DataFrame:
        """Return the elements as a DataFrame of pickled pieces, which is created only once."""
        if self._cached_frame is None:
            is_encoded = not self._functions and self._decode is _unpickled
            self._cached_frame = self._source if is_encoded else self._cells(lambda element: 0)
        return self._cached_frame

    def _cells(self, target: Callable[[Any], int]) -> DataFrame:
        """Return a DataFrame of pickled elements with target partitions ``target(element)``."""
        run = self._run()

        def work(batches: Iterable) -> Iterator:
            from pyspark import TaskContext

            context = TaskContext.get()
            source = 0 if context is None else context.partitionId()
            for number, element in enumerate(run(batches)):
                yield from pieces(target(element), (source, number), cloudpickle.dumps(element))

        return self._source_frame().mapInArrow(work, PIECES)


def parallelize(elements: Sequence, number: int) -> RDD:
    """Distribute local objects over `number` partitions of the active Spark session."""
    cluster = active_spark()
    if not isinstance(cluster, ConnectCluster):
        return cluster.sc.parallelize(elements, number)
    values = (
        (index * number // max(len(elements), 1), (0, index), cloudpickle.dumps(element))
        for index, element in enumerate(elements)
    )
    frame = by_partition(pieces_frame(cluster.spark, values), number, "target")
    return cast("RDD", ConnectShards(frame, (), number))  # with the methods of an RDD


def frame_of(tuples: Iterable[tuple] | ConnectShards, schema: str) -> DataFrame:
    """Convert tuples, local or in ConnectShards, to a DataFrame with a schema given as DDL text."""
    if isinstance(tuples, ConnectShards):
        return tuples.to_frame(schema)
    spark = active_spark().spark
    return frame_of_rows(spark, tuples, schema)


def rows_of(frame: DataFrame) -> RDD:
    """Return the rows of a DataFrame as an RDD or ConnectShards."""
    return cast("RDD", ConnectShards.of_rows(frame)) if is_connect(frame) else frame.rdd
