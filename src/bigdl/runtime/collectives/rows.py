"""Rows of tables that lie in slices on the workers, fetched by id and given their gradients.

Every row belongs to one rank, its *owner*.  Row ``i`` of :class:`NumberedRows` is that of rank
``i % world_size``, and row ``i // world_size`` of its slice: frequent rows, which often have
neighbouring ids, are spread over all workers.  Other tables say themselves who has a row.

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
from typing import TYPE_CHECKING, Any, Protocol

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from bigdl.runtime.collectives.base import GradientSync

_NOTHING = -1  # instead of a table's number


def rows_of_rank(rows: int, rank: int, world_size: int) -> int:
    """Return how many of a table's rows a rank owns."""
    return len(range(rank, rows, world_size))


class RowTable(Protocol):
    """A table whose rows are fetched: who owns a row, and where it lies there.

    Attributes
    ----------
    numbers : int
        That are sent for a row that is asked for.
    is_ordered : bool
        True if the places of what one rank asks for ascend, each once.
    has_zero_row : bool
        True if row 0 of every slice stands for rows that are not there, and gets no gradients.
    """

    numbers: int
    is_ordered: bool
    has_zero_row: bool

    @property
    def weight(self) -> Any:
        """This rank's slice, a parameter of two dimensions on the CPU."""
        ...

    def keys(self, ids: Any, world_size: int) -> Any:
        """Return a number for each id; those of one owner are neighbours, in rank order."""
        ...

    def ends(self, keys: Any, world_size: int) -> list[int]:
        """Return the start of the first owner's part of ascending keys, and every part's end."""
        ...

    def request(self, keys: Any, counts: Any, world_size: int) -> Any:
        """Return what is sent for keys that were asked for so often."""
        ...

    def row_indices(self, requests: Sequence[tuple[Any, bool]]) -> list[Any]:
        """Return where the rows of each rank's request lie; True means one of the training."""
        ...

    def end_step(self) -> None:
        """After the gradients of an update have come."""
        ...


class NumberedRows:
    """A table of so many rows; row ``i`` belongs to rank ``i % world_size``.

    Parameters
    ----------
    weight : torch.nn.Parameter
    rows : int
        Of the whole table.
    """

    numbers = 1
    is_ordered = True
    has_zero_row = False

    def __init__(self, weight: Any, rows: int):
        self.weight: Any = weight
        self._rows = rows

    def _stride(self, world_size: int) -> int:
        return rows_of_rank(self._rows, 0, world_size)

    def keys(self, ids: Any, world_size: int) -> Any:
        return ids % world_size * self._stride(world_size) + ids // world_size

    def ends(self, keys: Any, world_size: int) -> list[int]:
        import torch

        limits = torch.arange(world_size + 1) * self._stride(world_size)
        return torch.searchsorted(keys, limits).tolist()

    def request(self, keys: Any, counts: Any, world_size: int) -> Any:
        return keys % self._stride(world_size)

    def row_indices(self, requests: Sequence[tuple[Any, bool]]) -> list[Any]:
        return [places for places, _ in requests]

    def end_step(self) -> None:
        pass


