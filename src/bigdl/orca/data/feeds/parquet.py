"""Parquet files -> shards of columns, read by the workers themselves.

The driver reads the files' footers only. Their row groups are laid end to end and cut in N ranges
of equal numbers of rows, within a row group where need be; every worker decodes its range with
pyarrow and spools it. There is no scan by Spark, so the JVM never sees a row.

The order of the rows is that of the paths as they were given, and within a directory that of the
files' names.

Needs pyarrow, so it is imported where it is used.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.feeds.arrow_types import arrow_type_of, densified, spark_type
from bigdl.orca.data.feeds.packing import ColumnFeed
from bigdl.orca.data.feeds.spark_dataframe import find_columns
from bigdl.orca.data.file import is_local_path, open_file_system
from bigdl.runtime.shards.columns import ColumnSpec, column_spec, decode
from bigdl.runtime.shards.feed import Ingest, SourceError
from bigdl.runtime.shards.shard import Shard
from bigdl.runtime.shards.values import grouped

require("pyarrow", "orca")
import pyarrow as pa  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

if TYPE_CHECKING:
    import pandas

_FOOTERS = 16  # files whose footers are read at a time
_BATCH_BYTES = 512 << 10  # of a record batch, about


@dataclass(frozen=True)
class _Piece:
    """Some rows of one row group."""

    path: str
    group: int
    start: int
    stop: int
    keys: tuple[tuple[str, Any], ...]  # values of the partition columns


class ParquetFeed(ColumnFeed):
    """Parquet files as input.

    Parameters
    ----------
    paths : str, path or sequence of them
        Files, or directories of files, also partitioned by ``column=value`` directories; local or
        URLs of fsspec such as ``s3://...``. Every worker must see them.
    feature_cols, label_cols : sequence of str
    config : dict, optional
        ``config["dtype"]``: ``"float32"`` (default) or ``"float64"`` for all floating columns.
    name : str, optional

    Raises
    ------
    UsageError
        For a path without Parquet files, a missing column, a type that cannot become a tensor, or
        files that differ in the type of a column.
    """

    kind = "path"

    def __init__(self, paths, feature_cols, label_cols=(), config=None, *, name=None):
        super().__init__(feature_cols, label_cols, config, name=name)
        several = isinstance(paths, list | tuple)
        self.paths = [os.fspath(path) for path in (paths if several else [paths])]
        self._url = self.paths[0]
        if len({path.partition("://")[0] if "://" in path else "" for path in self.paths}) > 1:
            raise UsageError(f"The paths must be of one file system, got {self.paths}")
        self._fragments, schema = _open(self.paths)
        if not self.feature_cols:
            raise UsageError(
                "feature_cols is required for Parquet files; pass the names of the columns that "
                f"the model takes, of {schema.names}"
            )
        columns = list(dict.fromkeys([*self.feature_cols, *(self.label_cols or ())]))
        find_columns(columns, schema.names, name or self._url)
        types = {c: spark_type(c, schema.field(c).type) for c in columns}
        self.specs = [column_spec(c, types[c], **self.dtypes) for c in columns]
        self._files = self._look(schema, columns)
        self.rows = sum(rows for *_, sizes in self._files for rows in sizes)

    def _look(self, schema, columns):
        """Path, partition values and rows of each row group of every file; all have one schema."""

        def look(fragment):
            keys = dict(ds.get_partition_keys(fragment.partition_expression))
            file_schema = fragment.physical_schema
            for name in columns:
                if name in keys:
                    continue
                if name not in file_schema.names:
                    raise UsageError(f"The file {fragment.path} has no column '{name}'")
                file_type, expected = file_schema.field(name).type, schema.field(name).type
                if file_type != expected:
                    raise UsageError(
                        f"Column '{name}' is {file_type} in the file {fragment.path} but "
                        f"{expected} in {self._fragments[0].path}; write all files with one type"
                    )
            groups = fragment.metadata
            sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
            kept = tuple((name, keys[name]) for name in columns if name in keys)
            return fragment.path, kept, sizes

        with ThreadPoolExecutor(_FOOTERS) as pool:
            return list(pool.map(look, self._fragments))

    def prepare(self, cluster, num_workers: int, *, name: str = "data") -> Ingest:
        pieces = _cut(self._files, self.rows, num_workers)
        url, specs = self._url, self.specs

        def read(batches, open_spool):
            writer = open_spool(name, specs)
            of_worker = pieces[open_spool.place]
            writer.expect(sum(piece.stop - piece.start for piece in of_worker))
            for sequence, batch in enumerate(_batches(url, specs, of_worker)):
                columns = [
                    (spec.name, key, array)
                    for spec, column in zip(specs, batch, strict=True)
                    for key, array in decode(spec, column)
                ]
                # a batch is small enough to be turned to rows within a cache
                leaves, arrays = grouped(columns)
                ready = [np.ascontiguousarray(array) for array in arrays]
                writer.append(0, sequence, len(batch[0]), leaves, ready)
            return {name: Shard(writer.finish())}

        return Ingest(None, read)


def read_pandas(urls: Sequence[str]) -> pandas.DataFrame:
    """All rows of Parquet files, in the order in which workers read them."""
    fragments, schema = _open([os.fspath(url) for url in urls])
    tables = [fragment.to_table(schema=schema) for fragment in fragments]
    return pa.concat_tables(tables).to_pandas()


def _open(urls):
    """The files under some paths, in order, and the schema of the first."""
    fragments, schema = [], None
    for url in urls:
        system, path = open_file_system(url)
        try:
            dataset = ds.dataset(path, format="parquet", filesystem=system, partitioning="hive")
        except FileNotFoundError:
            raise UsageError(f"There is nothing at {url}; pass the path of Parquet files") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise UsageError(
                f"{url} cannot be read as Parquet; other files are read by pandas, by spark.read "
                f"or by bigdl.orca.data.pandas first, and what that returns is passed: {error}"
            ) from error
        fragments += sorted(dataset.get_fragments(), key=lambda f: f.path)
        schema = schema or dataset.schema
    if not fragments:
        raise UsageError(f"There is no Parquet file in {', '.join(urls)}")
    return fragments, schema


def _cut(files, rows, num_workers) -> list[list[_Piece]]:
    """The pieces of each worker: contiguous ranges of rows whose sizes differ by at most one."""
    ends = [rows * (k + 1) // num_workers for k in range(num_workers)]
    shards: list[list[_Piece]] = [[] for _ in range(num_workers)]
    first = 0
    for path, keys, sizes in files:
        for group, size in enumerate(sizes):
            start = 0
            while start < size:
                worker = bisect.bisect_right(ends, first + start)
                stop = min(size, ends[worker] - first)
                shards[worker].append(_Piece(path, group, start, stop, keys))
                start = stop
            first += size
    return shards


def _batches(url, specs: Sequence[ColumnSpec], pieces: Sequence[_Piece]):
    """The columns of every record batch of some pieces, in the types of `specs`."""
    system, _ = open_file_system(url)
    # threads of Arrow may hold a Python file for a moment too long for a process that ends
    ahead = is_local_path(url)
    for path, of_file in itertools.groupby(pieces, key=lambda piece: piece.path):
        try:
            file = pq.ParquetFile(path, filesystem=system, pre_buffer=ahead)
        except FileNotFoundError:
            raise UsageError(
                f"The worker on {os.uname().nodename} does not see {path}; pass a path that the "
                "driver and all workers share"
            ) from None
        for piece in of_file:
            keys = dict(piece.keys)
            row = 0
            for batch in file.iter_batches(
                batch_size=_batch_rows(specs),
                row_groups=[piece.group],
                columns=[spec.name for spec in specs if spec.name not in keys],
                use_threads=False,
            ):
                low, high = max(piece.start - row, 0), min(piece.stop - row, batch.num_rows)
                row += batch.num_rows
                if low < high:
                    part = batch.slice(low, high - low)
                    for name, value in keys.items():
                        part = part.append_column(name, pa.repeat(pa.scalar(value), high - low))
                    yield [_cast(spec, part.column(spec.name)) for spec in specs]
                if row >= piece.stop:
                    break


def _batch_rows(specs):
    scalars = sum(spec.ndim == 0 and spec.kind == "plain" for spec in specs)
    # the lengths of arrays are not known: such rows may be long
    return max(1024, _BATCH_BYTES // (8 * max(1, scalars))) if scalars == len(specs) else 4096


def _cast(spec, column):
    if spec.cast == "vector":
        return densified(spec, column)
    wanted = arrow_type_of(spec, column.type)
    if column.type == wanted:
        return column
    try:
        return column.cast(wanted, safe=False)
    except pa.ArrowInvalid as error:
        raise SourceError(f"Column '{spec.name}' cannot be converted: {error}") from None
