"""A spool: the columns of one shard in one local directory, written once and memory-mapped.

Rows arrive in chunks.  A chunk has a place ``(source partition, sequence number)`` given to it
before anything moved, and the finished spool is in the order of these places whatever the order of
arrival was.  A column is one file of contiguous values (an Arrow buffer without its frames), so
that a batch is one slice and a shuffled batch is one gather, and the memory is the page cache's.

A spool lives under the engine's local directory, which goes with the application, in a folder
named after the job and the shard.  It is removed at the end of the job, and what dead processes
left is removed when the next job starts.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import zlib
from dataclasses import asdict, dataclass, field

import numpy as np

from bigdl.orca.data.feeds.base import SourceError
from bigdl.orca.data.feeds.columns import ColumnSpec, Leaf

__all__ = ["Spool", "SpoolWriter", "remove_spool", "remove_stale_spools"]

_PREFIX = "bigdl-spool-"
_META = "spool.json"
_SAMPLE = 4096  # bytes of each chunk and column that the fingerprint looks at


@dataclass
class Spool:
    """What is known of a finished spool; travels as JSON.

    Attributes
    ----------
    path : str
        The directory.
    nonce : str
        Written into the directory too: a path that was re-used by somebody else is not this spool.
    rows : int
    leaves : list of Leaf
        The arrays, in the order of the files ``0.bin``, ``1.bin``, ...
    fingerprint : int
        Checksum over the places, sizes and samples of the chunks, to tell whether two runs saw the
        same rows in the same order.
    """

    path: str
    nonce: str
    rows: int
    leaves: list[Leaf] = field(default_factory=list)
    fingerprint: int = 0

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, doc: dict) -> Spool:
        leaves = [Leaf.from_json(x) for x in doc["leaves"]]
        return cls(doc["path"], doc["nonce"], doc["rows"], leaves, doc["fingerprint"])

    def is_here(self) -> bool:
        """Whether this machine sees the spool, complete."""
        try:
            with open(os.path.join(self.path, _META)) as file:
                return json.load(file)["nonce"] == self.nonce
        except (OSError, ValueError, KeyError):
            return False

    def arrays(self) -> list[np.ndarray]:
        """The columns as arrays over private maps of the files; writing to them copies a page."""
        return [
            _map(os.path.join(self.path, f"{i}.bin"), leaf, self.rows)
            for i, leaf in enumerate(self.leaves)
        ]


def _map(path, leaf, rows):
    shape = (rows, *leaf.shape)
    if rows == 0 or 0 in shape:
        return np.empty(shape, leaf.dtype)
    with open(path, "rb") as file:
        # private and writable: torch shares it without a copy, the file never changes
        pages = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return np.frombuffer(pages, leaf.dtype).reshape(shape)


class SpoolWriter:
    """Write the chunks of one shard.

    Parameters
    ----------
    root : str
        Local directory of the engine.
    job : int
        Number of the job; jobs of one driver are numbered upwards.
    name : str
        Name of the feed and shard within the job.
    specs : sequence of ColumnSpec
    """

    def __init__(self, root: str, job: int, name: str, specs: list[ColumnSpec]):
        self._specs = specs
        self._nonce = secrets.token_hex(8)
        self.path = os.path.join(root, f"{_PREFIX}{job}-{name}-{self._nonce}")
        os.makedirs(self.path)
        self._leaves: list[Leaf] | None = None
        self._files: list = []
        self._chunks: list[tuple[int, int, int]] = []  # source, sequence, rows
        self._crc = 0
        self.rows = 0

    def append(
        self, source: int, sequence: int, rows: int, leaves: list[Leaf], arrays: list
    ) -> None:
        """Add one chunk.

        Parameters
        ----------
        source, sequence : int
            Its place in the order of the whole input.
        rows : int
        leaves : list of Leaf
        arrays : list of buffers
            C-contiguous values of each leaf.
        """
        if rows == 0:
            return
        if self._leaves is None:
            self._open(leaves)
        elif leaves != self._leaves:
            raise SourceError(describe_difference(self._leaves, leaves))
        crc = zlib.crc32(f"{source},{sequence},{rows}".encode())
        for file, array in zip(self._files, arrays, strict=True):
            view = memoryview(array).cast("B")
            file.write(view)
            crc = zlib.crc32(view[:_SAMPLE], crc)
        self._crc ^= crc  # independent of the order of arrival
        self._chunks.append((source, sequence, rows))
        self.rows += rows

    def finish(self) -> Spool:
        """Put the chunks in order, close the files and return the description."""
        for file in self._files:
            file.close()
        leaves = self._leaves or []
        places = [(s, q) for s, q, _ in self._chunks]
        if places != sorted(places):
            for i, leaf in enumerate(leaves):
                _reorder(os.path.join(self.path, f"{i}.bin"), leaf, self._chunks)
        spool = Spool(self.path, self._nonce, self.rows, leaves, self._crc)
        with open(os.path.join(self.path, _META), "w") as file:
            json.dump(spool.to_json(), file)
        return spool

    def discard(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _open(self, leaves):
        self._leaves = list(leaves)
        self._files = [
            open(os.path.join(self.path, f"{i}.bin"), "wb", buffering=0)  # noqa: SIM115
            for i in range(len(leaves))
        ]


def _reorder(path, leaf, chunks):
    width = int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
    offsets = np.concatenate([[0], np.cumsum([rows for _, _, rows in chunks])])
    with open(path, "rb") as source, open(path + ".new", "wb") as target:
        for i in sorted(range(len(chunks)), key=lambda i: chunks[i][:2]):
            start, left = int(offsets[i]) * width, chunks[i][2] * width
            while left:
                sent = os.sendfile(target.fileno(), source.fileno(), start, left)
                if sent == 0:
                    raise OSError(f"{path} is shorter than its chunks")
                start, left = start + sent, left - sent
    os.replace(path + ".new", path)


def describe_difference(expected: list[Leaf], given: list[Leaf]) -> str:
    """One sentence about the first leaf in which two chunks of one input differ."""
    for a, b in zip(expected, given, strict=False):
        if a.column == b.column and a.key == b.key and a.shape != b.shape:
            return (
                f"Column '{a.column}' holds arrays of different lengths ({list(a.shape)} and "
                f"{list(b.shape)}); pad or cut them to one length first"
            )
        if a != b:
            break
    return "The rows of the input do not all have the same columns and map keys"


def remove_spool(path: str) -> None:
    """Remove a spool's directory, if `path` is one."""
    if os.path.basename(path).startswith(_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


def remove_stale_spools(root: str, job: int, active: set[int]) -> None:
    """Remove the spools of jobs before `job` that were not active when it was submitted."""
    try:
        names = os.listdir(root)
    except OSError:
        return
    for name in names:
        if not name.startswith(_PREFIX):
            continue
        number = name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdigit() and int(number) < job and int(number) not in active:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
