"""Spools of one table, mapped by every worker of their machine as one shard.

Each worker writes the spool of its part of a table.  A :class:`JoinedShard` maps those of a machine
into one range of addresses per column, so that a single gather reads any of their rows.  Nothing is
copied: the processes share the pages of the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigdl.common.platform.files import can_map_together, map_private, map_together
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.shard import Shard, Spool, open_private
from bigdl.runtime.shards.texts import is_text, widen_texts

_PIECE = 1 << 24  # bytes of text that are widened at once


def common_leaves(spools: Sequence[Spool]) -> list[ArraySpec] | None:
    """Return the array specs of the spools with the widest texts, or None if they cannot be joined.

    Parameters
    ----------
    spools : sequence of Spool
        Spools of one table; those without rows are ignored.
    """
    filled = [each.leaves for each in spools if each.rows]
    if not filled or any(len(leaves) != len(filled[0]) for leaves in filled):
        return None
    common: list[ArraySpec] = []
    for of_spools in zip(*filled, strict=True):
        widest = max(of_spools, key=lambda leaf: np.dtype(leaf.dtype).itemsize)
        for leaf in of_spools:
            both_texts = is_text(leaf.dtype) and is_text(widest.dtype)
            if leaf != (replace(widest, dtype=leaf.dtype) if both_texts else widest):
                return None
        common.append(widest)
    return common


def widen_spool(spool: Spool, leaves: Sequence[ArraySpec]) -> None:
    """Write the texts of a spool with the widths in `leaves` to additional files."""
    for number, (leaf, wide) in enumerate(zip(spool.leaves, leaves, strict=True)):
        if not spool.rows or leaf == wide:
            continue
        path = _path(spool, number, wide)
        size = spool.rows * int(np.prod(wide.shape)) * np.dtype(wide.dtype).itemsize
        if os.path.exists(path) and os.path.getsize(path) == size:
            continue  # a lost worker has written it, and others have mapped it
        with (
            open(os.path.join(spool.path, f"{number}.bin"), "rb") as source,
            open(path, "wb", opener=open_private) as target,
        ):
            width = np.dtype(leaf.dtype).itemsize
            while data := source.read(max(1, _PIECE // width) * width):
                target.write(np.ascontiguousarray(widen_texts(data, leaf.dtype, wide.dtype)).data)


def machine_of(rank: int, views: Sequence[Sequence[bool]]) -> list[int]:
    """Return the ranks that can map the same spools as a rank, which are all of their spools.

    Parameters
    ----------
    rank : int
    views : sequence of sequence of bool
        For each rank, whether it sees the spool of each rank.
    """
    if not can_map_together():
        return [rank]
    return [each for each, seen in enumerate(views) if list(seen) == list(views[rank])]


def _path(spool: Spool, number: int, leaf: ArraySpec) -> str:
    is_same = spool.leaves[number] == leaf
    return os.path.join(spool.path, f"{number}.bin" if is_same else f"{number}.wide.bin")


class JoinedShard(Shard):
    """The rows of several spools of one table, as one shard.

    Parameters
    ----------
    spools : sequence of Spool
        Spools on this machine; only a single one, where files cannot be mapped together.
    leaves : sequence of ArraySpec
        Result of :func:`common_leaves`; texts have been widened by :func:`widen_spool`.

    Attributes
    ----------
    rows : int
        Number of rows of the spools.
    arrays : list of ndarray
        Arrays with gaps between the spools, see :meth:`stored_rows`.
    """

    def __init__(self, spools: Sequence[Spool], leaves: Sequence[ArraySpec]):
        filled = sorted((each for each in spools if each.rows), key=_first_row)
        first = filled[0]
        self.spool = replace(
            first, rows=sum(each.rows for each in filled), leaves=list(leaves), fingerprint=0
        )
        self.rows, self.fingerprint = self.spool.rows, 0
        # a multiple of the page size in rows is one in bytes, too
        page, starts, end = mmap.PAGESIZE, [], 0
        for each in filled:
            starts.append(-(-end // page) * page)
            end = starts[-1] + each.rows
        self._ends = np.array([_first_row(each) + each.rows for each in filled])
        self._shifts = np.array(starts) - np.array([_first_row(each) for each in filled])
        self.arrays = [
            _map_all([_path(each, i, leaf) for each in filled], filled, starts, end, leaf)
            for i, leaf in enumerate(leaves)
        ]

    def stored_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices into :attr:`arrays` of rows of the table that the spools contain."""
        if len(self._ends) == 1:
            return rows + self._shifts[0] if self._shifts[0] else rows
        stored: np.ndarray = rows + self._shifts[np.searchsorted(self._ends, rows, side="right")]
        return stored


def _first_row(spool: Spool) -> int:
    assert spool.table is not None
    return int(spool.table["first"])


def _map_all(
    paths: Sequence[str], spools: Sequence[Spool], starts: Sequence[int], end: int, leaf: ArraySpec
) -> np.ndarray:
    """Map the files of one column, each at its first row, into one range of addresses."""
    shape = (end, *leaf.shape)
    width = int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
    if not end or not width:
        return np.empty(shape, leaf.dtype)
    if len(paths) == 1:
        with open(paths[0], "rb") as file:
            return np.frombuffer(map_private(file.fileno()), leaf.dtype).reshape(shape)
    files = [
        (path, start * width, spool.rows * width)
        for path, spool, start in zip(paths, spools, starts, strict=True)
    ]
    values: np.ndarray = np.frombuffer(map_together(files, end * width), leaf.dtype)
    return values.reshape(shape)
