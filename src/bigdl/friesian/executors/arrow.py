"""Executor ``arrow``: runs operators on Arrow batches of Parquet files, on Spark or locally.

For operators on groups, rows with the same key are shuffled. Every piece of the data writes one
file, in which each bucket is one row group. A bucket is then read from all files, so its rows keep
the order of the data.

A host runs the work: Spark tasks, local processes or this process.
"""

from __future__ import annotations

import os
import pickle
import sys
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.cpu import usable_cores
from bigdl.common.errors import UsageError, raise_first_usage_error, value_or_usage_error
from bigdl.common.private_folders import scratch_folder
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import (
    DictionaryColumn,
    LazyBatch,
    Statistic,
    dictionary_encoded,
    lazy_batch,
    normalized,
)
from bigdl.friesian.ops.column_types import Field, Schema, require_columns
from bigdl.friesian.ops.operator import FittedOperator, Program, StatisticsQuery
from bigdl.friesian.ops.sequences import AddHistSeq
from bigdl.friesian.ops.spark import active_spark
from bigdl.orca.data.file import is_local_path, open_file_system
from bigdl.orca.data.lake_tables.scans import call_in_tasks, open_parquet
from bigdl.orca.data.pandas.readers import files_of, split_paths
from bigdl.orca.data.xshards.shards import hash_values

if TYPE_CHECKING:
    from typing import BinaryIO

    from pyspark.sql import SparkSession


_PIECES = 4  # pieces per worker, for load balance


