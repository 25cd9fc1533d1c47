"""Process-wide settings of Orca, and access to the active contexts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.arguments import check_flag, check_name
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.ray import OrcaRayContext
from bigdl.orca.cluster.spark import SparkCluster

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession, SQLContext


def _check_read_backend(name: str, value: object) -> str:
    return check_name(name, value, ("spark", "pandas"))


def _check_data_store(name: str, value: object) -> str:
    store = value.upper() if isinstance(value, str) else ""
    if not re.fullmatch(r"DRAM|PMEM|DISK_[1-9][0-9]*", store):
        raise UsageError(
            f'{name} must be "DRAM", "PMEM" or "DISK_n" with an integer n, but got {value!r}',
            code="argument-value",
            argument=name,
        )
    return store


def _check_shard_size(name: str, value: object) -> int | None:
    return None if value is None else check_positive(f"{name}, if it is not None,", value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "log_output": check_flag,
    "pandas_read_backend": _check_read_backend,
    "serialize_data_creator": check_flag,
    "train_data_store": _check_data_store,
    "barrier_mode": check_flag,
    "_eager_mode": check_flag,
    "_shard_size": _check_shard_size,
}


class _Checked(type):
    """Metaclass that validates class attributes when they are set."""

    def __setattr__(cls, name: str, value: object) -> None:
        check = _CHECKS.get(name)
        super().__setattr__(name, check(f"OrcaContext.{name}", value) if check else value)


class OrcaContext(metaclass=_Checked):
    """Settings of Orca for this process, as class attributes, and the active contexts.

    Attributes
    ----------
    log_output : bool, default False
        Print the output of Spark's JVM to ``sys.stdout`` and ``sys.stderr`` of this process, such
        as in a notebook.  Set it before the context is created.
    pandas_read_backend : {"spark", "pandas"}, default "spark"
        Engine behind ``bigdl.orca.data.pandas.read_*``.
    serialize_data_creator : bool, default False
        Whether the workers of a node call a data creator one after the other. Set it if the
        function downloads data, so that only the first worker does.
    train_data_store : {"DRAM", "PMEM", "DISK_n"}, default "DRAM"
        Where training data is cached; ``DISK_n`` keeps 1/n of it in memory.
    barrier_mode : bool, default True
        Whether Ray is launched on Spark by a barrier job.
    _eager_mode : bool, default True
        Whether XShards are computed and cached when they are created.
    _shard_size : int, optional
        Rows in a shard when a Spark data frame becomes XShards; None is one shard per partition.

    Raises
    ------
    UsageError
        If an attribute is set to an invalid value.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> spark = OrcaContext.get_spark_session()
    >>> spark.range(3).count()
    3
    >>> OrcaContext.pandas_read_backend = "pandas"  # for readers of bigdl.orca.data.pandas
    >>> OrcaContext.pandas_read_backend = "spark"  # the default
    """

    log_output = False
    pandas_read_backend = "spark"
    serialize_data_creator = False
    train_data_store = "DRAM"
    barrier_mode = True
    _eager_mode = True
    _shard_size: int | None = None

    @staticmethod
    def get_spark_context() -> SparkContext:
        """Return the active SparkContext.

        Raises
        ------
        UsageError
            If no SparkContext is active.
        """
        return SparkCluster.from_active().sc

    @staticmethod
    def get_spark_session() -> SparkSession:
        """Return the active Spark Connect session, or the session of the SparkContext.

        Raises
        ------
        UsageError
            If no context and no session is active.
        """
        return active_spark().spark

    @staticmethod
    def get_sql_context() -> SQLContext:
        """Return Spark's older SQLContext on the active SparkContext.

        Raises
        ------
        UsageError
            If there is no active SparkContext.
        """
        from pyspark.sql import SQLContext

        sc = OrcaContext.get_spark_context()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return SQLContext.getOrCreate(sc)

    @staticmethod
    def get_ray_context() -> OrcaRayContext:
        """Return the Ray context; start Ray on the nodes of the active SparkContext if needed.

        Raises
        ------
        UsageError
            If there is neither an active SparkContext nor a Ray that Orca started.
        MissingExtraError
            If Ray is not installed.
        """
        return OrcaRayContext.of_program()
