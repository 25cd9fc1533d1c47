"""Test Spark tasks that end before they have returned all their rows."""

import subprocess
import sys

import pytest

PROGRAM = """
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.cluster.spark_calls import silent_when_closed
from pyspark.sql import functions as F

init_orca_context("local", cores=1)
numbers = OrcaContext.get_spark_session().range(0, 1_000_000, 1, 1)

def fails(batches):
    next(batches)
    raise ValueError("an error of the task")

numbers.mapInArrow(silent_when_closed(iter), "id long").show(1)
numbers.select(F.arrow_udf(silent_when_closed(lambda ids: ids), "long")("id")).show(1)
try:
    numbers.mapInArrow(silent_when_closed(fails), "id long").show(1)
except Exception as error:
    print("an error of the task" in str(error))
stop_orca_context()
"""


@pytest.mark.slow
def test_a_limit_ends_tasks_silently(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("only showing top 1 row") == 2
    assert done.stdout.endswith("True\n")
    assert "BrokenPipeError" not in done.stdout + done.stderr
