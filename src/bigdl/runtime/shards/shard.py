"""Shards and spools: the rows of one worker as columns in memory-mapped files.

A spool contains the columns of one shard in one local directory and is written once.

Rows arrive in chunks.  A chunk has a position ``(source partition, sequence number)``, assigned
before any transfer.  The finished spool is sorted by position, independent of the order of arrival.
A column is one file of contiguous values (an Arrow buffer without framing), so a batch is one slice
and a shuffled batch is one gather, and the memory belongs to the page cache.

A spool is below the engine's local directory, which is removed with the application, in a folder
named after the job and the shard.  It is removed at the end of the job; spools of dead processes
are removed when the next job starts.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from bigdl.common.errors import UsageError
from bigdl.common.platform.files import DISK_FULL, copy_range, link, map_private, reserve
from bigdl.common.platform.processes import (
    open_file_count,
    open_file_limits,
    set_open_file_limit,
)
from bigdl.runtime.shards.columns import ArraySpec, ColumnSpec
from bigdl.runtime.shards.digest import digest_of_rows
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.texts import TEXT, is_text, widen_texts

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PREFIX = "bigdl-spool-"
_NAME = re.compile(rf"{_PREFIX}(?P<job>[0-9]+)-.+")
_META = "spool.json"
_SAMPLE = 4096  # bytes of each chunk and array that the fingerprint covers
_SPARE_FILES = 256  # reserved for files and connections other than spools


@dataclass
class Spool:
    """JSON-serializable description of a finished spool, the column files of one shard.

    Attributes
    ----------
    path : str
        The directory.
    nonce : str
        Random id that is also stored in the directory: a reused path has another id.
    rows : int
    leaves : list of ArraySpec
        The arrays, in the order of the files ``0.bin``, ``1.bin``, ...  Without rows the lengths of
        arrays are unknown and set to 0.
    fingerprint : int
        Checksum over the positions, sizes and samples of the chunks, to detect whether two runs
        have the same rows in the same order.
    columns : list of str
        Names of the columns, including map columns without known keys.
    table : dict or None
        For consecutive rows of a table: its ``name``, the number of its ``rows``, the number of
        the ``first`` row of the spool, and the ``digest`` of the spool's rows.
    """

    path: str
    nonce: str
    rows: int
    leaves: list[ArraySpec] = field(default_factory=list)
    fingerprint: int = 0
    columns: list[str] = field(default_factory=list)
    table: dict[str, int | str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the Spool as JSON-serializable values."""
        return asdict(self)

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Spool:
        """Create a Spool from its JSON description."""
        leaves = [ArraySpec.from_json(x) for x in doc["leaves"]]
        return cls(**{**doc, "leaves": leaves})

    def is_here(self) -> bool:
        """Return True if the complete spool is visible on this machine."""
        try:
            with open(os.path.join(self.path, _META)) as file:
                return bool(json.load(file)["nonce"] == self.nonce)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def arrays(self) -> list[np.ndarray]:
        """Map the columns as private arrays; writing to an array copies the written pages."""
        _allow_files(len(self.leaves))
        return [
            _map(os.path.join(self.path, f"{i}.bin"), leaf, self.rows)
            for i, leaf in enumerate(self.leaves)
        ]


def _map(path: str, leaf: ArraySpec, rows: int) -> npt.NDArray[Any]:
    shape = (rows, *leaf.shape)
    if rows == 0 or 0 in shape:
        return np.empty(shape, leaf.dtype)
    with open(path, "rb") as file:
        # Private and writable: torch shares it without a copy, and the file never changes.
        pages = map_private(file.fileno())
    return np.frombuffer(pages, leaf.dtype).reshape(shape)


