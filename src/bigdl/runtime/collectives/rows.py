"""Exchange of sharded embedding rows and their gradients between workers and owner ranks.

Every row belongs to one rank, its *owner*.  Row ``i`` of :class:`NumberedRows` belongs to rank
``i % world_size`` and is row ``i // world_size`` of its slice: frequent rows, which often have
consecutive ids, are distributed over all workers.  Other tables define the owner themselves.

A forward pass fetches rows in *rounds*.  In a round every rank announces the table that it reads,
if any, and the number of rows per owner.  Then ids are sent to the owners and rows are returned.  A
rank with an empty batch or a finished pass takes part until no rank reads
(:meth:`RowExchange.finish`). So ranks may read different tables, and a different number of times.
Gradients are returned by the same rounds, and an owner adds them in rank order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bigdl.runtime.collectives.base import GradientSync

_NOTHING = -1  # table number of a rank that reads no table


def rows_of_rank(rows: int, rank: int, world_size: int) -> int:
    """Return how many of a table's `rows` are stored on a rank."""
    return len(range(rank, rows, world_size))


class RowTable(Protocol):
    """Protocol of a sharded table, which maps ids to owner ranks and to row indices there.

    Attributes
    ----------
    numbers : int
        Integers that are sent per requested row.
    is_ordered : bool
        Whether the row indices of a request are unique and ascending.
    has_zero_row : bool
        Whether row 0 of every slice represents missing rows and gets no gradients.
    """

    numbers: int
    is_ordered: bool
    has_zero_row: bool

    @property
    def weight(self) -> torch.Tensor:
        """Table rows stored on this rank, as a two-dimensional CPU parameter."""
        ...

    def keys(self, ids: torch.Tensor, world_size: int) -> torch.Tensor:
        """Return a key for each id; sorted keys are grouped by owner rank, in rank order."""
        ...

    def ends(self, keys: torch.Tensor, world_size: int) -> list[int]:
        """Return the ``world_size + 1`` offsets that split sorted keys by owner rank."""
        ...

    def request(self, keys: torch.Tensor, counts: torch.Tensor, world_size: int) -> torch.Tensor:
        """Return the integers that request keys from owner ranks; `counts` are key frequencies."""
        ...

    def row_indices(self, requests: Sequence[tuple[Any, bool]]) -> list[Any]:
        """Return the requested row indices for each rank's (request, is_training) pair."""
        ...

    def end_step(self) -> None:
        """Finish a training step after the gradients of all ranks have arrived."""
        ...


class NumberedRows:
    """A table in which row ``i`` belongs to rank ``i % world_size``.

    Parameters
    ----------
    weight : torch.nn.Parameter
    rows : int
        Number of rows of the whole table.
    """

    numbers = 1
    is_ordered = True
    has_zero_row = False

    def __init__(self, weight: torch.Tensor, rows: int):
        self.weight: Any = weight
        self._rows = rows

    def _stride(self, world_size: int) -> int:
        return rows_of_rank(self._rows, 0, world_size)

    def keys(self, ids: torch.Tensor, world_size: int) -> torch.Tensor:
        return ids % world_size * self._stride(world_size) + ids // world_size

    def ends(self, keys: torch.Tensor, world_size: int) -> list[int]:
        import torch

        limits = torch.arange(world_size + 1) * self._stride(world_size)
        return torch.searchsorted(keys, limits).tolist()

    def request(self, keys: torch.Tensor, counts: torch.Tensor, world_size: int) -> torch.Tensor:
        return keys % self._stride(world_size)

    def row_indices(self, requests: Sequence[tuple[Any, bool]]) -> list[Any]:
        return [indices for indices, _ in requests]

    def end_step(self) -> None:
        pass


@dataclass
class _Round:
    """Record of one lookup round, used to send gradients back to the owners of the rows.

    Attributes
    ----------
    served : list of (int, int)
        Table and number of rows that each rank received from this rank.
    row_indices : list of torch.Tensor
        Indices of these rows in the slices, for each rank.
    leaf : torch.Tensor or None
        The rows that this rank received.
    counts : list of int
        Number of rows received from each owner.
    """

    served: list[tuple[int, int]]
    row_indices: list[Any]
    leaf: Any
    counts: list[int]


