"""A shard: the rows of one worker, as columns over memory-mapped files."""

from __future__ import annotations

import os

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.spool import Spool

__all__ = ["LOADER_FILE", "LoaderShard", "Shard", "open_shard"]

LOADER_FILE = "loader.pkl"
"""Name of the file of a spool that holds a pickled loader."""


class Shard:
    """The rows that one worker was given.

    Parameters
    ----------
    spool : Spool

    Attributes
    ----------
    rows : int
    fingerprint : int
        Equal for equal rows in equal order.
    arrays : list of ndarray
        The mapped arrays; scalar columns of one dtype are the columns of one of them.
    """

    def __init__(self, spool: Spool):
        self.spool = spool
        self.rows = spool.rows
        self.fingerprint = spool.fingerprint
        self.arrays = spool.arrays()

    def places(self, name: str) -> dict[str | None, tuple[int, int | None]]:
        """Where a column is: by map key (None for other columns), the number of the array and the
        column within it (None for all of it)."""
        found = {}
        for i, leaf in enumerate(self.spool.leaves):
            if leaf.column == name:
                found[leaf.key] = (i, None)
            elif isinstance(leaf.column, tuple) and name in leaf.column:
                found[None] = (i, leaf.column.index(name))
        if not found and name not in self.spool.columns:
            raise UsageError(f"The shard has no column '{name}'; it has {self.names}")
        return found

    @property
    def names(self) -> list[str]:
        """The columns."""
        return list(self.spool.columns)

    def column(self, name: str) -> np.ndarray | dict[str, np.ndarray]:
        """One column as an array of shape ``(rows, ...)``; a map column as a dict of them.

        The array is a private view of the page cache: do not write to it.  Without rows the
        lengths of arrays and the keys of maps may be unknown: they are 0 and none then.
        """
        found = {
            key: self.arrays[i] if j is None else self.arrays[i][:, j]
            for key, (i, j) in self.places(name).items()
        }
        return found.get(None, found)

    def __len__(self) -> int:
        return self.rows


class LoaderShard:
    """A worker's part of a loader that is read live; it knows its rows once it is opened.

    Parameters
    ----------
    spool : Spool
        Without rows; its directory holds the pickled loader.
    """

    rows = 0
    fingerprint = 0

    def __init__(self, spool: Spool):
        self.spool = spool

    def payload(self) -> bytes:
        """The pickled loader, or the function that makes it."""

        with open(os.path.join(self.spool.path, LOADER_FILE), "rb") as file:
            return file.read()


def open_shard(spool: Spool) -> Shard | LoaderShard:
    """The shard over a finished spool."""

    is_loader = os.path.exists(os.path.join(spool.path, LOADER_FILE))
    return LoaderShard(spool) if is_loader else Shard(spool)