class Host(AbstractContextManager):
    """Base class of hosts: context managers that call a function on each item of a list.

    Attributes
    ----------
    workers : int
        Number of items that run at the same time.
    """

    workers: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces to split the data into, so that all workers stay busy."""
        return self.workers if self.workers == 1 else self.workers * _PIECES

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call `function` on each item; return the results, or raise the first UsageError."""
        return raise_first_usage_error(
            self._outcomes(partial(value_or_usage_error, function), items)
        )

    @abstractmethod
    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call `function` on each item; return the results or UsageErrors, in item order."""

    def close(self) -> None:
        """Release the resources of the host."""

    def __exit__(self, *exception: object) -> None:
        self.close()


class InProcessHost(Host):
    """Host that calls the function in this process."""

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]


class SparkTasks(Host):
    """Host that runs one Spark task per item.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    """

    def __init__(self, spark: SparkSession):
        self._spark = spark
        context = getattr(spark, "_sc", None)
        self.workers = context.defaultParallelism if context is not None else 8

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return call_in_tasks(self._spark, function, items)


class LocalWorkers(Host):
    """Host that calls the function in local worker processes, which stop when the context exits.

    Parameters
    ----------
    workers : int, optional
        Number of processes. Default: one per core.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature.pipeline import FeaturePipeline, LocalWorkers
    >>> pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]}).to_parquet("users.parquet")
    >>> pipeline = FeaturePipeline().category_encode("city")
    >>> with LocalWorkers(1) as workers:  # one process runs both passes, without Spark
    ...     pipeline = pipeline.fit_files("users.parquet", host=workers)
    ...     _ = pipeline.transform_files("users.parquet", "encoded", host=workers)
    >>> pd.read_parquet("encoded")["city"].tolist()
    [1, 2, 1]
    """

    def __init__(self, workers: int | None = None):
        from bigdl.runtime.pool import CpuSlot, PoolStage, WorkerPool

        cores = usable_cores()
        if workers is not None:
            check_integer("workers", workers, 1)
        self.workers = workers or len(cores)
        slots = [CpuSlot((cores[i % len(cores)],), 1) for i in range(self.workers)]
        self._pool = WorkerPool([PoolStage("the pipeline", _caller, slots)])

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with scratch_folder("pipeline") as folder:
            path = os.path.join(folder, "work")
            with open(path, "wb") as file:
                pickle.dump(function, file, protocol=5)
            return self._pool.run((path, item) for item in items)

    def close(self) -> None:
        """Stop the worker processes."""
        self._pool.close()


def _caller() -> Callable[[tuple[str, Any]], Any]:
    """Return a function of ``(path, item)`` that calls the function pickled at `path` on `item`."""
    pa.set_cpu_count(1)
    return lambda work: _read_function(work[0])(work[1])


@lru_cache(maxsize=1)
def _read_function(path: str) -> Callable[[Any], Any]:
    with open(path, "rb") as file:
        return pickle.load(file)


def host_of(host: Host | str | None) -> AbstractContextManager[Host]:
    """Convert the argument `host` to a context manager that does not close a user's Host.

    None means Spark if a session is active, else local processes.
    """
    if isinstance(host, Host):
        return nullcontext(host)
    if host in (None, "spark"):
        session = _running_session() or (active_spark() if host == "spark" else None)
        if session is not None:
            return SparkTasks(session)
    if host in (None, "local"):
        return LocalWorkers()
    if host == "here":
        return InProcessHost()
    raise UsageError(
        f"host should be spark, local, here, a host or None, got {host!r}",
        code="argument-value",
        argument="host",
    )


def _running_session() -> SparkSession | None:
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


@dataclass(frozen=True)
class Piece:
    """Unit of work: row groups of one Parquet file.

    Attributes
    ----------
    index : int
        Index among all pieces; names the output file of the piece.
    schema : dict of str to Field
        Columns to read.
    path : str
    groups : tuple of int
    count : int
        Number of rows.
    partition_values : dict of str to object
        Constant values of the columns in folder names.
    """

    index: int
    schema: Schema
    path: str
    groups: tuple[int, ...]
    count: int
    partition_values: dict[str, Any]

    def batches(self) -> Iterator[LazyBatch]:
        """Yield a batch for each row group; columns are read on first access."""
        read = {
            name: each.kind
            for name, each in self.schema.items()
            if name not in self.partition_values
        }
        texts = [name for name, dtype in read.items() if dtype == "string"]
        with open_parquet(self.path, texts) as file:
            known = {each.name: column_types.of_arrow(each.type) for each in file.schema_arrow}
            for name, dtype in read.items():
                if known.get(name, dtype) != dtype:
                    raise UsageError(
                        f"The column {name} should be of type {dtype}, but is {known[name]} in "
                        f"{self.path}",
                        code="data-schema",
                        column=name,
                        path=str(self.path),
                    )
            for group in self.groups or (None,):
                rows = 0 if group is None else file.metadata.row_group(group).num_rows
                columns = {
                    name: partial(_column, file, group, name)
                    if name in read
                    else partial(_repeated, self.partition_values[name], each.kind, rows)
                    for name, each in self.schema.items()
                    if name in known or name in self.partition_values
                }
                yield LazyBatch(columns, rows)


def _repeated(value: object, dtype: str, rows: int) -> DictionaryColumn:
    return DictionaryColumn(
        pa.array([value], column_types.to_arrow(dtype)), np.zeros(rows, np.int32)
    )


def _column(
    file: pq.ParquetFile, group: int | None, name: str
) -> pa.ChunkedArray | DictionaryColumn:
    if group is None:
        return normalized(file.schema_arrow.empty_table()[name])
    return normalized(file.read_row_group(group, columns=[name], use_threads=False)[name])


Source = dict[str, dict[str, Any]]
"""File path to the values of the columns in its folder names."""


def source_of(src: str | Sequence[str]) -> tuple[Source, dict[str, Field]]:
    """Return the Parquet files at the user's paths, and the columns of these files.

    The files are sorted within each path of the user. The columns are those of the first file,
    which all files must have, followed by those in folder names.
    """
    named: dict[str, dict[str, str | None]] = {}
    for root in split_paths(src):
        inside = open_file_system(root)[1] if is_local_path(root) else root
        for path in files_of(root, nested=True):
            named[path] = _named_in(path, inside)
    columns = _columns_of(named)
    source = {
        path: {name: values[i].as_py() for name, values in columns.items()}
        for i, path in enumerate(named)
    }
    in_names = {name: Field(column_types.of_arrow(values.type)) for name, values in columns.items()}
    with open_parquet(next(iter(source))) as file:
        in_file = {each.name: Field(column_types.of_arrow(each.type)) for each in file.schema_arrow}
    fields = {name: each for name, each in in_file.items() if name not in in_names}
    return source, fields | in_names


# Columns in folder names: ``country=no/day=2024-05-01/part-0.parquet``.

_NULL = "__HIVE_DEFAULT_PARTITION__"


def _named_in(path: str, root: str) -> dict[str, str | None]:
    """Parse ``column=value`` folder names between a root and a file; values are strings."""
    inside = path[len(root) :].strip("/") if path.startswith(root) else ""
    pairs = [name.partition("=") for name in inside.split("/")[:-1] if "=" in name]
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def _columns_of(named: Mapping[str, Mapping[str, str | None]]) -> dict[str, pa.Array]:
    """Convert the values in folder names to typed columns with one value per file.

    As in Spark, a column has the first type of int, bigint, double, date and string that fits all
    values.

    Parameters
    ----------
    named : dict of str to dict
        File path to the result of :func:`_named_in`.
    """
    names = list(next(iter(named.values()), {}))
    for path, values in named.items():
        if list(values) != names:
            raise UsageError(
                f"The folders of all files should name the columns {names}, but those of {path} "
                f"name {list(values)}",
                code="data-schema",
                path=str(path),
                columns=list(values),
            )
    return {name: _typed([values[name] for values in named.values()]) for name in names}


def _typed(texts: Sequence[str | None]) -> pa.Array:
    column = pa.array(texts, pa.string())
    for dtype in (pa.int32(), pa.int64(), pa.float64(), pa.date32()):
        try:
            if column.null_count < len(column):
                return column.cast(dtype)
        except pa.ArrowInvalid:
            continue
    return column


def pieces_of(source: Source, schema: Schema, count: int) -> list[Piece]:
    """Split the row groups of files into about `count` pieces, in order.

    A piece has row groups of one file, and row groups are never split. Files without rows are one
    piece without groups.
    """
    rows = []
    for path in source:
        with open_parquet(path) as file:
            groups = range(file.num_row_groups)
            rows.append([file.metadata.row_group(group).num_rows for group in groups])
    target = max(sum(map(sum, rows)) / count, 1)
    chosen: list[tuple[str, tuple[int, ...], int]] = []
    for path, sizes in zip(source, rows, strict=True):
        parts = min(max(round(sum(sizes) / target), 1), len(sizes))
        bounds = [len(sizes) * i // parts for i in range(parts + 1)] if parts else []
        for first, last in pairwise(bounds):
            chosen.append((path, tuple(range(first, last)), sum(sizes[first:last])))
    return [
        Piece(index, schema, path, groups, count, source[path])
        for index, (path, groups, count) in enumerate(chosen or [(next(iter(source)), (), 0)])
    ]


def prepare_folder(path: str, sources: Iterable[str], mode: str) -> None:
    """Create an empty output folder; raise if it would replace an input."""
    check_choice("mode", mode, ("overwrite", "error"))
    fs, folder = open_file_system(path)
    for source in sources:
        inside = open_file_system(source)[1]
        if inside == folder or inside.startswith(folder + "/"):
            raise UsageError(
                f"The output folder must not contain the input files: {path}",
                code="argument-conflict",
                path=str(path),
            )
    if fs.exists(folder):
        if mode == "error":
            raise UsageError(
                f"{path} exists already; remove it or use mode='overwrite'",
                code="path-exists",
                path=str(path),
            )
        fs.rm(folder, recursive=True)
    fs.makedirs(folder, exist_ok=True)


def part_path(path: str, index: int) -> str:
    """Return the path of the part file `index` in a folder."""
    return f"{path.rstrip('/')}/part-{index:05d}.parquet"


def write(path: str, index: int, tables: Iterator[pa.Table]) -> int:
    """Write each table as a row group of the part file `index`; return the number of rows.

    The file gets its name only when it is complete, so a repeated task leaves no second file.

    Returns
    -------
    int
        Number of rows.
    """
    fs, folder = open_file_system(path)
    name = part_path(folder, index)
    if not is_local_path(path):  # a remote file becomes visible when it is closed
        with fs.open(name, "wb") as sink:
            return _write(sink, tables)
    hidden = f"{folder}/.part-{index:05d}-{uuid.uuid4().hex}"
    try:
        rows = _write(hidden, tables)
        os.replace(hidden, name)
    finally:
        if os.path.exists(hidden):
            os.remove(hidden)
    return rows


def _write(sink: BinaryIO | str, tables: Iterator[pa.Table]) -> int:
    """Write one or more tables to a Parquet file; return the number of rows."""
    first = next(tables)
    texts = [each.name for each in first.schema if pa.types.is_dictionary(each.type)]
    rows = 0
    with pq.ParquetWriter(
        sink,
        first.schema,
        use_dictionary=texts or False,
        # the dictionary encoding is not part of the column type
        store_schema=False,
        coerce_timestamps="us",
        allow_truncated_timestamps=True,
    ) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            rows += table.num_rows
    return rows


def table_of(batch: LazyBatch) -> pa.Table:
    """Return all columns of a batch as a table; strings are dictionary-encoded."""
    return pa.table({name: _written(batch[name]) for name in batch.names})


def _written(column: pa.Array | DictionaryColumn) -> pa.Array:

    if not isinstance(column, DictionaryColumn):
        return column.dictionary_encode() if pa.types.is_string(column.type) else column
    values, codes = column.values, column.codes
    if not pa.types.is_string(values.type):
        return values.take(pa.array(codes))
    if pc.count_distinct(values, mode="only_valid").as_py() < len(values):  # a null or a duplicate
        return values.take(pa.array(codes)).dictionary_encode()
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), values)


def compute_statistics(
    program: Program, pieces: Sequence[Piece], host: Host
) -> dict[tuple[int, str], Any]:
    """Compute the statistics that `program` requests from pieces of Parquet files."""
    for each in program:
        if isinstance(each, FittedOperator) and isinstance(each.step, AddHistSeq):
            raise UsageError(
                f"A step after {each.step.method} learns from the data, which the executor arrow "
                "does not support; use fit and transform, or move the step before it",
                code="unsupported",
                method=each.step.method,
            )
    statistics = _requested(program)
    parts = zip(*host.run(partial(_learned, program), pieces), strict=True)
    return {
        key: request.result(request.merged(of_pieces))
        for (key, request), of_pieces in zip(statistics.items(), parts, strict=True)
    }


def _requested(program: Program) -> dict[tuple[int, str], Statistic]:
    return {
        (query.step, name): request
        for query in program
        if isinstance(query, StatisticsQuery)
        for name, request in query.requests.items()
    }


def _learned(program: Program, rows: Rows) -> list[Any]:
    """Compute partial results of the statistics that `program` requests, on one piece or bucket."""
    batches = []
    for batch in rows.batches():
        parts = []
        for each in program:
            if isinstance(each, FittedOperator):
                batch = batch.after(each)
            else:
                parts += [request.partial_result(batch) for request in each.requests.values()]
        batches.append(parts)
    of_requests = zip(_requested(program).values(), zip(*batches, strict=True), strict=True)
    return [request.merged(parts) if len(parts) > 1 else parts[0] for request, parts in of_requests]


def _write_rows(fitted: Sequence[FittedOperator], path: str, rows: Rows) -> int:
    """Apply operators to a piece or bucket and write its output file; return the number of rows."""
    return write(path, rows.index, (table_of(each.after_all(fitted)) for each in rows.batches()))


# -- shuffle of rows by key ------------------------------------------------------------------------

_BUCKET = 500_000  # rows


@dataclass(frozen=True)
class Bucket:
    """All rows of a subset of the users, shuffled into files for one ``AddHistSeq`` operator.

    Attributes
    ----------
    index : int
        Index among all buckets.
    path : str
        Folder that :func:`_shuffle` wrote to.
    parts : dict of int to list of int
        Index of a part file to the row groups of this bucket in that file.
    step : AddHistSeq
    """

    index: int
    path: str
    parts: dict[int, list[int]]
    step: AddHistSeq

    def batches(self) -> Iterator[LazyBatch]:
        tables = []
        for part, groups in self.parts.items():
            with open_parquet(part_path(self.path, part)) as file:
                tables.append(file.read_row_groups(groups, use_threads=False))
        for table in self.step.of_users(pa.concat_tables(tables)):
            yield lazy_batch({name: table[name] for name in table.column_names})


Rows = Piece | Bucket


def _shuffle(
    fitted: Sequence[FittedOperator], step: AddHistSeq, count: int, path: str, rows: Rows
) -> list[int]:
    """Write the input rows of operator `step` to a file, ordered by bucket.

    Returns
    -------
    list of int
        Bucket of each row group of the file.
    """
    of_groups: list[int] = []

    def tables() -> Iterator[pa.Table]:
        for each in rows.batches():
            batch = each.after_all(fitted)
            require_columns(batch.names, step.columns, advice=f"; {step.method} reads them")
            table = table_of(batch)
            step.check_rows(table)
            buckets = _buckets(batch, step.user_col, count)
            sizes = np.bincount(buckets, minlength=count).tolist()
            table, start = table.take(pa.array(np.argsort(buckets, kind="stable"))), 0
            for bucket, size in enumerate(sizes):
                is_first = bucket == 0 and not of_groups
                if size or is_first:  # every file needs a row group, for its schema
                    of_groups.append(bucket)
                    yield table.slice(start, size)
                start += size

    write(path, rows.index, tables())
    return of_groups


def _buckets(batch: LazyBatch, name: str, count: int) -> np.ndarray:
    """Hash the values of column `name` into `count` buckets; return the bucket of each row."""
    import pandas as pd

    column = dictionary_encoded(batch[name])
    values = column.values.to_pandas(types_mapper={pa.bool_(): pd.BooleanDtype()}.get)
    return (hash_values(values) % np.uint64(count)).astype(np.int64)[column.codes]


def _buckets_of(path: str, step: AddHistSeq, written: Sequence[list[int]]) -> list[Bucket]:
    """Build the buckets from the results of all :func:`_shuffle` calls."""
    parts: dict[int, dict[int, list[int]]] = {}
    for index, buckets in enumerate(written):
        for group, bucket in enumerate(buckets):
            parts.setdefault(bucket, {}).setdefault(index, []).append(group)
    filled = (parts[bucket] for bucket in sorted(parts))
    return [Bucket(index, path, each, step) for index, each in enumerate(filled)]


def transform_pieces(
    fitted: Sequence[FittedOperator], pieces: Sequence[Piece], path: str, host: Host
) -> int:
    """Apply all operators and write the output files; return the number of rows.

    Shuffled intermediate files are in a hidden folder of `path`.
    """
    remaining = list(fitted)
    rows: Sequence[Rows] = pieces
    count = max(host.pieces, -(-sum(piece.count for piece in pieces) // _BUCKET))
    fs, folder = open_file_system(path)
    with ExitStack() as stack:
        while group := next(
            (each for each in remaining if isinstance(each.step, AddHistSeq)), None
        ):
            at = remaining.index(group)
            name = f".exchange-{uuid.uuid4().hex}"
            hidden = f"{folder}/{name}"
            fs.makedirs(hidden, exist_ok=True)
            stack.callback(fs.rm, hidden, recursive=True)
            exchange_path = f"{path.rstrip('/')}/{name}"
            step = cast("AddHistSeq", group.step)
            written = host.run(partial(_shuffle, remaining[:at], step, count, exchange_path), rows)
            remaining, rows = remaining[at + 1 :], _buckets_of(exchange_path, step, written)
        counts = host.run(partial(_write_rows, remaining, path), rows)
    fs.touch(f"{folder}/_SUCCESS")  # marks complete output, as Spark does
    return sum(counts)
