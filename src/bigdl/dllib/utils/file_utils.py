"""BigDL 2.x's import path of :mod:`bigdl.orca.data.file`."""

from bigdl.orca.data import file
from bigdl.orca.data.file import *  # noqa: F403

__all__ = [*file.__all__, "mkdirs"]

mkdirs = file.makedirs


def put_local_file_to_remote(  # type: ignore[no-redef]  # without the permissions
    local_path: str, remote_path: str, over_write: bool = False
) -> int:
    """Copy a local file to a remote path; return 0, or −1 if the target exists."""
    return file.put_local_file_to_remote(local_path, remote_path, over_write=over_write)
