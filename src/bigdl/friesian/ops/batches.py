"""Arrow batches with lazy, dictionary-encoded columns, and the statistics of batches.

A column with few distinct values is computed once per distinct value. The statistics that operators
learn from are computed per batch; partial results are merged. For a dictionary-encoded column only
the distinct values are read. The executor ``catalyst`` has a Spark aggregation for each statistic
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.operator import FittedOperator, Function, OutputColumn, Statistic


@dataclass(frozen=True)
class DictionaryColumn:
    """Dictionary-encoded column: its distinct values, and the index of each row's value.

    Attributes
    ----------
    values : pyarrow.Array
        Distinct values; null may be one of them.
    codes : numpy.ndarray of int32 or int64
        Index into `values` for each row, without nulls.
    """

    values: pa.Array
    codes: np.ndarray


Values: TypeAlias = "pa.Array | DictionaryColumn"


class LazyBatch:
    """Batch of rows whose columns are computed once, on first access.

    Parameters
    ----------
    columns : dict of str to callable
        Functions without arguments that return an array or a :class:`DictionaryColumn`.
    rows : int
    """

    def __init__(self, columns: Mapping[str, Callable[[], Values]], rows: int):
        self._columns = {
            name: each if isinstance(each, _CachedResult) else _CachedResult(each)
            for name, each in columns.items()
        }
        self.rows = rows

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Values:
        return self._columns[name]()

    def select(self, names: Iterable[str]) -> LazyBatch:
        """Return a batch with a subset of the columns."""
        return LazyBatch({name: self._columns[name] for name in names}, self.rows)

    def after(self, fitted: FittedOperator) -> LazyBatch:
        """Apply a fitted operator; return the resulting batch."""
        added = {}
        for cell in fitted.cells:
            if cell.function is not None:
                added[cell.output] = _CachedResult(self._work(cell))
            elif cell.inputs[0] in self:
                added[cell.output] = self._columns[cell.inputs[0]]
        columns = {**self._columns, **added}
        return LazyBatch(
            {name: columns[name] for name in fitted.after if name in columns}, self.rows
        )

    def after_all(self, fitted: Iterable[FittedOperator]) -> LazyBatch:
        """Apply fitted operators in order; return the resulting batch."""
        batch = self
        for each in fitted:
            batch = batch.after(each)
        return batch

    def _work(self, cell: OutputColumn) -> Callable[[], Values]:
        inputs = [self._columns[name] for name in cell.inputs]
        function = cast("Function", cell.function)
        return lambda: apply_function(function, [each() for each in inputs])


class _CachedResult:
    """Callable that computes its result on the first call, and caches it."""

    def __init__(self, function: Callable[[], Values]):
        self._function: Callable[[], Values] | None = function
        self._result: Values | None = None

    def __call__(self) -> Values:
        if self._function is not None:
            self._result = self._function()
            self._function = None  # release the input columns
        return self._result


def apply_function(function: Function, columns: list[Values]) -> Values:
    """Apply a function to columns, once per distinct value where that is cheaper."""
    if len(columns) > 1:
        values, codes = combined([dictionary_encoded(each) for each in columns])
        return DictionaryColumn(function.array(*values), codes)
    (column,) = columns
    if function.is_costly:
        column = dictionary_encoded(column)
    if isinstance(column, DictionaryColumn):
        return DictionaryColumn(function.array(column.values), column.codes)
    return function.array(column)


def dictionary_encoded(column: Values) -> DictionaryColumn:
    """Dictionary-encode a column."""
    if isinstance(column, DictionaryColumn):
        return column
    if not isinstance(column, pa.DictionaryArray):
        column = pc.dictionary_encode(column)
    values, codes = column.dictionary, column.indices
    if codes.null_count:
        codes = codes.fill_null(len(values))
        values = pa.concat_arrays([values, pa.nulls(1, values.type)])
    return DictionaryColumn(values, codes.to_numpy())


def decoded(column: Values) -> pa.Array:
    """Decode a column to one Arrow array."""
    if not isinstance(column, DictionaryColumn):
        return column
    return column.values.take(pa.array(column.codes))


def slice_rows(column: Values, start: int, rows: int) -> Values:
    """Return `rows` values of a column from index `start`."""
    if not isinstance(column, DictionaryColumn):
        return column.slice(start, rows)
    return DictionaryColumn(column.values, column.codes[start : start + rows])


def combined(columns: list[DictionaryColumn]) -> tuple[list[pa.Array], np.ndarray]:
    """Return the distinct value combinations of columns, and each row's combination index.

    Returns
    -------
    values : list of pyarrow.Array
        One array per column, with its value in each combination.
    codes : numpy.ndarray
        Index of the combination for each row.
    """
    codes, indices = columns[0].codes, [np.arange(len(columns[0].values))]
    for column in columns[1:]:
        pairs = codes.astype(np.int64) * len(column.values) + column.codes
        both = pc.dictionary_encode(pa.array(pairs))
        first, second = np.divmod(both.dictionary.to_numpy(), max(len(column.values), 1))
        codes, indices = both.indices.to_numpy(), [*(each[first] for each in indices), second]
    values = [
        column.values.take(pa.array(index)) for column, index in zip(columns, indices, strict=True)
    ]
    return values, codes


def lazy_batch(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> LazyBatch:
    """Return a LazyBatch over in-memory arrays."""
    rows = len(next(iter(columns.values()))) if columns else 0
    return LazyBatch({name: partial(normalized, each) for name, each in columns.items()}, rows)


def normalized(column: pa.Array | pa.ChunkedArray) -> Values:
    """Convert a column to one array of the type that operators expect.

    A dictionary-encoded column stays dictionary-encoded.
    """
    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.unify_dictionaries()
        column = column.combine_chunks()
    if isinstance(column, pa.DictionaryArray):
        parts = dictionary_encoded(column)
        return DictionaryColumn(_normal_values(parts.values), parts.codes)
    return _normal_values(column)


def _normal_values(values: pa.Array) -> pa.Array:
    if pa.types.is_large_string(values.type) or pa.types.is_string_view(values.type):
        return values.cast(pa.string())
    if pa.types.is_large_list(values.type):
        return values.cast(column_types.to_arrow(column_types.of_arrow(values.type)))
    return values


def list_lengths(lists: pa.Array) -> np.ndarray:
    """Return the lengths of lists, 0 for null."""
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)


def make_lists(lengths: np.ndarray, values: pa.Array, nulls: pa.Array | None = None) -> pa.Array:
    """Build a list array from flat values and list lengths.

    `nulls` is a boolean array, True for lists that are null.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values, mask=nulls)


