"""A Python worker of Spark that starts while the program reads its data.

The first task in Python of an application waits for a process that imports pandas, torch and what
of ours a fit needs: some three seconds of a core.  :func:`warm_worker` has that done by a task of
its own in the background; the workers of all later tasks are forked from that process.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from bigdl.orca.cluster import plan
from bigdl.orca.cluster.spark_calls import QUIET_S, is_busy
from bigdl.orca.cluster.versions import spark_thread
from bigdl.runtime.jobs import LOOK_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark import SparkContext

TAG = "bigdl-warm"
"""Tag of the job."""

STOP_S = 5.0
"""Seconds that the job gets to end where the context stops."""


def will_fit() -> bool:
    """Return True if this program has imported an Estimator, so that it is about to fit."""
    return any(name.startswith("bigdl.orca.learn.") for name in sys.modules.copy())


def warm_worker(sc: SparkContext, jvm: int, daemon: str) -> Callable[[], None]:
    """Start a Python worker of an application in the background; at most one task is busy.

    Parameters
    ----------
    sc : pyspark.SparkContext
        In local mode.
    jvm : int
        The process of its JVM.
    daemon : str
        The module of the process that forks its workers.

    Returns
    -------
    callable
        Drops the job if it still runs; to be called before `sc` stops.
    """

    def run() -> None:
        with contextlib.suppress(Exception):  # the context was stopped
            sc.addJobTag(TAG)
            sc.setLocalProperty("spark.job.description", "Start of a Python worker")
            sc.range(1, numSlices=1).foreach(_nothing)

    def drop() -> None:
        if not thread.is_alive():
            return
        until = time.monotonic() + STOP_S
        with contextlib.suppress(Exception), plan.quiet(sc):
            sc.cancelJobsWithTag(TAG)
            # Spark waits for a daemon that still imports.
            while time.monotonic() < until and (thread.is_alive() or is_busy(sc, TAG)):
                _end_daemons(jvm, daemon)
                thread.join(LOOK_S)
            time.sleep(QUIET_S)

    thread = spark_thread(run)
    thread.start()
    return drop


def _end_daemons(jvm: int, daemon: str) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(jvm).children(recursive=True):
            if daemon in process.cmdline():
                process.kill()


def _nothing(element: object) -> None:
    """Do nothing with an element."""
