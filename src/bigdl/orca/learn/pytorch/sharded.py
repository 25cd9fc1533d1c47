"""Embeddings whose rows lie in slices on the workers of a fit or an evaluation.

A worker makes its model within :func:`placed`, so that a :class:`ShardedEmbedding` allocates the
worker's rows only.  Its weight is an ordinary parameter with a sparse gradient, so the user's
optimizer updates the rows, and keeps their state, where they lie.  :class:`ShardedTables` are those
of a model: what the loop asks them to do, and their arrays in a checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.rows import Distinct, RowExchange, rows_of_rank
from bigdl.runtime.worker import Worker
from bigdl.training.checkpoint import Checkpoint
from bigdl.training.slices import SavedSlices
from bigdl.training.state import dumps, loads, mixed_seed

_CHUNK = 1 << 16  # rows that are initialized under one seed
BROADCAST = 1 << 30  # bytes of tables that travel with a model that predicts


@dataclass(frozen=True)
class Place:
    """Where a model is made.

    Attributes
    ----------
    rank, world_size : int
        Of the worker.
    folder : str or None
        Where it may write files.
    is_loaded : bool
        True if rows come from a checkpoint, so that they need no first values.
    """

    rank: int = 0
    world_size: int = 1
    folder: str | None = None
    is_loaded: bool = False

    @classmethod
    def of(cls, worker: Worker) -> Place:
        """Return the place of a worker."""
        options = worker.options
        has_slices = "snapshot" in options and Checkpoint.unpack_head(options["snapshot"]).slices
        is_loaded = bool(has_slices or options.get("slices"))
        return cls(worker.rank, worker.world_size, worker.local_dir, is_loaded)


NOWHERE = Place(0, 0)  # a model without the rows of its tables
_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextlib.contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """Make models for a place within the block; None leaves it to a block around this one."""
    token = _place.set(place or _place.get())
    try:
        yield
    finally:
        _place.reset(token)


class ShardedEmbedding(torch.nn.Module):
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

    sparse = True  # gradients of its weight

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
            raise UsageError("num_embeddings should be a number or numbers, got an empty list")
        if not callable(init):
            raise UsageError(f"init should be a function of a tensor of rows, got {init!r}")
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        self._has_fields = not isinstance(num_embeddings, int)
        self.num_embeddings = sum(self._fields)
        self.embedding_dim = check_positive("embedding_dim", embedding_dim)
        self.storage = check_choice("storage", storage, ("memory", "mmap"))
        self._starts: torch.Tensor
        self._sizes: torch.Tensor
        self._place = _place.get()
        self.exchange: RowExchange | None = None
        self._number = 0
        # drawn everywhere, so that what is made next has the same weights on all ranks
        seed = int(torch.randint(1 << 62, ()))
        place = self._place or Place()
        rows = rows_of_rank(self.num_embeddings, place.rank, place.world_size or 1)
        rows = rows if place.world_size else 0
        shape = rows, self.embedding_dim
        weight = torch.empty(shape, dtype=dtype)
        if self.storage == "mmap" and self._place is not None and rows:
            weight = _mapped(shape, dtype, place.folder)
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
            return self.exchange.fetch(self._number, rows.cpu()).to(ids.device)
        if self._place is not None:
            raise UsageError("A ShardedEmbedding was called before its workers have met")
        return functional.embedding(rows, self.weight, sparse=True)

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows in the whole table."""
        if not (torch.jit.is_tracing() or torch.compiler.is_compiling()):  # no values are known
            self._check(ids)
        return ids + self._starts if self._has_fields else ids

    def _check(self, ids: torch.Tensor) -> None:
        if self._has_fields and (not ids.dim() or ids.shape[-1] != len(self._fields)):
            raise UsageError(
                f"The ids of a ShardedEmbedding of {len(self._fields)} fields need a last "
                f"dimension of {len(self._fields)}, got the shape {tuple(ids.shape)}"
            )
        wrong = (ids < 0) | (ids >= self._sizes)
        if wrong.any():
            place = torch.nonzero(wrong)[0]
            field = int(place[-1]) if self._has_fields else 0
            where = f" in field {field}" if self._has_fields else ""
            raise UsageError(
                f"A ShardedEmbedding of {self._fields[field]} rows{where} was asked for row "
                f"{int(ids[tuple(place)])}"
            )

    # -- what Estimators do ----------------------------------------------------------------------

    @property
    def is_placed(self) -> bool:
        """True if it holds the rows of a worker, which are no part of the state dict then."""
        return self._place is not None

    def cut(self, place: Place) -> None:
        """Keep the rows of a worker only, of a table that is whole."""
        if not self.is_placed:
            self._place = place
            own = self.own(self.weight.detach())
            if self.storage == "mmap" and len(own):
                rows = _mapped(own.shape, own.dtype, place.folder)
                rows.copy_(own)
            else:
                rows = own.clone()
            self.weight.data = rows

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this worker's rows of an array that has one for each of the table."""
        place = self._place or Place()
        return whole[place.rank :: place.world_size] if place.world_size else whole[:0]

    def connect(self, exchange: RowExchange) -> None:
        """Fetch rows from the other workers from now on."""
        self.read_from(exchange, exchange.add(self.weight, self.num_embeddings))

    def read_from(self, exchange: RowExchange, number: int) -> None:
        """Fetch rows as the table of this number."""
        self.exchange, self._number = exchange, number

    def _apply(self, fn: Callable, recurse: bool = True) -> ShardedEmbedding:
        if not self.is_placed:
            return super()._apply(fn, recurse)
        # rows of a worker stay in its memory, whatever the device of the model
        dtype = fn(self.weight.detach()[:0]).dtype
        if dtype != self.weight.dtype:
            self.weight.data = self.weight.detach().to(dtype)
        self._starts, self._sizes = fn(self._starts), fn(self._sizes)
        return self

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

    def extra_repr(self) -> str:
        rows = self._fields if self._has_fields else self.num_embeddings
        return f"{rows}, {self.embedding_dim}"


