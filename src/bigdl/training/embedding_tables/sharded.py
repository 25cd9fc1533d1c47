"""Embeddings whose rows are sharded over the workers of a fit or an evaluation.

A worker builds its model within :func:`~bigdl.training.embedding_tables.placement.table_placement`,
so that a :class:`ShardedTable` allocates only the worker's rows.  Its weight is an ordinary
parameter with a sparse gradient, so the user's optimizer updates the rows and keeps their state on
the worker that owns them.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.errors import UsageError
from bigdl.common.platform.files import advise_address, reserve, unlink_open
from bigdl.runtime.collectives.rows import (
    NumberedRows,
    RowExchange,
    RowTable,
    rows_of_rank,
)
from bigdl.training.embedding_tables.placement import TablePlacement, current_placement
from bigdl.training.slices import SavedSlices
from bigdl.training.state import mixed_seed

CHUNK_ROWS = 1 << 16  # rows that are initialized under one seed


class ShardedTable(torch.nn.Module, ABC):
    """Base class of embeddings whose rows are sharded over workers.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process holds.
    exchange : bigdl.runtime.collectives.rows.RowExchange or None
        Exchange that fetches rows from other workers.
    states : callable
        Returns the optimizer state of the weight.
    """

    sparse = True  # the weight has sparse gradients
    weight: torch.nn.Parameter
    embedding_dim: int
    storage: str

    def __init__(self) -> None:
        super().__init__()
        self._placement = current_placement()
        self.exchange: RowExchange | None = None
        self._number = 0
        self.states: Callable[[], dict[str, Any]] = dict[str, Any]

    @property
    def is_placed(self) -> bool:
        """True if the table holds one worker's rows; the state dict then omits them."""
        return self._placement is not None

    def connect(self, exchange: RowExchange) -> None:
        """Register the table with an exchange that fetches rows from other workers."""
        self.read_from(exchange, exchange.add(self.row_table()))

    def read_from(self, exchange: RowExchange, number: int) -> None:
        """Set the exchange that fetches rows, and the index of this table in the exchange."""
        self.exchange, self._number = exchange, number

    def _check_met(self) -> None:
        if self._placement is not None:
            raise UsageError(
                f"A {type(self).__name__} was called before its workers are connected", code="state"
            )

    def to_arrow(self, id_col: str = "id", vector_col: str = "vector", field: int = 0) -> pa.Table:
        """Return the ids of a field and their rows as an Arrow table.

        Parameters
        ----------
        id_col, vector_col : str
            Names of the columns: int64 ids, and fixed-size lists of floats.
        field : int

        Returns
        -------
        pyarrow.Table
            The rows in this process, by id; ``Estimator.get_model`` returns a model with all rows.

        Examples
        --------
        >>> import torch
        >>> from bigdl.orca.torch import ShardedEmbedding
        >>> table = ShardedEmbedding([3, 2], 4, init=torch.nn.init.ones_)
        >>> table.to_arrow("item", field=1).to_pydict()
        {'item': [0, 1], 'vector': [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]}
        """
        check_integer("field", field, 0, self.fields - 1)
        ids, rows = self._rows_of_field(field)
        return arrow_of(ids.numpy(), rows.numpy(), id_col, vector_col)

    @property
    @abstractmethod
    def fields(self) -> int:
        """Number of fields that share the table."""

    @abstractmethod
    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of a field and their rows."""

    # -- for Estimators ----------------------------------------------------------------------

    def expect_reads(self, *, at_random: bool) -> None:
        """Advise the kernel whether mapped rows will be read at random or in sequence.

        Without the advice, read-ahead around random rows would load the whole file.
        """
        if self.storage == "mmap" and self.is_placed and len(self.weight):
            advise_address(self.weight.data_ptr(), self.weight.nbytes, at_random=at_random)

    @abstractmethod
    def row_table(self) -> RowTable:
        """Return the row table that other workers fetch rows from."""

    @property
    @abstractmethod
    def whole_rows(self) -> int:
        """Number of rows of the whole table."""

    @abstractmethod
    def cut(self, placement: TablePlacement) -> None:
        """Reduce a whole table to the rows that a worker owns."""

    @abstractmethod
    def local_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Select this worker's rows from an array that has one row per row of the whole table."""

    @abstractmethod
    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        """Load a whole table; a worker keeps only the rows that it owns.

        Parameters
        ----------
        arrays : dict of str to torch.Tensor
            State dict entries of a whole table.

        Raises
        ------
        UsageError
            If the shapes do not fit this table.
        """

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the arrays that a checkpoint saves, as a dict by suffix of the weight's name."""
        return {"": self.weight.detach()}

    def used(self, array: torch.Tensor) -> torch.Tensor:
        """Return the used rows of an array that has as many rows as the weight."""
        return array

    @abstractmethod
    def load(
        self, slices: SavedSlices, name: str, keys: Sequence[str], states: dict[str, Any]
    ) -> None:
        """Load this worker's rows from a checkpoint.

        Parameters
        ----------
        slices : SavedSlices
        name : str
            Name of the weight.
        keys : sequence of str
            Names of the optimizer state tensors with one entry per row.
        states : dict
            Optimizer state of the weight, which receives these tensors.
        """

    @classmethod
    @abstractmethod
    def whole(
        cls, slices: SavedSlices, name: str, keys: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state dict entries with all rows, and the optimizer state of the rows."""

    @abstractmethod
    def reader(self, slices: SavedSlices, name: str) -> Callable[[torch.Tensor], np.ndarray]:
        """Return a function that reads the rows of given ids from mapped files."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedTable:
        if not self.is_placed:
            parent: Any = super()  # torch has no types here
            return cast("ShardedTable", parent._apply(fn, recurse))
        # the rows of a worker stay on the CPU, on whichever device the model is
        dtype = fn(self.weight.detach()[:0]).dtype
        if dtype != self.weight.dtype:
            self.weight.data = self.weight.detach().to(dtype)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self


class ShardedEmbedding(ShardedTable):
    """Embedding whose rows are sharded over the workers of an Estimator.

    Worker ``i % N`` owns row i. The forward pass fetches the rows of a batch from their owners, and
    the backward pass sends the gradients back. Each owner updates its rows with the Estimator's
    optimizer and keeps their optimizer state. So N workers hold the table once, and make the same
    updates as one process with ``torch.nn.Embedding(sparse=True)``. The optimizer must support
    sparse gradients: :class:`RowwiseAdagrad`, ``SGD`` without momentum or ``Adagrad`` of torch,
    or :class:`bigdl.nano.pytorch.optim.SparseAdam`.

    Outside an Estimator, and in the model of ``Estimator.get_model``, it is an ordinary embedding
    with sparse gradients.

    Parameters
    ----------
    num_embeddings : int or sequence of int
        Number of rows. A sequence gives the number of rows of several fields, which share one table
        and are fetched together; the last dimension of the ids is then the field.
    embedding_dim : int
        Width of a row.
    init : callable, optional
        ``init(rows)`` initializes a tensor of rows in place, e.g.
        ``functools.partial(torch.nn.init.uniform_, a=-0.01, b=0.01)``; default standard normal. The
        values do not depend on the number of workers.
    storage : str
        ``"memory"``, or ``"mmap"``: a worker keeps its rows in a memory-mapped file, so the table
        may be larger than the memory of the workers. The optimizer state stays in memory:
        :class:`RowwiseAdagrad` needs the least, one number per row.
    dtype : torch.dtype
        ``torch.float32`` or ``torch.float64``.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process holds.
    num_embeddings : int
        Number of rows of the whole table.
    exchange : bigdl.runtime.collectives.rows.RowExchange or None
        Exchange that fetches rows from other workers.

    Notes
    -----
    Pass a function ``model(config)`` as the model: a model instance holds all rows when it is built
    and sent to the workers. An Estimator that trains a sharded table needs a ``model_dir``: every
    worker writes its rows to the checkpoints there.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.torch import ShardedEmbedding
    >>> table = ShardedEmbedding([1000, 50], 8)  # two fields
    >>> table(torch.tensor([[999, 0], [3, 49]])).shape
    torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        num_embeddings: int | Sequence[int],
        embedding_dim: int,
        *,
        init: Callable[[torch.Tensor], Any] = torch.nn.init.normal_,
        storage: str = "memory",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        fields = [num_embeddings] if isinstance(num_embeddings, int) else list(num_embeddings)
        self._fields = [check_positive("num_embeddings", rows) for rows in fields]
        if not self._fields:
            raise UsageError(
                "num_embeddings should be a number or numbers, got an empty list",
                code="argument-value",
                argument="num_embeddings",
            )
        if not callable(init):
            raise UsageError(
                f"init should be a function of a tensor of rows, got {init!r}",
                code="argument-type",
                argument="init",
            )
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        self._has_fields = not isinstance(num_embeddings, int)
        self.num_embeddings = sum(self._fields)
        self.embedding_dim = check_positive("embedding_dim", embedding_dim)
        self.storage = check_choice("storage", storage, ("memory", "mmap"))
        self._starts: torch.Tensor
        self._sizes: torch.Tensor
        # drawn on all ranks, so that later layers are initialized alike
        seed = int(torch.randint(1 << 62, ()))
        placement = self._placement or TablePlacement()
        rows = rows_of_rank(self.num_embeddings, placement.rank, placement.world_size or 1)
        rows = rows if placement.world_size else 0
        shape = rows, self.embedding_dim
        weight = torch.empty(shape, dtype=dtype)
        if self.storage == "mmap" and self._placement is not None and rows:
            weight = mapped_tensor(shape, dtype, placement.folder)
        if not placement.is_loaded:
            _initialize(weight, self.num_embeddings, placement, init, seed)
        self.weight = torch.nn.Parameter(weight)
        starts = list(itertools.accumulate(self._fields, initial=0))[:-1]
        self.register_buffer("_starts", torch.tensor(starts), persistent=False)
        self.register_buffer("_sizes", torch.tensor(self._fields), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows of `ids`.

        Parameters
        ----------
        ids : torch.Tensor
            Integers of any shape; with several fields the last dimension is the field.

        Returns
        -------
        torch.Tensor
            Rows, in the shape of `ids` with the embedding dimension appended.

        Raises
        ------
        UsageError
            If an id is not in the table.
        """
        rows = self._rows_of(ids.to(torch.int64))
        if self.exchange is not None:
            fetched: torch.Tensor = self.exchange.fetch(self._number, rows.cpu())
            return fetched.to(ids.device)
        self._check_met()
        return functional.embedding(rows, self.weight, sparse=True)

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ids of the fields to row numbers of the whole table."""
        is_traced = cast("Any", torch.jit).is_tracing()  # torch has no types here
        if not (is_traced or torch.compiler.is_compiling()):  # a trace has no values
            self._check(ids)
        return ids + self._starts if self._has_fields else ids

    def _check(self, ids: torch.Tensor) -> None:
        if self._has_fields and (not ids.dim() or ids.shape[-1] != len(self._fields)):
            raise UsageError(
                f"The ids of a ShardedEmbedding of {len(self._fields)} fields need a last "
                f"dimension of {len(self._fields)}, got the shape {tuple(ids.shape)}",
                code="data-shape",
            )
        wrong = (ids < 0) | (ids >= self._sizes)
        if wrong.any():
            position = torch.nonzero(wrong)[0]
            field = int(position[-1]) if self._has_fields else 0
            where = f" in field {field}" if self._has_fields else ""
            raise UsageError(
                f"A ShardedEmbedding of {self._fields[field]} rows{where} has no row "
                f"{int(ids[tuple(position)])}",
                code="data-value",
            )

    # -- for Estimators ----------------------------------------------------------------------

    @property
    def fields(self) -> int:
        return len(self._fields)

    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        placement = self._placement or TablePlacement()
        first = sum(self._fields[:field])
        numbers = torch.arange(placement.rank, self.num_embeddings, placement.world_size or 1)
        here = (numbers >= first) & (numbers < first + self._fields[field])
        return numbers[here] - first, self.weight.detach().cpu()[here]

    def row_table(self) -> RowTable:
        return NumberedRows(self.weight, self.num_embeddings)

    @property
    def whole_rows(self) -> int:
        return self.num_embeddings

    def cut(self, placement: TablePlacement) -> None:
        self._placement = placement
        rank_rows = self.local_rows(self.weight.detach())
        if self.storage == "mmap" and len(rank_rows):
            rows = mapped_tensor(rank_rows.shape, rank_rows.dtype, placement.folder)
            rows.copy_(rank_rows)
        else:
            rows = rank_rows.clone()
        self.weight.data = rows

    def local_rows(self, whole: torch.Tensor) -> torch.Tensor:
        placement = self._placement or TablePlacement()
        return whole[placement.rank :: placement.world_size] if placement.world_size else whole[:0]

    def load(
        self, slices: SavedSlices, name: str, keys: Sequence[str], states: dict[str, Any]
    ) -> None:
        if name not in slices.names or slices.rows(name) != self.num_embeddings:
            count = slices.rows(name) if name in slices.names else "no"
            raise UsageError(
                f"The checkpoint has {count} rows of {name}, the model has {self.num_embeddings}",
                code="checkpoint-mismatch",
            )
        placement, rows = self._placement or TablePlacement(), self.weight.detach()
        saved = torch.from_numpy(
            slices.read(name, placement.rank, placement.world_size, rows.numpy())
        )
        if saved.data_ptr() != rows.data_ptr():  # of another dtype
            rows.copy_(saved)
        for key in keys:
            into = states[key].numpy() if key in states else None
            array = slices.read(f"{name}.{key}", placement.rank, placement.world_size, into)
            states[key] = torch.from_numpy(array)

    @classmethod
    def whole(
        cls, slices: SavedSlices, name: str, keys: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        states = {key: torch.from_numpy(slices.read(f"{name}.{key}")) for key in keys}
        return {name: torch.from_numpy(slices.read(name))}, states

    def reader(self, slices: SavedSlices, name: str) -> Callable[[torch.Tensor], np.ndarray]:
        owners = slices.mapped(name)

        def read(ids: torch.Tensor) -> np.ndarray:
            numbers = ids.numpy()
            rows = np.empty((len(numbers), *owners[0].shape[1:]), owners[0].dtype)
            for owner, array in enumerate(owners):
                is_owner = numbers % len(owners) == owner
                rows[is_owner] = array[numbers[is_owner] // len(owners)]
            return rows

        return read

    def _save_to_state_dict(
        self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        if not self.is_placed:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        whole = state_dict.get(f"{prefix}weight")
        if not self.is_placed:
            super()._load_from_state_dict(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        elif whole is not None and self.weight.numel():
            shape = self.num_embeddings, self.embedding_dim
            if tuple(whole.shape) != shape:
                error_msgs.append(
                    f"{prefix}weight has the shape {tuple(whole.shape)}, the table {shape}"
                )
                return
            with torch.no_grad():
                self.weight.copy_(self.local_rows(whole))

    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        whole = arrays["weight"]
        if whole.shape != (self.num_embeddings, self.embedding_dim):
            raise UsageError(
                f"The weights do not fit the model: a ShardedEmbedding of {self.num_embeddings} "
                f"rows of {self.embedding_dim} numbers got {tuple(whole.shape)}",
                code="model-mismatch",
            )
        if self.weight.numel():
            with torch.no_grad():
                self.weight.copy_(self.local_rows(whole))

    def extra_repr(self) -> str:
        rows = self._fields if self._has_fields else self.num_embeddings
        return f"{rows}, {self.embedding_dim}"


def arrow_of(ids: np.ndarray, rows: np.ndarray, id_col: str, vector_col: str) -> pa.Table:
    """Build an Arrow table of ids and their vectors, which have the shape ``(n, width)``."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    return pa.table({id_col: pa.array(ids), vector_col: vectors})


def _initialize(
    weight: torch.Tensor, rows: int, placement: TablePlacement, init: Callable[..., Any], seed: int
) -> None:
    """Initialize one rank's rows with the values that they have in an unsharded table."""
    if not len(weight):
        return
    filled = 0
    with torch.random.fork_rng(devices=[]):
        for number, start in enumerate(range(0, rows, CHUNK_ROWS)):
            torch.manual_seed(mixed_seed(seed, number))
            chunk = weight.new_empty(min(CHUNK_ROWS, rows - start), weight.shape[1])
            with torch.no_grad():
                init(chunk)
            rank_rows = chunk[
                (placement.rank - start) % placement.world_size :: placement.world_size
            ]
            weight[filled : filled + len(rank_rows)] = rank_rows
            filled += len(rank_rows)


def mapped_tensor(shape: Sequence[int], dtype: torch.dtype, folder: str | None) -> torch.Tensor:
    """Create a tensor in a memory-mapped temporary file."""
    size = int(np.prod(shape))
    descriptor, path = tempfile.mkstemp(prefix="bigdl-rows-", dir=folder)
    try:
        reserve(descriptor, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(*shape)
    except OSError as error:
        raise UsageError(
            f"The rows of a table with storage='mmap' need {size * dtype.itemsize} "
            f"bytes in {os.path.dirname(path)!r}: {error}",
            code="path-unusable",
        ) from error
    finally:
        os.close(descriptor)
        unlink_open(path)


def of_rows(state: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """Select the optimizer state tensors that have one entry per row of a weight."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
    }
