"""Shards that move between partitions, and never out of their order.

A shard is cut in *pieces*, each with its target and its place (source partition, number of the
piece) from before the exchange; a partition joins its pieces in the order of their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.arguments import whole_number
from bigdl.orca.data.xshards.arrays import even_cut, map_arrays
from bigdl.orca.data.xshards.kinds import DATA_FRAME, SERIES, Summary, class_name

__all__ = [
    "check_partitions",
    "items",
    "join_shards",
    "partition_by",
    "repartition",
    "stack_samples",
]


def check_partitions(number: Any) -> int:
    """`number` as a number of partitions."""
    checked = whole_number(number)
    if checked is None or checked < 1:
        raise UsageError(
            f"The number of partitions must be a whole number of at least 1, got {number!r}"
        )
    return checked


def items(shard: Any) -> int | None:
    """Number of items of a list or tuple, None of anything else."""
    return len(shard) if isinstance(shard, list | tuple) else None


def repartition(rdd, summaries: list[Summary], number: int):
    """An RDD of `number` equal partitions, and the class of its shards if all are of one."""
    classes = {name for summary in summaries for name in summary.classes}
    counts = [summary.rows for summary in summaries]
    by_rows = len(classes) == 1 and all(None not in each for each in counts)
    if not by_rows:
        counts = [[1] * len(each) for each in counts]
    total = sum(map(sum, counts))
    starts, row = [], 0
    for each in counts:
        starts.append(row)
        row += sum(each)
    # Targets without rows get an empty piece of the last shard, so that each has a shard.
    last = max((p for p, each in enumerate(counts) if each), default=None)
    cut = _RowCutter if by_rows else _ShardCutter
    cutter = cut(starts, even_cut(total, number), last, counts[last] if last is not None else [])
    return _exchange(rdd, cutter, number, _join if by_rows else None), (
        classes.pop() if len(classes) == 1 else None
    )


def partition_by(rdd, column: str, number: int):
    """An RDD of frames where equal values of `column` are in one partition."""
    return _exchange(rdd, _ValueCutter(column, number), number, _join)


def _exchange(rdd, cutter, number: int, join: Callable | None):
    pieces = rdd.mapPartitionsWithIndex(cutter)  # (target, (place, piece))
    moved = pieces.partitionBy(number, int)
    return moved.mapPartitions(_Joiner(join))


class _RowCutter:
    """Cut shards at the bounds of the targets' rows."""

    def __init__(self, starts, bounds, last, counts_of_last):
        self._starts, self._bounds = starts, bounds
        self._last = (last, len(counts_of_last) - 1)

    def __call__(self, partition: int, shards: Iterable) -> Iterator:
        from bigdl.orca.data.xshards.kinds import rows

        row = self._starts[partition]
        for number, shard in enumerate(shards):
            stop = row + rows(shard)
            for target, (low, high) in enumerate(self._bounds):
                first, end = max(low, row), min(high, stop)
                is_empty_target = low == high and (partition, number) == self._last
                if first < end or is_empty_target:
                    piece = _slice(shard, first - row, max(first, end) - row)
                    yield target, ((partition, number), piece)
            row = stop


class _ShardCutter(_RowCutter):
    """Send whole shards, evenly."""

    def __call__(self, partition: int, shards: Iterable) -> Iterator:
        for number, shard in enumerate(shards):
            place = self._starts[partition] + number
            for target, (low, high) in enumerate(self._bounds):
                if low <= place < high:
                    yield target, ((partition, number), shard)


class _ValueCutter:
    """Send the rows of frames by the hash of a column."""

    def __init__(self, column: str, number: int):
        self._column, self._number = column, number

    def __call__(self, partition: int, shards: Iterable) -> Iterator:
        import numpy as np

        for number, frame in enumerate(shards):
            targets = hash_values(frame[self._column]) % np.uint64(self._number)
            for target in np.unique(targets):
                yield int(target), ((partition, number), frame[targets == target])


def hash_values(series):
    """A hash of each value: equal for values that are equal, whatever the dtypes of the shards."""
    import numpy as np
    import pandas as pd

    null = series.isna().to_numpy()
    kind = series.dtype.kind
    if kind in "biuf":
        # + 0.0 makes one zero of two; an integer too large for a float shares its hash
        values = series.to_numpy(dtype=np.float64, na_value=np.nan) + 0.0
    elif isinstance(series.dtype, pd.DatetimeTZDtype) or kind == "M":
        values = pd.DatetimeIndex(series).as_unit("ns").asi8
    else:
        values = series.to_numpy(dtype=object)
    hashes = pd.util.hash_array(values)
    hashes[null] = 0
    return hashes


class _Joiner:
    """Put the pieces of a partition in order, and join them to one shard where that is wanted."""

    def __init__(self, join: Callable | None):
        self._join = join

    def __call__(self, pieces: Iterable) -> Iterator:
        found = [piece for _, (_, piece) in sorted(pieces, key=lambda each: each[1][0])]
        if self._join is None:
            yield from found
        elif found:
            yield self._join(found)


def _slice(shard, low, high):
    name = class_name(shard)
    if name in (DATA_FRAME, SERIES):
        return shard.iloc[low:high]
    if name == "dict":
        return map_arrays(shard, lambda array: array[low:high])
    return shard[low:high]


def _join(pieces: list) -> Any:
    """One shard of the rows of all pieces, which are of one class."""
    name = class_name(pieces[0])
    # An empty piece has no say about the type of the rows.
    pieces = [piece for piece in pieces if _has_rows(piece)] or pieces[:1]
    if len(pieces) == 1:
        return pieces[0]
    if name in (DATA_FRAME, SERIES):
        import pandas as pd

        return pd.concat(pieces)
    if name == "list":
        return [item for piece in pieces for item in piece]
    return join_shards(pieces)


def _has_rows(piece):
    from bigdl.orca.data.xshards.kinds import rows

    return rows(piece) != 0


def join_shards(parts: list) -> Any:
    """One container of arrays of the rows of all of `parts`."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: join_shards([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        joined = [join_shards(list(each)) for each in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    import numpy as np

    return np.concatenate(parts)


def stack_samples(samples: Iterable) -> Iterator[dict]:
    """The samples of a partition, ``(features, labels)`` or features alone, as a dict of arrays."""
    samples = list(samples)
    if not samples:
        return
    if not isinstance(samples[0], tuple):
        yield {"x": _stack(samples)}
        return
    features, labels = zip(*samples, strict=True)
    yield {"x": _stack(features), "y": _stack(labels)}


def _stack(samples) -> Any:
    import numpy as np

    first = samples[0]
    if isinstance(first, dict):
        return {key: _stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_stack(list(each)) for each in zip(*samples, strict=True))
    return np.stack([np.asarray(sample, np.float32) for sample in samples])
