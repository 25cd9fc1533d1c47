"""Columns in batches of Arrow, where a column of few different values is computed by them only.

Questions that operators ask about the data are answered by batches.  Each batch gives a partial
answer, partial answers are merged, and the last one becomes the answer.  Only the different values
of a column are looked at where it is known by them.  The executor ``catalyst`` has an aggregation
of Spark for each question instead.
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
    """A column as its different values and the place of each row's value among them.

    Attributes
    ----------
    values : pyarrow.Array
        A null is one of them.
    codes : numpy.ndarray of int32 or int64
        Has no nulls.
    """

    values: pa.Array
    codes: np.ndarray


Values: TypeAlias = "pa.Array | DictionaryColumn"


class LazyBatch:
    """Some rows, whose columns are computed when they are asked for, once.

    Parameters
    ----------
    columns : dict of str to callable
        Functions without arguments that return an array or a :class:`DictionaryColumn`.
    rows : int
    """

    def __init__(self, columns: Mapping[str, Callable[[], Values]], rows: int):
        self._columns = {
            name: each if isinstance(each, _Once) else _Once(each) for name, each in columns.items()
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
        """The batch with some of its columns."""
        return LazyBatch({name: self._columns[name] for name in names}, self.rows)

    def after(self, fitted: FittedOperator) -> LazyBatch:
        """The batch behind a step."""
        made = {}
        for cell in fitted.cells:
            if cell.function is not None:
                made[cell.output] = _Once(self._work(cell))
            elif cell.inputs[0] in self:
                made[cell.output] = self._columns[cell.inputs[0]]
        columns = {**self._columns, **made}
        return LazyBatch(
            {name: columns[name] for name in fitted.after if name in columns}, self.rows
        )

    def after_all(self, fitted: Iterable[FittedOperator]) -> LazyBatch:
        """The batch behind all of some steps."""
        batch = self
        for each in fitted:
            batch = batch.after(each)
        return batch

    def _work(self, cell: OutputColumn) -> Callable[[], Values]:
        inputs = [self._columns[name] for name in cell.inputs]
        function = cast("Function", cell.function)
        return lambda: computed(function, [each() for each in inputs])


class _Once:
    """A function whose result is kept."""

    def __init__(self, function: Callable[[], Values]):
        self._function: Callable[[], Values] | None = function
        self._result: Values | None = None

    def __call__(self) -> Values:
        if self._function is not None:
            self._result = self._function()
            self._function = None  # with it go the columns that it was computed from
        return self._result


def computed(function: Function, columns: list[Values]) -> Values:
    """The column that a function makes of others."""
    if len(columns) > 1:
        values, codes = crossed([factored(each) for each in columns])
        return DictionaryColumn(function.array(*values), codes)
    (column,) = columns
    if function.is_costly:
        column = factored(column)
    if isinstance(column, DictionaryColumn):
        return DictionaryColumn(function.array(column.values), column.codes)
    return function.array(column)


def factored(column: Values) -> DictionaryColumn:
    """A column by its different values."""
    if isinstance(column, DictionaryColumn):
        return column
    if not isinstance(column, pa.DictionaryArray):
        column = pc.dictionary_encode(column)
    values, codes = column.dictionary, column.indices
    if codes.null_count:
        codes = codes.fill_null(len(values))
        values = pa.concat_arrays([values, pa.nulls(1, values.type)])
    return DictionaryColumn(values, codes.to_numpy())


def flat(column: Values) -> pa.Array:
    """A column as one array."""
    if not isinstance(column, DictionaryColumn):
        return column
    return column.values.take(pa.array(column.codes))


def cut(column: Values, start: int, rows: int) -> Values:
    """The values of some rows."""
    if not isinstance(column, DictionaryColumn):
        return column.slice(start, rows)
    return DictionaryColumn(column.values, column.codes[start : start + rows])


def crossed(columns: list[DictionaryColumn]) -> tuple[list[pa.Array], np.ndarray]:
    """The values of several columns in their different combinations, and the codes of these."""
    codes, places = columns[0].codes, [np.arange(len(columns[0].values))]
    for column in columns[1:]:
        pairs = codes.astype(np.int64) * len(column.values) + column.codes
        both = pc.dictionary_encode(pa.array(pairs))
        first, second = np.divmod(both.dictionary.to_numpy(), max(len(column.values), 1))
        codes, places = both.indices.to_numpy(), [*(each[first] for each in places), second]
    taken = [
        column.values.take(pa.array(place)) for column, place in zip(columns, places, strict=True)
    ]
    return taken, codes


def batch_of(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> LazyBatch:
    """A batch of arrays that are there."""
    rows = len(next(iter(columns.values()))) if columns else 0
    return LazyBatch({name: partial(normal, each) for name, each in columns.items()}, rows)


def normal(column: pa.Array | pa.ChunkedArray) -> Values:
    """One array of the type that steps expect; a dictionary is kept."""
    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.unify_dictionaries()
        column = column.combine_chunks()
    if isinstance(column, pa.DictionaryArray):
        parts = factored(column)
        return DictionaryColumn(_normal_values(parts.values), parts.codes)
    return _normal_values(column)


def _normal_values(values: pa.Array) -> pa.Array:
    if pa.types.is_large_string(values.type) or pa.types.is_string_view(values.type):
        return values.cast(pa.string())
    if pa.types.is_large_list(values.type):
        return values.cast(column_types.to_arrow(column_types.of_arrow(values.type)))
    return values


def lengths_of(lists: pa.Array) -> np.ndarray:
    """The lengths of lists, 0 for null."""
    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)


def lists_of(lengths: np.ndarray, values: pa.Array, nulls: pa.Array | None = None) -> pa.Array:
    """Values as lists of some lengths, one behind the other; `nulls` are True for null lists."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values, mask=nulls)


