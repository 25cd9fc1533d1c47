"""Start a cluster of `scripts/clusters` for a test."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "clusters"
MISSING = 3  # exit status of a script whose cluster cannot run on this machine


@contextmanager
def running(script: str, folder: Path, *arguments: str) -> Iterator[Path]:
    """Start a cluster in a folder; the test is skipped where it cannot run."""

    def control(verb, *more):
        command = [sys.executable, str(SCRIPTS / script), verb, str(folder), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    started = control("start", *arguments)
    if started.returncode == MISSING:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    try:
        yield folder
    finally:
        stopped = control("stop")
        assert stopped.returncode == 0, stopped.stderr
