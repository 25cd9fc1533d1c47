"""Rows of tables that lie in slices on the workers, fetched by id and given their gradients.

Row ``i`` of a table belongs to rank ``i % world_size``, its *owner*, and is row
``i // world_size`` of the owner's slice: frequent rows, which often have neighbouring ids, are
spread over all workers.

A forward pass fetches rows in *rounds*.  In a round every rank says which table it reads, if any,
and how many rows of each owner; then ids go to the owners and rows come back.  A rank that has
nothing to read, because its batch is empty or its pass has ended, takes part until nobody reads any
more (:meth:`RowExchange.finish`), so ranks may read different tables, and not equally often.
Gradients go back by the same rounds, and an owner adds them up in rank order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.runtime.collectives.base import GradientSync

_NOTHING = -1  # instead of a table's number


def rows_of_rank(rows: int, rank: int, world_size: int) -> int:
    """Return how many of a table's rows a rank owns."""
    return len(range(rank, rows, world_size))


@dataclass
class _Round:
    """A round whose rows can get gradients.

    Attributes
    ----------
    asked : list of (int, int)
        Table and number of rows that each rank got from this one.
    places : torch.Tensor
        Of these rows in the slices, in rank order.
    leaf : torch.Tensor or None
        The rows that this rank got.
    counts : list of int
        Rows that this rank got from each owner.
    """

    asked: list[tuple[int, int]]
    places: Any
    leaf: Any
    counts: list[int]


class Distinct:
    """The distinct values of some keys, and how rows of these become rows of those.

    Parameters
    ----------
    keys : torch.Tensor
        Of integers, of any shape.

    Attributes
    ----------
    keys : torch.Tensor
        Each once, in ascending order.
    """

    def __init__(self, keys: Any):
        import torch

        self._shape = keys.shape
        ordered, self._order = torch.sort(keys.reshape(-1), stable=True)
        is_first = torch.ones(len(ordered), dtype=torch.bool)
        torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
        self._starts = torch.nonzero(is_first)[:, 0]
        self.keys = ordered[self._starts]
        self._places = torch.empty_like(self._order)
        self._places[self._order] = is_first.cumsum(0) - 1

    def spread(self, rows: Any) -> Any:
        """Return a row for each of all keys, of the rows of the distinct ones.

        The gradient of a row is the sum of those of its keys, in their order.
        """
        return _spread()(rows, self._places, self._order, self._starts).view(
            *self._shape, rows.shape[1]
        )


@functools.cache
def _spread() -> Any:
    """Return the function of :meth:`Distinct.spread`; torch is imported where it is used."""
    import torch

    class Spread(torch.autograd.Function):
        @staticmethod
        def forward(context, rows, places, order, starts):
            context.save_for_backward(order, starts)
            return rows.index_select(0, places)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context, gradient):
            order, starts = context.saved_tensors
            if not len(order):
                return gradient, None, None, None
            # by far the fastest sum of rows that torch has on a CPU
            rows = torch.embedding_bag(gradient.contiguous(), order, starts, mode=0)[0]
            return rows, None, None, None

    return Spread.apply


