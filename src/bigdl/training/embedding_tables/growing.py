"""Embeddings that add rows for new ids during training, and drop rows that expire.

An id is any integer.  It is hashed to a *key*.  Each worker owns an equal part of the range of
keys, so all hold about the same number of rows.  :class:`KeyedRows` maps a key to a row of the
worker's slice.  Row 0 of a slice is always zeros and serves every id that has no row.

TorchRec's managed collision modules and DeepRec's embedding variables work alike (admission by a
counter, eviction by global steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.runtime.collectives.rows import Distinct, RowTable
from bigdl.training.embedding_tables.placement import TablePlacement
from bigdl.training.embedding_tables.sharded import ShardedTable, mapped_tensor, of_rows
from bigdl.training.slices import SavedSlices
from bigdl.training.state import mixed_seed

_POOL = 1 << 16  # initial values that are drawn; each id uses one of them
_FIRST_ROWS = 1 << 10
_RECENT = 1 << 16  # smallest limit of the level of recent keys
_FREE = -1  # `last_read` of a free row
_FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, of splitmix64
_INVERSES = tuple(pow(each, -1, 1 << 64) for each in _FACTORS)


def _folded(values: torch.Tensor) -> torch.Tensor:
    """XOR the upper half of each number into its lower half; the function is self-inverse."""
    return values ^ ((values >> 32) & 0xFFFFFFFF)


def keys_of_ids(ids: torch.Tensor) -> torch.Tensor:
    """Hash ids to distinct keys, which are spread over the whole 64-bit range."""
    for factor in _FACTORS:
        ids = _folded(ids * factor)
    return ids


def ids_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """Convert keys back to ids; the inverse of :func:`keys_of_ids`."""
    for factor in reversed(_INVERSES):
        keys = _folded(keys) * (factor - (1 << 64) if factor >> 63 else factor)
    return keys


def _limits(world_size: int) -> torch.Tensor:
    """Return the smallest key that each rank owns, for every rank except rank 0."""
    return torch.tensor([-(1 << 63) + (n << 64) // world_size for n in range(1, world_size)]).long()


def owners_of_keys(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the rank that owns the row of each key."""
    return torch.bucketize(keys.contiguous(), _limits(world_size), right=True)


