"""Memory-mapped store of a table's rows, or of one window of rows, as fixed-size records.

A store has one file of records (:mod:`bigdl.data.columns`) and one file of values for each column
of strings, bytes or lists.  Several threads write it once; then all ranks of a machine share its
pages through the page cache.  An in-memory table becomes an in-memory store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.common.platform.files import (
    DISK_FULL,
    anonymous_file,
    has_memory_files,
    map_shared,
    memory_file,
    reserve,
    write_at,
)
from bigdl.common.private_folders import (
    SharedFolder,
    private_folder,
    private_root,
    process_folder,
)
from bigdl.data.columns import (
    RecordField,
    column_of,
    fixed_values,
    record_dtype,
    varying_values,
)
from bigdl.runtime.shards.digest import digest_of_chunk, digest_of_rows
from bigdl.runtime.shards.feed import SourceError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_METADATA_FILE = "table.json"
_RECORDS_FILE = "rows.bin"

Piece = tuple[int, Callable[[], Iterator[dict[str, Any]]]]
"""First row of a part of a table, and a function that yields its batches of Arrow columns."""


@dataclass
class Ragged:
    """Concatenated values and row lengths of a batch of variable-length lists.

    Attributes
    ----------
    values : ndarray, shape (elements, ...)
        Values of all rows, concatenated.
    counts : ndarray of int64, shape (rows,)
        Number of elements of each row.
    """

    values: np.ndarray
    counts: np.ndarray

    def take(self, rows: np.ndarray) -> Ragged:
        """Return the lists at the given row indices."""
        ends = np.cumsum(self.counts)
        counts = self.counts[rows]
        return Ragged(self.values[elements_at((ends - self.counts)[rows], counts)], counts)


def elements_at(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenated indices of `counts` consecutive elements from each start."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


@dataclass
class _ListShapes:
    """Element shape and range of lengths of a list column, collected while writing.

    Attributes
    ----------
    inner : list of int or None
        Shape of an element; None while there are no elements.
    least, most : int
        Minimum and maximum number of elements in a row.
    """

    inner: list[int] | None = None
    least: int = -1
    most: int = -1

    def add(self, field: RecordField, inner: tuple[int, ...], counts: np.ndarray) -> None:
        if int(counts.sum()):
            if self.inner is not None and tuple(self.inner) != inner:
                raise SourceError(
                    f"Column '{field.name}' holds lists of different inner lengths "
                    f"({tuple(self.inner)} and {inner}); pad or cut them to one length first",
                    code="data-shape",
                    column=field.name,
                )
            self.inner = list(inner)
        low, high = int(counts.min()), int(counts.max())
        self.least = low if self.least < 0 else min(self.least, low)
        self.most = max(self.most, high)


class RecordStore:
    """Records and variable-length values in open files.

    Parameters
    ----------
    fields : sequence of RecordField
    rows : int
    open_file : callable
        ``open_file(name)`` returns a file descriptor.

    Attributes
    ----------
    digest : int
        Digest of the contents, once they are written; equal for equal rows of equal files.
    """

    def __init__(self, fields: Sequence[RecordField], rows: int, open_file: Callable[[str], int]):
        self.fields, self.rows = list(fields), rows
        self._dtype = record_dtype(fields)
        self._varying = [each for each in fields if each.layout != "fixed"]
        self._lists = {each.name: _ListShapes() for each in self._varying}
        names = [_RECORDS_FILE, *(f"values-{i}.bin" for i in range(len(self._varying)))]
        self._files = {name: open_file(name) for name in names}
        self.digest = 0
        self._lock = threading.Lock()
        self._ends = dict.fromkeys(names[1:], 0)
        weakref.finalize(self, _close, list(self._files.values()))

    @property
    def _records_file(self) -> int:
        return self._files[_RECORDS_FILE]

    # -- writing -----------------------------------------------------------------------------------

    def write(self, pieces: Iterable[Piece], threads: int, where: str) -> None:
        """Write all rows with several threads, then memory-map the files.

        Parameters
        ----------
        pieces : iterable of Piece
        threads : int
        where : str
            Location for the error message about a full disk.
        """
        try:
            if self.rows:
                size = self.rows * self._dtype.itemsize
                os.ftruncate(self._records_file, 0)
                reserve(self._records_file, size)
            for name in self._ends:
                os.ftruncate(self._files[name], 0)
            with ThreadPoolExecutor(threads, "bigdl-table") as pool:
                for _ in pool.map(self._write_piece, pieces):
                    pass
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise UsageError(
                f"The disk of {where} is full; the {self.rows:,} rows of the table need at least "
                f"{self.rows * self._dtype.itemsize >> 20:,} MiB; set TMPDIR or cache= to a "
                "larger disk, or pass window=, which limits the rows on disk",
                code="path-unusable",
                path=where,
            ) from error
        self.map()

    def _write_piece(self, piece: Piece) -> None:
        row, read = piece
        for batch in read():
            row += self._write_batch(row, batch)

    def _write_batch(self, first: int, batch: dict[str, Any]) -> int:
        records: np.ndarray | None = None
        contents: list[np.ndarray] = []
        digest = 0
        varying = iter(self._ends)
        for field in self.fields:
            array = column_of(batch, field.name)
            if records is None:
                records = np.zeros(len(array), self._dtype)
            if not len(array):
                return 0
            if field.layout == "fixed":
                contents.append(np.ascontiguousarray(fixed_values(field, array)))
                records[field.name] = contents[-1]
                continue
            values, counts, inner = varying_values(field, array)
            digest += digest_of_chunk(values, first) + digest_of_chunk(counts, ~first)
            name = next(varying)
            with self._lock:
                self._lists[field.name].add(field, inner, counts)
                start = self._ends[name]
                self._ends[name] += values.nbytes
            self._write_at(name, values, start)
            width = int(np.prod(inner, dtype=np.int64)) * np.dtype(field.dtype).itemsize
            extents = records[field.name]
            extents["count"] = counts
            extents["start"] = start + (np.cumsum(counts) - counts) * width
        if records is None:
            return 0
        self._write_at(_RECORDS_FILE, records, first * self._dtype.itemsize)
        digest += digest_of_rows(contents, first)
        with self._lock:
            self.digest = (self.digest + digest) % (1 << 64)
        return len(records)

    def _write_at(self, name: str, values: np.ndarray, offset: int) -> None:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        remaining = memoryview(cast("Buffer", raw))
        while remaining:
            written = write_at(self._files[name], remaining, offset)
            remaining, offset = remaining[written:], offset + written

    def facts(self) -> dict[str, Any]:
        """Return the metadata that readers of the files need, as a JSON-compatible dict."""
        lists = {name: asdict(each) for name, each in self._lists.items()}
        return {"rows": self.rows, "lists": lists, "digest": self.digest}

    # -- reading -----------------------------------------------------------------------------------

    def map(self, facts: dict[str, Any] | None = None) -> None:
        """Memory-map the files of a complete store."""
        if facts is not None:
            self._lists = {name: _ListShapes(**doc) for name, doc in facts["lists"].items()}
            self.digest = facts["digest"]
        size = self._dtype.itemsize
        self._records = _memory_map(self._records_file, self.rows * size).view(f"V{size}")
        self._values = {}
        for field, name in zip(self._varying, list(self._ends), strict=True):
            raw = _memory_map(self._files[name], os.fstat(self._files[name]).st_size)
            self._values[field.name] = raw.view(field.dtype)

    def rows_of_equal_lists(self) -> dict[str, int]:
        """Return the list length of each column whose lists all have equal lengths."""
        lists = {
            each.name: self._lists[each.name] for each in self._varying if each.layout == "list"
        }
        return {name: each.most for name, each in lists.items() if each.least == each.most}

    def gather(self, rows: np.ndarray) -> dict[str, Any]:
        """Return a dict of values at the given row indices, keyed by column.

        Parameters
        ----------
        rows : ndarray of int64

        Returns
        -------
        dict
            Arrays of shape ``(rows, ...)``; :class:`Ragged` for lists; lists of str or bytes.
        """
        records = self._records.take(rows, mode="clip").view(self._dtype)
        return {each.name: self._column(each, records[each.name]) for each in self.fields}

    def _column(
        self, field: RecordField, values: np.ndarray
    ) -> np.ndarray | Ragged | list[str] | list[bytes]:
        if field.layout == "fixed":
            return np.ascontiguousarray(values)
        data, lists = self._values[field.name], self._lists[field.name]
        starts, counts = values["start"], values["count"]
        if field.layout != "list":
            view = memoryview(cast("Buffer", data))
            extents = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
            if field.layout == "text":
                return [str(view[low:high], "utf-8") for low, high in extents]
            return [bytes(view[low:high]) for low, high in extents]
        inner = tuple(lists.inner) if lists.inner is not None else field.shape
        width = int(np.prod(inner, dtype=np.int64))
        starts = starts // data.itemsize // max(1, width)  # in elements
        elements = data[: len(data) // max(1, width) * width].reshape(-1, *inner)
        counts = np.ascontiguousarray(counts)
        if lists.least == lists.most > 0:  # equal lengths: gather whole rows
            rows = elements.reshape(-1, lists.most, *inner).take(starts // lists.most, axis=0)
            return Ragged(rows.reshape(-1, *inner), counts)
        return Ragged(elements.take(elements_at(starts, counts), axis=0), counts)


def _close(files: list[int]) -> None:
    for each in files:
        with contextlib.suppress(OSError):
            os.close(each)


def _memory_map(file: int, size: int) -> np.ndarray:
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(map_shared(file, size), np.uint8)


# -- locations of stores
# ----------------------------------------------------------------------------


def store_in_memory(
    fields: Sequence[RecordField], rows: int, pieces: Iterable[Piece]
) -> RecordStore:
    """Write rows to a RecordStore in this process's memory."""

    def open_file(name: str) -> int:
        if has_memory_files():
            return memory_file(f"bigdl-{name}")
        return anonymous_file(process_folder(), name)

    store = RecordStore(fields, rows, open_file)
    store.write(pieces, 1, "memory")
    return store


