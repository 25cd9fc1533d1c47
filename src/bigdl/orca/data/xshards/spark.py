"""XShards on Spark: one element of an RDD is one shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.xshards import exchange, persistence, pickles
from bigdl.orca.data.xshards.base import XShards
from bigdl.orca.data.xshards.frame_shards import FrameShards
from bigdl.orca.data.xshards.kinds import Summary, known_class_name, summarize
from bigdl.orca.data.xshards.shared_value import unwrap
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    from pyspark import RDD

__all__ = ["SparkXShards"]


class SparkXShards(FrameShards, XShards):
    """XShards whose shards are the elements of a Spark RDD.

    They are computed and kept (in memory, and on disk where that is short) when they are made, so
    that a function runs once on every shard; a random one gives the same shards each time they
    are read.  What was kept is released when nothing in the program refers to it any more.  Lazy
    ones (:meth:`lazy`, :meth:`to_lazy`, ``OrcaContext._eager_mode = False``) are computed again at
    every use.

    Parameters
    ----------
    rdd : pyspark.RDD
        One element is one shard.
    transient : bool, default False
        Neither compute nor keep these shards now.
    class_name : str, optional
        Class of the shards, when it is known, e.g. ``"pandas.core.frame.DataFrame"``.

    Attributes
    ----------
    rdd : pyspark.RDD
    eager : bool
        Whether the shards were computed and kept when they were made.
    is_lazy : bool
        Whether shards made of these are lazy too.
    transient : bool
    type : dict
        What is known of the shards: ``"class_name"`` and, of pandas frames, ``"schema"``.
    """

    def __init__(self, rdd: RDD, transient: bool = False, class_name: str | None = None):
        self._start(rdd, transient, class_name, is_lazy=False)

    def _start(self, rdd, transient, class_name, is_lazy):
        self.rdd = rdd
        self.transient = transient
        self.is_lazy = is_lazy
        self.eager = OrcaContext._eager_mode and not transient and not is_lazy
        self.type: dict[str, Any] = {}
        if class_name:
            self.type["class_name"] = known_class_name(class_name)
        self._summaries: list[Summary] | None = None
        if self.eager:
            self.compute()

    @classmethod
    def lazy(cls, rdd: RDD, class_name: str | None = None) -> SparkXShards:
        """XShards that are computed when they are used."""
        shards = cls.__new__(cls)
        shards._start(rdd, False, class_name, is_lazy=True)
        return shards

    def to_lazy(self) -> SparkXShards:
        """The same shards; what is made of them is lazy."""
        return SparkXShards.lazy(self.rdd, self.type.get("class_name"))

    def _derive(self, rdd, *others, class_name=None) -> SparkXShards:
        """XShards made of these, and of the RDDs `others`: lazy or computed at once like these."""
        persistence.hold(rdd, self.rdd, *others)
        if self.is_lazy:
            return SparkXShards.lazy(rdd, class_name)
        if not OrcaContext._eager_mode:
            return SparkXShards(rdd, class_name=class_name)
        return SparkXShards(persistence.detached(rdd), class_name=class_name)

    # What is kept --------------------------------------------------------------------------------

    def compute(self) -> SparkXShards:
        """Compute the shards and keep them; returns these XShards."""
        from bigdl.orca.cluster.plan import quiet

        persistence.persist(self.rdd)
        with quiet(self.rdd.context):  # the exception has the traceback of a failed task
            self._summary()
        return self

    def cache(self) -> SparkXShards:
        """Keep the shards from the next time they are computed; returns these XShards."""
        persistence.persist(self.rdd)
        return self

    def uncache(self) -> SparkXShards:
        """Free the shards that are kept: they are computed again when needed."""
        persistence.unpersist(self.rdd)
        return self

    def is_cached(self) -> bool:
        """Whether the shards are kept once they are computed."""
        return self.rdd.is_cached

    # What is in them -----------------------------------------------------------------------------

    def num_partitions(self) -> int:
        """Number of partitions."""
        return self.rdd.getNumPartitions()

    def collect(self) -> list:
        """All shards, in order."""
        return self.rdd.collect()

    def first(self) -> Any:
        """The first shard.

        Raises
        ------
        UsageError
            If there is none.
        """
        found = self.take(1)
        if not found:
            raise UsageError("There is no shard in these XShards")
        return found[0]

    def take(self, n: int) -> list:
        """The first `n` shards, or all if there are fewer."""
        return self.rdd.take(n)

    def __len__(self) -> int:
        """Sum of ``len`` of the shards, where one without a length counts as 1.

        So it is the number of rows of frames and arrays, and the number of keys of dicts.
        """
        return sum(sum(summary.lengths) for summary in self._summary())

    def _summary(self) -> list[Summary]:
        """What the shards of each partition are; computed once."""
        if self._summaries is None:
            self._summaries = self.rdd.mapPartitions(summarize).collect()
            for summary in self._summaries:
                if summary.classes:
                    self.type.setdefault("class_name", summary.classes[0])
                    if summary.schema is not None:
                        self.type.setdefault("schema", summary.schema)
                    break
        return self._summaries

    def _get_class_name(self) -> str | None:
        """Name of the class of the first shard; None if there is no shard."""
        if "class_name" not in self.type:
            self._summary()
        return self.type.get("class_name")

    # New ones ------------------------------------------------------------------------------------

    def transform_shard(self, func: Callable, *args: Any) -> SparkXShards:
        """New XShards of ``func(shard, *args)`` of every shard.

        Parameters
        ----------
        func : callable
        *args : object
            Further arguments; of a :class:`SharedValue` the function gets the value.
        """
        return self._derive(self.rdd.map(_Transform(func, args)))

    def __getitem__(self, key: Any) -> SparkXShards:
        """XShards of ``shard[key]``, computed when they are used.

        Raises
        ------
        UsageError
            If the shards cannot be indexed, or do not have `key`.
        """
        for shard in self.take(1):
            if not hasattr(shard, "__getitem__"):
                raise UsageError(
                    "No selection operation available for this XShards: its shards are "
                    f"{type(shard).__name__}"
                )
            try:
                shard[key]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise UsageError(
                    f"Invalid key for this XShards: {key!r}{_keys_of(shard)}"
                ) from error
        rdd = persistence.hold(self.rdd.map(_Select(key)), self.rdd)
        return SparkXShards.lazy(rdd) if self.is_lazy else SparkXShards(rdd, transient=True)

    def _for_each(self, func: Callable, *args: Any) -> RDD:
        """An RDD of ``func(shard, *args)``, where an exception is its own result."""
        return persistence.hold(self.rdd.map(_Attempt(func, args)), self.rdd)

    def split(self) -> list[SparkXShards]:
        """One XShards per item, if every shard is a list or tuple of equally many items.

        Otherwise a list of only these XShards.
        """
        counts = set(self.rdd.map(exchange.items).collect())
        if len(counts) != 1 or not all(counts):  # None, or nothing to split
            return [self]
        return [self._derive(self.rdd.map(_Select(i))) for i in range(counts.pop())]

    def zip(self, other: SparkXShards) -> SparkXShards:
        """XShards of tuples of a shard of these and the shard of `other` in its place.

        Raises
        ------
        UsageError
            If `other` is no SparkXShards, or has not as many partitions with as many shards.
        """
        if not isinstance(other, SparkXShards):
            raise UsageError(f"other should be a SparkXShards, got {type(other).__name__}")
        numbers = self.num_partitions(), other.num_partitions()
        if numbers[0] != numbers[1]:
            raise UsageError(
                "The two SparkXShards should have the same number of partitions, but they have "
                f"{numbers[0]} and {numbers[1]}; repartition one of them first"
            )
        sizes = [[len(part.lengths) for part in each._summary()] for each in (self, other)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                "The two SparkXShards should have the same number of elements in each partition, "
                f"but they have {sizes[0]} and {sizes[1]}"
            )
        return self._derive(self.rdd.zip(other.rdd), other.rdd, class_name="tuple")

    def repartition(self, num_partitions: int) -> SparkXShards:
        """The same rows, in the same order, in `num_partitions` partitions of equal size.

        Shards that can be cut by rows (pandas frames and Series, arrays, lists, and dicts of
        arrays of one length) are cut and joined: every partition has one shard, and the numbers of
        rows differ by at most 1.  Other shards stay whole.
        """
        number = exchange.check_partitions(num_partitions)
        rdd, class_name = exchange.repartition(self.rdd, self._summary(), number)
        return self._derive(rdd, class_name=class_name)

    def stack_feature_labels(self) -> SparkXShards:
        """Samples to batches: one shard ``{"x": ..., "y": ...}`` of float32 arrays per partition.

        A shard of these is one sample, ``(features, labels)`` or features alone.  Features and
        labels are arrays, or tuples, lists or dicts of them, as the arrays of the result are.
        """
        return self._derive(self.rdd.mapPartitions(exchange.stack_samples), class_name="dict")

    def save_pickle(self, path: str, batchSize: int = 10) -> SparkXShards:
        """Write the shards as a pickle file of Spark, which :meth:`load_pickle` reads.

        Parameters
        ----------
        path : str
            A directory that does not exist, of any file system that Spark knows.
        batchSize : int, default 10
            Shards that are pickled together.
        """
        pickles.save(self, path, batchSize)
        return self


class _Transform:
    def __init__(self, func, args):
        self._func, self._args = func, args

    def __call__(self, shard):
        return self._func(shard, *map(unwrap, self._args))


class _Attempt(_Transform):
    def __call__(self, shard):
        try:
            return super().__call__(shard)
        except Exception as error:
            return error


class _Select:
    def __init__(self, key):
        self._key = key

    def __call__(self, shard):
        return shard[self._key]


def _keys_of(shard):
    names = getattr(shard, "columns", shard.keys() if isinstance(shard, dict) else None)
    return "" if names is None else f", not one of {list(names)}"
