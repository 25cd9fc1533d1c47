"""DataFrames that do nothing but read columns of Parquet files, which workers can read themselves.

Spark decodes a column into vectors and rows of Java, encodes it for Arrow and sends it to Python.
Where nothing is done to the rows on the way, a task of Python that opens the files by pyarrow has
the same rows in the same partitions without all that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.orca.cluster.scan import Scan, scan_of
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_schema, to_arrow
from bigdl.orca.data.file import is_local_path, open_file_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEW_FILES = 32  # that the driver looks into itself
FILES_OF_TASK = 16  # files that a task looks into
_SAME_CALENDAR = -141427  # 1582-10-15 in days since 1970
_COMMON = {
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.bool_(), pa.string(), pa.binary()),
}

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

Accepts = Callable[[pq.ParquetFile], bool]
"""Whether pyarrow reads what Spark would from a file."""


@dataclass(frozen=True)
class RowGroups:
    """Row groups of one file, which a task reads.

    Attributes
    ----------
    path : str
    groups : tuple of int
    count : int
        Number of rows.
    """

    path: str
    groups: tuple[int, ...]
    count: int

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Record batches of at most so many rows, with these columns, also one several times."""
        names = list(dict.fromkeys(schema.names))
        with told_if_gone(self.path), opened(self.path) as file:
            for batch in file.iter_batches(rows, self.groups, names, use_threads=False):
                columns = [batch.column(each.name).cast(each.type) for each in schema]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)


@contextmanager
def opened(path: str, texts: Sequence[str] | None = None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; the columns `texts` come as dictionaries.

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
            f"The column {name} of the other files is missing in {path}",
            code="column-missing",
            column=name,
            path=path,
        ) from None
    with file:
        yield file


@contextmanager
def told_if_gone(path: str) -> Iterator[None]:
    """Say what a file means that was there when the plan was made.

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


def map_in_arrow(df: DataFrame, function: Work, schema: Any, rows: int) -> DataFrame:
    """As ``df.mapInArrow(function, schema)``, but a task reads columns of files itself.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    function : callable
        From an iterator of record batches to one.
    schema : pyspark.sql.types.StructType
        Of what it returns.
    rows : int
        Of a batch of files, but for the last; other batches are as long as Spark makes them.
    """
    tasks = _tasks_of_files(df)
    if tasks is None:
        return df.mapInArrow(silent_when_closed(function), schema)
    groups, columns_of_files = tasks

    def work(groups: list[RowGroups]) -> Iterator[pa.RecordBatch]:
        batches = (each.batches(columns_of_files, rows) for each in groups)
        return function(_of_length(rows, chain.from_iterable(batches)))

    return map_items(df.sparkSession, groups, work, schema)


def map_items(
    spark: SparkSession,
    items: Sequence[Any],
    function: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: Any,
) -> DataFrame:
    """The batches that a function makes of each item, in a task of Spark for each, in their order.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Not of Spark Connect.
    items : sequence
        Sent to each worker once, all of them.
    function : callable
        Called in a task with an item.
    schema : pyspark.sql.types.StructType or str
        Of what it returns.
    """
    shared = spark.sparkContext.broadcast(items)

    def work(places: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa.set_cpu_count(1)
        for place in (place for batch in places for place in batch.column(0).to_pylist()):
            yield from function(shared.value[place])

    places = spark.range(0, len(items), 1, len(items))
    return places.mapInArrow(silent_when_closed(work), schema)


def _of_length(rows: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of batches in batches of so many rows, but for the last one."""
    kept, count = [], 0
    for batch in batches:
        while count + batch.num_rows >= rows:
            kept.append(batch.slice(0, rows - count))
            batch = batch.slice(rows - count)
            yield _joined(kept)
            kept, count = [], 0
        if batch.num_rows:
            kept.append(batch)
            count += batch.num_rows
    if kept:
        yield _joined(kept)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _tasks_of_files(df: DataFrame) -> tuple[list[list[RowGroups]], pa.Schema] | None:
    """Return each task's part, and the columns as files name them; None if Spark has to read."""
    types = {each.name: _nullable(each.type) for each in arrow_schema(df.schema)}
    if not all(map(_is_common, types.values())):
        return None
    scan = scan_of(df)
    if scan is None or any("." in name for name in scan.columns.values()):
        return None
    columns = [(inside, types[name]) for name, inside in scan.columns.items()]
    accepts = partial(_is_read_alike, dict(columns), scan.old_dates)
    groups = row_groups_of(scan, df.sparkSession, accepts)
    return None if groups is None else (groups, pa.schema(columns))


