"""Detection of Spark query plans that read, cast and filter columns of Parquet files."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bigdl.data.lake_tables.expressions import Both, Expression, InputColumn, input_names
from bigdl.orca.cluster.plan import is_switched_off
from bigdl.orca.cluster.spark_expressions import UnknownExpression, class_of, items_of, translate
from bigdl.orca.cluster.versions import arrow_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

__all__ = ["Scan", "Split", "scan_of"]

logger = logging.getLogger("bigdl.orca")

_EXECUTION = "org.apache.spark.sql.execution."
_FORMAT = f"{_EXECUTION}datasources.parquet.ParquetFileFormat"
_INDEX = f"{_EXECUTION}datasources.InMemoryFileIndex"
_RDD = f"{_EXECUTION}datasources.FileScanRDD"

_OPTIONS = {"path", "paths"}  # other options may change the rows
_OFF = (  # these settings may change the rows, too
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.int96TimestampConversion",
    "spark.sql.parquet.fieldId.read.enabled",
)
_ENCRYPTION = "parquet.crypto.factory.class"
_REBASE = "spark.sql.parquet.datetimeRebaseModeInRead"
MOST_PARTS = 4096  # maximum number of file parts; each takes a millisecond to query


Split = tuple[str, int, int]
"""Path and byte range; a task reads the row groups whose middle is in the range."""


@dataclass(frozen=True)
class Scan:
    """Files that a query plan reads, and the columns that it computes from theirs.

    Attributes
    ----------
    columns : dict of str to Expression
        The DataFrame's columns, computed from the inputs.
    inputs : dict of str to DataType
        Spark types of the required columns of the files, by name; those of the condition are first.
    condition : Expression or None
        Condition for rows of the files, if they are filtered.
    tasks : list of list of Split
        Splits of each task, in the order of the rows.
    rebase_mode : str
        Spark's mode for ancient dates and times in files without calendar information:
        ``"CORRECTED"`` reads them unchanged, ``"EXCEPTION"`` raises an error.
    """

    columns: dict[str, Expression]
    inputs: dict[str, DataType]
    condition: Expression | None
    tasks: list[list[Split]]
    rebase_mode: str

    @property
    def names_in_files(self) -> dict[str, str] | None:
        """Name in the files of each column, or None if the plan does more than select columns."""
        if self.condition is not None:
            return None
        columns = {
            n: each.name for n, each in self.columns.items() if isinstance(each, InputColumn)
        }
        return columns if len(columns) == len(self.columns) else None


def scan_of(df: DataFrame) -> Scan | None:
    """Return a DataFrame's scan, or None if its query plan does more or cannot be inspected.

    Recognized are plans that select, rename, cast and filter columns of Parquet files, with
    expressions that :mod:`bigdl.data.lake_tables.expressions` evaluates like Spark.
    """
    if is_switched_off():
        return None
    try:
        return _scan_of(df)
    except UnknownExpression as error:
        logger.debug("Spark reads the files, because of %s", error)
    except Exception as error:  # an internal API
        logger.debug("Cannot tell whether the plan only reads Parquet files: %s", error)
    return None


def _scan_of(df: DataFrame) -> Scan | None:
    from pyspark.sql.types import StructType

    plan = df._jdf.queryExecution().sparkPlan()
    ids = [each.exprId().id() for each in items_of(plan.output())]
    steps = []
    while class_of(plan) in (f"{_EXECUTION}ProjectExec", f"{_EXECUTION}FilterExec"):
        steps.append(plan)
        plan = plan.child()
    if class_of(plan) != f"{_EXECUTION}FileSourceScanExec" or not _is_bare(plan, df.sparkSession):
        return None
    types = {f.name: f.dataType for f in StructType.fromJson(json.loads(plan.schema().json()))}
    columns: dict[int, Expression] = {
        each.exprId().id(): InputColumn(name, arrow_type(type_))
        for each, (name, type_) in zip(items_of(plan.output()), types.items(), strict=True)
        if _is_convertible(type_)
    }
    condition: Expression | None = None
    for step in reversed(steps):
        if class_of(step) == f"{_EXECUTION}FilterExec":
            # an error of a row that another condition excludes would not occur in Spark
            added = translate(step.condition(), columns)
            if any(each.can_fail for each in added.nodes()):
                raise UnknownExpression(f"{step.condition().toString()}, which may raise an error")
            if not input_names(added):
                raise UnknownExpression(step.condition().toString())
            condition = added if condition is None else Both(condition, added)
        else:
            projected = list(items_of(step.projectList()))
            columns = {each.exprId().id(): translate(each, columns) for each in projected}
    outputs = {name: columns[id_] for name, id_ in zip(df.columns, ids, strict=True)}
    tasks = splits_of_tasks(plan.inputRDDs().head())
    if not ids or not tasks or len(outputs) < len(ids):
        return None
    names = input_names(*([] if condition is None else [condition]), *outputs.values())
    if not names:
        return None
    rebase_mode = cast("str", df.sparkSession.conf.get(_REBASE))
    return Scan(outputs, {name: types[name] for name in names}, condition, tasks, rebase_mode)


def _is_convertible(type_: DataType) -> bool:
    try:
        arrow_type(type_)
    except Exception:  # of PySpark, for types that Arrow lacks
        return False
    return True


def _is_bare(scan: Any, spark: Any) -> bool:
    """Return True if a scan reads all rows of plain Parquet files unchanged.

    Filters of a scan only skip row groups without matching rows, and are evaluated again above it.
    """
    relation = scan.relation()
    options = {each for each in relation.options().keySet().mkString("\n").split("\n") if each}
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    return (
        class_of(relation.fileFormat()) == _FORMAT
        and class_of(relation.location()) == _INDEX
        and relation.partitionSchema().isEmpty()
        and relation.bucketSpec().isEmpty()
        and scan.partitionFilters().isEmpty()
        and scan.fileConstantMetadataColumns().isEmpty()
        and options <= _OPTIONS
        and not any(spark.conf.get(name).lower() == "true" for name in _OFF)
        and hadoop.get(_ENCRYPTION) is None
    )


def splits_of_tasks(rdd: Any) -> list[list[Split]] | None:  # rdd: a Java object
    if class_of(rdd) != _RDD:
        return None
    parts = [each.files() for each in items_of(rdd.filePartitions())]
    if sum(map(len, parts)) > MOST_PARTS:
        return None
    return [
        [(f.filePath().toPath().toString(), f.start(), f.start() + f.length()) for f in files]
        for files in parts
    ]
