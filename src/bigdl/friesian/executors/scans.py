"""Rows of a DataFrame as batches for a function, in tasks of Spark.

Columns of Parquet files went through vectors and rows of Java before Arrow had them, texts as
strings of their own.  Of ten million rows with 26 columns of text that was most of the time that
learning and transforming took.  Where a DataFrame is nothing but columns of files, its tasks read
them by pyarrow instead: the same rows in the same partitions, and texts stay dictionaries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.friesian.executors.arrow import InProcessHost, Piece, SparkTasks, opened
from bigdl.friesian.ops import kinds
from bigdl.friesian.ops.batches import Batch, batch_of
from bigdl.friesian.ops.kinds import Field
from bigdl.friesian.ops.spark import shared
from bigdl.orca.cluster.spark_calls import silent_when_closed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger("bigdl.friesian")

_ROWS, _BYTES = 1 << 18, 1 << 28  # from which batches are enough to be worked on together
_MOST_BYTES = 1 << 29  # of the columns of a row group, which are in memory together
_FEW_FILES = 32  # that the driver looks into itself
_OF_TASK = 16  # files that a task looks into
_SAME_CALENDAR = -141427  # 1582-10-15 in days since 1970

Work = Callable[[Batch], "Iterator[pa.RecordBatch]"]


def map_batches(df: DataFrame, function: Work, schema: Any) -> DataFrame:
    """The batches that a function makes of those of a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
    function : callable
        Called in tasks with a :class:`Batch`, returns record batches.
    schema : pyspark.sql.types.StructType or str
        Of what it returns.
    """
    batches = from_files(df, function, schema)
    return from_rows(df, function, schema) if batches is None else batches


def from_rows(df: DataFrame, function: Work, schema: Any) -> DataFrame:
    """As :func:`map_batches`, from rows of Spark."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in _gathered(batches):
            yield from function(batch_of({name: table[name] for name in table.column_names}))

    return df.mapInArrow(silent_when_closed(work), schema)


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches together, so that a value that occurs in several is looked at once."""
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        kept.append(batch)
        if sum(each.num_rows for each in kept) >= _ROWS or sum(b.nbytes for b in kept) >= _BYTES:
            yield pa.Table.from_batches(kept)
            kept = []
    if kept:
        yield pa.Table.from_batches(kept)


# -- files -----------------------------------------------------------------------------------------


def from_files(df: DataFrame, function: Work, schema: Any) -> DataFrame | None:
    """As :func:`map_batches`, from Parquet files without rows of Spark.

    Partitions and the order of rows are those of Spark's scan.  The files are looked into now, and
    read when the result is computed.

    Returns
    -------
    pyspark.sql.DataFrame or None
        None if the DataFrame is not just columns of files, or pyarrow would not read all of them
        from everywhere with the values and the types of Spark.
    """
    types = {each.name: each.dataType.simpleString() for each in df.schema}
    if not set(kinds.PLAIN) >= set(types.values()):
        return None
    scan = scan_of(df)
    if scan is None:
        return None
    fields = {inside: Field(types[name]) for name, inside in scan.columns.items()}
    pieces = _pieces(scan, fields, df.sparkSession)
    if pieces is None:
        return None
    tasks = shared(pieces, df.sparkSession)
    columns = scan.columns

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pa.set_cpu_count(1)
        places = (place for batch in batches for place in batch.column(0).to_pylist())
        for piece in (piece for place in places for piece in tasks.value[place]):
            try:
                for batch in piece.batches():
                    named = {name: partial(batch.__getitem__, columns[name]) for name in columns}
                    yield from function(Batch(named, batch.rows))
            except FileNotFoundError:
                message = f"The file {piece.path} is no longer there; read the table again"
                raise UsageError(message) from None

    count = len(pieces)
    numbers = df.sparkSession.range(0, count, 1, count)
    return numbers.mapInArrow(silent_when_closed(work), schema)


def _pieces(scan: Scan, fields: dict[str, Field], spark: SparkSession) -> list[list[Piece]] | None:
    """The row groups of each task; None if a file has to be read by Spark."""
    from bigdl.orca.cluster.spark import is_local

    paths = list(dict.fromkeys(path for task in scan.tasks for path, _, _ in task))
    look = partial(_row_groups, {n: f.kind for n, f in fields.items()}, scan.old_dates)
    # on a cluster its workers look, who have to open the files later
    is_here = is_local(cast("str", spark.sparkContext.master)) and len(paths) <= _FEW_FILES
    host = InProcessHost() if is_here else SparkTasks(spark)
    groups_of_paths = host.run(
        look, [paths[i : i + _OF_TASK] for i in range(0, len(paths), _OF_TASK)]
    )
    if None in groups_of_paths:
        return None
    groups: dict[str, list[Group]] = dict(zip(paths, chain(*groups_of_paths), strict=True))
    pieces: list[list[Piece]] = []
    count = 0
    for place, task in enumerate(scan.tasks):
        pieces.append([])
        for path, start, stop in task:
            mine = [i for i, (middle, _) in enumerate(groups[path]) if start <= middle < stop]
            count += len(mine)
            if mine:
                rows = sum(groups[path][i][1] for i in mine)
                pieces[-1].append(Piece(place, fields, path, tuple(mine), rows, {}))
    # a file that has changed since Spark listed it is none of ours
    return pieces if count == sum(map(len, groups.values())) else None


Group = tuple[int, int]
"""A row group: where its middle is in the file, and how many rows it has."""


def _row_groups(
    columns: dict[str, str], old_dates: str, paths: Sequence[str]
) -> list[list[Group]] | None:
    """Return the row groups of files, or None if one has to be read by Spark.

    Parameters
    ----------
    columns : dict of str to str
        Kinds of the columns that are needed, by their names in the files.
    old_dates : str
        See :class:`Scan`.
    paths : list of str
    """
    groups = []
    try:
        for path in paths:
            with opened(path, []) as file:
                parts = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                days = [name for name, kind in columns.items() if kind == "date"]
                has_dates_of_today = not days or _is_of_today(file.metadata, days, old_dates)
                is_large = any(_size(part, columns) > _MOST_BYTES for part in parts)
                if not has_dates_of_today or is_large or not _has_columns(file, columns):
                    return None
                groups.append([(_middle(part), part.num_rows) for part in parts])
    except Exception:  # what pyarrow cannot open may be nothing special for Spark
        return None
    return groups


def _has_columns(file: pq.ParquetFile, columns: dict[str, str]) -> bool:
    known = [(each.name, kinds.of_arrow(each.type)) for each in file.schema_arrow]
    lowered = [name.lower() for name, _ in known]  # Spark takes a column of another case
    return all(each in known and lowered.count(each[0].lower()) == 1 for each in columns.items())


def _is_of_today(file: pq.FileMetaData, days: Sequence[str], old_dates: str) -> bool:
    """Return True if the dates in some columns count by today's calendar, as Spark tells it."""
    metadata = file.metadata or {}
    version = metadata.get(b"org.apache.spark.version")
    if version is None:
        return old_dates == "CORRECTED" or (old_dates == "EXCEPTION" and _are_late(file, days))
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