def to_strings(values: pa.Array) -> pa.Array:
    """Convert strings, integers, booleans or dates to strings as Spark does."""
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def to_string(value: object) -> str | None:
    """Convert one value to a string as :func:`to_strings` does."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


_RANKS = 4096  # sampled values per batch; ranks are exact to 1 / _RANKS


def _summed(parts: Sequence[pa.Table], keys: list[str]) -> pa.Table:
    """Merge tables by summing all other columns per combination of keys."""
    table = pa.concat_tables(parts)
    others = [name for name in table.column_names if name not in keys]
    grouped = table.group_by(keys, use_threads=False)
    return grouped.aggregate([(name, "sum") for name in others]).rename_columns([*keys, *others])


def _elements(column: Values) -> Values:
    """Flatten a column of lists; return other columns unchanged."""
    if isinstance(column, DictionaryColumn) or not pa.types.is_list(column.type):
        return column
    return column.flatten()


@dataclass(frozen=True)
class Counts(Statistic):
    """Count of each distinct value over all `columns` together; nulls are not counted.

    The result is an Arrow table with the columns ``value`` and ``count`` (int64), in no order.

    Attributes
    ----------
    separator : str or None
        Separator of the values within a cell.
    at_least : int
        Minimum count; rarer values are left out.
    """

    separator: str | None = None
    at_least: int = 0

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        parts = []
        for column in map(dictionary_encoded, map(_elements, columns)):
            values = column.values
            counts = np.bincount(column.codes, minlength=len(values))
            if self.separator is not None:
                values, counts = self._tokens(values, counts)
            table = pa.table({"value": values, "count": pa.array(counts, pa.int64())})
            keep = values.is_valid().to_numpy(zero_copy_only=False) & (counts > 0)
            parts.append(table if keep.all() else table.filter(pa.array(keep)))
        return self.merged(parts) if len(parts) > 1 else parts[0]

    def _tokens(self, values: pa.Array, counts: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        tokens: dict[str, int] = {}
        for value, count in zip(values.to_pylist(), counts.tolist(), strict=True):
            for token in () if value is None else value.split(self.separator):
                tokens[token] = tokens.get(token, 0) + count
        return pa.array(tokens, pa.string()), np.fromiter(tokens.values(), np.int64, len(tokens))

    def merged(self, parts: Sequence[pa.Table]) -> pa.Table:
        return _summed(parts, ["value"])

    def result(self, part: pa.Table) -> pa.Table:
        return part.filter(pc.greater_equal(part["count"], self.at_least))


@dataclass(frozen=True)
class MinMax(Statistic):
    """Smallest and largest value of a numeric column, ignoring nulls and NaN.

    The result is a pair of floats, a pair of ints for integer columns, or (None, None).

    Attributes
    ----------
    is_finite : bool
        Also leave out infinite values.
    """

    is_finite: bool = False

    def _of_columns(self, columns: list[Values]) -> tuple:
        (column,) = columns
        if isinstance(column, DictionaryColumn):
            occurs = np.bincount(column.codes, minlength=len(column.values)) > 0
            column = column.values.filter(pa.array(occurs))
        numbers = column.drop_null().to_numpy(zero_copy_only=False)
        if numbers.dtype.kind == "f":
            numbers = numbers[np.isfinite(numbers) if self.is_finite else ~np.isnan(numbers)]
        return (numbers.min().item(), numbers.max().item()) if len(numbers) else (None, None)

    def merged(self, parts: Sequence[tuple]) -> tuple:
        known = [part for part in parts if part[0] is not None]
        if not known:
            return None, None
        return min(low for low, _ in known), max(high for _, high in known)


@dataclass(frozen=True)
class PositionMinMax(Statistic):
    """Smallest and largest value at each position of arrays or vectors.

    Nulls and NaN are skipped. The result is two lists of floats. Only Spark computes it.
    """


@dataclass(frozen=True)
class Quantiles(Statistic):
    """Quantiles of a numeric column, ignoring nulls and NaN.

    The result is a list of floats, exact to a thousandth of the rows; empty if there is no value.

    Attributes
    ----------
    shares : tuple of float
        Quantile levels from 0 to 1.
    """

    shares: tuple[float, ...] = (0.5,)

    def _of_columns(self, columns: list[Values]) -> tuple[np.ndarray, np.ndarray]:
        """Return sampled values and the number of rows that each value represents."""
        column = decoded(columns[0]).drop_null()
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
        numbers = np.sort(numbers[~np.isnan(numbers)])
        step = -(-len(numbers) // _RANKS) or 1
        starts = np.arange(0, len(numbers), step)
        weights = np.minimum(step, len(numbers) - starts)
        return numbers[starts + weights // 2], weights

    def merged(self, parts: Sequence[tuple]) -> tuple[np.ndarray, np.ndarray]:
        values, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(values, kind="stable")
        return values[order], weights[order]

    def result(self, part: tuple[np.ndarray, np.ndarray]) -> list[float]:
        values, weights = part
        if not len(values):
            return []
        below = np.cumsum(weights)
        wanted = [max(math.ceil(share * below[-1]), 1) for share in self.shares]
        return values[np.searchsorted(below, wanted)].tolist()


@dataclass(frozen=True)
class TargetSums(Statistic):
    """Row counts, and sums and counts of targets, per combination of categories.

    `columns` are the categories, then the targets. The result is an Arrow table with the columns
    ``key_<i>``, ``rows``, ``sum_<j>`` and ``count_<j>``, in no order. It includes combinations with
    nulls.

    Attributes
    ----------
    targets : int
        Number of target columns.
    """

    targets: int = 1

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        split = len(columns) - self.targets
        keys, codes = combined([dictionary_encoded(each) for each in columns[:split]])
        size = len(keys[0])
        arrays = {f"key_{i}": key for i, key in enumerate(keys)}
        arrays["rows"] = pa.array(np.bincount(codes, minlength=size), pa.int64())
        for i, column in enumerate(map(decoded, columns[split:])):
            target = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            valid = ~np.isnan(target)  # null is NaN here
            sums = np.bincount(codes[valid], weights=target[valid], minlength=size)
            counts = np.bincount(codes[valid], minlength=size)
            arrays[f"sum_{i}"] = pa.array(sums)
            arrays[f"count_{i}"] = pa.array(counts, pa.int64())
        return pa.table(arrays)

    def merged(self, parts: Sequence[pa.Table]) -> pa.Table:
        return _summed(parts, [name for name in parts[0].column_names if name.startswith("key_")])