class SpoolWriter:
    """Writer of the chunks of one shard's spool.

    Parameters
    ----------
    root : str
        Local directory of the engine.
    job : int
        Number of the job; later jobs of a driver have higher numbers.
    name : str
        Name of the feed and shard within the job.
    specs : sequence of ColumnSpec
        Column specs; empty for rows that contain their column names.
    """

    def __init__(self, root: str, job: int, name: str, specs: list[ColumnSpec]):
        self._specs = specs
        self._nonce = secrets.token_hex(8)
        self.path = os.path.join(root, f"{_PREFIX}{job}-{name}-{self._nonce}")
        os.makedirs(self.path, mode=0o700)  # private to its owner
        self._leaves: list[ArraySpec] | None = None
        self._files: list[Any] = []
        self._chunks: list[tuple[int, int, int, int]] = []  # source, sequence, rows, checksum
        self._stored: list[list[ArraySpec]] = []  # specs of each chunk
        self._expected = 0
        self._table: dict[str, int | str] | None = None
        self.rows = 0

    def number_rows(self, table: str, first: int, rows: int) -> None:
        """Declare that the rows are consecutive rows of a table, appended in their order.

        Parameters
        ----------
        table : str
            Name of the table, for messages.
        first : int
            Number of the first row in the table.
        rows : int
            Number of rows of the table.
        """
        self._table = {"name": table, "first": first, "rows": rows, "digest": 0}

    def expect(self, rows: int) -> None:
        """Preallocate the files for an expected number of rows, before the first chunk.

        Preallocated files are written about twice as fast.
        """
        self._expected = rows

    def append(
        self, source: int, sequence: int, rows: int, leaves: list[ArraySpec], arrays: list[Any]
    ) -> None:
        """Append one chunk; an empty chunk only sets the array specs.

        Parameters
        ----------
        source, sequence : int
            Position of the chunk in the whole input.
        rows : int
        leaves : list of ArraySpec
        arrays : list of buffers
            C-contiguous values of each array.
        """
        if self._leaves is None:
            self._open(leaves)
        elif leaves != self._leaves:
            self._leaves = _with_widest(self._leaves, leaves)
        if rows == 0:
            return
        checksum = 0
        for file, array in zip(self._files, arrays, strict=True):
            view = write_array(file, array, self.rows)
            checksum = zlib.crc32(view[:_SAMPLE], checksum)
        self._chunks.append((source, sequence, rows, checksum))
        self._stored.append(leaves)
        if self._table is not None:
            first, digest = int(self._table["first"]) + self.rows, int(self._table["digest"])
            self._table["digest"] = (digest + digest_of_rows(arrays, first)) % (1 << 64)
        self.rows += rows

    def adopt(self, rows: int, leaves: list[ArraySpec], paths: list[str]) -> None:
        """Link or copy complete value files instead of appending chunks.

        Parameters
        ----------
        rows : int
        leaves : list of ArraySpec
        paths : list of str
            A file for each array, hard-linked if possible. The files must not change any more.
        """
        self._leaves, self.rows = list(leaves), rows
        checksum = 0
        for i, path in enumerate(paths):
            copy = os.path.join(self.path, f"{i}.bin")
            link(path, copy)
            with open(copy, "rb") as file:
                checksum = zlib.crc32(file.read(_SAMPLE), checksum)
        self._chunks.append((0, 0, rows, checksum))

    def finish(self) -> Spool:
        """Close the files, sort their chunks, and return the finished :class:`Spool`."""
        for file in self._files:
            file.close()
        leaves = self._leaves
        if leaves is None:
            leaves = [
                ArraySpec(spec.name, None, spec.dtype, (0,) * spec.ndim)
                for spec in self._specs
                if spec.kind == "plain"
            ]
        ordered = sorted(self._chunks)
        for i, leaf in enumerate(leaves):
            stored = [each[i] for each in self._stored]
            if self._chunks != ordered or any(each != leaf for each in stored):
                _rewrite(os.path.join(self.path, f"{i}.bin"), leaf, self._chunks, stored)
        # a sum of the checksums would not detect swapped rows
        fingerprint = zlib.crc32(json.dumps(ordered).encode()) if ordered else 0
        columns = [spec.name for spec in self._specs] or _columns(leaves)
        spool = Spool(self.path, self._nonce, self.rows, leaves, fingerprint, columns, self._table)
        with open(os.path.join(self.path, _META), "w", opener=open_private) as file:
            json.dump(spool.to_json(), file)
        return spool

    def discard(self) -> None:
        """Close and remove the files of an unfinished spool."""
        for file in self._files:
            file.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _open(self, leaves: list[ArraySpec]) -> None:
        _allow_files(len(leaves))
        self._leaves = list(leaves)
        self._files = [
            open(  # noqa: SIM115
                os.path.join(self.path, f"{i}.bin"), "wb", buffering=0, opener=open_private
            )
            for i in range(len(leaves))
        ]
        for file, leaf in zip(self._files, leaves, strict=True):
            size = self._expected * _width(leaf)
            if size:
                with contextlib.suppress(OSError):  # unsupported by the file system, or a full disk
                    reserve(file.fileno(), size)


