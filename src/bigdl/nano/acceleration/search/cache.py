"""Searches that were made before.

Without a directory, the last few are kept as long as the process lives, so that a cell of a
notebook can be run again. With one they stay, each in a directory named by its key.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from pathlib import Path

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.search.results import Results

__all__ = ["Cache"]

_MOST = 4
_of_this_process: OrderedDict[str, Results] = OrderedDict()


class Cache:
    """Where results are looked up and put.

    Parameters
    ----------
    directory : str, path or None
        None: in this process only.
    """

    def __init__(self, directory: str | os.PathLike | None):
        self._directory = None if directory is None else Path(directory)

    def find(self, key: str | None) -> Results | None:
        """The results of an equal search."""
        if key is None:
            return None
        if self._directory is not None:
            return Results.read(self._directory / key)
        if key in _of_this_process:
            _of_this_process.move_to_end(key)
        return _of_this_process.get(key)

    def new_directory(self) -> Path:
        """An empty directory for the models of a search."""
        try:
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="bigdl-nano-optimize-", dir=self._directory))
        except OSError as error:
            raise UsageError(
                f"No directory can be made in cache_dir {self._directory}: {error.strerror}"
            ) from error

    def put(self, key: str | None, results: Results) -> None:
        """Keep results."""
        if key is None:
            return
        if self._directory is not None:
            results.keep(self._directory / key)
            return
        _of_this_process[key] = results
        while len(_of_this_process) > _MOST:
            _of_this_process.popitem(last=False)
