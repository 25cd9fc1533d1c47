"""Data files of a table at one version, and readers of row ranges.

The row groups of the table's Parquet files, without deleted rows, are concatenated and split into
ranges with equal numbers of rows.  A split may fall within a row group.  Reading a
:class:`RowRange` needs access to its file only.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.common.platform.network import host_name
from bigdl.common.storage import is_local_path, open_file_system

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

from bigdl.data.lake_tables.expressions import Query, filter_rows, rows_of  # noqa: E402

_FOOTERS = 16  # footers read concurrently
_FOOTER_BYTES = 64 << 10  # read at the end of a file; larger footers are read again
KEY = b"bigdl.key"  # field metadata: the column's name or id in the files
FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, eq=False)
class DataFile:
    """Path, constant columns and deleted rows of one Parquet file of a table.

    Attributes
    ----------
    path : str
        Path within the file system of the table.
    constants : tuple of (str, object)
        Columns with one value in all rows, such as partition columns.
    deleted : ndarray of int64 or None
        Positions of the deleted rows in the file, ascending.
    schema : pyarrow.Schema or None
        Schema with field ids, if the file's schema lacks them.
    footer : str or None
        Digest of the file's footer, once it was read.
    """

    path: str
    constants: tuple[tuple[str, Any], ...] = ()
    deleted: np.ndarray | None = None
    schema: pa.Schema | None = None
    footer: str | None = None


@dataclass(frozen=True, eq=False)
class RowRange:
    """Range of rows within one row group of a Parquet file.

    Attributes
    ----------
    file : DataFile
        Without `deleted`.
    group, start, stop : int
        Index of the row group, and row offsets in it. If :attr:`TableColumns.query` has a
        condition, only rows that fulfill it are counted.
    deleted : ndarray of int64 or None
        Offsets of deleted rows between `start` and `stop`.
    """

    file: DataFile
    group: int
    start: int
    stop: int
    deleted: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.stop - self.start - (0 if self.deleted is None else len(self.deleted))


@dataclass(frozen=True, eq=False)
class TableColumns:
    """Selected columns of a table, with the information that file readers need; can be pickled.

    Attributes
    ----------
    url : str
        A path of the table, which determines the file system.
    fields : tuple of pyarrow.Field
        The metadata entry :data:`KEY` has a column's name or id in the files, if it differs.
    is_by_id : bool
        True if files identify columns by field id, False if by name.
    evolves : bool
        False if all files have exactly these columns and types.
    query : Query or None
        Computes the resulting columns from these, for tables without deleted rows.
    """

    url: str
    fields: tuple[pa.Field, ...]
    is_by_id: bool = False
    evolves: bool = False
    query: Query | None = None


@dataclass(frozen=True, eq=False)
class LakeTable:
    """Schema and data files of a table at one version.

    Attributes
    ----------
    url : str
    schema : pyarrow.Schema
    files : list of DataFile
        In the order of the table's rows.
    is_by_id, evolves : bool
        As in :class:`TableColumns`.
    version : str or None
        Path with version, for :func:`~bigdl.data.lake_tables.open_table`; None for plain files.
    is_pinned : bool
        True if the user requested this version.
    identity : dict
        ``table``, the id from the table's metadata or None; ``files``, a digest of the data
        files; and ``count``, their number.
    complete_schema : callable
        ``complete_schema(file, schema)`` returns the file with field ids added to its schema.
    """

    url: str
    schema: pa.Schema
    files: list[DataFile]
    is_by_id: bool = False
    evolves: bool = False
    version: str | None = None
    is_pinned: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    complete_schema: Callable[[DataFile, pa.Schema], DataFile] = field(
        default=lambda file, schema: file
    )

    @property
    def name(self) -> str:
        """Version or path of the table, for messages."""
        return self.version or self.url

    def columns(self, names: Sequence[str]) -> TableColumns:
        """Return the selection of the named columns, in the form that file readers take."""
        fields = tuple(self.schema.field(name) for name in names)
        return TableColumns(self.url, fields, self.is_by_id, self.evolves)

    def row_groups(self, names: Sequence[str]) -> list[RowRange]:
        """Read the footers of all files and return every non-empty row group.

        Parameters
        ----------
        names : sequence of str
            Columns to read later.

        Raises
        ------
        UsageError
            If a file is missing, or lacks a column or has it with another type.
        """
        system, _ = open_file_system(self.url)
        selected = self.columns(names)

        def ranges_of_file(file: DataFile) -> list[RowRange]:
            try:
                tail = _tail(system, file.path)
            except FileNotFoundError:
                raise UsageError(
                    f"The file {file.path} of {self.name} does not exist; pass a version whose "
                    "files were not removed by VACUUM or snapshot expiration",
                    code="path-missing",
                    path=file.path,
                ) from None
            with pq.ParquetFile(pa.BufferReader(tail)) as footer:
                schema, metadata = footer.schema_arrow, footer.metadata
            digest = hashlib.blake2b(tail, digest_size=16).hexdigest()
            file = replace(file, footer=digest)
            constants = dict(file.constants)
            if not self.evolves:
                self._check(file, schema, [name for name in names if name not in constants])
            file = self.complete_schema(file, schema)
            # send only the constants of the selected columns to workers
            kept = tuple((name, constants[name]) for name in names if name in constants)
            if selected.is_by_id:
                file_keys = {_key_in_file(each, True) for each in file.schema or schema}
                kept = tuple(c for c in kept if _key_of(self.schema.field(c[0])) not in file_keys)
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return _ranges(replace(file, constants=kept, deleted=None), sizes, file.deleted)

        with ThreadPoolExecutor(_FOOTERS) as pool:
            return [each for ranges in pool.map(ranges_of_file, self.files) for each in ranges]

    def _check(self, file: DataFile, schema: pa.Schema, names: Sequence[str]) -> None:
        """Raise UsageError if a file lacks a column or the column has another type in the file."""
        for name in names:
            if name not in schema.names:
                raise UsageError(
                    f"The file {file.path} has no column '{name}'",
                    code="column-missing",
                    column=name,
                    path=file.path,
                )
            file_type, expected = schema.field(name).type, self.schema.field(name).type
            if file_type != expected:
                raise UsageError(
                    f"Column '{name}' is {file_type} in the file {file.path} but "
                    f"{expected} in {self.files[0].path}; write all files with the same type",
                    code="data-schema",
                    column=name,
                    path=file.path,
                )


def _tail(system: AbstractFileSystem, path: str) -> bytes:
    """Read the footer of a Parquet file, which has the sizes and statistics of its row groups."""
    with system.open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _FOOTER_BYTES))
        tail = file.read()
        footer = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) < footer <= size:
            file.seek(size - footer)
            tail = file.read()
    return tail[-footer:] if footer <= len(tail) else tail


def files_identity(table: str | None, facts: Sequence[tuple]) -> dict[str, Any]:
    """Return a table's id, a digest of its files and the number of files.

    Parameters
    ----------
    table : str or None
        Id from the metadata of a Delta or Iceberg table.
    facts : sequence of tuple
        For each file its path and values that change with its content.
    """
    text = "\n".join(sorted(map(repr, facts)))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"table": table, "files": digest, "count": len(facts)}


def _ranges(file: DataFile, sizes: Sequence[int], deleted: np.ndarray | None) -> list[RowRange]:
    """Return the non-empty row groups of a file, without deleted rows."""
    ranges, first = [], 0
    for group, size in enumerate(sizes):
        deleted_in_group = None
        if deleted is not None:
            low, high = np.searchsorted(deleted, [first, first + size])
            deleted_in_group = deleted[low:high] - first if low < high else None
        ranges.append(RowRange(file, group, 0, size, deleted_in_group))
        first += size
    return [each for each in ranges if each.rows]


def cut(ranges: Sequence[RowRange], parts: int) -> list[list[RowRange]]:
    """Split row groups into contiguous shards whose row counts differ by at most one."""
    rows = sum(each.rows for each in ranges)
    ends = [rows * (k + 1) // parts for k in range(parts)]
    shards: list[list[RowRange]] = [[] for _ in range(parts)]
    first = 0
    for each in ranges:
        taken, start = 0, each.start
        while taken < each.rows:
            part = bisect.bisect_right(ends, first + taken)
            taken = min(each.rows, ends[part] - first)
            stop = each.stop if taken == each.rows else _offset_after(each, taken)
            shards[part].append(_between(each, start, stop))
            start = stop
        first += each.rows
    return shards


def _offset_after(whole: RowRange, count: int) -> int:
    """Return the row-group offset after the first `count` rows that are not deleted."""
    if whole.deleted is None:
        return whole.start + count
    # deleted[i] - i existing rows precede the i-th deleted row
    before = whole.deleted - whole.start - np.arange(len(whole.deleted))
    return whole.start + count + int(np.searchsorted(before, count, side="left"))


def rows_between(whole: RowRange, first: int, last: int) -> RowRange:
    """Return the rows from `first` to before `last` of a range, counted without deleted rows."""
    stop = whole.stop if last == whole.rows else _offset_after(whole, last)
    return _between(whole, _offset_after(whole, first) if first else whole.start, stop)


def _between(whole: RowRange, start: int, stop: int) -> RowRange:
    deleted = whole.deleted
    if deleted is not None:
        low, high = np.searchsorted(deleted, [start, stop])
        deleted = deleted[low:high] if low < high else None
    return replace(whole, start=start, stop=stop, deleted=deleted)


def read_ranges(
    columns: TableColumns, ranges: Sequence[RowRange], batch_rows: int
) -> Iterator[list[pa.Array]]:
    """Read row ranges and yield the columns of each record batch.

    Parameters
    ----------
    columns : TableColumns
    ranges : sequence of RowRange
    batch_rows : int
        Maximum rows of a batch.
    """
    system, _ = open_file_system(columns.url)
    # Arrow's threads may hold a remote Python file open while the process exits
    ahead = is_local_path(columns.url)
    unit = "us" if columns.evolves else None
    for file, of_file in itertools.groupby(ranges, key=lambda each: each.file):
        try:
            parquet = pq.ParquetFile(
                file.path, filesystem=system, pre_buffer=ahead, coerce_int96_timestamp_unit=unit
            )
        except FileNotFoundError:
            raise UsageError(
                f"The worker on {host_name()} cannot open {file.path}; pass a path that "
                "the driver and all workers can read",
                code="path-missing",
                path=file.path,
            ) from None
        sources = _sources(columns, file, file.schema or parquet.schema_arrow)
        names = list(dict.fromkeys(each.name for each in sources if each is not None))
        for rows in of_file:
            row = 0
            for batch in parquet.iter_batches(
                batch_size=batch_rows, row_groups=[rows.group], columns=names, use_threads=False
            ):
                if columns.query is not None:
                    arrays = _columns_of(batch, columns, sources, dict(file.constants))
                    fields = (each.name for each in columns.fields)
                    named = columns.query.rows(dict(zip(fields, arrays, strict=True)))
                    count = rows_of(named)
                    low, high = max(rows.start - row, 0), min(rows.stop - row, count)
                    if low < high:
                        if high - low < count:
                            named = {n: a.slice(low, high - low) for n, a in named.items()}
                        yield columns.query.select(named)
                    row += count
                    if row >= rows.stop:
                        break
                    continue
                low, high = max(rows.start - row, 0), min(rows.stop - row, batch.num_rows)
                if low < high:
                    part = _remove_deleted(batch.slice(low, high - low), rows.deleted, row + low)
                    if part.num_rows:
                        yield _columns_of(part, columns, sources, dict(file.constants))
                row += batch.num_rows
                if row >= rows.stop:
                    break


def _sources(columns: TableColumns, file: DataFile, schema: pa.Schema) -> list[pa.Field | None]:
    """Return the file's field for each selected column, or None for a missing column."""
    by_key = {_key_in_file(each, columns.is_by_id): each for each in schema}
    constants = dict(file.constants)
    return [
        None if each.name in constants else by_key.get(_key_of(each)) for each in columns.fields
    ]


