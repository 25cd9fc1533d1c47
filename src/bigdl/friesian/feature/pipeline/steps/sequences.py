"""Steps that bring arrays to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.operators.columns import check_count
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.step import (
    Cell,
    Field,
    Function,
    Schema,
    Step,
    require_fields,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame

__all__ = ["Mask", "Pad"]


def _check(before: Schema, names: Sequence[str]) -> None:
    require_fields(before, names)
    for name in names:
        if not kinds.is_array(before[name].kind):
            raise UsageError(
                f"{name} should be a column of arrays, but its type is {before[name].kind}"
            )


def _lengths(values: pa.Array) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)


def _is_plain(items: pa.Array) -> bool:
    return not items.null_count and kinds.is_numeric(kinds.of_arrow(items.type))


def _lists(items: pa.Array, rows: int, length: int) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    return pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * length, items)


class Ones(Function):
    """1 for each value that an array has, then 0."""

    def __init__(self, length: int):
        self.length = length

    def array(self, values: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        found = np.arange(self.length) < _lengths(values)[:, None]
        return _lists(pa.array(found.ravel().astype(np.int32)), len(values), self.length)

    def value(self, value: list | None) -> list[int]:
        ones = min(len(value or ()), self.length)
        return [1] * ones + [0] * (self.length - ones)


class Padded(Function):
    """The last values of an array, filled up at the end.

    Parameters
    ----------
    kind : str
        Of the array.
    length : int
    token : number, str or bool
    row_len : int
        How wide filled rows are where there is no first row.
    """

    def __init__(self, kind: str, length: int, token: Any, row_len: int):
        element = kinds.element_of(kind)
        self.kind, self.length, self.row_len = kind, length, row_len
        self.has_rows = kinds.is_array(element)
        inner = kinds.element_of(element) if self.has_rows else element
        self.token = kinds.coerced(_whole(token, inner), inner, "mask_token")

    def array(self, values: pa.Array) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        if self.has_rows:  # what is filled in depends on the row
            return pa.array(map(self.value, values.to_pylist()), kinds.to_arrow(self.kind))
        items, lengths = values.flatten(), _lengths(values)
        if _is_plain(items) and self.token is not None:
            found = self._plain(items.to_numpy(zero_copy_only=False), lengths)
            return _lists(pa.array(found, items.type), len(values), self.length)
        token = pa.array([self.token], items.type)
        ends = np.cumsum(lengths)[:, None]
        kept = np.minimum(lengths, self.length)[:, None]
        columns = np.arange(self.length)
        places = np.where(columns < kept, ends - kept + columns, len(items))
        found = pa.concat_arrays([items, token]).take(pa.array(places.ravel()))
        return _lists(found, len(values), self.length)

    def _plain(self, items: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """All values of the results, from numbers without nulls: a copy in one go."""
        import numpy as np

        if len(lengths) and lengths.max() > self.length:
            behind = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(items))
            items = items[behind <= self.length]
        found = np.full((len(lengths), self.length), self.token, items.dtype)
        found[np.arange(self.length) < lengths[:, None]] = items
        return found.ravel()

    def value(self, value: list | None) -> list:
        kept = list(value or ())[-self.length :]
        return kept + [self._filler(value)] * (self.length - len(kept))

    def _filler(self, value: list | None) -> Any:
        if not self.has_rows:
            return self.token
        first = value[0] if value else None
        return [self.token] * (self.row_len if first is None else len(first))


def _whole(token: Any, kind: str) -> Any:
    is_whole = type(token) is float and token.is_integer() and kinds.is_integral(kind)
    return int(token) if is_whole else token


@dataclass(frozen=True)
class Mask(Step):
    """``mask``."""

    columns: list[str]
    seq_len: int
    method = "mask"

    def __post_init__(self) -> None:
        check_count(self.seq_len, "seq_len", 1)

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check(before, self.columns)
        made = Field("array<int>", 2, self.seq_len)
        ones = Ones(self.seq_len)
        return [Cell((name,), f"{name}_mask", made, ones) for name in self.columns]

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.sequences import mask

        return mask(df, self.columns, self.seq_len)


@dataclass(frozen=True)
class Pad(Step):
    """``pad``; ``mask_cols`` is a step of its own before it."""

    columns: list[str]
    seq_len: int
    mask_token: float | str | bool
    row_len: int
    method = "pad"

    def __post_init__(self) -> None:
        check_count(self.seq_len, "seq_len", 1)
        check_count(self.row_len, "row_len", 0)
        if not isinstance(self.mask_token, int | float | str):
            raise UsageError(
                f"mask_token should be a number, str or bool, but got {self.mask_token!r}"
            )

    def cells(self, before: Schema, state: Any) -> list[Cell]:
        _check(before, self.columns)
        return [self._cell(name, before[name]) for name in self.columns]

    def _cell(self, name: str, field: Field) -> Cell:
        element = kinds.element_of(field.kind)
        if kinds.is_array(element) and kinds.is_array(kinds.element_of(element)):
            raise UsageError(
                f"{name} should hold arrays of one or two dimensions, but its type is {field.kind}"
            )
        padded = Padded(field.kind, self.seq_len, self.mask_token, self.row_len)
        cardinality = field.cardinality
        if cardinality is not None:
            cardinality = max(cardinality, int(padded.token) + 1)
        return Cell((name,), name, Field(field.kind, cardinality, self.seq_len), padded)

    def catalyst(self, df: DataFrame, before: Schema, state: Any) -> DataFrame:
        from bigdl.friesian.feature.operators.sequences import pad

        return pad(df, self.columns, self.seq_len, self.mask_token, self.row_len)
