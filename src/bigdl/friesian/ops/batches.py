"""Columns in batches of Arrow, where a column of few different values is computed by them only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.friesian.ops import kinds

if TYPE_CHECKING:
    from bigdl.friesian.ops.operator import Cell, Fitted, Function


@dataclass(frozen=True)
class Factored:
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


Values: TypeAlias = "pa.Array | Factored"


class Batch:
    """Some rows, whose columns are computed when they are asked for, once.

    Parameters
    ----------
    columns : dict of str to callable
        Functions without arguments that return an array or a :class:`Factored`.
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

    def select(self, names: Iterable[str]) -> Batch:
        """The batch with some of its columns."""
        return Batch({name: self._columns[name] for name in names}, self.rows)

    def after(self, fitted: Fitted) -> Batch:
        """The batch behind a step."""
        made = {}
        for cell in fitted.cells:
            if cell.function is not None:
                made[cell.output] = _Once(self._work(cell))
            elif cell.inputs[0] in self:
                made[cell.output] = self._columns[cell.inputs[0]]
        columns = {**self._columns, **made}
        return Batch({name: columns[name] for name in fitted.after if name in columns}, self.rows)

    def behind(self, fitted: Iterable[Fitted]) -> Batch:
        """The batch behind all of some steps."""
        batch = self
        for each in fitted:
            batch = batch.after(each)
        return batch

    def _work(self, cell: Cell) -> Callable[[], Values]:
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
        return Factored(function.array(*values), codes)
    (column,) = columns
    if function.is_costly:
        column = factored(column)
    if isinstance(column, Factored):
        return Factored(function.array(column.values), column.codes)
    return function.array(column)


def factored(column: Values) -> Factored:
    """A column by its different values."""

    if isinstance(column, Factored):
        return column
    if not isinstance(column, pa.DictionaryArray):
        column = pc.dictionary_encode(column)
    values, codes = column.dictionary, column.indices
    if codes.null_count:
        codes = codes.fill_null(len(values))
        values = pa.concat_arrays([values, pa.nulls(1, values.type)])
    return Factored(values, codes.to_numpy())


def flat(column: Values) -> pa.Array:
    """A column as one array."""

    if not isinstance(column, Factored):
        return column
    return column.values.take(pa.array(column.codes))


def cut(column: Values, start: int, rows: int) -> Values:
    """The values of some rows."""
    if not isinstance(column, Factored):
        return column.slice(start, rows)
    return Factored(column.values, column.codes[start : start + rows])


def crossed(columns: list[Factored]) -> tuple[list[pa.Array], np.ndarray]:
    """The values of several columns in their different combinations, and the codes of these."""

    codes: np.ndarray | None = None
    places: list[np.ndarray] = []
    for column in columns:
        if codes is None:
            codes, places = column.codes, [np.arange(len(column.values))]
            continue
        pairs = codes.astype(np.int64) * len(column.values) + column.codes
        both = pc.dictionary_encode(pa.array(pairs))
        first, second = np.divmod(both.dictionary.to_numpy(), max(len(column.values), 1))
        codes, places = both.indices.to_numpy(), [*(each[first] for each in places), second]
    taken = [
        column.values.take(pa.array(place)) for column, place in zip(columns, places, strict=True)
    ]
    return taken, cast("np.ndarray", codes)


def batch_of(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> Batch:
    """A batch of arrays that are there."""
    rows = len(next(iter(columns.values()))) if columns else 0
    return Batch({name: partial(normal, each) for name, each in columns.items()}, rows)


def normal(column: pa.Array | pa.ChunkedArray) -> Values:
    """One array of the type that steps expect; a dictionary is kept."""

    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_dictionary(column.type):
            column = column.unify_dictionaries()
        column = column.combine_chunks()
    if isinstance(column, pa.DictionaryArray):
        parts = factored(column)
        return Factored(_normal_values(parts.values), parts.codes)
    return _normal_values(column)


def _normal_values(values: pa.Array) -> pa.Array:

    if pa.types.is_large_string(values.type) or pa.types.is_string_view(values.type):
        return values.cast(pa.string())
    if pa.types.is_large_list(values.type):
        return values.cast(kinds.to_arrow(kinds.of_arrow(values.type)))
    return values


def texts_of(values: pa.Array) -> pa.Array:
    """The texts that Spark has for strings, whole numbers, booleans or dates."""
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def text_of(value: Any) -> str | None:
    """The text of one value; see :func:`texts_of`."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)