def _key_of(selected: pa.Field) -> str:
    """Return the name or id under which files store a field of the table."""
    return (selected.metadata or {}).get(KEY, selected.name.encode()).decode()


def _key_in_file(source: pa.Field, is_by_id: bool) -> str | None:
    if not is_by_id:
        return source.name
    key = (source.metadata or {}).get(FIELD_ID)
    return None if key is None else key.decode()


def _remove_deleted(
    batch: pa.RecordBatch, deleted: np.ndarray | None, first: int
) -> pa.RecordBatch:
    """Remove deleted rows from a batch whose first row has offset `first` in the row group."""
    if deleted is None:
        return batch
    low, high = np.searchsorted(deleted, [first, first + batch.num_rows])
    if low == high:
        return batch
    mask = np.ones(batch.num_rows, bool)
    mask[deleted[low:high] - first] = False
    return filter_rows(batch, pa.array(mask))


def _columns_of(batch, columns: TableColumns, sources, constants) -> list[pa.Array]:
    rows, arrays = batch.num_rows, []
    for selected, source in zip(columns.fields, sources, strict=True):
        if source is not None:
            array = batch.column(source.name)
            if columns.evolves:
                array = cast_to_table(array, source, selected, columns.is_by_id)
        elif selected.name in constants:
            array = pa.repeat(pa.scalar(constants[selected.name], selected.type), rows)
        else:
            array = pa.nulls(rows, selected.type)
        arrays.append(array)
    return arrays