def store_in_folder(
    fields: Sequence[RecordField], rows: int, pieces: Iterable[Piece], folder: str
) -> RecordStore:
    """Write rows to a RecordStore of unlinked files, which disappear when the process exits."""
    store = RecordStore(fields, rows, lambda name: anonymous_file(folder, name))
    store.write(pieces, core_count(), folder)
    return store


def shared_path(key: object, fields: Sequence[RecordField], rows: int, cache: str | None) -> str:
    """Return the folder of a shared store, which depends on a key and the fields.

    Parameters
    ----------
    key : object
        Identity of the rows, JSON-serializable.
    fields, rows
        As in :class:`RecordStore`.
    cache : str or None
        Parent folder; by default the user's private temporary folder.
    """
    text = json.dumps([key, rows, [asdict(each) for each in fields]], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    root = private_root() if cache is None else str(private_folder(cache))
    # the name pattern of temporary folders in private_folders
    return os.path.join(root, f"table-{digest[:24]}.{digest[24:]}")


class SharedStore:
    """Store that all processes of a machine share; the first process writes it, the others wait.

    Parameters
    ----------
    path : str
        Folder, from :func:`shared_path`.
    fields, rows
        As in :class:`RecordStore`.
    pieces : callable
        Returns the pieces; called in the writing process only.
    keep : bool
        If False, the last process that uses the store removes it.

    Attributes
    ----------
    store : RecordStore
    existed : bool
        False if this process wrote the store.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[RecordField],
        rows: int,
        pieces: Callable[[], Iterable[Piece]],
        *,
        keep: bool,
    ):
        self._folder = SharedFolder(path, keep=keep)
        self.path, self.close = path, self._folder.close
        try:
            with self._folder.writing():
                facts = self._facts()
                self.existed = facts is not None
                self.store = RecordStore(fields, rows, self._open_file)
                if facts is not None:
                    self.store.map(facts)
                else:
                    self._write(pieces())
        except BaseException:
            self.close()
            raise

    def _open_file(self, name: str) -> int:
        return os.open(os.path.join(self.path, name), os.O_RDWR | os.O_CREAT, 0o600)

    def _facts(self) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.path, _METADATA_FILE), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return None

    def _write(self, pieces: Iterable[Piece]) -> None:
        self.store.write(pieces, core_count(), self.path)
        path = os.path.join(self.path, _METADATA_FILE)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(self.store.facts(), file)
        os.replace(f"{path}.new", path)
