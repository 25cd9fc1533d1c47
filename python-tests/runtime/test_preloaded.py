"""Programs that run in forks of a process that has imported their packages already."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from bigdl.common.private_folders import LockedFolder
from bigdl.runtime.preloaded import ADDRESS, MODULE, Preloaded, can_preload

pytestmark = pytest.mark.skipif(not can_preload(), reason="files cannot be sent to a fork")

PROGRAM = """
import json, os, sys
print(json.dumps({
    "parent": os.getppid(), "argv": sys.argv[1:], "folder": os.getcwd(),
    "given": os.environ.get("GIVEN"), "loaded": "colorsys" in sys.modules, "pid": os.getpid(),
}), flush=True)
print("an error", file=sys.stderr, flush=True)
sys.exit(int(sys.stdin.readline()))
"""


@pytest.fixture
def preloaded(tmp_path):
    (tmp_path / "program_in_a_fork.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    folder = LockedFolder("test-preloaded", longest=90)
    process = Preloaded(sys.executable, ["colorsys", "no_such_module"], environment, folder.path)
    variables = {ADDRESS: process.address, MODULE: "program_in_a_fork"}
    yield process, {**environment, **variables}
    process.close()
    folder.close()
    assert not [each for each in psutil.Process().children() if ADDRESS in _variables(each)]


def _variables(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def start(environment, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "bigdl.runtime.preloaded", *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_fork_has_the_streams_arguments_and_status_of_its_process(preloaded):
    _process, environment = preloaded
    for status in (0, 3):
        # a variable that differs only in Spark's own settings
        client = start({**environment, "SPARK_GIVEN": "x"}, "a", "b")
        output, errors = client.communicate(f"{status}\n", timeout=60)
        seen = json.loads(output)
        assert seen["argv"] == ["a", "b"]
        assert seen["folder"] == os.getcwd()
        assert seen["loaded"]
        assert seen["pid"] != client.pid
        assert psutil.Process(seen["parent"]).ppid() == os.getpid()
        assert errors.strip() == "an error"
        assert client.returncode == status


def test_another_environment_is_not_served(preloaded):
    _, environment = preloaded
    client = start({**environment, "GIVEN": "other"})
    output, _ = client.communicate("5\n", timeout=60)
    seen = json.loads(output)
    assert (seen["given"], seen["loaded"], seen["pid"]) == ("other", False, client.pid)
    assert client.returncode == 5


def test_no_process_no_fork(preloaded):
    process, environment = preloaded
    client = start({**environment, ADDRESS: process.address + "-gone/socket"})
    output, _ = client.communicate("0\n", timeout=60)
    assert json.loads(output)["pid"] == client.pid


def test_a_fork_ends_with_the_process_for_which_it_runs(preloaded):
    _, environment = preloaded
    client = start(environment)
    fork = psutil.Process(json.loads(client.stdout.readline())["pid"])
    assert fork.is_running()
    client.send_signal(signal.SIGKILL)
    client.wait()
    deadline = time.monotonic() + 30
    while fork.is_running() and fork.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for stream in (client.stdin, client.stdout, client.stderr):
        stream.close()


def test_a_killed_server_ends_its_clients(preloaded):
    _, environment = preloaded
    client = start(environment)
    seen = json.loads(client.stdout.readline())
    psutil.Process(seen["parent"]).kill()
    assert client.wait(timeout=30) == 1
    client.communicate(timeout=30)  # the fork ends with its standard input
    after = start(environment)
    output, _ = after.communicate("0\n", timeout=60)
    assert json.loads(output)["pid"] == after.pid
