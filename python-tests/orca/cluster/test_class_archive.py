"""Test the archive of Spark's classes, and the daemon that forks Spark's Python workers."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from refusals import refused

from bigdl.orca.cluster import class_archive
from bigdl.orca.cluster.java import find_java

STARTS = """
from bigdl.orca import init_orca_context, stop_orca_context

sc = init_orca_context("local", cores=1)
print(sc.range(3).map(lambda x: 2 * x).sum())
stop_orca_context()
"""


@pytest.fixture
def java_home(tmp_path, monkeypatch):
    """Return the home of a Java, on a machine without a class archive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return find_java().home


def test_there_is_no_archive_until_it_is_made(java_home, tmp_path):
    assert class_archive.archive_options(java_home) == ""
    archive = class_archive.class_archive(java_home)
    assert archive.is_relative_to(tmp_path / "cache" / "bigdl")
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"")
    os.utime(archive, (0, 0))
    assert f"-XX:SharedArchiveFile={archive} " in class_archive.archive_options(java_home)
    assert archive.stat().st_mtime > time.time() - 60  # marks it as used


def test_another_spark_has_another_archive(java_home, tmp_path, monkeypatch):
    here = class_archive.class_archive(java_home)
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    monkeypatch.setattr(class_archive, "spark_home", lambda: str(tmp_path / "spark"))
    there = class_archive.class_archive(java_home)
    assert there != here
    os.utime(tmp_path / "spark" / "jars", (0, 0))  # a JAR was added or removed
    assert class_archive.class_archive(java_home) not in (here, there)


def test_a_java_that_makes_no_archives_is_named(java_home, monkeypatch):
    monkeypatch.setattr(class_archive, "PROGRAM", "raise SystemExit('no such option')")
    with refused("program-failed"):
        class_archive.make_class_archive()
    assert not list(class_archive.class_archive(java_home).parent.iterdir())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def started(monkeypatch):
    commands = []
    monkeypatch.setattr(class_archive, "start_in_background", commands.append)
    return commands


def test_the_first_start_in_a_terminal_prepares_in_the_background(java_home, monkeypatch, started):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    class_archive.prepare_in_background(java_home)
    assert sys.stderr.getvalue() == ""  # output to a log, not a terminal
    monkeypatch.setattr(sys, "stderr", Terminal())
    with monkeypatch.context() as patch:
        patch.setenv("BIGDL_NO_PREPARE", "1")
        class_archive.prepare_in_background(java_home)
    assert started == []
    class_archive.prepare_in_background(java_home)
    class_archive.prepare_in_background(java_home)
    assert started == [[sys.executable, "-m", class_archive.__name__]]
    (line,) = sys.stderr.getvalue().splitlines()
    assert "BIGDL_NO_PREPARE=1 prevents it" in line
    assert class_archive.archive_options(java_home) == ""


def test_a_home_that_cannot_be_written_is_told_nothing(java_home, tmp_path, monkeypatch, started):
    (tmp_path / "cache").write_text("a file where the folder would be")
    monkeypatch.setattr(sys, "stderr", Terminal())
    class_archive.prepare_in_background(java_home)
    assert sys.stderr.getvalue() == ""
    assert started == []


@pytest.mark.slow
def test_spark_starts_from_the_archive(java_home, tmp_path):
    unused = class_archive.class_archive(java_home).with_name("unused.jsa")
    unused.parent.mkdir(parents=True)
    unused.touch()
    os.utime(unused, (0, 0))
    archive = class_archive.make_class_archive()
    assert list(archive.parent.iterdir()) == [archive]
    written = archive.stat().st_mtime_ns
    assert class_archive.make_class_archive() == archive
    assert archive.stat().st_mtime_ns == written

    def start(log: Path) -> str:
        options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Xlog:class+load:file={log}"
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options}
        command = [sys.executable, "-c", STARTS]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.stdout == "6\n", done.stderr
        return log.read_text(encoding="utf-8")

    loaded = start(tmp_path / "log").splitlines()
    shared = [line for line in loaded if line.endswith("source: shared objects file")]
    assert len(shared) > len(loaded) / 2
    assert any("org.apache.spark.SparkContext " in line for line in shared)
    archive.unlink()
    archive.write_bytes(b"not an archive")
    start(tmp_path / "other")


def test_workers_come_from_a_daemon_that_has_imported_for_them(orca_spark):
    def look(_):
        main = sys.modules["__main__"]
        time.sleep(0.5)  # so that each partition needs its own worker
        yield main.__spec__.name, "pyarrow" in sys.modules, os.getpid(), float(np.random.random())

    workers = orca_spark.sparkContext.range(2, numSlices=2).mapPartitions(look).collect()
    names, has_imported, pids, numbers = zip(*workers, strict=True)
    assert set(names) == {"bigdl.orca.cluster.python_daemon"}
    assert all(has_imported)
    assert len(set(pids)) == len(set(numbers)) == 2


def test_tasks_of_rdds_and_of_tables_share_a_daemon(orca_spark):
    def parent(batches):
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"pid": [os.getppid()]})

    of_table = orca_spark.range(1).mapInArrow(parent, "pid long").first().pid
    of_rdd = orca_spark.sparkContext.range(1).map(lambda _: os.getppid()).first()
    assert of_table == of_rdd


IDLE = """
import time
from bigdl.orca import init_orca_context, stop_orca_context

sc = init_orca_context("local", cores=1)
sc.range(3).map(lambda x: 2 * x).sum()
time.sleep(75)  # Spark ends a worker that was idle for a minute
print(sc.range(3).map(lambda x: 2 * x).sum())
stop_orca_context()
"""


@pytest.mark.slow
def test_idle_workers_end_silently():
    done = subprocess.run(
        [sys.executable, "-c", IDLE], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout == "6\n", done.stderr
    assert "Traceback" not in done.stderr
