"""Files that callbacks write, on any fsspec URL: they are written here and uploaded."""

from __future__ import annotations

import os
import posixpath
import tempfile
from typing import Any

__all__ = ["RemoteFolder", "redirect"]

_FILES, _FOLDERS = ("filepath", "filename"), ("log_dir", "backup_dir")


class RemoteFolder:
    """A local folder whose files go to a URL.

    Parameters
    ----------
    url : str
    """

    def __init__(self, url: str):
        import fsspec

        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._folder = tempfile.TemporaryDirectory(prefix="callback-")
        self._times: dict[str, float] = {}  # when what was uploaded had been changed
        self.path = self._folder.name

    def upload(self) -> None:
        """Upload the files that are new or have changed."""
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


def redirect(callback: Any) -> RemoteFolder | None:
    """Let a callback that writes to a URL write to a local folder instead.

    Returns
    -------
    RemoteFolder or None
        None for one that writes locally.
    """
    for attribute in (*_FILES, *_FOLDERS):
        url = getattr(callback, attribute, None)
        if isinstance(url, str) and "://" in url:
            parent, name = posixpath.split(url) if attribute in _FILES else (url, "")
            folder = RemoteFolder(parent)
            setattr(callback, attribute, os.path.join(folder.path, name))
            return folder
    return None