def texts_of(values: pa.Array) -> pa.Array:
    """The texts that Spark has for strings, whole numbers, booleans or dates."""
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def text_of(value: object) -> str | None:
    """The text of one value; see :func:`texts_of`."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


_RANKS = 4096  # values of a batch that stand for all of it: ranks are exact to one in so many


def _summed(parts: Sequence[pa.Table], keys: list[str]) -> pa.Table:
    """The sums of all other columns for each combination of keys."""
    table = pa.concat_tables(parts)
    others = [name for name in table.column_names if name not in keys]
    grouped = table.group_by(keys, use_threads=False)
    return grouped.aggregate([(name, "sum") for name in others]).rename_columns([*keys, *others])


def _elements(column: Values) -> Values:
    """The values in the cells of a column of lists; another column as it is."""
    if isinstance(column, DictionaryColumn) or not pa.types.is_list(column.type):
        return column
    return column.flatten()


@dataclass(frozen=True)
class Counts(Statistic):
    """Counts of the values of the columns together, without nulls.

    The answer is a table of Arrow with the columns ``value`` and ``count`` (int64), in no order.

    Attributes
    ----------
    separator : str or None
        Between the several values of a cell.
    at_least : int
        Leave out values that occur less often.
    """

    separator: str | None = None
    at_least: int = 0

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        parts = []
        for column in map(factored, map(_elements, columns)):
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

    def answer(self, part: pa.Table) -> pa.Table:
        return part.filter(pc.greater_equal(part["count"], self.at_least))


@dataclass(frozen=True)
class MinMax(Statistic):
    """The smallest and the largest value of a column of numbers, without nulls and NaN.

    The answer is a pair of float, or of int for whole numbers, or (None, None).

    Attributes
    ----------
    is_finite : bool
        Leave out infinite values too.
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
    """The smallest and the largest value at each position of arrays or vectors, without null, NaN.

    The answer is two lists of float.  Only tables of Spark are asked.
    """


@dataclass(frozen=True)
class Quantiles(Statistic):
    """Values of a column of numbers at shares of the rows, without nulls and NaN.

    The answer is a list of float, exact to a thousandth of the rows; empty if there is no value.

    Attributes
    ----------
    shares : tuple of float
    """

    shares: tuple[float, ...] = (0.5,)

    def _of_columns(self, columns: list[Values]) -> tuple[np.ndarray, np.ndarray]:
        """Values and how many rows each stands for."""
        column = flat(columns[0]).drop_null()
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

    def answer(self, part: tuple[np.ndarray, np.ndarray]) -> list[float]:
        values, weights = part
        if not len(values):
            return []
        below = np.cumsum(weights)
        wanted = [max(math.ceil(share * below[-1]), 1) for share in self.shares]
        return values[np.searchsorted(below, wanted)].tolist()


@dataclass(frozen=True)
class TargetSums(Statistic):
    """Rows, sums and counts of targets for each combination of values; nulls make none.

    The columns are those of the categories, then those of the targets.  The answer is a table of
    Arrow with the columns ``key_<i>``, ``rows``, ``sum_<j>`` and ``count_<j>``, in no order; the
    combination of nulls, if there is one, is in it too.

    Attributes
    ----------
    targets : int
        How many of the columns are targets.
    """

    targets: int = 1

    def _of_columns(self, columns: list[Values]) -> pa.Table:
        split = len(columns) - self.targets
        keys, codes = crossed([factored(each) for each in columns[:split]])
        size = len(keys[0])
        figures = {f"key_{i}": key for i, key in enumerate(keys)}
        figures["rows"] = pa.array(np.bincount(codes, minlength=size), pa.int64())
        for i, column in enumerate(map(flat, columns[split:])):
            target = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            valid = ~np.isnan(target)  # null is NaN here
            sums = np.bincount(codes[valid], weights=target[valid], minlength=size)
            counts = np.bincount(codes[valid], minlength=size)
            figures[f"sum_{i}"] = pa.array(sums)
            figures[f"count_{i}"] = pa.array(counts, pa.int64())
        return pa.table(figures)

    def merged(self, parts: Sequence[pa.Table]) -> pa.Table:
        return _summed(parts, [name for name in parts[0].column_names if name.startswith("key_")])
