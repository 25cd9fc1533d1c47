"""Slices of sharded tables in a checkpoint: every worker writes and reads its rows.

Rank ``i % N`` holds row ``i`` of a table, as in :mod:`bigdl.runtime.collectives.rows`;
:meth:`SavedSlices.of_owner` reads slices with another order of rows.  A checkpoint has one ``.npy``
file for each array and rank, and describes them in its manifest.  So any number of workers can read
it, and any program that reads ``.npy`` files.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.lib.format as npy

from bigdl.common.errors import UsageError
from bigdl.common.platform.files import advise
from bigdl.common.storage import is_local_storage, open_file_system
from bigdl.runtime.collectives.rows import rows_of_rank

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

BROADCAST = 1 << 30  # bytes of tables up to which a prediction sends them with the model
_PIECE = 1 << 24  # bytes that are read or written at once


def file_name(array: str, rank: int) -> str:
    """Return the file name of a slice in the checkpoint's folder."""
    return f"rows.{array}.{rank:05d}.npy"


def write_slice(fs: AbstractFileSystem, path: str, rows: np.ndarray) -> dict[str, Any]:
    """Write a slice to a file; return its description for the manifest.

    Parameters
    ----------
    fs : fsspec file system
    path : str
    rows : ndarray
        Contiguous array; it is not copied.
    """
    buffer = io.BytesIO()
    form = {"descr": rows.dtype.str, "fortran_order": False, "shape": rows.shape}
    npy.write_array_header_1_0(buffer, form)
    header = buffer.getvalue()
    checksum, size = zlib.crc32(header), len(header)
    with fs.open(path, "wb") as file:
        file.write(header)
        content = rows.reshape(-1).view(np.uint8).data
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            file.write(piece)
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"size": size, "crc32": checksum, "shape": list(rows.shape), "dtype": rows.dtype.str}


