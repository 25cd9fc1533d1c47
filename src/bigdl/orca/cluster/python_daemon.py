"""The process that forks Spark's Python workers where an executor has this machine's packages.

Spark runs ``python -m <spark.python.daemon.module> pyspark.worker``.  This one is Spark's own, with
two differences.  It imports what the workers will need once, before it forks: a worker starts
sooner and shares that memory with the others.  And it prints no traceback when a worker's
connection is closed, which is how Spark ends a worker that was idle for a minute.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable

from bigdl.orca.cluster.spark_calls import ignore_pandas_warning, silence_daemon

PRELOAD = "BIGDL_PRELOAD"
"""Environment variable: names of the modules to import before forking, separated by commas."""


def preload(names: Iterable[str]) -> None:
    """Import modules; a worker that needs one which cannot be imported says so itself."""
    with contextlib.redirect_stdout(sys.stderr):  # Spark reads the daemon's standard output
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # or all workers would draw the same numbers
        os.register_at_fork(after_in_child=numpy.random.seed)


def main() -> None:
    """Preload, then serve Spark until it closes standard input."""
    from pyspark import daemon

    silence_daemon(daemon)
    ignore_pandas_warning()
    preload(filter(None, os.environ.get(PRELOAD, "").split(",")))
    daemon.manager()


if __name__ == "__main__":
    main()
