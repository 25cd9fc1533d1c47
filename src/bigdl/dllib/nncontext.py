"""Functions of BigDL 2.x that start and stop Spark.

All of them call :func:`bigdl.orca.init_orca_context`; use that in new programs.
"""

# mypy: disable-error-code="empty-body"
# the decorator ``_starting`` calls init_orca_context with the arguments of a signature

from __future__ import annotations

import functools
import inspect
import logging
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError
from bigdl.orca.arguments import check_conf
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.cluster.spark import NEEDS_CONTEXT
from bigdl.orca.cluster.versions import require_pyspark
from bigdl.orca.context import (
    OrcaContext,
    init_orca_context,
    init_spark_with,
    stop_launched_cluster,
    stop_orca_context,
)

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext

# BigDL 2.x's programs also get `tempfile` from here, by a star import.
__all__ = [
    "ZooContext",
    "getOrCreateSparkContext",
    "get_optimizer_version",
    "init_nncontext",
    "init_spark_conf",
    "init_spark_on_k8s",
    "init_spark_on_k8s_cluster",
    "init_spark_on_local",
    "init_spark_on_yarn",
    "init_spark_on_yarn_cluster",
    "init_spark_standalone",
    "set_optimizer_version",
    "stop_orca_context",
    "stop_spark_standalone",
    "tempfile",
]

logger = logging.getLogger("bigdl.orca")

ZooContext = OrcaContext
P = ParamSpec("P")

_optimizer_version = "optimizerV1"


def init_nncontext(
    conf: SparkConf | Mapping[str, Any] | str | None = None,
    cluster_mode: str = "spark-submit",
    spark_log_level: str = "WARN",
    redirect_spark_log: bool = True,
    **kwargs: Any,
) -> SparkContext:
    """Start Spark, or use the active SparkContext.

    Parameters
    ----------
    conf : SparkConf, dict or str, optional
        Spark properties, or only the name of the application.
    cluster_mode : str, default "spark-submit"
        See :func:`bigdl.orca.init_orca_context`.  In the default mode, without a ``spark-submit``
        command, the master is that of `conf`, or this machine.
    spark_log_level : str, default "WARN"
    redirect_spark_log : bool
        Accepted without effect.
    **kwargs
        Further arguments of ``init_orca_context``; ``num_executors``, ``executor_cores`` and
        ``executor_memory`` are aliases of ``num_nodes``, ``cores`` and ``memory``.

    Returns
    -------
    pyspark.SparkContext

    Examples
    --------
    >>> from bigdl.dllib.nncontext import init_nncontext
    >>> sc = init_nncontext("my application", cluster_mode="local", cores=2)
    >>> sc.parallelize([1, 2, 3]).sum()
    6
    """
    properties = _properties(conf)
    if str(cluster_mode).lower() in ("spark-submit", "bigdl-submit") and properties:
        return init_spark_with(
            properties, spark_log_level=spark_log_level, redirect_spark_log=redirect_spark_log
        )
    return _start(
        cluster_mode,
        conf=properties,
        spark_log_level=spark_log_level,
        redirect_spark_log=redirect_spark_log,
        **kwargs,
    )


def _starting(
    cluster_mode: str,
) -> Callable[[Callable[P, SparkContext]], Callable[P, SparkContext]]:
    """Return a decorator that replaces a function by one that starts Spark in `cluster_mode`."""

    def decorate(declared: Callable[P, SparkContext]) -> Callable[P, SparkContext]:
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        def start(*args: P.args, **kwargs: P.kwargs) -> SparkContext:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            return _start(cluster_mode, **arguments.arguments)

        return start

    return decorate


def _with_driver_on_cluster(
    function: Callable[P, SparkContext], cluster_mode: str
) -> Callable[P, SparkContext]:
    """Return a variant of a function that runs the driver on the cluster as well."""
    start = _starting(cluster_mode)(function)
    start.__name__ = start.__qualname__ = f"{function.__name__}_cluster"
    start.__doc__ = f"""Call :func:`{function.__name__}` and run the driver on the cluster.

    See :func:`bigdl.orca.init_orca_context` with ``cluster_mode="{cluster_mode}"``.

    Examples
    --------
    The arguments are those of :func:`{function.__name__}`:

    >>> import inspect
    >>> from bigdl.dllib import nncontext
    >>> client = inspect.signature(nncontext.{function.__name__})
    >>> inspect.signature(nncontext.{function.__name__}_cluster) == client
    True
    """
    return start


