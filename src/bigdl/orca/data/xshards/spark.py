"""XShards of any engine, those on Spark, and values that all of their tasks share."""

from __future__ import annotations

import dis
import hashlib
import inspect
import itertools
import json
import logging
import operator
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import and_, itemgetter, methodcaller
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import cloudpickle
import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import BigDLError, LazyModule, UsageError
from bigdl.common.storage import open_file_system, read_bytes, write_bytes
from bigdl.common.trust import untrusted, user_signature
from bigdl.orca.cluster.connect import ConnectCluster, active_spark, refuse
from bigdl.orca.cluster.plan import quiet
from bigdl.orca.cluster.ray import active_cluster, is_alone
from bigdl.orca.cluster.spark import spark_writing
from bigdl.orca.cluster.spark_calls import users_errors
from bigdl.orca.data.xshards import frames, persistence
from bigdl.orca.data.xshards.connect import parallelize
from bigdl.orca.data.xshards.frames import F
from bigdl.orca.data.xshards.shards import (
    DATA_FRAME,
    SERIES,
    FailedShard,
    PartitionSummary,
    collected,
    computing,
    keeping_failures,
    known_class_name,
    partition_by,
    repartition,
    stack_samples,
    summarize,
)
from bigdl.orca.settings import OrcaContext
from bigdl.runtime.shards.values import arrays_of, map_arrays, split_evenly

if TYPE_CHECKING:
    import pandas as pd
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame

    from bigdl.orca.data.xshards.ray import RayXShards
else:
    pd = LazyModule("pandas", "orca")

logger = logging.getLogger("bigdl.orca")

_SIGNATURES = "_bigdl_signatures"
"""A file beside pickles, which Spark does not read: the signature of each by its user."""


class XShards(ABC):
    """A collection of any size as shards: Python objects that plain functions transform.

    A shard is any object that can be pickled, most often a pandas DataFrame or arrays in a dict.
    XShards are made by :meth:`partition`, by the readers of ``bigdl.orca.data`` and from a Spark
    RDD whose elements are the shards.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import XShards
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = XShards.partition({"x": np.arange(4), "y": np.zeros(4)}, num_shards=2)
    >>> doubled = shards.transform_shard(lambda shard: {**shard, "x": shard["x"] * 2})
    >>> [shard["x"].tolist() for shard in doubled.collect()]
    [[0, 2], [4, 6]]
    """

    _on_ray: ClassVar[Any] = None  # RayXShards, which imports this module

    @abstractmethod
    def transform_shard(self, func: Callable, *args: Any) -> XShards:
        """New XShards of ``func(shard, *args)`` of every shard."""

    @abstractmethod
    def collect(self) -> list:
        """All shards, in order."""

    @abstractmethod
    def num_partitions(self) -> int:
        """Number of partitions, which are computed in parallel."""

    @staticmethod
    def load_pickle(
        path: str, minPartitions: int | None = None, *, trust: bool = False
    ) -> SparkXShards:
        """Load what ``save_pickle`` wrote.

        Unpickling runs code that the file names.  ``save_pickle`` signs its files, and those that
        another user wrote or that have changed since are loaded only on request.

        Parameters
        ----------
        path : str
            Directory, or a pattern of directories.
        minPartitions : int, optional
            Least number of partitions.
        trust : bool, default False
            Load files of others too, and do not read the files a first time for their signatures.

        Raises
        ------
        UsageError
            If the files are of others and `trust` is False.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> shards = XShards.partition(np.arange(4), num_shards=2).save_pickle("saved")
        >>> [shard.tolist() for shard in XShards.load_pickle("saved").collect()]
        [[0, 1], [2, 3]]
        """
        if not trust and not _are_signed(path):
            raise untrusted(path, "a folder of pickles", "pass trust=True")
        cluster = active_spark()
        if isinstance(cluster, ConnectCluster):
            refuse("load_pickle", "write the rows as Parquet, and read them with read_parquet")
        return SparkXShards(cluster.sc.pickleFile(path, minPartitions))

    @staticmethod
    def partition(data: Any, num_shards: int | None = None) -> SparkXShards | RayXShards:
        """Cut arrays in shards of nearly equal numbers of rows; with ``runtime="ray"``, on Ray.

        Parameters
        ----------
        data : numpy.ndarray, or a tuple, list or dict of them, nested or not
            All arrays have the same first dimension.  Every shard is a container like `data`.
        num_shards : int, optional
            Default: the cores of the cluster.

        Raises
        ------
        UsageError
            If there are fewer rows than shards, the arrays differ in their first dimension, or
            `data` holds something else.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> [len(shard) for shard in XShards.partition(np.arange(5), num_shards=2).collect()]
        [3, 2]
        """
        rows = _count_rows(data)
        cluster = active_cluster()
        if num_shards is None:
            num_shards = cluster.nodes * cluster.cores_per_node
        number = check_positive("num_shards", num_shards)
        if rows < number:
            raise UsageError(
                f"The size of the data, {rows} rows, is smaller than the total number of shards, "
                f"{number}; pass a smaller num_shards",
                code="argument-value",
                argument="num_shards",
            )
        cuts = split_evenly(rows, number)
        shards = [map_arrays(data, operator.itemgetter(slice(*ends))) for ends in cuts]
        return (XShards._on_ray if is_alone() else SparkXShards)._from_shards(shards)


