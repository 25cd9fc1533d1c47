"""``bigdl-submit``: ``spark-submit`` with the Java and the Python that BigDL uses.

All arguments are those of ``spark-submit``.  The command is the one of ``SPARK_HOME`` or of the
installed PySpark; the program runs on this interpreter unless ``PYSPARK_PYTHON`` or an option of
the command names another.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import submit
from bigdl.orca.cluster.versions import require_pyspark

_PYTHON_PROPERTIES = ("spark.pyspark.python=", "spark.pyspark.driver.python=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``spark-submit`` with `arguments`, by default those of this command.

    Returns
    -------
    int
        Its exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        require_pyspark()
        environment = python_variables(arguments, os.environ)
        return submit.run_with_java([submit.spark_submit(), *arguments], environment)
    except UsageError as error:
        print(f"bigdl-submit: {error}", file=sys.stderr)
        return 1


def python_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes this interpreter run the program, where nothing else was asked for.

    On a cluster it is the driver's only where the driver runs here; executors of other machines
    get theirs from ``PYSPARK_PYTHON`` or ``spark.pyspark.python``.
    """
    asked = [argument for argument in arguments if argument.startswith(_PYTHON_PROPERTIES)]
    if asked or "PYSPARK_PYTHON" in environ or "PYSPARK_DRIVER_PYTHON" in environ:
        return {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master", default="local")
    parser.add_argument("--deploy-mode", default="client")
    options, _ = parser.parse_known_args(arguments)
    if options.master.startswith("local"):
        return {"PYSPARK_PYTHON": sys.executable}
    if options.deploy_mode == "client":
        return {"PYSPARK_DRIVER_PYTHON": sys.executable}
    return {}


if __name__ == "__main__":
    sys.exit(main())
