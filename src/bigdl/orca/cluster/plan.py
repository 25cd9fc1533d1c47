"""Inspection of Spark query plans and sessions with private APIs.

Each function returns a safe default if Spark's internals differ.  The environment variable
``BIGDL_NO_PLAN_INSPECTION=1`` makes every function return its default.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "connect_session",
    "fits_barrier",
    "is_cached",
    "is_connect",
    "is_deterministic",
    "is_switched_off",
    "quiet",
    "selects_from_parquet",
]

logger = logging.getLogger("bigdl.orca")


def is_switched_off() -> bool:
    """Return True if the inspection of query plans is disabled."""
    return os.environ.get("BIGDL_NO_PLAN_INSPECTION", "") not in ("", "0")


def is_connect(frame) -> bool:
    """Return True if an object is a DataFrame, session or column of Spark Connect."""
    return any(c.__module__.startswith("pyspark.sql.connect") for c in type(frame).__mro__)


def is_cached(frame) -> bool:
    """Return True if the DataFrame itself is cached or persisted."""
    level = frame.storageLevel
    return bool(level.useMemory or level.useDisk)


def is_deterministic(frame) -> bool:
    """Return True if recomputing the frame gives the same rows, or if this is unknown.

    A limit depends on the arrival order of rows, although Spark considers it deterministic.
    """
    if is_switched_off():
        return True
    try:
        if is_connect(frame):
            text = frame._explain_string(extended=True)
            return not _NONDETERMINISTIC.search(text.partition("== Optimized Logical Plan ==")[2])
        plan = frame._jdf.queryExecution().optimizedPlan()
        return bool(plan.deterministic()) and not _LIMIT_NODES & _node_names(plan)
    except Exception as error:  # a private API: any failure means "unknown"
        logger.debug("Cannot tell whether the plan is deterministic: %s", error)
        return True


def selects_from_parquet(frame) -> bool:
    """Return True if a Spark Connect frame only selects columns of Parquet files."""
    if is_switched_off():
        return False
    try:
        lines = frame._explain_string().splitlines()
    except Exception as error:  # a private API
        logger.debug("Cannot tell what the plan reads: %s", error)
        return False
    nodes = [each.lstrip(" :+-*()0123456789") for each in lines if not each.startswith("==")]
    names = {each.partition(" ")[0] for each in nodes if each}
    names -= {"AdaptiveSparkPlan", "Project", "ColumnarToRow"}
    return names == {"FileScan"} and "FileScan parquet" in "".join(nodes)


# nodes and functions whose rows, or whose order of rows, may differ when recomputed
_NONDETERMINISTIC = re.compile(
    r"\b(GlobalLimit|Offset|Tail)\b|"
    r"\b(rand|randn|randstr|random|uniform|uuid|shuffle|monotonically_increasing_id|"
    r"spark_partition_id|input_file_name)\("
)
_LIMIT_NODES = {"GlobalLimit", "Offset", "Tail"}


def _node_names(plan) -> set[str]:
    names, nodes = set(), [plan]
    while nodes:
        node = nodes.pop()
        names.add(node.nodeName())
        children = node.children()
        nodes += [children.apply(i) for i in range(children.size())]
    return names


def fits_barrier(frame, num_tasks: int) -> bool | None:
    """Return True if a barrier stage accepts the frame, or None if this is unknown.

    Every RDD of the stage must have `num_tasks` partitions; Spark rejects coalesce, union and limit
    (SPARK-24820), also below a cached frame.
    """
    if is_switched_off():
        return None
    try:
        rdds = [frame._jdf.queryExecution().toRdd()]
        while rdds:
            rdd = rdds.pop()
            if rdd.getNumPartitions() != num_tasks:
                return False
            dependencies = rdd.dependencies()
            for i in range(dependencies.size()):
                dependency = dependencies.apply(i)
                if not dependency.getClass().getName().endswith("ShuffleDependency"):
                    rdds.append(dependency.rdd())
        return True
    except Exception as error:  # a private API
        logger.debug("Cannot tell whether the plan fits a barrier stage: %s", error)
        return None


_NOISY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.scheduler.TaskSchedulerImpl",
    "org.apache.spark.api.python",
    "org.apache.spark.sql.execution.python",
    "org.apache.spark.storage.BlockManager",
    "org.apache.spark.util.Utils",
    "org.apache.spark.internal.io",
    "org.apache.spark.sql.execution.datasources",
    "org.apache.hadoop.mapreduce.lib.output",
)


_quiet_lock = threading.Lock()
_quiet_depth = 0
_restore = contextlib.ExitStack()  # restores the levels of the loggers


@contextlib.contextmanager
def quiet(sc):
    """Temporarily suppress the JVM's stack traces of failed tasks, which BigDL reports itself.

    Calls may overlap in several threads; the last one to exit restores the levels.
    """
    global _quiet_depth
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1 and not is_switched_off():
            _silence(sc)
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                with contextlib.suppress(Exception):
                    _restore.close()


def _silence(sc):
    try:
        log4j = sc._jvm.org.apache.logging.log4j
        manager, configurator = log4j.LogManager, log4j.core.config.Configurator
        context, off = manager.getContext(False), log4j.Level.OFF
        configuration = context.getConfiguration()
        loggers = configuration.getLoggers()
        _restore.callback(context.updateLoggers)
        for name in _NOISY:  # each attribute access is a JVM call
            if loggers.containsKey(name):
                _restore.callback(configurator.setLevel, name, manager.getLogger(name).getLevel())
            else:
                _restore.callback(configuration.removeLogger, name)
            configurator.setLevel(name, off)
    except Exception as error:  # a private API
        logger.debug("Cannot quieten Spark's loggers: %s", error)


def connect_session() -> SparkSession | None:
    """Return the active Spark Connect session, or None; it takes precedence over a SparkContext.

    The server of ``remote("local[2]")`` runs a SparkContext in this process, which programs must
    not use.
    """
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    active = module.SparkSession.getActiveSession()  # of this thread
    session = active or getattr(module.SparkSession, "_default_session", None)
    return None if session is None or session.is_stopped else session
