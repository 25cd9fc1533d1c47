"""Virtual shards: a row split and a summation order that do not depend on the worker count.

Floating-point sums depend on their order, and kernels on the batch shape and the number of threads.
So a fit with bitwise equal results for any number of workers computes with V *virtual shards*
(J. Or et al., "VirtualFlow", MLSys 2022; M. Li et al., "EasyScale", SC 2023, use fixed virtual
workers for the same purpose).  The contents of a row determine its shard and its position there.
Each worker has a block of consecutive shards, computes each shard's part of a global batch as a
separate micro-batch, and adds the results along a binary tree over all shards.  V and the number of
workers are powers of two, so the sums within a worker are whole subtrees, and the sums over workers
complete the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bigdl.runtime.collectives.base import GradientSync

DEFAULT_SHARDS = 8
"""Default number of virtual shards of a fit."""


def check_virtual_shards(count: int, workers: int) -> None:
    """Raise a UsageError unless `workers` workers can share `count` virtual shards.

    Parameters
    ----------
    count : int
        Number of virtual shards.
    workers : int
        Number of workers of the fit.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or count & (count - 1):
        raise UsageError(
            f"virtual_shards should be a power of two such as {DEFAULT_SHARDS}, got {count!r}",
            code="argument-value",
            argument="virtual_shards",
        )
    if workers > count or workers & (workers - 1):
        fitting = [1 << power for power in range(count.bit_length())]
        raise UsageError(
            f'exact="bits" with virtual_shards={count} runs on {_listed(fitting)} workers, here '
            f"are {workers}; change the number of workers or virtual_shards",
            code="argument-value",
            argument="virtual_shards",
        )


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def deal_rows(
    ids: np.ndarray,
    columns: Mapping[int, torch.Tensor],
    count: int,
    sync: GradientSync,
    of_ranks: Sequence[tuple[np.ndarray, Mapping[int, torch.Tensor]]] = (),
) -> list[tuple[np.ndarray, dict[int, torch.Tensor]]]:
    """Send each row to the worker that owns its virtual shard; a collective operation.

    Parameters
    ----------
    ids : ndarray of uint64, shape (rows,)
        Hashes of this worker's rows, see :func:`~bigdl.training.remaining_rows.row_ids`.
    columns : mapping of int to tensor, shape (rows, ...)
        Columns, with the same keys, dtypes and row shapes on all ranks.
    count : int
        Number of virtual shards of all workers.
    sync : GradientSync
    of_ranks : sequence of (ndarray, mapping), optional
        Ids and columns of all ranks, for a replacement of a lost worker, which no rank sends rows.

    Returns
    -------
    list of (ndarray of uint64, dict of int to tensor)
        Ids and columns of each virtual shard of this rank, sorted by id.
    """
    import torch

    rank, size = sync.rank, sync.world_size
    block = count // size
    if of_ranks:
        pieces = [_rows_of_rank(*each, count, block, rank) for each in of_ranks]
        received = {key: torch.cat([piece[1][key] for piece in pieces]) for key in columns}
        return _by_shard(
            np.concatenate([piece[0] for piece in pieces]), received, count, rank, block
        )
    shards = (ids % np.uint64(count)).astype(np.int64)
    order = np.lexsort((ids, shards))
    ids, ranks = ids[order], shards[order] // block
    send = np.bincount(ranks, minlength=size).tolist()
    with sync.unrecorded():
        counts = sync.all_gather([float(rows) for rows in send])
    receive = [int(row[rank]) for row in counts]

    def exchange(values: torch.Tensor) -> torch.Tensor:
        width = values.new_empty((1, *values.shape[1:])).nbytes
        if not width:
            return values.new_empty((sum(receive), *values.shape[1:]))
        octets = values.contiguous().view(-1).view(torch.uint8)
        received = sync.all_to_all(
            octets, [rows * width for rows in send], [rows * width for rows in receive]
        )
        return received.view(values.dtype).view(-1, *values.shape[1:])

    taken = torch.from_numpy(order)
    with sync.unrecorded():
        received = {key: exchange(each.index_select(0, taken)) for key, each in columns.items()}
        ids = exchange(torch.from_numpy(ids.view(np.int64))).numpy().view(np.uint64)
    return _by_shard(ids, received, count, rank, block)


def _rows_of_rank(
    ids: np.ndarray, columns: Mapping[int, torch.Tensor], count: int, block: int, rank: int
) -> tuple[np.ndarray, dict[int, torch.Tensor]]:
    """Return the rows that a rank receives from another one, in the order of the exchange."""
    import torch

    shards = (ids % np.uint64(count)).astype(np.int64)
    order = np.lexsort((ids, shards))
    order = order[shards[order] // block == rank]
    index = torch.from_numpy(order)
    return ids[order], {key: each.index_select(0, index) for key, each in columns.items()}


def _by_shard(
    ids: np.ndarray, received: Mapping[int, torch.Tensor], count: int, rank: int, block: int
) -> list[tuple[np.ndarray, dict[int, torch.Tensor]]]:
    """Divide the rows of a rank into its virtual shards, sorted by id."""
    import torch

    shards = (ids % np.uint64(count)).astype(np.int64)
    order = np.lexsort((ids, shards))
    ids, shards = ids[order], shards[order]
    edges = np.searchsorted(shards, np.arange(rank * block, (rank + 1) * block + 1))
    out = []
    for first, stop in itertools.pairwise(edges.tolist()):
        index = torch.from_numpy(order[first:stop])
        parts = {key: each.index_select(0, index) for key, each in received.items()}
        out.append((ids[first:stop], parts))
    return out


class TreeSum:
    """Sum of lists of tensors along a binary tree, with at most one list per level in memory.

    Examples
    --------
    >>> import torch
    >>> total = TreeSum()
    >>> for number in range(4):
    ...     total.add([torch.tensor([float(number)])])
    >>> total.take()
    [tensor([6.])]
    """

    def __init__(self) -> None:
        # (level, tensors), the lowest level last
        self._partial: list[tuple[int, list[torch.Tensor]]] = []

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Add the next leaf of the tree, whose tensors might be modified in place."""
        import torch

        level = 0
        while self._partial and self._partial[-1][0] == level:
            _, before = self._partial.pop()
            if before:
                torch._foreach_add_(before, tensors)
            tensors, level = before, level + 1
        self._partial.append((level, tensors))

    def take(self) -> list[torch.Tensor]:
        """Return the sum of the leaves, whose number is a power of two, and reset the tree."""
        ((_, tensors),) = self._partial
        self._partial = []
        return tensors
