"""Rows that a fit has not read yet in an epoch, for any number of workers after a resume.

A mid-epoch checkpoint lists these rows.  Every worker writes an id for each row that it has not
read.  After a resume with another number of workers, which partition the data differently, each
worker looks its rows up by these ids.  So every row is read exactly once per epoch.

The id of a row of columns is a hash of its bytes; bitwise equal rows are interchangeable.  The id
of a sample of a DataLoader is its index, which any worker can read.
"""

from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.training.slices import SavedSlices

IDS = "left"
"""Name of the array of ids in a checkpoint."""

LARGEST = 8 << 30
"""Largest data of a worker, in bytes, whose remaining rows a mid-epoch checkpoint lists."""

_PIECE = 1 << 22  # bytes that are hashed at once


class RemainingBatches(BatchPlan):
    """Batch plan for the rest of an epoch, whose batch numbers continue from the finished batches.

    Parameters
    ----------
    rows : sequence of int
        Number of remaining rows of each worker.
    batch_size : int
    drop_last : bool
    epoch : int
    first : int
        Number of batches of the epoch that are done.
    share : ndarray or None
        This worker's rows, see :meth:`~bigdl.training.batches.BatchSource.share_of_remaining`; None
        for an epoch that continues with its next batch.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        drop_last: bool,
        *,
        epoch: int,
        first: int,
        share: np.ndarray | None,
    ):
        super().__init__(rows, batch_size, drop_last)
        self.epoch, self._first, self.share = epoch, first, share
        self.steps += first

    def batch(self, step: int, rank: int) -> tuple[int, int, int]:
        return super().batch(step - self._first, rank)


def row_ids(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Hash each row; equal rows get equal hashes, and different rows almost surely differ.

    Parameters
    ----------
    arrays : sequence of ndarray, shape (rows, ...)
    rows : int

    Returns
    -------
    ndarray of uint64, shape (rows,)

    Notes
    -----
    The upper halves of two multilinear functions of the row's 32 bit words (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2014).
    """
    hashes = np.stack([np.full(rows, each) for each in _random_words(2)])
    for number, array in enumerate(arrays, 1):
        width = -(-array[:1].nbytes // 4)
        # texts are padded with zeros, which do not change the hash
        factors = [_random_words(width, (2 * number + each) << 32) for each in range(2)]
        step = max(1, _PIECE // max(1, 4 * width))
        for start in range(0, rows, step):
            piece = np.ascontiguousarray(array[start : start + step])
            octets = piece.reshape(len(piece), -1).view(np.uint8)
            if octets.shape[1] < 4 * width:
                octets = np.pad(octets, ((0, 0), (0, 4 * width - octets.shape[1])))
            words = octets.view("<u4").astype(np.uint64)
            for each in range(2):
                hashes[each, start : start + len(piece)] += words @ factors[each]
    half = np.uint64(32)
    return np.asarray((hashes[0] >> half << half) | (hashes[1] >> half))


def _random_words(count: int, first: int = 0) -> np.ndarray:
    """Generate reproducible 64-bit random numbers (SplitMix64; Steele et al. 2014)."""
    state = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def find_rows(ids: np.ndarray, left: SavedSlices, sync: GradientSync) -> np.ndarray:
    """Return the mask of this worker's rows that the epoch has not read; a collective operation.

    Of n equal rows, as many are selected as remain, from the lowest ranks first.

    Parameters
    ----------
    ids : ndarray of uint64
        Ids of all of this worker's rows.
    left : SavedSlices
        Ids of the remaining rows.
    sync : GradientSync

    Returns
    -------
    ndarray of bool

    Raises
    ------
    UsageError
        If no worker has some of the remaining rows.
    """
    import torch

    size, rank = sync.world_size, sync.rank
    unique, counts = np.unique(ids, return_counts=True)
    assigner = (unique % np.uint64(size)).astype(np.int64)  # rank that assigns an id
    by_assigner = np.argsort(assigner, kind="stable")
    send = np.bincount(assigner, minlength=size).tolist()
    receive = [int(row[rank]) for row in sync.all_gather(list(map(float, send)))]

    def exchange(values: np.ndarray, there: list[int], back: list[int]) -> np.ndarray:
        return np.asarray(sync.all_to_all(torch.from_numpy(values), there, back).numpy())

    requested = exchange(unique[by_assigner].view(np.int64), send, receive).view(np.uint64)
    present = exchange(counts[by_assigner], send, receive)
    quotas, missing = _assign_rows(_kept(left, rank, size), requested, present, receive)
    missing = int(sync.all_reduce(torch.tensor([missing]))[0])
    if missing:
        raise UsageError(
            f"The checkpoint was taken in the middle of an epoch, and {missing} of its remaining "
            "rows are missing in the data; resume with the same data, or from a checkpoint at "
            "the end of an epoch",
            code="checkpoint-mismatch",
        )
    allowed = np.empty_like(counts)
    allowed[by_assigner] = exchange(quotas, receive, send)
    order = np.argsort(ids, kind="stable")
    number = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_remaining = np.empty(len(ids), bool)
    is_remaining[order] = number < np.repeat(allowed, counts)
    return is_remaining


def _kept(left: SavedSlices, rank: int, size: int) -> np.ndarray:
    """Return the ids of the remaining rows that `rank` assigns to workers."""
    pieces = []
    for owner in range(left.count(IDS)):
        piece = left.of_owner(IDS, owner)
        pieces.append(piece[piece % np.uint64(size) == rank])
    return np.concatenate(pieces)


def _assign_rows(
    kept: np.ndarray, requested: np.ndarray, present: np.ndarray, sizes: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Assign remaining rows to ranks; return each requested id's quota and the unassigned count.

    Parameters
    ----------
    kept : ndarray of uint64
        Ids of the remaining rows.
    requested, present : ndarray
        Ids that the ranks request, concatenated in rank order, and how many rows have each id.
    sizes : sequence of int
        Number of ids that each rank requests.
    """
    keys, left = np.unique(kept, return_counts=True)
    quotas, start = np.zeros_like(present), 0
    for count in sizes:
        of_rank = slice(start, start + count)
        index = np.searchsorted(keys, requested[of_rank])
        is_known = index < len(keys)
        is_known[is_known] = keys[index[is_known]] == requested[of_rank][is_known]
        known = index[is_known]
        quota = np.minimum(present[of_rank][is_known], left[known])
        left[known] -= quota
        quotas[of_rank][is_known] = quota
        start += count
    return quotas, int(left.sum())


def share_samples(left: SavedSlices, rank: int, size: int) -> np.ndarray:
    """Return this worker's part of the remaining samples, in order."""
    owners = range(left.count(IDS))
    return np.concatenate([left.of_owner(IDS, owner) for owner in owners])[rank::size]


def as_ids(indices: np.ndarray) -> np.ndarray | None:
    """Convert sample indices to ids, or return None unless all are non-negative integers."""
    if indices.dtype == object and not all(
        isinstance(each, int | np.integer) and each >= 0 for each in indices
    ):
        return None
    return indices.astype(np.uint64)
