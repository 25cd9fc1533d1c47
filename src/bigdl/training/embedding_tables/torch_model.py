"""Sharded embeddings of a torch model in a worker.

The training loop calls :class:`ShardedTables` in every step and for checkpoints.
:class:`SavedRows` reads rows for predictions from the files of a checkpoint.
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
from bigdl.training.state import dumps, loads, parameters_of


def tables_of(model: torch.nn.Module) -> dict[str, ShardedTable]:
    """Return a dict of a model's sharded embeddings by the names of their weights."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, ShardedTable)
    }


def has_tables(model: torch.nn.Module) -> bool:
    """Return True if a model has a sharded embedding whose rows are spread over workers."""
    return any(isinstance(each, ShardedTable) and each.is_placed for each in model.modules())


def cut_tables(model: torch.nn.Module, optimizer: object, placement: TablePlacement) -> None:
    """Keep only a worker's rows of a whole model's tables and of their optimizer state."""
    for table in model.modules():
        if isinstance(table, ShardedTable) and not table.is_placed:
            table.cut(placement)
            if isinstance(optimizer, torch.optim.Optimizer):
                state = optimizer.state.get(table.weight, {})
                for key, value in of_rows(state, table.whole_rows).items():
                    state[key] = table.local_rows(value).clone()


class ShardedTables:
    """Sharded embeddings of a worker's model, with the optimizer state of their rows.

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
        """Set the optimizer that holds the state of the tables' rows."""
        self._optimizer = optimizer
        for table in self._tables.values():
            table.states = partial(self._state, table)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Weight parameters that hold this process's slices of the tables."""
        return [table.weight for table in self._tables.values()]

    def without(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the parameters that are replicated on all ranks."""
        sharded = {id(weight) for weight in self.weights}
        return [p for p in parameters if id(p) not in sharded]

    def _state(self, table: ShardedTable) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(table.weight, {})
        return state

    # -- a step; collectives ---------------------------------------------------------------------

    def connect(self, sync: GradientSync) -> None:
        """Connect the tables of all workers, so that they can fetch each other's rows."""
        self._exchange = RowExchange(sync)
        for table in self._tables.values():
            table.connect(self._exchange)

    def begin(self) -> None:
        """Start row reads for one forward pass, or for several forward passes without gradients."""
        if self._exchange is not None:
            for table in self._tables.values():
                table.expect_reads(at_random=True)
            self._exchange.begin()

    def finish(self) -> None:
        """Serve row reads of the other ranks until their forward passes have ended."""
        if self._exchange is not None:
            self._exchange.finish()

    def send_gradients(self, weight: float) -> None:
        """Set the gradients of the slices; see :meth:`RowExchange.send_gradients`."""
        if self._exchange is not None:
            self._exchange.send_gradients(weight)

    # -- the state -------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict without the state of sharded rows.

        Its key ``tables`` maps the name of each sharded weight to its parameter number.
        """
        state: dict[str, Any] = self._optimizer.state_dict()
        if not self._tables:
            return state
        numbers = {id(p): number for number, p in enumerate(parameters_of(self._optimizer))}
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
        """Context manager that fits a loaded optimizer state dict to this worker's sharded rows.

        If the loaded state has no rows, the current ones stay; of whole tables, this worker's rows
        are selected.
        """
        kept = {
            id(table.weight): of_rows(
                self._optimizer.state.get(table.weight, {}), len(table.weight)
            )
            for table in self._tables.values()
        }
        yield
        for table in self._tables.values():
            if id(table.weight) not in {id(p) for p in parameters_of(self._optimizer)}:
                continue
            state = self._optimizer.state[table.weight]
            for key, value in of_rows(state, table.whole_rows).items():
                state[key] = table.local_rows(value).clone()
            if state:
                self._optimizer.state[table.weight] = {**kept[id(table.weight)], **state}
            elif kept[id(table.weight)]:
                state.update(kept[id(table.weight)])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's rows and their optimizer state, without copying."""
        arrays = {}
        for name, table in self._tables.items():
            table.expect_reads(at_random=False)
            arrays.update({f"{name}{key}": each.numpy() for key, each in table.saved().items()})
            state = self._optimizer.state.get(table.weight, {})
            for key, value in of_rows(state, len(table.weight)).items():
                arrays[f"{name}.{key}"] = table.used(value.contiguous()).numpy()
        return arrays

    def load(self, slices: SavedSlices) -> None:
        """Load this worker's rows from a checkpoint."""
        for name, table in self._tables.items():
            if self._optimizer is None:
                table.load(slices, name, (), {})
            elif keys := _keys(slices, name):
                table.load(slices, name, keys, self._optimizer.state[table.weight])
            else:
                table.load(slices, name, (), {})


class SavedRows:
    """On-demand reader of table rows from the files of a checkpoint.

    Parameters
    ----------
    slices : SavedSlices
        Slices on storage that can be memory-mapped.
    model : torch.nn.Module
        Built with the placement :data:`NO_ROWS`; its tables read their rows here from now on.
    """

    def __init__(self, slices: SavedSlices, model: torch.nn.Module):
        self._readers: list[Callable[[torch.Tensor], np.ndarray]] = []
        for name, table in tables_of(model).items():
            table.read_from(cast("Any", self), len(self._readers))
            self._readers.append(table.reader(slices, name))

    def fetch(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids` in a table."""
        distinct = Distinct(ids)
        rows: torch.Tensor = distinct.expand(torch.from_numpy(self._readers[table](distinct.keys)))
        return rows


def whole(snapshot: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose files hold all rows of the sharded tables."""
    slices = snapshot.slices
    if slices is None:
        return snapshot
    model, optimizer = (loads(snapshot.files[name]) for name in ("model.pt", "optimizer.pt"))
    for name, number in optimizer.pop("tables").items():
        rows, states = whole_table(slices, name)
        model.update(rows)
        if states:
            optimizer["state"].setdefault(number, {}).update(states)
    return snapshot.without_slices({"model.pt": dumps(model), "optimizer.pt": dumps(optimizer)})


def whole_table(slices: SavedSlices, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return state dict entries with all rows, and the optimizer state of the rows.

    Parameters
    ----------
    slices : SavedSlices
    name : str
        Name of the weight.
    """
    table = GrowingEmbedding if f"{name}-keys" in slices.names else ShardedEmbedding
    return table.whole(slices, name, _keys(slices, name))


def _keys(slices: SavedSlices, name: str) -> list[str]:
    """Return the names of a table's optimizer state that a checkpoint stores by row."""
    start = f"{name}."
    return [each[len(start) :] for each in slices.names if each.startswith(start)]
