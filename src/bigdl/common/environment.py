"""Environment variables that hold for a while, and what TensorFlow logs when it starts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping


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

    def __exit__(self, *exception: object) -> None:
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


def suppress_import_logs() -> contextlib.AbstractContextManager[None]:
    """Leave out the lines that TensorFlow logs while it is imported within the block.

    It logs about oneDNN and CUDA whatever ``TF_CPP_MIN_LOG_LEVEL`` says. Without that variable, or
    if it asks for errors at most, these lines are left out.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", tensorflow_log_level())
    if level not in ("2", "3"):
        return contextlib.nullcontext()
    levels = "IW" if level == "2" else "IWE"
    return filter_stderr(re.compile(LINE_OF_ABSL.format(levels), re.MULTILINE))


LINE_OF_ABSL = (
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\)|"
    r"[{}]\d{{4}} [\d:.]+ +\d+ \S+\.(?:cc|h):\d+\]).*\n"
)


@contextlib.contextmanager
def filter_stderr(dropped: re.Pattern[str]) -> Iterator[None]:
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


def ipex_fits() -> bool:
    """Return True if IPEX is installed for the torch that is; beside another it fails."""
    import importlib.metadata

    from packaging.version import Version

    try:
        packages = ("intel_extension_for_pytorch", "torch")
        ipex, torch = (Version(importlib.metadata.version(name)) for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return False
    return ipex.release[:2] == torch.release[:2]
