"""Parquet files as pieces of work: which row groups, how they are read and written."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import kinds
from bigdl.friesian.feature.pipeline.batches import Batch, Factored, batch_of, normal
from bigdl.friesian.feature.pipeline.step import Field

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "Piece",
    "Rows",
    "clear",
    "file_of",
    "mark_complete",
    "opened",
    "paths_of",
    "pieces_of",
    "schema_of",
    "table_of",
    "write",
]


@dataclass(frozen=True)
class Rows(ABC):
    """Some rows that are worked on together.

    Attributes
    ----------
    place : int
        Among all of their kind; names the file that their results are written to.
    """

    place: int

    @abstractmethod
    def batches(self, schema: dict[str, Field]) -> Iterator[Batch]:
        """The rows, given the fields of the data that they come from."""


@dataclass(frozen=True)
class Piece(Rows):
    """Row groups of one file.

    Attributes
    ----------
    path : str
    groups : tuple of int
    count : int
        Number of rows.
    """

    path: str
    groups: tuple[int, ...]
    count: int = 0

    def batches(self, schema: dict[str, Field]) -> Iterator[Batch]:
        """A batch for each group; a column is read when it is asked for."""
        texts = [name for name, each in schema.items() if each.kind == "string"]
        with opened(self.path, texts) as file:
            found = {each.name: kinds.of_arrow(each.type) for each in file.schema_arrow}
            for name, each in schema.items():
                if name in found and found[name] != each.kind:
                    raise UsageError(
                        f"The column {name} should be of type {each.kind}, but is {found[name]} in "
                        f"{self.path}"
                    )
            if not self.groups:
                empty = file.schema_arrow.empty_table()
                yield batch_of({name: empty[name] for name in schema if name in found})
            for group in self.groups:
                columns = {
                    name: partial(_column, file, group, name) for name in schema if name in found
                }
                yield Batch(columns, file.metadata.row_group(group).num_rows)


def _column(file: pq.ParquetFile, group: int, name: str) -> Any:
    return normal(file.read_row_group(group, columns=[name], use_threads=False)[name])


@contextmanager
def opened(path: str, names: Sequence[str] | None = None) -> Iterator[pq.ParquetFile]:
    """A file, whose columns of text come as dictionaries; `names` are those columns if known."""
    import pyarrow.parquet as pq

    from bigdl.orca.data.storage import is_local_path, open_file_system

    fs, inside = open_file_system(path)
    source = inside if is_local_path(path) else fs.open(inside)
    options = {"memory_map": True} if is_local_path(path) else {}
    with pq.ParquetFile(
        source, read_dictionary=names, coerce_int96_timestamp_unit="us", **options
    ) as file:
        yield file


def paths_of(src: Any) -> list[str]:
    """The files that a user means, sorted within each path."""
    from bigdl.orca.data.pandas.paths import files_of, split_paths

    return [file for path in split_paths(src) for file in files_of(path, nested=True)]


def schema_of(path: str) -> dict[str, Field]:
    """The fields of a file; all others have to be of the same types."""
    with opened(path) as file:
        return {each.name: Field(kinds.of_arrow(each.type)) for each in file.schema_arrow}


def pieces_of(paths: Sequence[str], count: int) -> list[Piece]:
    """All row groups of files, in their order, as about so many pieces.

    A piece never has groups of several files, and a group is never cut.  Files without rows are
    one piece without groups.
    """
    rows = []
    for path in paths:
        with opened(path) as file:
            groups = range(file.num_row_groups)
            rows.append([file.metadata.row_group(group).num_rows for group in groups])
    target = max(sum(map(sum, rows)) / count, 1)
    pieces: list[Piece] = []
    for path, sizes in zip(paths, rows, strict=True):
        parts = min(max(round(sum(sizes) / target), 1), len(sizes))
        bounds = [len(sizes) * i // parts for i in range(parts + 1)] if parts else []
        for first, last in pairwise(bounds):
            groups = tuple(range(first, last))
            pieces.append(Piece(len(pieces), path, groups, sum(sizes[first:last])))
    return pieces or [Piece(0, paths[0], ())]


def clear(path: str, sources: Sequence[str], mode: str) -> None:
    """Make an empty folder for results."""
    from bigdl.orca.data.storage import open_file_system

    if mode not in ("overwrite", "error"):
        raise UsageError(f"mode should be one of overwrite, error; got {mode!r}")
    fs, folder = open_file_system(path)
    folder = folder.rstrip("/")
    for source in sources:
        inside = open_file_system(source)[1]
        if inside == folder or inside.startswith(folder + "/"):
            raise UsageError(f"The results cannot replace the files that they are made of: {path}")
    if fs.exists(folder):
        if mode == "error":
            raise UsageError(f"{path} exists already; remove it or use mode='overwrite'")
        fs.rm(folder, recursive=True)
    fs.makedirs(folder, exist_ok=True)


def mark_complete(path: str) -> None:
    """Say, as Spark does, that all results are there."""
    from bigdl.orca.data.storage import open_file_system

    fs, folder = open_file_system(path)
    fs.touch(f"{folder.rstrip('/')}/_SUCCESS")


def file_of(path: str, place: int) -> str:
    """The file of a folder that :func:`write` writes."""
    return f"{path.rstrip('/')}/part-{place:05d}.parquet"


def write(path: str, place: int, tables: Iterator[pa.Table]) -> int:
    """Write the tables of a piece as the row groups of one file.

    The file has its name only when it is complete: a task that is repeated leaves no second one.

    Returns
    -------
    int
        Number of rows.
    """
    from bigdl.orca.data.storage import is_local_path, open_file_system

    fs, folder = open_file_system(path)
    name = file_of(folder, place)
    if not is_local_path(path):  # a file of a remote storage appears when it is closed
        with fs.open(name, "wb") as sink:
            return _write(sink, tables)
    hidden = f"{folder.rstrip('/')}/.part-{place:05d}-{uuid.uuid4().hex}"
    try:
        rows = _write(hidden, tables)
        os.replace(hidden, name)
    finally:
        if os.path.exists(hidden):
            os.remove(hidden)
    return rows


def _write(sink: Any, tables: Iterator[pa.Table]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, rows = None, 0
    try:
        for table in tables:
            if writer is None:
                texts = [each.name for each in table.schema if pa.types.is_dictionary(each.type)]
                writer = pq.ParquetWriter(
                    sink,
                    table.schema,
                    use_dictionary=texts or False,
                    # dictionaries are a matter of the file, not of the type of the column
                    store_schema=False,
                    coerce_timestamps="us",
                    allow_truncated_timestamps=True,
                )
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows


def table_of(batch: Batch) -> pa.Table:
    """All columns of a batch; those of text as dictionaries."""
    import pyarrow as pa

    return pa.table({name: _written(batch[name]) for name in batch.names})


def _written(column: Any) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(column, Factored):
        return column.dictionary_encode() if pa.types.is_string(column.type) else column
    values, codes = column.values, column.codes
    if not pa.types.is_string(values.type):
        return values.take(pa.array(codes))
    if pc.count_distinct(values, mode="only_valid").as_py() < len(values):  # a null or a twin
        return values.take(pa.array(codes)).dictionary_encode()
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), values)
