"""Row sources of a TableLoader: files, lake tables and in-memory tables.

A :class:`RowSource` knows its columns, its number of rows and its fingerprint, and reads any range
of rows as dicts of Arrow columns.  :func:`open_source` chooses the class for a value.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, require, type_name
from bigdl.data.columns import top_level
from bigdl.data.lake_tables import is_table_object, open_table
from bigdl.data.lake_tables.table import LakeTable, RowRange, read_ranges, rows_between
from bigdl.data.store import Piece

require("pyarrow", "data")
import pyarrow as pa  # noqa: E402

if TYPE_CHECKING:
    from lance import LanceDataset

_BATCH_ROWS = 16 << 10
_BATCH_BYTES = 1 << 20  # for rows of unknown width, such as images
_PIECE_ROWS = 1 << 20


class RowSource(ABC):
    """Base class of row sources, which read rows by row number.

    Attributes
    ----------
    schema : pyarrow.Schema
    rows : int
    name : str
        Name for messages.
    version : str or None
        Name of the version, if the table has versions.
    is_in_memory : bool
        True if this process holds the rows in memory.
    """

    schema: pa.Schema
    rows: int
    name: str
    version: str | None = None
    is_in_memory = False

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the rows, equal for a copy on another machine."""

    def stamp(self) -> str | None:
        """Return a digest of paths and times: with equal stamps, equal fingerprints are exact.

        None for sources whose fingerprint is always exact.
        """
        return None

    @abstractmethod
    def read(self, columns: Sequence[str], start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Read the rows from `start` to before `stop`; yield batches of columns by name."""

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split a row range into the ranges that one thread reads at a time."""
        ends = [*range(start, stop, _PIECE_ROWS), stop]
        return [(low, high) for low, high in itertools.pairwise(ends) if low < high]

    def pieces(self, leaves: Sequence[str], ranges: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """Yield pairs: the first row's index in the store, and a function that reads the rows."""
        columns = list(dict.fromkeys(top_level(each, self.schema) for each in leaves))
        stored = 0
        for start, stop in ranges:
            for low, high in self.cut(start, stop):
                read: Callable[[], Iterator[dict[str, Any]]]
                read = partial(self.read, columns, low, high)
                yield stored + low - start, read
            stored += stop - start


class FileSource(RowSource):
    """Source of Parquet files, or of a Delta Lake or Iceberg table at one version.

    Parameters
    ----------
    table : LakeTable
    columns : sequence of str or None
        Columns to read, by default all; dotted names are fields of structs.
    """

    def __init__(self, table: LakeTable, columns: Sequence[str] | None):
        self._table, self.schema, self.name = table, table.schema, table.name
        self.version = table.version
        names = table.schema.names
        if columns is not None:
            known = [each for each in columns if any(p in names for p in _prefixes(each))]
            names = list(dict.fromkeys(top_level(each, table.schema) for each in known))
        self._ranges = table.row_groups(names)
        self._ends = np.cumsum([each.rows for each in self._ranges], dtype=np.int64).tolist()
        self.rows = self._ends[-1] if self._ends else 0

    def fingerprint(self) -> str:
        identity = self._table.identity if self.version else None  # that of files has their times
        constants = [each.constants for each in self._table.files]
        ranges = [
            (each.file.footer, each.group, *(() if each.deleted is None else each.deleted.tolist()))
            for each in self._ranges
        ]
        return _digest([identity, constants, ranges])

    def stamp(self) -> str | None:
        return None if self.version else _digest([self._table.identity])

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        inner = [end for end in self._ends if start < end < stop]
        ends = [start, *inner, stop]
        return [(low, high) for low, high in itertools.pairwise(ends) if low < high]

    def read(self, columns: Sequence[str], start: int, stop: int) -> Iterator[dict[str, Any]]:
        selected = self._table.columns(columns)
        numbers = [pa.types.is_primitive(each.type) for each in selected.fields]
        batch_rows = _BATCH_ROWS if all(numbers) else 2048
        for arrays in read_ranges(selected, self._between(start, stop), batch_rows):
            yield dict(zip(columns, arrays, strict=True))

    def _between(self, start: int, stop: int) -> list[RowRange]:
        parts = []
        index = bisect.bisect_right(self._ends, start)
        while index < len(self._ranges) and start < stop:
            each, end = self._ranges[index], self._ends[index]
            first = end - each.rows
            parts.append(rows_between(each, start - first, min(stop, end) - first))
            start, index = end, index + 1
        return parts


class ArrowSource(RowSource):
    """Source of an in-memory Arrow table.

    Parameters
    ----------
    table : pyarrow.Table
    name : str
    """

    is_in_memory = True

    def __init__(self, table: pa.Table, name: str):
        self._table, self.schema, self.name, self.rows = table, table.schema, name, table.num_rows

    def fingerprint(self) -> str:
        sums = [
            [zlib.crc32(each) for each in _buffers_of(chunk)]
            for column in self._table.combine_chunks().columns
            for chunk in column.chunks
        ]
        return _digest([str(self.schema), self.rows, sums])

    def read(self, columns: Sequence[str], start: int, stop: int) -> Iterator[dict[str, Any]]:
        part = self._table.slice(start, stop - start).select(list(columns))
        width = max(1, part.nbytes // max(1, part.num_rows))
        for batch in part.to_batches(max(64, min(_PIECE_ROWS, 64 * _BATCH_BYTES // width))):
            yield dict(zip(columns, batch.columns, strict=True))


class LanceSource(RowSource):
    """Source of a Lance dataset at one version.

    Parameters
    ----------
    dataset : lance.LanceDataset
    """

    def __init__(self, dataset: LanceDataset):
        self._dataset, self.schema, self.rows = dataset, dataset.schema, dataset.count_rows()
        self.name = self.version = f"lance:{dataset.uri}@{dataset.version}"

    def fingerprint(self) -> str:
        fragments = [
            [each.fragment_id, each.count_rows(), [file.path for file in each.metadata.files]]
            for each in self._dataset.get_fragments()
        ]
        return _digest([self._dataset.version, fragments])

    def read(self, columns: Sequence[str], start: int, stop: int) -> Iterator[dict[str, Any]]:
        scanner = self._dataset.scanner(
            columns=list(columns), offset=start, limit=stop - start, scan_in_order=True
        )
        for batch in scanner.to_batches():
            yield dict(zip(columns, batch.columns, strict=True))


def _digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _buffers_of(array: pa.Array) -> list[pa.Buffer]:
    """Return an array's memory buffers, without the rows that slicing cut off."""
    if array.offset:
        array = pa.concat_arrays([array])
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return [each for each in array.buffers() if each is not None]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def open_source(data: object, columns: Sequence[str] | None) -> RowSource:
    """Return the row source for paths, table objects, frames or arrays.

    Parameters
    ----------
    data : object
        Paths of Parquet files, of a Delta Lake, Iceberg or Lance table; an object of these
        libraries; a table or frame of pyarrow, pandas or polars, a relation of DuckDB, a Dataset
        of Hugging Face, or anything else with ``__arrow_c_stream__``.
    columns : sequence of str or None
        Columns to read, by default all.

    Raises
    ------
    UsageError
        If the type of `data` is not supported, or the path cannot be read.
    """
    if _is_of(data, "lance", "LanceDataset"):
        return LanceSource(data)
    if isinstance(data, str | os.PathLike) and os.fspath(data).rstrip("/").endswith(".lance"):
        return LanceSource(require("lance", "data").dataset(os.fspath(data)))
    if isinstance(data, str | os.PathLike | list | tuple) or is_table_object(data):
        if isinstance(data, list | tuple) and not (
            data and all(isinstance(each, str | os.PathLike) for each in data)
        ):
            raise _unreadable(data)
        return FileSource(open_table(data), columns)
    return ArrowSource(_arrow_table(data), f"the {type_name(data)}")


def _arrow_table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if _is_of(data, "datasets", "Dataset"):
        table = data.with_format("arrow")[:]
        return table if isinstance(table, pa.Table) else table.table
    if _is_of(data, "pandas", "DataFrame"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if (
        isinstance(data, dict)
        and data
        and all(isinstance(each, np.ndarray) for each in data.values())
    ):
        return pa.table({name: _arrow_array(each) for name, each in data.items()})
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    raise _unreadable(data)


def _arrow_array(values: np.ndarray) -> pa.Array:
    if values.ndim <= 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _is_of(data: object, package: str, name: str) -> bool:
    """Return True for an instance of a package's class, without importing the package."""
    return package in sys.modules and any(
        each.__name__ == name and each.__module__.split(".")[0] == package
        for each in type(data).__mro__
    )


def _unreadable(data: object) -> UsageError:
    return UsageError(
        f"A TableLoader cannot read {type_name(data)}; pass paths of Parquet files, a Delta Lake, "
        "Iceberg or Lance table, a table or frame of pyarrow, pandas, polars or DuckDB, a "
        "Hugging Face Dataset, or a dict of NumPy arrays",
        code="data-type",
    )
