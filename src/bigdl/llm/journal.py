"""A journal of answers: Parquet files, by a key of model, options and text.

Every task appends files, and reads those of other tasks before it computes rows. To continue a job
that died, run it again with the same journal: only rows without an answer are computed.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    _answers: dict[bytes, tuple[Any, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._read_files: set[str] = set()
        self._fresh: list[tuple[bytes, Any, str | None]] = []
        self._started = self._written = time.monotonic()

    def refresh(self) -> None:
        """Read the files that other tasks have written since the last call."""
        with self._lock:
            if not exists(self.path):
                return
            for url in listdir(self.path):
                name = url.rpartition("/")[2]
                if name.endswith(".parquet") and name not in self._read_files:
                    self._read_files.add(name)
                    self._read(url)

    def _read(self, url: str) -> None:
        try:
            table = pq.read_table(io.BytesIO(read_bytes(url)))
            keys, texts, errors = (table.column(n).to_pylist() for n in ("key", "text", "error"))
            vectors = table.column("vector").combine_chunks()
            flat = vectors.flatten().to_numpy(zero_copy_only=False)
        except (pa.ArrowException, KeyError, UsageError) as error:
            # such as the last file of a killed task on a storage without atomic writes
            logger.warning("The journal's file %s is skipped: %s", url, one_line(error))
            return
        start = 0
        lengths = vectors.value_lengths().to_pylist()
        for key, text, reason, length in zip(keys, texts, errors, lengths, strict=True):
            value = text
            if length is not None:
                value = flat[start : start + length]
                start += length
            self._answers[key] = value, reason

    def get(self, key: bytes) -> tuple[Any, str | None] | None:
        """Return the value and error of a row, or None if it has no answer."""
        return self._answers.get(key)

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
        self._read_files.add(name)
        self._answers.update({key: (value, error) for key, value, error in answers})
