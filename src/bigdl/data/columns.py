"""Conversion of Arrow columns to fixed-size records, one field per column.

A record holds all values of a row, each at a fixed offset.  Scalars and fixed-size arrays are
stored inline.  Strings, bytes and lists are stored as an offset into a separate file of values and
a count. So a batch needs one gather of records, for any number of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.runtime.shards.feed import SourceError

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402

_SIGNED = {pa.uint16(): "int32", pa.uint32(): "int64", pa.uint64(): "int64"}
_EXTENT = np.dtype([("start", "<i8"), ("count", "<i8")])


@dataclass(frozen=True)
class RecordField:
    """Name, memory layout, dtype and shape of a column in a record.

    Attributes
    ----------
    name : str
        Dotted for a field within structs.
    layout : str
        ``"fixed"``, ``"list"``, ``"text"`` or ``"bytes"``.
    dtype : str
        Dtype of the values.
    shape : tuple of int
        Fixed dimensions of a row's value; of a list, those of an element.
    depth : int
        Levels of variable-length lists within the outermost list.
    """

    name: str
    layout: str
    dtype: str
    shape: tuple[int, ...] = ()
    depth: int = 0


def leaves_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the types of all columns by name; columns within structs have dotted names."""
    leaves: dict[str, pa.DataType] = {}

    def add(name: str, type_: pa.DataType) -> None:
        if pa.types.is_struct(type_):
            for child in type_:
                add(f"{name}.{child.name}", child.type)
        else:
            leaves[name] = type_

    for each in schema:
        add(each.name, each.type)
    return leaves


