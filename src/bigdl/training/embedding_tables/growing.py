"""Embeddings whose rows come with the ids that a training reads, and go when these stay away.

An id is any integer.  It is mixed to a *key*, and the range of all keys is cut in as many parts as
there are workers, so that each has about as many rows.  A worker finds the place of a key in its
slice by :class:`KeyedRows`; row 0 of a slice is zeros, stays so, and stands for every id that has
no row.

The idea is that of TorchRec's managed collision modules and of DeepRec's embedding variables
(admission by a counter, eviction by global steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_POOL = 1 << 16  # first values that are drawn; each id takes one of them
_FIRST_ROWS = 1 << 10
_RECENT = 1 << 16  # keys that are kept apart from the many, at least
_FREE = -1  # instead of the step in which a row was read last
_FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, of splitmix64
_INVERSES = tuple(pow(each, -1, 1 << 64) for each in _FACTORS)


def _folded(values: torch.Tensor) -> torch.Tensor:
    """Return numbers whose lower half has the upper half in it; its own inverse."""
    return values ^ ((values >> 32) & 0xFFFFFFFF)


def keys_of_ids(ids: torch.Tensor) -> torch.Tensor:
    """Mix ids: each has a key of its own, and neighbours have keys far apart."""
    for factor in _FACTORS:
        ids = _folded(ids * factor)
    return ids


def ids_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return the ids that have these keys."""
    for factor in reversed(_INVERSES):
        keys = _folded(keys) * (factor - (1 << 64) if factor >> 63 else factor)
    return keys


