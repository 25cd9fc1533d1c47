"""Environment variables that hold for a while, and the directory for files of a process.

Such files are gone when their process ends. A process that may be killed is given a directory by
the one that would kill it, which removes what is left there. All others use the system's directory
for temporary files, and a small shell waits for their end, however they end, and removes what is
left.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


class EnvContext:
    """A context in which environment variables have given values; it nests.

    Parameters
    ----------
    env : mapping of str to str or None, optional
        Values of any type are taken as their text; None removes a variable.

    Notes
    -----
    The environment belongs to the process: threads that hold such contexts at the same time must
    not name the same variables.

    Examples
    --------
    >>> import os
    >>> from bigdl.nano.utils.common import EnvContext
    >>> with EnvContext({"MY_VARIABLE": "1"}):
    ...     os.environ["MY_VARIABLE"]
    '1'
    >>> "MY_VARIABLE" in os.environ
    False
    """

    def __init__(self, env: Mapping[str, object | None] | None = None):
        self.env = dict(env or {})
        self._before: list[dict[str, str | None]] = []

    def __enter__(self) -> EnvContext:
        self._before.append(set_variables(self.env))
        return self

    def __exit__(self, *exception) -> None:
        set_variables(self._before.pop())


def set_variables(variables: Mapping[str, object | None]) -> dict[str, str | None]:
    """Set variables, or unset those that are None; returns what they were."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    return before


VARIABLE = "BIGDL_SCRATCH_DIR"
"""Environment variable that names the directory."""


def scratch_home() -> str | None:
    """The directory for such files, as the `dir` of :mod:`tempfile`'s functions."""
    return os.environ.get(VARIABLE) or None


def scratch_directory(prefix: str) -> Path:
    """A new, empty directory, which the caller removes.

    Parameters
    ----------
    prefix : str
        Begin of its name.

    Returns
    -------
    Path
    """
    directory = tempfile.mkdtemp(prefix=prefix, dir=scratch_home())
    if scratch_home() is None:
        _remove_at_end(directory)
    return Path(directory)


# Reads names of directories until nobody holds the other end of its input. It is no child of the
# process, nor of its group: signals to these do not reach it.
_REMOVER = """
exec 3<&0
( while IFS= read -r name <&3; do set -- "$@" "$name"; done; rm -rf -- "$@" ) &
"""
_remover_lock = threading.Lock()
_remover: int | None = None


def _remove_at_end(directory: str) -> None:
    """Have a directory removed when this process, and all that it forked, have ended."""
    global _remover
    with _remover_lock, contextlib.suppress(OSError):
        if _remover is None:
            end, _remover = os.pipe()
            subprocess.run(
                ["/bin/sh", "-c", _REMOVER],
                stdin=end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=False,
            )
            os.close(end)
        os.write(_remover, os.fsencode(directory) + b"\n")


def cache_directory(name: str) -> Path:
    """The directory ``~/.cache/bigdl/<name>``, or that below ``XDG_CACHE_HOME``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "bigdl" / name


def remove_old(files: Iterable[Path], age_s: float) -> None:
    """Remove the files of a cache that have not changed for so many seconds."""
    for file in files:
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > age_s:
                file.unlink()


def tensorflow_log_level() -> str:
    """Return the ``TF_CPP_MIN_LOG_LEVEL`` at which TensorFlow starts quietly.

    Without a driver of NVIDIA it logs as an error that CUDA cannot be used.
    """
    return "2" if os.path.exists("/proc/driver/nvidia") else "3"


def quiet_tensorflow() -> None:
    """Let TensorFlow start quietly in this process, if it has not been imported yet.

    It reads the variable when it is imported; what the user has set stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", tensorflow_log_level())


def without_lines_of_start() -> contextlib.AbstractContextManager[None]:
    """Leave out the lines that TensorFlow logs while it is imported within the block.

    It logs about oneDNN and CUDA whatever ``TF_CPP_MIN_LOG_LEVEL`` says. Without that variable, or
    if it asks for errors at most, these lines are left out.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", tensorflow_log_level())
    if level not in ("2", "3"):
        return contextlib.nullcontext()
    levels = "IW" if level == "2" else "IWE"
    return _without_lines(re.compile(_LINE_OF_ABSL.format(levels), re.MULTILINE))


_LINE_OF_ABSL = (
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\)|"
    r"[{}]\d{{4}} [\d:.]+ +\d+ \S+\.(?:cc|h):\d+\]).*\n"
)


@contextlib.contextmanager
def _without_lines(dropped: re.Pattern[str]) -> Iterator[None]:
    """Leave lines of a form out of what this process writes to its standard error."""
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            rest = dropped.sub("", file.read().decode(errors="replace"))
            if rest:
                os.write(2, rest.encode())
