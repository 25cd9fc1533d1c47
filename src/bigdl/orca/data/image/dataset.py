"""Records of images and arrays in Parquet files, read in shards by the workers of a training.

A dataset is a directory on any storage::

    <path>/_orca_metadata          the schema, in JSON
    <path>/chunk=0/….parquet       the first `block_size` records
    <path>/chunk=1/….parquet       the next ones

It is written block by block, from a generator of any length, and the schema is written last: a
dataset whose writing did not end is not read.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.file import is_file, listdir, open_file_system, read_bytes
from bigdl.orca.data.image.utils import (
    SchemaField,
    arrow_schema,
    check_schema,
    chunks,
    decode_schema,
    encode_record,
    encode_schema,
)

__all__ = ["ParquetDataset"]

_METADATA = "_orca_metadata"
_CHUNK = re.compile(r"chunk=(\d+)")
_MODES = ("overwrite", "append", "ignore", "error", "errorifexists")


class ParquetDataset:
    """Writes and reads the directories that this module describes."""

    @staticmethod
    def write(
        path: str,
        generator: Iterable[Mapping[str, Any]],
        schema: Mapping[str, SchemaField],
        block_size: int = 1000,
        write_mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Write a dataset.

        Parameters
        ----------
        path : str
            A directory on any storage.
        generator : iterable of dict
            The records, with a value for each column of the schema.
        schema : dict of str to SchemaField
        block_size : int, default 1000
            Records in a chunk; one chunk is in memory at a time.
        write_mode : {"overwrite", "append", "ignore", "error", "errorifexists"}
            What to do where a dataset exists: replace it (the default), add chunks to it, leave
            it as it is, or raise an error.
        **kwargs
            Of ``pyarrow.parquet.write_table``, e.g. ``compression``.

        Raises
        ------
        UsageError
            If an argument is wrong, or a record does not fit the schema.
        """
        schema = check_schema(schema)
        if write_mode not in _MODES:
            raise UsageError(f"write_mode must be one of {', '.join(_MODES)}, got {write_mode!r}")
        if not isinstance(block_size, int) or block_size < 1:
            raise UsageError(f"block_size must be a whole number from 1 on, got {block_size!r}")
        fs, root = open_file_system(path)
        fs.invalidate_cache()
        there = _chunk_numbers(fs, root)
        metadata = f"{root}/{_METADATA}"
        start = 0
        if there or fs.exists(metadata):
            if write_mode == "ignore":
                return
            if write_mode.startswith("error"):
                raise UsageError(f'A dataset exists at {path!r}; pass write_mode="overwrite"')
            if write_mode == "append":
                start = _check_appended(path, schema, there)
            else:
                _remove(fs, root, there)
        types = arrow_schema(schema)
        for number, block in enumerate(chunks(generator, block_size), start):
            folder = f"{root}/chunk={number}"
            fs.makedirs(folder, exist_ok=True)
            name = f"{folder}/part-{secrets.token_hex(8)}.parquet"
            fs.pipe_file(name, _parquet(schema, types, block, kwargs))
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(metadata, encode_schema(schema).encode())

    @staticmethod
    def schema(path: str) -> dict[str, SchemaField]:
        """The schema of the dataset at `path`."""
        if not is_file(f"{path.rstrip('/')}/{_METADATA}"):
            raise UsageError(f"There is no complete ParquetDataset at {path!r}: no {_METADATA}")
        return decode_schema(read_bytes(f"{path.rstrip('/')}/{_METADATA}"))

    @staticmethod
    def files(path: str) -> list[list[str]]:
        """The Parquet files of each chunk of the dataset at `path`, in order."""
        folders = [(_CHUNK.fullmatch(p.rpartition("/")[2]), p) for p in listdir(path)]
        found = sorted((int(match[1]), folder) for match, folder in folders if match)
        return [[p for p in listdir(folder) if p.endswith(".parquet")] for _, folder in found]

    @staticmethod
    def read_as_torch(
        path: str,
        transforms: Callable | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Any:
        """The records as a ``torch.utils.data.IterableDataset`` of dicts.

        The parameters are those of :func:`~bigdl.orca.data.image.parquet_dataset.read_parquet`.
        """
        from bigdl.orca.data.image.reader import RecordReader
        from bigdl.orca.data.image.torch_records import TorchRecords

        return TorchRecords(RecordReader(path, transforms, config))

    @staticmethod
    def read_as_tf(path: str) -> Any:
        """The records as a ``tf.data.Dataset`` of dicts."""
        from bigdl.orca.data.image.reader import RecordReader, tf_dataset

        return tf_dataset(RecordReader(path))

    @staticmethod
    def read_as_xshards(path: str) -> Any:
        """The records as SparkXShards: one shard per chunk, a dict of the columns.

        The arrays of a column are stacked if they have one shape; other values are the elements
        of an object array.
        """
        from bigdl.orca.data.image.reader import RecordReader

        return RecordReader(path).xshards()


def _chunk_numbers(fs, root) -> list[int]:
    if not fs.isdir(root):
        return []
    names = [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(root, detail=False)]
    return sorted(int(match[1]) for match in map(_CHUNK.fullmatch, names) if match)


def _check_appended(path, schema, there) -> int:
    """Number of the first chunk to add."""
    existing = ParquetDataset.schema(path)
    if existing != schema:
        raise UsageError(
            f"The dataset at {path!r} has the schema {encode_schema(existing)}, to which records "
            f"of {encode_schema(schema)} cannot be appended"
        )
    return max(there, default=-1) + 1


def _remove(fs, root, there) -> None:
    """Remove a dataset, its schema first, and nothing that is beside it."""
    if fs.exists(f"{root}/{_METADATA}"):
        fs.rm(f"{root}/{_METADATA}")
    for number in there:
        fs.rm(f"{root}/chunk={number}", recursive=True)


def _parquet(schema, types, block, options) -> bytes:
    import pyarrow as pa

    rows = [encode_record(schema, record) for record in block]
    try:
        made = pa.Table.from_pylist(rows, schema=types)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise UsageError(f"A record does not fit the schema {types.names}: {error}") from error
    data = io.BytesIO()
    require("pyarrow.parquet", "orca").write_table(made, data, **options)
    return data.getvalue()
