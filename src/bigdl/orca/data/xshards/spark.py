"""XShards, SparkXShards and values that are shared with all tasks."""

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
from bigdl.common.display import call_text, html_table
from bigdl.common.errors import BigDLError, LazyModule, UsageError, hide_frames
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
    capture_failures,
    collected,
    computing,
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

    from bigdl.common.types import ColumnNames, Tensors
    from bigdl.orca.data.xshards.ray import RayXShards
else:
    pd = LazyModule("pandas", "orca")

logger = logging.getLogger("bigdl.orca")

_SIGNATURES = "_bigdl_signatures"
"""File with the user's signatures of pickle files in the same folder; Spark does not read it."""


@hide_frames
class XShards(ABC):
    """Distributed collection of Python objects (shards), with methods to transform them.

    A shard is any object that can be pickled, most often a pandas DataFrame or arrays in a dict.
    Create XShards with :meth:`partition`, with the readers of ``bigdl.orca.data``, or from a Spark
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
    def transform_shard(self, func: Callable, *args: object) -> XShards:
        """Return new XShards of ``func(shard, *args)`` for every shard."""

    @abstractmethod
    def collect(self) -> list:
        """Return all shards, in order."""

    @abstractmethod
    def num_partitions(self) -> int:
        """Return the number of partitions, which are computed in parallel."""

    @staticmethod
    def load_pickle(
        path: str, minPartitions: int | None = None, *, trust: bool = False
    ) -> SparkXShards:
        """Load SparkXShards that :meth:`SparkXShards.save_pickle` wrote.

        Unpickling can run arbitrary code.  ``save_pickle`` signs its files; files of other users
        and modified files are loaded only with ``trust=True``.

        Parameters
        ----------
        path : str
            Directory, or a glob pattern of directories.
        minPartitions : int, optional
            Minimum number of partitions.
        trust : bool, default False
            Skip the check of signatures and load any files; otherwise the files are read twice.

        Raises
        ------
        UsageError
            If `trust` is False and a file is not signed by this user.

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
    def partition(data: Tensors, num_shards: int | None = None) -> SparkXShards | RayXShards:
        """Split arrays into shards with nearly equal numbers of rows.

        They are on Ray in a program with ``runtime="ray"``, else on Spark.

        Parameters
        ----------
        data : numpy.ndarray, or a tuple, list or dict of them, nested or not
            All arrays have the same first dimension.  Every shard has the structure of `data`.
        num_shards : int, optional
            Number of shards, by default the number of the cluster's cores.

        Raises
        ------
        UsageError
            If there are fewer rows than shards, the arrays differ in their first dimension, or
            `data` contains other types.

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


def _count_rows(data: Tensors) -> int:
    """Return the common first dimension of all arrays in `data`."""
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
        raise UsageError("The data to partition contains no array", code="data-empty")
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) > 1:
        raise UsageError(
            "The arrays must all have the same size in first dimension, but they have "
            f"{sizes}; got arrays of the shapes {map_arrays(data, np.shape)}",
            code="data-shape",
        )
    return sizes[0]


class SharedValue:
    """Value for functions of ``transform_shard``, sent to every executor once.

    In a program with ``runtime="ray"`` it is stored in Ray's object store instead.

    ``transform_shard`` passes the :attr:`value` of a SharedValue to the function.

    Parameters
    ----------
    data : object
        Any object that cloudpickle can pickle, including instances of classes in ``__main__``.

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

    def __init__(self, data: object):
        # As bytes, because Spark's pickler does not support classes of __main__.
        self.broadcast_data: Any  # the engine's broadcast
        self.broadcast_data = active_cluster().broadcaster.broadcast(cloudpickle.dumps(data))
        self._data: tuple[Any] | None = (data,)

    def __getstate__(self) -> dict[str, Any]:
        return {"broadcast_data": self.broadcast_data, "_data": None}

    @property
    def value(self) -> Any:  # the user's object
        """The value; workers unpickle it once per process."""
        if self._data is None:
            broadcast: Any = self.broadcast_data
            if not hasattr(broadcast, "_bigdl_value"):  # cached as long as Spark keeps the bytes
                broadcast._bigdl_value = (cloudpickle.loads(broadcast.value),)
            self._data = broadcast._bigdl_value
        return self._data[0]

    def unpersist(self) -> None:
        """Release the copies on the executors; they are sent again when needed."""
        self.broadcast_data.unpersist()


