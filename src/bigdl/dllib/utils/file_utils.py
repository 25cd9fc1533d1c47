"""The import path that programs for BigDL 2.x use; see :mod:`bigdl.orca.data.file`."""

from bigdl.orca.data import file
from bigdl.orca.data.file import (
    enable_multi_fs_load,
    enable_multi_fs_load_static,
    enable_multi_fs_save,
    exists,
    get_remote_dir_to_local,
    get_remote_file_to_local,
    get_remote_files_with_prefix_to_local,
    is_local_path,
    put_local_dir_to_remote,
    put_local_files_with_prefix_to_remote,
)

__all__ = [
    "enable_multi_fs_load",
    "enable_multi_fs_load_static",
    "enable_multi_fs_save",
    "exists",
    "get_remote_dir_to_local",
    "get_remote_file_to_local",
    "get_remote_files_with_prefix_to_local",
    "is_local_path",
    "mkdirs",
    "put_local_dir_to_remote",
    "put_local_file_to_remote",
    "put_local_files_with_prefix_to_remote",
]

mkdirs = file.makedirs


def put_local_file_to_remote(local_path: str, remote_path: str, over_write: bool = False) -> int:
    """Copy a local file to any storage: 0 when it was copied, −1 when it exists already."""
    return file.put_local_file_to_remote(local_path, remote_path, over_write=over_write)
