"""The tables of a model whose rows lie in slices on the workers.

:class:`ShardedTables` are what the loop asks them to do, and their arrays in a checkpoint;
:class:`SavedRows` reads rows for predictions from its files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.rows import Distinct, RowExchange
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.embedding_tables.growing import GrowingEmbedding
from bigdl.training.embedding_tables.placement import TablePlacement
from bigdl.training.embedding_tables.sharded import ShardedEmbedding, ShardedTable, of_rows
from bigdl.training.slices import SavedSlices
from bigdl.training.state import dumps, loads


def tables_of(model: torch.nn.Module) -> dict[str, ShardedTable]:
    """Return the sharded embeddings of a model, by the names of their weights."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, ShardedTable)
    }


def has_tables(model: torch.nn.Module) -> bool:
    """Return True if rows of a sharded embedding of a model lie on several workers."""
    return any(isinstance(each, ShardedTable) and each.is_placed for each in model.modules())


def cut_tables(model: torch.nn.Module, optimizer: Any, place: TablePlacement) -> None:
    """Keep a worker's rows of the tables of a model that came whole, and of its optimizer."""
    for table in model.modules():
        if isinstance(table, ShardedTable) and not table.is_placed:
            table.cut(place)
            if isinstance(optimizer, torch.optim.Optimizer):
                state = optimizer.state.get(table.weight, {})
                for key, value in of_rows(state, table.whole_rows).items():
                    state[key] = table.own(value).clone()


class ShardedTables:
    """The sharded embeddings of a worker's model, and what the optimizer keeps of their rows.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer, optional
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any = None):
        tables = tables_of(model).items()
        self._tables = {name: table for name, table in tables if table.is_placed}
        self._optimizer: Any = None
        if optimizer is not None:
            self.follow(optimizer)
        exchanges = [table.exchange for table in self._tables.values()]
        self._exchange = exchanges[0] if exchanges else None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer that was made after the tables."""
        self._optimizer = optimizer
        for table in self._tables.values():
            table.states = partial(self._state, table)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """The slices of this process."""
        return [table.weight for table in self._tables.values()]

    def without(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the parameters that all ranks have."""
        own = {id(weight) for weight in self.weights}
        return [p for p in parameters if id(p) not in own]

    def _state(self, table: ShardedTable) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(table.weight, {})
        return state

    # -- a step; collectives ---------------------------------------------------------------------

    def connect(self, sync: GradientSync) -> None:
        """Let the workers fetch rows from each other."""
        self._exchange = RowExchange(sync)
        for table in self._tables.values():
            table.connect(self._exchange)

    def begin(self) -> None:
        """Allow reads of rows for a forward pass, or for several without gradients."""
        if self._exchange is not None:
            for table in self._tables.values():
                table.expect_reads(at_random=True)
            self._exchange.begin()

    def finish(self) -> None:
        """Take part in the reads of the other ranks until their forward passes have ended."""
        if self._exchange is not None:
            self._exchange.finish()

    def send_gradients(self, weight: float) -> None:
        """Set the gradients of the slices; see :meth:`RowExchange.send_gradients`."""
        if self._exchange is not None:
            self._exchange.send_gradients(weight)

    # -- the state -------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict, without what it keeps of a worker's rows.

        Of sharded embeddings it says under ``tables`` which of its parameters they are.
        """
        state: dict[str, Any] = self._optimizer.state_dict()
        if not self._tables:
            return state
        numbers = {id(p): number for number, p in enumerate(_parameters(self._optimizer))}
        state["tables"] = {}
        for name, table in self._tables.items():
            number = state["tables"][name] = numbers.get(id(table.weight))
            of_table = state["state"].get(number, {})
            for key in of_rows(of_table, len(table.weight)):
                of_table = state["state"][number] = {**of_table}
                del of_table[key]
        return state

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Keep or cut rows while a block loads a state dict into the optimizer.

        The state has none of the rows, which stay, or those of the whole tables.
        """
        kept = {
            id(table.weight): of_rows(
                self._optimizer.state.get(table.weight, {}), len(table.weight)
            )
            for table in self._tables.values()
        }
        yield
        for table in self._tables.values():
            if id(table.weight) not in {id(p) for p in _parameters(self._optimizer)}:
                continue
            state = self._optimizer.state[table.weight]
            for key, value in of_rows(state, table.whole_rows).items():
                state[key] = table.own(value).clone()
            if state:
                self._optimizer.state[table.weight] = {**kept[id(table.weight)], **state}
            elif kept[id(table.weight)]:
                state.update(kept[id(table.weight)])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's rows, and what its optimizer keeps of them, where they lie."""
        arrays = {}
        for name, table in self._tables.items():
            table.expect_reads(at_random=False)
            arrays.update({f"{name}{key}": each.numpy() for key, each in table.saved().items()})
            state = self._optimizer.state.get(table.weight, {})
            for key, value in of_rows(state, len(table.weight)).items():
                arrays[f"{name}.{key}"] = table.used(value.contiguous()).numpy()
        return arrays

    def load(self, slices: SavedSlices) -> None:
        """Take over the worker's rows of a checkpoint."""
        for name, table in self._tables.items():
            if self._optimizer is None:
                table.load(slices, name, (), {})
            elif keys := _keys(slices, name):
                table.load(slices, name, keys, self._optimizer.state[table.weight])
            else:
                table.load(slices, name, (), {})


class SavedRows:
    """Rows that a model reads from the files of a checkpoint, as they are asked for.

    Parameters
    ----------
    slices : SavedSlices
        On storage that is mapped to memory.
    model : torch.nn.Module
        Made :data:`NO_ROWS`; its sharded embeddings read here from now on.
    """

    def __init__(self, slices: SavedSlices, model: torch.nn.Module):
        self._readers: list[Callable[[torch.Tensor], np.ndarray]] = []
        for name, table in tables_of(model).items():
            table.read_from(cast("Any", self), len(self._readers))
            self._readers.append(table.reader(slices, name))

    def fetch(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids."""
        distinct = Distinct(ids)
        rows: torch.Tensor = distinct.expand(torch.from_numpy(self._readers[table](distinct.keys)))
        return rows


def whole(snapshot: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose files hold all rows of tables that lie in slices."""
    slices = snapshot.slices
    if slices is None:
        return snapshot
    model, optimizer = (loads(snapshot.files[name]) for name in ("model.pt", "optimizer.pt"))
    for name, number in optimizer.pop("tables").items():
        rows, states = whole_table(slices, name)
        model.update(rows)
        if states:
            optimizer["state"].setdefault(number, {}).update(states)
    files = {**snapshot.files, "model.pt": dumps(model), "optimizer.pt": dumps(optimizer)}
    manifest = {key: value for key, value in snapshot.manifest.items() if key != "slices"}
    return Checkpoint(manifest, files)


def whole_table(slices: SavedSlices, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return entries of a state dict with all rows, and what an optimizer keeps of them.

    Parameters
    ----------
    slices : SavedSlices
    name : str
        Of the weight.
    """
    kind = GrowingEmbedding if f"{name}-keys" in slices.names else ShardedEmbedding
    return kind.whole(slices, name, _keys(slices, name))


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _keys(slices: SavedSlices, name: str) -> list[str]:
    """Return names of what the optimizer kept of the rows of a table."""
    start = f"{name}."
    return [each[len(start) :] for each in slices.names if each.startswith(start)]
