"""TableLoader: batches of a table's rows, in one order for any number of ranks."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError, require
from bigdl.common.private_folders import private_folder, private_root, process_folder
from bigdl.data.columns import RecordField, column_of, fields_of, record_dtype, varying_values
from bigdl.data.sources import RowSource, open_source
from bigdl.data.store import (
    Ragged,
    RecordStore,
    SharedStore,
    shared_path,
    store_in_folder,
    store_in_memory,
)
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.order import (
    Order,
    WindowOrder,
    make_order,
    order_facts,
    ranges_of,
)

if TYPE_CHECKING:
    import torch

__all__ = ["TableLoader"]

logger = logging.getLogger("bigdl.data")

_FORMAT = 1
_GROUP_ROWS = 16 << 10  # rows that one gather fetches, of several small batches
_SHARE = 0.8  # of the free disk or memory that a table may take
WEIGHT = "row_weight"
"""Column that tells rows from those that were repeated to fill a batch."""


class TableLoader:
    """Batches of a table, each row once per epoch, in an order that no number of ranks changes.

    At each step the ranks together hold the next ``world_size * batch_size`` rows of one global
    order, rank 0 the first ones. The order depends on the table, `seed` and the epoch only. So
    a state that was saved by some ranks is valid for any number of them, any batch size and any
    number of threads.

    Parameters
    ----------
    source : object
        Path or paths of Parquet files or folders of them, on this machine or any storage of
        fsspec; path of a Delta Lake or Iceberg table, such as ``"clicks@v5"`` for its version 5
        (:func:`bigdl.data.lake_tables.open_table`), or of a Lance dataset; an object of deltalake,
        pyiceberg or Lance; a table of pyarrow, a frame of pandas or polars, a relation of DuckDB, a
        ``Dataset`` of Hugging Face, or a dict of NumPy arrays.
    columns : sequence of str, optional
        Default all. ``"user.age"`` is a field of a struct; the name of a struct stands for all
        its fields.
    batch_size : int, default 4096
        Rows per rank and step.
    shuffle : bool or "global", default True
        True cuts the table in 64 virtual shards, permutes each, and takes one row of each in turn;
        ``"global"`` is one permutation of all rows. Neither needs memory. False reads the rows as
        they lie in the table.
    seed : int, default 0
    last : {"keep", "drop", "pad"}, default "keep"
        The last step of an epoch, which may have fewer rows: ``"keep"`` shares them out evenly,
        so ranks differ by a row at most and may have none; ``"drop"`` leaves them out; ``"pad"``
        repeats rows up to `batch_size`, and the column ``row_weight`` of every batch is 1 for rows
        and 0 for repeated ones.
    transform : callable, optional
        ``transform(batch)`` returns what takes the batch's place. It runs in the reading threads.
    rank, world_size : int or "auto"
        ``"auto"`` asks, when an iteration begins, torch.distributed if it is initialized, Ray
        Train if this is one of its workers, or else the environment (``RANK``, ``WORLD_SIZE``).
    window : int, optional
        Rows that are kept on disk at a time. By default the whole table is; if it is larger than
        80 % of the free disk, one process alone chooses a window, and several ask for one.
    cache : str, optional
        A folder in which the converted table stays for the next program. By default it lies in
        the temporary folder of the user, shared by all ranks of the machine, and is removed with
        the last of them.
    threads : int, optional
        Reading threads; default 2, with a `transform` the cores of the process. 0 reads in the
        caller's thread.
    format : {"torch", "numpy"}, default "torch"
    device : str or torch.device, optional
        Where batches are moved to.
    pin_memory : bool, default False
        Put batches in page-locked memory first, for a `device` of CUDA.

    Attributes
    ----------
    global_rows : int
        Rows of all ranks in the step that was received last.

    Notes
    -----
    A batch is a dict by column: numbers as tensors of shape ``(rows, ...)``; lists of equal lengths
    as one tensor, others as a nested tensor (``torch.jagged``; an object array of arrays with
    ``format="numpy"``); strings and bytes as lists. Unsigned integers of more than 8 bits become
    signed ones that hold them.

    A loss that is a mean over the rows of a rank counts right in DistributedDataParallel, also in
    an uneven last step, after ``loss * (rows * world_size / loader.global_rows)``.

    Raises
    ------
    UsageError
        For a source that cannot be read, a column that cannot become a tensor, or a null.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from bigdl.data import TableLoader
    >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4, shuffle=False)
    >>> len(loader)
    3
    >>> batches = iter(loader)
    >>> next(batches)["x"].tolist()
    [0, 1, 2, 3]
    >>> state = loader.state_dict()
    >>> resumed = TableLoader(pa.table({"x": range(10)}), batch_size=6, shuffle=False)
    >>> resumed.load_state_dict(state)
    >>> [batch["x"].tolist() for batch in resumed]
    [[4, 5, 6, 7, 8, 9]]
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | None = None,
        batch_size: int = 4096,
        shuffle: bool | str = True,
        seed: int = 0,
        last: str = "keep",
        transform: Callable[[dict[str, Any]], Any] | None = None,
        rank: int | str = "auto",
        world_size: int | str = "auto",
        *,
        window: int | None = None,
        cache: str | os.PathLike | None = None,
        threads: int | None = None,
        format: str = "torch",
        device: str | torch.device | None = None,
        pin_memory: bool = False,
    ):
        self.batch_size = check_positive("batch_size", batch_size)
        self.shuffle = check_choice("shuffle", shuffle, (True, False, "global"))
        self.seed = check_integer("seed", seed, 0)
        self.last = check_choice("last", last, ("keep", "drop", "pad"))
        self.format = check_choice("format", format, ("torch", "numpy"))
        if transform is not None and not callable(transform):
            raise UsageError(
                f"transform must be a function of a batch, got {transform!r}",
                code="argument-type",
                argument="transform",
            )
        if (rank == "auto") != (world_size == "auto"):
            raise UsageError(
                f"rank and world_size belong together, got {rank!r} and {world_size!r}; give both, "
                "or neither",
                code="argument-conflict",
                argument="rank",
            )
        if rank != "auto":
            check_positive("world_size", world_size)
            check_integer("rank", rank, 0, int(world_size) - 1)
        if format == "numpy" and (device is not None or pin_memory):
            raise UsageError(
                'device= and pin_memory= are of tensors; leave them out with format="numpy"',
                code="argument-conflict",
                argument="device",
            )
        if window is not None:
            check_positive("window", window)
            if shuffle == "global":
                raise UsageError(
                    'A window holds a part of the rows, which shuffle="global" mixes over the '
                    "whole table; pass shuffle=True, or leave window= out",
                    code="argument-conflict",
                    argument="window",
                )
        self._rank, self._world_size = rank, world_size
        self._columns = [columns] if isinstance(columns, str) else columns
        self._transform, self._window = transform, window
        self._cache = None if cache is None else os.fspath(cache)
        self._threads = None if threads is None else check_integer("threads", threads, 0)
        self._device, self._pin = device, pin_memory
        if format == "torch":
            require("torch", "data")
        self._data = source
        self.global_rows = 0
        self._epoch = self._next = self._step = 0
        self._is_resumed = False
        # What stands for the newest iteration: the loader does not keep the iteration itself, so
        # one that a loop has left ends with the loop.
        self._active: _Received | None = None
        self._open()

    def _open(self) -> None:
        self._source: RowSource = open_source(self._data, self._columns)
        fields = fields_of(self._source.schema, self._columns, self._source.name)
        self.fields: list[RecordField] = fields
        self.rows = self._source.rows
        if not self.rows:
            raise UsageError(f"There is no row in {self._source.name}", code="data-empty")
        if self.last == "pad" and any(each.name == WEIGHT for each in fields):
            raise UsageError(
                f'last="pad" adds a column {WEIGHT!r}, which {self._source.name} has already; '
                "leave it out of columns=, or rename it",
                code="column-duplicate",
                column=WEIGHT,
            )
        self._store: RecordStore | None = None
        self._shared: SharedStore | None = None
        self._order_facts: dict[str, int | str] | None = None
        self._fingerprint: str | None = None

    # -- ranks and lengths -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._grid()[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._grid()[1]

    def _grid(self) -> tuple[int, int]:
        if self._rank != "auto":
            return int(self._rank), int(self._world_size)
        group = sys.modules.get("torch.distributed")
        if group is not None and group.is_available() and group.is_initialized():
            return group.get_rank(), group.get_world_size()
        session = sys.modules.get("ray.train")
        if session is not None:
            try:
                context = session.get_context()
                return context.get_world_rank(), context.get_world_size()
            except Exception:  # not a worker; of several classes
                pass
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UsageError(
                f"The environment has RANK={rank} and WORLD_SIZE={size}; give rank= and "
                "world_size=",
                code="argument-value",
                argument="rank",
            )
        return int(rank), int(size)

    def _steps(self, rows: int, world_size: int) -> int:
        stride = self.batch_size * world_size
        return rows // stride if self.last == "drop" else -(-rows // stride)

    def __len__(self) -> int:
        """Number of steps in an epoch, equal on all ranks.

        While an epoch is read that another number of ranks or another batch size began, it is the
        steps that were made and those that are left, if these are more: loops that stop at this
        number leave no row out.
        """
        size = self.world_size
        whole = self._steps(self.rows, size)
        return max(whole, self._step + self._steps(self.rows - self._next, size))

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next row belongs to."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch at the next iteration.

        After :meth:`load_state_dict` the rest of the saved epoch is read, if that is its number.

        Parameters
        ----------
        epoch : int

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> loader = TableLoader(pa.table({"x": range(5)}), seed=1)
        >>> loader.set_epoch(3)
        >>> [batch["x"].tolist() for batch in loader], loader.epoch
        ([[0, 2, 4, 1, 3]], 4)
        """
        epoch = check_integer("epoch", epoch, 0)
        if not (self._is_resumed and epoch == self._epoch):
            if self._is_resumed and self._next:
                logger.warning(
                    "The state that was loaded is of epoch %d, after %d of its rows, and "
                    "set_epoch(%d) leaves the rest of them out",
                    self._epoch,
                    self._next,
                    epoch,
                )
            self._active = None
            self._is_resumed = False
            self._epoch, self._next, self._step = epoch, 0, 0

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: equal on all ranks, valid for any number of them.

        Returns
        -------
        dict
            JSON-able, of constant size. ``next`` is the number of rows of epoch ``epoch`` that the
            loop has received; rows that were only read ahead do not count.

        Examples
        --------
        >>> import json
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4)
        >>> _ = next(iter(loader))
        >>> state = json.loads(json.dumps(loader.state_dict()))
        >>> state["epoch"], state["next"], state["rows"]
        (0, 4, 10)
        """
        _refuse_worker("state_dict()")
        return self._state_at(self._epoch, self._next, self._step)

    def _state_at(self, epoch: int, next_row: int, step: int) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "table": self._source.name,
            "version": self._source.version,
            "fingerprint": self._identity(),
            "rows": self.rows,
            "seed": self.seed,
            "order": dict(self._order()),
            "epoch": epoch,
            "next": next_row,
            "step": step,
        }

    def state_after(self, state: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the state of a loop that has made steps since another state.

        For frameworks that take batches before they use them.

        Parameters
        ----------
        state : dict
            Of :meth:`state_dict`.
        steps : int
            Of this batch size and number of ranks, within one epoch.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4)
        >>> begin = loader.state_dict()
        >>> [loader.state_after(begin, steps)["next"] for steps in (1, 2)]
        [4, 8]
        >>> loader.state_after(begin, 3)["epoch"]
        1
        """
        epoch, start, made = state["epoch"], state["next"], state["step"]
        size = self.world_size
        if steps >= self._steps(self.rows - start, size):
            return self._state_at(epoch + 1, 0, 0)
        return self._state_at(epoch, start + steps * self.batch_size * size, made + steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a loop was, with any number of ranks and any batch size.

        Parameters
        ----------
        state_dict : dict
            Of :meth:`state_dict`.

        Raises
        ------
        UsageError
            If it is of another table, another version of it, another order or another seed.
        """
        _refuse_worker("load_state_dict()")
        state = dict(state_dict)
        if state.get("format") != _FORMAT:
            raise UsageError(
                f"The state of a TableLoader has format {_FORMAT}, this one has "
                f"{state.get('format')!r}; pass what state_dict() returned",
                code="checkpoint-mismatch",
            )
        self._check_table(state)
        if state["seed"] != self.seed:
            raise UsageError(
                f"The state was saved with seed={state['seed']}, this loader has "
                f"seed={self.seed}; give both the same",
                code="checkpoint-mismatch",
                argument="seed",
            )
        order = dict(state["order"])
        if self._window is None and order["kind"] in ("windows", "table windows"):
            is_alike = order["kind"] == order_facts(self.rows, self.shuffle, 1)["kind"]
            is_alike = is_alike and self.shuffle != "global"
        else:
            is_alike = order == self._order()
        if not is_alike:
            raise UsageError(
                f"The state was saved with the order {order}, this loader has {self._order()}; "
                "give both the same shuffle= and window=",
                code="checkpoint-mismatch",
                argument="shuffle",
            )
        if order != self._order():
            self._order_facts, self._store = order, None
        self._epoch, self._next = int(state["epoch"]), int(state["next"])
        self._step = int(state["step"])
        self._is_resumed, self._active = True, None

    def _check_table(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] == self._identity() and state["rows"] == self.rows:
            return
        saved, here = state["version"] or state["table"], self._source.version or self._source.name
        advice = (
            f"pass {saved!r} to go on with the same rows"
            if state["version"] and state["version"] != self._source.version
            else "go on with the same files, or begin a new epoch without the state"
        )
        raise UsageError(
            f"The state was saved for {saved} ({state['rows']:,} rows, fingerprint "
            f"{state['fingerprint'][:12]}), and this table is {here} ({self.rows:,} rows, "
            f"fingerprint {self._identity()[:12]}); {advice}",
            code="checkpoint-mismatch",
            path=here,
        )

    def _identity(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self._source.fingerprint()
        return self._fingerprint

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_source", "_store", "_shared", "_active"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        facts, fingerprint = state.pop("_order_facts"), state.pop("_fingerprint")
        self.__dict__.update(state, _active=None)
        self._open()
        self._order_facts, self._fingerprint = facts, fingerprint

    # -- rows --------------------------------------------------------------------------------------

    def _order(self) -> dict[str, int | str]:
        if self._order_facts is None:
            window = self._window
            if window is None and not self._source.is_in_memory:
                window = self._window_that_fits()
            self._order_facts = order_facts(self.rows, self.shuffle, window)
        return self._order_facts

    def _window_that_fits(self) -> int | None:
        """Return how many rows the disk holds, or None if it holds all of them."""
        size = record_dtype(self.fields).itemsize
        folder = private_root() if self._cache is None else str(private_folder(self._cache))
        free = int(shutil.disk_usage(folder).free * _SHARE)
        if self.rows * size <= free or os.path.isdir(self._shared_path()):
            return None
        window = max(1, free // size // 3)  # one is read, the next one is loaded
        if self.shuffle == "global":
            raise UsageError(
                f"The {self.rows:,} rows of {self._source.name} take {self.rows * size >> 20:,} "
                f'MiB, and {folder} has {free >> 20:,} MiB for them; shuffle="global" needs all '
                "of them: point TMPDIR or cache= to a larger disk, or pass shuffle=True",
                code="resource-limit",
            )
        if self.world_size > 1:
            raise UsageError(
                f"The {self.rows:,} rows of {self._source.name} take {self.rows * size >> 20:,} "
                f"MiB, and {folder} has {free >> 20:,} MiB for them; pass window={window} (or "
                "fewer rows) on all ranks, or point TMPDIR or cache= to a larger disk",
                code="resource-limit",
                argument="window",
            )
        return window

    def _shared_path(self) -> str:
        return shared_path(
            [self._source.name, self._identity()], self.fields, self.rows, self._cache
        )

    def _equal_lists(self) -> dict[str, int]:
        """Return the columns whose lists have one length in the first rows, with it."""
        lists = [each for each in self.fields if each.kind == "list"]
        names = [each.name for each in lists]
        _, read = next(self._source.pieces(names, [(0, min(self.rows, 1024))]), (0, None))
        if read is None or not lists:
            return {}
        batch = next(read())
        counts = {each.name: varying_values(each, column_of(batch, each.name))[1] for each in lists}
        return {n: int(each[0]) for n, each in counts.items() if (each == each[0]).all()}

    def _whole_store(self) -> RecordStore:
        if self._store is None:
            names = [each.name for each in self.fields]

            def pieces() -> Iterator[Any]:
                return self._source.pieces(names, [(0, self.rows)])

            if self._source.is_in_memory:
                self._store = store_in_memory(self.fields, self.rows, pieces())
            else:
                self._shared = SharedStore(
                    self._shared_path(),
                    self.fields,
                    self.rows,
                    pieces,
                    keep=self._cache is not None,
                )
                self._store = self._shared.store
        return self._store

    def _window_store(self, order: WindowOrder, number: int) -> RecordStore:
        window = order.windows[number]
        names = [each.name for each in self.fields]
        rows, pieces = window.stop - window.start, self._source.pieces(names, window.ranges)
        if self._source.is_in_memory:
            return store_in_memory(self.fields, rows, pieces)
        folder = process_folder() if self._cache is None else str(private_folder(self._cache))
        return store_in_folder(self.fields, rows, pieces, folder)

    def __iter__(self) -> _Iteration:
        _refuse_worker("A TableLoader")
        if self._active is not None and self._active.any and not self._is_resumed:
            # the loop was left within an epoch: the next one begins
            self._epoch, self._next, self._step = self._epoch + 1, 0, 0
        if self.last == "drop" and not self._steps(self.rows, self.world_size):
            raise UsageError(
                f'With last="drop" a step of {self.batch_size} rows on each of {self.world_size} '
                f"ranks is left out, as the table has {self.rows} rows; pass a smaller batch_size",
                code="data-size",
                argument="batch_size",
            )
        self._is_resumed = False
        iteration = _Iteration(self)
        self._active = iteration.received
        return iteration

    def example(self, step: int = 0) -> Any:
        """Return a batch as those of epoch 0, without receiving it: for shapes and types.

        Parameters
        ----------
        step : int

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4)
        >>> loader.example()["x"].shape, loader.state_dict()["next"]
        (torch.Size([4]), 0)
        """
        rank, size = self._grid()
        order = make_order(self._order(), self.rows, self.seed, 0)
        reader = _EpochReader(self, order, rank, size, 0)
        try:
            return reader.batches(step, step + 1, reader.prepare(step, step + 1))[0]
        finally:
            _end(None, *reader.resources)

    def close(self) -> None:
        """Remove what is on disk, if no other process uses it; the next iteration makes it again.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> TableLoader(pa.table({"x": range(5)})).close()
        """
        self._active = self._store = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _refuse_worker(what: str) -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise UsageError(
            f"{what} does not belong into a worker process of a DataLoader, where each would read "
            "all rows; iterate over the TableLoader itself, which reads by threads",
            code="unsupported",
        )


class _EpochReader:
    """The reading threads' view of one epoch: the batches of any steps of one rank.

    Parameters
    ----------
    loader : TableLoader
    order : Order
    rank, world_size : int
    start : int
        Position of the first step.
    """

    def __init__(self, loader: TableLoader, order: Order, rank: int, world_size: int, start: int):
        self._loader, self._order = loader, order
        self._rank, self._size, self._start = rank, world_size, start
        self._stride = loader.batch_size * world_size
        self._stores: dict[int, Future[RecordStore]] = {}
        self._loading: ThreadPoolExecutor | None = None
        self._dense: dict[str, int] = {}
        if isinstance(order, WindowOrder):
            self._loading = ThreadPoolExecutor(1, "bigdl-window")
            self._dense = loader._equal_lists()
        else:
            store = loader._whole_store()
            self._dense = store.rows_of_equal_lists()
            self._store = store

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the positions of a step of all ranks."""
        start = self._start + step * self._stride
        return start, min(start + self._stride, self._loader.rows)

    def prepare(self, first: int, last: int) -> dict[int, Future[RecordStore]]:
        """Begin to load the windows that steps need, and the next one; forget the ones before."""
        if not isinstance(self._order, WindowOrder) or self._loading is None:
            return {}
        low = self._order.number(self.bounds(first)[0])
        high = self._order.number(self.bounds(last - 1)[1] - 1)
        for number in range(low, min(high + 2, len(self._order.windows))):
            if number not in self._stores:
                self._stores[number] = self._loading.submit(
                    self._loader._window_store, self._order, number
                )
        for number in [each for each in self._stores if each < low]:
            del self._stores[number]
        return {number: self._stores[number] for number in range(low, high + 1)}

    def batches(self, first: int, last: int, stores: dict[int, Future[RecordStore]]) -> list[Any]:
        """Return the batches of the steps from `first` to before `last`."""
        positions, sizes, kept = [], [], []
        for step in range(first, last):
            bounds = self.bounds(step)
            start, stop = ranges_of(*bounds, self._size)[self._rank]
            here = np.arange(start, stop, dtype=np.int64)
            kept.append(len(here))
            if self._loader.last == "pad" and len(here) < self._loader.batch_size:
                # a rank without rows repeats the first one of the step
                source = here if len(here) else np.array([bounds[0]], np.int64)
                here = np.resize(source, self._loader.batch_size)
            positions.append(here)
            sizes.append(len(here))
        columns = self._gather(np.concatenate(positions), stores)
        if self._loader.last == "pad":
            weights = [np.arange(n) < k for n, k in zip(sizes, kept, strict=True)]
            columns[WEIGHT] = np.concatenate(weights).astype(np.float32)
        pieces = {name: self._split(values, sizes) for name, values in columns.items()}
        batches = [
            dict(zip(pieces, each, strict=True)) for each in zip(*pieces.values(), strict=True)
        ]
        if self._loader._transform is not None:
            batches = [self._loader._transform(each) for each in batches]
        if self._loader._pin:
            batches = [_each_tensor(batch, lambda tensor: tensor.pin_memory()) for batch in batches]
        return batches

    def _gather(
        self, positions: np.ndarray, stores: dict[int, Future[RecordStore]]
    ) -> dict[str, Any]:
        if not isinstance(self._order, WindowOrder):
            columns = self._store.gather(self._order.rows_at(positions))
        else:
            parts, places = [], []
            for number, store in stores.items():
                window = self._order.windows[number]
                here = np.flatnonzero((positions >= window.start) & (positions < window.stop))
                if len(here):
                    stored = self._order.stored_at(number, positions[here])
                    parts.append(store.result().gather(stored))
                    places.append(here)
            if not parts:  # a rank without rows
                columns = next(iter(stores.values())).result().gather(positions)
            elif len(parts) == 1:
                columns = parts[0]
            else:
                columns = _joined(parts, np.concatenate(places))
        for name, length in self._dense.items():
            columns[name] = _dense(columns[name], length, name)
        return columns

    def _split(self, values: Any, sizes: list[int]) -> Sequence[Any]:
        """Cut a column in those of the batches, in the form that the caller gets."""
        ends = np.cumsum([0, *sizes]).tolist()
        parts = list(itertools.pairwise(ends))
        is_torch = self._loader.format == "torch"
        if isinstance(values, list):
            return [values[low:high] for low, high in parts]
        if isinstance(values, np.ndarray):
            if not is_torch:
                return [values[low:high] for low, high in parts]
            import torch

            return torch.from_numpy(values).split(sizes)
        offsets = np.concatenate([[0], np.cumsum(values.counts)])
        return [
            (_jagged if is_torch else _array_of_arrays)(values.values, offsets[low : high + 1])
            for low, high in parts
        ]

    @property
    def resources(self) -> tuple[ThreadPoolExecutor | None, dict[int, Future[RecordStore]]]:
        """Executor of windows and stores, which must be ended."""
        return self._loading, self._stores


def _joined(parts: list[dict[str, Any]], places: np.ndarray) -> dict[str, Any]:
    """Return the columns of several gathers, each row at its place."""
    back = np.argsort(places)
    columns: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [each[name] for each in parts]
        if isinstance(first, list):
            flat = [each for part in values for each in part]
            columns[name] = [flat[each] for each in back.tolist()]
        elif isinstance(first, Ragged):
            counts = np.concatenate([each.counts for each in values])
            whole = Ragged(np.concatenate([each.values for each in values]), counts)
            columns[name] = whole.take(back)
        else:
            columns[name] = np.concatenate(values)[back]
    return columns


def _dense(ragged: Ragged, length: int, name: str) -> np.ndarray:
    if (ragged.counts != length).any():
        other = int(ragged.counts[ragged.counts != length][0])
        raise SourceError(
            f"Column '{name}' holds lists of {length} values in the first rows and of {other} in "
            "others, which cannot be known when a table is read in windows; pad or cut them to "
            "one length, or make the first row's another one",
            code="data-shape",
            column=name,
        )
    return ragged.values.reshape(len(ragged.counts), length, *ragged.values.shape[1:])


def _jagged(values: np.ndarray, offsets: np.ndarray) -> Any:
    import torch

    low, high = int(offsets[0]), int(offsets[-1])
    ends = torch.from_numpy(offsets - low)
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values[low:high]), ends)


def _array_of_arrays(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    out = np.empty(len(offsets) - 1, object)
    for row, (low, high) in enumerate(itertools.pairwise(offsets)):
        out[row] = values[low:high]
    return out


def _each_tensor(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors of a batch of any structure."""
    if hasattr(batch, "pin_memory"):
        return change(batch)
    if isinstance(batch, dict):
        return {name: _each_tensor(each, change) for name, each in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([_each_tensor(each, change) for each in batch])
    return batch


class _Iteration:
    """The rest of one epoch, as one rank receives it.

    Parameters
    ----------
    loader : TableLoader
    """

    def __init__(self, loader: TableLoader):
        rank, size = loader._grid()
        self._loader, self._epoch, self._before = loader, loader._epoch, loader._step
        self._count = loader._steps(loader.rows - loader._next, size)
        order = make_order(loader._order(), loader.rows, loader.seed, self._epoch)
        self._reader = _EpochReader(loader, order, rank, size, loader._next)
        # a transform is slower than what a larger gather saves
        self._group = 1 if loader._transform else max(1, _GROUP_ROWS // loader.batch_size)
        threads = loader._threads
        if threads is None:
            threads = core_count() if loader._transform else 2
        self._pool = ThreadPoolExecutor(threads, "bigdl-loader") if threads else None
        self._ahead = threads + 1
        self._asked = self._given = 0
        self._futures: deque[Future[list[Any]]] = deque()
        self._ready: deque[Any] = deque()
        self.received = _Received()
        # Without the reader, which knows the loader and would keep it for ever.
        self._finalizer = weakref.finalize(self, _end, self._pool, *self._reader.resources)

    @property
    def left(self) -> int:
        """Number of steps that are left."""
        return self._count - self._given

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._given == self._count:
            self._finish()
            raise StopIteration
        if not self._ready:
            self._ready.extend(self._next_group())
        batch = self._ready.popleft()
        loader = self._loader
        if loader._device is not None:
            batch = _each_tensor(
                batch, lambda tensor: tensor.to(loader._device, non_blocking=loader._pin)
            )
        start, stop = self._reader.bounds(self._given)
        self._given += 1
        self.received.any = True
        if loader._active is self.received:
            loader.global_rows = stop - start
            loader._next, loader._step = stop, self._before + self._given
        if self._given == self._count:
            self._finish()
        return batch

    def _next_group(self) -> list[Any]:
        while self._asked < self._count and len(self._futures) < self._ahead:
            first = self._asked
            self._asked = last = min(first + self._group, self._count)
            stores = self._reader.prepare(first, last)
            if self._pool is None:
                return self._reader.batches(first, last, stores)
            self._futures.append(self._pool.submit(self._reader.batches, first, last, stores))
        return self._futures.popleft().result()

    def _finish(self) -> None:
        """Let the loader go on with the next epoch."""
        loader = self._loader
        if loader._active is self.received:
            loader._active = None
            loader._epoch, loader._next, loader._step = self._epoch + 1, 0, 0
        self._finalizer()


class _Received:
    """Record of an iteration that has given a batch.

    Attributes
    ----------
    any : bool
    """

    any = False


def _end(
    pool: ThreadPoolExecutor | None,
    loading: ThreadPoolExecutor | None,
    stores: dict[int, Future[RecordStore]],
) -> None:
    stores.clear()
    for each in (pool, loading):
        if each is not None:
            each.shutdown(wait=False, cancel_futures=True)
