"""A journal of answers: Parquet files, by a key of model, options and text.

Every task appends files, and finds the answers of other tasks before it computes rows. To continue
a job that died, run it again with the same journal: only rows without an answer are computed. Each
Parquet file has a small file with its keys, which is written after it; without one, its keys are
read from the Parquet file. A task keeps 16 bytes of memory for each key, and reads answers when it
needs them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import LazyModule, UsageError, one_line
from bigdl.common.storage import exists, joined, listdir, read_bytes, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa = LazyModule("pyarrow", "llm")
    pq = LazyModule("pyarrow.parquet", "llm")

logger = logging.getLogger("bigdl.llm")

_KEY_BYTES = 16
# A killed task loses the answers of at most this time, in seconds and as a share of its time.
_FIRST_S, _LOSS = 1.0, 0.02
_KEYS = ".keys"
_ROWS_IN_MEMORY = 1 << 16  # rows of files that were read last

Answer = tuple[Any, str | None]
"""A value and an error."""


def key_of(prefix: bytes, item: object) -> bytes:
    """Return the key of a row: `prefix` stands for the model and its options."""
    text = item if isinstance(item, str) else json.dumps(item)
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES, key=prefix).digest()


def prefix_of(digest: str, options: Mapping[str, Any]) -> bytes:
    """Return the bytes that stand for a model and its options in keys."""
    content = json.dumps([digest, dict(options)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=32).digest()


@dataclass
class Journal:
    """The journal of one task.

    Parameters
    ----------
    path : str
        Folder: a local path or an fsspec URL, which all tasks can reach.
    """

    path: str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._files: list[str] = []
        self._indexed: set[str] = set()
        self._unreadable: set[str] = set()  # Parquet files that have no file of keys, either
        # Sorted runs of (first 8 bytes of keys, file << 32 | row), each twice as long as the next.
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._recent: OrderedDict[int, list[tuple[bytes, Any, str | None]]] = OrderedDict()
        self._fresh: list[tuple[bytes, Any, str | None]] = []
        self._started = self._written = time.monotonic()

    def refresh(self) -> None:
        """Read the keys that other tasks have written since the last call."""
        with self._lock:
            if not exists(self.path):
                return
            urls = sorted(listdir(self.path))
            for url in urls:
                name = url.rpartition("/")[2].removesuffix(_KEYS)
                if url.endswith(_KEYS) and name not in self._indexed:
                    content = read_bytes(url)
                    self._index(name, content[: len(content) // _KEY_BYTES * _KEY_BYTES])
            for url in urls:  # of writers that died before they wrote the keys, or of old journals
                name = url.rpartition("/")[2]
                is_new = name not in self._indexed and name not in self._unreadable
                if url.endswith(".parquet") and is_new:
                    keys = self._keys_in(url)
                    if keys is None:
                        self._unreadable.add(name)
                    else:
                        self._index(name, keys)

    def _keys_in(self, url: str) -> bytes | None:
        """Return the keys of a Parquet file, or None if it cannot be read."""
        try:
            table = pq.read_table(io.BytesIO(read_bytes(url)), columns=["key"])
            keys = table.column("key").cast(pa.binary(_KEY_BYTES)).to_pylist()
            return b"".join(keys)
        except (pa.ArrowException, KeyError, TypeError, UsageError) as error:
            logger.warning("The journal's file %s is skipped: %s", url, one_line(error))
            return None

    def _index(self, name: str, keys: bytes) -> None:
        """Add the keys of a file to the runs."""
        self._indexed.add(name)
        number = len(self._files)
        self._files.append(name)
        if not keys:
            return
        prefixes = np.frombuffer(keys, ">u8")[::2].astype(np.uint64)
        locations = np.arange(len(prefixes), dtype=np.uint64) + np.uint64(number << 32)
        run = _sorted_run(prefixes, locations)
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            last = self._runs.pop()
            run = _sorted_run(*(np.concatenate(pair) for pair in zip(last, run, strict=True)))
        self._runs.append(run)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """Return the values and errors of the keys that have an answer."""
        wanted = np.frombuffer(b"".join(keys), ">u8")[::2].astype(np.uint64)
        located: dict[int, list[tuple[int, bytes]]] = {}
        with self._lock:
            for prefixes, locations in self._runs:
                at = np.searchsorted(prefixes, wanted)
                hits = np.flatnonzero(prefixes[np.minimum(at, len(prefixes) - 1)] == wanted)
                for index in hits.tolist():
                    number, row = divmod(int(locations[at[index]]), 1 << 32)
                    located.setdefault(number, []).append((row, keys[index]))
            answers = {}
            for number, rows in located.items():
                content = self._content(number)
                for row, key in rows:
                    if row < len(content) and content[row][0] == key:
                        answers[key] = content[row][1:]
            return answers

    def _content(self, number: int) -> list[tuple[bytes, Any, str | None]]:
        """Return the rows of a file, which is read unless it is one of the last ones."""
        if number not in self._recent:
            self._recent[number] = self._read(self._files[number])
            while len(self._recent) > 1 and sum(map(len, self._recent.values())) > _ROWS_IN_MEMORY:
                self._recent.popitem(last=False)
        self._recent.move_to_end(number)
        return self._recent[number]

    def _read(self, name: str) -> list[tuple[bytes, Any, str | None]]:
        url = joined(self.path, name)
        try:
            table = pq.read_table(io.BytesIO(read_bytes(url)))
            keys, texts, errors = (table.column(n).to_pylist() for n in ("key", "text", "error"))
            vectors = table.column("vector").combine_chunks()
            flat = vectors.flatten().to_numpy(zero_copy_only=False)
        except (pa.ArrowException, KeyError, UsageError) as error:
            logger.warning("The journal's file %s is skipped: %s", url, one_line(error))
            return []
        rows: list[tuple[bytes, Any, str | None]] = []
        start = 0
        lengths = vectors.value_lengths().to_pylist()
        for key, text, reason, length in zip(keys, texts, errors, lengths, strict=True):
            value = text
            if length is not None:
                value = flat[start : start + length]
                start += length
            rows.append((key, value, reason))
        return rows

    def add(self, answers: Sequence[tuple[bytes, Any, str | None]]) -> None:
        """Add the keys, values and errors of rows; write a file if the last one is old enough."""
        with self._lock:
            self._fresh += answers
            now = time.monotonic()
            if now - self._written > max(_FIRST_S, _LOSS * (now - self._started)):
                self._write()

    def flush(self) -> None:
        """Write all answers."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        answers, self._fresh = self._fresh, []
        if not answers:
            return
        keys, values, errors = zip(*answers, strict=True)
        vectors = [None if v is None or isinstance(v, str) else v for v in values]
        table = pa.table(
            {
                "key": pa.array(keys, pa.binary(_KEY_BYTES)),
                "text": pa.array([v if isinstance(v, str) else None for v in values], pa.string()),
                "vector": pa.array(
                    [None if v is None else np.asarray(v, np.float32) for v in vectors],
                    pa.list_(pa.float32()),
                ),
                "error": pa.array(errors, pa.string()),
            }
        )
        target = io.BytesIO()
        pq.write_table(table, target, compression="zstd")
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}.parquet"
        write_bytes(joined(self.path, name), target.getvalue())
        write_bytes(joined(self.path, name + _KEYS), b"".join(keys))
        self._index(name, b"".join(keys))


def _sorted_run(prefixes: np.ndarray, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(prefixes, kind="stable")
    return prefixes[order], locations[order]