def _count_rows(data: Any) -> int:
    """Return the first dimension of all arrays in `data`."""
    arrays = list(arrays_of(data))
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise UsageError(
                "The data should be a numpy array, or a tuple, list or dict of them, but got "
                f"{type(array).__name__} in it",
                code="data-type",
            )
        if array.ndim == 0:
            raise UsageError(
                "The arrays must have at least one dimension, but one has none", code="data-shape"
            )
    if not arrays:
        raise UsageError("There is no array in the data to partition", code="data-empty")
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) > 1:
        raise UsageError(
            "The arrays must all have the same size in first dimension, but they have "
            f"{sizes}; got arrays of the shapes {map_arrays(data, np.shape)}",
            code="data-shape",
        )
    return sizes[0]


class SharedValue:
    """A value for the functions given to ``transform_shard``, sent to every executor once.

    In a program with ``runtime="ray"`` it is in Ray's object store instead.

    ``transform_shard`` passes its :attr:`value` in the place of a SharedValue.

    Parameters
    ----------
    data : object
        Anything that cloudpickle can pickle, also of a class of the main program.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SharedValue, SparkXShards
    >>> sc = init_orca_context("local", cores=2)
    >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"name": ["a", "b", "a"]})], 1))
    >>> index = SharedValue({"a": 1, "b": 2})
    >>> def encode(frame, index):  # gets the dict itself
    ...     return frame.assign(code=frame["name"].map(index))
    >>> shards.transform_shard(encode, index).first()
      name  code
    0    a     1
    1    b     2
    2    a     1
    """

    def __init__(self, data: Any):
        # As bytes: Spark's own pickler does not know the classes of the main program.
        self.broadcast_data = active_cluster().broadcaster.broadcast(cloudpickle.dumps(data))
        self._data: tuple[Any] | None = (data,)

    def __getstate__(self) -> dict[str, Any]:
        return {"broadcast_data": self.broadcast_data, "_data": None}

    @property
    def value(self) -> Any:
        """The value; on a worker it is unpickled once per process."""
        if self._data is None:
            broadcast: Any = self.broadcast_data
            if not hasattr(broadcast, "_bigdl_value"):  # lives as long as Spark keeps the bytes
                broadcast._bigdl_value = (cloudpickle.loads(broadcast.value),)
            self._data = broadcast._bigdl_value
        return self._data[0]

    def unpersist(self) -> None:
        """Free the copies on the executors; they are sent again when needed."""
        self.broadcast_data.unpersist()


def unwrapped(func: Callable, args: Sequence[Any]) -> list[Any]:
    """Return arguments of a function of shards, with the values of SharedValues in their places.

    A function that was written for the SharedValue itself, as it reads ``argument.value``, gets it.
    """
    if not any(isinstance(each, SharedValue) for each in args):
        return list(args)
    takes_itself = _parameters_whose_value_is_read(func)
    return [
        each.value if isinstance(each, SharedValue) and place not in takes_itself else each
        for place, each in enumerate(args, start=1)
    ]


def _parameters_whose_value_is_read(func: Callable) -> set[int]:
    """Return the positions of parameters of which a function's code reads ``.value``."""
    func = getattr(func, "__func__", func)  # of a method, whose first parameter is its object
    code = getattr(inspect.unwrap(func), "__code__", None)
    if code is None:
        return set()
    names = code.co_varnames[: code.co_argcount]
    shift = 1 if names[:1] == ("self",) else 0
    found: set[str] = set()
    codes = [code]
    while codes:
        each = codes.pop()
        codes += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        steps = list(dis.get_instructions(each))
        for step, after in itertools.pairwise(steps):
            is_read = after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval == "value"
            if is_read and step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
                found.add(step.argval)
    return {place - shift for place, name in enumerate(names) if name in found}