class KeyIndex:
    """Index from keys to rows, which looks up many keys at once by binary search.

    New keys stay in a small second level until they are an eighth of all, so adding few is cheap.
    """

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        self._levels = [(empty, empty), (empty, empty)]  # many and recent, each sorted

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the row index of every key, or 0 for unknown keys."""
        rows = torch.zeros_like(keys)
        for known, of_known in self._levels:
            if len(known):
                at = torch.searchsorted(known, keys).clamp_(max=len(known) - 1)
                rows = torch.where(known[at] == keys, of_known[at], rows)
        return rows

    def put(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Add new keys with their row indices."""
        many, recent = self._levels
        recent = _ordered(torch.cat([recent[0], keys]), torch.cat([recent[1], rows]))
        if len(recent[0]) > max(_RECENT, len(many[0]) // 8):
            joined = (torch.cat([one, two]) for one, two in zip(many, recent, strict=True))
            many, recent = _ordered(*joined), (keys[:0], rows[:0])
        self._levels = [many, recent]

    def replace(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace all keys and row indices."""
        self._levels = [_ordered(keys, rows), (keys[:0], rows[:0])]


def _ordered(keys: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = torch.sort(keys)
    return keys, rows[order]


class KeyedRows:
    """Row table (:class:`~bigdl.runtime.collectives.rows.RowTable`) of one worker, indexed by key.

    Parameters
    ----------
    table : GrowingEmbedding
    admit_after : int
        Number of reads in training after which an id gets a row.
    expire_after : int or None
        Number of updates after which a row that no batch reads is dropped; None keeps all rows.

    Attributes
    ----------
    steps : int
        Number of updates so far.
    used : int
        Number of rows that were ever in use, including freed ones.
    row_keys, last_read : torch.Tensor
        Key of each row, and the update of its last read.
    candidates : torch.Tensor
        Keys without a row, and their numbers of reads.
    """

    numbers = 2  # key and number of reads
    is_ordered = False
    has_zero_row = True

    def __init__(self, table: GrowingEmbedding, admit_after: int, expire_after: int | None):
        self._table = table
        self._admit_after, self._expire_after = admit_after, expire_after
        self.steps = 0
        self.used = min(1, len(table.weight))
        self.row_keys = torch.zeros(len(table.weight), dtype=torch.int64)
        self.last_read = torch.full((len(table.weight),), _FREE)
        self.candidates = torch.empty(0, 2, dtype=torch.int64)
        self._free = self.row_keys[:0]  # free rows below `used`, in order
        self._index_of_keys = KeyIndex()

    @property
    def weight(self) -> torch.nn.Parameter:
        return self._table.weight

    # -- on all workers ---------------------------------------------------------------------------

    def keys(self, ids: torch.Tensor, world_size: int) -> torch.Tensor:
        return keys_of_ids(ids)

    def ends(self, keys: torch.Tensor, world_size: int) -> list[int]:
        inner = torch.searchsorted(keys, _limits(world_size)).tolist()
        return [0, *inner, len(keys)]

    def request(self, keys: torch.Tensor, counts: torch.Tensor, world_size: int) -> torch.Tensor:
        return torch.stack([keys, counts], 1).reshape(-1)

    # -- on this worker ---------------------------------------------------------------------------

    def row_indices(self, requests: Sequence[tuple[torch.Tensor, bool]]) -> list[torch.Tensor]:
        pairs = [content.view(-1, 2).t().contiguous() for content, _ in requests]
        flags = [is_training for _, is_training in requests]
        admitted = iter(
            self._admit([each for each, flag in zip(pairs, flags, strict=True) if flag])
        )
        return [
            next(admitted) if flag else self.find(each[0])
            for each, flag in zip(pairs, flags, strict=True)
        ]

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the row index of each key, or 0 for keys without a row."""
        return self._index_of_keys.find(keys)

    def _admit(self, training: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Add rows for keys that were read often enough; return the row index of every request."""
        if not training:
            return []
        keys, counts = torch.cat(list(training), 1)
        distinct = Distinct(keys)
        counts = torch.zeros_like(distinct.keys).index_add_(0, distinct.inverse, counts)
        rows = self.find(distinct.keys)
        is_new = rows == 0
        self.last_read[rows[~is_new]] = self.steps
        new = distinct.keys[is_new]
        ripe = self._ripe(new, counts[is_new]) if self._admit_after > 1 else new
        if len(ripe):
            self._add(ripe)
            rows[is_new] = self.find(new)
        return torch.split(rows[distinct.inverse], [each.shape[1] for each in training])

    def _add(self, keys: torch.Tensor) -> None:
        """Allocate and initialize rows for new keys."""
        rows = self._take_rows(len(keys))
        self.row_keys[rows], self.last_read[rows] = keys, self.steps
        with torch.no_grad():
            self.weight[rows] = self._table.first_values(keys)
        self._index_of_keys.put(keys, rows)

    def _ripe(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Count reads of keys without a row; return the keys that now get a row."""
        both = Distinct(torch.cat([self.candidates[:, 0], keys]))
        times = torch.cat([self.candidates[:, 1], counts])
        sums = torch.zeros_like(both.keys).index_add_(0, both.inverse, times)
        is_ripe = sums >= self._admit_after
        self.candidates = torch.stack([both.keys[~is_ripe], sums[~is_ripe]], 1)
        return both.keys[is_ripe]

    def _take_rows(self, count: int) -> torch.Tensor:
        again, self._free = self._free[:count], self._free[count:]
        missing = count - len(again)
        self.make_room(self.used + missing)
        rows = torch.cat([again, torch.arange(self.used, self.used + missing)])
        self.used += missing
        return rows

    def make_room(self, rows: int) -> None:
        """Grow the weight and its optimizer state to at least `rows` rows."""
        old = len(self.weight)
        if rows <= old:
            return
        new = max(rows, old + old // 2)
        self._table.resize(new)
        self.row_keys = torch.cat([self.row_keys, self.row_keys.new_zeros(new - old)])
        self.last_read = torch.cat([self.last_read, self.last_read.new_full((new - old,), _FREE)])
        states = self._table.states()
        for key, value in of_rows(states, old).items():
            states[key] = torch.cat([value, value[:1].expand(new - old, *value.shape[1:])])

    def end_step(self) -> None:
        self.steps += 1
        if self._expire_after is not None and self.steps % self._expire_after == 0:
            self._expire(self.steps - self._expire_after)

    def _expire(self, step: int) -> None:
        """Free rows last read before `step`, and reset the read counts of keys without a row."""
        last = self.last_read[: self.used]
        expired = torch.nonzero((last != _FREE) & (last < step))[:, 0]
        self.candidates = self.candidates[:0]
        if len(expired):
            self.last_read[expired] = _FREE
            with torch.no_grad():
                self.weight[expired] = 0.0
                for value in of_rows(self._table.states(), len(self.weight)).values():
                    value[expired] = value[0].clone()
            self._rebuild_index()

    def _rebuild_index(self) -> None:
        """Rebuild the index of keys and the list of free rows."""
        is_used = self.last_read[: self.used] != _FREE
        used_rows = torch.nonzero(is_used)[:, 0]
        self._index_of_keys.replace(self.row_keys[used_rows], used_rows)
        is_used[0] = True
        self._free = torch.nonzero(~is_used)[:, 0]

    def take_over(self, saved: SavedTable) -> None:
        """Restore the keys and counters of a saved table whose rows the weight already holds."""
        more = len(self.weight) - len(saved.keys)
        self.used = len(saved.keys)
        self.row_keys = torch.cat([saved.keys, saved.keys.new_zeros(more)])
        self.last_read = torch.cat([saved.last_read, saved.last_read.new_full((more,), _FREE)])
        self.candidates, self.steps = saved.candidates, saved.steps
        self._rebuild_index()


@dataclass
class SavedTable:
    """Keys, last-read steps, candidate keys and step count of a growing table, without its weight.

    Attributes
    ----------
    keys, last_read : torch.Tensor
        Arrays with one entry per row, see :class:`KeyedRows`.
    candidates : torch.Tensor
    steps : int
    """

    keys: torch.Tensor
    last_read: torch.Tensor
    candidates: torch.Tensor
    steps: int

    @classmethod
    def of(cls, rows: KeyedRows) -> SavedTable:
        used = rows.used
        return cls(rows.row_keys[:used], rows.last_read[:used], rows.candidates, rows.steps)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the fields as a dict of tensors by name."""
        return {**vars(self), "steps": torch.tensor([self.steps])}

    @classmethod
    def from_arrays(cls, read: Callable[[str], torch.Tensor]) -> SavedTable:
        keys, last_read, candidates = map(read, ("keys", "last_read", "candidates"))
        return cls(keys, last_read, candidates, int(read("steps")[0]))

    def selection(self, placement: TablePlacement) -> torch.Tensor:
        """Return the indices of a worker's rows; row 0, of zeros, belongs to every worker."""
        is_owned = owners_of_keys(self.keys, placement.world_size) == placement.rank
        is_owned &= self.last_read != _FREE
        is_owned[:1] = True
        return torch.nonzero(is_owned)[:, 0]

    def of_worker(self, placement: TablePlacement, selection: torch.Tensor) -> SavedTable:
        """Return the state of one worker's rows and candidate keys."""
        is_owned = owners_of_keys(self.candidates[:, 0], placement.world_size) == placement.rank
        return SavedTable(
            self.keys[selection], self.last_read[selection], self.candidates[is_owned], self.steps
        )


class KeyedSlices:
    """One worker's view of a growing table in the files of a checkpoint.

    Parameters
    ----------
    slices : SavedSlices
    name : str
        Name of the weight.
    placement : TablePlacement
        Placement of the worker; a world size of 1 selects all rows in use.
    """

    def __init__(self, slices: SavedSlices, name: str, placement: TablePlacement):
        self._slices = slices
        count = slices.count(name)
        self._owner = placement.rank if count == placement.world_size else None
        owners = range(count) if self._owner is None else [self._owner]
        parts = [SavedTable.from_arrays(partial(self._named, name, owner)) for owner in owners]
        if self._owner is not None:
            self.saved = parts[0]
            return
        first, *others = [each.selection(placement) for each in parts]
        self._picks = [first, *(each[1:] for each in others)]  # keep one row of zeros
        chosen = [each.of_worker(placement, p) for each, p in zip(parts, self._picks, strict=True)]
        candidates = torch.cat([each.candidates for each in chosen])
        self.saved = SavedTable(
            torch.cat([each.keys for each in chosen]),
            torch.cat([each.last_read for each in chosen]),
            candidates[torch.sort(candidates[:, 0]).indices],
            parts[0].steps,
        )

    def _named(self, name: str, owner: int, key: str) -> torch.Tensor:
        return self._tensor(f"{name}-{key}", owner)

    def _tensor(self, array: str, owner: int, rows: np.ndarray | None = None) -> torch.Tensor:
        return torch.from_numpy(self._slices.of_owner(array, owner, rows))

    def read(self, array: str) -> torch.Tensor:
        """Return the worker's rows of an array."""
        if self._owner is not None:
            return self._tensor(array, self._owner)
        return torch.cat([self._tensor(array, o, p.numpy()) for o, p in enumerate(self._picks)])


class GrowingEmbedding(ShardedTable):
    """Sharded embedding of arbitrary ids, which adds rows when training reads new ids.

    An id gets a row once a training has read it often enough, and may lose it when batches stop
    reading it. An id without a row reads zeros, which are not trained. Otherwise it works like
    :class:`ShardedEmbedding`: N workers hold the table once, owners update their rows, and the
    updates equal those of one process. The table grows only in the fits of Estimators.

    Parameters
    ----------
    embedding_dim : int
        Width of a row.
    fields : int, optional
        Number of fields that share the table, each with separate ids; the last dimension of the ids
        is then the field.
    admit_after : int
        Number of training rows with an id after which it gets a table row. Raise it to skip rare
        ids.
    expire_after : int, optional
        Number of updates. After every `expire_after` updates, the rows that none of these batches
        read are dropped with their optimizer state; the counts of ids without a row are reset. By
        default all rows stay.
    init : callable, optional
        ``init(rows)`` initializes a tensor of rows in place; default standard normal. It is called
        once, for 65,536 rows; an id takes the values of one of them, which does not depend on the
        number of workers.
    storage : str
        ``"memory"`` or ``"mmap"``, see :class:`ShardedEmbedding`.
    dtype : torch.dtype
        ``torch.float32`` or ``torch.float64``.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process holds; some are not in use.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.torch import GrowingEmbedding
    >>> table = GrowingEmbedding(8, fields=2)
    >>> table(torch.tensor([[-7, 1 << 40]])).shape
    torch.Size([1, 2, 8])
    >>> len(table.ids())
    0
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        fields: int | None = None,
        admit_after: int = 1,
        expire_after: int | None = None,
        init: Callable[[torch.Tensor], Any] = torch.nn.init.normal_,
        storage: str = "memory",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.embedding_dim = check_positive("embedding_dim", embedding_dim)
        self._fields = None if fields is None else check_positive("fields", fields)
        check_positive("admit_after", admit_after)
        if expire_after is not None:
            check_positive("expire_after", expire_after)
        if not callable(init):
            raise UsageError(
                f"init should be a function of a tensor of rows, got {init!r}",
                code="argument-type",
                argument="init",
            )
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        self.storage = check_choice("storage", storage, ("memory", "mmap"))
        self._init, self._seed = init, int(torch.randint(1 << 62, ()))
        self._pool: torch.Tensor | None = None
        rows = 1 if self._placement is None else _FIRST_ROWS if self._placement.world_size else 0
        self.weight = torch.nn.Parameter(self._new(rows, dtype))
        self.rows = KeyedRows(self, admit_after, expire_after)
        self._selection = torch.arange(rows)  # indices of this worker's rows in whole arrays
        self._whole_rows = rows

    # -- rows -------------------------------------------------------------------------------------

    def _new(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = rows, self.embedding_dim
        if self.storage == "mmap" and self._placement is not None and rows:
            return mapped_tensor(shape, dtype, self._placement.folder)
        made = torch.empty(shape, dtype=dtype)
        made[:1] = 0.0
        return made

    def resize(self, rows: int) -> None:
        """Grow the weight to `rows` rows."""
        old = self.weight.detach()
        new = self._new(rows, old.dtype)
        new[: len(old)] = old
        self.weight.data = new

    def first_values(self, keys: torch.Tensor) -> torch.Tensor:
        """Return initial values for the rows of new keys."""
        if self._pool is None:
            self._pool = torch.empty(_POOL, self.embedding_dim, dtype=self.weight.dtype)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(mixed_seed(self._seed, 0))
                self._init(self._pool)
        return self._pool[keys & (_POOL - 1)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows of `ids`.

        Parameters
        ----------
        ids : torch.Tensor
            Integers of any shape; with several fields the last dimension is the field.

        Returns
        -------
        torch.Tensor
            Rows, in the shape of `ids` with the embedding dimension appended; zeros for an id
            without a row.

        Raises
        ------
        UsageError
            If the last dimension is not the number of fields, or an id is out of range.
        """
        numbers = self.with_fields(ids.to(torch.int64)).cpu()
        if self.exchange is not None:
            fetched: torch.Tensor = self.exchange.fetch(self._number, numbers)
            return fetched.to(ids.device)
        self._check_met()
        rows = self.rows.find(keys_of_ids(numbers)).to(self.weight.device)
        return functional.embedding(rows, self.weight, padding_idx=0, sparse=True)

    def with_fields(self, ids: torch.Tensor) -> torch.Tensor:
        """Combine each id with the index of its field into one number."""
        fields = self._fields
        if fields is None:
            return ids
        if not ids.dim() or ids.shape[-1] != fields:
            raise UsageError(
                f"The ids of a GrowingEmbedding of {fields} fields need a last dimension of "
                f"{fields}, got the shape {tuple(ids.shape)}",
                code="data-shape",
            )
        most = (1 << 63) // fields - 1
        if ((ids > most) | (ids < -most)).any():
            raise UsageError(
                f"The ids of {fields} fields should be from -{most} to {most}", code="data-value"
            )
        return ids * fields + torch.arange(fields, device=ids.device)

    def ids(self, field: int = 0) -> torch.Tensor:
        """Return the ids of a field that have a row in this process, in ascending order."""
        return self._ids_and_rows(field)[0]

    def _ids_and_rows(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        fields = self.fields
        rows = torch.nonzero(self.rows.last_read[: self.rows.used] != _FREE)[:, 0]
        numbers = ids_of_keys(self.rows.row_keys[rows])
        of_field = numbers % fields == field
        ids, order = torch.sort(numbers[of_field] // fields)
        return ids, rows[of_field][order]

    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, rows = self._ids_and_rows(field)
        return ids, self.weight.detach().cpu()[rows]

    @property
    def fields(self) -> int:
        return self._fields or 1

    # -- for Estimators -----------------------------------------------------------------------

    def row_table(self) -> RowTable:
        return self.rows

    @property
    def whole_rows(self) -> int:
        return self._whole_rows

    def _take_over(self, weight: torch.Tensor, whole: SavedTable) -> None:
        """Load this worker's rows of a whole table."""
        placement = self._placement or TablePlacement()
        if not placement.world_size:
            return
        self._whole_rows = len(whole.keys)
        self._selection = whole.selection(placement)
        self._put(weight[self._selection], whole.of_worker(placement, self._selection))

    def _put(self, weight: torch.Tensor, saved: SavedTable) -> None:
        self.rows.make_room(len(weight))
        with torch.no_grad():
            self.weight[: len(weight)] = weight
        self.rows.take_over(saved)

    def cut(self, placement: TablePlacement) -> None:
        weight = self.weight.detach()[: self.rows.used]
        saved = SavedTable.of(self.rows)
        self._placement = placement
        self.weight.data = self._new(_FIRST_ROWS if placement.world_size else 0, weight.dtype)
        self._take_over(weight, saved)

    def local_rows(self, whole: torch.Tensor) -> torch.Tensor:
        if not (self._placement or TablePlacement()).world_size:
            return whole[:0]
        return self._filled(whole[self._selection])

    def _filled(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad an array to the length of the weight with copies of its first row."""
        more = len(self.weight) - len(rows)
        return torch.cat([rows, rows[:1].expand(more, *rows.shape[1:])])

    def saved(self) -> dict[str, torch.Tensor]:
        arrays = {f"-{key}": each for key, each in SavedTable.of(self.rows).arrays().items()}
        return {"": self.weight.detach()[: self.rows.used], **arrays}

    def used(self, array: torch.Tensor) -> torch.Tensor:
        return array[: self.rows.used]

    def load(
        self, slices: SavedSlices, name: str, keys: Sequence[str], states: dict[str, Any]
    ) -> None:
        if f"{name}-keys" not in slices.names:
            raise UsageError(
                f"The checkpoint has no growing table {name}", code="checkpoint-mismatch"
            )
        table = KeyedSlices(slices, name, self._placement or TablePlacement())
        self._put(table.read(name), table.saved)
        for key in keys:
            states[key] = self._filled(table.read(f"{name}.{key}"))

    @classmethod
    def whole(
        cls, slices: SavedSlices, name: str, keys: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        table = KeyedSlices(slices, name, TablePlacement())
        prefix = name.removesuffix("weight")
        named = {f"{prefix}{key}": each for key, each in table.saved.arrays().items()}
        states = {key: table.read(f"{name}.{key}") for key in keys}
        return {name: table.read(name), **named}, states

    def reader(self, slices: SavedSlices, name: str) -> Callable[[torch.Tensor], np.ndarray]:
        owners = slices.mapped(name)
        keys, last = (
            slices.mapped(f"{name}-{each}", at_random=False) for each in ("keys", "last_read")
        )
        known = KeyIndex()
        starts = np.cumsum([0, *map(len, owners)])
        of_row, indices = [], []
        for start, of_owner, last_read in zip(starts, keys, last, strict=False):
            used = np.flatnonzero(np.asarray(last_read) != _FREE)
            of_row.append(torch.from_numpy(np.asarray(of_owner)[used]))
            indices.append(torch.from_numpy(used + start))
        known.replace(torch.cat(of_row), torch.cat(indices))

        def read(ids: torch.Tensor) -> np.ndarray:
            index = known.find(keys_of_ids(ids)).numpy()
            rows = np.empty((len(index), *owners[0].shape[1:]), owners[0].dtype)
            for start, array in zip(starts, owners, strict=False):
                here = (index >= start) & (index < start + len(array))
                rows[here] = array[index[here] - start]
            return rows

        return read

    def _save_to_state_dict(
        self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        if not self.is_placed:
            for key, each in SavedTable.of(self.rows).arrays().items():
                destination[f"{prefix}{key}"] = each
            weight = self.weight[: self.rows.used]
            destination[f"{prefix}weight"] = weight if keep_vars else weight.detach()

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
        weight = state_dict.get(f"{prefix}weight")
        if weight is None:
            if not self.is_placed:
                missing_keys.append(f"{prefix}weight")
            return
        try:
            self.take_whole(
                {
                    name.removeprefix(prefix): each
                    for name, each in state_dict.items()
                    if name.startswith(prefix)
                }
            )
        except UsageError as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def take_whole(self, arrays: dict[str, torch.Tensor]) -> None:
        weight = arrays["weight"]
        if weight.shape[1:] != self.weight.shape[1:] or "keys" not in arrays:
            raise UsageError(
                f"The weights do not fit the model: an array of shape {tuple(weight.shape)} is no "
                f"growing table of width {self.embedding_dim}",
                code="model-mismatch",
            )
        self._take_over(weight, SavedTable.from_arrays(lambda key: arrays[key]))

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, fields={self._fields}"
