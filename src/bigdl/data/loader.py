"""TableLoader: batches of a table's rows in one global order for any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from bigdl.common.checks import check_choice, check_integer, check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError, hide_frames, require
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

T = TypeVar("T")

__all__ = ["TableLoader"]

logger = logging.getLogger("bigdl.data")

_FORMAT = 1
_GROUP_ROWS = 16 << 10  # rows per gather; small batches are gathered together
_SHARE = 0.8  # maximum share of the free disk for a table
WEIGHT = "row_weight"
"""Column that is 1 for rows and 0 for repeated rows that fill a batch."""


@hide_frames
class TableLoader:
    """Batches of a table's rows, each row once per epoch, in the same order on any number of ranks.

    In each step the ranks together read the next ``world_size * batch_size`` rows of one global
    order, rank 0 the first ones. The order depends only on the table, `seed` and the epoch. So
    a saved state is valid for any number of ranks, any batch size and any number of threads.

    Parameters
    ----------
    source : object
        Path or paths of Parquet files or folders of them, on local disk or any fsspec storage;
        path of a Delta Lake or Iceberg table, such as ``"clicks@v5"`` for its version 5
        (:func:`bigdl.data.lake_tables.open_table`), or of a Lance dataset; an object of deltalake,
        pyiceberg or Lance; a pyarrow table, a pandas or polars frame, a DuckDB relation, a
        Hugging Face ``Dataset``, or a dict of NumPy arrays.
    columns : sequence of str, optional
        Columns to read, by default all. ``"user.age"`` is a field of a struct; the name of a
        struct selects all its fields.
    batch_size : int, default 4096
        Rows per rank and step.
    shuffle : bool or "global", default True
        True splits the table into 64 virtual shards, permutes each, and takes one row of each in
        turn; ``"global"`` permutes all rows. Neither needs memory. False keeps the table's order.
    seed : int, default 0
        Seed of the order.
    last : {"keep", "drop", "pad"}, default "keep"
        Treatment of an incomplete last step: ``"keep"`` distributes its rows evenly, so ranks
        differ by at most one row and may have none; ``"drop"`` skips it; ``"pad"`` repeats rows
        up to `batch_size`, and the column ``row_weight`` of every batch is 1 for rows and 0 for
        repeated rows.
    transform : callable, optional
        ``transform(batch)`` returns the replacement of a batch. It runs in the reading threads.
    rank, world_size : int or "auto"
        ``"auto"`` reads them when an iteration starts: from torch.distributed if it is
        initialized, from Ray Train in one of its workers, otherwise from the environment
        (``RANK``, ``WORLD_SIZE``).
    window : int, optional
        Number of rows on disk at a time, by default the whole table. If the table exceeds 80 % of
        the free disk, a single process chooses a window; several ranks raise an error that names
        one.
    cache : str, optional
        Folder that keeps the converted table for later programs. By default the table is in the
        user's temporary folder, shared by all ranks of the machine, and the last rank removes it.
    threads : int, optional
        Number of reading threads, by default 2; with a `transform` one per core of the process. 0
        reads in the caller's thread.
    format : {"torch", "numpy"}, default "torch"
        Type of the arrays in a batch.
    device : str or torch.device, optional
        Device to which batches are moved.
    pin_memory : bool, default False
        Copy batches to page-locked memory first, for a CUDA `device`.

    Attributes
    ----------
    global_rows : int
        Rows of all ranks in the most recent step.

    Notes
    -----
    A batch is a dict by column: numbers as tensors of shape ``(rows, ...)``; lists of equal lengths
    as one tensor, others as a nested tensor (``torch.jagged``; an object array of arrays with
    ``format="numpy"``); strings and bytes as lists. Unsigned integers of more than 8 bits become
    wider signed integers.

    With DistributedDataParallel, multiply a loss that is a mean over the rank's rows by
    ``rows * world_size / loader.global_rows``; an uneven last step is then weighted correctly.

    Raises
    ------
    UsageError
        If a source cannot be read, a column cannot become a tensor, or a column has nulls.

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
        source: object,
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
                f"rank and world_size must be given together, got {rank!r} and {world_size!r}; "
                "pass both, or neither",
                code="argument-conflict",
                argument="rank",
            )
        if rank != "auto":
            check_positive("world_size", world_size)
            check_integer("rank", rank, 0, int(world_size) - 1)
        if format == "numpy" and (device is not None or pin_memory):
            raise UsageError(
                'device= and pin_memory= apply to tensors only; omit them with format="numpy"',
                code="argument-conflict",
                argument="device",
            )
        if window is not None:
            check_positive("window", window)
            if shuffle == "global":
                raise UsageError(
                    'A window holds a part of the rows, but shuffle="global" permutes the whole '
                    "table; pass shuffle=True, or omit window=",
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
        # Identifies the newest iteration. The loader holds no reference to the iteration, so it
        # is freed when a loop exits early.
        self._active: _ReceivedFlag | None = None
        self._open()

    def _open(self) -> None:
        self._source: RowSource = open_source(self._data, self._columns)
        fields = fields_of(self._source.schema, self._columns, self._source.name)
        self.fields: list[RecordField] = fields
        self.rows = self._source.rows
        if not self.rows:
            raise UsageError(f"{self._source.name} has no rows", code="data-empty")
        if self.last == "pad" and any(each.name == WEIGHT for each in fields):
            raise UsageError(
                f'last="pad" adds a column {WEIGHT!r}, but {self._source.name} already has one; '
                "omit it from columns=, or rename it",
                code="column-duplicate",
                column=WEIGHT,
            )
        self._store: RecordStore | None = None
        self._shared: SharedStore | None = None
        self._order_facts: dict[str, int | str] | None = None
        self._fingerprint: str | None = None
        self._known_content: str | None = None  # before the table is converted

    # -- ranks and lengths -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank_and_size()[0]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._rank_and_size()[1]

    def _rank_and_size(self) -> tuple[int, int]:
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
            except Exception:  # not a Ray Train worker; the class depends on the version
                pass
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UsageError(
                f"The environment has invalid RANK={rank} and WORLD_SIZE={size}; pass rank= and "
                "world_size=",
                code="argument-value",
                argument="rank",
            )
        return int(rank), int(size)

    def _steps(self, rows: int, world_size: int) -> int:
        stride = self.batch_size * world_size
        return rows // stride if self.last == "drop" else -(-rows // stride)

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on all ranks.

        In an epoch that started with another number of ranks or batch size, the number covers the
        completed and the remaining steps, if that is more. So loops that stop at this number read
        every row.
        """
        size = self.world_size
        whole = self._steps(self.rows, size)
        return max(whole, self._step + self._steps(self.rows - self._next, size))

    @property
    def epoch(self) -> int:
        """Epoch number of the next row."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next iteration.

        After :meth:`load_state_dict` with the same epoch, its remaining rows are read.

        Parameters
        ----------
        epoch : int
            Epoch number, from 0.

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
                    "The loaded state is of epoch %d after %d rows; set_epoch(%d) skips its "
                    "remaining rows",
                    self._epoch,
                    self._next,
                    epoch,
                )
            self._active = None
            self._is_resumed = False
            self._epoch, self._next, self._step = epoch, 0, 0

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop, equal on all ranks.

        Returns
        -------
        dict
            JSON, of constant size, valid for any number of ranks. ``next`` is the number of
            rows of epoch ``epoch`` that the loop has received; prefetched rows do not count.

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
            "stamp": self._source.stamp(),
            "content": self._content(),
            "rows": self.rows,
            "seed": self.seed,
            "order": dict(self._order()),
            "epoch": epoch,
            "next": next_row,
            "step": step,
        }

    def state_after(self, state: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the state of the loop `steps` steps after a given state.

        For frameworks that prefetch batches.

        Parameters
        ----------
        state : dict
            Result of :meth:`state_dict`.
        steps : int
            Number of steps with this batch size and number of ranks, within one epoch.

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
        """Resume from a saved position, with any number of ranks and any batch size.

        Parameters
        ----------
        state_dict : dict
            Result of :meth:`state_dict`.

        Raises
        ------
        UsageError
            If the state is of another table, table version, order or seed.
        """
        _refuse_worker("load_state_dict()")
        state = dict(state_dict)
        if state.get("format") != _FORMAT:
            raise UsageError(
                f"The state of a TableLoader must have format {_FORMAT}, got "
                f"{state.get('format')!r}; pass the result of state_dict()",
                code="checkpoint-mismatch",
            )
        self._check_table(state)
        if state["seed"] != self.seed:
            raise UsageError(
                f"The state was saved with seed={state['seed']}, this loader has "
                f"seed={self.seed}; pass the same seed",
                code="checkpoint-mismatch",
                argument="seed",
            )
        order = dict(state["order"])
        if self._window is None and order["kind"] in ("windows", "table windows"):
            is_same_order = order["kind"] == order_facts(self.rows, self.shuffle, 1)["kind"]
            is_same_order = is_same_order and self.shuffle != "global"
        else:
            is_same_order = order == self._order()
        if not is_same_order:
            raise UsageError(
                f"The state was saved with the order {order}, this loader has {self._order()}; "
                "pass the same shuffle= and window=",
                code="checkpoint-mismatch",
                argument="shuffle",
            )
        if order != self._order():
            self._order_facts, self._store = order, None
        if state["stamp"] == self._source.stamp():
            self._known_content = state["content"]
        self._epoch, self._next = int(state["epoch"]), int(state["next"])
        self._step = int(state["step"])
        self._is_resumed, self._active = True, None

    def _check_table(self, state: dict[str, Any]) -> None:
        is_same = state["fingerprint"] == self._identity() and state["rows"] == self.rows
        if is_same and self._has_content_of(state):
            return
        saved, current = (
            state["version"] or state["table"],
            self._source.version or self._source.name,
        )
        advice = (
            f"pass {saved!r} to resume with the same rows"
            if state["version"] and state["version"] != self._source.version
            else "resume with the same files, or start a new epoch without the state"
        )
        if is_same:
            raise UsageError(
                f"The files of {current} have the sizes and statistics of those of the state, but "
                f"other values; {advice}",
                code="checkpoint-mismatch",
                path=current,
            )
        raise UsageError(
            f"The state was saved for {saved} ({state['rows']:,} rows, fingerprint "
            f"{state['fingerprint'][:12]}), and this table is {current} ({self.rows:,} rows, "
            f"fingerprint {self._identity()[:12]}); {advice}",
            code="checkpoint-mismatch",
            path=current,
        )

    def _has_content_of(self, state: dict[str, Any]) -> bool:
        """Return False if files with the footers of the state's files have other values."""
        if state["stamp"] == self._source.stamp() or not state["next"]:
            return True
        known = state["content"]
        if known is not None and self._window is None and self._rows_that_fit() is None:
            self._whole_store()
            content = self._content()
            if content is not None and content.partition(":")[0] == known.partition(":")[0]:
                return bool(content == known)
        logger.warning(
            "The files of %s are not those of the state, or were written again since. Their sizes "
            "and statistics are equal; their values were not compared, which is possible for the "
            "same columns without window=",
            self._source.name,
        )
        return True

    def _content(self) -> str | None:
        """Return the digests of the columns and their values; None if the fingerprint is exact.

        One string, since loading by torch.distributed.checkpoint needs states of equal structure.
        """
        if self._source.stamp() is None or self._shared is None:
            return self._known_content
        columns = hashlib.blake2b(repr(self.fields).encode(), digest_size=8).hexdigest()
        return f"{columns}:{self._shared.store.digest:016x}"

    def _identity(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self._source.fingerprint()
        return self._fingerprint

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_known_content": self._content()}
        for name in ("_source", "_store", "_shared", "_active"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: state.pop(name) for name in ("_order_facts", "_fingerprint")}
        self.__dict__.update(state, _active=None)
        self._open()
        self.__dict__.update(kept, _known_content=state["_known_content"])

    # -- rows --------------------------------------------------------------------------------------

    def _order(self) -> dict[str, int | str]:
        if self._order_facts is None:
            window = self._window
            if window is None and not self._source.is_in_memory:
                window = self._rows_that_fit()
            self._order_facts = order_facts(self.rows, self.shuffle, window)
        return self._order_facts

    def _rows_that_fit(self) -> int | None:
        """Return the largest shuffle window that fits on the disk, or None if all rows fit."""
        size = record_dtype(self.fields).itemsize
        folder = private_root() if self._cache is None else str(private_folder(self._cache))
        free = int(shutil.disk_usage(folder).free * _SHARE)
        if self.rows * size <= free or os.path.isdir(self._shared_path()):
            return None
        window = max(1, free // size // 3)  # one window is read while the next is loaded
        if self.shuffle == "global":
            raise UsageError(
                f"The {self.rows:,} rows of {self._source.name} need {self.rows * size >> 20:,} "
                f'MiB, but {folder} has {free >> 20:,} MiB available; shuffle="global" needs all '
                "rows: set TMPDIR or cache= to a larger disk, or pass shuffle=True",
                code="resource-limit",
            )
        if self.world_size > 1:
            raise UsageError(
                f"The {self.rows:,} rows of {self._source.name} need {self.rows * size >> 20:,} "
                f"MiB, but {folder} has {free >> 20:,} MiB available; pass window={window} (or "
                "fewer rows) on all ranks, or set TMPDIR or cache= to a larger disk",
                code="resource-limit",
                argument="window",
            )
        return window

    def _shared_path(self) -> str:
        key = [self._source.name, self._identity(), self._source.stamp()]
        return shared_path(key, self.fields, self.rows, self._cache)

    def _equal_lists(self) -> dict[str, int]:
        """Return the list length of each column whose first rows have lists of equal length."""
        lists = [each for each in self.fields if each.layout == "list"]
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
            # the last loop exited early: start the next epoch
            self._epoch, self._next, self._step = self._epoch + 1, 0, 0
        if self.last == "drop" and not self._steps(self.rows, self.world_size):
            raise UsageError(
                f'last="drop" drops every step: {self.world_size} ranks with {self.batch_size} '
                f"rows each exceed the {self.rows} rows; pass a smaller batch_size",
                code="data-size",
                argument="batch_size",
            )
        self._is_resumed = False
        iteration = _Iteration(self)
        self._active = iteration.received
        return iteration

    def example(self, step: int = 0) -> Any:  # a dict of tensors, or what `transform` returns
        """Return a batch of epoch 0 without advancing the loader, to inspect shapes and dtypes.

        Parameters
        ----------
        step : int
            Step within the epoch.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> loader = TableLoader(pa.table({"x": range(10)}), batch_size=4)
        >>> loader.example()["x"].shape, loader.state_dict()["next"]
        (torch.Size([4]), 0)
        """
        rank, size = self._rank_and_size()
        order = make_order(self._order(), self.rows, self.seed, 0)
        reader = _EpochReader(self, order, rank, size, 0)
        try:
            return reader.batches(step, step + 1, reader.prepare(step, step + 1))[0]
        finally:
            _close_resources(None, *reader.resources)

    def close(self) -> None:
        """Remove the converted table from disk if no other process uses it.

        The next iteration converts the table again.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from bigdl.data import TableLoader
        >>> TableLoader(pa.table({"x": range(5)})).close()
        """
        self._known_content = self._content()
        self._active = self._store = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _refuse_worker(what: str) -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise UsageError(
            f"{what} cannot be used in a worker process of a DataLoader, because each worker would "
            "read all rows; iterate over the TableLoader itself, which reads with threads",
            code="unsupported",
        )


class _EpochReader:
    """Reader of one rank's batches of one epoch, used by the loader's reading threads.

    Parameters
    ----------
    loader : TableLoader
    order : Order
    rank, world_size : int
    start : int
        Position of the first step in the epoch's order.
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
        """Return the start and stop positions of a step's rows in the epoch, over all ranks."""
        start = self._start + step * self._stride
        return start, min(start + self._stride, self._loader.rows)

    def prepare(self, first: int, last: int) -> dict[int, Future[RecordStore]]:
        """Load the shuffle windows of given steps and the next window; release earlier windows."""
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
            indices = np.arange(start, stop, dtype=np.int64)
            kept.append(len(indices))
            if self._loader.last == "pad" and len(indices) < self._loader.batch_size:
                # a rank without rows repeats the step's first row
                source = indices if len(indices) else np.array([bounds[0]], np.int64)
                indices = np.resize(source, self._loader.batch_size)
            positions.append(indices)
            sizes.append(len(indices))
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
            parts, row_indices = [], []
            for number, store in stores.items():
                window = self._order.windows[number]
                indices = np.flatnonzero((positions >= window.start) & (positions < window.stop))
                if len(indices):
                    stored = self._order.stored_at(number, positions[indices])
                    parts.append(store.result().gather(stored))
                    row_indices.append(indices)
            if not parts:  # a rank without rows
                columns = next(iter(stores.values())).result().gather(positions)
            elif len(parts) == 1:
                columns = parts[0]
            else:
                columns = _concatenate(parts, np.concatenate(row_indices))
        for name, length in self._dense.items():
            columns[name] = _dense(columns[name], length, name)
        return columns

    def _split(self, values: Any, sizes: list[int]) -> Sequence[Any]:
        """Split a column of several batches into one column per batch, as tensors or arrays."""
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
            (_to_jagged_tensor if is_torch else _array_of_arrays)(
                values.values, offsets[low : high + 1]
            )
            for low, high in parts
        ]

    @property
    def resources(self) -> tuple[ThreadPoolExecutor | None, dict[int, Future[RecordStore]]]:
        """Thread pool and stores of the shuffle windows, which the caller must close."""
        return self._loading, self._stores


def _concatenate(parts: list[dict[str, Any]], row_indices: np.ndarray) -> dict[str, Any]:
    """Concatenate the columns of several batches and sort the rows by `row_indices`."""
    source_rows = np.argsort(row_indices)
    columns: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [each[name] for each in parts]
        if isinstance(first, list):
            flat = [each for part in values for each in part]
            columns[name] = [flat[each] for each in source_rows.tolist()]
        elif isinstance(first, Ragged):
            counts = np.concatenate([each.counts for each in values])
            whole = Ragged(np.concatenate([each.values for each in values]), counts)
            columns[name] = whole.take(source_rows)
        else:
            columns[name] = np.concatenate(values)[source_rows]
    return columns


def _dense(ragged: Ragged, length: int, name: str) -> np.ndarray:
    if (ragged.counts != length).any():
        other = int(ragged.counts[ragged.counts != length][0])
        raise SourceError(
            f"Column '{name}' holds lists of {length} values in the first rows and of {other} in "
            "others, which a table that is read in windows does not support; pad or cut them to "
            "one length, or give the first row another length",
            code="data-shape",
            column=name,
        )
    return ragged.values.reshape(len(ragged.counts), length, *ragged.values.shape[1:])


def _to_jagged_tensor(values: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
    import torch

    low, high = int(offsets[0]), int(offsets[-1])
    ends = torch.from_numpy(offsets - low)
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values[low:high]), ends)


def _array_of_arrays(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    out = np.empty(len(offsets) - 1, object)
    for row, (low, high) in enumerate(itertools.pairwise(offsets)):
        out[row] = values[low:high]
    return out


def _each_tensor(batch: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Apply a function to all tensors of a nested batch."""
    result: Any = batch
    if hasattr(batch, "pin_memory"):
        result = change(result)
    elif isinstance(batch, dict):
        result = {name: _each_tensor(each, change) for name, each in batch.items()}
    elif isinstance(batch, tuple | list):
        result = type(batch)([_each_tensor(each, change) for each in batch])
    return cast("T", result)


@hide_frames
class _Iteration:
    """Iterator over the remaining batches of one epoch on one rank.

    Parameters
    ----------
    loader : TableLoader
    """

    def __init__(self, loader: TableLoader):
        rank, size = loader._rank_and_size()
        self._loader, self._epoch, self._before = loader, loader._epoch, loader._step
        self._count = loader._steps(loader.rows - loader._next, size)
        order = make_order(loader._order(), loader.rows, loader.seed, self._epoch)
        self._reader = _EpochReader(loader, order, rank, size, loader._next)
        # a transform costs more than larger gathers save
        self._group = 1 if loader._transform else max(1, _GROUP_ROWS // loader.batch_size)
        threads = loader._threads
        if threads is None:
            threads = core_count() if loader._transform else 2
        self._pool = ThreadPoolExecutor(threads, "bigdl-loader") if threads else None
        self._ahead = threads + 1
        self._requested = self._returned = 0
        self._futures: deque[Future[list[Any]]] = deque()
        self._ready: deque[Any] = deque()
        self.received = _ReceivedFlag()
        # Excludes the reader, whose reference would keep the loader alive.
        self._finalizer = weakref.finalize(
            self, _close_resources, self._pool, *self._reader.resources
        )

    @property
    def remaining(self) -> int:
        """Number of remaining steps."""
        return self._count - self._returned

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._returned == self._count:
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
        start, stop = self._reader.bounds(self._returned)
        self._returned += 1
        self.received.any = True
        if loader._active is self.received:
            loader.global_rows = stop - start
            loader._next, loader._step = stop, self._before + self._returned
        if self._returned == self._count:
            self._finish()
        return batch

    def _next_group(self) -> list[Any]:
        while self._requested < self._count and len(self._futures) < self._ahead:
            first = self._requested
            self._requested = last = min(first + self._group, self._count)
            stores = self._reader.prepare(first, last)
            if self._pool is None:
                return self._reader.batches(first, last, stores)
            self._futures.append(self._pool.submit(self._reader.batches, first, last, stores))
        return self._futures.popleft().result()

    def _finish(self) -> None:
        """Advance the loader to the next epoch."""
        loader = self._loader
        if loader._active is self.received:
            loader._active = None
            loader._epoch, loader._next, loader._step = self._epoch + 1, 0, 0
        self._finalizer()


class _ReceivedFlag:
    """Flag that is set when an iterator has returned a batch.

    Attributes
    ----------
    any : bool
    """

    any = False


def _close_resources(
    pool: ThreadPoolExecutor | None,
    loading: ThreadPoolExecutor | None,
    stores: dict[int, Future[RecordStore]],
) -> None:
    stores.clear()
    for each in (pool, loading):
        if each is not None:
            each.shutdown(wait=False, cancel_futures=True)
