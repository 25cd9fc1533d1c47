"""The suites that every engine must pass, over Spark Connect in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from connect_server import OVER_CONNECT, over_connect

TESTS = Path(__file__).parents[2]
SUITES = {
    "programs": ["orca/engines/test_engines.py"],
    "training": ["orca/engines/test_engines_training.py"],
    # but what looks at the JVM
    "prediction": ["orca/learn/test_predict.py", "-k", "not nothing_runs and not outlives"],
    "lost executors": ["orca/engines/test_failures_cluster.py", "-k", "killed and not rank_0"],
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(over_connect(), reason="it is this process")]


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite]]
    done = subprocess.run(
        command, cwd=TESTS, env={**os.environ, OVER_CONNECT: "connect"}, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()[-5000:]
