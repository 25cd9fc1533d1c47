"""A table at one version, and its rows as workers read them.

The rows of a table lie in Parquet files.  Their row groups, without the rows that are deleted, are
laid end to end and cut in ranges of equal numbers of rows, within a row group where need be.  Who
reads a :class:`RowRange` needs the file alone.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.common.storage import is_local_path, open_file_system

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

_FOOTERS = 16  # files whose footers are read at a time
KEY = b"bigdl.key"  # in the metadata of a field: what a file calls it
FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, eq=False)
class DataFile:
    """A Parquet file of a table.

    Attributes
    ----------
    path : str
        Path within the file system of the table.
    constants : tuple of (str, object)
        Values of columns that are the same in all rows, such as those of a partition.
    deleted : ndarray of int64 or None
        Positions of rows in the file that do not count, ascending.
    schema : pyarrow.Schema or None
        In place of the file's own, where that does not tell the ids of its columns.
    """

    path: str
    constants: tuple[tuple[str, Any], ...] = ()
    deleted: np.ndarray | None = None
    schema: pa.Schema | None = None


@dataclass(frozen=True, eq=False)
class RowRange:
    """Some rows of one row group.

    Attributes
    ----------
    file : DataFile
        Without `deleted`.
    group, start, stop : int
        Number of the row group, and the places in it.
    deleted : ndarray of int64 or None
        Places between `start` and `stop` that do not count.
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
    """Columns of a table, as a reader of its files needs them; it can be pickled.

    Attributes
    ----------
    url : str
        A path of the table, which tells its file system.
    fields : tuple of pyarrow.Field
        A table whose files name columns otherwise says in the metadata (:data:`KEY`) what they
        call each.
    is_by_id : bool
        True if that is a column's id, False if it is a name.
    evolves : bool
        False if all files have these columns in these types.
    """

    url: str
    fields: tuple[pa.Field, ...]
    is_by_id: bool = False
    evolves: bool = False


@dataclass(frozen=True, eq=False)
class LakeTable:
    """The files of a table at one version.

    Attributes
    ----------
    url : str
    schema : pyarrow.Schema
    files : list of DataFile
        In the order of their rows.
    is_by_id, evolves : bool
        Of its :class:`TableColumns`.
    version : str or None
        The path that names this version, for :func:`~bigdl.data.lake_tables.open_table`; None of
        plain files.
    is_pinned : bool
        True if the user asked for this version and no other.
    identity : dict
        What the table is, beside its name: ``table``, the id that a lake gave it, or None, and
        ``files``, a digest of its files.
    look : callable
        ``look(file, schema)`` returns a file with what its own schema tells.
    """

    url: str
    schema: pa.Schema
    files: list[DataFile]
    is_by_id: bool = False
    evolves: bool = False
    version: str | None = None
    is_pinned: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    look: Callable[[DataFile, pa.Schema], DataFile] = field(default=lambda file, schema: file)

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.version or self.url

    def columns(self, names: Sequence[str]) -> TableColumns:
        """Return what a reader needs to know of some columns."""
        fields = tuple(self.schema.field(name) for name in names)
        return TableColumns(self.url, fields, self.is_by_id, self.evolves)

    def row_groups(self, names: Sequence[str]) -> list[RowRange]:
        """Return every row group that has rows, from the footers of the files.

        Parameters
        ----------
        names : sequence of str
            The columns that will be read.

        Raises
        ------
        UsageError
            If a file is gone, or has not the columns in the types of the table.
        """
        system, _ = open_file_system(self.url)
        wanted = self.columns(names)

        def look(file: DataFile) -> list[RowRange]:
            try:
                footer = pq.ParquetFile(file.path, filesystem=system)
            except FileNotFoundError:
                raise UsageError(
                    f"The file {file.path} of {self.name} is gone; pass a version whose files "
                    "have not been removed by VACUUM or by the expiry of snapshots",
                    code="path-missing",
                    path=file.path,
                ) from None
            with footer:
                schema, metadata = footer.schema_arrow, footer.metadata
            constants = dict(file.constants)
            if not self.evolves:
                self._check(file, schema, [name for name in names if name not in constants])
            file = self.look(file, schema)
            # nothing but what the rows need travels
            kept = tuple((name, constants[name]) for name in names if name in constants)
            if wanted.is_by_id:
                here = {_key_in_file(each, True) for each in file.schema or schema}
                kept = tuple(c for c in kept if _key_of(self.schema.field(c[0])) not in here)
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return _ranges(replace(file, constants=kept, deleted=None), sizes, file.deleted)

        with ThreadPoolExecutor(_FOOTERS) as pool:
            return [each for ranges in pool.map(look, self.files) for each in ranges]

    def _check(self, file: DataFile, schema: pa.Schema, names: Sequence[str]) -> None:
        """Refuse a file of another schema."""
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
                    f"{expected} in {self.files[0].path}; write all files with one type",
                    code="data-schema",
                    column=name,
                    path=file.path,
                )


