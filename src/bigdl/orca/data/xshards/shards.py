"""Operations on shards: class and length, slicing, joining and moves between partitions.

A shard that moves is split into *pieces*.  Each has a target partition and a position (source
partition, piece number); a partition joins its pieces in the order of their positions.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.errors import BigDLError, UsageError
from bigdl.orca.cluster.spark_calls import error_of, users_errors
from bigdl.runtime.shards.values import arrays_of, join_shards, map_arrays, split_evenly

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext, TaskContext


DATA_FRAME = "pandas.core.frame.DataFrame"
SERIES = "pandas.core.series.Series"
_NAMES = {"pandas.DataFrame": DATA_FRAME, "pandas.Series": SERIES}


def class_name(shard: object) -> str:
    """Return the name of a shard's class as in BigDL 2.x.

    For example ``"pandas.core.frame.DataFrame"``.
    """
    module, name = type(shard).__module__, type(shard).__qualname__
    return known_class_name(name if module == "builtins" else f"{module}.{name}")


def known_class_name(name: str) -> str:
    """Return `name` in the spelling of :func:`class_name`."""
    return _NAMES.get(name, name)


def rows(shard: Any) -> int | None:
    """Return the number of rows of a shard, or None if the shard cannot be split by rows.

    Frames, Series, arrays, lists, and (nested) dicts of arrays of equal length can be split.
    """
    name = class_name(shard)
    if name in (DATA_FRAME, SERIES, "list"):
        return len(shard)
    if name not in ("numpy.ndarray", "dict"):
        return None
    sizes = {
        len(each) if class_name(each) == "numpy.ndarray" and each.ndim else None
        for each in arrays_of(shard)
    }
    return sizes.pop() if len(sizes) == 1 else None


@dataclass
class PartitionSummary:
    """Lengths, classes and schema of the shards of one partition.

    Attributes
    ----------
    lengths : list of int
        Length of each shard.
    rows : list of int or None
        Number of rows of each shard, None if it cannot be split by rows.
    classes : list of str
        Class names of the shards, in order of first appearance.
    schema : dict or None
        Schema of the first shard.
    """

    lengths: list[int] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    schema: dict | None = None


@dataclass
class FailedShard:
    """Marker for a shard whose function raised an error during computation of XShards.

    Attributes
    ----------
    partition : int
    traceback : str
        Traceback of the exception.
    code : str
        Error code of BigDL.
    """

    partition: int
    traceback: str
    code: str = UsageError.code

    def as_error(self) -> BigDLError:
        """Return the error that the driver raises."""
        location = f"partition {self.partition} of the XShards"
        return error_of(self.traceback, location, self.partition, self.code)


_COMPUTING = "bigdl.xshards.computing"  # local property of a job


@contextlib.contextmanager
def computing(sc: SparkContext | None) -> Iterator[None]:
    """Context manager that reports a function's failure in a job as a :class:`FailedShard`.

    The task then does not fail. Otherwise Spark would retry the function several times and hide the
    error in Spark and Java stack traces.
    """
    if sc is None:  # Spark Connect, see capture_failures
        yield
        return
    sc.setLocalProperty(_COMPUTING, "true")
    try:
        yield
    finally:
        sc.setLocalProperty(_COMPUTING, cast("str", None))


def with_failures(shards: Iterable) -> Iterable:
    """Return a partition's shards; within :func:`computing`, an error becomes a FailedShard."""
    return _with_failure(shards) if _task().getLocalProperty(_COMPUTING) else shards


def capture_failures(rdd: RDD) -> RDD:
    """Apply :func:`with_failures` to the partitions of an RDD."""
    # Spark Connect jobs have no local properties, so failures always become elements
    keep = _with_failure if rdd.context is None else with_failures
    return rdd.mapPartitions(keep, preservesPartitioning=True)


def _with_failure(shards: Iterable) -> Iterator:
    try:
        yield from shards
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # leave Spark's errors, such as missing input, to its retries
        if f"{os.sep}pyspark{os.sep}" in frames[-1].filename:
            raise
        code = error.code if isinstance(error, BigDLError) else UsageError.code
        yield FailedShard(_task().partitionId(), traceback.format_exc(), code)


def _task() -> TaskContext:
    from pyspark import TaskContext

    return cast("TaskContext", TaskContext.get())  # shards are read in tasks only


def collected(rdd: RDD, number: int | None = None) -> list:
    """Return all elements of an RDD, or the first `number`; raise errors of the user's function.

    Raises
    ------
    WorkerError
        If the user's function fails; Spark does not retry it.
    """
    elements = rdd.mapPartitions(_with_failure)
    with users_errors(rdd.context):
        values = elements.collect() if number is None else elements.take(number)
    for each in values:
        if isinstance(each, FailedShard):
            raise each.as_error()
    return values