@_starting("local")
def init_spark_on_local(
    cores: int | str = 2,
    conf: Mapping[str, str] | None = None,
    python_location: str | None = None,
    spark_log_level: str = "WARN",
    redirect_spark_log: bool = True,
) -> SparkContext:
    """Start Spark on this machine; see :func:`bigdl.orca.init_orca_context`.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import init_spark_on_local
    >>> sc = init_spark_on_local(cores=2)
    >>> sc.parallelize(range(10)).filter(lambda number: number % 2 == 0).collect()
    [0, 2, 4, 6, 8]
    """


@_starting("yarn-client")
def init_spark_on_yarn(
    hadoop_conf: str | None,
    conda_name: str | None,
    num_executors: int,
    executor_cores: int,
    executor_memory: str = "2g",
    driver_cores: int = 4,
    driver_memory: str = "2g",
    extra_executor_memory_for_ray: str | None = None,
    extra_python_lib: str | None = None,
    penv_archive: str | None = None,
    additional_archive: str | None = None,
    hadoop_user_name: str | None = None,
    spark_yarn_archive: str | None = None,
    spark_log_level: str = "WARN",
    redirect_spark_log: bool = True,
    jars: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkContext:
    """Start Spark on YARN with this process as the driver.

    See :func:`bigdl.orca.init_orca_context` with ``cluster_mode="yarn-client"``.

    Examples
    --------
    If Spark is already running, e.g. in a test, it is used:

    >>> import os
    >>> from bigdl.dllib.nncontext import init_spark_on_local, init_spark_on_yarn
    >>> os.mkdir("hadoop-conf")
    >>> sc = init_spark_on_local(cores=2)
    >>> init_spark_on_yarn(
    ...     hadoop_conf="hadoop-conf", conda_name=None, num_executors=4, executor_cores=8
    ... ) is sc
    True
    """


init_spark_on_yarn_cluster = _with_driver_on_cluster(init_spark_on_yarn, "yarn-cluster")


@_starting("standalone")
def init_spark_standalone(
    num_executors: int,
    executor_cores: int,
    executor_memory: str = "2g",
    driver_cores: int = 4,
    driver_memory: str = "2g",
    master: str | None = None,
    extra_executor_memory_for_ray: str | None = None,
    extra_python_lib: str | None = None,
    spark_log_level: str = "WARN",
    redirect_spark_log: bool = True,
    conf: Mapping[str, str] | None = None,
    jars: str | None = None,
    python_location: str | None = None,
    enable_numa_binding: bool = False,
) -> SparkContext:
    """Connect to a standalone cluster, or start one on this machine.

    See :func:`bigdl.orca.init_orca_context` with ``cluster_mode="standalone"``.

    Examples
    --------
    If Spark is already running, e.g. in a test, it is used:

    >>> from bigdl.dllib.nncontext import init_spark_on_local, init_spark_standalone
    >>> sc = init_spark_on_local(cores=2)
    >>> init_spark_standalone(num_executors=2, executor_cores=8, master="spark://host:7077") is sc
    True
    """


def stop_spark_standalone() -> None:
    """Stop the standalone cluster that this process started, and the cluster's SparkContext.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import init_spark_on_local, stop_spark_standalone
    >>> sc = init_spark_on_local(cores=2)
    >>> stop_spark_standalone()  # no effect, since this process started no standalone cluster
    >>> sc.parallelize([1, 2, 3]).count()
    3
    """
    stop_launched_cluster()


@_starting("k8s-client")
def init_spark_on_k8s(
    master: str,
    container_image: str,
    num_executors: int,
    executor_cores: int,
    executor_memory: str = "2g",
    driver_memory: str = "2g",
    driver_cores: int = 4,
    extra_executor_memory_for_ray: str | None = None,
    extra_python_lib: str | None = None,
    penv_archive: str | None = None,
    spark_log_level: str = "WARN",
    redirect_spark_log: bool = True,
    jars: str | None = None,
    conf: Mapping[str, str] | None = None,
    python_location: str | None = None,
) -> SparkContext:
    """Start Spark on Kubernetes with this process as the driver.

    See :func:`bigdl.orca.init_orca_context` with ``cluster_mode="k8s-client"``.

    Examples
    --------
    If Spark is already running, e.g. in a test, it is used:

    >>> from bigdl.dllib.nncontext import init_spark_on_k8s, init_spark_on_local
    >>> sc = init_spark_on_local(cores=2)
    >>> init_spark_on_k8s(
    ...     master="k8s://https://host:6443", container_image="team/bigdl:3.0",
    ...     num_executors=4, executor_cores=8,
    ... ) is sc
    True
    """


init_spark_on_k8s_cluster = _with_driver_on_cluster(init_spark_on_k8s, "k8s-cluster")


def init_spark_conf(conf: Mapping[str, Any] | None = None) -> SparkConf:
    """Return a SparkConf with `conf` in addition to Spark's default properties.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import init_spark_conf
    >>> conf = init_spark_conf({"spark.sql.shuffle.partitions": 8})
    >>> conf.get("spark.sql.shuffle.partitions")
    '8'
    """
    require_pyspark()
    from pyspark import SparkConf

    return SparkConf().setAll(list(check_conf(conf).items()))


def getOrCreateSparkContext(
    conf: SparkConf | Mapping[str, Any] | None = None, appName: str | None = None
) -> SparkContext:
    """Return the active SparkContext, or a new one.

    Parameters
    ----------
    conf : SparkConf or dict, optional
    appName : str, optional
        Name of the application.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import getOrCreateSparkContext, init_spark_on_local
    >>> sc = init_spark_on_local(cores=2)
    >>> getOrCreateSparkContext() is sc  # the active one
    True
    """
    properties = _properties(conf)
    if appName is not None:
        properties["spark.app.name"] = appName
    return init_spark_with(properties)


def set_optimizer_version(optimizerVersion: str, bigdl_type: str = "float") -> None:
    """Store a JVM optimizer version of BigDL 2.x; the version has no effect.

    Raises
    ------
    UsageError
        If the version is neither ``"optimizerV1"`` nor ``"optimizerV2"``.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import get_optimizer_version, set_optimizer_version
    >>> set_optimizer_version("optimizerV2")
    >>> get_optimizer_version()
    'optimizerV2'
    >>> set_optimizer_version("optimizerV1")  # the default
    """
    global _optimizer_version
    check_choice("optimizerVersion", optimizerVersion, ("optimizerV1", "optimizerV2"))
    _optimizer_version = optimizerVersion
    logger.warning("optimizerVersion: no effect, because optimizers run in Python.")


def get_optimizer_version(bigdl_type: str = "float") -> str:
    """Return the version set by :func:`set_optimizer_version`, default ``"optimizerV1"``.

    Examples
    --------
    >>> from bigdl.dllib.nncontext import get_optimizer_version
    >>> get_optimizer_version()
    'optimizerV1'
    """
    return _optimizer_version


_OTHER_NAMES = {
    "num_executors": "num_nodes",
    "executor_cores": "cores",
    "executor_memory": "memory",
}


def _start(cluster_mode: str, **arguments: Any) -> SparkContext:
    if connect_session() is not None:
        raise UsageError(NEEDS_CONTEXT, code="context-missing")
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in arguments.items()}
    kept = {name: value for name, value in renamed.items() if value is not None}
    return cast("SparkContext", init_orca_context(cluster_mode, **kept))  # never a Ray context


def _properties(conf: SparkConf | Mapping[str, Any] | str | None) -> dict[str, str]:
    if conf is None:
        return {}
    if isinstance(conf, str):
        return {"spark.app.name": conf}
    if isinstance(conf, Mapping):
        return dict(init_spark_conf(conf).getAll())
    if not hasattr(conf, "getAll"):
        raise UsageError(
            "conf must be a SparkConf, a dict of Spark properties or the name of the application, "
            f"but got {conf!r}",
            code="argument-type",
            argument="conf",
        )
    return dict(conf.getAll())
