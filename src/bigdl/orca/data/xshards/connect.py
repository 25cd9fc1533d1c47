"""Python objects in the partitions of a DataFrame, with the methods of an RDD that XShards call.

Over Spark Connect there are no RDDs. Here an object is pickled into the rows of a DataFrame, large
ones in several, and functions run over them by ``mapInArrow``.  Functions that follow each other
run in one task without pickling in between, as with RDDs; what is kept is a persisted DataFrame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle

from bigdl.orca.cluster.connect import ConnectCluster, active_spark, refuse
from bigdl.orca.cluster.pieces import PIECES, pieces, pieces_frame, whole_values
from bigdl.orca.cluster.plan import is_connect
from bigdl.orca.cluster.spark_calls import one_row
from bigdl.orca.cluster.versions import by_partition, frame_of_rows, to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Function = Callable[[int, Iterable], Iterable]
Decode = Callable[[Iterable], Iterator]


def _unpickled(batches: Iterable) -> Iterator:
    for _, data in whole_values(batches):
        yield cloudpickle.loads(data)


def _rows(batches: Iterable) -> Iterator[tuple]:
    """The rows of batches, as Spark has them in this process."""
    from pyspark.sql import Row

    for batch in batches:
        row = Row(*batch.schema.names)
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield row(*values)


class ConnectShards:
    """Elements of any kind, in the partitions of a DataFrame.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Whose rows are decoded to elements.
    functions : sequence of callable
        ``function(partition, elements)``, one after the other, make these elements of those.
    partitions : int, optional
        Their number, where it is known.
    decode : callable
        Makes elements of the record batches of a partition.
    """

    context: None = None
    """There is no SparkContext."""

    def __init__(
        self,
        frame: DataFrame,
        functions: Sequence[Function] = (),
        partitions: int | None = None,
        decode: Decode = _unpickled,
    ):
        self._source, self._functions, self._decode = frame, tuple(functions), decode
        self._partitions = partitions
        self._made: DataFrame | None = None
        self.is_cached = False

    @classmethod
    def of_rows(cls, frame: DataFrame) -> ConnectShards:
        """The rows of a DataFrame; a vector is a dict of its parts."""
        return cls(frame, decode=_rows)

    # -- narrow functions --------------------------------------------------------------------------

    def mapPartitionsWithIndex(
        self, func: Function, preservesPartitioning: bool = False
    ) -> ConnectShards:
        """Elements of ``func(partition, elements)``."""
        if self.is_cached:
            return ConnectShards(self._frame(), (func,), self._partitions)
        functions = (*self._functions, func)
        return ConnectShards(self._source, functions, self._partitions, self._decode)

    def mapPartitions(self, func: Callable, preservesPartitioning: bool = False) -> ConnectShards:
        """Elements of ``func(elements)``."""
        return self.mapPartitionsWithIndex(lambda partition, elements: func(elements))

    def map(self, func: Callable) -> ConnectShards:
        """``func(element)`` of every element."""
        return self.mapPartitions(lambda elements: map(func, elements))

    def flatMap(self, func: Callable) -> ConnectShards:
        """The elements of ``func(element)`` of every element."""
        return self.mapPartitions(
            lambda elements: itertools.chain.from_iterable(map(func, elements))
        )

    def filter(self, func: Callable) -> ConnectShards:
        """The elements for which `func` is true."""
        return self.mapPartitions(lambda elements: filter(func, elements))

    # -- between partitions ------------------------------------------------------------------------

    def partitionBy(self, number: int, func: Callable[[Any], int] = int) -> ConnectShards:
        """Pairs, moved to the partition that ``func(key)`` names."""
        moved = by_partition(self._cells(lambda pair: func(pair[0])), number, "target")
        return ConnectShards(moved, (), number)

    def zip(self, other: ConnectShards) -> ConnectShards:
        """Pairs of the elements of two that have as many partitions and elements in each."""
        number = self.getNumPartitions()
        if number != other.getNumPartitions():
            raise ValueError("Can only zip with RDD which has the same number of partitions")

        def placed(side: int) -> Function:
            return lambda partition, elements: (
                (partition, ((i, side), element)) for i, element in enumerate(elements)
            )

        cells = [
            shards.mapPartitionsWithIndex(placed(side))._cells(lambda pair: pair[0])
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
        """Pairs of each key and its values, reduced by `func`, in one partition."""

        def reduced(pairs: Iterable) -> Iterator[tuple]:
            by_key: dict = {}
            for key, value in pairs:
                by_key[key] = func(by_key[key], value) if key in by_key else value
            yield from by_key.items()

        def keyless(pairs: Iterable) -> Iterator[tuple]:
            return ((0, pair) for pair in pairs)

        moved = self.mapPartitions(reduced).mapPartitions(keyless).partitionBy(1)
        return moved.map(lambda pair: pair[1]).mapPartitions(reduced)

    # -- what is in them ---------------------------------------------------------------------------

    def getNumPartitions(self) -> int:
        """Number of partitions; of a DataFrame of others a job counts them."""
        if self._partitions is None:
            counted = self.mapPartitions(lambda elements: [sum(1 for _ in elements)])
            self._partitions = len(counted.collect())
        return self._partitions

    def collect(self) -> list:
        """All elements, in order."""
        return list(_unpickled(to_arrow(self._frame()).to_batches()))

    def take(self, number: int) -> list:
        """The first elements; every partition gives its first."""
        some = self.mapPartitions(lambda elements: itertools.islice(elements, number))
        return some.collect()[:number]

    def toLocalIterator(self) -> Iterator:
        """The elements, in order."""
        return iter(self.collect())

    def to_frame(self, schema: str) -> DataFrame:
        """A DataFrame of elements that are tuples, in the types of :func:`one_row`."""
        run = self._run()

        def work(batches: Iterable) -> Iterator:
            for element in run(batches):
                yield one_row(element, schema)

        return self._source_frame().mapInArrow(work, schema)

    def saveAsPickleFile(self, path: str, batchSize: int = 10) -> NoReturn:
        """Refused: it writes Hadoop's sequence files."""
        refuse("save_pickle", "write the rows as Parquet by to_spark_df().write.parquet(path)")

    # -- what is kept ------------------------------------------------------------------------------

    def persist(self, level: Any) -> None:
        """Keep the elements once they are computed."""
        self._frame().persist(level)
        self.is_cached = True

    def unpersist(self) -> None:
        """Free the elements."""
        self._frame().unpersist()
        self.is_cached = False

    @property
    def ctx(self) -> Any:
        """The object that says whether the session still runs, as a SparkContext does."""
        session: Any = self._source.sparkSession
        return SimpleNamespace(_jsc=None if session.is_stopped else session)

    @property
    def _jrdd(self) -> DataFrame:
        """The object that frees the elements."""
        return self._frame()

    # -- as DataFrames -----------------------------------------------------------------------------

    def _source_frame(self) -> DataFrame:
        return self._frame() if self.is_cached else self._source

    def _run(self) -> Callable[[Iterable], Iterator]:
        """Return a function that makes a partition's elements of its row batches; goes by value."""
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
        """The elements as rows of pieces; the same DataFrame each time, so that it can be kept."""
        if self._made is None:
            is_made = not self._functions and self._decode is _unpickled
            self._made = self._source if is_made else self._cells(lambda element: 0)
        return self._made

    def _cells(self, target: Callable[[Any], int]) -> DataFrame:
        """The elements as pieces, each for the partition that `target` names."""
        run = self._run()

        def work(batches: Iterable) -> Iterator:
            from pyspark import TaskContext

            context = TaskContext.get()
            source = 0 if context is None else context.partitionId()
            for number, element in enumerate(run(batches)):
                yield from pieces(target(element), (source, number), cloudpickle.dumps(element))

        return self._source_frame().mapInArrow(work, PIECES)


def parallelize(elements: Sequence, number: int) -> Any:
    """Objects of this process in `number` partitions of the active Spark: an RDD, or the like."""
    cluster = active_spark()
    if not isinstance(cluster, ConnectCluster):
        return cluster.sc.parallelize(elements, number)
    values = (
        (index * number // max(len(elements), 1), (0, index), cloudpickle.dumps(element))
        for index, element in enumerate(elements)
    )
    frame = by_partition(pieces_frame(cluster.spark, values), number, "target")
    return ConnectShards(frame, (), number)


def frame_of(tuples: Any, schema: str) -> DataFrame:
    """A DataFrame of elements that are tuples, by Spark's text of its schema."""
    if isinstance(tuples, ConnectShards):
        return tuples.to_frame(schema)
    spark = active_spark().spark
    return frame_of_rows(spark, tuples, schema)


def rows_of(frame: DataFrame) -> Any:
    """The rows of a DataFrame: an RDD, or the like."""
    return ConnectShards.of_rows(frame) if is_connect(frame) else frame.rdd
