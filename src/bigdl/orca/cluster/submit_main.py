"""Command ``bigdl-submit``: ``spark-submit`` with the Java and Python that BigDL uses.

It takes the arguments of ``spark-submit``.  The command is that of ``SPARK_HOME`` or of the
installed PySpark.  The program runs with this interpreter unless ``PYSPARK_PYTHON`` or an option of
the command names another one.
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
    """Run ``spark-submit`` with `arguments`, by default the arguments of this command.

    Returns
    -------
    int
        Exit code of ``spark-submit``.
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
    """Return environment variables that select this interpreter unless the user chose one.

    On a cluster this sets the driver's interpreter only, and only in client mode.  Executors on
    other machines use ``PYSPARK_PYTHON`` or ``spark.pyspark.python``.
    """
    explicit = [argument for argument in arguments if argument.startswith(_PYTHON_PROPERTIES)]
    if explicit or "PYSPARK_PYTHON" in environ or "PYSPARK_DRIVER_PYTHON" in environ:
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
