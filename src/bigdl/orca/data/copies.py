"""Copies of files between this machine and any storage.

Besides the functions ``put_*`` and ``get_*`` these are the decorators ``enable_multi_fs_*``, which
make a function of local paths take those of any storage by way of a temporary copy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.storage import (
    exists,
    fresh_file_system,
    is_file,
    is_local_path,
    joined,
    plain_path,
)

__all__ = [
    "enable_multi_fs_load",
    "enable_multi_fs_load_static",
    "enable_multi_fs_save",
    "get_remote_dir_to_local",
    "get_remote_file_to_local",
    "get_remote_files_with_prefix_to_local",
    "put_local_dir_to_remote",
    "put_local_dir_tree_to_remote",
    "put_local_file_to_remote",
    "put_local_files_with_prefix_to_remote",
]

logger = logging.getLogger("bigdl.orca")


def put_local_file_to_remote(
    local_path: str, remote_path: str, filemode: int | None = None, over_write: bool = False
) -> int:
    """Copy a local file to any storage.

    Parameters
    ----------
    local_path : str
    remote_path : str
        A file to write, or an existing directory to write into.  The directories above it are
        made.
    filemode : int, optional
        Permissions of the copy, e.g. ``0o644``, where it is a local or mounted path.
    over_write : bool, default False
        Whether to replace a file that exists.

    Returns
    -------
    int
        0 when the file was copied, −1 when nothing was done because it exists already.

    Raises
    ------
    OSError
        If the file cannot be read or written.
    """
    source = _local(local_path)
    if not os.path.isfile(source):
        raise FileNotFoundError(f"There is no local file {local_path!r}")
    fs, target = fresh_file_system(remote_path)
    if remote_path.endswith("/") or fs.isdir(target):
        target = joined(target, os.path.basename(source))
    done = _put(source, fs, target, over_write)
    if done == 0 and filemode is not None:
        if _is_local(fs):
            os.chmod(target, filemode)
        else:
            logger.warning(
                "filemode has no effect on %s: its storage has no permissions of this kind",
                remote_path,
            )
    return done


def put_local_dir_to_remote(local_dir: str, remote_dir: str, over_write: bool = False) -> int:
    """Copy what is in a local directory, with all below it, into a directory on any storage.

    Returns
    -------
    int
        0 when every file was copied, −1 when some were left as they are because they exist
        already and `over_write` is False.
    """
    source = _local(local_dir)
    if not os.path.isdir(source):
        raise NotADirectoryError(f"There is no local directory {local_dir!r}")
    fs, target = fresh_file_system(remote_dir)
    fs.makedirs(target, exist_ok=True)
    results = [0]
    for folder, _, names in os.walk(source):
        below = os.path.relpath(folder, source)
        there = target if below == "." else joined(target, below)
        fs.makedirs(there, exist_ok=True)
        results += [
            _put(os.path.join(folder, name), fs, joined(there, name), over_write)
            for name in sorted(names)
        ]
    return min(results)


def put_local_dir_tree_to_remote(local_dir: str, remote_dir: str, over_write: bool = False) -> int:
    """The same as :func:`put_local_dir_to_remote`."""
    return put_local_dir_to_remote(local_dir, remote_dir, over_write)


def put_local_files_with_prefix_to_remote(
    local_path_prefix: str, remote_dir: str, over_write: bool = False
) -> int:
    """Copy the local files whose path starts with a prefix into a directory on any storage.

    Returns
    -------
    int
        As of :func:`put_local_dir_to_remote`.
    """
    folder, prefix = os.path.split(_local(local_path_prefix))
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    sources = [os.path.join(folder, name) for name in names if name.startswith(prefix)]
    sources = [source for source in sources if os.path.isfile(source)]
    if not sources:
        raise FileNotFoundError(f"There is no local file that starts with {local_path_prefix!r}")
    fs, target = fresh_file_system(remote_dir)
    fs.makedirs(target, exist_ok=True)
    return min(_put(s, fs, joined(target, os.path.basename(s)), over_write) for s in sources)


def get_remote_file_to_local(remote_path: str, local_path: str, over_write: bool = False) -> int:
    """Copy a file from any storage to this machine.

    The copy appears under its name when it is complete, so that several processes of a node may
    fetch the same file.

    Returns
    -------
    int
        0 when the file was copied, −1 when nothing was done because it exists already and
        `over_write` is False.
    """
    fs, source = fresh_file_system(remote_path)
    if not fs.isfile(source):
        raise FileNotFoundError(f"There is no file at {remote_path!r}")
    target = _local(local_path)
    if local_path.endswith("/") or os.path.isdir(target):
        target = os.path.join(target, posixpath.basename(source))
    return _get(fs, source, target, over_write)


def get_remote_dir_to_local(remote_dir: str, local_dir: str, over_write: bool = True) -> int:
    """Copy what is in a directory on any storage, with all below it, into a local directory.

    Returns
    -------
    int
        0 when every file was copied, −1 when some were left as they are because they exist
        already and `over_write` is False.
    """
    fs, source = fresh_file_system(remote_dir)
    if not fs.isdir(source):
        raise NotADirectoryError(f"There is no directory at {remote_dir!r}")
    target = _local(local_dir)
    os.makedirs(target, exist_ok=True)
    results = [0]
    for found, info in sorted(fs.find(source, withdirs=True, detail=True).items()):
        below = found.rstrip("/").lstrip("/")[len(source.lstrip("/")) :].strip("/")
        if not below:
            continue
        there = os.path.join(target, *below.split("/"))
        if info["type"] == "directory":
            os.makedirs(there, exist_ok=True)
        else:
            results.append(_get(fs, found, there, over_write))
    return min(results)


def get_remote_files_with_prefix_to_local(
    remote_path_prefix: str, local_dir: str, over_write: bool = True
) -> str:
    """Copy the files whose path starts with a prefix from any storage into a local directory.

    Returns
    -------
    str
        The prefix of the local paths.
    """
    folder, _, prefix = remote_path_prefix.rpartition("/")
    fs, source = fresh_file_system(folder or ".")
    found = fs.ls(source, detail=True) if fs.isdir(source) else []
    names = sorted(
        (posixpath.basename(entry["name"]), entry["name"])
        for entry in found
        if entry["type"] == "file" and posixpath.basename(entry["name"]).startswith(prefix)
    )
    if not names:
        raise FileNotFoundError(f"There is no file that starts with {remote_path_prefix!r}")
    target = _local(local_dir)
    for name, path in names:
        _get(fs, path, os.path.join(target, name), over_write)
    return os.path.join(target, prefix)


# -- functions of local paths ---------------------------------------------------------------------


def enable_multi_fs_load_static(load: Callable) -> Callable:
    """Make a function whose first parameter is a local path read from any storage."""
    return _with_local_copy(load, 0)


def enable_multi_fs_load(load: Callable) -> Callable:
    """Make a method whose first parameter, after ``self``, is a local path read from any storage.

    A remote file or directory is copied to a temporary one for the time of the call.
    """
    return _with_local_copy(load, 1)


def _with_local_copy(load: Callable, position: int) -> Callable:
    signature = inspect.signature(load)
    name = list(signature.parameters)[position]

    @functools.wraps(load)
    def from_any_storage(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        path = call.arguments[name]
        if is_local_path(path):
            call.arguments[name] = plain_path(path)
            return load(*call.args, **call.kwargs)
        with _temporary(path) as copy:
            if is_file(path):
                get_remote_file_to_local(path, copy)
            else:
                get_remote_dir_to_local(path, copy)
            call.arguments[name] = copy
            return load(*call.args, **call.kwargs)

    return from_any_storage


def enable_multi_fs_save(save: Callable) -> Callable:
    """Make a method whose first parameter, after ``self``, is a local path write to any storage.

    The method writes a temporary file or directory, which is then copied.  A file that exists is
    replaced unless the method has a parameter ``overwrite`` or ``over_write`` that is false.
    """
    signature = inspect.signature(save)
    name = list(signature.parameters)[1]

    @functools.wraps(save)
    def to_any_storage(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        path = call.arguments[name]
        if is_local_path(path):
            call.arguments[name] = plain_path(path)
            return save(*call.args, **call.kwargs)
        given = {**call.kwargs, **call.arguments}
        if not given.get("overwrite", given.get("over_write", True)) and exists(path):
            raise UsageError(f"{path!r} exists already; pass overwrite=True to replace it")
        with _temporary(path) as copy:
            call.arguments[name] = copy
            result = save(*call.args, **call.kwargs)
            if os.path.isdir(copy):
                put_local_dir_to_remote(copy, path, over_write=True)
            else:
                put_local_file_to_remote(copy, path, over_write=True)
            return result

    return to_any_storage


@contextlib.contextmanager
def _temporary(path: str) -> Iterator[str]:
    """A local path with the same last part as `path`, whose suffix may matter."""
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, posixpath.basename(path.rstrip("/")) or "data")


# -- one file -------------------------------------------------------------------------------------


def _local(path: str) -> str:
    if not is_local_path(path):
        raise UsageError(f"{path!r} must be a local path; a remote one is the other argument")
    return os.path.abspath(os.path.expanduser(plain_path(path)))


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _put(source: str, fs: Any, target: str, over_write: bool) -> int:
    if _is_local(fs):
        return _copy(lambda aside: shutil.copy(source, aside), target, over_write, source)
    if not over_write and fs.exists(target):
        return _left_alone(target)
    fs.makedirs(posixpath.dirname(target), exist_ok=True)
    fs.put_file(source, target)
    return 0


def _get(fs: Any, source: str, target: str, over_write: bool) -> int:
    if _is_local(fs):
        return _put(source, fs, target, over_write)
    return _copy(lambda aside: fs.get_file(source, aside), target, over_write)


def _copy(
    write: Callable[[str], Any], target: str, over_write: bool, source: str | None = None
) -> int:
    """Write a local file aside and rename it."""
    if os.path.exists(target):
        if source is not None and os.path.samefile(source, target):
            return 0
        if not over_write:
            return _left_alone(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    aside = f"{target}.{secrets.token_hex(4)}"
    try:
        write(aside)
        os.replace(aside, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return 0


def _left_alone(target: str) -> int:
    logger.warning("%s exists already and stays as it is; pass over_write=True", target)
    return -1
