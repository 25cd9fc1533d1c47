"""Temporary environment variables, and TensorFlow's log output at start."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping

from bigdl.common.platform.cores import has_nvidia_driver


class EnvContext:
    """Nestable context manager that temporarily sets or removes environment variables.

    Parameters
    ----------
    env : mapping of str to str or None, optional
        Values of any type are converted to text; None removes a variable.

    Notes
    -----
    The environment belongs to the process: concurrent contexts in several threads must not set the
    same variables.

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
    """Set environment variables (None unsets a variable) and return their former values."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    return before


def tensorflow_log_level() -> str:
    """Return the ``TF_CPP_MIN_LOG_LEVEL`` that makes TensorFlow start quietly.

    Without an NVIDIA driver, TensorFlow logs an error that CUDA cannot be used.
    """
    return "2" if has_nvidia_driver() else "3"


def quiet_tensorflow() -> None:
    """Set TensorFlow's log level so that its import is quiet, unless the user has set it.

    TensorFlow reads ``TF_CPP_MIN_LOG_LEVEL`` once, when it is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", tensorflow_log_level())


def suppress_import_logs() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that drops the log lines of TensorFlow's import.

    TensorFlow logs about oneDNN and CUDA at any ``TF_CPP_MIN_LOG_LEVEL``. The lines are dropped if
    that variable is unset or 2 or more.
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
    """Context manager that drops matching lines from this process's standard error."""
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
    """Return True if the installed IPEX matches the installed torch version."""
    import importlib.metadata

    from packaging.version import Version

    try:
        packages = ("intel_extension_for_pytorch", "torch")
        ipex, torch = (Version(importlib.metadata.version(name)) for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return False
    return ipex.release[:2] == torch.release[:2]
