"""Information about the active Spark application, and small helpers of BigDL 2.x."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, cast

from bigdl.common.dropped import refuse_name
from bigdl.common.errors import require
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SQLContext

__all__ = [
    "create_spark_conf",
    "get_dtype",
    "get_node_and_core_number",
    "get_spark_context",
    "get_spark_sql_context",
    "init_engine",
    "redire_spark_logs",
    "show_bigdl_info_logs",
    "to_list",
]

_OF_THE_JVM = (
    *("EvaluatedResult", "JActivity", "JTensor", "JavaCreator", "JavaValue", "RNG", "Sample"),
    *("callBigDlFunc", "callJavaFunc", "get_bigdl_conf", "to_sample_rdd"),
)


def get_node_and_core_number() -> tuple[int, int]:
    """Return the number of nodes of the Spark cluster, and the task cores per node.

    Raises
    ------
    UsageError
        If there is no active SparkContext.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import get_node_and_core_number
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> get_node_and_core_number()
    (1, 2)
    """
    from bigdl.orca.cluster.spark import SparkCluster

    cluster = SparkCluster.from_active()
    return cluster.nodes, cluster.cores_per_node


def get_spark_context(conf: SparkConf | None = None) -> SparkContext:
    """Return the active SparkContext, or a new one with the properties of `conf`.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import get_spark_context
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> get_spark_context() is sc
    True
    """
    from bigdl.orca.cluster.spark import active_context

    active = active_context()
    if active is not None:
        return active
    from bigdl.orca.context import init_orca_context

    properties = {} if conf is None else dict(conf.getAll())
    return cast("SparkContext", init_orca_context("local", conf=properties))


def get_spark_sql_context(sc: SparkContext | None = None) -> SQLContext:
    """Return a legacy SQLContext of the active SparkContext.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import get_spark_sql_context
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> get_spark_sql_context(sc).range(3).count()
    3
    """
    return OrcaContext.get_sql_context()


def create_spark_conf() -> SparkConf:
    """Return an empty SparkConf, since BigDL needs no Spark properties.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import create_spark_conf
    >>> create_spark_conf().set("spark.app.name", "ratings").get("spark.app.name")
    'ratings'
    """
    return require("pyspark", "orca").SparkConf()


def init_engine(bigdl_type: str = "float") -> None:
    """Do nothing, since there is no JVM engine.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import init_engine
    >>> init_engine()  # for programs of BigDL 2.x
    """


def redire_spark_logs(bigdl_type: str = "float", log_path: str | None = None) -> None:
    """Do nothing, since Spark's log is never redirected to a file.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import redire_spark_logs
    >>> redire_spark_logs()  # for programs of BigDL 2.x
    """


def show_bigdl_info_logs(bigdl_type: str = "float") -> None:
    """Do nothing, since BigDL logs to the logger ``bigdl`` of this process.

    Examples
    --------
    >>> import logging
    >>> from bigdl.dllib.utils.common import show_bigdl_info_logs
    >>> show_bigdl_info_logs()  # for programs of BigDL 2.x
    >>> logger = logging.getLogger("bigdl")  # set the level of this logger instead
    """


def get_dtype(bigdl_type: str) -> str:
    """Return the NumPy dtype name of BigDL 2.x's type ``"float"`` or ``"double"``.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import get_dtype
    >>> get_dtype("double")
    'float64'
    """
    return "float32" if bigdl_type == "float" else "float64"


def to_list(a: object) -> list:
    """Return `a` if it is a list, else a one-element list that contains `a`.

    Examples
    --------
    >>> from bigdl.dllib.utils.common import to_list
    >>> to_list(3), to_list([3])
    ([3], [3])
    """
    return a if isinstance(a, list) else [a]


def __getattr__(name: str) -> NoReturn:
    if name in _OF_THE_JVM:
        why = "it belongs to the layers that ran in the JVM; use NumPy arrays, and torch or Keras"
        refuse_name(__name__, name, why)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
