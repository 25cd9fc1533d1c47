"""Archives of the classes that Spark loads at its start, which make it start sooner.

A JVM maps such an archive into its memory where it would read, check and link some 14,000 classes
from 400 JARs (application class-data sharing, JEP 310 of OpenJDK).  :func:`make_class_archive`,
the command ``bigdl-prepare``, makes the one of a machine's Java and PySpark;
``init_orca_context`` uses it wherever this process starts Spark's JVM.  A JVM whose class path is
another ignores it.
"""

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.common.private_folders import cache_directory, remove_old
from bigdl.common.timeouts import UNUSED_CLASSES_S
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.standalone import spark_home

# Loads what programs usually load, and prints the class path.
PROGRAM = """
import os, sys, tempfile
import pandas as pd
from pyspark.sql import SparkSession, Window, functions as F

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.execution.arrow.pyspark.enabled", "true")
    .getOrCreate()
)
rows = spark.createDataFrame(pd.DataFrame({"id": range(100), "x": 0.5, "name": "a"}))
rows = rows.withColumn("array", F.array("x", "x")).withColumn("of", F.col("id") % 3)
with tempfile.TemporaryDirectory() as folder:
    for kind in ("parquet", "csv", "json"):
        path = os.path.join(folder, kind)
        rows.drop("array").write.format(kind).save(path)
        spark.read.format(kind).load(path).count()
rows.join(rows.groupBy("of").agg(F.mean("x"), F.collect_list("id")), "of").sort("id").toPandas()
rows.withColumn("n", F.row_number().over(Window.partitionBy("of").orderBy("id"))).show(1)
rows.select(F.udf(lambda x: x, "double")("x")).collect()
rows.repartition(2).cache().mapInArrow(lambda batches: batches, rows.schema, barrier=True).count()
rows.rdd.barrier().mapPartitions(lambda part: [sum(1 for _ in part)]).collect()
spark.sparkContext.parallelize(range(10), 2).map(lambda x: (x % 2, x)).groupByKey().collect()
path = spark._jvm.java.lang.System.getProperty("java.class.path")
spark.stop()
print("CLASS_PATH", path)
"""


def class_archive(java_home: Path) -> Path:
    """The path of the archive for a Java and the installed PySpark; there may be none yet.

    Parameters
    ----------
    java_home : Path
    """
    jars = Path(spark_home()) / "jars"
    release = java_home / "release"
    parts = (
        os.path.realpath(java_home),
        release.read_text(encoding="utf-8") if release.exists() else "",
        os.path.realpath(jars),
        jars.stat().st_mtime_ns,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_directory("classes") / f"{key}.jsa"


def archive_options(java_home: Path) -> str:
    """Options with which a JVM uses its archive, or "" if there is none."""
    try:
        archive = class_archive(java_home)
    except OSError:  # no JARs: Spark itself says so
        return ""
    if not archive.exists():
        return ""
    with contextlib.suppress(OSError):
        os.utime(archive)  # it is in use
    # A JVM with another class path ignores the archive, and would say so.
    return f"{shlex.quote(f'-XX:SharedArchiveFile={archive}')} -Xlog:cds=off"


def suggest_archive(java_home: Path) -> None:
    """Say in a terminal or a notebook that ``bigdl-prepare`` makes later starts faster.

    It is said once for a Java and a PySpark, and not where an archive could not be kept.

    Parameters
    ----------
    java_home : Path
    """
    from bigdl.training.progress import progress_form

    if progress_form() != "bar":  # neither a terminal nor a notebook
        return
    with contextlib.suppress(OSError):  # it was said before, or the home cannot be written
        said = class_archive(java_home).with_suffix(".said")
        said.parent.mkdir(parents=True, exist_ok=True)
        said.touch(exist_ok=False)
        sys.stderr.write(
            "Spark will start about 30 % sooner on this machine once you have run bigdl-prepare "
            f"(it takes a minute, and 200 MB in {said.parent}; this is said only once)\n"
        )


def make_class_archive() -> Path:
    """Make the archive of this machine's Java and PySpark, if there is none.

    It takes about a minute of a processor, and 200 MB below ``~/.cache/bigdl/classes`` or
    ``XDG_CACHE_HOME``.

    Returns
    -------
    Path

    Raises
    ------
    UsageError
        If no suitable Java is found, or if it cannot make archives.
    """
    java = find_java()
    with contextlib.closing(java):
        archive = class_archive(java.home)
        if archive.exists():
            return archive
        archive.parent.mkdir(parents=True, exist_ok=True)
        remove_old(archive.parent.glob("*.jsa"), UNUSED_CLASSES_S)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            classes, made = Path(folder, "classes"), Path(folder, "archive")
            options = f"-XX:DumpLoadedClassList={classes} -Xlog:cds=off"
            output = _run(
                [sys.executable, "-c", PROGRAM],
                {
                    "JAVA_HOME": str(java.home),
                    "SPARK_SUBMIT_OPTS": options,
                    "PYSPARK_PYTHON": sys.executable,
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
            )
            class_path = output.rpartition("CLASS_PATH ")[2].splitlines()[0]
            command = [str(java.home / "bin" / "java"), "-Xshare:dump", "-Xlog:disable"]
            command += [f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={made}"]
            _run([*command, "-cp", class_path], {})
            if not made.exists():
                raise UsageError(
                    f"Java at {java.home} made no archive of Spark's classes", code="program-failed"
                )
            made.replace(archive)
    return archive


def _run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was printed"]
        raise UsageError(
            f"an archive of Spark's classes cannot be made: {lines[-1]}", code="program-failed"
        )
    return done.stdout


def main() -> None:
    """Run the command ``bigdl-prepare``."""
    try:
        print(f"Spark starts with the classes in {make_class_archive()}")
    except UsageError as error:
        sys.exit(f"bigdl-prepare: {error}")
