"""Temporary directories of killed processes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from bigdl.common.private_folders import scratch_directory
for _ in range(2):
    directory = scratch_directory("bigdl-killed-")
    (directory / "file").write_text("content")
    print(directory, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_directories_of_a_killed_process_are_removed(number, tmp_path, monkeypatch):
    monkeypatch.delenv("BIGDL_SCRATCH_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        directories = [Path(process.stdout.readline().strip()) for _ in range(2)]
        assert all((directory / "file").exists() for directory in directories)
        process.send_signal(number)
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