def files_identity(table: str | None, facts: Sequence[tuple]) -> dict[str, Any]:
    """Return the identity of a table: its id and a digest of what is known of its files.

    Parameters
    ----------
    table : str or None
        The id that a lake gave the table when it was made.
    facts : sequence of tuple
        For each file its path, and what changes with its content.
    """
    text = "\n".join(sorted(map(repr, facts)))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"table": table, "files": digest, "count": len(facts)}


def _ranges(file: DataFile, sizes: Sequence[int], deleted: np.ndarray | None) -> list[RowRange]:
    """The row groups of a file that have rows."""
    ranges, first = [], 0
    for group, size in enumerate(sizes):
        here = None
        if deleted is not None:
            low, high = np.searchsorted(deleted, [first, first + size])
            here = deleted[low:high] - first if low < high else None
        ranges.append(RowRange(file, group, 0, size, here))
        first += size
    return [each for each in ranges if each.rows]


def cut(ranges: Sequence[RowRange], parts: int) -> list[list[RowRange]]:
    """Cut row groups in contiguous parts whose numbers of rows differ by at most one."""
    rows = sum(each.rows for each in ranges)
    ends = [rows * (k + 1) // parts for k in range(parts)]
    shards: list[list[RowRange]] = [[] for _ in range(parts)]
    first = 0
    for each in ranges:
        taken, start = 0, each.start
        while taken < each.rows:
            part = bisect.bisect_right(ends, first + taken)
            taken = min(each.rows, ends[part] - first)
            stop = each.stop if taken == each.rows else _place_after(each, taken)
            shards[part].append(_between(each, start, stop))
            start = stop
        first += each.rows
    return shards


def _place_after(whole: RowRange, count: int) -> int:
    """The place of a row group behind the first `count` rows that count."""
    if whole.deleted is None:
        return whole.start + count
    # before the i-th deleted row there are deleted[i] - i others
    before = whole.deleted - whole.start - np.arange(len(whole.deleted))
    return whole.start + count + int(np.searchsorted(before, count, side="left"))


def rows_between(whole: RowRange, first: int, last: int) -> RowRange:
    """Return the rows of a range from number `first` to before `last`, of those that count."""
    stop = whole.stop if last == whole.rows else _place_after(whole, last)
    return _between(whole, _place_after(whole, first) if first else whole.start, stop)


def _between(whole: RowRange, start: int, stop: int) -> RowRange:
    deleted = whole.deleted
    if deleted is not None:
        low, high = np.searchsorted(deleted, [start, stop])
        deleted = deleted[low:high] if low < high else None
    return replace(whole, start=start, stop=stop, deleted=deleted)


def read_ranges(
    columns: TableColumns, ranges: Sequence[RowRange], batch_rows: int
) -> Iterator[list[pa.Array]]:
    """Yield the columns of record batches with the rows of some ranges.

    Parameters
    ----------
    columns : TableColumns
    ranges : sequence of RowRange
    batch_rows : int
        Rows of a batch, at most.
    """
    system, _ = open_file_system(columns.url)
    # threads of Arrow may hold a Python file for a moment too long for a process that ends
    ahead = is_local_path(columns.url)
    unit = "us" if columns.evolves else None
    for file, of_file in itertools.groupby(ranges, key=lambda each: each.file):
        try:
            parquet = pq.ParquetFile(
                file.path, filesystem=system, pre_buffer=ahead, coerce_int96_timestamp_unit=unit
            )
        except FileNotFoundError:
            raise UsageError(
                f"The worker on {os.uname().nodename} does not see {file.path}; pass a path that "
                "the driver and all workers share",
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
                low, high = max(rows.start - row, 0), min(rows.stop - row, batch.num_rows)
                if low < high:
                    part = _without(batch.slice(low, high - low), rows.deleted, row + low)
                    if part.num_rows:
                        yield _columns_of(part, columns, sources, dict(file.constants))
                row += batch.num_rows
                if row >= rows.stop:
                    break


def _sources(columns: TableColumns, file: DataFile, schema: pa.Schema) -> list[pa.Field | None]:
    """The file's fields for the columns; None where it has none."""
    by_key = {_key_in_file(each, columns.is_by_id): each for each in schema}
    constants = dict(file.constants)
    return [
        None if each.name in constants else by_key.get(_key_of(each)) for each in columns.fields
    ]


def _key_of(wanted: pa.Field) -> str:
    """Return the name that files have for a field of the table."""
    return (wanted.metadata or {}).get(KEY, wanted.name.encode()).decode()


def _key_in_file(source: pa.Field, is_by_id: bool) -> str | None:
    if not is_by_id:
        return source.name
    key = (source.metadata or {}).get(FIELD_ID)
    return None if key is None else key.decode()


def _without(batch: pa.RecordBatch, deleted: np.ndarray | None, first: int) -> pa.RecordBatch:
    """A batch whose first row is at the place `first`, without what is deleted."""
    if deleted is None:
        return batch
    low, high = np.searchsorted(deleted, [first, first + batch.num_rows])
    if low == high:
        return batch
    mask = np.ones(batch.num_rows, bool)
    mask[deleted[low:high] - first] = False
    return batch.filter(pa.array(mask))


def _columns_of(batch, columns: TableColumns, sources, constants) -> list[pa.Array]:
    rows, arrays = batch.num_rows, []
    for wanted, source in zip(columns.fields, sources, strict=True):
        if source is not None:
            array = batch.column(source.name)
            if columns.evolves:
                array = evolved(array, source, wanted, columns.is_by_id)
        elif wanted.name in constants:
            array = pa.repeat(pa.scalar(constants[wanted.name], wanted.type), rows)
        else:
            array = pa.nulls(rows, wanted.type)
        arrays.append(array)
    return arrays


def evolved(array: pa.Array, source: pa.Field, wanted: pa.Field, is_by_id: bool) -> pa.Array:
    """Return values of a file in the type that the table has now.

    Fields of structs, at any depth, are found by what the file calls them; those that it does not
    have are null.
    """
    type_ = wanted.type
    if array.type == type_ and not _has_struct(type_):
        return array
    kinds = pa.types
    if kinds.is_struct(type_):
        children = {
            _key_in_file(each, is_by_id): (each, values)
            for each, values in zip(source.type, array.flatten(), strict=True)
        }
        made = []
        for child in type_:
            own = children.get(_key_of(child))
            made.append(
                pa.nulls(len(array), child.type)
                if own is None
                else evolved(own[1], own[0], child, is_by_id)
            )
        nulls = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(made, fields=list(type_), mask=nulls)
    if kinds.is_list(type_) or kinds.is_map(type_):
        if array.offset:
            array = array.take(pa.array(np.arange(len(array))))
        nulls = array.is_null() if array.null_count else None
        if kinds.is_map(type_):
            keys = evolved(array.keys, source.type.key_field, type_.key_field, is_by_id)
            items = evolved(array.items, source.type.item_field, type_.item_field, is_by_id)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type_, mask=nulls)
        values = evolved(array.values, source.type.value_field, type_.value_field, is_by_id)
        return pa.ListArray.from_arrays(array.offsets, values, type_, mask=nulls)
    return array.cast(type_)


def _has_struct(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return True
    return any(_has_struct(type_.field(i).type) for i in range(type_.num_fields))
