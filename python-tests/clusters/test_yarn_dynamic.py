"""Trainings on a YARN where Spark adds and removes executors by demand."""

import json
import os
import subprocess
import sys

import executors_by_demand
import faults
import pytest
from test_yarn import ENVIRONMENT, on_yarn

pytestmark = [pytest.mark.yarn, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]

WAYS = {
    "shuffle tracking": executors_by_demand.TRACKING,
    "shuffle service": {"spark.shuffle.service.enabled": "true"},
}


def run(yarn, story, folder, way):
    """What happened in a program of its own."""
    arguments = on_yarn(yarn, conf=WAYS[way])
    program = executors_by_demand.__file__
    done = subprocess.run(
        [sys.executable, program, story, str(folder), json.dumps(arguments)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SPARK_LOCAL_DIRS": str(folder / "local"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_executors_come_by_demand_and_after_a_loss(yarn, tmp_path, way):
    facts = run(yarn, "growing", tmp_path, way)
    assert (facts["before"], facts["grown to"], facts["idle"]) == (0, 2, 0)
    assert facts["found"] == facts["expected"]
    assert facts["starts"] == [0, 15]


@pytest.mark.parametrize("way", WAYS)
def test_no_step_is_lost_before_a_decommissioned_executor_goes(yarn, tmp_path, way):
    facts = run(yarn, "decommissioned", tmp_path, way)
    assert facts["found"] == facts["expected"]
    first, second = facts["starts"]
    assert (first, second) == (0, facts["told at"])
    assert 8 <= second < faults.STEPS


def test_executors_come_for_a_search_and_go_after_it(yarn, tmp_path):
    facts = run(yarn, "searching", tmp_path, "shuffle tracking")
    assert (facts["before"], facts["grown to"], facts["idle"], facts["idle again"]) == (0, 2, 0, 0)
    assert facts["joint"] == [3, 3, 3]
    assert facts["states"] == ["COMPLETE"]