def _size(group: Any, columns: dict[str, str]) -> int:
    parts = map(group.column, range(group.num_columns))
    texts = (each for each in parts if columns.get(each.path_in_schema) == "string")
    rows = group.num_rows * sum(map(_width, columns.values()))
    return rows + sum(each.total_uncompressed_size for each in texts)


def _width(kind: str) -> int:
    """Bytes of a value; that of a text is its code."""
    return 4 if kind == "string" else -(-kinds.to_arrow(kind).bit_width // 8)


def _middle(group: Any) -> int:
    columns = [group.column(i) for i in range(group.num_columns)]
    starts = [
        column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        for column in columns
    ]
    return min(starts) + sum(column.total_compressed_size for column in columns) // 2


# -- plans of Spark that do nothing but read files -------------------------------------------------

_EXECUTION = "org.apache.spark.sql.execution."
_FORMAT = f"{_EXECUTION}datasources.parquet.ParquetFileFormat"
_INDEX = f"{_EXECUTION}datasources.InMemoryFileIndex"
_RDD = f"{_EXECUTION}datasources.FileScanRDD"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."

_OPTIONS = {"path", "paths"}  # others may change what is read
_OFF = (  # they too, if they are on
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.fieldId.read.enabled",
)
_ENCRYPTION = "parquet.crypto.factory.class"
_REBASE = "spark.sql.parquet.datetimeRebaseModeInRead"
_MOST_PARTS = 4096  # parts of files, of which each takes a millisecond to ask for


Split = tuple[str, int, int]
"""Path, start and stop of bytes; row groups whose middle is among them are read together."""


@dataclass(frozen=True)
class Scan:
    """Columns and files that a plan reads.

    Attributes
    ----------
    columns : dict of str to str
        For each column of the DataFrame its name in the files.
    tasks : list of list of Split
        In the order of the rows.
    old_dates : str
        What Spark does with dates of long ago in files that do not say which calendar is theirs:
        ``"CORRECTED"`` takes them as they stand, ``"EXCEPTION"`` refuses them.
    """

    columns: dict[str, str]
    tasks: list[list[Split]]
    old_dates: str


def scan_of(df: DataFrame) -> Scan | None:
    """Return the scan of a DataFrame, or None if it does anything else or that cannot be told."""
    from bigdl.orca.cluster.plan import is_switched_off

    if is_switched_off():
        return None
    try:
        return _scan_of(df)
    except Exception as error:  # an internal API
        logger.debug("Cannot tell whether the plan only reads Parquet files: %s", error)
        return None


def _scan_of(df: DataFrame) -> Scan | None:
    plan = df._jdf.queryExecution().sparkPlan()
    places = [each.exprId().id() for each in _items(plan.output())]
    while _class(plan) == f"{_EXECUTION}ProjectExec":
        sources = dict(map(_source, _items(plan.projectList())))
        places = [sources[place] for place in places]
        if None in places:
            return None
        plan = plan.child()
    if _class(plan) != f"{_EXECUTION}FileSourceScanExec" or not _is_bare(plan, df.sparkSession):
        return None
    names = {each.exprId().id(): each.name() for each in _items(plan.output())}
    tasks = _tasks(plan.inputRDDs().head())
    if not places or not tasks:
        return None
    columns = {name: names[place] for name, place in zip(df.columns, places, strict=True)}
    old_dates = cast("str", df.sparkSession.conf.get(_REBASE))
    return Scan(columns, tasks, old_dates) if len(columns) == len(places) else None


def _source(column: Any) -> tuple[int, int | None]:
    """Of a projected column its number, and that of the column that it is the same as, if any."""
    place, source = column.exprId().id(), column
    if _class(column) == f"{_EXPRESSIONS}Alias":
        source = column.child()
    is_column = _class(source) == f"{_EXPRESSIONS}AttributeReference"
    return place, source.exprId().id() if is_column else None


def _is_bare(scan: Any, spark: Any) -> bool:
    """Return True if a scan gives all rows of plain Parquet files as they are."""
    relation = scan.relation()
    options = {each for each in relation.options().keySet().mkString("\n").split("\n") if each}
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    return (
        _class(relation.fileFormat()) == _FORMAT
        and _class(relation.location()) == _INDEX
        and relation.partitionSchema().isEmpty()
        and relation.bucketSpec().isEmpty()
        and scan.partitionFilters().isEmpty()
        and scan.dataFilters().isEmpty()
        and scan.fileConstantMetadataColumns().isEmpty()
        and options <= _OPTIONS
        and not any(spark.conf.get(name).lower() == "true" for name in _OFF)
        and hadoop.get(_ENCRYPTION) is None
    )


def _tasks(rdd: Any) -> list[list[Split]] | None:
    if _class(rdd) != _RDD:
        return None
    parts = [each.files() for each in _items(rdd.filePartitions())]
    if sum(map(len, parts)) > _MOST_PARTS:
        return None
    return [
        [(f.filePath().toPath().toString(), f.start(), f.start() + f.length()) for f in files]
        for files in parts
    ]


def _class(java: Any) -> str:
    return java.getClass().getName()


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(i) for i in range(sequence.size()))