def _limits(world_size: int) -> torch.Tensor:
    """Return the first key of every rank but rank 0."""
    return torch.tensor([-(1 << 63) + (n << 64) // world_size for n in range(1, world_size)]).long()


def owners_of_keys(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the rank that has the row of each key."""
    return torch.bucketize(keys.contiguous(), _limits(world_size), right=True)


class KeyIndex:
    """The places of keys; lookups are binary searches of all keys at once.

    New keys are kept apart until they are an eighth of the others, so that few of them cost little.
    """

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        self._levels = [(empty, empty), (empty, empty)]  # many and recent, each in order

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place of every key, 0 for one that has none."""
        places = torch.zeros_like(keys)
        for known, of_known in self._levels:
            if len(known):
                at = torch.searchsorted(known, keys).clamp_(max=len(known) - 1)
                places = torch.where(known[at] == keys, of_known[at], places)
        return places

    def put(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Add keys that are not there yet."""
        many, recent = self._levels
        recent = _ordered(torch.cat([recent[0], keys]), torch.cat([recent[1], places]))
        if len(recent[0]) > max(_RECENT, len(many[0]) // 8):
            joined = (torch.cat([one, two]) for one, two in zip(many, recent, strict=True))
            many, recent = _ordered(*joined), (keys[:0], places[:0])
        self._levels = [many, recent]

    def replace(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Have these keys alone."""
        self._levels = [_ordered(keys, places), (keys[:0], places[:0])]


def _ordered(keys: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = torch.sort(keys)
    return keys, places[order]


class KeyedRows:
    """The rows of one worker; see :class:`~bigdl.runtime.collectives.rows.RowTable`.

    Parameters
    ----------
    table : GrowingEmbedding
    admit_after : int
        How often a training has to read an id until it has a row.
    expire_after : int or None
        Updates for which a row is kept that no batch reads.

    Attributes
    ----------
    steps : int
        Updates so far.
    used : int
        Rows up to the last one that was ever in use.
    row_keys, last_read : torch.Tensor
        Of each row the key, and the update before which it was read last.
    candidates : torch.Tensor
        Keys without a row, and how often each was read.
    """

    numbers = 2  # key, and how often it was read
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
        self._free = self.row_keys[:0]  # places below `used`, in order
        self._places = KeyIndex()

    @property
    def weight(self) -> torch.nn.Parameter:
        return self._table.weight

    # -- of all workers ---------------------------------------------------------------------------

    def keys(self, ids: torch.Tensor, world_size: int) -> torch.Tensor:
        return keys_of_ids(ids)

    def ends(self, keys: torch.Tensor, world_size: int) -> list[int]:
        inner = torch.searchsorted(keys, _limits(world_size)).tolist()
        return [0, *inner, len(keys)]

    def request(self, keys: torch.Tensor, counts: torch.Tensor, world_size: int) -> torch.Tensor:
        return torch.stack([keys, counts], 1).reshape(-1)

    # -- of this worker ---------------------------------------------------------------------------

    def row_indices(self, requests: Sequence[tuple[torch.Tensor, bool]]) -> list[torch.Tensor]:
        asked = [content.view(-1, 2).t().contiguous() for content, _ in requests]
        flags = [is_training for _, is_training in requests]
        admitted = iter(
            self._admit([each for each, flag in zip(asked, flags, strict=True) if flag])
        )
        return [
            next(admitted) if flag else self.find(each[0])
            for each, flag in zip(asked, flags, strict=True)
        ]

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place of each key; 0 for one that has none."""
        return self._places.find(keys)

    def _admit(self, training: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Give rows to keys that have been read often enough; returns where all rows lie then."""
        if not training:
            return []
        keys, counts = torch.cat(list(training), 1)
        distinct = Distinct(keys)
        counts = torch.zeros_like(distinct.keys).index_add_(0, distinct.inverse, counts)
        places = self.find(distinct.keys)
        is_new = places == 0
        self.last_read[places[~is_new]] = self.steps
        new = distinct.keys[is_new]
        ripe = self._ripe(new, counts[is_new]) if self._admit_after > 1 else new
        if len(ripe):
            self._add(ripe)
            places[is_new] = self.find(new)
        return torch.split(places[distinct.inverse], [each.shape[1] for each in training])

    def _add(self, keys: torch.Tensor) -> None:
        """Give rows to keys."""
        places = self._take_places(len(keys))
        self.row_keys[places], self.last_read[places] = keys, self.steps
        with torch.no_grad():
            self.weight[places] = self._table.first_values(keys)
        self._places.put(keys, places)

    def _ripe(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the keys that get a row now; count the others."""
        both = Distinct(torch.cat([self.candidates[:, 0], keys]))
        times = torch.cat([self.candidates[:, 1], counts])
        sums = torch.zeros_like(both.keys).index_add_(0, both.inverse, times)
        is_ripe = sums >= self._admit_after
        self.candidates = torch.stack([both.keys[~is_ripe], sums[~is_ripe]], 1)
        return both.keys[is_ripe]

    def _take_places(self, count: int) -> torch.Tensor:
        again, self._free = self._free[:count], self._free[count:]
        missing = count - len(again)
        self.make_room(self.used + missing)
        places = torch.cat([again, torch.arange(self.used, self.used + missing)])
        self.used += missing
        return places

    def make_room(self, rows: int) -> None:
        """Have the weight, and what the optimizer keeps of it, hold so many rows."""
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
        """Free the rows that were not read from a step on, and forget candidates."""
        last = self.last_read[: self.used]
        places = torch.nonzero((last != _FREE) & (last < step))[:, 0]
        self.candidates = self.candidates[:0]
        if len(places):
            self.last_read[places] = _FREE
            with torch.no_grad():
                self.weight[places] = 0.0
                for value in of_rows(self._table.states(), len(self.weight)).values():
                    value[places] = value[0].clone()
            self._index()

    def _index(self) -> None:
        """Look anew which places have which keys."""
        is_used = self.last_read[: self.used] != _FREE
        places = torch.nonzero(is_used)[:, 0]
        self._places.replace(self.row_keys[places], places)
        is_used[0] = True
        self._free = torch.nonzero(~is_used)[:, 0]

    def take_over(self, saved: SavedTable) -> None:
        """Have the rows of a table, whose values the weight has already; the first is of zeros."""
        more = len(self.weight) - len(saved.keys)
        self.used = len(saved.keys)
        self.row_keys = torch.cat([saved.keys, saved.keys.new_zeros(more)])
        self.last_read = torch.cat([saved.last_read, saved.last_read.new_full((more,), _FREE)])
        self.candidates, self.steps = saved.candidates, saved.steps
        self._index()


@dataclass
class SavedTable:
    """The state of a growing table besides its weight.

    Attributes
    ----------
    keys, last_read : torch.Tensor
        Of each row, see :class:`KeyedRows`.
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
        """Return it as arrays by their names."""
        return {**vars(self), "steps": torch.tensor([self.steps])}

    @classmethod
    def from_arrays(cls, read: Callable[[str], torch.Tensor]) -> SavedTable:
        keys, last_read, candidates = map(read, ("keys", "last_read", "candidates"))
        return cls(keys, last_read, candidates, int(read("steps")[0]))

    def selection(self, place: TablePlacement) -> torch.Tensor:
        """Return which rows are those of a worker; the first, of zeros, is of every worker."""
        is_own = owners_of_keys(self.keys, place.world_size) == place.rank
        is_own &= self.last_read != _FREE
        is_own[:1] = True
        return torch.nonzero(is_own)[:, 0]

    def of_place(self, place: TablePlacement, selection: torch.Tensor) -> SavedTable:
        """Return the part of a worker."""
        is_own = owners_of_keys(self.candidates[:, 0], place.world_size) == place.rank
        return SavedTable(
            self.keys[selection], self.last_read[selection], self.candidates[is_own], self.steps
        )


class KeyedSlices:
    """A growing table in the files of a checkpoint, as a worker reads it.

    Parameters
    ----------
    slices : SavedSlices
    name : str
        Of the weight.
    place : TablePlacement
        Of the worker; rank 0 of one gets all rows that are in use.
    """

    def __init__(self, slices: SavedSlices, name: str, place: TablePlacement):
        self._slices = slices
        count = slices.count(name)
        self._own = place.rank if count == place.world_size else None
        owners = range(count) if self._own is None else [self._own]
        parts = [SavedTable.from_arrays(partial(self._named, name, owner)) for owner in owners]
        if self._own is not None:
            self.saved = parts[0]
            return
        first, *others = [each.selection(place) for each in parts]
        self._picks = [first, *(each[1:] for each in others)]  # one row of zeros
        chosen = [each.of_place(place, p) for each, p in zip(parts, self._picks, strict=True)]
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
        if self._own is not None:
            return self._tensor(array, self._own)
        return torch.cat([self._tensor(array, o, p.numpy()) for o, p in enumerate(self._picks)])


class GrowingEmbedding(ShardedTable):
    """An embedding of any ids, whose rows lie in slices on the workers of an Estimator.

    An id has a row from when a training has read it often enough, and may lose it when batches do
    not read it any more. An id without a row reads zeros, which are not trained. In all else it is
    a :class:`ShardedEmbedding`: owners update their rows, which N workers together hold once, and
    the updates are those of one process. It grows in the fits of Estimators alone.

    Parameters
    ----------
    embedding_dim : int
        Width of a row.
    fields : int, optional
        Fields that have ids of their own and one table together; the last dimension of the ids is
        that of the fields then.
    admit_after : int
        How often the rows of a training must have an id until it gets a row.
    expire_after : int, optional
        Number of updates. After every so many, the rows that none of the last so many batches have
        read are dropped, with what the optimizer keeps of them, and so are the counts of ids that
        have no row. By default all stay.
    init : callable, optional
        ``init(rows)`` sets a tensor of rows to first values; default standard normal. It is called
        once, for 65,536 rows; an id has the values of one of these, whatever the number of workers.
    storage : str
        ``"memory"`` or ``"mmap"``, see :class:`ShardedEmbedding`.
    dtype : torch.dtype
        ``torch.float32`` or ``torch.float64``.

    Attributes
    ----------
    weight : torch.nn.Parameter
        The rows that this process has; some are not in use.

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
        rows = 1 if self._place is None else _FIRST_ROWS if self._place.world_size else 0
        self.weight = torch.nn.Parameter(self._new(rows, dtype))
        self.rows = KeyedRows(self, admit_after, expire_after)
        self._selection = torch.arange(rows)  # what this worker has of whole arrays
        self._whole_rows = rows

    # -- rows -------------------------------------------------------------------------------------

    def _new(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = rows, self.embedding_dim
        if self.storage == "mmap" and self._place is not None and rows:
            return mapped_tensor(shape, dtype, self._place.folder)
        made = torch.empty(shape, dtype=dtype)
        made[:1] = 0.0
        return made

    def resize(self, rows: int) -> None:
        """Give the weight more rows."""
        old = self.weight.detach()
        new = self._new(rows, old.dtype)
        new[: len(old)] = old
        self.weight.data = new

    def first_values(self, keys: torch.Tensor) -> torch.Tensor:
        """Return first values of the rows of new keys."""
        if self._pool is None:
            self._pool = torch.empty(_POOL, self.embedding_dim, dtype=self.weight.dtype)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(mixed_seed(self._seed, 0))
                self._init(self._pool)
        return self._pool[keys & (_POOL - 1)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids.

        Parameters
        ----------
        ids : torch.Tensor
            Integers of any shape, whose last dimension is that of the fields if there are several.

        Returns
        -------
        torch.Tensor
            Of the shape of `ids`, and the width of a row; zeros for an id that has no row.

        Raises
        ------
        UsageError
            If there are more or fewer fields.
        """
        numbers = self.with_fields(ids.to(torch.int64)).cpu()
        if self.exchange is not None:
            fetched: torch.Tensor = self.exchange.fetch(self._number, numbers)
            return fetched.to(ids.device)
        self._check_met()
        places = self.rows.find(keys_of_ids(numbers)).to(self.weight.device)
        return functional.embedding(places, self.weight, padding_idx=0, sparse=True)

    def with_fields(self, ids: torch.Tensor) -> torch.Tensor:
        """Return numbers of ids and their fields."""
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
        return self._ids_and_places(field)[0]

    def _ids_and_places(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        fields = self.fields
        places = torch.nonzero(self.rows.last_read[: self.rows.used] != _FREE)[:, 0]
        numbers = ids_of_keys(self.rows.row_keys[places])
        of_field = numbers % fields == field
        ids, order = torch.sort(numbers[of_field] // fields)
        return ids, places[of_field][order]

    def _rows_of_field(self, field: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, places = self._ids_and_places(field)
        return ids, self.weight.detach().cpu()[places]

    @property
    def fields(self) -> int:
        return self._fields or 1

    # -- what Estimators do -----------------------------------------------------------------------

    def row_table(self) -> RowTable:
        return self.rows

    @property
    def whole_rows(self) -> int:
        return self._whole_rows

    def _take_over(self, weight: torch.Tensor, whole: SavedTable) -> None:
        """Have this worker's rows of a whole table."""
        place = self._place or TablePlacement()
        if not place.world_size:
            return
        self._whole_rows = len(whole.keys)
        self._selection = whole.selection(place)
        self._put(weight[self._selection], whole.of_place(place, self._selection))

    def _put(self, weight: torch.Tensor, saved: SavedTable) -> None:
        self.rows.make_room(len(weight))
        with torch.no_grad():
            self.weight[: len(weight)] = weight
        self.rows.take_over(saved)

    def cut(self, place: TablePlacement) -> None:
        weight = self.weight.detach()[: self.rows.used]
        saved = SavedTable.of(self.rows)
        self._place = place
        self.weight.data = self._new(_FIRST_ROWS if place.world_size else 0, weight.dtype)
        self._take_over(weight, saved)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        if not (self._place or TablePlacement()).world_size:
            return whole[:0]
        return self._filled(whole[self._selection])

    def _filled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return an array with a row for each of the weight; those not in use are as the first."""
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
        found = KeyedSlices(slices, name, self._place or TablePlacement())
        self._put(found.read(name), found.saved)
        for key in keys:
            states[key] = self._filled(found.read(f"{name}.{key}"))

    @classmethod
    def whole(
        cls, slices: SavedSlices, name: str, keys: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        found = KeyedSlices(slices, name, TablePlacement())
        prefix = name.removesuffix("weight")
        named = {f"{prefix}{key}": each for key, each in found.saved.arrays().items()}
        states = {key: found.read(f"{name}.{key}") for key in keys}
        return {name: found.read(name), **named}, states

    def reader(self, slices: SavedSlices, name: str) -> Callable[[torch.Tensor], np.ndarray]:
        owners = slices.mapped(name)
        keys, last = (
            slices.mapped(f"{name}-{each}", at_random=False) for each in ("keys", "last_read")
        )
        known = KeyIndex()
        starts = np.cumsum([0, *map(len, owners)])
        of_row, places = [], []
        for start, of_owner, last_read in zip(starts, keys, last, strict=False):
            used = np.flatnonzero(np.asarray(last_read) != _FREE)
            of_row.append(torch.from_numpy(np.asarray(of_owner)[used]))
            places.append(torch.from_numpy(used + start))
        known.replace(torch.cat(of_row), torch.cat(places))

        def read(ids: torch.Tensor) -> np.ndarray:
            found = known.find(keys_of_ids(ids)).numpy()
            rows = np.empty((len(found), *owners[0].shape[1:]), owners[0].dtype)
            for start, array in zip(starts, owners, strict=False):
                here = (found >= start) & (found < start + len(array))
                rows[here] = array[found[here] - start]
            return rows

        return read

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.is_placed:
            for key, each in SavedTable.of(self.rows).arrays().items():
                destination[f"{prefix}{key}"] = each
            weight = self.weight[: self.rows.used]
            destination[f"{prefix}weight"] = weight if keep_vars else weight.detach()

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
                f"The weights do not fit the model: what has the shape {tuple(weight.shape)} is no "
                f"growing table of the width {self.embedding_dim}",
                code="model-mismatch",
            )
        self._take_over(weight, SavedTable.from_arrays(lambda key: arrays[key]))

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, fields={self._fields}"