class SavedSlices:
    """Slices of sharded arrays in a checkpoint.

    Parameters
    ----------
    url : str
        Folder of the checkpoint.
    described : dict of str to list of dict
        The slices of every array, in rank order.
    """

    def __init__(self, url: str, described: dict[str, list[dict[str, Any]]]):
        self.url = url
        self._fs, self._root = open_file_system(url)
        self._described = described

    def to_json(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON-serializable values."""
        return {"url": self.url, "described": self._described}

    @classmethod
    def from_json(cls, arguments: dict[str, Any] | None) -> SavedSlices | None:
        """Return the slices of arguments that :meth:`to_json` returned, or None without any."""
        return cls(**arguments) if arguments else None

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        return list(self._described)

    def rows(self, name: str) -> int:
        """Return the number of rows of an array."""
        return sum(each["shape"][0] for each in self._described[name])

    def count(self, name: str) -> int:
        """Return the number of slices of an array."""
        return len(self._described[name])

    def shape(self, name: str, owner: int) -> tuple[int, ...]:
        """Return the shape of the slice that one rank wrote."""
        return tuple(self._described[name][owner]["shape"])

    def dtype(self, name: str) -> str:
        """Return the dtype of an array, in NumPy's notation."""
        return str(self._described[name][0]["dtype"])

    def _path(self, name: str, rank: int) -> str:
        return f"{self._root}/{file_name(name, rank)}"

    @property
    def size(self) -> int:
        """Total size of all arrays in bytes."""
        return sum(each["size"] for slices in self._described.values() for each in slices)

    @property
    def is_local(self) -> bool:
        """True if the files can be memory-mapped by :meth:`mapped`."""
        return is_local_storage(self._fs)

    @property
    def stay_in_files(self) -> bool:
        """True if the tables are too large to send, so prediction tasks read them from files."""
        return self.size > BROADCAST and self.is_local

    def mapped(self, name: str, *, at_random: bool = True) -> list[np.ndarray]:
        """Memory-map the slices of an array, without verifying their checksums.

        Parameters
        ----------
        at_random : bool
            True if few rows are read at random: the kernel then does no read-ahead.

        Raises
        ------
        UsageError
            If a file is missing.
        """
        paths = [
            f"{self._root}/{file_name(name, rank)}" for rank in range(len(self._described[name]))
        ]
        try:
            arrays = [np.load(path, mmap_mode="r") for path in paths]
        except (OSError, ValueError) as error:
            raise UsageError(
                f"Rows of the model cannot be read from its checkpoint ({error}); it must exist "
                "until the prediction is computed, so keep more checkpoints with num_to_keep=",
                code="checkpoint-missing",
            ) from error
        for array in arrays if at_random else ():
            advise(array._mmap, at_random=True)
        return arrays

    def read(
        self, name: str, rank: int = 0, world_size: int = 1, into: np.ndarray | None = None
    ) -> np.ndarray:
        """Read the rows that a rank owns; by default all rows.

        Parameters
        ----------
        into : ndarray, optional
            Array to fill; a new one is allocated if its shape or dtype does not fit.

        Raises
        ------
        UsageError
            If a file is missing or damaged.
        """
        slices = self._described[name]
        rows = rows_of_rank(self.rows(name), rank, world_size)
        form, dtype = (rows, *slices[0]["shape"][1:]), np.dtype(slices[0]["dtype"])
        if into is None or into.shape != form or into.dtype != dtype:
            into = np.empty(form, dtype)
        for owner in range(len(slices)):
            if len(slices) == world_size and owner != rank:
                continue
            for first, block in self._blocks(name, owner):
                ids = np.arange(first, first + len(block)) * len(slices) + owner
                is_owned = ids % world_size == rank
                into[ids[is_owned] // world_size] = block[is_owned]
        return into

    def of_owner(self, name: str, owner: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Read the slice that one rank wrote.

        Parameters
        ----------
        rows : ndarray, optional
            Indices of the rows to read, in ascending order; default all.

        Raises
        ------
        UsageError
            If the file is missing or damaged.
        """
        shape = self._described[name][owner]["shape"]
        rows = np.arange(shape[0]) if rows is None else rows
        into = np.empty((len(rows), *shape[1:]), self._described[name][owner]["dtype"])
        for first, block in self._blocks(name, owner):
            start, end = np.searchsorted(rows, [first, first + len(block)])
            into[start:end] = block[rows[start:end] - first]
        return into

    def _blocks(self, name: str, owner: int) -> Iterator[tuple[int, np.ndarray]]:
        path = self._path(name, owner)
        try:
            yield from _blocks(self._fs, path, self._described[name][owner])
        except (OSError, ValueError, KeyError, SyntaxError) as error:
            raise UsageError(
                f"The slice {path} cannot be read: {error}", code="checkpoint-damaged", path=path
            ) from error


def _header(content: bytes) -> tuple[Any, ...]:
    """Return the shape, order and dtype of the array whose ``.npy`` file starts with `content`."""
    buffer = io.BytesIO(content)
    try:
        npy.read_magic(buffer)
        return npy.read_array_header_1_0(buffer)
    except Exception as error:  # NumPy's parser raises many types
        raise ValueError("it is not a file of NumPy's format") from error


def _blocks(
    fs: AbstractFileSystem, path: str, described: dict[str, Any]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield blocks of a file's rows with the index of their first row, then verify the checksum."""
    with fs.open(path, "rb") as file:
        start = file.read(npy.MAGIC_LEN + 2)
        header = start + file.read(int.from_bytes(start[npy.MAGIC_LEN :], "little"))
        form = _header(header)
        shape, dtype = tuple(described["shape"]), np.dtype(described["dtype"])
        if form != (shape, False, dtype):
            raise ValueError("its shape or dtype differs from the manifest")
        checksum = zlib.crc32(header)
        width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        step = max(1, _PIECE // max(1, width))
        for first in range(0, shape[0], step):
            count = min(step, shape[0] - first)
            data = file.read(count * width)
            checksum = zlib.crc32(data, checksum)
            yield first, np.frombuffer(data, dtype).reshape(count, *shape[1:])
    if checksum != described["crc32"]:
        raise ValueError("it is damaged")
