"""Direct reading of Parquet files by workers, for DataFrames that select, cast and filter columns.

Spark decodes columns to Java vectors and rows, encodes them as Arrow and sends them to Python.  If
a plan only selects, casts and filters columns of files, a Python task that opens the files with
pyarrow gets the same rows in the same partitions without these conversions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.data.lake_tables.expressions import Query, input_names
from bigdl.data.lake_tables.table import DataFile, RowRange, TableColumns
from bigdl.orca.cluster.scan import Scan, scan_of
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_type, release, to_arrow
from bigdl.orca.data.file import is_local_path, open_file_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

FEW_FILES = 32  # maximum number of files that the driver inspects itself
FILES_OF_TASK = 16  # files that one task inspects
_GREGORIAN_START = -141427  # 1582-10-15 in days since 1970
_START_OF_ZONES = -2208988800000000  # 1900-01-01 in microseconds since 1970
_COMMON = {
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.bool_(), pa.string(), pa.binary()),
}
_TIMES = {pa.timestamp("us", "UTC"), pa.timestamp("us")}
_COUNTED_ROWS = 1 << 17  # rows of a batch of which matching rows are counted

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

Accepts = Callable[[pq.ParquetFile], bool]
"""Predicate: pyarrow and Spark read the same values from a file."""


@dataclass(frozen=True)
class RowGroups:
    """Row groups of one file, read by one task.

    Attributes
    ----------
    path : str
    groups : tuple of int
    counts : tuple of int
        Number of rows in each row group.
    """

    path: str
    groups: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of rows in the row groups."""
        return sum(self.counts)

    def batches(self, columns: FileColumns, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield record batches of at most `rows` rows of the file, without rows to skip."""
        names = columns.schema.names
        with missing_file_explained(self.path), open_parquet(self.path) as file:
            groups = [each for each in self.groups if columns.may_match(file, each)]
            for batch in file.iter_batches(rows, groups, names, use_threads=False):
                yield columns.compute(batch)


@dataclass(frozen=True)
class FileColumns:
    """Columns of files, and the columns of a DataFrame that are computed from them.

    Attributes
    ----------
    schema : pyarrow.Schema
        Columns of the files.
    query : Query
    names : list of str
        Names of the DataFrame's columns.
    """

    schema: pa.Schema
    query: Query
    names: list[str]

    def compute(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the DataFrame's columns for the rows of files that fulfill the condition."""
        columns = self.query.rows(self._inputs(batch))
        return pa.RecordBatch.from_arrays(self.query.select(columns), self.names)

    def count(self, groups: RowGroups) -> list[int]:
        """Return the number of rows of each row group that fulfill the condition."""
        names, counts = self._condition_names(), []
        with missing_file_explained(groups.path), open_parquet(groups.path) as file:
            for group in groups.groups:
                batches = file.iter_batches(_COUNTED_ROWS, [group], names, use_threads=False)
                counts.append(sum(self.query.count(self._inputs(b)) for b in batches))
        return counts

    def may_match(self, file: pq.ParquetFile, group: int) -> bool:
        """Return True unless no row of a row group fulfills the condition."""
        names = self._condition_names()
        if not names or len(names) == len(self.schema):
            return True
        batches = file.iter_batches(_COUNTED_ROWS, [group], names, use_threads=False)
        return any(self.query.count(self._inputs(each)) for each in batches)

    def of_table(self, path: str) -> TableColumns:
        """Return the columns for readers of row ranges."""
        types = [each.type for each in self.schema]
        casts = any(each in _TIMES for each in types)
        return TableColumns(path, tuple(self.schema), evolves=casts, query=self.query)

    def _condition_names(self) -> list[str]:
        return input_names(*([] if self.query.condition is None else [self.query.condition]))

    def _inputs(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        names = batch.schema.names
        return {name: batch.column(name).cast(self.schema.field(name).type) for name in names}


FileTasks = tuple[list[list[RowGroups]], FileColumns]
"""Row groups of each task, and the columns to compute from them."""


@contextmanager
def open_parquet(path: str, texts: Sequence[str] | None = None) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a Parquet file and reads columns `texts` as dictionary arrays.

    Raises
    ------
    UsageError
        If one of `texts` is missing.
    """
    fs, inside = open_file_system(path)
    is_local = is_local_path(path)
    # Arrow's threads can still hold a Python file while the process exits
    options = {"filesystem": fs, "memory_map": is_local, "pre_buffer": is_local}
    try:
        file = pq.ParquetFile(
            inside, read_dictionary=texts, coerce_int96_timestamp_unit="us", **options
        )
    except KeyError as error:
        name = error.args[0].decode()
        raise UsageError(
            f"Column {name} exists in the other files but not in {path}",
            code="column-missing",
            column=name,
            path=path,
        ) from None
    with file:
        yield file


@contextmanager
def missing_file_explained(path: str) -> Iterator[None]:
    """Context manager that converts the FileNotFoundError of a removed file to UsageError.

    Raises
    ------
    UsageError
        If the file is not found.
    """
    try:
        yield
    except FileNotFoundError:
        message = f"The file {path} is no longer there; read the table again"
        raise UsageError(message, code="path-missing", path=path) from None


# -- batches ---------------------------------------------------------------------------------------


def map_in_arrow(df: DataFrame, function: Work, schema: str | StructType, rows: int) -> DataFrame:
    """Run ``df.mapInArrow(function, schema)``, with tasks that read the files directly if possible.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    function : callable
        Function of an iterator of record batches that returns such an iterator.
    schema : pyspark.sql.types.StructType
        Schema of the result.
    rows : int
        Rows per batch from files, except for the last; Spark determines the size of its batches.
    """
    tasks = file_tasks(df)
    if tasks is None:
        return df.mapInArrow(silent_when_closed(function), schema)
    return map_files(df.sparkSession, tasks, function, schema, rows)


def map_files(
    spark: SparkSession, tasks: FileTasks, function: Work, schema: StructType | str, rows: int
) -> DataFrame:
    """Call a function in one Spark task for each task of :func:`file_tasks`.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
    tasks : FileTasks
    function, schema, rows
        See :func:`map_in_arrow`.
    """
    groups, columns = tasks

    def work(groups: list[RowGroups]) -> Iterator[pa.RecordBatch]:
        batches = (each.batches(columns, rows) for each in groups)
        return function(_rebatched(rows, chain.from_iterable(batches)))

    return map_items(spark, groups, work, schema)


def map_items(
    spark: SparkSession,
    items: Sequence[Any],
    function: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: str | StructType,
) -> DataFrame:
    """Call a function for each item in a separate Spark task; return its batches in item order.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Classic session, not Spark Connect.
    items : sequence
        Broadcast to all workers.
    function : callable
        Function of an item, called in a task.
    schema : pyspark.sql.types.StructType or str
        Schema of the result.
    """
    shared = spark.sparkContext.broadcast(items)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa.set_cpu_count(1)
        for index in (index for batch in batches for index in batch.column(0).to_pylist()):
            yield from function(shared.value[index])

    indices = spark.range(0, len(items), 1, len(items))
    return indices.mapInArrow(silent_when_closed(work), schema)


def _rebatched(rows: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Regroup rows into batches of exactly `rows` rows, except for the last batch."""
    kept, count = [], 0
    for batch in batches:
        while count + batch.num_rows >= rows:
            kept.append(batch.slice(0, rows - count))
            batch = batch.slice(rows - count)
            yield _concatenate(kept)
            kept, count = [], 0
        if batch.num_rows:
            kept.append(batch)
            count += batch.num_rows
    if kept:
        yield _concatenate(kept)


def _concatenate(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def file_tasks(df: DataFrame) -> FileTasks | None:
    """Return each task's row groups and the columns to read, or None if Spark must read the files.

    A row group may have rows that do not fulfill the condition of the columns.
    """
    scan = scan_of(df)
    if scan is None or any("." in name for name in scan.inputs):
        return None
    inputs = {name: _nullable(arrow_type(type_)) for name, type_ in scan.inputs.items()}
    if not all(map(_is_common, inputs.values())):
        return None
    accepts = partial(_reads_equally, inputs, scan.rebase_mode)
    groups = row_groups_of(scan, df.sparkSession, accepts)
    if groups is None:
        return None
    query = Query(scan.condition, tuple(scan.columns.values()))
    return groups, FileColumns(pa.schema(list(inputs.items())), query, list(scan.columns))


def row_ranges_of(df: DataFrame) -> tuple[TableColumns, list[RowRange]] | None:
    """Return the columns and rows of a DataFrame that selects, casts and filters those of files.

    Returns
    -------
    columns : TableColumns
        With the DataFrame's columns as results of its query.
    row_ranges : list of RowRange
        In the order of the DataFrame's rows, of which there is at least one.
    None
        If Spark must read the files.
    """
    tasks = file_tasks(df)
    if tasks is None:
        return None
    groups, columns = tasks
    files = [each for task in groups for each in task]
    if not files:
        return None
    counts: list[Sequence[int]] = [each.counts for each in files]
    if columns.query.condition is not None:
        counts = _matching_rows(df.sparkSession, files, columns)
    ranges = [
        RowRange(DataFile(open_file_system(each.path)[1]), group, 0, rows)
        for each, counts_of_file in zip(files, counts, strict=True)
        for group, rows in zip(each.groups, counts_of_file, strict=True)
        if rows
    ]
    return (columns.of_table(files[0].path), ranges) if ranges else None


def _matching_rows(
    spark: SparkSession, files: Sequence[RowGroups], columns: FileColumns
) -> list[Sequence[int]]:
    """Return the number of rows of each row group that fulfill the condition."""
    from bigdl.orca.cluster.spark import is_local

    parts = [replace(e, groups=(g,)) for e in files for g in e.groups]
    if is_local(cast("str", spark.sparkContext.master)):
        with ThreadPoolExecutor(spark.sparkContext.defaultParallelism) as pool:
            counts = list(pool.map(columns.count, parts))
    else:
        width = -(-len(parts) // spark.sparkContext.defaultParallelism)
        chunks = [parts[i : i + width] for i in range(0, len(parts), width)]
        results = call_in_tasks(spark, partial(_count_in, columns), chunks)
        counts = list(chain(*results))
    matching = (each[0] for each in counts)
    return [[next(matching) for _ in each.groups] for each in files]


def _count_in(columns: FileColumns, parts: Sequence[RowGroups]) -> list[list[int]]:
    return [columns.count(each) for each in parts]


def _is_common(type_: pa.DataType) -> bool:
    """Return True for types that Spark, Arrow and Parquet represent identically."""
    if pa.types.is_date32(type_) or type_ in _TIMES:
        return True
    return _is_plain(type_)


def _is_plain(type_: pa.DataType) -> bool:
    """Return True for types without dates and times, at any depth."""
    if pa.types.is_list(type_):
        return _is_plain(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_plain(each.type) for each in type_)
    return type_ in _COMMON or pa.types.is_decimal128(type_)


def _nullable(type_: pa.DataType) -> pa.DataType:
    """Return the type with nullable elements, as Spark declares all types that it reads."""
    if pa.types.is_list(type_):
        return pa.list_(_nullable(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(each.name, _nullable(each.type)) for each in type_])
    return type_


def _reads_equally(types: dict[str, pa.DataType], rebase_mode: str, file: pq.ParquetFile) -> bool:
    """Return True if pyarrow and Spark read the same values from a file."""
    dates = [name for name, type_ in types.items() if pa.types.is_date32(type_)]
    times = [name for name, type_ in types.items() if type_ in _TIMES]
    file_types = {each.name: _nullable(each.type) for each in file.schema_arrow}
    physical = {file.schema.column(i).path: file.schema.column(i) for i in range(_leaves(file))}
    for name in times:
        if name in physical and physical[name].physical_type == "INT96":
            if types[name].tz is None or not _has_modern_int96(file):
                return False
            file_types[name] = types[name]  # of which only Spark knows that it is UTC
    return (
        has_modern_dates(file, dates, rebase_mode)
        and has_modern_dates(file, times, rebase_mode, _START_OF_ZONES)
        and has_columns(list(file_types.items()), types)
    )


def _leaves(file: pq.ParquetFile) -> int:
    return len(file.schema)


def _has_modern_int96(file: pq.ParquetFile) -> bool:
    """Return True if Spark wrote times as INT96 in the proleptic Gregorian calendar."""
    metadata = file.metadata.metadata or {}
    version = metadata.get(b"org.apache.spark.version", b"0.0").decode()
    return release(version) >= (3, 1) and b"org.apache.spark.legacyINT96" not in metadata


# -- row groups ------------------------------------------------------------------------------------


def row_groups_of(
    scan: Scan, spark: SparkSession, accepts: Accepts
) -> list[list[RowGroups]] | None:
    """Return the row groups of each task of a scan, or None if Spark must read a file.

    Parameters
    ----------
    scan : Scan
    spark : pyspark.sql.SparkSession
    accepts : callable
        Called with each file, on the driver or in a Spark task.
    """
    from bigdl.orca.cluster.spark import is_local

    paths = list(dict.fromkeys(path for task in scan.tasks for path, _, _ in task))
    inspect = partial(_row_groups_in, accepts)
    parts = [paths[i : i + FILES_OF_TASK] for i in range(0, len(paths), FILES_OF_TASK)]
    # on a cluster the workers inspect the files, because they must be able to open them
    if is_local(cast("str", spark.sparkContext.master)) and len(paths) <= FEW_FILES:
        results = [inspect(part) for part in parts]
    else:
        results = call_in_tasks(spark, inspect, parts)
    accepted = [each for each in results if each is not None]
    if len(accepted) < len(results):
        return None
    groups: dict[str, list[_Group]] = dict(zip(paths, chain(*accepted), strict=True))
    tasks: list[list[RowGroups]] = []
    count = 0
    for task in scan.tasks:
        tasks.append([])
        for path, start, stop in task:
            indices = [i for i, (middle, _) in enumerate(groups[path]) if start <= middle < stop]
            count += len(indices)
            if indices:
                rows = tuple(groups[path][i][1] for i in indices)
                tasks[-1].append(RowGroups(path, tuple(indices), rows))
    # Spark must read files that changed after it listed them
    return tasks if count == sum(map(len, groups.values())) else None


def call_in_tasks(
    spark: SparkSession, function: Callable[[Any], Any], items: Sequence[Any]
) -> list[Any]:
    """Call a function for each item in a separate Spark task and return the results."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa.set_cpu_count(1)
        for batch in batches:
            for index in batch.column(0).to_pylist():
                result = pickle.dumps(function(items[index]))
                yield pa.record_batch({"index": [index], "result": [result]})

    if not items:
        return []
    tasks = spark.range(0, len(items), 1, len(items))
    done = to_arrow(tasks.mapInArrow(work, "index bigint, result binary"))
    return [pickle.loads(each.as_py()) for each in done.sort_by("index")["result"]]


_Group = tuple[int, int]
"""Row group: file offset of its middle, and number of rows."""


def _row_groups_in(accepts: Accepts, paths: Sequence[str]) -> list[list[_Group]] | None:
    """Return the row groups of files, or None if Spark must read one of them."""
    groups = []
    try:
        for path in paths:
            with open_parquet(path, []) as file:
                if not accepts(file):
                    return None
                parts = map(file.metadata.row_group, range(file.num_row_groups))
                groups.append([(_middle(part), part.num_rows) for part in parts])
    except Exception:  # Spark may read files that pyarrow cannot open
        return None
    return groups


def _middle(group: pq.RowGroupMetaData) -> int:
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [
        column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        for column in columns
    ]
    return min(starts) + sum(column.total_compressed_size for column in columns) // 2


def has_columns(file_columns: Sequence[tuple[str, Any]], selected: Mapping[str, Any]) -> bool:
    """Return True if a file has the selected columns, and no names that differ only in case.

    Parameters
    ----------
    file_columns : sequence of (str, object)
        Name and type of each column of the file.
    selected : dict of str to object
        Types of the selected columns, by name.
    """
    lowered = [name.lower() for name, _ in file_columns]  # Spark ignores case
    return all(
        each in file_columns and lowered.count(each[0].lower()) == 1 for each in selected.items()
    )


def has_modern_dates(
    file: pq.ParquetFile, dates: Sequence[str], rebase_mode: str, start: int = _GREGORIAN_START
) -> bool:
    """Return True if date columns use the proleptic Gregorian calendar by Spark's rules.

    Parameters
    ----------
    file : pyarrow.parquet.ParquetFile
    dates : sequence of str
        Names of date columns.
    rebase_mode : str
        See :class:`~bigdl.orca.cluster.scan.Scan`.
    start : int, optional
        First value for which all calendars agree. By default that of dates.
    """
    if not dates:
        return True
    metadata = file.metadata.metadata or {}
    version = metadata.get(b"org.apache.spark.version")
    if version is None:
        is_late = rebase_mode == "EXCEPTION" and _are_late(file.metadata, dates, start)
        return rebase_mode == "CORRECTED" or is_late
    is_old = int(version.split(b".")[0]) < 3
    return not is_old and b"org.apache.spark.legacyDateTime" not in metadata


def _are_late(file: pq.FileMetaData, dates: Sequence[str], start: int) -> bool:
    """Return True if a file's statistics show no value before `start`."""
    groups = map(file.row_group, range(file.num_row_groups))
    columns = (g.column(i) for g in groups if g.num_rows for i in range(g.num_columns))
    statistics = (each.statistics for each in columns if each.path_in_schema in dates)
    return all(
        each is not None and (each.min_raw >= start if each.has_min_max else not each.num_values)
        for each in statistics
    )
