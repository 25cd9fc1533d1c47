"""Files on this machine and on remote storages, accessed with fsspec."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import MissingExtraError, UsageError, require
from bigdl.common.hadoop import find_hadoop_classes
from bigdl.common.platform.files import sync_folder
from bigdl.common.private_folders import scratch_folder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_HDFS = ("hdfs", "arrow_hdfs")


def is_local_path(path: str) -> bool:
    """Return True if `path` is local: without a scheme, ``file://`` or ``dbfs:/``.

    Examples
    --------
    >>> from bigdl.orca.data.file import is_local_path
    >>> is_local_path("/data/ratings.csv"), is_local_path("hdfs://host/ratings.csv")
    (True, False)
    """
    return _SCHEME.match(plain_path(path)) is None


def is_local_storage(fs: AbstractFileSystem) -> bool:
    """Return True if an fsspec file system is the local file system."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def plain_path(path: str | os.PathLike[str]) -> str:
    """Return `path` without its scheme if the scheme denotes a local path.

    Examples
    --------
    >>> from bigdl.orca.data.file import plain_path
    >>> plain_path("file:///data/ratings.csv")
    '/data/ratings.csv'
    >>> plain_path("s3://bucket/ratings.csv")
    's3://bucket/ratings.csv'
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"A path must be a str, but got {path!r}", code="argument-type", argument="path"
        )
    path = os.fspath(path)
    if path.startswith("file:/"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if path.startswith("dbfs:/"):
        return "/dbfs/" + path.removeprefix("dbfs:").lstrip("/")
    return path


def open_file_system(path: str) -> tuple[Any, str]:
    """Return the fsspec file system of `path` and the path within it.

    Raises
    ------
    MissingExtraError
        If the driver of the storage is not installed; the message has the command to install it.
    UsageError
        If no storage has this scheme.

    Examples
    --------
    >>> from bigdl.orca.data.file import open_file_system
    >>> fs, inside = open_file_system("memory://data/ratings.csv")
    >>> fs.protocol, inside
    ('memory', '/data/ratings.csv')
    """
    fsspec = require("fsspec", "orca")
    path = plain_path(path)
    scheme = _SCHEME.match(path)
    if scheme is None:
        return fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
    if scheme[1] in _HDFS:
        find_hadoop_classes()
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
        raise UsageError(
            f"The path {path!r} cannot be opened: {error}", code="path-unusable", path=str(path)
        ) from error
    except OSError as error:
        if scheme[1] not in _HDFS:
            raise
        fs, inside = _hdfs_by_web(path, error)
    return fs, inside.rstrip("/") or inside


def fresh_file_system(path: str) -> tuple[Any, str]:
    """Return :func:`open_file_system`'s result with an empty listing cache.

    Examples
    --------
    >>> from bigdl.orca.data.file import fresh_file_system, write_text
    >>> _ = write_text("memory://runs/1.txt", "done")
    >>> fs, inside = fresh_file_system("memory://runs/1.txt")
    >>> fs.size(inside)
    4
    """
    fs, inside = open_file_system(path)
    fs.invalidate_cache()
    return fs, inside


def find_directory(path: str) -> tuple[Any, str]:
    """Return the file system of a directory and the path within it; raise if it is missing."""
    fs, inside = fresh_file_system(path)
    if not fs.isdir(inside):
        raise NotADirectoryError(f"There is no directory at {path!r}")
    return fs, inside


def exists(path: str) -> bool:
    """Return True if there is a file or directory at `path`.

    Examples
    --------
    >>> from bigdl.orca.data.file import exists, write_text
    >>> _ = write_text("notes.txt", "ab")
    >>> exists("notes.txt"), exists("no.txt")
    (True, False)
    """
    fs, inside = fresh_file_system(path)
    return bool(fs.exists(inside))


def joined(folder: str, name: str) -> str:
    """Join a folder and a file name into a path.

    Examples
    --------
    >>> from bigdl.orca.data.file import joined
    >>> joined("hdfs://host/data/", "part-0.csv")
    'hdfs://host/data/part-0.csv'
    """
    return f"{folder.rstrip('/')}/{name}"


def listdir(path: str) -> list[str]:
    """Return the sorted full paths of a directory's entries; local paths have no scheme.

    Examples
    --------
    >>> from bigdl.orca.data.file import listdir, makedirs, write_text
    >>> makedirs("memory://logs/old")
    >>> _ = write_text("memory://logs/run.txt", "done")
    >>> listdir("memory://logs")
    ['memory://logs/old', 'memory://logs/run.txt']
    """
    fs, inside = find_directory(path)
    entries = [entry.rstrip("/") for entry in fs.ls(inside, detail=False)]
    # an object store may list the directory itself, as a marker
    names = {posixpath.basename(e) for e in entries if e.strip("/") != inside.strip("/")}
    return [joined(plain_path(path), name) for name in sorted(names)]


def _hdfs_by_web(path: str, without: OSError) -> tuple[Any, str]:
    """Return the WebHDFS file system of a path if libhdfs cannot be used."""
    from bigdl.common.hdfs import open_webhdfs

    try:
        return open_webhdfs(path)
    except OSError as error:
        reasons = [str(each).partition("\n")[0] for each in (error, without)]
        raise UsageError(
            f"The path {path!r} cannot be opened, neither by WebHDFS ({reasons[0]}) nor by libhdfs "
            f"({reasons[1]}); set HADOOP_CONF_DIR to the directory of Hadoop's configuration "
            "files, and check that the name node runs",
            code="cluster-unreachable",
            path=str(path),
        ) from error


def read_bytes(url: str) -> bytes:
    """Read a file at any fsspec URL; raise a UsageError that names the URL on failure."""
    fs, path = open_file_system(url)
    try:
        return bytes(fs.cat_file(path))
    except OSError as error:
        raise UsageError(
            f"The file {url!r} cannot be read: {error}", code="path-unusable", path=str(url)
        ) from error


def write_bytes(url: str, data: bytes) -> None:
    """Write a file at any fsspec URL, atomically if the file is local."""
    fs, path = open_file_system(url)
    temporary = f"{path}.{secrets.token_hex(4)}"
    try:
        parent = posixpath.dirname(path)
        if parent:
            fs.makedirs(parent, exist_ok=True)
        if is_local_storage(fs):
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        else:
            fs.pipe_file(path, data)
    except OSError as error:
        if is_local_storage(fs):
            with contextlib.suppress(OSError):  # a partial file
                fs.rm_file(temporary)
        raise UsageError(
            f"The file {url!r} cannot be written: {write_reason(error, url)}",
            code="path-unusable",
            path=str(url),
        ) from error


def put_folder(source: str, url: str) -> None:
    """Copy a local folder to any fsspec URL; keep other files that exist there.

    On a local disk the files are written to a temporary folder and renamed, so no file is partial.

    Raises
    ------
    OSError
        If it cannot be written; a local disk is then unchanged.
    """
    fs, target = open_file_system(url)
    if not is_local_storage(fs):
        fs.makedirs(target, exist_ok=True)
        fs.put(f"{source}/", f"{target}/", recursive=True)
        return
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{os.path.basename(target)}.{secrets.token_hex(4)}")
    try:
        shutil.copytree(source, temporary, copy_function=shutil.copyfile)
        for folder, folders, files in os.walk(temporary):
            destination = os.path.normpath(os.path.join(target, os.path.relpath(folder, temporary)))
            for name in folders:
                os.makedirs(os.path.join(destination, name), exist_ok=True)
            os.makedirs(destination, exist_ok=True)
            for name in files:
                os.replace(os.path.join(folder, name), os.path.join(destination, name))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def committed_folder(folder: Path, what: str) -> Iterator[Path]:
    """Context manager of a temporary folder that is renamed when its files are on the disk.

    Parameters
    ----------
    folder : Path
        Final folder, which must not have files.
    what : str
        Content of the folder, for the message of an error.

    Raises
    ------
    UsageError
        If it cannot be written.
    """
    temporary = folder.with_name(f"new-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for each in temporary.iterdir():
            if each.is_file():
                with open(each, "rb+") as file:
                    os.fsync(file.fileno())
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        parent = str(folder.parent)
        raise UsageError(
            f"{what} cannot be written to {parent}: {write_reason(error, parent)}",
            code="path-unusable",
            path=parent,
        ) from error


_FULL = "free some space there, or choose another folder"
_REASONS = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the quota of this user is used up", _FULL),
    errno.EROFS: ("its file system is read-only", "choose a folder that can be written"),
    errno.EIO: ("the disk reports an input/output error", "choose a folder on another disk"),
    errno.EACCES: ("permission denied", "choose a folder that this user can write"),
    errno.EPERM: ("the operation is not permitted", "choose a folder that this user can write"),
    errno.EFBIG: ("it is larger than a file may be here", "raise the limit (ulimit -f)"),
    errno.EMFILE: ("this process has too many open files", "raise the limit (ulimit -n)"),
}


def write_reason(error: BaseException, path: str) -> str:
    """Return the reason for a failed write and the remedy, as the end of a sentence.

    Parameters
    ----------
    error : BaseException
    path : str
        The target; if its disk is full, the text includes the free space.

    Examples
    --------
    >>> import errno
    >>> from bigdl.common.storage import write_reason
    >>> write_reason(OSError(errno.EROFS, "Read-only file system"), "/mnt/models")
    'its file system is read-only; choose a folder that can be written'
    """
    known = _REASONS.get(getattr(error, "errno", None) or 0)
    if known is None:
        return " ".join(str(error).split()) or type(error).__name__
    reason, advice = known
    if advice is _FULL:
        reason += _free_space(path)
    return f"{reason}; {advice}"


def _free_space(path: str) -> str:
    """Return the free space of a local disk as text in brackets; empty if unknown."""
    if not is_local_path(path):
        return ""
    folder = os.path.abspath(os.path.expanduser(plain_path(path)))
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    unit, name = (2**20, "MiB") if usage.total >= 2**24 else (2**10, "KiB")
    return f" ({usage.free // unit} of {usage.total // unit} {name} are free)"


@contextlib.contextmanager
def writing(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager that raises a UsageError with path, reason and remedy if a write fails.

    Parameters
    ----------
    what : str
        Subject of the sentence, such as ``"The model"``.
    path : str or os.PathLike

    Raises
    ------
    UsageError
        Instead of an OSError of the block, or of another library's error that wraps one.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        cause = disk_error(error)
        if cause is None:
            raise
        path = os.fspath(path)
        raise UsageError(
            f"{what} cannot be written to {path!r}: {write_reason(cause, path)}",
            code="path-unusable",
            path=path,
        ) from error


_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "File too large": errno.EFBIG,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    "(Permission denied)": errno.EACCES,  # Java's text
    "Input/output error": errno.EIO,
}


def disk_error(error: BaseException) -> OSError | None:
    """Return the disk-related OSError in an error's causes or implied by its message, or None."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, OSError) and each.errno in _REASONS:
            return each
        each = each.__cause__ or each.__context__
    for text, number in _TEXTS.items():
        if text in str(error):
            return OSError(number, text)
    # torch's archive writer raises this for a short write
    phrases = ("PytorchStreamWriter failed writing", "unexpected pos")
    if isinstance(error, RuntimeError) and any(each in str(error) for each in phrases):
        return OSError(errno.ENOSPC, "No space left on device")
    return None


def file_exists(url: str) -> bool:
    """Return True if a file exists at any fsspec URL."""
    fs, path = open_file_system(url)
    return bool(fs.isfile(path))


def remove_file(url: str) -> None:
    """Remove a file at any fsspec URL, if it exists."""
    fs, path = open_file_system(url)
    if fs.isfile(path):
        fs.rm_file(path)


class RemoteFolder:
    """A temporary local folder whose files are uploaded to a URL.

    Parameters
    ----------
    url : str
    """

    def __init__(self, url: str):
        self._fs, self._root = open_file_system(url)
        self._folder = scratch_folder("callback")
        self._times: dict[str, int] = {}  # modification times of the uploaded files
        self.path = self._folder.name

    def upload(self) -> None:
        """Upload the folder's new and changed files."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                local = os.path.join(folder, name)
                changed = os.stat(local).st_mtime_ns
                if self._times.get(local) == changed:
                    continue
                self._times[local] = changed
                target = posixpath.join(self._root, os.path.relpath(local, self.path))
                self._fs.makedirs(posixpath.dirname(target), exist_ok=True)
                self._fs.put_file(local, target)
