"""Embeddings whose rows lie in slices on the workers of a fit or an evaluation.

A worker makes its model within :func:`~bigdl.training.embedding_tables.placement.placed`, so that a
:class:`ShardedTable` allocates the worker's rows only.  Its weight is an ordinary parameter with a
sparse gradient, so the user's optimizer updates the rows, and keeps their state, where they lie.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.errors import UsageError
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
    """An embedding whose rows lie in slices on workers.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process has.
    exchange : bigdl.runtime.collectives.rows.RowExchange or None
        By which its rows are fetched on a worker.
    states : callable
        Returns what the optimizer keeps of the weight.
    """

    sparse = True  # gradients of its weight
    weight: torch.nn.Parameter
    embedding_dim: int
    storage: str

    def __init__(self) -> None:
        super().__init__()
        self._place = current_placement()
        self.exchange: RowExchange | None = None
        self._number = 0
        self.states: Callable[[], dict[str, Any]] = dict[str, Any]

    @property
    def is_placed(self) -> bool:
        """True if it holds the rows of a worker, which are no part of the state dict then."""
        return self._place is not None

    def connect(self, exchange: RowExchange) -> None:
        """Fetch rows from the other workers from now on."""
        self.read_from(exchange, exchange.add(self.row_table()))

    def read_from(self, exchange: RowExchange, number: int) -> None:
        """Fetch rows as the table of this number."""
        self.exchange, self._number = exchange, number

    def _check_met(self) -> None:
        if self._place is not None:
            raise UsageError(
                f"A {type(self).__name__} was called before its workers have met", code="state"
            )

    def to_arrow(self, id_col: str = "id", vector_col: str = "vector", field: int = 0) -> pa.Table:
        """Return the ids of a field and their rows, such as for a store of features.

        Parameters
        ----------
        id_col, vector_col : str
            Names of the columns: int64, and lists of as many numbers as a row has.
        field : int

        Returns
        -------
        pyarrow.Table
            Of the rows in this process, by id; those of ``Estimator.get_model`` are all.

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
        """The number of fields that have rows in it."""

    @abstractmethod
    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids of a field, and their rows."""

    # -- what Estimators do ----------------------------------------------------------------------

    def expect_reads(self, *, at_random: bool) -> None:
        """Say how rows in a file will be read next: anywhere, or one after the other.

        Around a row that lies anywhere the system would read others, in the end the whole file.
        """
        if self.storage == "mmap" and self.is_placed and len(self.weight):
            advice = mmap.MADV_RANDOM if at_random else mmap.MADV_NORMAL
            start, size = self.weight.data_ptr(), self.weight.nbytes
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)

    @abstractmethod
    def row_table(self) -> RowTable:
        """Return what the other workers fetch rows of."""

    @property
    @abstractmethod
    def whole_rows(self) -> int:
        """Rows of the whole table."""

    @abstractmethod
    def cut(self, place: TablePlacement) -> None:
        """Keep the rows of a worker only, of a table that is whole."""

    @abstractmethod
    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this worker's rows of an array that has one for each of the whole table."""

    @abstractmethod
    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        """Have the rows of a whole table, on a worker those that are its own.

        Parameters
        ----------
        arrays : dict of str to torch.Tensor
            Entries of the state dict of a table that is whole.

        Raises
        ------
        UsageError
            If it is another table.
        """

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of it, by what follows the name of the weight."""
        return {"": self.weight.detach()}

    def used(self, array: torch.Tensor) -> torch.Tensor:
        """Return those rows that a checkpoint has, of an array as long as the weight."""
        return array

    @abstractmethod
    def load(
        self, slices: SavedSlices, name: str, keys: Sequence[str], states: dict[str, Any]
    ) -> None:
        """Take over a worker's rows of a checkpoint.

        Parameters
        ----------
        slices : SavedSlices
        name : str
            Of the weight.
        keys : sequence of str
            Names of what an optimizer keeps of each row.
        states : dict
            What the optimizer has of the weight; is given that.
        """

    @classmethod
    @abstractmethod
    def whole(
        cls, slices: SavedSlices, name: str, keys: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return entries of a state dict with all rows, and what an optimizer keeps of them."""

    @abstractmethod
    def reader(self, slices: SavedSlices, name: str) -> Callable[[torch.Tensor], np.ndarray]:
        """Return a function that reads the rows of some ids from mapped files."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedTable:
        if not self.is_placed:
            parent: Any = super()  # whose method has no types
            return cast("ShardedTable", parent._apply(fn, recurse))
        # rows of a worker stay in its memory, whatever the device of the model
        dtype = fn(self.weight.detach()[:0]).dtype
        if dtype != self.weight.dtype:
            self.weight.data = self.weight.detach().to(dtype)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self


class ShardedEmbedding(ShardedTable):
    """An embedding that is cut in slices on the workers of an Estimator.

    Row i lies on worker ``i % N``. A forward pass fetches the rows of its batch from their owners,
    and the backward pass sends their gradients back; there the optimizer of the Estimator updates
    them, and keeps its state of them. So N workers together hold the table once, and make the
    updates that one process makes with ``torch.nn.Embedding(sparse=True)``. It needs an optimizer
    for sparse gradients: :class:`RowwiseAdagrad`, ``SGD`` without momentum or ``Adagrad`` of torch,
    or :class:`bigdl.nano.pytorch.optim.SparseAdam`.

    Anywhere else, in a program of one's own for example, it is an ordinary embedding with sparse
    gradients, and so is that of ``Estimator.get_model``.

    Parameters
    ----------
    num_embeddings : int or sequence of int
        Rows of the table. Several numbers are those of several fields, whose rows lie in one table,
        one field after the other, and are fetched together; the last dimension of the ids is that
        of the fields then.
    embedding_dim : int
        Width of a row.
    init : callable, optional
        ``init(rows)`` sets a tensor of some rows to first values, e.g.
        ``functools.partial(torch.nn.init.uniform_, a=-0.01, b=0.01)``; default standard normal.
        They do not depend on the number of workers.
    storage : str
        ``"memory"``, or ``"mmap"``: a worker keeps its rows in a file that is mapped to memory, so
        the table may be larger than the memory of the workers. The optimizer's state stays in
        memory: take :class:`RowwiseAdagrad`, which keeps one number a row.
    dtype : torch.dtype
        ``torch.float32`` or ``torch.float64``.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process has.
    num_embeddings : int
        Rows of the whole table.
    exchange : bigdl.runtime.collectives.rows.RowExchange or None
        By which its rows are fetched on a worker.

    Notes
    -----
    Make the model by a function ``model(config)``: a model instance is made, and sent to the
    workers, with all rows. An Estimator that trains one needs a ``model_dir``, in whose checkpoints
    every worker writes its rows.

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
        # drawn everywhere, so that what is made next has the same weights on all ranks
        seed = int(torch.randint(1 << 62, ()))
        place = self._place or TablePlacement()
        rows = rows_of_rank(self.num_embeddings, place.rank, place.world_size or 1)
        rows = rows if place.world_size else 0
        shape = rows, self.embedding_dim
        weight = torch.empty(shape, dtype=dtype)
        if self.storage == "mmap" and self._place is not None and rows:
            weight = mapped_tensor(shape, dtype, place.folder)
        if not place.is_loaded:
            _initialize(weight, self.num_embeddings, place, init, seed)
        self.weight = torch.nn.Parameter(weight)
        starts = list(itertools.accumulate(self._fields, initial=0))[:-1]
        self.register_buffer("_starts", torch.tensor(starts), persistent=False)
        self.register_buffer("_sizes", torch.tensor(self._fields), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids.

        Parameters
        ----------
        ids : torch.Tensor
            Integers of any shape, whose last dimension is that of the fields if there are several.

        Returns
        -------
        torch.Tensor
            Of the shape of `ids`, and the width of a row.

        Raises
        ------
        UsageError
            For an id that is not in the table.
        """
        rows = self._rows_of(ids.to(torch.int64))
        if self.exchange is not None:
            fetched: torch.Tensor = self.exchange.fetch(self._number, rows.cpu())
            return fetched.to(ids.device)
        self._check_met()
        return functional.embedding(rows, self.weight, sparse=True)

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows in the whole table."""
        is_traced = cast("Any", torch.jit).is_tracing()  # which has no types
        if not (is_traced or torch.compiler.is_compiling()):  # no values are known
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
            place = torch.nonzero(wrong)[0]
            field = int(place[-1]) if self._has_fields else 0
            where = f" in field {field}" if self._has_fields else ""
            raise UsageError(
                f"A ShardedEmbedding of {self._fields[field]} rows{where} was asked for row "
                f"{int(ids[tuple(place)])}",
                code="data-value",
            )

    # -- what Estimators do ----------------------------------------------------------------------

    @property
    def fields(self) -> int:
        return len(self._fields)

    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._place or TablePlacement()
        first = sum(self._fields[:field])
        numbers = torch.arange(place.rank, self.num_embeddings, place.world_size or 1)
        here = (numbers >= first) & (numbers < first + self._fields[field])
        return numbers[here] - first, self.weight.detach().cpu()[here]

    def row_table(self) -> RowTable:
        return NumberedRows(self.weight, self.num_embeddings)

    @property
    def whole_rows(self) -> int:
        return self.num_embeddings

    def cut(self, place: TablePlacement) -> None:
        self._place = place
        own = self.own(self.weight.detach())
        if self.storage == "mmap" and len(own):
            rows = mapped_tensor(own.shape, own.dtype, place.folder)
            rows.copy_(own)
        else:
            rows = own.clone()
        self.weight.data = rows

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        place = self._place or TablePlacement()
        return whole[place.rank :: place.world_size] if place.world_size else whole[:0]

    def load(
        self, slices: SavedSlices, name: str, keys: Sequence[str], states: dict[str, Any]
    ) -> None:
        if name not in slices.names or slices.rows(name) != self.num_embeddings:
            count = slices.rows(name) if name in slices.names else "no"
            raise UsageError(
                f"The checkpoint has {count} rows of {name}, the model has {self.num_embeddings}",
                code="checkpoint-mismatch",
            )
        place, rows = self._place or TablePlacement(), self.weight.detach()
        found = torch.from_numpy(slices.read(name, place.rank, place.world_size, rows.numpy()))
        if found.data_ptr() != rows.data_ptr():  # of another dtype
            rows.copy_(found)
        for key in keys:
            into = states[key].numpy() if key in states else None
            array = slices.read(f"{name}.{key}", place.rank, place.world_size, into)
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
                own = numbers % len(owners) == owner
                rows[own] = array[numbers[own] // len(owners)]
            return rows

        return read

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.is_placed:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
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
                self.weight.copy_(self.own(whole))

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
                self.weight.copy_(self.own(whole))

    def extra_repr(self) -> str:
        rows = self._fields if self._has_fields else self.num_embeddings
        return f"{rows}, {self.embedding_dim}"


def arrow_of(ids: np.ndarray, rows: np.ndarray, id_col: str, vector_col: str) -> pa.Table:
    """Return ids and their rows, of shape ``(n, width)``, as a table."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    return pa.table({id_col: pa.array(ids), vector_col: vectors})


def _initialize(
    weight: torch.Tensor, rows: int, place: TablePlacement, init: Callable[..., Any], seed: int
) -> None:
    """Set the rows of a place to their first values, a chunk of the table after the other."""
    if not len(weight):
        return
    filled = 0
    with torch.random.fork_rng(devices=[]):
        for number, start in enumerate(range(0, rows, CHUNK_ROWS)):
            torch.manual_seed(mixed_seed(seed, number))
            chunk = weight.new_empty(min(CHUNK_ROWS, rows - start), weight.shape[1])
            with torch.no_grad():
                init(chunk)
            own = chunk[(place.rank - start) % place.world_size :: place.world_size]
            weight[filled : filled + len(own)] = own
            filled += len(own)


def mapped_tensor(shape: Sequence[int], dtype: torch.dtype, folder: str | None) -> torch.Tensor:
    """Return a tensor in a file that goes with this process."""
    size = int(np.prod(shape))
    descriptor, path = tempfile.mkstemp(prefix="bigdl-rows-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(*shape)
    except OSError as error:
        raise UsageError(
            f"The rows of a table with storage='mmap' need {size * dtype.itemsize} "
            f"bytes in {os.path.dirname(path)!r}: {error}",
            code="path-unusable",
        ) from error
    finally:
        os.close(descriptor)
        os.unlink(path)


def of_rows(state: dict[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """Return what an optimizer keeps of each row of a weight."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
    }
