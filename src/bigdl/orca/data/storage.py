"""Which storage a path is on, and the way to it: the ground of :mod:`bigdl.orca.data.file`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

from bigdl.common.errors import MissingExtraError, UsageError, require

__all__ = [
    "exists",
    "fresh_file_system",
    "is_file",
    "is_local_path",
    "joined",
    "open_file_system",
    "plain_path",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_HDFS = ("hdfs", "arrow_hdfs")


def is_local_path(path: str) -> bool:
    """Whether `path` is on this machine: without a scheme, ``file://`` or ``dbfs:/``."""
    return _SCHEME.match(plain_path(path)) is None


def plain_path(path: str | os.PathLike) -> str:
    """`path` without the schemes that mean a local path."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"A path must be a str, but got {path!r}")
    path = os.fspath(path)
    if path.startswith("file:/"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if path.startswith("dbfs:/"):
        return "/dbfs/" + path.removeprefix("dbfs:").lstrip("/")
    return path


def open_file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system that `path` is on, and the path within it.

    Raises
    ------
    MissingExtraError
        If the driver of the storage is not installed; the message has the line that installs it.
    UsageError
        If no storage has this scheme.
    """
    fsspec = require("fsspec", "orca")
    path = plain_path(path)
    scheme = _SCHEME.match(path)
    if scheme is None:
        return fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
    if scheme[1] in _HDFS:
        _find_hadoop_classes()
    try:
        fs, inside = fsspec.core.url_to_fs(path)
    except ImportError as error:
        from fsspec.registry import known_implementations

        package = known_implementations.get(scheme[1], {}).get("class", "fsspec").partition(".")[0]
        advice = f"run: pip install {package}" if package != "fsspec" else str(error)
        raise MissingExtraError(
            f"{path!r} needs a driver for {scheme[1]}:// that is not installed; {advice}"
        ) from error
    except ValueError as error:
        raise UsageError(f"The path {path!r} cannot be opened: {error}") from error
    except OSError as error:
        if scheme[1] not in _HDFS:
            raise
        reason = str(error).partition("\n")[0]  # the others are places without a libjvm.so
        raise UsageError(
            f"The path {path!r} cannot be opened ({reason}); HDFS needs a Hadoop client: set "
            "HADOOP_HOME and JAVA_HOME, and CLASSPATH to the output of `hadoop classpath --glob`"
        ) from error
    return fs, inside.rstrip("/") or inside


def _find_hadoop_classes() -> None:
    """libhdfs finds its Java classes by CLASSPATH only."""
    home = os.environ.get("HADOOP_HOME")
    hadoop = os.path.join(home, "bin", "hadoop") if home else shutil.which("hadoop")
    if os.environ.get("CLASSPATH") or not hadoop or not os.path.exists(hadoop):
        return
    found = subprocess.run([hadoop, "classpath", "--glob"], capture_output=True, text=True)
    if found.returncode == 0:
        os.environ["CLASSPATH"] = found.stdout.strip()


def fresh_file_system(path: str) -> tuple[Any, str]:
    """As :func:`open_file_system`, without listings that are remembered from before."""
    fs, inside = open_file_system(path)
    fs.invalidate_cache()
    return fs, inside


def exists(path: str) -> bool:
    """Whether there is a file or directory at `path`."""
    fs, inside = fresh_file_system(path)
    return fs.exists(inside)


def is_file(path: str) -> bool:
    """Whether there is a file, not a directory, at `path`."""
    fs, inside = fresh_file_system(path)
    return fs.isfile(inside)


def joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
