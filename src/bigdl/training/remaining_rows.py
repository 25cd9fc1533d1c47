"""Rest of an epoch: rows that a fit has not read yet, shared by any number of workers.

A checkpoint within an epoch names these rows.  Every worker writes an id of each row that it would
have read, and workers of another number, whose parts of the data are cut in another way, find by
the ids which of their own rows are among them.  So every row is read once in the epoch, whatever
becomes of the workers.

The id of a row of columns is a hash of its bytes; rows that are equal to the last bit stand for
each other.  The id of a sample of a DataLoader is its index, which any worker can read.
"""

from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.training.slices import SavedSlices

IDS = "left"
"""Name of the ids in a checkpoint."""

LARGEST = 8 << 30
"""Bytes of a worker's rows up to which a checkpoint within an epoch names those that are left."""

_PIECE = 1 << 22  # bytes that are hashed at a time


class RemainingBatches(BatchPlan):
    """The batches that are left of an epoch, numbered from those that were made.

    Parameters
    ----------
    rows : sequence of int
        Rows that are left to each worker.
    batch_size : int
    drop_last : bool
    epoch : int
    first : int
        Batches of the epoch that were made.
    share : ndarray
        This worker's rows, see :meth:`~bigdl.training.batches.BatchSource.share_of_remaining`.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        drop_last: bool,
        *,
        epoch: int,
        first: int,
        share: np.ndarray,
    ):
        super().__init__(rows, batch_size, drop_last)
        self.epoch, self._first, self.share = epoch, first, share
        self.steps += first

    def batch(self, step: int, rank: int) -> tuple[int, int, int]:
        return super().batch(step - self._first, rank)


def row_ids(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """Hashes of rows: equal for rows that are equal to the last bit, else almost surely not.

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
        # texts are filled up with zeros, which add nothing, however long the longest one is
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
    """The same random numbers of 64 bits everywhere (SplitMix64; Steele et al. 2014)."""
    state = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def find_rows(ids: np.ndarray, left: SavedSlices, sync: GradientSync) -> np.ndarray:
    """Which of this worker's rows are left; a collective.

    Of equal rows as many are taken as are left, the first ones of the first ranks.

    Parameters
    ----------
    ids : ndarray of uint64
        Of all of this worker's rows.
    left : SavedSlices
    sync : GradientSync

    Returns
    -------
    ndarray of bool

    Raises
    ------
    UsageError
        If some rows that are left are nowhere.
    """
    import torch

    size, rank = sync.world_size, sync.rank
    unique, counts = np.unique(ids, return_counts=True)
    assigner = (unique % np.uint64(size)).astype(np.int64)  # the rank that shares out an id
    by_assigner = np.argsort(assigner, kind="stable")
    send = np.bincount(assigner, minlength=size).tolist()
    receive = [int(row[rank]) for row in sync.all_gather(list(map(float, send)))]

    def exchange(values: np.ndarray, there: list[int], back: list[int]) -> np.ndarray:
        return np.asarray(sync.all_to_all(torch.from_numpy(values), there, back).numpy())

    asked = exchange(unique[by_assigner].view(np.int64), send, receive).view(np.uint64)
    present = exchange(counts[by_assigner], send, receive)
    given, missing = _shared_out(_kept(left, rank, size), asked, present, receive)
    missing = int(sync.all_reduce(torch.tensor([missing]))[0])
    if missing:
        raise UsageError(
            f"The checkpoint was taken in the middle of an epoch, and {missing} of the rows that "
            "were left of it are not in the data now; go on with the same data, or from a "
            "checkpoint of an epoch's end",
            code="checkpoint-mismatch",
        )
    allowed = np.empty_like(counts)
    allowed[by_assigner] = exchange(given, receive, send)
    order = np.argsort(ids, kind="stable")
    number = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(ids), bool)
    found[order] = number < np.repeat(allowed, counts)
    return found


def _kept(left: SavedSlices, rank: int, size: int) -> np.ndarray:
    """The ids that are left and that a rank shares out."""
    pieces = []
    for owner in range(left.count(IDS)):
        piece = left.of_owner(IDS, owner)
        pieces.append(piece[piece % np.uint64(size) == rank])
    return np.concatenate(pieces)


def _shared_out(
    kept: np.ndarray, asked: np.ndarray, present: np.ndarray, sizes: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Share rows out to those who ask, in turn; returns how many each may take, and what is over.

    Parameters
    ----------
    kept : ndarray of uint64
    asked, present : ndarray
        Ids, and how many such rows there are; of one rank after another.
    sizes : sequence of int
        How many each rank has asked for.
    """
    keys, left = np.unique(kept, return_counts=True)
    given, start = np.zeros_like(present), 0
    for count in sizes:
        here = slice(start, start + count)
        place = np.searchsorted(keys, asked[here])
        is_known = place < len(keys)
        is_known[is_known] = keys[place[is_known]] == asked[here][is_known]
        places = place[is_known]
        taken = np.minimum(present[here][is_known], left[places])
        left[places] -= taken
        given[here][is_known] = taken
        start += count
    return given, int(left.sum())


def share_samples(left: SavedSlices, rank: int, size: int) -> np.ndarray:
    """This worker's part of the samples that are left, in their order."""
    owners = range(left.count(IDS))
    return np.concatenate([left.of_owner(IDS, owner) for owner in owners])[rank::size]


def as_ids(indices: np.ndarray) -> np.ndarray | None:
    """Indices of samples as ids; None if some are no whole numbers."""
    if indices.dtype == object and not all(
        isinstance(each, int | np.integer) and each >= 0 for each in indices
    ):
        return None
    return indices.astype(np.uint64)