def top_level(name: str, schema: pa.Schema) -> str:
    """Return the top-level column that contains a dotted column name."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next(each for each in prefixes if each in schema.names)


def fields_of(schema: pa.Schema, columns: Sequence[str] | None, table: str) -> list[RecordField]:
    """Return the record fields of the selected columns, by default of all columns.

    Raises
    ------
    UsageError
        For a column that is missing, or of a type that cannot be loaded.
    """
    leaves = leaves_of(schema)
    chosen: list[str] = []
    for name in schema.names if columns is None else columns:
        within = [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}.")]
        if not within:
            raise UsageError(
                f"There is no column '{name}' in {table}; it has {list(leaves)}",
                code="column-missing",
                column=name,
                columns=list(leaves),
            )
        chosen += within
    return [_field(name, leaves[name]) for name in dict.fromkeys(chosen)]


def _field(name: str, type_: pa.DataType) -> RecordField:
    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return RecordField(name, "text", "uint8")
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_):
        return RecordField(name, "bytes", "uint8")
    shape: tuple[int, ...] = ()
    depth = 0
    inner = type_
    while types.is_nested(inner):
        if isinstance(inner, pa.FixedShapeTensorType):
            inner = inner.storage_type
        if types.is_fixed_size_list(inner):
            shape = (*shape, inner.list_size)
        elif (types.is_list(inner) or types.is_large_list(inner)) and not shape:
            depth += 1
        else:
            raise _no_tensor(name, type_)
        inner = inner.value_type
    if isinstance(inner, pa.FixedShapeTensorType):
        shape, inner = (*shape, *inner.shape), inner.value_type
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        raise _no_tensor(name, type_)
    dtype = _SIGNED.get(inner) or np.dtype(inner.to_pandas_dtype()).name
    return RecordField(name, "list" if depth else "fixed", dtype, shape, max(0, depth - 1))


def _no_tensor(name: str, type_: pa.DataType) -> UsageError:
    return UsageError(
        f"Column '{name}' has type {type_}, which cannot be loaded: numbers, booleans, strings, "
        "bytes and lists of numbers can; cast it first, or omit it from columns=",
        code="data-dtype",
        column=name,
    )


def record_dtype(fields: Sequence[RecordField]) -> np.dtype:
    """Return the NumPy dtype of a record, with the widest fields first to keep fields aligned."""
    formats: dict[str, np.dtype] = {}
    for field in sorted(
        fields, key=lambda f: -8 if f.layout != "fixed" else -np.dtype(f.dtype).itemsize
    ):
        formats[field.name] = (
            np.dtype((field.dtype, field.shape)) if field.layout == "fixed" else _EXTENT
        )
    offsets = np.cumsum([0, *(each.itemsize for each in formats.values())])
    widest = max(8 if f.layout != "fixed" else np.dtype(f.dtype).itemsize for f in fields)
    size = -(-int(offsets[-1]) // widest) * widest
    return np.dtype(
        {
            "names": list(formats),
            "formats": list(formats.values()),
            "offsets": [int(each) for each in offsets[:-1]],
            "itemsize": size,
        }
    )


def column_of(batch: dict[str, pa.Array], name: str) -> pa.Array:
    """Return a column of a batch by its name, which is dotted for a column within structs.

    Raises
    ------
    SourceError
        If the column has nulls.
    """
    top = next(each for each in _prefixes(name) if each in batch)
    array = batch[top]
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    _refuse_nulls(array, name)
    rest = name[len(top) + 1 :]
    while rest:
        child = next(
            each.name
            for each in array.type
            if rest == each.name or rest.startswith(f"{each.name}.")
        )
        array = array.flatten()[array.type.get_field_index(child)]
        _refuse_nulls(array, name)
        rest = rest[len(child) + 1 :]
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _refuse_nulls(array: pa.Array, name: str) -> None:
    if array.null_count:
        raise SourceError(
            f"Column '{name}' holds nulls ({array.null_count} in the first {len(array)} rows that "
            "have any); fill or drop them first",
            code="data-null",
            column=name,
        )


def fixed_values(field: RecordField, array: pa.Array) -> np.ndarray:
    """Convert a column of scalars or fixed-size lists to an array of shape ``(rows, *shape)``."""
    rows = len(array)
    while pa.types.is_fixed_size_list(array.type) or isinstance(array, pa.ExtensionArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.flatten()
        _refuse_nulls(array, field.name)
    return _numbers(field, array).reshape(rows, *field.shape)


def _numbers(field: RecordField, array: pa.Array) -> np.ndarray:
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64 and len(values) and int(values.max()) >= 1 << 63:
        raise SourceError(
            f"Column '{field.name}' holds {values.max()}, which does not fit in int64; cast it "
            "first",
            code="data-value",
            column=field.name,
        )
    return values.astype(field.dtype, copy=False)


def varying_values(
    field: RecordField, array: pa.Array
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return a text, bytes or list column's concatenated values, and the number of values per row.

    Returns
    -------
    values : ndarray
        One-dimensional, row after row.
    counts : ndarray of int64
        Elements of each row.
    inner : tuple of int
        Shape of an element.
    """
    types = pa.types
    if field.layout != "list":
        is_text = field.layout == "text"
        array = array.cast(pa.large_string() if is_text else pa.large_binary())
        _, offsets, data = array.buffers()
        if not len(array):
            return np.empty(0, np.uint8), np.empty(0, np.int64), ()
        ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        if data is None:
            return np.empty(0, np.uint8), np.diff(ends), ()
        return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], np.diff(ends), ()
    counts = np.diff(array.offsets.to_numpy()).astype(np.int64)
    array = array.flatten()
    inner: tuple[int, ...] = ()
    while types.is_list(array.type) or types.is_large_list(array.type):
        _refuse_nulls(array, field.name)
        lengths = np.diff(array.offsets.to_numpy())
        if len(lengths) and (lengths != lengths[0]).any():
            raise SourceError(
                f"Column '{field.name}' holds lists of lists of different lengths; only the "
                "outermost lists may differ, so pad or cut the inner ones",
                code="data-shape",
                column=field.name,
            )
        inner = (*inner, int(lengths[0]) if len(lengths) else 0)
        array = array.flatten()
    _refuse_nulls(array, field.name)
    if field.shape:
        rest = RecordField(field.name, "fixed", field.dtype, field.shape)
        return fixed_values(rest, array).reshape(-1), counts, (*inner, *field.shape)
    return np.ascontiguousarray(_numbers(field, array)), counts, inner
