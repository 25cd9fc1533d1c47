"""Stored feature rows by id, and their conversion to columns.

Scalar columns of one type are stored together in a matrix, a *block*; each vector column is one
block. Reading 500 rows of a block takes one NumPy call, for any number of columns. Columns of
strings, of lists with different lengths and columns with nulls stay Arrow arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.friesian.ops import column_types
from bigdl.orca.cluster.versions import to_arrow
from bigdl.orca.data.file import open_file_system

if TYPE_CHECKING:
    import os

    import pandas as pd
    from pyspark.sql import DataFrame

Column: TypeAlias = "np.ndarray | pa.Array"
TableSource: TypeAlias = "pa.Table | pa.RecordBatch | pd.DataFrame | DataFrame | str | os.PathLike"
"""A table, a data frame of pandas or Spark, or the path of Parquet files."""
Ids: TypeAlias = "int | Iterable[int] | np.ndarray | pa.Array | pa.ChunkedArray"
"""Integer ids: a NumPy or Arrow array, or any sequence."""

_NUMBERS = {
    name: np.dtype(name)
    for name in ("int8", "int16", "int32", "int64", "float32", "float64", "bool")
}
_ARROW_NAMES = {"float": "float32", "double": "float64"}
_SPARK_VECTOR = {"type", "size", "indices", "values"}  # fields of Spark ML vectors in Parquet


@dataclass(frozen=True)
class ColumnLayout:
    """Storage type, length and default of a column.

    Attributes
    ----------
    name : str
    kind : str
        NumPy type name for a block, else Spark type name.
    length : int or None
        Length of its vectors; None for single values.
    default : object
        Value of unknown ids.
    """

    name: str
    kind: str
    length: int | None
    default: Any

    @property
    def is_block(self) -> bool:
        return self.kind in _NUMBERS


class Layout:
    """Columns of a table, and the 2-D arrays (blocks) that store columns of one type together.

    Parameters
    ----------
    id_column : str
    id_kind : str
        NumPy type in which ids are returned.
    columns : sequence of ColumnLayout
    """

    def __init__(self, id_column: str, id_kind: str, columns: Sequence[ColumnLayout]):
        self.id_column = id_column
        self.id_kind = id_kind
        self.columns = list(columns)
        self.others = [each for each in self.columns if not each.is_block]
        scalars: dict[str, list[ColumnLayout]] = {}
        for each in self.columns:
            if each.is_block and each.length is None:
                scalars.setdefault(each.kind, []).append(each)
        vectors = [each for each in self.columns if each.is_block and each.length is not None]
        self.blocks = [(np.dtype(dtype), group) for dtype, group in scalars.items()]
        self.blocks += [(np.dtype(each.kind), [each]) for each in vectors]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.columns]

    @staticmethod
    def width(group: Sequence[ColumnLayout]) -> int:
        """Return the number of values per row in the block that stores the columns `group`."""
        return len(group) if group[0].length is None else group[0].length

    @cached_property
    def row_type(self) -> np.dtype:
        """NumPy structured dtype of one row, with a field for each block."""
        return np.dtype(
            [(f"b{i}", dtype, (self.width(group),)) for i, (dtype, group) in enumerate(self.blocks)]
        )

    @cached_property
    def default_blocks(self) -> list[np.ndarray]:
        """Default row of each block, for unknown ids."""
        rows = []
        for dtype, group in self.blocks:
            values = group[0].default if group[0].length is not None else [c.default for c in group]
            rows.append(np.array(values, dtype))
        return rows

    @classmethod
    def of(
        cls, table: pa.Table, id_column: str, defaults: Mapping[str, Any] | None = None
    ) -> Layout:
        """Build the layout of a table; raise for columns that cannot be stored."""
        if id_column not in table.column_names:
            raise UsageError(
                f"The table has no id column {id_column!r}, only {table.column_names}; "
                "pass its name in id_cols",
                code="column-missing",
                column=id_column,
                allowed=list(table.column_names),
            )
        known = dict(defaults or {})
        columns = []
        for name in table.column_names:
            if name != id_column:
                columns.append(_layout_of(name, table[name], known.pop(name, None)))
        if known:
            raise UsageError(
                f"defaults has entries for {sorted(known)}, which are not columns of the table",
                code="column-missing",
                argument="defaults",
                columns=list(known),
            )
        id_kind = str(table[id_column].type)
        return cls(id_column, id_kind, columns)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON-compatible values."""
        return {
            "id_column": self.id_column,
            "id_kind": self.id_kind,
            "columns": [vars(each) for each in self.columns],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Layout:
        """Create a Layout from the result of :meth:`to_json`."""
        columns = [ColumnLayout(**each) for each in content["columns"]]
        return cls(content["id_column"], content["id_kind"], columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]


def _layout_of(name: str, column: pa.ChunkedArray, default: object) -> ColumnLayout:
    dtype, length = column.type, None
    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    is_list = pa.types.is_list(dtype) or pa.types.is_large_list(dtype)
    if is_list or pa.types.is_fixed_size_list(dtype):
        length = _length_of(column)
        inner = dtype.value_type
    else:
        inner = dtype
    number = _ARROW_NAMES.get(str(inner), str(inner))
    is_vector = is_list or pa.types.is_fixed_size_list(dtype)
    if number in _NUMBERS and not column.null_count and (length is not None or not is_vector):
        if default is None:
            default = 0 if number != "bool" else False
            default = default if length is None else [default] * length
        try:
            value = np.array(default, _NUMBERS[number])
        except (TypeError, ValueError, OverflowError):
            value = np.array("")
        if value.dtype.kind == "U" or value.shape != (() if length is None else (length,)):
            raise UsageError(
                f"The default {default!r} does not fit the column {name} ({dtype})",
                code="argument-value",
                argument="defaults",
                column=name,
            )
        return ColumnLayout(name, number, length, value.tolist())
    spark = column_types.of_arrow(
        dtype if not pa.types.is_fixed_size_list(dtype) else pa.list_(inner)
    )
    if column_types.innermost(spark)[0] not in (
        *column_types.BITS,
        "float",
        "double",
        "boolean",
        "string",
    ):
        raise UsageError(
            f"The column {name} is of type {spark}, which a store does not support; cast it to a "
            "number or a string",
            code="data-dtype",
            column=name,
        )
    if default is None and not column.null_count:
        default = [] if is_vector else "" if spark == "string" else None
    return ColumnLayout(name, spark, None, default)


def _length_of(column: pa.ChunkedArray) -> int | None:
    """Return the length of all lists, or None if they differ or have nulls."""
    dtype = column.type
    lists = column.combine_chunks()
    if lists.null_count or not len(lists):
        return None
    values = lists.flatten()
    if values.null_count:
        return None
    if pa.types.is_fixed_size_list(dtype):
        return dtype.list_size
    lengths = pc.min_max(pc.list_value_length(lists)).as_py()
    return lengths["min"] if lengths["min"] == lengths["max"] and lengths["min"] else None


class StoredRows:
    """Rows of a table, sorted by distinct ids; 2-D arrays (blocks) store the numeric columns.

    Attributes
    ----------
    ids : ndarray of int64
    blocks : list of ndarray
        Of shape ``(rows, width)``, in the order of ``layout.blocks``.
    others : list of pyarrow.Array
    """

    def __init__(self, ids: np.ndarray, blocks: list[np.ndarray], others: list[pa.Array]):
        self.ids = ids
        self.blocks = blocks
        self.others = others
        # Consecutive ids need no search.
        self._is_range = bool(len(ids)) and int(ids[-1]) - int(ids[0]) + 1 == len(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Return the row index of each id, or -1 for unknown ids."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        if self._is_range:
            first, last = self.ids[0], self.ids[-1]
            return np.where((ids >= first) & (ids <= last), ids - first, -1)
        positions = np.searchsorted(self.ids, ids)
        positions[positions == len(self.ids)] = 0
        return np.where(self.ids[positions] == ids, positions, -1)

    @classmethod
    def of(cls, table: pa.Table, layout: Layout, what: str) -> StoredRows:
        """Build StoredRows from an Arrow table; raise for duplicate ids or unsuitable values."""
        needed = [layout.id_column, *layout.names]
        if missing := [name for name in needed if name not in table.column_names]:
            raise UsageError(
                f"The rows for {what} lack the columns {missing}",
                code="column-missing",
                columns=missing,
            )
        ids = ids_of(table[layout.id_column], what)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if len(ids) and (same := ids[1:] == ids[:-1]).any():
            raise UsageError(
                f"The id {ids[1:][same][0]} is in several rows for {what}; keep one of them, for "
                "example with drop_duplicates",
                code="data-order",
                column=layout.id_column,
            )
        blocks = []
        for dtype, group in layout.blocks:
            parts = [_numbers(table[each.name], each, what) for each in group]
            joined = parts[0] if group[0].length is not None else np.stack(parts, 1)
            blocks.append(np.ascontiguousarray(joined.astype(dtype, copy=False)[order]))
        others = [
            _array(table[each.name], each, what).take(pa.array(order)) for each in layout.others
        ]
        return cls(ids, blocks, others)

    def take(self, positions: np.ndarray) -> StoredRows:
        """Return the rows at the indices `positions`, which must be ascending."""
        taken = pa.array(positions)
        return StoredRows(
            self.ids.take(positions),
            [block.take(positions, axis=0) for block in self.blocks],
            [column.take(taken) for column in self.others],
        )

    @classmethod
    def merged(cls, parts: Sequence[StoredRows]) -> StoredRows:
        """Merge several StoredRows; for a repeated id, keep the row of the last part."""
        ids = np.concatenate([part.ids for part in parts])
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        is_last = np.append(ordered[1:] != ordered[:-1], True) if len(ids) else np.zeros(0, bool)
        blocks = [np.concatenate(each) for each in zip(*(p.blocks for p in parts), strict=True)]
        others = [pa.concat_arrays(each) for each in zip(*(p.others for p in parts), strict=True)]
        return cls(ids, blocks, others).take(order[is_last])

    # -- Arrow files -----------------------------------------------------------------------

    def to_arrow(self) -> pa.RecordBatch:
        """Return ids, blocks and other columns as one record batch."""
        arrays = [pa.array(np.ascontiguousarray(self.ids))]
        names = ["id"]
        for i, block in enumerate(self.blocks):
            stored = block.view(np.uint8) if block.dtype == bool else block
            values = pa.array(np.ascontiguousarray(stored).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(values, block.shape[1]))
            names.append(f"block{i}")
        for i, column in enumerate(self.others):
            arrays.append(column)
            names.append(f"other{i}")
        return pa.record_batch(arrays, names=names)

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch, layout: Layout) -> StoredRows:
        """Create StoredRows from the result of :meth:`to_arrow`, without a copy."""
        blocks = []
        for i, (dtype, group) in enumerate(layout.blocks):
            values = batch[f"block{i}"].flatten().to_numpy()
            blocks.append(values.view(dtype).reshape(batch.num_rows, layout.width(group)))
        others = [batch[f"other{i}"] for i in range(len(layout.others))]
        return cls(batch["id"].to_numpy(), blocks, others)

    # -- single rows as bytes -----------------------------------------------------------------

    def to_bytes(self, layout: Layout) -> Iterator[bytes]:
        """Yield each row as bytes: its blocks, then the other values as JSON."""
        packed = np.zeros(len(self), layout.row_type)
        for i, block in enumerate(self.blocks):
            packed[f"b{i}"] = block
        size = layout.row_type.itemsize
        data = packed.tobytes()
        values = [column.to_pylist() for column in self.others]
        for row_index in range(len(self)):
            row = data[row_index * size : (row_index + 1) * size]
            if values:
                row += json.dumps([column[row_index] for column in values]).encode()
            yield row

    @classmethod
    def from_bytes(cls, ids: np.ndarray, rows: Sequence[bytes], layout: Layout) -> StoredRows:
        """Create StoredRows from the results of :meth:`to_bytes`, in the order of `ids`."""
        size = layout.row_type.itemsize
        if any(len(row) < size for row in rows) or not (layout.others or _of_size(rows, size)):
            raise UsageError(
                "A row in the store does not match the layout of its table", code="data-schema"
            )
        heads = rows if not layout.others else [row[:size] for row in rows]
        packed = np.frombuffer(b"".join(heads), layout.row_type)
        blocks = [packed[f"b{i}"] for i in range(len(layout.blocks))]
        others = []
        if layout.others:
            tails = json.loads(b"[" + b",".join(row[size:] for row in rows) + b"]")
            for column_index, each in enumerate(layout.others):
                values = [tail[column_index] for tail in tails]
                others.append(pa.array(values, column_types.to_arrow(each.kind)))
        return cls(ids, blocks, others)


def _of_size(rows: Sequence[bytes], size: int) -> bool:
    return all(len(row) == size for row in rows)


class Features:
    """Feature rows, stored by column, in the order of the requested ids.

    Parameters
    ----------
    ids : ndarray of int64
    found : ndarray of bool
    columns : dict of str to array
        All columns, including the ids: NumPy arrays for numbers and vectors, else Arrow arrays.

    Attributes
    ----------
    ids : ndarray of int64
    found : ndarray of bool
        False for unknown ids, whose rows have the defaults of the table.
    columns : dict of str to array

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore
    >>> users = pd.DataFrame({"user": [3, 5], "age": [30, 50], "city": ["Oslo", "Rome"]})
    >>> with EmbeddedStore("store") as store:
    ...     _ = store.replace({"user": users})
    ...     features = store.read("user", [5, 3, 4, 5])
    >>> features["age"].tolist(), features["city"].to_pylist(), features.found.tolist()
    ([50, 30, 0, 50], ['Rome', 'Oslo', '', 'Rome'], [True, True, False, True])
    """

    def __init__(self, ids: np.ndarray, found: np.ndarray, columns: Mapping[str, Column]):
        self.ids = ids
        self.found = found
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def take(self, positions: np.ndarray) -> Features:
        """Return the rows at `positions`, in order; positions can repeat."""
        columns = {
            name: column.take(pa.array(positions))
            if isinstance(column, pa.Array)
            else column[positions]
            for name, column in self.columns.items()
        }
        return Features(self.ids[positions], self.found[positions], columns)

    def to_arrow(self) -> pa.RecordBatch:
        """Return the columns as a record batch; vectors become fixed-size lists."""
        arrays = [_to_arrow(column) for column in self.columns.values()]
        return pa.record_batch(arrays, names=list(self.columns))


class _BlockFeatures(Features):
    """Features read from ``StoredRows``; columns are computed on first access."""

    def __init__(
        self, layout: Layout, rows: StoredRows, is_known: np.ndarray, names: Sequence[str] | None
    ):
        self._layout, self._rows, self._names = layout, rows, names
        self.ids, self.found = rows.ids, is_known

    @cached_property
    def columns(self) -> dict[str, Column]:  # type: ignore[override]
        layout, rows = self._layout, self._rows
        columns: dict[str, Column] = {layout.id_column: self.ids.astype(layout.id_kind, copy=False)}
        for block, (_, group) in zip(rows.blocks, layout.blocks, strict=True):
            if group[0].length is not None:
                columns[group[0].name] = block
            else:
                # Rankers need contiguous columns: copy the block once, not each column.
                block = np.ascontiguousarray(block.T)
                columns.update((each.name, block[i]) for i, each in enumerate(group))
        columns.update(zip((each.name for each in layout.others), rows.others, strict=True))
        return {name: columns[name] for name in self._names or [layout.id_column, *layout.names]}

    def take(self, positions: np.ndarray) -> Features:
        return _BlockFeatures(
            self._layout, self._rows.take(positions), self.found[positions], self._names
        )


def _to_arrow(column: Column) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    column = np.ascontiguousarray(column)
    if column.ndim == 1:
        return pa.array(column)
    return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), column.shape[1])