class SparkXShards(XShards):
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
    is_lazy : bool, default False
        Neither compute nor keep these shards, nor those that are made of them.

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

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import SparkXShards
    >>> sc = init_orca_context("local", cores=2)
    >>> frames = [pd.DataFrame({"city": ["Oslo", "Rome"]}), pd.DataFrame({"city": ["Bern"]})]
    >>> shards = SparkXShards(sc.parallelize(frames, 2))
    >>> len(shards), shards.num_partitions()
    (3, 2)
    >>> shards["city"].unique()
    array(['Oslo', 'Rome', 'Bern'], dtype=object)
    """

    def __init__(
        self,
        rdd: RDD,
        transient: bool = False,
        class_name: str | None = None,
        *,
        is_lazy: bool = False,
    ):
        self.rdd = rdd
        self.transient = transient
        self.is_lazy = is_lazy
        self.eager = OrcaContext._eager_mode and not transient and not is_lazy
        self.type: dict[str, Any] = {}
        if class_name:
            self.type["class_name"] = known_class_name(class_name)
        self._summaries: list[PartitionSummary] | None = None
        if self.eager:
            self.compute()

    @classmethod
    def lazy(cls, rdd: RDD, class_name: str | None = None) -> SparkXShards:
        """XShards that are computed when they are used."""
        return cls(rdd, class_name=class_name, is_lazy=True)

    def to_lazy(self) -> SparkXShards:
        """The same shards; what is made of them is lazy."""
        return SparkXShards.lazy(self.rdd, self.type.get("class_name"))

    def _derive(self, rdd, *others, class_name=None) -> SparkXShards:
        """XShards made of these, and of the RDDs `others`: lazy or computed at once like these."""
        if OrcaContext._eager_mode and not self.is_lazy:
            rdd = keeping_failures(rdd)
            rdd = persistence.detached(rdd)
        else:
            persistence.hold(rdd, self.rdd, *others)
        return SparkXShards(rdd, class_name=class_name, is_lazy=self.is_lazy)

    # What is kept --------------------------------------------------------------------------------

    def compute(self) -> SparkXShards:
        """Compute the shards and keep them; returns these XShards.

        Raises
        ------
        WorkerError
            If the function that makes them has failed.
        """
        persistence.persist(self.rdd)
        sc = self.rdd.context
        with quiet(sc), computing(sc):  # the exception has the traceback of a failed task
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
        """Return True if the shards are kept once they are computed."""
        return self.rdd.is_cached

    # What is in them -----------------------------------------------------------------------------

    def num_partitions(self) -> int:
        """Number of partitions."""
        return self.rdd.getNumPartitions()

    def collect(self) -> list:
        """All shards, in order."""
        return collected(self.rdd)

    def first(self) -> Any:
        """The first shard.

        Raises
        ------
        UsageError
            If there is none.
        """
        for shard in self.take(1):
            return shard
        raise UsageError("There is no shard in these XShards", code="data-empty")

    def take(self, n: int) -> list:
        """The first `n` shards, or all if there are fewer."""
        return collected(self.rdd, n)

    def __len__(self) -> int:
        """Sum of ``len`` of the shards, where one without a length counts as 1.

        So it is the number of rows of frames and arrays, and the number of keys of dicts.
        """
        return sum(sum(summary.lengths) for summary in self._summary())

    def _summary(self) -> list[PartitionSummary]:
        """Return a summary of the shards of each partition; computed once."""
        if self._summaries is None:
            summaries = collected(self.rdd.mapPartitions(summarize))
            for failed in summaries:
                if isinstance(failed, FailedShard):
                    self.uncache()
                    raise failed.as_error()
            self._summaries = cast("list[PartitionSummary]", summaries)
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
            Further arguments; of a :class:`SharedValue` the function gets the value, or the
            SharedValue itself if its code reads ``.value`` of that parameter.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> shards = XShards.partition(np.arange(4), num_shards=2)
        >>> [shard.tolist() for shard in shards.transform_shard(np.add, 10).collect()]
        [[10, 11], [12, 13]]
        """

        def transform(shard: Any) -> Any:
            return func(shard, *unwrapped(func, args))

        return self._derive(self.rdd.map(transform))

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
                    f"{type(shard).__name__}",
                    code="data-type",
                )
            try:
                shard[key]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                keys = list(getattr(shard, "columns", shard if isinstance(shard, dict) else ()))
                hint = f", not one of {keys}" if keys else ""
                raise UsageError(
                    f"Invalid key for this XShards: {key!r}{hint}",
                    code="column-missing",
                    column=key,
                ) from error
        rdd = persistence.hold(self.rdd.map(itemgetter(key)), self.rdd)
        return SparkXShards(rdd, transient=True, is_lazy=self.is_lazy)

    def split(self) -> list[SparkXShards]:
        """One XShards per item, if every shard is a list or tuple of equally many items.

        Otherwise a list of only these XShards.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> pairs = XShards.partition((np.arange(4), np.zeros(4)), num_shards=2)
        >>> numbers, zeros = pairs.split()
        >>> [shard.tolist() for shard in numbers.collect()]
        [[0, 1], [2, 3]]
        """
        sized = self.rdd.map(lambda shard: isinstance(shard, list | tuple) and len(shard))
        counts = set(collected(sized))
        if len(counts) != 1 or not all(counts):  # False, or nothing to split
            return [self]
        return [self._derive(self.rdd.map(itemgetter(i))) for i in range(counts.pop())]

    def zip(self, other: SparkXShards) -> SparkXShards:
        """XShards of tuples of a shard of these and the shard of `other` in its place.

        Raises
        ------
        UsageError
            If `other` is no SparkXShards, or has not as many partitions with as many shards.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> letters = XShards.partition(np.array(["a", "b"]), num_shards=2)
        >>> numbers = XShards.partition(np.array([1, 2]), num_shards=2)
        >>> [(str(letter[0]), int(number[0])) for letter, number in letters.zip(numbers).collect()]
        [('a', 1), ('b', 2)]
        """
        if not isinstance(other, SparkXShards):
            raise UsageError(
                f"other should be a SparkXShards, got {type(other).__name__}",
                code="argument-type",
                argument="other",
            )
        numbers = self.num_partitions(), other.num_partitions()
        if numbers[0] != numbers[1]:
            raise UsageError(
                "The two SparkXShards should have the same number of partitions, but they have "
                f"{numbers[0]} and {numbers[1]}; repartition one of them first",
                code="data-shape",
            )
        sizes = [[len(part.lengths) for part in each._summary()] for each in (self, other)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                "The two SparkXShards should have the same number of elements in each partition, "
                f"but they have {sizes[0]} and {sizes[1]}",
                code="data-shape",
            )
        return self._derive(self.rdd.zip(other.rdd), other.rdd, class_name="tuple")

    def repartition(self, num_partitions: int) -> SparkXShards:
        """The same rows, in the same order, in `num_partitions` partitions of equal size.

        Shards that can be cut by rows (pandas frames and Series, arrays, lists, and dicts of
        arrays of one length) are cut and joined: every partition has one shard, and the numbers of
        rows differ by at most 1.  Other shards stay whole.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import XShards
        >>> sc = init_orca_context("local", cores=2)
        >>> shards = XShards.partition(np.arange(6), num_shards=2)
        >>> [shard.tolist() for shard in shards.repartition(3).collect()]
        [[0, 1], [2, 3], [4, 5]]
        """
        number = check_positive("num_partitions", num_partitions)
        rdd, class_name = repartition(self.rdd, self._summary(), number)
        return self._derive(rdd, class_name=class_name)

    def stack_feature_labels(self) -> SparkXShards:
        """Samples to batches: one shard ``{"x": ..., "y": ...}`` of float32 arrays per partition.

        A shard of these is one sample, ``(features, labels)`` or features alone.  Features and
        labels are arrays, or tuples, lists or dicts of them, as the arrays of the result are.

        Examples
        --------
        >>> import numpy as np
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> samples = [(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)]
        >>> batch = SparkXShards(sc.parallelize(samples, 1)).stack_feature_labels().first()
        >>> batch["x"].shape, batch["y"].tolist()
        ((2, 2), [0.0, 1.0])
        """
        return self._derive(self.rdd.mapPartitions(stack_samples), class_name="dict")

    def save_pickle(self, path: str, batchSize: int = 10) -> SparkXShards:
        """Write the shards as a pickle file of Spark, which :meth:`load_pickle` reads.

        The files, which are read once more for that, are signed with a key of this user, see
        :func:`~bigdl.common.trust.user_signature`.

        Parameters
        ----------
        path : str
            A directory that does not exist, of any file system that Spark knows.
        batchSize : int, default 10
            Shards that are pickled together.
        """
        with users_errors(self.rdd.context), spark_writing("The shards", path):
            self.rdd.saveAsPickleFile(path, batchSize)
        try:
            for folder, signatures in _signatures(path).items():
                write_bytes(f"{folder}/{_SIGNATURES}", json.dumps(signatures).encode())
        except BigDLError as error:
            logger.warning("load_pickle will need trust=True for %s: %s", path, error)
        return self

    @classmethod
    def _from_shards(cls, shards: list) -> SparkXShards:
        return cls(parallelize(shards, len(shards)))

    # Pandas frames ------------------------------------------------------------------------------
    #
    # Methods that go through Spark give columns the types that they have there, and a new index.

    def get_schema(self) -> dict | None:
        """``{"columns": [...], "dtypes": {...}}`` of the first shard, None if it is no frame."""
        if "schema" not in self.type and self._get_class_name() == DATA_FRAME:
            self._summary()
        return self.type.get("schema")

    def _require_frames(
        self, message: str = "This is only for XShards of Pandas DataFrame"
    ) -> None:
        name = self._get_class_name()
        if name not in (DATA_FRAME, None):
            raise UsageError(f"{message}, but the shards are {name}", code="data-type")

    def _columns(
        self, names: Any, message: str = "There is no such column in the DataFrame"
    ) -> list:
        """Return `names` as a list of columns that the frames have."""
        self._require_frames()
        names = [names] if isinstance(names, str) else list(names)
        schema = self.get_schema()
        missing = [name for name in names if schema and name not in schema["columns"]]
        if schema and missing:
            raise UsageError(
                f"{message}: {missing}, not in {schema['columns']}",
                code="column-missing",
                column=missing[0],
                columns=list(schema["columns"]),
            )
        return names

    def _derive_frames(self, rdd, *others) -> SparkXShards:
        return self._derive(rdd, *others, class_name=DATA_FRAME)

    def _as_spark(self, prefix: str = "c") -> tuple[DataFrame, dict[Any, str]]:
        """A Spark DataFrame of the rows, and the safe names of its columns by their own names."""
        self._require_frames()
        return frames.spark_frame(self.rdd, prefix)

    def _from_spark(self, frame: DataFrame, names: Iterable, *others: RDD) -> SparkXShards:
        """XShards of the rows of a Spark DataFrame that was made of these."""
        return self._derive_frames(frames.frames_of(frame, names=list(names)), *others)

    # Rows ----------------------------------------------------------------------------------------

    def partition_by(self, cols: str, num_partitions: int | None = None) -> SparkXShards:
        """Bring all rows with one value of a column to one partition.

        Only for shards that are pandas frames.  Rows keep their order within a partition; a
        partition without rows has no shard, and any other has one.

        Parameters
        ----------
        cols : str
            Name of the column.
        num_partitions : int, optional
            Default: as many as there are.

        Raises
        ------
        UsageError
            If the shards are no frames, or have no such column.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> day_1 = pd.DataFrame({"user": [1, 2], "item": [7, 8]})
        >>> day_2 = pd.DataFrame({"user": [1, 2], "item": [9, 9]})
        >>> by_user = SparkXShards(sc.parallelize([day_1, day_2], 2)).partition_by("user")
        >>> all(len(frame) == 2 * frame["user"].nunique() for frame in by_user.collect())
        True
        """
        self._require_frames("Currently only support partition by for XShards of Pandas DataFrame")
        if not isinstance(cols, str):
            raise UsageError(
                f"Only support partition by a column name, got {cols!r}",
                code="argument-type",
                argument="cols",
            )
        self._columns(cols, "The partition column is not in the DataFrame")
        if num_partitions is None:
            num_partitions = self.num_partitions()
        number = check_positive("num_partitions", num_partitions)
        return self._derive_frames(partition_by(self.rdd, cols, number))

    def sort_values(
        self, col_names: str | Sequence[str] | None = None, ascending: bool | Sequence[bool] = True
    ) -> SparkXShards:
        """All rows in the order of some columns; nulls come last, equal rows stay as they were.

        Parameters
        ----------
        col_names : str or sequence of str, optional
            Default: all columns.
        ascending : bool or sequence of bool, default True

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> frames = [pd.DataFrame({"age": [31, 45]}), pd.DataFrame({"age": [28]})]
        >>> shards = SparkXShards(sc.parallelize(frames, 2))
        >>> shards.sort_values("age", ascending=False).head()
           age
        0   45
        1   31
        2   28
        """
        frame, columns = self._as_spark()
        names = list(columns) if col_names is None else self._columns(col_names)
        rising = [ascending] * len(names) if isinstance(ascending, bool) else list(ascending)
        if len(rising) != len(names):
            raise UsageError(
                f"ascending must be True, False or one of them for each of {len(names)} columns, "
                f"got {ascending!r}",
                code="argument-value",
                argument="ascending",
            )
        keys = [
            (F.asc_nulls_last if rises else F.desc_nulls_last)(columns[name])
            for name, rises in zip(names, rising, strict=True)
        ]
        return self._from_spark(_placed(frame).orderBy(*keys, _PLACE).drop(_PLACE), columns)

    def deduplicates(self) -> SparkXShards:
        """The rows without those that equal an earlier one."""
        frame, columns = self._as_spark()
        first = _placed(frame).groupBy(*frame.columns).agg(F.min(_PLACE).alias(_PLACE))
        return self._from_spark(first.orderBy(_PLACE).select(*frame.columns), columns)

    def merge(
        self, right: SparkXShards, how: str = "inner", on: str | Sequence[str] | None = None
    ) -> SparkXShards:
        """Join rows whose keys are equal, as :func:`pandas.merge` does.

        A null equals a null; other columns of both frames get the suffixes ``_x`` and ``_y``.  The
        result is in the order of the left rows; for ``"right"`` of the right ones, and for
        ``"outer"`` of the keys.

        Parameters
        ----------
        right : SparkXShards
        how : {"inner", "left", "right", "outer"}, default "inner"
        on : str or sequence of str, optional
            Columns of both frames.  Default: all that they have in common.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> left = pd.DataFrame({"user": [2, 1], "rating": [3, 5]})
        >>> right = pd.DataFrame({"user": [1, 2], "age": [31, 45]})
        >>> ratings, users = (SparkXShards(sc.parallelize([frame], 1)) for frame in (left, right))
        >>> ratings.merge(users, on="user").head()
           user  rating  age
        0     2       3   45
        1     1       5   31
        """
        if not isinstance(right, SparkXShards):
            raise UsageError(
                f"right should be a SparkXShards, got {type(right).__name__}",
                code="argument-type",
                argument="right",
            )
        if how not in _HOW:
            raise UsageError(
                f"how must be one of {list(_HOW)}, got {how!r}",
                code="argument-value",
                argument="how",
                allowed=list(_HOW),
            )
        left, lefts = self._as_spark("l")
        other, rights = right._as_spark("r")
        keys = [n for n in lefts if n in rights] if on is None else self._columns(on)
        if not keys or any(key not in lefts or key not in rights for key in keys):
            raise UsageError(
                "Both frames must have the columns that they are merged on, "
                f"{keys or 'none in common'}; they have {list(lefts)} and {list(rights)}",
                code="column-missing",
            )
        types = dict(left.dtypes + other.dtypes)
        for key in keys:
            pair = types[lefts[key]], types[rights[key]]
            if (pair[0] == "string") != (pair[1] == "string"):
                raise UsageError(
                    f"Column {key!r} is {pair[0]} in one frame and {pair[1]} in the other; "
                    "give it one type first",
                    code="data-schema",
                    column=key,
                )
        same = _equal((lefts[key], rights[key]) for key in keys)
        joined = _placed(left, "l").join(_placed(other, "r"), same, _HOW[how])
        outputs = [
            (name, F.coalesce(column, rights[name]))
            if name in keys
            else (f"{name}_x" if name in rights else name, F.col(column))
            for name, column in lefts.items()
        ]
        outputs += [
            (f"{name}_y" if name in lefts else name, F.col(column))
            for name, column in rights.items()
            if name not in keys
        ]
        order = [F.asc_nulls_last(place) for place in ("rl" if how == "right" else "lr")]
        if how == "outer":
            position = list(lefts)
            order = [F.asc_nulls_last(f"c{position.index(key)}") for key in keys] + order
        safe = [column.alias(f"c{i}") for i, (_, column) in enumerate(outputs)]
        result = joined.select(*safe, "l", "r").orderBy(*order).drop("l", "r")
        return self._from_spark(result, (name for name, _ in outputs), right.rdd)

    def group_by(
        self,
        columns: str | Sequence[str] = (),
        agg: str | list[str] | dict[str, str | list[str]] = "count",
        join: bool = False,
    ) -> SparkXShards:
        """Aggregates of the rows that are equal in some columns.

        Parameters
        ----------
        columns : str or sequence of str, default ()
            What to group by; without any, all rows are one group.
        agg : str, list of str or dict, default "count"
            Functions of Spark, for every other column or by column.  Their results are called as
            Spark does, e.g. ``"sum(x)"``.  Where there is no other column, ``"count"`` is the
            number of rows.
        join : bool, default False
            Give every row the results of its group, in the order of the rows.  Otherwise there is
            one row per group, in the order of their keys, null last.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> frame = pd.DataFrame({"user": [1, 2, 1], "rating": [5, 3, 4]})
        >>> SparkXShards(sc.parallelize([frame], 1)).group_by("user", agg={"rating": "max"}).head()
           user  max(rating)
        0     1            5
        1     2            3
        """
        by = self._columns(columns)
        frame, named = self._as_spark()
        wanted = _aggregates(agg, by, list(named))
        keys = [named[name] for name in by]
        calls = [(name, _CALLS.get(function, f"{function}({{}})")) for name, function in wanted]
        outputs = [call.format(name) for name, call in calls] or ["count"]
        aggregates = [F.expr(call.format(named[name])) for name, call in calls]
        aggregates = aggregates or [F.count(F.lit(1))]
        values = [f"a{i}" for i in range(len(outputs))]
        groups = frame.groupBy(*keys).agg(
            *(each.alias(value) for each, value in zip(aggregates, values, strict=True))
        )
        if not join:
            order = [F.asc_nulls_last(key) for key in keys] or [F.lit(1)]
            return self._from_spark(groups.orderBy(*order).select(*keys, *values), [*by, *outputs])
        renamed = groups.withColumnsRenamed({key: f"k{key}" for key in keys})
        same = _equal((key, f"k{key}") for key in keys)
        joined = _placed(frame).join(renamed, same, "left").orderBy(_PLACE)
        return self._from_spark(joined.select(*frame.columns, *values), [*named, *outputs])

    def sample(
        self,
        frac: float,
        replace: bool = False,
        weights: Any = None,
        random_state: Any = None,
    ) -> SparkXShards:
        """A sample of each shard, see :meth:`pandas.DataFrame.sample`."""
        self._require_frames()
        sample = methodcaller("sample", None, frac, replace, weights, random_state)
        return self._derive_frames(self.rdd.map(sample))

    def head(self, n: int = 5) -> pd.DataFrame:
        """The first `n` rows, as a pandas frame."""
        self._require_frames()
        first: list[pd.DataFrame] = []
        with users_errors(self.rdd.context):
            for frame in self.rdd.map(methodcaller("head", n)).toLocalIterator():
                first.append(frame)
                if sum(map(len, first)) >= n:
                    break
        return _concatenated(first).head(n)

    # Columns -------------------------------------------------------------------------------------

    def select(self, cols: str | Sequence[str]) -> SparkXShards:
        """Frames of some columns only, also of a single one."""
        return self._derive_frames(self.rdd.map(itemgetter(self._columns(cols))))

    def drop_missing_value(self) -> SparkXShards:
        """Frames without the columns that have a null in any shard."""
        sums = self.get_null_sum()
        missing = sums.loc[sums["total"] > 0, "col"].tolist()
        return self._derive_frames(self.rdd.map(methodcaller("drop", columns=missing)))

    def get_null_sum(self) -> pd.DataFrame:
        """Number of nulls (``total``) of each column (``col``), as a pandas frame.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> frame = pd.DataFrame({"age": [31, None], "city": ["Oslo", "Rome"]})
        >>> SparkXShards(sc.parallelize([frame], 1)).get_null_sum()
            col  total
        0   age      1
        1  city      0
        """
        self._require_frames()
        counts = collected(self.rdd.map(lambda frame: frame.isna().sum()))
        columns = list(counts[0].index) if counts else []
        total = sum(each.reindex(columns).to_numpy() for each in counts)
        return pd.DataFrame({"col": columns, "total": total if counts else []})

    def max_values(self, col_name: str) -> Any:
        """The largest value of a column; NaN if it has none."""
        self._columns(col_name)
        largest = collected(self.rdd.map(lambda frame: frame[col_name].dropna().max()))
        return max((each for each in largest if not pd.isna(each)), default=float("nan"))

    def unique(self) -> np.ndarray:
        """The different values of shards that are pandas Series, in order of first appearance."""
        name = self._get_class_name()
        if name not in (SERIES, None):
            raise UsageError(
                "Currently only support unique() for XShards of Pandas Series, but the shards are "
                f"{name}; select a column first, as in shards['column'].unique()",
                code="data-type",
            )
        series = collected(self.rdd.map(methodcaller("drop_duplicates")))
        return np.asarray(_concatenated(series).unique()) if series else np.array([])

    def describe(self, cols: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Spark's summary of columns (count, mean, stddev, min and max), as a pandas frame.

        Parameters
        ----------
        cols : str or sequence of str, optional
            Default: all columns that are numbers or strings.
        """
        frame, columns = self._as_spark()
        chosen = [columns[name] for name in (columns if cols is None else self._columns(cols))]
        summary: Any = frame.describe(*chosen).toPandas()
        return summary.rename(columns={column: name for name, column in columns.items()})

    def assembleFeatureLabelCols(
        self, featureCols: str | Sequence[str], labelCols: str | Sequence[str]
    ) -> SparkXShards:
        """Shards ``{"x": array, "y": array}`` of shape (rows, columns).

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> frame = pd.DataFrame({"age": [31, 45], "size": [1.7, 1.8], "bought": [0, 1]})
        >>> shards = SparkXShards(sc.parallelize([frame], 1))
        >>> shards.assembleFeatureLabelCols(["age", "size"], ["bought"]).first()["x"]
        array([[31. ,  1.7],
               [45. ,  1.8]])
        """
        features, labels = self._columns(featureCols), self._columns(labelCols)

        def assemble(frame: pd.DataFrame) -> dict[str, np.ndarray]:
            return {
                key: np.stack([frame[column].to_numpy() for column in columns], axis=1)
                for key, columns in (("x", features), ("y", labels))
            }

        return self._derive(self.rdd.map(assemble), class_name="dict")

    # Out of them ---------------------------------------------------------------------------------

    def to_spark_df(self) -> DataFrame:
        """A Spark DataFrame of the rows, with the same partitions and order, without the index.

        It is computed when it is used.  NaN becomes null, and a time without a zone is one in the
        session's zone.

        Raises
        ------
        UsageError
            If the shards are no frames, have different columns, or values that Spark has no type
            for.

        Examples
        --------
        >>> import pandas as pd
        >>> from bigdl.orca import init_orca_context
        >>> from bigdl.orca.data import SparkXShards
        >>> sc = init_orca_context("local", cores=2)
        >>> shards = SparkXShards(sc.parallelize([pd.DataFrame({"age": [31, 45]})], 1))
        >>> shards.to_spark_df().filter("age > 40").collect()
        [Row(age=45)]
        """
        self._require_frames()
        frame, _ = frames.spark_frame(self.rdd)
        persistence.hand_over(self.rdd)
        return frame

    def concat_to_pdf(self, axis: Literal[0, 1] = 0) -> pd.DataFrame:
        """All shards as one pandas frame in this process."""
        self._require_frames()
        frames = self.collect()
        return pd.concat(frames, axis=axis) if axis and frames else _concatenated(frames)

    def sample_to_pdf(
        self,
        frac: float,
        replace: bool = False,
        weights: Any = None,
        random_state: Any = None,
        axis: Literal[0, 1] = 0,
    ) -> pd.DataFrame:
        """A sample of each shard as one pandas frame in this process."""
        sample = self.to_lazy().sample(frac, replace, weights, random_state)
        return sample.concat_to_pdf(axis)


def _concatenated(frames: list) -> Any:
    """Return the rows of frames or Series, of whose types those without rows have no say."""
    with_rows = [frame for frame in frames if len(frame)] or frames[:1]
    return pd.concat(with_rows) if with_rows else pd.DataFrame()


def _signatures(path: str) -> dict[str, dict[str, str]]:
    """Return by folder what the signatures of the files are that Spark would read there."""
    rows = active_spark().spark.read.format("binaryFile").load(path).select("path").collect()
    files = [posixpath.split(row.path) for row in rows]
    for folder in {folder for folder, _ in files}:
        open_file_system(folder)  # what cannot be opened is told here, and not by a task
    digests = parallelize(files, len(files) or 1).map(_digest_of_file).collect()
    signatures: dict[str, dict[str, str]] = {}
    for (folder, name), digest in zip(files, digests, strict=True):
        signatures.setdefault(folder, {})[name] = user_signature(f"{name} {digest}")
    return signatures


def _digest_of_file(place: tuple[str, str]) -> str:
    """SHA-256 of a file of any length, in hexadecimal; runs in a task."""
    fs, path = open_file_system(posixpath.join(*place))
    with fs.open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _are_signed(path: str) -> bool:
    """Return True if programs of this user wrote all files that Spark would read."""
    try:
        return all(
            signatures.items() <= dict(json.loads(read_bytes(f"{folder}/{_SIGNATURES}"))).items()
            for folder, signatures in _signatures(path).items()
        )
    except (BigDLError, ValueError):
        return False


# Operations of Spark ------------------------------------------------------------------------------

_PLACE = "place"
_FUNCTIONS = [
    *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "approx_count_distinct"),
    *("stddev", "stddev_pop", "variance", "var_pop", "skewness", "kurtosis"),
    *("collect_list", "collect_set", "first", "last"),
]
_CALLS = {"sumDistinct": "sum(DISTINCT {})", "mean": "avg({})"}
_HOW = {"inner": "inner", "left": "left", "right": "right", "outer": "full"}


def _placed(frame: DataFrame, place: str = _PLACE) -> DataFrame:
    return frame.withColumn(place, F.monotonically_increasing_id())


def _equal(pairs: Iterable[tuple[str, str]]) -> Column:
    """Return the condition that columns are equal in pairs, a null being equal to a null."""
    conditions = (F.col(left).eqNullSafe(F.col(right)) for left, right in pairs)
    return reduce(and_, conditions, F.lit(True))


def _aggregates(agg: Any, by: Sequence, names: list) -> list[tuple[Any, str]]:
    """Return the pairs of a column and a function that `agg` means."""
    if not isinstance(agg, str | list | dict):
        raise UsageError(
            f"agg must be a name of a function, a list of them, or a dict by column, got {agg!r}",
            code="argument-type",
            argument="agg",
        )
    others = [name for name in names if name not in by]
    by_column = agg if isinstance(agg, dict) else dict.fromkeys(others, agg)
    wanted = [
        (column, function)
        for column, functions in by_column.items()
        for function in ([functions] if isinstance(functions, str) else functions)
    ]
    for column, function in wanted:
        if column not in names:
            raise UsageError(
                f"agg names the column {column!r}, which is not in {names}",
                code="column-missing",
                argument="agg",
                column=column,
                columns=list(names),
            )
        if function not in _FUNCTIONS:
            raise UsageError(
                f"agg must be of {_FUNCTIONS}, got {function!r}",
                code="name-unknown",
                argument="agg",
                allowed=_FUNCTIONS,
            )
    if not wanted and agg != "count":
        raise UsageError(
            "There is no column to aggregate besides those that are grouped by",
            code="column-missing",
            argument="agg",
        )
    return wanted
