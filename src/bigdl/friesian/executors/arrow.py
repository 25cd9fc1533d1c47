"""The executor ``arrow``: Parquet files in batches, by Spark or by processes of this machine.

Where an operator looks at groups, rows with the same key meet, as by a shuffle of Spark: they are
written in buckets, and a bucket is read from all files.  Each piece of the data becomes a file of
its own, in which the rows of a bucket are one row group, so that they keep the order of the data.

A host says where the pieces of files are worked on: tasks of Spark, processes, or here.
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
from bigdl.common.errors import UsageError, raise_first_usage_error, value_or_usage_error
from bigdl.common.private_folders import scratch_folder
from bigdl.friesian.ops import column_types
from bigdl.friesian.ops.batches import (
    DictionaryColumn,
    LazyBatch,
    Statistic,
    batch_of,
    factored,
    normal,
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
    from pyspark.sql import SparkSession


_PIECES = 4  # for each worker, so that none waits long for the last


class Host(AbstractContextManager):
    """Runs a function on items; a context manager that closes it.

    Attributes
    ----------
    workers : int
        How many items are worked on at the same time.
    """

    workers: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces that keep all workers busy."""
        return self.workers if self.workers == 1 else self.workers * _PIECES

    def run(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The results in the order of the items; raises the first error of the user."""
        return raise_first_usage_error(
            self._outcomes(partial(value_or_usage_error, function), items)
        )

    @abstractmethod
    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The results in the order of the items, with errors of the user in their place."""

    def close(self) -> None:
        """Free what the host holds."""

    def __exit__(self, *exception: object) -> None:
        self.close()


class InProcessHost(Host):
    """This process."""

    def _outcomes(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]


class SparkTasks(Host):
    """A task of Spark for each item.

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
    """Processes of this machine, which live until :meth:`close`; a context manager.

    Parameters
    ----------
    workers : int, optional
        Default: one for each core.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.feature.pipeline import FeaturePipeline, LocalWorkers
    >>> pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"]}).to_parquet("users.parquet")
    >>> pipeline = FeaturePipeline().category_encode("city")
    >>> with LocalWorkers(1) as workers:  # both passes by the same process, without Spark
    ...     pipeline = pipeline.fit_files("users.parquet", host=workers)
    ...     _ = pipeline.transform_files("users.parquet", "encoded", host=workers)
    >>> pd.read_parquet("encoded")["city"].tolist()
    [1, 2, 1]
    """

    def __init__(self, workers: int | None = None):
        from bigdl.runtime.pool import CpuSlot, PoolStage, WorkerPool

        cores = sorted(os.sched_getaffinity(0))
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
        """End the processes."""
        self._pool.close()


def _caller() -> Callable[[tuple[str, Any]], Any]:
    """Return a caller for a worker: it loads the function of a file once and applies it."""
    pa.set_cpu_count(1)
    return lambda work: _read_function(work[0])(work[1])


@lru_cache(maxsize=1)
def _read_function(path: str) -> Callable[[Any], Any]:
    with open(path, "rb") as file:
        return pickle.load(file)


def host_of(host: Any) -> AbstractContextManager[Host]:
    """Return the host that a user named; one that is made here is closed on exit.

    None means Spark if it runs, else this machine.
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
    """Row groups of one file.

    Attributes
    ----------
    place : int
        Among all pieces; names the file that their results are written to.
    schema : dict of str to Field
        The columns that are read.
    path : str
    groups : tuple of int
    count : int
        Number of rows.
    given : dict of str to object
        Values that all rows have, of the columns that stand in the names of folders.
    """

    place: int
    schema: Schema
    path: str
    groups: tuple[int, ...]
    count: int
    given: dict[str, Any]

    def batches(self) -> Iterator[LazyBatch]:
        """A batch for each group; a column is read when it is asked for."""
        read = {name: each.kind for name, each in self.schema.items() if name not in self.given}
        texts = [name for name, kind in read.items() if kind == "string"]
        with open_parquet(self.path, texts) as file:
            known = {each.name: column_types.of_arrow(each.type) for each in file.schema_arrow}
            for name, kind in read.items():
                if known.get(name, kind) != kind:
                    raise UsageError(
                        f"The column {name} should be of type {kind}, but is {known[name]} in "
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
                    else partial(_repeated, self.given[name], each.kind, rows)
                    for name, each in self.schema.items()
                    if name in known or name in self.given
                }
                yield LazyBatch(columns, rows)


def _repeated(value: Any, kind: str, rows: int) -> DictionaryColumn:
    return DictionaryColumn(
        pa.array([value], column_types.to_arrow(kind)), np.zeros(rows, np.int32)
    )


def _column(file: pq.ParquetFile, group: int | None, name: str) -> Any:
    if group is None:
        return normal(file.schema_arrow.empty_table()[name])
    return normal(file.read_row_group(group, columns=[name], use_threads=False)[name])


Source = dict[str, dict[str, Any]]
"""Files, and of each the values of the columns that stand in the names of its folders."""


def source_of(src: Any) -> tuple[Source, dict[str, Field]]:
    """Return the files that a user means, and their columns.

    The files are sorted within each path of the user.  The columns are those of the first file,
    which all others have to have, and behind them those in names of folders.
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


# Columns in the names of folders: ``country=no/day=2024-05-01/part-0.parquet``.

_NULL = "__HIVE_DEFAULT_PARTITION__"


def _named_in(path: str, root: str) -> dict[str, str | None]:
    """The columns in the names of the folders between a root and a file, as text."""
    inside = path[len(root) :].strip("/") if path.startswith(root) else ""
    pairs = [name.partition("=") for name in inside.split("/")[:-1] if "=" in name]
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs}


def _columns_of(named: Mapping[str, Mapping[str, str | None]]) -> dict[str, pa.Array]:
    """The columns in the names of the folders of files, with a value for each file.

    As with Spark a column is int, bigint, double, date or string: the first that takes all values.

    Parameters
    ----------
    named : dict of str to dict
        Of each file what :func:`_named_in` returned.
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
    for kind in (pa.int32(), pa.int64(), pa.float64(), pa.date32()):
        try:
            if column.null_count < len(column):
                return column.cast(kind)
        except pa.ArrowInvalid:
            continue
    return column


def pieces_of(source: Source, schema: Schema, count: int) -> list[Piece]:
    """All row groups of files, in their order, as about so many pieces with some columns.

    A piece never has groups of several files, and a group is never cut.  Files without rows are
    one piece without groups.
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
        Piece(place, schema, path, groups, count, source[path])
        for place, (path, groups, count) in enumerate(chosen or [(next(iter(source)), (), 0)])
    ]


def clear(path: str, sources: Iterable[str], mode: str) -> None:
    """Make an empty folder for results."""
    check_choice("mode", mode, ("overwrite", "error"))
    fs, folder = open_file_system(path)
    for source in sources:
        inside = open_file_system(source)[1]
        if inside == folder or inside.startswith(folder + "/"):
            raise UsageError(
                f"The results cannot replace the files that they are made of: {path}",
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
    fs, folder = open_file_system(path)
    name = file_of(folder, place)
    if not is_local_path(path):  # a file of a remote storage appears when it is closed
        with fs.open(name, "wb") as sink:
            return _write(sink, tables)
    hidden = f"{folder}/.part-{place:05d}-{uuid.uuid4().hex}"
    try:
        rows = _write(hidden, tables)
        os.replace(hidden, name)
    finally:
        if os.path.exists(hidden):
            os.remove(hidden)
    return rows


def _write(sink: Any, tables: Iterator[pa.Table]) -> int:
    """Write tables, of which there is at least one."""
    first = next(tables)
    texts = [each.name for each in first.schema if pa.types.is_dictionary(each.type)]
    rows = 0
    with pq.ParquetWriter(
        sink,
        first.schema,
        use_dictionary=texts or False,
        # dictionaries are a matter of the file, not of the type of the column
        store_schema=False,
        coerce_timestamps="us",
        allow_truncated_timestamps=True,
    ) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            rows += table.num_rows
    return rows


def table_of(batch: LazyBatch) -> pa.Table:
    """All columns of a batch; those of text as dictionaries."""
    return pa.table({name: _written(batch[name]) for name in batch.names})


def _written(column: Any) -> pa.Array:

    if not isinstance(column, DictionaryColumn):
        return column.dictionary_encode() if pa.types.is_string(column.type) else column
    values, codes = column.values, column.codes
    if not pa.types.is_string(values.type):
        return values.take(pa.array(codes))
    if pc.count_distinct(values, mode="only_valid").as_py() < len(values):  # a null or a duplicate
        return values.take(pa.array(codes)).dictionary_encode()
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), values)


def answers(program: Program, pieces: Sequence[Piece], host: Host) -> dict[tuple[int, str], Any]:
    """Run a program over files."""
    for each in program:
        if isinstance(each, FittedOperator) and isinstance(each.step, AddHistSeq):
            raise UsageError(
                f"A step behind {each.step.method} has to learn from the data, which the executor "
                "arrow cannot do; use fit and transform, or move the step in front of it",
                code="unsupported",
                method=each.step.method,
            )
    asked = _asked(program)
    parts = zip(*host.run(partial(_learned, program), pieces), strict=True)
    return {
        key: request.answer(request.merged(of_pieces))
        for (key, request), of_pieces in zip(asked.items(), parts, strict=True)
    }


def _asked(program: Program) -> dict[tuple[int, str], Statistic]:
    return {
        (ask.step, name): request
        for ask in program
        if isinstance(ask, StatisticsQuery)
        for name, request in ask.requests.items()
    }


def _learned(program: Program, rows: Rows) -> list[Any]:
    """Return the partial answers of some rows, in the order of the requests."""
    batches = []
    for batch in rows.batches():
        parts = []
        for each in program:
            if isinstance(each, FittedOperator):
                batch = batch.after(each)
            else:
                parts += [request.of_batch(batch) for request in each.requests.values()]
        batches.append(parts)
    of_requests = zip(_asked(program).values(), zip(*batches, strict=True), strict=True)
    return [request.merged(parts) if len(parts) > 1 else parts[0] for request, parts in of_requests]


def _write_rows(fitted: Sequence[FittedOperator], path: str, rows: Rows) -> int:
    """Write the file of some rows and return their number."""
    return write(path, rows.place, (table_of(each.after_all(fitted)) for each in rows.batches()))


# -- rows with the same key meet -------------------------------------------------------------------

_BUCKET = 500_000  # rows


@dataclass(frozen=True)
class Bucket:
    """Some keys with all their rows, behind the step that asked for them.

    Attributes
    ----------
    place : int
        Among all buckets.
    path : str
        The folder that :func:`_cut` wrote to.
    parts : dict of int to list of int
        Maps the number of each of its files to the row groups of this bucket in that file.
    step : AddHistSeq
    """

    place: int
    path: str
    parts: dict[int, list[int]]
    step: AddHistSeq

    def batches(self) -> Iterator[LazyBatch]:
        tables = []
        for place, groups in self.parts.items():
            with open_parquet(file_of(self.path, place)) as file:
                tables.append(file.read_row_groups(groups, use_threads=False))
        for table in self.step.of_users(pa.concat_tables(tables)):
            yield batch_of({name: table[name] for name in table.column_names})


Rows = Piece | Bucket


def _cut(
    fitted: Sequence[FittedOperator], step: AddHistSeq, count: int, path: str, rows: Rows
) -> list[int]:
    """Split rows into buckets, as they are before a step runs.

    Returns
    -------
    list of int
        The buckets of the row groups of the file.
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
                if size or is_first:  # a file has a row group, for its schema
                    of_groups.append(bucket)
                    yield table.slice(start, size)
                start += size

    write(path, rows.place, tables())
    return of_groups


def _buckets(batch: LazyBatch, name: str, count: int) -> np.ndarray:
    """The bucket of each row: equal values have equal ones."""
    import pandas as pd

    column = factored(batch[name])
    values = column.values.to_pandas(types_mapper={pa.bool_(): pd.BooleanDtype()}.get)
    return (hash_values(values) % np.uint64(count)).astype(np.int64)[column.codes]


def _buckets_of(path: str, step: AddHistSeq, written: Sequence[list[int]]) -> list[Bucket]:
    """Return the buckets, from the results of every :func:`_cut`."""
    parts: dict[int, dict[int, list[int]]] = {}
    for place, buckets in enumerate(written):
        for group, bucket in enumerate(buckets):
            parts.setdefault(bucket, {}).setdefault(place, []).append(group)
    filled = (parts[bucket] for bucket in sorted(parts))
    return [Bucket(place, path, each, step) for place, each in enumerate(filled)]


def transformed(
    fitted: Sequence[FittedOperator], pieces: Sequence[Piece], path: str, host: Host
) -> int:
    """Write files behind all steps; returns the number of rows.

    What is written on the way to steps that look at groups lies in a hidden folder in `path`.
    """
    rest = list(fitted)
    rows: Sequence[Rows] = pieces
    count = max(host.pieces, -(-sum(piece.count for piece in pieces) // _BUCKET))
    fs, folder = open_file_system(path)
    with ExitStack() as stack:
        while group := next((each for each in rest if isinstance(each.step, AddHistSeq)), None):
            at = rest.index(group)
            name = f".exchange-{uuid.uuid4().hex}"
            hidden = f"{folder}/{name}"
            fs.makedirs(hidden, exist_ok=True)
            stack.callback(fs.rm, hidden, recursive=True)
            place = f"{path.rstrip('/')}/{name}"
            step = cast("AddHistSeq", group.step)
            written = host.run(partial(_cut, rest[:at], step, count, place), rows)
            rest, rows = rest[at + 1 :], _buckets_of(place, step, written)
        counts = host.run(partial(_write_rows, rest, path), rows)
    fs.touch(f"{folder}/_SUCCESS")  # as Spark marks complete output
    return sum(counts)