def write_array(file: BinaryIO, values: np.ndarray, rows: int) -> memoryview:
    """Write the values of an array to a file and return their bytes.

    Parameters
    ----------
    file : file
        Unbuffered binary file, so that a full disk raises here.
    values : numpy.ndarray
        Contiguous array.
    rows : int
        Number of rows of the input that were already written.

    Returns
    -------
    memoryview
        The bytes of the values.

    Raises
    ------
    UsageError
        If the disk is full.
    """
    left = view = _bytes_of(values)
    try:
        while left:  # write() may be partial
            left = left[file.write(left) :]
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        folder = os.path.dirname(os.path.dirname(file.name))
        raise UsageError(
            f"The disk of {folder} is full after {rows} rows of a worker's input; point "
            "spark.local.dir or TMPDIR to a larger one",
            code="path-unusable",
            path=str(folder),
        ) from error
    return view


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    view = np.frombuffer(values, np.uint8)  # memoryview.cast() does not support texts
    return memoryview(cast("Buffer", view))


def _with_widest(known: list[ArraySpec], leaves: list[ArraySpec]) -> list[ArraySpec]:
    """Merge two lists of array specs: keep the wider text dtypes; raise on other differences."""
    if [_of_any_width(leaf) for leaf in known] != [_of_any_width(leaf) for leaf in leaves]:
        raise SourceError(describe_difference(known, leaves), code="data-schema")
    pairs = zip(known, leaves, strict=True)
    return [max(pair, key=lambda leaf: np.dtype(leaf.dtype).itemsize) for pair in pairs]


def _of_any_width(leaf: ArraySpec) -> ArraySpec:
    return replace(leaf, dtype=TEXT) if is_text(leaf.dtype) else leaf


def _columns(leaves: list[ArraySpec]) -> list[str]:
    """Return the distinct names of the columns from which arrays were read."""
    names = [x.column if isinstance(x.column, tuple) else (x.column,) for x in leaves]
    return list(dict.fromkeys(name for each in names for name in each))


def _allow_files(more: int) -> None:
    """Raise this process's open-file limit so that it can open `more` array files."""
    soft, hard = open_file_limits()
    if soft is None:
        return
    used = open_file_count()
    if used is None:  # no file descriptor is free
        used = soft
    needed = used + more + _SPARE_FILES
    if needed <= soft:
        return
    if hard is not None and needed > hard:
        advice = f"raise the limit, e.g. by ulimit -n {max(1024, 2 * needed)}"
        if more > hard // 2:
            advice += (
                ", or assemble the columns of the input into fewer ones first, e.g. with "
                "VectorAssembler"
            )
        raise UsageError(
            f"A worker may open {hard} files here (ulimit -n), but needs {needed}: {used} are "
            f"open, each of the {more} arrays of the input takes one, and {_SPARE_FILES} are kept "
            f"for connections; {advice}",
            code="resource-limit",
        )
    set_open_file_limit(needed)


def _width(leaf: ArraySpec) -> int:
    """Return the number of bytes of one row of an array with these specs."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def open_private(path: str, flags: int) -> int:
    """Open a file with mode 0600 and return its descriptor."""
    return os.open(path, flags, 0o600)


def _rewrite(
    path: str, leaf: ArraySpec, chunks: list[tuple[int, int, int, int]], stored: list[ArraySpec]
) -> None:
    """Sort the chunks of an array file and convert their values to the dtype of its final spec."""
    sizes = [chunk[2] * _width(each) for chunk, each in zip(chunks, stored, strict=True)]
    offsets = np.cumsum([0, *sizes])
    with open(path, "rb") as source, open(path + ".new", "wb", opener=open_private) as target:
        for i in sorted(range(len(chunks)), key=lambda i: chunks[i][:2]):
            start, left = int(offsets[i]), sizes[i]
            if stored[i] != leaf:
                source.seek(start)
                target.write(_bytes_of(widen_texts(source.read(left), stored[i].dtype, leaf.dtype)))
                target.flush()
                continue
            try:
                copy_range(source, target, start, left)
            except EOFError:
                raise OSError(f"{path} is shorter than its chunks") from None
    os.replace(path + ".new", path)


def describe_difference(expected: list[ArraySpec], actual: list[ArraySpec]) -> str:
    """Describe in one sentence how the arrays of two chunks differ."""
    shapes = {(leaf.column, leaf.key): leaf.shape for leaf in expected}
    others = {(leaf.column, leaf.key): leaf.shape for leaf in actual}
    unlike = [key for key in shapes if key in others and shapes[key] != others[key]]
    if unlike:
        lengths = [" x ".join(map(str, each[unlike[0]])) for each in (shapes, others)]
        return (
            f"Column '{unlike[0][0]}' holds arrays of different lengths ({lengths[0]} and "
            f"{lengths[1]}); pad or cut them to one length first"
        )
    if shapes.keys() == others.keys():
        dtypes = {(leaf.column, leaf.key): _display_dtype(leaf.dtype) for leaf in expected}
        other = next(x for x in actual if dtypes[x.column, x.key] != _display_dtype(x.dtype))
        return (
            f"Column '{other.column}' is {dtypes[other.column, other.key]} in some of the data and "
            f"{_display_dtype(other.dtype)} in the rest; give all of it one dtype first"
        )
    (column, key), *_ = sorted(shapes.keys() ^ others.keys(), key=str)
    if key is None:
        return (
            f"Not all of the data has the same columns: {_columns(expected)} and "
            f"{_columns(actual)}; give all of it the same ones, of the same dtypes"
        )
    return (
        f"Column '{column}' is a map whose keys differ between rows (not all have '{key}'); give "
        "every row the same keys"
    )


def _display_dtype(dtype: str) -> str:
    return "text" if is_text(dtype) else dtype


def remove_spool(path: str) -> None:
    """Remove a spool's directory; ignore other paths."""
    if _NAME.fullmatch(os.path.basename(path)):
        shutil.rmtree(path, ignore_errors=True)