class Distinct:
    """The distinct values among the keys, and the mapping from each key to its distinct value.

    Parameters
    ----------
    keys : torch.Tensor
        Integers of any shape.

    Attributes
    ----------
    keys : torch.Tensor
        Distinct keys in ascending order.
    counts : torch.Tensor
        Number of occurrences of each distinct key.
    inverse : torch.Tensor
        Index of each key among the distinct keys, in one dimension.
    """

    def __init__(self, keys: torch.Tensor):
        import numpy as np
        import torch

        self._shape = keys.shape
        ordered, order = _sort_with_indices(keys.reshape(-1).numpy())
        is_first = np.ones(len(ordered), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        inverse = np.empty_like(order)
        inverse[order] = np.cumsum(is_first) - 1
        self.keys = torch.from_numpy(ordered[starts])
        self.counts = torch.from_numpy(np.diff(starts, append=len(ordered)))
        self.inverse = torch.from_numpy(inverse)
        self._order, self._starts = torch.from_numpy(order), torch.from_numpy(starts)

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Expand the rows of the distinct keys to one row per original key.

        The gradient of a row is the sum of its keys' gradients, in order.
        """
        expanded = _expand_function()(rows, self.inverse, self._order, self._starts)
        return expanded.view(*self._shape, rows.shape[1])


def _sort_with_indices(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted numbers and their former indices; equal numbers keep their order.

    Most keys are small enough to carry their indices in the lower bits while they are sorted, which
    is several times as fast.
    """
    import numpy as np

    bits = len(keys).bit_length()
    if not len(keys) or keys.min() < 0 or int(keys.max()) >> (63 - bits):
        order = np.argsort(keys, kind="stable")
        return keys[order], order
    both = keys << bits
    both |= np.arange(len(keys))
    both.sort()
    return both >> bits, both & ((1 << bits) - 1)


@functools.cache
def _expand_function() -> Callable[..., torch.Tensor]:
    """Import torch and return the autograd function that :meth:`Distinct.expand` applies."""
    import torch

    class ExpandRows(torch.autograd.Function):
        @staticmethod
        def forward(
            context: Any,
            rows: torch.Tensor,
            inverse: torch.Tensor,
            order: torch.Tensor,
            starts: torch.Tensor,
        ) -> torch.Tensor:
            context.save_for_backward(order, starts)
            return rows.index_select(0, inverse)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            order, starts = context.saved_tensors
            if not len(order):
                return gradient, None, None, None
            # torch's fastest sum of rows on a CPU
            rows = torch.embedding_bag(gradient.contiguous(), order, starts, mode=0)[0]
            return rows, None, None, None

    return ExpandRows.apply


class RowExchange:
    """Collective row lookups and gradient exchange for a model's sharded embedding tables.

    Parameters
    ----------
    sync : GradientSync
        A started sync.
    """

    def __init__(self, sync: GradientSync):
        self._sync = sync
        self._tables: list[RowTable] = []
        self._rounds: list[_Round] = []
        self._is_finished = False

    def add(self, table: RowTable) -> int:
        """Add a sharded table and return its index.

        Raises
        ------
        UsageError
            If its weight has another dtype than the other tables.
        """
        if self._tables and table.weight.dtype != self._tables[0].weight.dtype:
            raise UsageError(
                f"The sharded embeddings of a model need one dtype, got {table.weight.dtype} and "
                f"{self._tables[0].weight.dtype}",
                code="model-unsupported",
            )
        self._tables.append(table)
        return len(self._tables) - 1

    def begin(self) -> None:
        """Mark the start of a batch's forward pass."""
        self._is_finished = False

    def fetch(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`; transfer each distinct row and its gradient only once.

        Parameters
        ----------
        table : int
        ids : torch.Tensor
            Integer ids of any shape.

        Returns
        -------
        torch.Tensor
            Rows, with the shape of `ids` and the width of a row.
        """
        import torch

        rows, world_size = self._tables[table], self._sync.world_size
        wants_gradient = torch.is_grad_enabled() and rows.weight.requires_grad
        if wants_gradient and self._is_finished:
            raise UsageError(
                "A ShardedEmbedding was called after the forward pass of its batch, as activation "
                "checkpointing does; call it once, outside of the recomputed part",
                code="model-unsupported",
            )
        distinct = Distinct(rows.keys(ids, world_size))
        counts = [
            end - start for start, end in itertools.pairwise(rows.ends(distinct.keys, world_size))
        ]
        request = rows.request(distinct.keys, distinct.counts, world_size)
        received = self._round(table, request, counts, wants_gradient)
        return distinct.expand(cast("torch.Tensor", received))  # this rank reads a table

    def finish(self) -> None:
        """End a forward pass: serve rows to other ranks until every rank ends its forward pass."""
        import torch

        self._is_finished = True
        if self._sync.world_size > 1 and self._tables:
            nothing = torch.empty(0, dtype=torch.int64)
            while self._round(_NOTHING, nothing, [0] * self._sync.world_size, False) is not None:
                pass

    def _round(
        self, table: int, request: torch.Tensor, counts: list[int], wants_gradient: bool
    ) -> torch.Tensor | None:
        """Exchange rows with all ranks; return the requested rows, or None if no rank reads any."""
        import torch

        sync = self._sync
        everyone = sync.all_gather([table, wants_gradient, *counts])
        served = [(int(row[0]), int(row[2 + sync.rank])) for row in everyone]
        if all(read == _NOTHING for read, _ in served):
            return None
        numbers = [count * self._numbers(read) for read, count in served]
        received = sync.all_to_all(
            request, [count * self._numbers(table) for count in counts], numbers
        )
        is_training = [bool(row[1]) for row in everyone]
        row_indices = self._requested_rows(served, torch.split(received, numbers), is_training)
        nothing = self._tables[0].weight.new_empty(0)
        with torch.no_grad():
            replies = [
                self._tables[read].weight.index_select(0, indices).reshape(-1)
                for (read, count), indices in zip(served, row_indices, strict=True)
                if count
            ]
        width = self._width(table)
        rows = sync.all_to_all(
            _concatenate(replies or [nothing]),
            [count * self._width(read) for read, count in served],
            [count * width for count in counts],
        ).detach()
        rows = rows.view(sum(counts), width) if width else rows
        if any(is_training):
            leaf = rows.requires_grad_() if wants_gradient else None
            self._rounds.append(_Round(served, row_indices, leaf, counts))
        return rows

    def _requested_rows(
        self, served: list[tuple[int, int]], requests: Sequence[Any], is_training: list[bool]
    ) -> list[Any]:
        """Return the row indices that each rank requests."""
        row_indices = list(requests)
        for number in {read for read, count in served if count}:
            ranks = [rank for rank, (read, count) in enumerate(served) if read == number and count]
            requested = self._tables[number].row_indices(
                [(requests[r], is_training[r]) for r in ranks]
            )
            for rank, each in zip(ranks, requested, strict=True):
                row_indices[rank] = each
        return row_indices

    def _numbers(self, table: int) -> int:
        return 0 if table == _NOTHING else self._tables[table].numbers

    def _width(self, table: int) -> int:
        return 0 if table == _NOTHING else self._tables[table].weight.shape[1]

    def send_gradients(self, weight: float) -> None:
        """Set the gradient of each table's local rows to the sum of the ranks' weighted gradients.

        The sum is over all rounds since the last call.  As in
        :meth:`~bigdl.runtime.collectives.base.GradientSync.all_reduce_gradients` a table without a
        gradient on all ranks keeps None; a table with gradients on other ranks only gets an empty
        one.

        Parameters
        ----------
        weight : float
            Weight of this rank; 0 contributes nothing.
        """
        rounds, self._rounds = self._rounds, []
        sent: dict[int, list[tuple[Any, Any]]] = {}  # row indices and gradients by table
        flags = [bool(weight) and r.leaf is not None and r.leaf.grad is not None for r in rounds]
        everyone = self._sync.all_gather([float(flag) for flag in flags]) if rounds else []
        for number, (each, flag) in enumerate(zip(rounds, flags, strict=True)):
            has_sent = [bool(row[number]) for row in everyone]
            if not any(has_sent):
                continue
            gradient, send = self._tables[0].weight.new_empty(0), [0] * len(each.counts)
            if flag:
                gradient = each.leaf.grad if weight == 1.0 else each.leaf.grad * weight
                send = [count * gradient.shape[1] for count in each.counts]
                gradient = gradient.reshape(-1)
            receive = [
                count * self._width(read) if has else 0
                for (read, count), has in zip(each.served, has_sent, strict=True)
            ]
            gradient = self._sync.all_to_all(gradient, send, receive)
            values = gradient.split(receive)  # type: ignore[no-untyped-call]
            for rank, ((read, count), has) in enumerate(zip(each.served, has_sent, strict=True)):
                if has:
                    of_rank = values[rank].view(count, self._width(read))
                    sent.setdefault(read, []).append((each.row_indices[rank], of_rank))
        for number, table in enumerate(self._tables):
            table.weight.grad = _sum_pieces(table, sent[number]) if number in sent else None
            table.end_step()


def _concatenate(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors; return a single tensor without copying."""
    import torch

    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _sum_pieces(
    table: RowTable, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Return the sum of (row indices, values) pairs as a coalesced sparse tensor."""
    import torch

    indices = _concatenate([indices for indices, _ in pieces])[None]
    values = _concatenate([values for _, values in pieces])
    if table.has_zero_row:
        exists = indices[0] > 0
        indices, values = indices[:, exists], values[exists]
    # a single rank sends unique rows in order
    is_coalesced = len(pieces) == 1 and table.is_ordered
    return torch.sparse_coo_tensor(
        indices, values, table.weight.shape, check_invariants=False, is_coalesced=is_coalesced
    ).coalesce()
