"""Detection of Spark query plans that only read columns of Parquet files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bigdl.orca.cluster.plan import is_switched_off

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Scan", "Split", "scan_of"]

logger = logging.getLogger("bigdl.orca")

_EXECUTION = "org.apache.spark.sql.execution."
_FORMAT = f"{_EXECUTION}datasources.parquet.ParquetFileFormat"
_INDEX = f"{_EXECUTION}datasources.InMemoryFileIndex"
_RDD = f"{_EXECUTION}datasources.FileScanRDD"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."

_OPTIONS = {"path", "paths"}  # other options may change the rows
_OFF = (  # these settings may change the rows, too
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.fieldId.read.enabled",
)
_ENCRYPTION = "parquet.crypto.factory.class"
_REBASE = "spark.sql.parquet.datetimeRebaseModeInRead"
MOST_PARTS = 4096  # maximum number of file parts; each takes a millisecond to query


Split = tuple[str, int, int]
"""Path and byte range; a task reads the row groups whose middle is in the range."""


@dataclass(frozen=True)
class Scan:
    """Columns and files that a query plan reads.

    Attributes
    ----------
    columns : dict of str to str
        Name in the files for each column of the DataFrame.
    tasks : list of list of Split
        Splits of each task, in the order of the rows.
    rebase_mode : str
        Spark's mode for ancient dates in files without calendar information: ``"CORRECTED"``
        reads them unchanged, ``"EXCEPTION"`` raises an error.
    """

    columns: dict[str, str]
    tasks: list[list[Split]]
    rebase_mode: str


def scan_of(df: DataFrame) -> Scan | None:
    """Return a DataFrame's scan, or None if its query plan does more or cannot be inspected."""
    if is_switched_off():
        return None
    try:
        return _scan_of(df)
    except Exception as error:  # an internal API
        logger.debug("Cannot tell whether the plan only reads Parquet files: %s", error)
        return None


def _scan_of(df: DataFrame) -> Scan | None:
    plan = df._jdf.queryExecution().sparkPlan()
    ids = [each.exprId().id() for each in _items(plan.output())]
    while _class(plan) == f"{_EXECUTION}ProjectExec":
        sources = dict(map(_source, _items(plan.projectList())))
        ids = [sources[id_] for id_ in ids]
        if None in ids:
            return None
        plan = plan.child()
    if _class(plan) != f"{_EXECUTION}FileSourceScanExec" or not _is_bare(plan, df.sparkSession):
        return None
    names = {each.exprId().id(): each.name() for each in _items(plan.output())}
    tasks = splits_of_tasks(plan.inputRDDs().head())
    if not ids or not tasks:
        return None
    columns = {name: names[id_] for name, id_ in zip(df.columns, ids, strict=True)}
    rebase_mode = cast("str", df.sparkSession.conf.get(_REBASE))
    return Scan(columns, tasks, rebase_mode) if len(columns) == len(ids) else None


def _source(column: Any) -> tuple[int, int | None]:
    """Return the ids of a projected column and of the column that it renames, if any."""
    id_, source = column.exprId().id(), column
    if _class(column) == f"{_EXPRESSIONS}Alias":
        source = column.child()
    is_column = _class(source) == f"{_EXPRESSIONS}AttributeReference"
    return id_, source.exprId().id() if is_column else None


def _is_bare(scan: Any, spark: Any) -> bool:
    """Return True if a scan returns all rows of plain Parquet files unchanged."""
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


def splits_of_tasks(rdd: Any) -> list[list[Split]] | None:
    if _class(rdd) != _RDD:
        return None
    parts = [each.files() for each in _items(rdd.filePartitions())]
    if sum(map(len, parts)) > MOST_PARTS:
        return None
    return [
        [(f.filePath().toPath().toString(), f.start(), f.start() + f.length()) for f in files]
        for files in parts
    ]


def _class(java: Any) -> str:
    return java.getClass().getName()


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(i) for i in range(sequence.size()))