def unwrap_shared_values(func: Callable, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a shard function, with SharedValues replaced by their values.

    A function whose code reads ``argument.value`` receives the SharedValue itself.
    """
    if not any(isinstance(each, SharedValue) for each in args):
        return list(args)
    takes_itself = _shared_parameters(func)
    return [
        each.value if isinstance(each, SharedValue) and index not in takes_itself else each
        for index, each in enumerate(args, start=1)
    ]


def _shared_parameters(func: Callable) -> set[int]:
    """Return the positions of parameters whose ``.value`` the function's code reads."""
    func = getattr(func, "__func__", func)  # of a method, whose first parameter is the instance
    code = getattr(inspect.unwrap(func), "__code__", None)
    if code is None:
        return set()
    names = code.co_varnames[: code.co_argcount]
    shift = 1 if names[:1] == ("self",) else 0
    names_read: set[str] = set()
    codes = [code]
    while codes:
        each = codes.pop()
        codes += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        steps = list(dis.get_instructions(each))
        for step, after in itertools.pairwise(steps):
            is_read = after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval == "value"
            if is_read and step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
                names_read.add(step.argval)
    return {index - shift for index, name in enumerate(names) if name in names_read}


@hide_frames
class SparkXShards(XShards):
    """XShards whose shards are the elements of a Spark RDD.

    By default shards are computed and persisted (in memory, spilling to disk) when they are
    created. So a function runs once per shard, and a random function gives the same shards at every
    read. Persisted shards are released when the program no longer refers to them.  Lazy XShards
    (:meth:`lazy`, :meth:`to_lazy`, ``OrcaContext._eager_mode = False``) are recomputed at every
    use.

    Parameters
    ----------
    rdd : pyspark.RDD
        RDD with one shard per element.
    transient : bool, default False
        Neither compute nor persist these shards now.
    class_name : str, optional
        Class name of the shards, if known, e.g. ``"pandas.core.frame.DataFrame"``.
    is_lazy : bool, default False
        Neither compute nor persist these shards and those derived from them.

    Attributes
    ----------
    rdd : pyspark.RDD
    eager : bool
        True if the shards were computed and persisted at creation.
    is_lazy : bool
        True if derived shards are lazy, too.
    transient : bool
    type : dict
        Known properties of the shards: ``"class_name"`` and, for pandas frames, ``"schema"``.

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
        """Create XShards that are computed when they are used."""
        return cls(rdd, class_name=class_name, is_lazy=True)

    def to_lazy(self) -> SparkXShards:
        """Return the same shards, with lazy transformations."""
        return SparkXShards.lazy(self.rdd, self.type.get("class_name"))

    def _derive(self, rdd, *others, class_name=None) -> SparkXShards:
        """Create XShards from an RDD that depends on these shards and on the RDDs `others`.

        The result is lazy if these XShards are, and else computed immediately.
        """
        if OrcaContext._eager_mode and not self.is_lazy:
            rdd = capture_failures(rdd)
            rdd = persistence.detached(rdd)
        else:
            persistence.hold(rdd, self.rdd, *others)
        return SparkXShards(rdd, class_name=class_name, is_lazy=self.is_lazy)

    # What is kept --------------------------------------------------------------------------------

    def compute(self) -> SparkXShards:
        """Compute and persist the shards; return these XShards.

        Raises
        ------
        WorkerError
            If the function that computes them fails.
        """
        persistence.persist(self.rdd)
        sc = self.rdd.context
        with quiet(sc), computing(sc):  # the exception has the task's traceback
            self._summary()
        return self

    def cache(self) -> SparkXShards:
        """Persist the shards when they are next computed; return these XShards."""
        persistence.persist(self.rdd)
        return self

    def uncache(self) -> SparkXShards:
        """Release the persisted shards; they are recomputed when needed. Return these XShards."""
        persistence.unpersist(self.rdd)
        return self

    def is_cached(self) -> bool:
        """Return True if the shards are or will be persisted."""
        return self.rdd.is_cached

    # What is in them -----------------------------------------------------------------------------

    def _fields(self) -> dict[str, object]:
        """Return the fields that ``repr`` shows, without computing the shards."""
        schema = self.type.get("schema") or {}
        try:
            partitions: object = self.num_partitions()
        except UsageError:  # the Spark context has been stopped
            partitions = "of a stopped Spark context"
        return {
            "partitions": partitions,
            "shards": self.type.get("class_name"),
            "columns": schema.get("columns"),
            "lazy": self.is_lazy or None,
        }

    def __repr__(self) -> str:
        return call_text(type(self).__name__, self._fields())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._fields())

    def num_partitions(self) -> int:
        """Return the number of partitions."""
        return self.rdd.getNumPartitions()

    def collect(self) -> list:
        """Return all shards, in order."""
        return collected(self.rdd)

    def first(self) -> Any:  # a frame, dict or array
        """Return the first shard.

        Raises
        ------
        UsageError
            If there are no shards.
        """
        for shard in self.take(1):
            return shard
        raise UsageError("These XShards have no shards", code="data-empty")

    def take(self, n: int) -> list:
        """Return the first `n` shards, or all if there are fewer."""
        return collected(self.rdd, n)

    def __len__(self) -> int:
        """Return the sum of the shards' lengths, where a shard without length counts as 1.

        For frames and arrays this is the number of rows, for dicts the number of keys.
        """
        return sum(sum(summary.lengths) for summary in self._summary())

    def _summary(self) -> list[PartitionSummary]:
        """Return a summary of the shards of each partition, computed once."""
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
        """Return the class name of the first shard, or None if there are no shards."""
        if "class_name" not in self.type:
            self._summary()
        return self.type.get("class_name")

    # New ones ------------------------------------------------------------------------------------

    def transform_shard(self, func: Callable, *args: object) -> SparkXShards:
        """Return new XShards of ``func(shard, *args)`` for every shard.

        Parameters
        ----------
        func : callable
            Function of a shard.
        *args : object
            Further arguments. The function receives the value of a :class:`SharedValue`, or the
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

        def transform(shard: object) -> object:
            return func(shard, *unwrap_shared_values(func, args))

        return self._derive(self.rdd.map(transform))

    def __getitem__(self, key: object) -> SparkXShards:
        """Return lazy XShards of ``shard[key]``.

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
        """Return one XShards per item if all shards are lists or tuples of equal length.

        Otherwise return a list with these XShards as the only element.

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
        if len(counts) != 1 or not all(counts):  # not all are non-empty sequences of one length
            return [self]
        return [self._derive(self.rdd.map(itemgetter(i))) for i in range(counts.pop())]

    def zip(self, other: SparkXShards) -> SparkXShards:
        """Pair each shard of these XShards with the corresponding shard of `other`.

        Raises
        ------
        UsageError
            If `other` is not a SparkXShards, or has other numbers of partitions or shards.

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
        """Redistribute the rows to `num_partitions` equal partitions, in the same order.

        Shards that can be split by rows (pandas frames and Series, arrays, lists, and dicts of
        arrays of equal length) are split and joined: every partition has one shard, and row counts
        differ by at most 1.  Other shards are moved whole.

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
        """Stack each partition's samples into one shard ``{"x": ..., "y": ...}`` of float32 arrays.

        Each shard is one sample, ``(features, labels)`` or features alone.  Features and labels are
        arrays, or tuples, lists or dicts of arrays; the result has the same structure.

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
        """Write the shards as a Spark pickle file, for :meth:`load_pickle`.

        The files are signed with a key of this user, see
        :func:`~bigdl.common.trust.user_signature`; this reads them once more.

        Parameters
        ----------
        path : str
            New directory, on any file system that Spark supports.
        batchSize : int, default 10
            Number of shards that are pickled together.
        """
        with users_errors(self.rdd.context), spark_writing("The shards", path):
            self.rdd.saveAsPickleFile(path, batchSize)
        try:
            for folder, signatures in _signatures(path).items():
                write_bytes(f"{folder}/{_SIGNATURES}", json.dumps(signatures).encode())
        except BigDLError as error:
            logger.warning(
                "Cannot sign the files; load_pickle will need trust=True for %s: %s", path, error
            )
        return self

    @classmethod
    def _from_shards(cls, shards: list) -> SparkXShards:
        return cls(parallelize(shards, len(shards)))

    # Pandas frames ------------------------------------------------------------------------------
    #
    # Methods that use Spark DataFrames return Spark's column types and a new index.

    def get_schema(self) -> dict | None:
        """Return ``{"columns": [...], "dtypes": {...}}`` of the first shard, or None."""
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
        self, names: ColumnNames, message: str = "There is no such column in the DataFrame"
    ) -> list:
        """Return `names` as a list, or raise UsageError if a column is missing."""
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
        """Return a Spark DataFrame of the rows and a dict of its column names by shard column."""
        self._require_frames()
        return frames.spark_frame(self.rdd, prefix)

    def _from_spark(self, frame: DataFrame, names: Iterable, *others: RDD) -> SparkXShards:
        """Create XShards from a Spark DataFrame that depends on these shards."""
        return self._derive_frames(frames.frames_of(frame, names=list(names)), *others)

    # Rows ----------------------------------------------------------------------------------------

    def partition_by(self, cols: str, num_partitions: int | None = None) -> SparkXShards:
        """Move all rows with equal values of a column to one partition.

        Supports pandas frames only.  Rows keep their order within a partition.  An empty partition
        has no shard; any other has one.

        Parameters
        ----------
        cols : str
            Name of the column.
        num_partitions : int, optional
            Number of partitions, by default unchanged.

        Raises
        ------
        UsageError
            If the shards are not frames, or lack the column.

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
        """Sort all rows by one or more columns, with nulls last; the sort is stable.

        Parameters
        ----------
        col_names : str or sequence of str, optional
            Sort keys, by default all columns.
        ascending : bool or sequence of bool, default True
            Sort order, for all keys or for each.

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
        orders = [ascending] * len(names) if isinstance(ascending, bool) else list(ascending)
        if len(orders) != len(names):
            raise UsageError(
                f"ascending must be a bool, or one bool for each of {len(names)} columns, got "
                f"{ascending!r}",
                code="argument-value",
                argument="ascending",
            )
        keys = [
            (F.asc_nulls_last if is_ascending else F.desc_nulls_last)(columns[name])
            for name, is_ascending in zip(names, orders, strict=True)
        ]
        return self._from_spark(_with_row_id(frame).orderBy(*keys, _ROW_ID).drop(_ROW_ID), columns)

    def deduplicates(self) -> SparkXShards:
        """Remove rows that equal an earlier row."""
        frame, columns = self._as_spark()
        first = _with_row_id(frame).groupBy(*frame.columns).agg(F.min(_ROW_ID).alias(_ROW_ID))
        return self._from_spark(first.orderBy(_ROW_ID).select(*frame.columns), columns)

    def merge(
        self, right: SparkXShards, how: str = "inner", on: str | Sequence[str] | None = None
    ) -> SparkXShards:
        """Join rows with equal keys, like :func:`pandas.merge`.

        Nulls are equal to each other.  Other columns that both frames have get the suffixes ``_x``
        and ``_y``.  Rows are in the order of the left rows; for ``"right"`` in that of the right
        rows, and for ``"outer"`` sorted by key.

        Parameters
        ----------
        right : SparkXShards
            Shards to join with.
        how : {"inner", "left", "right", "outer"}, default "inner"
            Type of the join.
        on : str or sequence of str, optional
            Key columns of both frames, by default all common columns.

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
                f"Both frames must have the key columns {keys or '(no common columns)'}; they have "
                f"{list(lefts)} and {list(rights)}",
                code="column-missing",
            )
        types = dict(left.dtypes + other.dtypes)
        for key in keys:
            pair = types[lefts[key]], types[rights[key]]
            if (pair[0] == "string") != (pair[1] == "string"):
                raise UsageError(
                    f"Column {key!r} is {pair[0]} in one frame and {pair[1]} in the other; "
                    "cast both to one type",
                    code="data-schema",
                    column=key,
                )
        same = _equal((lefts[key], rights[key]) for key in keys)
        joined = _with_row_id(left, "l").join(_with_row_id(other, "r"), same, _HOW[how])
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
        order = [F.asc_nulls_last(column) for column in ("rl" if how == "right" else "lr")]
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
        """Group the rows by equal values in columns, and aggregate each group.

        Parameters
        ----------
        columns : str or sequence of str, default ()
            Group keys; without keys, all rows are one group.
        agg : str, list of str or dict, default "count"
            Spark functions, for every other column or by column.  Results are named as in Spark,
            e.g. ``"sum(x)"``.  Without other columns, ``"count"`` is the number of rows.
        join : bool, default False
            Add the results to every row of the group, in the order of the rows.  Otherwise return
            one row per group, sorted by key with nulls last.

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
        requested = _aggregates(agg, by, list(named))
        keys = [named[name] for name in by]
        calls = [(name, _CALLS.get(function, f"{function}({{}})")) for name, function in requested]
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
        joined = _with_row_id(frame).join(renamed, same, "left").orderBy(_ROW_ID)
        return self._from_spark(joined.select(*frame.columns, *values), [*named, *outputs])

    def sample(
        self,
        frac: float,
        replace: bool = False,
        weights: str | Sequence[float] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> SparkXShards:
        """Draw a random sample of each shard; see :meth:`pandas.DataFrame.sample`."""
        self._require_frames()
        sample = methodcaller("sample", None, frac, replace, weights, random_state)
        return self._derive_frames(self.rdd.map(sample))

    def head(self, n: int = 5) -> pd.DataFrame:
        """Return the first `n` rows as a pandas frame."""
        self._require_frames()
        first: list[pd.DataFrame] = []
        with users_errors(self.rdd.context):
            for frame in self.rdd.map(methodcaller("head", n)).toLocalIterator():
                first.append(frame)
                if sum(map(len, first)) >= n:
                    break
        return _concatenate(first).head(n)

    # Columns -------------------------------------------------------------------------------------

    def select(self, cols: str | Sequence[str]) -> SparkXShards:
        """Select columns; the shards of the result are frames, even for a single column."""
        return self._derive_frames(self.rdd.map(itemgetter(self._columns(cols))))

    def drop_missing_value(self) -> SparkXShards:
        """Drop the columns that have a null in any shard."""
        sums = self.get_null_sum()
        missing = sums.loc[sums["total"] > 0, "col"].tolist()
        return self._derive_frames(self.rdd.map(methodcaller("drop", columns=missing)))

    def get_null_sum(self) -> pd.DataFrame:
        """Return the number of nulls (``total``) of each column (``col``) as a pandas frame.

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

    def max_values(self, col_name: str) -> float:
        """Return the maximum of a column, or NaN if it has no values."""
        self._columns(col_name)
        largest = collected(self.rdd.map(lambda frame: frame[col_name].dropna().max()))
        return max((each for each in largest if not pd.isna(each)), default=float("nan"))

    def unique(self) -> np.ndarray:
        """Return the distinct values of Series shards, in order of first appearance."""
        name = self._get_class_name()
        if name not in (SERIES, None):
            raise UsageError(
                "Currently only support unique() for XShards of Pandas Series, but the shards are "
                f"{name}; select a column first, as in shards['column'].unique()",
                code="data-type",
            )
        series = collected(self.rdd.map(methodcaller("drop_duplicates")))
        return np.asarray(_concatenate(series).unique()) if series else np.array([])

    def describe(self, cols: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Return Spark's summary statistics of columns as a pandas frame.

        The statistics are count, mean, stddev, min and max.

        Parameters
        ----------
        cols : str or sequence of str, optional
            Columns, by default all numeric and string columns.
        """
        frame, columns = self._as_spark()
        chosen = [columns[name] for name in (columns if cols is None else self._columns(cols))]
        summary: Any = frame.describe(*chosen).toPandas()
        return summary.rename(columns={column: name for name, column in columns.items()})

    def assembleFeatureLabelCols(
        self, featureCols: str | Sequence[str], labelCols: str | Sequence[str]
    ) -> SparkXShards:
        """Convert columns to shards ``{"x": array, "y": array}`` of shape (rows, columns).

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

    # Export --------------------------------------------------------------------------------------

    def to_spark_df(self) -> DataFrame:
        """Return a Spark DataFrame of the rows in the same partitions and order, without the index.

        It is computed lazily.  NaN becomes null, and a timestamp without time zone is interpreted
        in the session's time zone.

        Raises
        ------
        UsageError
            If the shards are not frames, have different columns, or have values without a matching
            Spark type.

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
        """Collect all shards as one pandas frame in this process."""
        self._require_frames()
        frames = self.collect()
        return pd.concat(frames, axis=axis) if axis and frames else _concatenate(frames)

    def sample_to_pdf(
        self,
        frac: float,
        replace: bool = False,
        weights: str | Sequence[float] | None = None,
        random_state: int | np.random.RandomState | None = None,
        axis: Literal[0, 1] = 0,
    ) -> pd.DataFrame:
        """Collect a random sample of each shard as one pandas frame in this process."""
        sample = self.to_lazy().sample(frac, replace, weights, random_state)
        return sample.concat_to_pdf(axis)


def _concatenate(frames: list) -> Any:  # a DataFrame or a Series, as the frames
    """Concatenate frames or Series; empty ones do not affect the column types."""
    with_rows = [frame for frame in frames if len(frame)] or frames[:1]
    return pd.concat(with_rows) if with_rows else pd.DataFrame()


def _signatures(path: str) -> dict[str, dict[str, str]]:
    """Return the signature of each file that Spark would read under a path, by folder and name."""
    rows = active_spark().spark.read.format("binaryFile").load(path).select("path").collect()
    files = [posixpath.split(row.path) for row in rows]
    for folder in {folder for folder, _ in files}:
        open_file_system(folder)  # raises errors here instead of in a task
    digests = parallelize(files, len(files) or 1).map(_digest_of_file).collect()
    signatures: dict[str, dict[str, str]] = {}
    for (folder, name), digest in zip(files, digests, strict=True):
        signatures.setdefault(folder, {})[name] = user_signature(f"{name} {digest}")
    return signatures


def _digest_of_file(location: tuple[str, str]) -> str:
    """Return the SHA-256 digest of a file in hexadecimal; called in a task."""
    fs, path = open_file_system(posixpath.join(*location))
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

_ROW_ID = "row_id"
_FUNCTIONS = [
    *("max", "min", "count", "sum", "avg", "mean", "sumDistinct", "approx_count_distinct"),
    *("stddev", "stddev_pop", "variance", "var_pop", "skewness", "kurtosis"),
    *("collect_list", "collect_set", "first", "last"),
]
_CALLS = {"sumDistinct": "sum(DISTINCT {})", "mean": "avg({})"}
_HOW = {"inner": "inner", "left": "left", "right": "right", "outer": "full"}


def _with_row_id(frame: DataFrame, column: str = _ROW_ID) -> DataFrame:
    return frame.withColumn(column, F.monotonically_increasing_id())


def _equal(pairs: Iterable[tuple[str, str]]) -> Column:
    """Return an SQL condition that both columns of each pair are equal, where null equals null."""
    conditions = (F.col(left).eqNullSafe(F.col(right)) for left, right in pairs)
    return reduce(and_, conditions, F.lit(True))


def _aggregates(agg: str | list | dict, by: Sequence, names: list) -> list[tuple[Any, str]]:
    """Return the pairs of column and function that the argument `agg` specifies."""
    if not isinstance(agg, str | list | dict):
        raise UsageError(
            f"agg must be a function name, a list of them, or a dict by column, got {agg!r}",
            code="argument-type",
            argument="agg",
        )
    others = [name for name in names if name not in by]
    by_column = agg if isinstance(agg, dict) else dict.fromkeys(others, agg)
    requested = [
        (column, function)
        for column, functions in by_column.items()
        for function in ([functions] if isinstance(functions, str) else functions)
    ]
    for column, function in requested:
        if column not in names:
            raise UsageError(
                f"agg has the column {column!r}, which is not in {names}",
                code="column-missing",
                argument="agg",
                column=column,
                columns=list(names),
            )
        if function not in _FUNCTIONS:
            raise UsageError(
                f"agg must be one of {_FUNCTIONS}, got {function!r}",
                code="name-unknown",
                argument="agg",
                allowed=_FUNCTIONS,
            )
    if not requested and agg != "count":
        raise UsageError(
            "There is no column to aggregate except the group keys",
            code="column-missing",
            argument="agg",
        )
    return requested
