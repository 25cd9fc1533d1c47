"""Daemon that forks Spark's Python workers, for executors that use this machine's packages.

Spark runs ``python -m <spark.python.daemon.module> pyspark.worker``.  This is Spark's daemon with
two differences.  It imports the workers' modules once, before forking, so workers start faster and
share that memory.  And it prints no traceback when a worker's connection is closed, which is how
Spark stops workers after a minute without tasks.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable

from bigdl.common.platform.processes import at_fork
from bigdl.orca.cluster.spark_calls import ignore_pandas_warning, silence_daemon

PRELOAD = "BIGDL_PRELOAD"
"""Environment variable: names of the modules to import before forking, separated by commas."""


def preload(names: Iterable[str]) -> None:
    """Import modules and ignore failures; workers that need a missing module raise the error."""
    with contextlib.redirect_stdout(sys.stderr):  # Spark reads the daemon's standard output
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # otherwise all workers draw the same random numbers
        at_fork(after_in_child=numpy.random.seed)


def main() -> None:
    """Preload modules, then serve Spark until it closes standard input."""
    from pyspark import daemon

    silence_daemon(daemon)
    ignore_pandas_warning()
    preload(filter(None, os.environ.get(PRELOAD, "").split(",")))
    daemon.manager()


if __name__ == "__main__":
    main()