def _is_common(kind: pa.DataType) -> bool:
    """Return True for types that Spark, Arrow and Parquet have in common."""
    if pa.types.is_date32(kind):
        return True
    while pa.types.is_list(kind):
        kind = kind.value_type
    return kind in _COMMON


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type whose lists may hold null, which Spark says of all that it reads."""
    return pa.list_(_nullable(kind.value_type)) if pa.types.is_list(kind) else kind


def _is_read_alike(types: dict[str, pa.DataType], old_dates: str, file: pq.ParquetFile) -> bool:
    """Return True if pyarrow reads what Spark would from a file."""
    days = [name for name, kind in types.items() if pa.types.is_date32(kind)]
    found = [(each.name, _nullable(each.type)) for each in file.schema_arrow]
    return has_days_of_today(file, days, old_dates) and has_columns(found, types)


# -- row groups ------------------------------------------------------------------------------------


def row_groups_of(
    scan: Scan, spark: SparkSession, accepts: Accepts
) -> list[list[RowGroups]] | None:
    """Return the row groups of each task of a scan; None if a file has to be read by Spark.

    Parameters
    ----------
    scan : Scan
    spark : pyspark.sql.SparkSession
    accepts : callable
        Called with each file, here or in a task of Spark.
    """
    from bigdl.orca.cluster.spark import is_local

    paths = list(dict.fromkeys(path for task in scan.tasks for path, _, _ in task))
    look = partial(_looked_into, accepts)
    parts = [paths[i : i + FILES_OF_TASK] for i in range(0, len(paths), FILES_OF_TASK)]
    # on a cluster its workers look, who have to open the files later
    if is_local(cast("str", spark.sparkContext.master)) and len(paths) <= FEW_FILES:
        found = [look(part) for part in parts]
    else:
        found = call_in_tasks(spark, look, parts)
    looked_into = [each for each in found if each is not None]
    if len(looked_into) < len(found):
        return None
    groups: dict[str, list[_Group]] = dict(zip(paths, chain(*looked_into), strict=True))
    tasks: list[list[RowGroups]] = []
    count = 0
    for task in scan.tasks:
        tasks.append([])
        for path, start, stop in task:
            mine = [i for i, (middle, _) in enumerate(groups[path]) if start <= middle < stop]
            count += len(mine)
            if mine:
                rows = sum(groups[path][i][1] for i in mine)
                tasks[-1].append(RowGroups(path, tuple(mine), rows))
    # a file that has changed since Spark listed it is none of ours
    return tasks if count == sum(map(len, groups.values())) else None


def call_in_tasks(
    spark: SparkSession, function: Callable[[Any], Any], items: Sequence[Any]
) -> list[Any]:
    """Return a function's result for each item, called in a task of Spark for each."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa.set_cpu_count(1)
        for batch in batches:
            for place in batch.column(0).to_pylist():
                result = pickle.dumps(function(items[place]))
                yield pa.record_batch({"place": [place], "result": [result]})

    if not items:
        return []
    tasks = spark.range(0, len(items), 1, len(items))
    done = to_arrow(tasks.mapInArrow(work, "place bigint, result binary"))
    return [pickle.loads(each.as_py()) for each in done.sort_by("place")["result"]]


_Group = tuple[int, int]
"""A row group: where its middle is in the file, and how many rows it has."""


def _looked_into(accepts: Accepts, paths: Sequence[str]) -> list[list[_Group]] | None:
    """Return the row groups of files, or None if one has to be read by Spark."""
    groups = []
    try:
        for path in paths:
            with opened(path, []) as file:
                if not accepts(file):
                    return None
                parts = map(file.metadata.row_group, range(file.num_row_groups))
                groups.append([(_middle(part), part.num_rows) for part in parts])
    except Exception:  # what pyarrow cannot open may be nothing special for Spark
        return None
    return groups


def _middle(group: Any) -> int:
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [
        column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        for column in columns
    ]
    return min(starts) + sum(column.total_compressed_size for column in columns) // 2


def has_columns(found: Sequence[tuple[str, Any]], wanted: Mapping[str, Any]) -> bool:
    """Return True if a file has the columns that are wanted, and Spark could mean no other ones.

    Parameters
    ----------
    found : sequence of (str, object)
        Name and type of each column of the file.
    wanted : dict of str to object
        Types of the columns that are read.
    """
    lowered = [name.lower() for name, _ in found]  # Spark takes a column of another case
    return all(each in found and lowered.count(each[0].lower()) == 1 for each in wanted.items())


def has_days_of_today(file: pq.ParquetFile, days: Sequence[str], old_dates: str) -> bool:
    """Return True if the dates in some columns count by today's calendar, as Spark tells it.

    Parameters
    ----------
    file : pyarrow.parquet.ParquetFile
    days : sequence of str
        Names of columns.
    old_dates : str
        See :class:`~bigdl.orca.cluster.scan.Scan`.
    """
    if not days:
        return True
    metadata = file.metadata.metadata or {}
    version = metadata.get(b"org.apache.spark.version")
    if version is None:
        is_late = old_dates == "EXCEPTION" and _are_late(file.metadata, days)
        return old_dates == "CORRECTED" or is_late
    is_old = int(version.split(b".")[0]) < 3
    return not is_old and b"org.apache.spark.legacyDateTime" not in metadata


def _are_late(file: pq.FileMetaData, days: Sequence[str]) -> bool:
    """Return True if the statistics show that no date is before both calendars are the same."""
    groups = map(file.row_group, range(file.num_row_groups))
    columns = (g.column(i) for g in groups if g.num_rows for i in range(g.num_columns))
    figures = (each.statistics for each in columns if each.path_in_schema in days)
    return all(
        each is not None
        and (each.min_raw >= _SAME_CALENDAR if each.has_min_max else not each.num_values)
        for each in figures
    )