def summarize(shards: Iterable) -> Iterator[PartitionSummary | FailedShard]:
    """Yield one :class:`PartitionSummary` for a partition, or the failed shard."""
    summary = PartitionSummary()
    for shard in shards:
        if isinstance(shard, FailedShard):
            yield shard
            return
        name = class_name(shard)
        if not summary.classes and name == DATA_FRAME:
            summary.schema = {"columns": list(shard.columns), "dtypes": shard.dtypes.to_dict()}
        if name not in summary.classes:
            summary.classes.append(name)
        summary.lengths.append(operator.length_hint(shard, 1))
        summary.rows.append(rows(shard))
    yield summary


def repartition(rdd: RDD, summaries: list[PartitionSummary], number: int) -> tuple[RDD, str | None]:
    """Return an RDD of `number` equal partitions, and the common class of all shards or None."""
    classes = {name for summary in summaries for name in summary.classes}
    by_rows = len(classes) == 1 and all(None not in summary.rows for summary in summaries)
    counts = [sum(cast("list[int]", s.rows)) if by_rows else len(s.rows) for s in summaries]
    starts = [0, *itertools.accumulate(counts)]
    bounds = split_evenly(starts[-1], number)
    # Targets without rows get an empty piece of the last shard, so each target has a shard.
    last = max(((p, len(s.rows) - 1) for p, s in enumerate(summaries) if s.rows), default=None)

    def cut(partition: int, shards: Iterable) -> Iterator:
        row = starts[partition]
        for i, shard in enumerate(shards):
            stop = row + (cast("int", rows(shard)) if by_rows else 1)
            for target, (low, high) in enumerate(bounds):
                first, end = max(low, row), min(high, stop)
                if first < end or (by_rows and low == high and (partition, i) == last):
                    piece = _slice(shard, first - row, max(first, end) - row) if by_rows else shard
                    yield target, ((partition, i), piece)
            row = stop

    moved = _exchange(rdd, cut, number, _join if by_rows else None)
    return moved, classes.pop() if len(classes) == 1 else None


def partition_by(rdd: RDD, column: str, number: int) -> RDD:
    """Return an RDD of frames in which equal values of `column` are in one partition."""

    def cut(partition: int, frames: Iterable) -> Iterator:
        for i, frame in enumerate(frames):
            targets = hash_values(frame[column]) % np.uint64(number)
            for target in np.unique(targets):
                yield int(target), ((partition, i), frame[targets == target])

    return _exchange(rdd, cut, number, _join)


def _exchange(rdd: RDD, cut: Callable, number: int, join: Callable | None) -> RDD:
    """Move the pieces of shards that `cut` yields to their target partitions, and sort them there.

    ``cut(partition, elements)`` yields ``(target, (position, piece))``; the sort is by position.
    """

    def arrange(pieces: Iterable) -> Iterator:
        ordered = [piece for _, (_, piece) in sorted(pieces, key=lambda each: each[1][0])]
        if join is None:
            yield from ordered
        elif ordered:
            yield join(ordered)

    return rdd.mapPartitionsWithIndex(cut).partitionBy(number, int).mapPartitions(arrange)


def hash_values(series):
    """Hash each value; equal values have equal hashes, even with different dtypes."""
    import pandas as pd

    null = series.isna().to_numpy()
    dtype_kind = series.dtype.kind
    if dtype_kind in "biuf":
        # + 0.0 maps -0.0 to 0.0; integers beyond float precision may share a hash
        values = series.to_numpy(dtype=np.float64, na_value=np.nan) + 0.0
    elif isinstance(series.dtype, pd.DatetimeTZDtype) or dtype_kind == "M":
        values = pd.DatetimeIndex(series).as_unit("ns").asi8
    else:
        values = series.to_numpy(dtype=object)
    hashes = pd.util.hash_array(values)
    hashes[null] = 0
    return hashes


def _slice(shard, low, high):
    name = class_name(shard)
    if name in (DATA_FRAME, SERIES):
        return shard.iloc[low:high]
    if name == "dict":
        return map_arrays(shard, lambda array: array[low:high])
    return shard[low:high]


def _join(pieces: list) -> Any:  # a shard, as the pieces
    """Concatenate slices of shards that have the same class into one shard."""
    name = class_name(pieces[0])
    # Empty pieces do not determine the type of the rows.
    pieces = [piece for piece in pieces if rows(piece) != 0] or pieces[:1]
    if len(pieces) == 1:
        return pieces[0]
    if name in (DATA_FRAME, SERIES):
        import pandas as pd

        return pd.concat(pieces)
    if name == "list":
        return [item for piece in pieces for item in piece]
    return join_shards(pieces)


def stack_samples(samples: Iterable) -> Iterator[dict]:
    """Stack a partition's samples, ``(features, labels)`` or features, into a dict of arrays."""

    def stack(values: Sequence) -> np.ndarray:
        return np.stack([np.asarray(value, np.float32) for value in values])

    samples = list(samples)
    if samples and isinstance(samples[0], tuple):
        features, labels = zip(*samples, strict=True)
        yield {"x": join_shards(features, stack), "y": join_shards(labels, stack)}
    elif samples:
        yield {"x": join_shards(samples, stack)}
