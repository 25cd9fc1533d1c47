"""Shards as values: their class and length, how they are cut, joined, and moved between partitions.

A shard that moves is cut in *pieces*, each with its target and its place (source partition, number
of the piece) from before the exchange; a partition joins its pieces in the order of their places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

__all__ = [
    "DATA_FRAME",
    "SERIES",
    "Summary",
    "arrays_of",
    "class_name",
    "count_items",
    "even_cut",
    "join_shards",
    "known_class_name",
    "length",
    "map_arrays",
    "partition_by",
    "repartition",
    "rows",
    "schema",
    "stack_samples",
    "summarize",
]


def arrays_of(data: Any) -> Iterator:
    """The arrays of nested tuples, lists and dicts."""
    if isinstance(data, dict):
        for value in data.values():
            yield from arrays_of(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from arrays_of(value)
    else:
        yield data


def map_arrays(data: Any, func) -> Any:
    """A container like `data` of ``func(array)``."""
    if isinstance(data, dict):
        return {key: map_arrays(value, func) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(value, func) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_arrays(value, func) for value in data)
    return func(data)


def even_cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of `parts` ranges of `rows` rows, as equal as can be, the larger ones first."""
    size, larger = divmod(rows, parts)
    ends = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(itertools.pairwise(ends))


DATA_FRAME = "pandas.core.frame.DataFrame"
SERIES = "pandas.core.series.Series"
_NAMES = {"pandas.DataFrame": DATA_FRAME, "pandas.Series": SERIES}


def class_name(shard: Any) -> str:
    """Name of a shard's class as BigDL 2.x wrote it, e.g. ``"pandas.core.frame.DataFrame"``."""
    module, name = type(shard).__module__, type(shard).__qualname__
    return known_class_name(name if module == "builtins" else f"{module}.{name}")


def known_class_name(name: str) -> str:
    """`name` in the spelling of :func:`class_name`."""
    return _NAMES.get(name, name)


def length(shard: Any) -> int:
    """``len(shard)``, and 1 for what has no length."""
    try:
        return len(shard)
    except TypeError:
        return 1


def rows(shard: Any) -> int | None:
    """Number of rows of a shard that can be cut by rows, None of any other.

    Frames, Series, arrays and lists can be cut, and dicts (nested or not) of arrays of one length.
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


def schema(shard: Any) -> dict | None:
    """``{"columns": [...], "dtypes": {...}}`` of a pandas frame, None of anything else."""
    if class_name(shard) != DATA_FRAME:
        return None
    return {"columns": list(shard.columns), "dtypes": shard.dtypes.to_dict()}


@dataclass
class Summary:
    """What is known of the shards of one partition.

    Attributes
    ----------
    lengths : list of int
        Length of each shard.
    rows : list of int or None
        Number of rows of each shard that can be cut by rows.
    classes : list of str
        Names of their classes, in the order of first appearance.
    schema : dict or None
        Of the first shard.
    """

    lengths: list[int] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    schema: dict | None = None


def summarize(shards: Iterable) -> Iterator[Summary]:
    """The :class:`Summary` of a partition, as the one element of it."""
    summary = Summary()
    for shard in shards:
        name = class_name(shard)
        if not summary.classes:
            summary.schema = schema(shard)
        if name not in summary.classes:
            summary.classes.append(name)
        summary.lengths.append(length(shard))
        summary.rows.append(rows(shard))
    yield summary


def count_items(shard: Any) -> int | None:
    """Number of items of a list or tuple, None of anything else."""
    return len(shard) if isinstance(shard, list | tuple) else None


def repartition(rdd, summaries: list[Summary], number: int):
    """An RDD of `number` equal partitions, and the class of its shards if all are of one."""
    classes = {name for summary in summaries for name in summary.classes}
    rows = [summary.rows for summary in summaries]
    by_rows = len(classes) == 1 and all(None not in each for each in rows)
    counts = cast("list[list[int]]", rows) if by_rows else [[1] * len(each) for each in rows]
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