def remove_stale_spools(root: str, job: int, active: set[int]) -> None:
    """Remove the spools of earlier jobs that are not active."""
    for path in glob.glob(os.path.join(glob.escape(root), f"{_PREFIX}*")):
        spool = _NAME.fullmatch(os.path.basename(path))
        if spool and int(spool["job"]) < job and int(spool["job"]) not in active:
            shutil.rmtree(path, ignore_errors=True)


LOADER_FILE = "loader.pkl"
"""Name of a spool's file with a pickled loader."""


class Shard:
    """The rows of one worker, as arrays in memory-mapped files.

    Parameters
    ----------
    spool : Spool

    Attributes
    ----------
    rows : int
    fingerprint : int
        Checksum that is equal for equal rows in equal order.
    arrays : list of ndarray
        The mapped arrays; scalar columns of one dtype form one matrix.
    """

    def __init__(self, spool: Spool):
        self.spool = spool
        self.rows = spool.rows
        self.fingerprint = spool.fingerprint
        self.arrays = spool.arrays()

    def locate(self, name: str) -> dict[str | None, tuple[int, int | None]]:
        """Return a column's locations, keyed by map key; a non-map column has the key None.

        A location is the index of the array, and the column within it (None for the whole array).
        """
        locations: dict[str | None, tuple[int, int | None]] = {}
        for i, leaf in enumerate(self.spool.leaves):
            if leaf.column == name:
                locations[leaf.key] = (i, None)
            elif isinstance(leaf.column, tuple) and name in leaf.column:
                locations[None] = (i, leaf.column.index(name))
        if not locations and name not in self.spool.columns:
            raise UsageError(
                f"The shard has no column '{name}'; it has {self.names}",
                code="column-missing",
                column=name,
                columns=list(self.names),
            )
        return locations

    @property
    def names(self) -> list[str]:
        """Names of the shard's columns."""
        return list(self.spool.columns)

    def column(self, name: str) -> np.ndarray | dict[str, np.ndarray]:
        """Return a column as an array of shape ``(rows, ...)``; a map column as a dict of arrays.

        The array is a private view of the page cache: do not write to it.  Without rows the lengths
        of arrays and the keys of maps may be unknown: they are then 0 and missing.
        """
        arrays = {
            key: self.arrays[i] if j is None else self.arrays[i][:, j]
            for key, (i, j) in self.locate(name).items()
        }
        return arrays.get(None, cast("dict[str, np.ndarray]", arrays))

    def __len__(self) -> int:
        return self.rows


class LoaderShard:
    """A worker's shard of a data loader, whose rows are unknown until the loader is opened.

    Parameters
    ----------
    spool : Spool
        A spool without rows, whose directory contains the pickled loader.
    """

    rows = 0
    fingerprint = 0

    def __init__(self, spool: Spool):
        self.spool = spool
        self._pickled = np.memmap(os.path.join(spool.path, LOADER_FILE), np.uint8, "r")

    def payload(self) -> bytes:
        """Return the pickled loader, or its pickled factory."""
        return self._pickled.tobytes()


def open_shard(spool: Spool) -> Shard | LoaderShard:
    """Return the shard of a finished spool."""
    is_loader = os.path.exists(os.path.join(spool.path, LOADER_FILE))
    return LoaderShard(spool) if is_loader else Shard(spool)
