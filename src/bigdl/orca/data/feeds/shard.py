"""A shard: the rows of one worker, as columns over memory-mapped files."""

from __future__ import annotations

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds.spool import Spool

__all__ = ["Shard"]


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
    """

    def __init__(self, spool: Spool):
        self.spool = spool
        self.rows = spool.rows
        self.fingerprint = spool.fingerprint
        self._arrays = spool.arrays()

    def column(self, name: str) -> np.ndarray | dict[str, np.ndarray]:
        """One column as an array of shape ``(rows, ...)``; a map column as a dict of them.

        The array is a private view of the page cache: do not write to it.
        """
        found = {
            leaf.key: array
            for leaf, array in zip(self.spool.leaves, self._arrays, strict=True)
            if leaf.column == name
        }
        if not found:
            names = sorted({leaf.column for leaf in self.spool.leaves})
            raise UsageError(f"The shard has no column '{name}'; it has {names}")
        return found.get(None, found)

    def __len__(self) -> int:
        return self.rows