def _initialize(weight: torch.Tensor, rows: int, place: Place, init: Callable, seed: int) -> None:
    """Set the rows of a place to their first values, a chunk of the table after the other."""
    if not len(weight):
        return
    filled = 0
    with torch.random.fork_rng(devices=[]):
        for number, start in enumerate(range(0, rows, _CHUNK)):
            torch.manual_seed(mixed_seed(seed, number))
            chunk = weight.new_empty(min(_CHUNK, rows - start), weight.shape[1])
            with torch.no_grad():
                init(chunk)
            own = chunk[(place.rank - start) % place.world_size :: place.world_size]
            weight[filled : filled + len(own)] = own
            filled += len(own)


def _mapped(shape: Sequence[int], dtype: torch.dtype, folder: str | None) -> torch.Tensor:
    """Return a tensor in a file that goes with this process."""
    size = int(np.prod(shape))
    descriptor, path = tempfile.mkstemp(prefix="bigdl-rows-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(*shape)
    except OSError as error:
        raise UsageError(
            f"The rows of a ShardedEmbedding with storage='mmap' need {size * dtype.itemsize} "
            f"bytes in {os.path.dirname(path)!r}: {error}"
        ) from error
    finally:
        os.close(descriptor)
        os.unlink(path)


def tables_of(model: torch.nn.Module) -> dict[str, ShardedEmbedding]:
    """Return the sharded embeddings of a model, by the names of their weights."""
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in model.named_modules()
        if isinstance(module, ShardedEmbedding)
    }


def cut_tables(model: torch.nn.Module, optimizer: Any, place: Place) -> None:
    """Keep a worker's rows of the tables of a model that came whole, and of its optimizer."""
    for table in model.modules():
        if isinstance(table, ShardedEmbedding) and not table.is_placed:
            table.cut(place)
            if isinstance(optimizer, torch.optim.Optimizer):
                state = optimizer.state.get(table.weight, {})
                for key, value in _of_rows(state, table.num_embeddings).items():
                    state[key] = table.own(value).clone()


