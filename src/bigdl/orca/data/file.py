"""File functions for local and remote storage.

A path is local (plain, ``file://…`` or, on Databricks, ``dbfs:/…``, which is mounted at ``/dbfs``)
or the URL of remote storage: ``hdfs://``, ``s3://``, ``gs://``, ``abfs://`` and any other protocol
of fsspec.  Credentials are configured for the storage's driver, e.g. ``AWS_ACCESS_KEY_ID`` for S3.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import posixpath
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError, require
from bigdl.common.private_folders import scratch_folder
from bigdl.common.storage import (
    exists,
    find_directory,
    fresh_file_system,
    is_local_path,
    is_local_storage,
    joined,
    listdir,
    open_file_system,
    plain_path,
)

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    from fsspec import AbstractFileSystem

__all__ = [
    "enable_multi_fs_load",
    "enable_multi_fs_load_static",
    "enable_multi_fs_save",
    "exists",
    "files_of",
    "fresh_file_system",
    "get_remote_dir_to_local",
    "get_remote_file_to_local",
    "get_remote_files_with_prefix_to_local",
    "is_file",
    "is_local_path",
    "joined",
    "listdir",
    "load_numpy",
    "makedirs",
    "open_file_system",
    "open_image",
    "open_text",
    "plain_path",
    "put_local_dir_to_remote",
    "put_local_dir_tree_to_remote",
    "put_local_file_to_remote",
    "put_local_files_with_prefix_to_remote",
    "read_bytes",
    "rmdir",
    "write_text",
]

logger = logging.getLogger("bigdl.orca")


def read_bytes(path: str) -> bytes:
    """Read the content of a file.

    Examples
    --------
    >>> from bigdl.orca.data.file import read_bytes, write_text
    >>> _ = write_text("notes.txt", "ab")
    >>> read_bytes("notes.txt")
    b'ab'
    """
    fs, fs_path = open_file_system(path)
    return fs.cat_file(fs_path)


def open_text(path: str) -> list[str]:
    r"""Read the lines of a UTF-8 text file, with surrounding whitespace removed from each line.

    Examples
    --------
    >>> from bigdl.orca.data.file import open_text, write_text
    >>> _ = write_text("memory://names.txt", "Ada \nLin\n")
    >>> open_text("memory://names.txt")
    ['Ada', 'Lin']
    """
    return [line.strip() for line in io.StringIO(read_bytes(path).decode("utf-8"))]


def open_image(path: str) -> PIL.Image.Image:
    """Read an image file as a fully loaded ``PIL.Image.Image``, in the file's color mode.

    Raises
    ------
    UsageError
        If the file is not an image that Pillow can read.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca.data.file import open_image
    >>> Image.new("RGB", (4, 3), "red").save("red.png")
    >>> image = open_image("red.png")
    >>> image.size, image.getpixel((0, 0))
    ((4, 3), (255, 0, 0))
    """
    return decode_image(read_bytes(path), path)


def decode_image(data: bytes, name: str) -> PIL.Image.Image:
    """Decode the bytes of an image file, in the file's color mode.

    Raises
    ------
    UsageError
        If it is not an image; the message contains `name`.
    """
    pil = require("PIL.Image", "orca")
    if not data:
        raise UsageError(
            f"{name!r} is not an image: the file is empty", code="file-damaged", path=name
        )
    try:
        with pil.open(io.BytesIO(data)) as image:
            return image.copy()  # an Image that is independent of the file
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise UsageError(
            f"{name!r} is not an image that Pillow can read: {error}", code="file-format", path=name
        ) from error


def load_numpy(path: str) -> np.ndarray:
    """Load the array of a ``.npy`` file, or a mapping of the arrays of a ``.npz`` file.

    Raises
    ------
    UsageError
        If the file contains Python objects, whose unpickling could run arbitrary code.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.file import load_numpy
    >>> np.savez("data.npz", x=np.arange(3), y=np.ones(2))
    >>> load_numpy("data.npz")["x"]
    array([0, 1, 2])
    """
    import numpy as np

    try:
        return np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except ValueError as error:
        raise UsageError(
            f"{path!r} is not a numpy file of numbers or strings ({error}); save arrays without "
            "dtype object with numpy.save or numpy.savez",
            code="file-format",
            path=path,
        ) from error


def makedirs(path: str) -> None:
    """Create a directory and its parents if they do not exist.

    Examples
    --------
    >>> from bigdl.orca.data.file import exists, makedirs
    >>> makedirs("models/ncf/best")
    >>> exists("models/ncf")
    True
    """
    fs, fs_path = open_file_system(path)
    fs.makedirs(fs_path, exist_ok=True)


def rmdir(path: str) -> None:
    """Remove a directory and all its contents.

    Examples
    --------
    >>> from bigdl.orca.data.file import exists, makedirs, rmdir
    >>> makedirs("models/ncf")
    >>> rmdir("models")
    >>> exists("models")
    False
    """
    fs, fs_path = find_directory(path)
    fs.rm(fs_path, recursive=True)


def write_text(path: str, text: str) -> int:
    """Write a UTF-8 text file, replacing an existing file.

    Returns
    -------
    int
        Number of bytes written.

    Examples
    --------
    >>> from bigdl.orca.data.file import open_text, write_text
    >>> write_text("notes.txt", "zwölf")  # ö is two bytes
    6
    >>> open_text("notes.txt")
    ['zwölf']
    """
    data = text.encode("utf-8")
    fs, fs_path = open_file_system(path)
    fs.pipe_file(fs_path, data)
    return len(data)


def files_of(path: str, *, nested: bool = False) -> list[str]:
    """Return the sorted paths of the files at a path, in a directory or matching a glob pattern.

    In directories, names that start with ``_`` or ``.`` are ignored, as in Spark.

    Parameters
    ----------
    path : str
        Path or glob pattern.
    nested : bool
        Include files in subdirectories.

    Raises
    ------
    UsageError
        If there are no files.

    Examples
    --------
    >>> from bigdl.orca.data.file import files_of, makedirs, write_text
    >>> makedirs("table")
    >>> for name in ("part-1.csv", "part-0.csv", "_SUCCESS"):
    ...     _ = write_text(f"table/{name}", "1")
    >>> [path.rpartition("/")[2] for path in files_of("table")]
    ['part-0.csv', 'part-1.csv']
    """
    fs, fs_path = fresh_file_system(path)
    files: list[str] = []
    for match in [fs_path] if fs.exists(fs_path) else fs.glob(fs_path):
        if not fs.isdir(match):
            files.append(match)
            continue
        for each in fs.find(match) if nested else fs.ls(match, detail=False):
            names = each[len(match) :].strip("/").split("/")
            if not any(name.startswith(("_", ".")) for name in names) and fs.isfile(each):
                files.append(each)
    if not files:
        raise UsageError(f"There is no file at {path!r}", code="path-missing", path=path)
    return sorted(files if is_local_path(path) else map(fs.unstrip_protocol, files))


def is_file(path: str) -> bool:
    """Return True if `path` is an existing file, not a directory.

    Examples
    --------
    >>> from bigdl.orca.data.file import is_file, makedirs
    >>> makedirs("models")
    >>> is_file("models")
    False
    """
    fs, fs_path = fresh_file_system(path)
    return fs.isfile(fs_path)


def put_local_file_to_remote(
    local_path: str, remote_path: str, filemode: int | None = None, over_write: bool = False
) -> int:
    """Copy a local file to any storage.

    Parameters
    ----------
    local_path : str
    remote_path : str
        Target file, or existing target directory.  Parent directories are created.
    filemode : int, optional
        Permissions of the copy, e.g. ``0o644``, on local or mounted storage.
    over_write : bool, default False
        Replace an existing file.

    Returns
    -------
    int
        0 if the file was copied, −1 if the target exists and was kept.

    Raises
    ------
    OSError
        If the file cannot be read or written.

    Examples
    --------
    >>> from bigdl.orca.data.file import open_text, put_local_file_to_remote, write_text
    >>> _ = write_text("model.txt", "weights")
    >>> put_local_file_to_remote("model.txt", "memory://models/model.txt", over_write=True)
    0
    >>> open_text("memory://models/model.txt")
    ['weights']
    >>> put_local_file_to_remote("model.txt", "memory://models/model.txt")  # exists
    -1
    """
    local, source = _local(local_path)
    if not local.isfile(source):
        raise FileNotFoundError(f"There is no local file {local_path!r}")
    fs, target = fresh_file_system(remote_path)
    if remote_path.endswith("/") or fs.isdir(target):
        target = joined(target, os.path.basename(source))
    done = _copy_file(local, source, fs, target, over_write)
    if done == 0 and filemode is not None:
        if is_local_storage(fs):
            os.chmod(target, filemode)
        else:
            logger.warning(
                "filemode has no effect on %s: its storage does not support Unix permissions",
                remote_path,
            )
    return done


def put_local_dir_to_remote(local_dir: str, remote_dir: str, over_write: bool = False) -> int:
    """Copy the contents of a local directory, recursively, to a directory on any storage.

    Returns
    -------
    int
        0 if every file was copied, −1 if existing files were kept because `over_write` is False.

    Examples
    --------
    >>> from bigdl.orca.data.file import exists, makedirs, put_local_dir_to_remote, write_text
    >>> makedirs("model")
    >>> _ = write_text("model/weights.txt", "0.5")
    >>> put_local_dir_to_remote("model", "memory://published/model", over_write=True)
    0
    >>> exists("memory://published/model/weights.txt")
    True
    """
    _local(local_dir)
    return _copy_directory(*find_directory(local_dir), *fresh_file_system(remote_dir), over_write)


def put_local_dir_tree_to_remote(local_dir: str, remote_dir: str, over_write: bool = False) -> int:
    """Copy the contents of a local directory; same as :func:`put_local_dir_to_remote`.

    Examples
    --------
    >>> from bigdl.orca.data.file import exists, makedirs, put_local_dir_tree_to_remote, write_text
    >>> makedirs("logs/2024")
    >>> _ = write_text("logs/2024/run.txt", "done")
    >>> put_local_dir_tree_to_remote("logs", "memory://archive", over_write=True)
    0
    >>> exists("memory://archive/2024/run.txt")
    True
    """
    return put_local_dir_to_remote(local_dir, remote_dir, over_write)


def put_local_files_with_prefix_to_remote(
    local_path_prefix: str, remote_dir: str, over_write: bool = False
) -> int:
    """Copy local files whose path starts with a prefix to a directory on any storage.

    Returns
    -------
    int
        As in :func:`put_local_dir_to_remote`.

    Examples
    --------
    >>> from bigdl.orca.data.file import listdir, put_local_files_with_prefix_to_remote, write_text
    >>> for name in ("net.index", "net.data", "other"):
    ...     _ = write_text(name, "1")
    >>> put_local_files_with_prefix_to_remote("net.", "memory://nets", over_write=True)
    0
    >>> listdir("memory://nets")
    ['memory://nets/net.data', 'memory://nets/net.index']
    """
    _local(local_path_prefix)
    return _copy_prefix(local_path_prefix, *fresh_file_system(remote_dir), over_write)


def get_remote_file_to_local(remote_path: str, local_path: str, over_write: bool = False) -> int:
    """Copy a file from any storage to this machine.

    The copy is renamed to its final name when it is complete, so several processes of a node may
    fetch the same file.

    Returns
    -------
    int
        0 if the file was copied, −1 if the target exists and `over_write` is False.

    Examples
    --------
    >>> from bigdl.orca.data.file import get_remote_file_to_local, open_text, write_text
    >>> _ = write_text("memory://models/weights.txt", "0.5")
    >>> get_remote_file_to_local("memory://models/weights.txt", "weights.txt")
    0
    >>> open_text("weights.txt")
    ['0.5']
    """
    fs, source = fresh_file_system(remote_path)
    if not fs.isfile(source):
        raise FileNotFoundError(f"There is no file at {remote_path!r}")
    local, target = _local(local_path)
    if local_path.endswith("/") or local.isdir(target):
        target = joined(target, posixpath.basename(source))
    return _copy_file(fs, source, local, target, over_write)


def get_remote_dir_to_local(remote_dir: str, local_dir: str, over_write: bool = True) -> int:
    """Copy the contents of a directory on any storage, recursively, to a local directory.

    Returns
    -------
    int
        0 if every file was copied, −1 if existing files were kept because `over_write` is False.

    Examples
    --------
    >>> from bigdl.orca.data.file import get_remote_dir_to_local, open_text, write_text
    >>> _ = write_text("memory://models/best/weights.txt", "0.5")
    >>> get_remote_dir_to_local("memory://models/best", "best")
    0
    >>> open_text("best/weights.txt")
    ['0.5']
    """
    return _copy_directory(*find_directory(remote_dir), *_local(local_dir), over_write)


def get_remote_files_with_prefix_to_local(
    remote_path_prefix: str, local_dir: str, over_write: bool = True
) -> str:
    """Copy files whose path starts with a prefix from any storage to a local directory.

    Returns
    -------
    str
        The prefix of the local paths.

    Examples
    --------
    >>> from bigdl.orca.data.file import get_remote_files_with_prefix_to_local, listdir, write_text
    >>> for name in ("net.index", "net.data", "other"):
    ...     _ = write_text(f"memory://saved/{name}", "1")
    >>> prefix = get_remote_files_with_prefix_to_local("memory://saved/net", "copy")
    >>> listdir("copy")
    ['copy/net.data', 'copy/net.index']
    >>> prefix.endswith("copy/net")
    True
    """
    local, target = _local(local_dir)
    _copy_prefix(remote_path_prefix, local, target, over_write)
    return joined(target, posixpath.basename(remote_path_prefix))


# -- functions of local paths ---------------------------------------------------------------------


def enable_multi_fs_load_static(load: Callable) -> Callable:
    """Decorate a function whose first parameter is a local path, so that it reads any storage.

    Examples
    --------
    >>> from bigdl.orca.data.file import enable_multi_fs_load_static, write_text
    >>> @enable_multi_fs_load_static
    ... def first_line(path):
    ...     with open(path) as file:  # supports local files only
    ...         return file.readline()
    >>> _ = write_text("memory://log.txt", "started")
    >>> first_line("memory://log.txt")
    'started'
    """
    return _accept_any_path(load, 0, _downloaded)


def enable_multi_fs_load(load: Callable) -> Callable:
    """Decorate a method whose first parameter is a local path, so that it reads any storage.

    The first parameter follows ``self``.  A remote file or directory is copied to a temporary local
    one for the duration of the call.

    Examples
    --------
    >>> from bigdl.orca.data.file import enable_multi_fs_load, write_text
    >>> class Model:
    ...     @enable_multi_fs_load
    ...     def load(self, path):
    ...         with open(path) as file:  # supports local files only
    ...             self.weight = float(file.read())
    >>> _ = write_text("memory://weight.txt", "0.5")
    >>> model = Model()
    >>> model.load("memory://weight.txt")
    >>> model.weight
    0.5
    """
    return _accept_any_path(load, 1, _downloaded)


def enable_multi_fs_save(save: Callable) -> Callable:
    """Decorate a method whose first parameter is a local path, so that it writes to any storage.

    The first parameter follows ``self``.  The method writes a temporary local file or directory,
    which is then copied.  An existing file is replaced unless the method's parameter ``overwrite``
    or ``over_write`` is False.

    Examples
    --------
    >>> from bigdl.orca.data.file import enable_multi_fs_save, open_text
    >>> class Model:
    ...     @enable_multi_fs_save
    ...     def save(self, path):
    ...         with open(path, "w") as file:  # supports local files only
    ...             _ = file.write("0.5")
    >>> Model().save("memory://weight.txt")
    >>> open_text("memory://weight.txt")
    ['0.5']
    """
    return _accept_any_path(save, 1, _uploaded)


def _accept_any_path(function: Callable, position: int, local_path: Callable) -> Callable:
    """Wrap a function so that it gets ``local_path(path, overwrite)`` instead of a remote path."""
    signature = inspect.signature(function)
    name = list(signature.parameters)[position]

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        call = signature.bind(*args, **kwargs)
        path = call.arguments[name]
        if is_local_path(path):
            call.arguments[name] = plain_path(path)
            return function(*call.args, **call.kwargs)
        call.apply_defaults()
        options = {**call.kwargs, **call.arguments}
        overwrite = options.get("overwrite", options.get("over_write", True))
        with local_path(path, overwrite) as call.arguments[name]:
            return function(*call.args, **call.kwargs)

    return wrapper


@contextlib.contextmanager
def _downloaded(path: str, overwrite: bool) -> Iterator[str]:
    """Context manager that yields a temporary local copy of a remote file or directory."""
    with _temporary(path) as copy:
        get = get_remote_file_to_local if is_file(path) else get_remote_dir_to_local
        get(path, copy)
        yield copy


@contextlib.contextmanager
def _uploaded(path: str, overwrite: bool) -> Iterator[str]:
    """Context manager that yields a local path and copies its content to a remote path on exit."""
    if not overwrite and exists(path):
        raise UsageError(
            f"{path!r} exists already; pass overwrite=True to replace it",
            code="path-exists",
            path=path,
        )
    with _temporary(path) as copy:
        yield copy
        put = put_local_dir_to_remote if os.path.isdir(copy) else put_local_file_to_remote
        put(copy, path, over_write=True)


@contextlib.contextmanager
def _temporary(path: str) -> Iterator[str]:
    """Context manager that yields a temporary local path with the base name of `path`."""
    with scratch_folder("file") as folder:
        yield os.path.join(folder, posixpath.basename(path.rstrip("/")) or "data")


# -- from one storage to another -------------------------------------------------------------------


def _local(path: str) -> tuple[Any, str]:
    if not is_local_path(path):
        raise UsageError(
            f"{path!r} must be a local path; pass the remote path as the other argument",
            code="argument-value",
            path=path,
        )
    return open_file_system(path)


def _copy_directory(
    source_fs: AbstractFileSystem,
    source: str,
    target_fs: AbstractFileSystem,
    target: str,
    over_write: bool,
) -> int:
    """Copy the contents of a directory; return −1 if any existing file was kept, else 0."""
    target_fs.makedirs(target, exist_ok=True)
    results = [0]
    for path, info in sorted(source_fs.find(source, withdirs=True, detail=True).items()):
        relative = path.strip("/")[len(source.strip("/")) :].strip("/")
        if not relative:
            continue
        is_link = info["type"] == "other"
        if info["type"] == "directory" or (is_link and source_fs.isdir(path)):
            target_fs.makedirs(joined(target, relative), exist_ok=True)
        else:
            results.append(
                _copy_file(source_fs, path, target_fs, joined(target, relative), over_write)
            )
    return min(results)


def _copy_prefix(
    path_prefix: str, target_fs: AbstractFileSystem, target: str, over_write: bool
) -> int:
    """Copy the files with a path prefix; return −1 if any existing file was kept, else 0."""
    folder, slash, prefix = path_prefix.rpartition("/")
    fs, fs_path = fresh_file_system(folder or slash or ".")
    paths = sorted(fs.ls(fs_path, detail=False)) if fs.isdir(fs_path) else []
    paths = [p for p in paths if posixpath.basename(p).startswith(prefix) and fs.isfile(p)]
    if not paths:
        raise FileNotFoundError(f"There is no file that starts with {path_prefix!r}")
    return min(
        _copy_file(fs, path, target_fs, joined(target, posixpath.basename(path)), over_write)
        for path in paths
    )


def _copy_file(
    source_fs: AbstractFileSystem,
    source: str,
    target_fs: AbstractFileSystem,
    target: str,
    over_write: bool,
) -> int:
    """Copy a file from or to this machine; a local copy appears atomically.

    Returns
    -------
    int
        0 if the file was copied, −1 if an existing target was kept.
    """
    from_local, to_local = is_local_storage(source_fs), is_local_storage(target_fs)
    if from_local and to_local and os.path.exists(target) and os.path.samefile(source, target):
        return 0
    if not over_write and target_fs.exists(target):
        logger.warning("%s already exists and is kept; pass over_write=True to replace it", target)
        return -1
    target_fs.makedirs(posixpath.dirname(target), exist_ok=True)
    if not to_local:
        target_fs.put_file(source, target)
        return 0
    temporary = f"{target}.{secrets.token_hex(4)}"
    try:
        copy = shutil.copy if from_local else source_fs.get_file
        copy(source, temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return 0