class RowExchange:
    """The tables of a model on all workers; its methods are collectives.

    Parameters
    ----------
    sync : GradientSync
        That has started.
    """

    def __init__(self, sync: GradientSync):
        self._sync = sync
        self._weights: list[Any] = []
        self._rows: list[int] = []
        self._rounds: list[_Round] = []
        self._is_finished = False

    def add(self, weight: Any, rows: int) -> int:
        """Add a table; returns its number.

        Parameters
        ----------
        weight : torch.nn.Parameter
            This rank's slice, of two dimensions, on the CPU.
        rows : int
            Of the whole table.

        Raises
        ------
        UsageError
            If it has not the dtype of the others.
        """
        if self._weights and weight.dtype != self._weights[0].dtype:
            raise UsageError(
                f"The sharded embeddings of a model need one dtype, got {weight.dtype} and "
                f"{self._weights[0].dtype}"
            )
        self._weights.append(weight)
        self._rows.append(rows)
        return len(self._weights) - 1

    def begin(self) -> None:
        """Before the forward pass of a batch."""
        self._is_finished = False

    def fetch(self, table: int, ids: Any) -> Any:
        """Return the rows of some ids; each is sent once, and so is its gradient.

        Parameters
        ----------
        table : int
        ids : torch.Tensor
            Integers of any shape, from 0 to below the number of the table's rows.

        Returns
        -------
        torch.Tensor
            Of the shape of `ids`, and the width of a row.
        """
        import torch

        weight, world_size = self._weights[table], self._sync.world_size
        wants_gradient = torch.is_grad_enabled() and weight.requires_grad
        if wants_gradient and self._is_finished:
            raise UsageError(
                "A ShardedEmbedding was called after the forward pass of its batch, as activation "
                "checkpointing does; call it once, outside of what is computed again"
            )
        stride = rows_of_rank(self._rows[table], 0, world_size)
        # sorted by owner, then by place
        distinct = Distinct(ids % world_size * stride + ids // world_size)
        keys = distinct.keys
        limits = torch.arange(world_size + 1) * stride
        ends = torch.searchsorted(keys, limits).tolist()
        counts = [end - start for start, end in itertools.pairwise(ends)]
        return distinct.spread(self._round(table, keys % stride, counts, wants_gradient))

    def finish(self) -> None:
        """After a forward pass, or instead of one: give others their rows until all have ended."""
        import torch

        self._is_finished = True
        if self._sync.world_size > 1 and self._weights:
            nothing = torch.empty(0, dtype=torch.int64)
            while self._round(_NOTHING, nothing, [0] * self._sync.world_size, False) is not None:
                pass

    def _round(self, table: int, places: Any, counts: list[int], wants_gradient: bool) -> Any:
        """Return the rows at some places of the owners' slices; None if nobody reads."""
        import torch

        sync = self._sync
        everyone = sync.all_gather([table, wants_gradient, *counts])
        asked = [(int(row[0]), int(row[2 + sync.rank])) for row in everyone]
        if all(read == _NOTHING for read, _ in asked):
            return None
        received = sync.all_to_all(places, counts, [count for _, count in asked])
        replies, start = [], 0
        with torch.no_grad():
            for read, count in asked:
                if count:
                    part = received[start : start + count]
                    replies.append(self._weights[read].index_select(0, part).reshape(-1))
                    start += count
        nothing = self._weights[0].new_empty(0)
        width = self._width(table)
        rows = sync.all_to_all(
            torch.cat(replies) if len(replies) > 1 else replies[0] if replies else nothing,
            [count * self._width(read) for read, count in asked],
            [count * width for count in counts],
        ).detach()
        rows = rows.view(sum(counts), width) if width else rows
        if any(row[1] for row in everyone):
            leaf = rows.requires_grad_() if wants_gradient else None
            self._rounds.append(_Round(asked, received, leaf, counts))
        return rows

    def _width(self, table: int) -> int:
        return 0 if table == _NOTHING else self._weights[table].shape[1]

    def send_gradients(self, weight: float) -> None:
        """Give every slice the sum over ranks of ``weight * gradient``, as a sparse gradient.

        It is that of all rounds since the last call.  As in
        :meth:`~bigdl.runtime.collectives.base.GradientSync.all_reduce_gradients` a table that has a
        gradient on no rank keeps None; one that has it elsewhere only gets one without rows.

        Parameters
        ----------
        weight : float
            A rank that passes 0 takes part with nothing.
        """

        rounds, self._rounds = self._rounds, []
        sent: dict[int, list[tuple[Any, Any]]] = {}  # places and gradients by table
        flags = [bool(weight) and r.leaf is not None and r.leaf.grad is not None for r in rounds]
        everyone = self._sync.all_gather([float(flag) for flag in flags]) if rounds else []
        for number, (each, flag) in enumerate(zip(rounds, flags, strict=True)):
            has_sent = [bool(row[number]) for row in everyone]
            if not any(has_sent):
                continue
            gradient, send = self._weights[0].new_empty(0), [0] * len(each.counts)
            if flag:
                gradient = each.leaf.grad if weight == 1.0 else each.leaf.grad * weight
                send = [count * gradient.shape[1] for count in each.counts]
                gradient = gradient.reshape(-1)
            receive = [
                count * self._width(read) if has else 0
                for (read, count), has in zip(each.asked, has_sent, strict=True)
            ]
            gradient = self._sync.all_to_all(gradient, send, receive)
            place = start = 0
            for (read, count), size, has in zip(each.asked, receive, has_sent, strict=True):
                if has:
                    values = gradient[start : start + size].view(count, self._width(read))
                    sent.setdefault(read, []).append((each.places[place : place + count], values))
                place, start = place + count, start + size
        for table, parameter in enumerate(self._weights):
            parameter.grad = _summed(parameter, sent[table]) if table in sent else None


def _summed(parameter: Any, pieces: Sequence[tuple[Any, Any]]) -> Any:
    """Return the sum of rows, given as places and values, as a coalesced sparse tensor."""
    import torch

    places = torch.cat([places for places, _ in pieces])[None]
    values = torch.cat([values for _, values in pieces])
    is_coalesced = len(pieces) == 1  # of one rank, which sends every row once, in order
    return torch.sparse_coo_tensor(
        places, values, parameter.shape, check_invariants=False, is_coalesced=is_coalesced
    ).coalesce()