class ShardedTables:
    """The sharded embeddings of a worker's model, and what the optimizer keeps of their rows.

    Without any, all methods do nothing.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer, optional
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any = None):
        tables = tables_of(model).items()
        self._tables = {name: table for name, table in tables if table.is_placed}
        self._optimizer = optimizer
        exchanges = [table.exchange for table in self._tables.values()]
        self._exchange = exchanges[0] if exchanges else None

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """The slices of this process."""
        return [table.weight for table in self._tables.values()]

    def without(self, parameters: Sequence) -> list:
        """Return the parameters that all ranks have."""
        own = {id(weight) for weight in self.weights}
        return [p for p in parameters if id(p) not in own]

    # -- a step; collectives ---------------------------------------------------------------------

    def connect(self, sync: GradientSync) -> None:
        """Let the workers fetch rows from each other."""
        if self._tables:
            self._exchange = RowExchange(sync)
            for table in self._tables.values():
                table.connect(self._exchange)

    def begin(self) -> None:
        """Before the forward pass of a batch, or of several batches without gradients."""
        if self._exchange is not None:
            self._exchange.begin()

    def finish(self) -> None:
        """After it, or instead of it."""
        if self._exchange is not None:
            self._exchange.finish()

    def send_gradients(self, weight: float) -> None:
        """Set the gradients of the slices; see :meth:`RowExchange.send_gradients`."""
        if self._exchange is not None:
            self._exchange.send_gradients(weight)

    # -- the state -------------------------------------------------------------------------------

    def optimizer_state(self) -> dict:
        """Return the optimizer's state dict, without what it keeps of a worker's rows.

        Of sharded embeddings it says under ``tables`` which of its parameters they are.
        """
        state = self._optimizer.state_dict()
        if not self._tables:
            return state
        numbers = {id(p): number for number, p in enumerate(_parameters(self._optimizer))}
        state["tables"] = {}
        for name, table in self._tables.items():
            number = state["tables"][name] = numbers.get(id(table.weight))
            of_table = state["state"].get(number, {})
            for key in _of_rows(of_table, len(table.weight)):
                of_table = state["state"][number] = {**of_table}
                del of_table[key]
        return state

    def load_optimizer(self, load: Callable[[], None]) -> None:
        """Call what loads a state dict into the optimizer, and have its rows cut or kept.

        Parameters
        ----------
        load : callable
            Of a state that has none of the rows, which stay, or those of the whole tables.
        """
        kept = {
            id(table.weight): _of_rows(
                self._optimizer.state.get(table.weight, {}), len(table.weight)
            )
            for table in self._tables.values()
        }
        load()
        for table in self._tables.values():
            if id(table.weight) not in {id(p) for p in _parameters(self._optimizer)}:
                continue
            state = self._optimizer.state[table.weight]
            for key, value in _of_rows(state, table.num_embeddings).items():
                state[key] = table.own(value).clone()
            if state:
                self._optimizer.state[table.weight] = {**kept[id(table.weight)], **state}
            elif kept[id(table.weight)]:
                state.update(kept[id(table.weight)])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's rows, and what its optimizer keeps of them, where they lie."""
        arrays = {}
        for name, table in self._tables.items():
            arrays[name] = table.weight.detach().numpy()
            state = self._optimizer.state.get(table.weight, {})
            for key, value in _of_rows(state, len(table.weight)).items():
                arrays[f"{name}.{key}"] = value.contiguous().numpy()
        return arrays

    def load(self, slices: SavedSlices, rank: int, world_size: int) -> None:
        """Take over a worker's rows of a checkpoint."""
        for name, table in self._tables.items():
            self._check(slices, name, table)
            rows = table.weight.detach()
            found = torch.from_numpy(slices.read(name, rank, world_size, rows.numpy()))
            if found.data_ptr() != rows.data_ptr():  # of another dtype
                rows.copy_(found)
            for key in _keys(slices, name) if self._optimizer is not None else ():
                state = self._optimizer.state[table.weight]
                into = state[key].numpy() if key in state else None
                array = slices.read(f"{name}.{key}", rank, world_size, into)
                state[key] = torch.from_numpy(array)

    def _check(self, slices: SavedSlices, name: str, table: ShardedEmbedding) -> None:
        if name not in slices.names or slices.rows(name) != table.num_embeddings:
            rows = slices.rows(name) if name in slices.names else "no"
            raise UsageError(
                f"The checkpoint has {rows} rows of {name}, the model has {table.num_embeddings}"
            )


class SavedRows:
    """Rows that a model reads from the files of a checkpoint, as they are asked for.

    Parameters
    ----------
    slices : SavedSlices
        On storage that is mapped to memory.
    model : torch.nn.Module
        Made :data:`NOWHERE`; its sharded embeddings read here from now on.
    """

    def __init__(self, slices: SavedSlices, model: torch.nn.Module):
        self._tables: list[list[np.ndarray]] = []
        for name, table in tables_of(model).items():
            table.read_from(cast("Any", self), len(self._tables))
            self._tables.append(slices.mapped(name))

    def fetch(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids."""
        slices, distinct = self._tables[table], Distinct(ids)
        numbers = distinct.keys.numpy()
        rows = np.empty((len(numbers), *slices[0].shape[1:]), slices[0].dtype)
        for owner, array in enumerate(slices):
            own = numbers % len(slices) == owner
            rows[own] = array[numbers[own] // len(slices)]
        return distinct.spread(torch.from_numpy(rows))


def whole(snapshot: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose files hold all rows of tables that lie in slices."""
    slices = snapshot.slices
    if slices is None:
        return snapshot
    model, optimizer = (loads(snapshot.files[name]) for name in ("model.pt", "optimizer.pt"))
    for name, number in optimizer.pop("tables").items():
        model[name] = torch.from_numpy(slices.read(name))
        for key in _keys(slices, name):
            state = optimizer["state"].setdefault(number, {})
            state[key] = torch.from_numpy(slices.read(f"{name}.{key}"))
    files = {**snapshot.files, "model.pt": dumps(model), "optimizer.pt": dumps(optimizer)}
    manifest = {key: value for key, value in snapshot.manifest.items() if key != "slices"}
    return Checkpoint(manifest, files)


def _parameters(optimizer: Any) -> list:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _of_rows(state: dict, rows: int) -> dict[str, torch.Tensor]:
    """Return what an optimizer keeps of each row of a weight."""
    return {
        key: cast("torch.Tensor", value)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
    }


def _keys(slices: SavedSlices, name: str) -> list[str]:
    """Return names of what the optimizer kept of the rows of a table."""
    start = f"{name}."
    return [each[len(start) :] for each in slices.names if each.startswith(start)]
