"""Class-data-sharing archives, which make Spark's JVM start faster.

A JVM memory-maps such an archive instead of loading, verifying and linking some 14,000 classes
from 400 JARs (application class-data sharing, JEP 310 of OpenJDK).  :func:`make_class_archive`,
the command ``bigdl-prepare``, creates it for a machine's Java and PySpark.
``init_orca_context`` uses it when this process starts Spark's JVM, and creates it in the background
at the first start in a terminal or a notebook.  A JVM with another class path ignores it.
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
from bigdl.common.platform.processes import start_in_background
from bigdl.common.private_folders import cache_directory, remove_old
from bigdl.common.timeouts import UNFINISHED_ARCHIVE_S, UNUSED_CLASSES_S
from bigdl.orca.cluster.java import find_java
from bigdl.orca.cluster.standalone import spark_home

# Loads the classes that programs usually need, and prints the class path.
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
    for name in ("parquet", "csv", "json"):
        path = os.path.join(folder, name)
        rows.drop("array").write.format(name).save(path)
        spark.read.format(name).load(path).count()
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
    """Return the path of the archive for a Java home and this PySpark, even if it is missing.

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
    """Return JVM options that use the archive, or "" if there is none."""
    try:
        archive = class_archive(java_home)
    except OSError:  # no JARs: Spark raises the error
        return ""
    if not archive.exists():
        return ""
    with contextlib.suppress(OSError):
        os.utime(archive)  # marks it as used
    # A JVM with another class path ignores the archive; the option suppresses its warning.
    return f"{shlex.quote(f'-XX:SharedArchiveFile={archive}')} -Xlog:cds=off"


def prepare_in_background(java_home: Path) -> None:
    """Start ``bigdl-prepare`` once, in a terminal or a notebook.

    It runs at the lowest priority and may end after this process.  This happens once per Java and
    PySpark, only if an archive can be stored, and not if ``BIGDL_NO_PREPARE`` is set.

    Parameters
    ----------
    java_home : Path
    """
    from bigdl.training.progress import progress_form

    # neither a terminal nor a notebook, or not wanted
    if progress_form() != "bar" or os.environ.get("BIGDL_NO_PREPARE"):
        return
    with contextlib.suppress(OSError):  # already started, or the cache is not writable
        marker = class_archive(java_home).with_suffix(".started")
        marker.parent.mkdir(parents=True, exist_ok=True)
        remove_old([marker], UNFINISHED_ARCHIVE_S)  # of a run that did not end
        marker.touch(exist_ok=False)
        try:
            start_in_background([sys.executable, "-m", __name__])
        except OSError:
            marker.unlink()
            raise
        sys.stderr.write(
            "Preparing faster starts of Spark in the background, once for this machine (a minute "
            f"at low priority, and 200 MB in {marker.parent}; BIGDL_NO_PREPARE=1 prevents it)\n"
        )


def make_class_archive() -> Path:
    """Create the archive for this machine's Java and PySpark, if there is none.

    It takes about a minute of CPU time, and 200 MB below ``~/.cache/bigdl/classes`` or
    ``XDG_CACHE_HOME``.

    Returns
    -------
    Path
        Path of the archive.

    Raises
    ------
    UsageError
        If no suitable Java is found, or it cannot create archives.
    """
    java = find_java()
    with contextlib.closing(java):
        archive = class_archive(java.home)
        if archive.exists():
            return archive
        archive.parent.mkdir(parents=True, exist_ok=True)
        remove_old(archive.parent.glob("*.jsa"), UNUSED_CLASSES_S)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            classes, dump = Path(folder, "classes"), Path(folder, "archive")
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
            command += [f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={dump}"]
            _run([*command, "-cp", class_path], {})
            if not dump.exists():
                raise UsageError(
                    f"Java at {java.home} dump no archive of Spark's classes", code="program-failed"
                )
            dump.replace(archive)
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
            f"an archive of Spark's classes cannot be dump: {lines[-1]}", code="program-failed"
        )
    return done.stdout


def main() -> None:
    """Run the command ``bigdl-prepare``."""
    try:
        print(f"Spark starts with the classes in {make_class_archive()}")
    except UsageError as error:
        sys.exit(f"bigdl-prepare: {error}")


if __name__ == "__main__":
    main()
