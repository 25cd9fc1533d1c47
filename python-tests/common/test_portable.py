"""BigDL in processes that imitate macOS or Windows (``pytest --portable``)."""

import os
import subprocess
import sys
from pathlib import Path

import other_platform
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, platform: str = "darwin", *args: object) -> str:
    """Run a program in a new process that imitates a platform, and return its output."""
    imitated = {**os.environ, **other_platform.environment(platform)}
    path = os.pathsep.join([imitated["PYTHONPATH"], str(ROOT / "src")])
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        env={**imitated, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


SEES = """\
import ctypes, multiprocessing, os, socket, sys

def error_of(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return type(error).__name__

print(
    sys.platform,
    [name for name in ("memfd_create", "sched_getaffinity", "fork") if hasattr(os, name)],
    [name for name in ("SO_REUSEPORT", "SCM_RIGHTS", "send_fds") if hasattr(socket, name)],
    *[error_of(open, path) for path in ("/proc/self/status", "/dev/shm/x")],
    os.path.exists("/proc"),
    error_of(lambda: ctypes.CDLL(None).prctl),
    error_of(multiprocessing.get_context, "fork"),
)
"""


def test_this_process_and_those_that_it_starts_have_nothing_of_linux():
    """Packages of others keep it: psutil reads ``/proc``."""
    program = f"{SEES}\nimport psutil, subprocess\nassert psutil.virtual_memory().available\n"
    program += f"subprocess.run([sys.executable, '-P', '-c', {SEES!r}], check=True)"
    seen = "[] [] FileNotFoundError FileNotFoundError False AttributeError ValueError"
    assert run(program).splitlines() == [f"darwin {seen}"] * 2


WINDOWS = """\
import os, sys
for name in ("fcntl", "resource"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        print(name)
print(sys.platform, os.name, hasattr(os, "killpg"), hasattr(os, "getuid"))
"""


def test_windows_has_neither_fcntl_nor_process_groups():
    assert run(WINDOWS, "win32").split() == ["fcntl", "resource", "win32", "nt", "False", "False"]


def test_a_test_that_calls_linux_itself_is_skipped():
    def error_of(file: object) -> Exception:
        text = "AttributeError: module 'os' has no attribute 'fork'"
        return RuntimeError(f'In worker 0:\n  File "{file}", line 1, in program\n{text}')

    other_platform.skip_test_of_linux(error_of(ROOT / "src" / "bigdl" / "common" / "cpu.py"))
    with pytest.raises(pytest.skip.Exception, match=r"the test itself needs Linux: .* 'fork'"):
        other_platform.skip_test_of_linux(error_of(__file__))
