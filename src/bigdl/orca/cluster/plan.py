"""What must look at a Spark plan by other than the public DataFrame API, in one place.

Each function has a safe answer for when Spark's internals do not have what it looks for; setting
the environment variable ``BIGDL_NO_PLAN_INSPECTION=1`` makes every function give it.
"""

from __future__ import annotations

import contextlib
import logging
import os

__all__ = ["exchange", "is_cached", "is_deterministic", "quiet"]

logger = logging.getLogger("bigdl.orca")


def _switched_off() -> bool:
    return os.environ.get("BIGDL_NO_PLAN_INSPECTION", "") not in ("", "0")


def is_cached(frame) -> bool:
    """Whether the DataFrame itself is cached or persisted."""
    level = frame.storageLevel
    return bool(level.useMemory or level.useDisk)


def is_deterministic(frame) -> bool:
    """Whether computing the frame again gives the same rows; True when it cannot be told."""
    if _switched_off():
        return True
    try:
        return bool(frame._jdf.queryExecution().optimizedPlan().deterministic())
    except Exception as error:  # an internal API: any failure means "cannot tell"
        logger.debug("Cannot tell whether the plan is deterministic: %s", error)
        return True


def exchange(frame, num_partitions: int, column: str):
    """Send every row to the partition that its integer `column` names."""
    return frame.repartitionById(num_partitions, column)


_NOISY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.scheduler.TaskSchedulerImpl",
    "org.apache.spark.api.python.PythonRunner",
)


@contextlib.contextmanager
def quiet(sc):
    """Keep the driver's JVM from printing stack traces of failed tasks; we report them."""
    if _switched_off():
        yield
        return
    levels = {}
    try:
        log4j = sc._jvm.org.apache.logging.log4j
        for name in _NOISY:
            levels[name] = log4j.LogManager.getLogger(name).getLevel()
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    except Exception as error:  # an internal API
        logger.debug("Cannot quieten Spark's loggers: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            for name, level in levels.items():
                log4j.core.config.Configurator.setLevel(name, level)