@dataclass
class _Round:
    """A round whose rows can get gradients.

    Attributes
    ----------
    asked : list of (int, int)
        Table and number of rows that each rank got from this one.
    row_indices : list of torch.Tensor
        Of these rows in the slices, of each rank.
    leaf : torch.Tensor or None
        The rows that this rank got.
    counts : list of int
        Rows that this rank got from each owner.
    """

    asked: list[tuple[int, int]]
    row_indices: list[Any]
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
    counts : torch.Tensor
        How often each is there.
    inverse : torch.Tensor
        Of one dimension: where each of all keys is among the distinct ones.
    """

    def __init__(self, keys: Any):
        import numpy as np
        import torch

        self._shape = keys.shape
        ordered, order = _sorted(keys.reshape(-1).numpy())
        is_first = np.ones(len(ordered), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        inverse = np.empty_like(order)
        inverse[order] = np.cumsum(is_first) - 1
        self.keys = torch.from_numpy(ordered[starts])
        self.counts = torch.from_numpy(np.diff(starts, append=len(ordered)))
        self.inverse = torch.from_numpy(inverse)
        self._order, self._starts = torch.from_numpy(order), torch.from_numpy(starts)

    def expand(self, rows: Any) -> Any:
        """Return a row for each of all keys, of the rows of the distinct ones.

        The gradient of a row is the sum of those of its keys, in their order.
        """
        return _expand_function()(rows, self.inverse, self._order, self._starts).view(
            *self._shape, rows.shape[1]
        )


def _sorted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers in ascending order, and their places before; equal ones keep their order.

    Most keys are small enough to be sorted with their places in their lower bits, which is several
    times as fast.
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
def _expand_function() -> Any:
    """Return the function of :meth:`Distinct.expand`; torch is imported where it is used."""
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
            # by far the fastest sum of rows that torch has on a CPU
            rows = torch.embedding_bag(gradient.contiguous(), order, starts, mode=0)[0]
            return rows, None, None, None

    return ExpandRows.apply


class RowExchange:
    """The tables of a model on all workers; its methods are collectives.

    Parameters
    ----------
    sync : GradientSync
        That has started.
    """

    def __init__(self, sync: GradientSync):
        self._sync = sync
        self._tables: list[RowTable] = []
        self._rounds: list[_Round] = []
        self._is_finished = False

    def add(self, table: RowTable) -> int:
        """Add a table; returns its number.

        Raises
        ------
        UsageError
            If its weight has not the dtype of the others.
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
        """Before the forward pass of a batch."""
        self._is_finished = False

    def fetch(self, table: int, ids: Any) -> Any:
        """Return the rows of some ids; each is sent once, and so is its gradient.

        Parameters
        ----------
        table : int
        ids : torch.Tensor
            Integers of any shape, that the table has rows of.

        Returns
        -------
        torch.Tensor
            Of the shape of `ids`, and the width of a row.
        """
        import torch

        rows, world_size = self._tables[table], self._sync.world_size
        wants_gradient = torch.is_grad_enabled() and rows.weight.requires_grad
        if wants_gradient and self._is_finished:
            raise UsageError(
                "A ShardedEmbedding was called after the forward pass of its batch, as activation "
                "checkpointing does; call it once, outside of what is computed again",
                code="model-unsupported",
            )
        distinct = Distinct(rows.keys(ids, world_size))
        counts = [
            end - start for start, end in itertools.pairwise(rows.ends(distinct.keys, world_size))
        ]
        request = rows.request(distinct.keys, distinct.counts, world_size)
        return distinct.expand(self._round(table, request, counts, wants_gradient))

    def finish(self) -> None:
        """After a forward pass, or instead of one: give others their rows until all have ended."""
        import torch

        self._is_finished = True
        if self._sync.world_size > 1 and self._tables:
            nothing = torch.empty(0, dtype=torch.int64)
            while self._round(_NOTHING, nothing, [0] * self._sync.world_size, False) is not None:
                pass

    def _round(self, table: int, request: Any, counts: list[int], wants_gradient: bool) -> Any:
        """Return the rows that this rank asks the owners for; None if nobody reads."""
        import torch

        sync = self._sync
        everyone = sync.all_gather([table, wants_gradient, *counts])
        asked = [(int(row[0]), int(row[2 + sync.rank])) for row in everyone]
        if all(read == _NOTHING for read, _ in asked):
            return None
        numbers = [count * self._numbers(read) for read, count in asked]
        received = sync.all_to_all(
            request, [count * self._numbers(table) for count in counts], numbers
        )
        is_training = [bool(row[1]) for row in everyone]
        places = self._requested_rows(asked, torch.split(received, numbers), is_training)
        nothing = self._tables[0].weight.new_empty(0)
        with torch.no_grad():
            replies = [
                self._tables[read].weight.index_select(0, own).reshape(-1)
                for (read, count), own in zip(asked, places, strict=True)
                if count
            ]
        width = self._width(table)
        rows = sync.all_to_all(
            _joined(replies or [nothing]),
            [count * self._width(read) for read, count in asked],
            [count * width for count in counts],
        ).detach()
        rows = rows.view(sum(counts), width) if width else rows
        if any(is_training):
            leaf = rows.requires_grad_() if wants_gradient else None
            self._rounds.append(_Round(asked, places, leaf, counts))
        return rows

    def _requested_rows(
        self, asked: list[tuple[int, int]], requests: Sequence[Any], is_training: list[bool]
    ) -> list[Any]:
        """Return where the rows that each rank asks for lie."""
        places = list(requests)
        for number in {read for read, count in asked if count}:
            ranks = [rank for rank, (read, count) in enumerate(asked) if read == number and count]
            found = self._tables[number].row_indices([(requests[r], is_training[r]) for r in ranks])
            for rank, each in zip(ranks, found, strict=True):
                places[rank] = each
        return places

    def _numbers(self, table: int) -> int:
        return 0 if table == _NOTHING else self._tables[table].numbers

    def _width(self, table: int) -> int:
        return 0 if table == _NOTHING else self._tables[table].weight.shape[1]

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
            gradient, send = self._tables[0].weight.new_empty(0), [0] * len(each.counts)
            if flag:
                gradient = each.leaf.grad if weight == 1.0 else each.leaf.grad * weight
                send = [count * gradient.shape[1] for count in each.counts]
                gradient = gradient.reshape(-1)
            receive = [
                count * self._width(read) if has else 0
                for (read, count), has in zip(each.asked, has_sent, strict=True)
            ]
            gradient = self._sync.all_to_all(gradient, send, receive)
            values = gradient.split(receive)  # type: ignore[no-untyped-call]
            for rank, ((read, count), has) in enumerate(zip(each.asked, has_sent, strict=True)):
                if has:
                    of_rank = values[rank].view(count, self._width(read))
                    sent.setdefault(read, []).append((each.row_indices[rank], of_rank))
        for number, table in enumerate(self._tables):
            table.weight.grad = _summed(table, sent[number]) if number in sent else None
            table.end_step()


def _joined(pieces: Sequence[Any]) -> Any:
    """Return pieces behind each other; one alone is not copied."""
    import torch

    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _summed(table: RowTable, pieces: Sequence[tuple[Any, Any]]) -> Any:
    """Return the sum of rows, given as places and values, as a coalesced sparse tensor."""
    import torch

    places = _joined([places for places, _ in pieces])[None]
    values = _joined([values for _, values in pieces])
    if table.has_zero_row:
        is_there = places[0] > 0
        places, values = places[:, is_there], values[is_there]
    # of one rank, which sends every row once, in order
    is_coalesced = len(pieces) == 1 and table.is_ordered
    return torch.sparse_coo_tensor(
        places, values, table.weight.shape, check_invariants=False, is_coalesced=is_coalesced
    ).coalesce()