def cast_to_table(
    array: pa.Array, source: pa.Field, selected: pa.Field, is_by_id: bool
) -> pa.Array:
    """Cast values of a file to the current type of the table's column.

    Fields of structs, at any depth, are matched by their name or id in the file; missing fields
    become null.
    """
    type_ = selected.type
    if array.type == type_ and not _has_struct(type_):
        return array
    types = pa.types
    if types.is_struct(type_):
        children = {
            _key_in_file(each, is_by_id): (each, values)
            for each, values in zip(source.type, array.flatten(), strict=True)
        }
        child_arrays = []
        for child in type_:
            in_file = children.get(_key_of(child))
            child_arrays.append(
                pa.nulls(len(array), child.type)
                if in_file is None
                else cast_to_table(in_file[1], in_file[0], child, is_by_id)
            )
        nulls = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(child_arrays, fields=list(type_), mask=nulls)
    if types.is_list(type_) or types.is_map(type_):
        if array.offset:
            array = array.take(pa.array(np.arange(len(array))))
        nulls = array.is_null() if array.null_count else None
        if types.is_map(type_):
            keys = cast_to_table(array.keys, source.type.key_field, type_.key_field, is_by_id)
            items = cast_to_table(array.items, source.type.item_field, type_.item_field, is_by_id)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type_, mask=nulls)
        values = cast_to_table(array.values, source.type.value_field, type_.value_field, is_by_id)
        return pa.ListArray.from_arrays(array.offsets, values, type_, mask=nulls)
    return array.cast(type_)


def _has_struct(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return True
    return any(_has_struct(type_.field(i).type) for i in range(type_.num_fields))
