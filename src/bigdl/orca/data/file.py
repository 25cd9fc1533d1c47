"""Files on any storage, by one set of functions.

A path is a local one (plain, ``file://…`` or, on Databricks, ``dbfs:/…``, which is mounted at
``/dbfs``) or the URL of a remote storage: ``hdfs://``, ``s3://``, ``gs://``, ``abfs://`` and
whatever else fsspec knows.  Credentials are those of the storage's own driver, e.g.
``AWS_ACCESS_KEY_ID`` for S3.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import posixpath
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import MissingExtraError, UsageError, require

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

__all__ = [
    "enable_multi_fs_load",
    "enable_multi_fs_load_static",
    "enable_multi_fs_save",
    "exists",
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
    """The content of a file."""
    fs, inside = open_file_system(path)
    return fs.cat_file(inside)


def open_text(path: str) -> list[str]:
    """The lines of a text file in UTF-8, without the white space around them."""
    return [line.strip() for line in io.StringIO(read_bytes(path).decode("utf-8"))]


def open_image(path: str) -> PIL.Image.Image:
    """An image file as a ``PIL.Image.Image``, fully read, in the mode of the file.

    Raises
    ------
    UsageError
        If the file is not an image that Pillow can read.
    """
    return decode_image(read_bytes(path), path)


def decode_image(data: bytes, name: str) -> PIL.Image.Image:
    """The image in the bytes of an image file, in the mode of the file.

    Raises
    ------
    UsageError
        If it is none; the message has `name`.
    """
    pil = require("PIL.Image", "orca")
    try:
        with pil.open(io.BytesIO(data)) as image:
            return image.copy()  # of the class Image: pixels without the file
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise UsageError(f"{name!r} is not an image that Pillow can read: {error}") from error


def load_numpy(path: str) -> np.ndarray:
    """The content of a ``.npy`` file, or the arrays of a ``.npz`` file by name.

    Raises
    ------
    UsageError
        If the file holds Python objects, which would mean to run code that is in it.
    """
    import numpy as np

    try:
        return np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except ValueError as error:
        raise UsageError(
            f"{path!r} is no numpy file of plain numbers or strings ({error}); save it by "
            "numpy.save or numpy.savez from arrays that have no dtype object"
        ) from error


def listdir(path: str) -> list[str]:
    """The full paths of what is in a directory, sorted; local ones come without a scheme."""
    fs, inside = fresh_file_system(path)
    if not fs.isdir(inside):
        raise NotADirectoryError(f"There is no directory at {path!r}")
    entries = [entry.rstrip("/") for entry in fs.ls(inside, detail=False)]
    # an object store may list the directory itself, as a marker
    names = {posixpath.basename(e) for e in entries if e.strip("/") != inside.strip("/")}
    return [joined(plain_path(path), name) for name in sorted(names)]


def makedirs(path: str) -> None:
    """Make a directory and those above it; nothing happens if it exists."""
    fs, inside = open_file_system(path)
    fs.makedirs(inside, exist_ok=True)


def rmdir(path: str) -> None:
    """Remove a directory with everything in it."""
    fs, inside = fresh_file_system(path)
    if not fs.isdir(inside):
        raise NotADirectoryError(f"There is no directory at {path!r}")
    fs.rm(inside, recursive=True)


def write_text(path: str, text: str) -> int:
    """Write a text file in UTF-8, in place of what is there.

    Returns
    -------
    int
        Number of bytes written.
    """
    data = text.encode("utf-8")
    fs, inside = open_file_system(path)
    fs.pipe_file(inside, data)
    return len(data)


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
