"""Files on any storage, by one set of functions.

A path is a local one (plain, ``file://…`` or, on Databricks, ``dbfs:/…``, which is mounted at
``/dbfs``) or the URL of a remote storage: ``hdfs://``, ``s3://``, ``gs://``, ``abfs://`` and
whatever else fsspec knows.  Credentials are those of the storage's own driver, e.g.
``AWS_ACCESS_KEY_ID`` for S3.
"""

from __future__ import annotations

import io
import posixpath
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError
from bigdl.orca.data.copies import (
    enable_multi_fs_load,
    enable_multi_fs_load_static,
    enable_multi_fs_save,
    get_remote_dir_to_local,
    get_remote_file_to_local,
    get_remote_files_with_prefix_to_local,
    put_local_dir_to_remote,
    put_local_dir_tree_to_remote,
    put_local_file_to_remote,
    put_local_files_with_prefix_to_remote,
)
from bigdl.orca.data.storage import (
    exists,
    fresh_file_system,
    is_file,
    is_local_path,
    joined,
    open_file_system,
    plain_path,
)

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

__all__ = [
    "enable_multi_fs_load",
    "enable_multi_fs_load_static",
    "enable_multi_fs_save",
    "exists",
    "get_remote_dir_to_local",
    "get_remote_file_to_local",
    "get_remote_files_with_prefix_to_local",
    "is_file",
    "is_local_path",
    "listdir",
    "load_numpy",
    "makedirs",
    "open_file_system",
    "open_image",
    "open_text",
    "put_local_dir_to_remote",
    "put_local_dir_tree_to_remote",
    "put_local_file_to_remote",
    "put_local_files_with_prefix_to_remote",
    "read_bytes",
    "rmdir",
    "write_text",
]


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
    from bigdl.orca.data.image.utils import decode_image

    return decode_image(read_bytes(path), path)


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