def as_numpy(column: Column | pa.ChunkedArray | Sequence[object], name: str) -> np.ndarray:
    """Convert a column to a NumPy array; lists of one length become a matrix."""
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array):
        return np.asarray(column)
    if column.null_count:
        raise UsageError(
            f"The column {name} has nulls, which a ranker does not accept; fill them",
            code="data-null",
            column=name,
        )
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        rows = len(column)
        values = column.flatten().to_numpy(zero_copy_only=False)
        if not rows or len(values) % rows or not _is_even(column, len(values) // rows):
            raise UsageError(
                f"The lists in {name} have different lengths; pad them",
                code="data-shape",
                column=name,
            )
        return values.reshape(rows, -1)
    return column.to_numpy(zero_copy_only=False)


def _is_even(column: pa.Array, length: int) -> bool:
    if pa.types.is_fixed_size_list(column.type):
        return True
    return bool((np.diff(column.offsets.to_numpy()) == length).all())


def gather_features(
    layout: Layout, parts: Sequence[StoredRows], ids: np.ndarray, names: Sequence[str] | None
) -> Features:
    """Return the rows of `ids`, in order, from several parts; later parts take precedence.

    Parameters
    ----------
    layout : Layout
    parts : sequence of StoredRows
        At least one.
    ids : ndarray of int64
    names : sequence of str or None
        Columns to return; None means all.
    """
    selection = _column_selection(layout, names)
    positions = parts[0].positions(ids)
    is_known = positions >= 0
    later = [(part, part.positions(ids)) for part in parts[1:]]
    for _, at in later:
        is_known = is_known | (at >= 0)
    has_unknown = not is_known.all()
    base = np.where(positions < 0, 0, positions) if has_unknown or later else positions
    blocks = []
    for i, default in enumerate(layout.default_blocks):
        if i not in selection.blocks:
            continue
        source = parts[0].blocks[i]
        if len(parts[0]):
            block = source.take(base, axis=0)
        else:
            block = np.zeros((len(ids), source.shape[1]), source.dtype)
        for part, at in later:
            if (is_here := at >= 0).any():
                block[is_here] = part.blocks[i][at[is_here]]
        if has_unknown:
            block[~is_known] = default
        blocks.append(block)
    others = []
    for i in selection.others:
        each = layout.others[i]
        dtype = column_types.to_arrow(each.kind)
        pools = [part.others[i] for part in parts] + [pa.array([each.default], dtype)]
        begins = [0, *accumulate(map(len, pools))]
        at_pool = np.where(positions >= 0, positions, begins[-2])
        for number, (_, at) in enumerate(later, 1):
            at_pool = np.where(at >= 0, at + begins[number], at_pool)
        others.append(_take_from(pools, begins, at_pool))
    return _BlockFeatures(
        selection.layout, StoredRows(ids, blocks, others), is_known, selection.names
    )


def _take_from(pools: list[pa.Array], begins: list[int], positions: np.ndarray) -> pa.Array:
    """Take rows from several arrays as if they were concatenated, without a copy."""
    if len(positions) and (positions < begins[1]).all():
        return pools[0].take(pa.array(positions))
    return pa.chunked_array(pools).take(pa.array(positions)).combine_chunks()


@dataclass(frozen=True)
class _ColumnSelection:
    """Subset of the columns of a layout, with the indices of their blocks and arrays."""

    layout: Layout
    blocks: list[int]
    others: list[int]
    names: list[str] | None


def _column_selection(layout: Layout, names: Sequence[str] | None) -> _ColumnSelection:
    if names is None:
        return _ColumnSelection(
            layout, list(range(len(layout.blocks))), [*range(len(layout.others))], None
        )
    key = tuple(names)
    cache = layout.__dict__.setdefault("_selections", {})
    if key not in cache:
        known = [layout.id_column, *layout.names]
        if unknown := [name for name in key if name not in known]:
            raise UsageError(
                f"There are no columns {unknown} among {known}",
                code="column-missing",
                columns=unknown,
                allowed=known,
            )
        blocks = [
            i for i, (_, group) in enumerate(layout.blocks) if any(c.name in key for c in group)
        ]
        others = [i for i, each in enumerate(layout.others) if each.name in key]
        columns = [each for i in blocks for each in layout.blocks[i][1]]
        columns += [layout.others[i] for i in others]
        narrow = Layout(layout.id_column, layout.id_kind, columns)
        cache[key] = _ColumnSelection(narrow, blocks, others, list(names))
    return cache[key]


# -- conversion of user data -----------------------------------------------------------------------


def ids_of(values: Ids, what: str = "the request") -> np.ndarray:
    """Convert ids to an int64 array; raise unless all are integers of at most 64 bits."""
    if isinstance(values, pa.ChunkedArray | pa.Array):
        if values.null_count:
            raise UsageError(f"An id for {what} is null; drop such rows first", code="data-null")
        if not pa.types.is_integer(values.type):
            raise UsageError(
                f"The ids for {what} should be whole numbers, but are {values.type}; encode them "
                "first, for example with category_encode",
                code="data-dtype",
            )
        return values.cast(pa.int64()).to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1:
        return values.astype(np.int64, copy=False)
    listed = (
        list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    )
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise UsageError(
                f"An id for {what} should be a whole number, got {each!r}", code="data-type"
            )
        if not -(1 << 63) <= each < 1 << 63:
            raise UsageError(f"The id {each} for {what} has more than 64 bits", code="data-value")
    return np.array(listed, np.int64)


def _numbers(column: pa.ChunkedArray, layout: ColumnLayout, what: str) -> np.ndarray:
    dtype = _NUMBERS[layout.kind]
    wanted = (
        f"{layout.kind} without nulls"
        if layout.length is None
        else (f"vectors of {layout.length} {layout.kind} without nulls")
    )
    refused = UsageError(
        f"The column {layout.name} for {what} should be of {wanted}, but is {column.type} with "
        f"{column.null_count} nulls",
        code="data-dtype",
        column=layout.name,
    )
    if column.null_count:
        raise refused
    array = column.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if layout.length is None:
        if not _casts(array.type, dtype):
            raise refused
        return _cast(array, dtype, refused)
    if not hasattr(array.type, "value_type"):
        raise refused
    if _length_of(pa.chunked_array([array])) != layout.length and len(array):
        raise refused
    values = array.flatten()
    if not _casts(values.type, dtype):
        raise refused
    return _cast(values, dtype, refused).reshape(len(array), layout.length)


def _casts(source: pa.DataType, dtype: np.dtype) -> bool:
    if dtype.kind == "b" or pa.types.is_boolean(source):
        return dtype.kind == "b" and pa.types.is_boolean(source)
    return pa.types.is_integer(source) or (pa.types.is_floating(source) and dtype.kind == "f")


def _cast(array: pa.Array, dtype: np.dtype, refused: UsageError) -> np.ndarray:
    try:
        cast = array.cast(pa.from_numpy_dtype(dtype), safe=dtype.kind != "f")
    except pa.ArrowInvalid:
        raise refused from None
    return cast.to_numpy(zero_copy_only=False)


def _array(column: pa.ChunkedArray, layout: ColumnLayout, what: str) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    try:
        return array.cast(column_types.to_arrow(layout.kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UsageError(
            f"The column {layout.name} for {what} should be of type {layout.kind}, but is "
            f"{column.type}",
            code="data-dtype",
            column=layout.name,
        ) from None


def table_of(source: Any, what: str) -> pa.Table:  # source: any table
    """Convert a table, a data frame, or the Parquet files at a path to an Arrow table.

    Spark ML vectors become lists.
    """
    if isinstance(source, pa.Table):
        table = source
    elif isinstance(source, pa.RecordBatch):
        table = pa.Table.from_batches([source])
    elif isinstance(source, str) or hasattr(source, "__fspath__"):
        fs, path = open_file_system(source)
        if not fs.exists(path):
            raise UsageError(
                f"There are no Parquet files at {source} for {what}",
                code="path-missing",
                path=str(source),
            )
        try:
            table = pq.read_table(path, filesystem=fs)
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(
                f"The files at {source} for {what} cannot be read as Parquet: {error}",
                code="file-format",
                path=str(source),
            ) from error
    elif hasattr(source, "df") or hasattr(source, "sparkSession"):
        table = _of_spark(getattr(source, "df", source))
    elif isinstance(source, Mapping):
        table = pa.table(dict(source))
    elif hasattr(source, "iloc"):
        table = pa.Table.from_pandas(source, preserve_index=False)
    else:
        raise UsageError(
            f"The rows for {what} should be a FeatureTable, a DataFrame, an Arrow table or a path "
            f"of Parquet files, got {type(source).__name__}",
            code="data-type",
        )
    for index, name in enumerate(table.column_names):
        dtype = table.schema.field(name).type
        if pa.types.is_struct(dtype) and {each.name for each in dtype} == _SPARK_VECTOR:
            table = table.set_column(index, name, _dense(table[name], name, what))
    return table


def _of_spark(df: Any) -> pa.Table:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import col

    vectors = [each.name for each in df.schema if each.dataType.typeName() == "vector"]
    for name in vectors:
        df = df.withColumn(name, vector_to_array(col(f"`{name}`"), "float32"))
    return to_arrow(df)


def _dense(column: pa.ChunkedArray, name: str, what: str) -> pa.Array:
    array = column.combine_chunks()
    if pc.any(pc.equal(array.field("type"), 0)).as_py():
        raise UsageError(
            f"The column {name} for {what} has sparse vectors; convert them to dense vectors first",
            code="data-type",
            column=name,
        )
    return array.field("values").cast(pa.list_(pa.float32()))
