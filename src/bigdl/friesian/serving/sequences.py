"""Candidate generator with a sequence model, which reads the newest events of each user.

The keys and values of the events that the model has read are cached per user, so that a request
computes only the events that were appended since. SASRec and HSTU read up to 8 new events one by
one; after more of them, the whole history is read again, which is faster. Cache, model and item
vectors belong together and are replaced together, so no answer combines two models.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.friesian.serving.events import EventStore, UserHistory
from bigdl.friesian.serving.filters import ItemAttributes, ItemFilter
from bigdl.friesian.serving.index import KINDS, Candidates, ItemIndex
from bigdl.friesian.serving.rows import Ids, ids_of

if TYPE_CHECKING:
    import os

    from bigdl.friesian.models.sequences import SavedSequenceModel, SequenceCache, SequenceModel
    from bigdl.friesian.models.sequences.one_event import HistoryState, OneEventModel

__all__ = ["SequenceRecall"]

MODEL_FILE = "recommender.json"  # as in bigdl.friesian.models.sequences.saved, which needs torch
_AT_ONCE = 64  # histories that are read together
_MOST_NEW = 8  # new events that are read one by one; reading more of them together is faster
_ENTRY_BYTES = 512  # estimated size of a cache entry without its arrays


def newest_model(path: str) -> tuple[str, int]:
    """Return the folder and the version of a saved sequence model.

    Parameters
    ----------
    path : str
        Folder of a model, or with folders of its versions, ``1``, ``2`` and so on.
    """
    if (Path(path) / MODEL_FILE).exists():
        return path, 1
    if Path(path).is_dir():
        versions = [
            int(each.name)
            for each in Path(path).iterdir()
            if each.name.isdecimal() and (each / MODEL_FILE).exists()
        ]
        if versions:
            return str(Path(path) / str(max(versions))), max(versions)
    raise UsageError(
        f"{path} has no saved sequence model; pass a folder that SequenceRecommender.save wrote",
        code="path-missing",
        path=path,
    )


@dataclass
class _Entry:
    """Events of a user that the model has read, and the result."""

    ids: np.ndarray
    times: np.ndarray
    vector: np.ndarray
    cache: SequenceCache | HistoryState | None
    nbytes: int = 0

    def __post_init__(self) -> None:
        sizes = self.ids.nbytes + self.times.nbytes + self.vector.nbytes
        self.nbytes = sizes + _ENTRY_BYTES + (0 if self.cache is None else self.cache.nbytes)

    def is_prefix_of(self, ids: np.ndarray, times: np.ndarray) -> bool:
        n = len(self.ids)
        return (
            n <= len(ids)
            and np.array_equal(self.ids, ids[:n])
            and np.array_equal(self.times, times[:n])
        )


class _UserCache:
    """Least recently used cache of entries, bounded in bytes."""

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, user: int) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(user)
            if entry is not None:
                self._entries.move_to_end(user)
            return entry

    def put(self, user: int, entry: _Entry) -> None:
        with self._lock:
            old = self._entries.pop(user, None)
            self.nbytes += entry.nbytes - (0 if old is None else old.nbytes)
            self._entries[user] = entry
            while self.nbytes > self._most and self._entries:
                self.nbytes -= self._entries.popitem(last=False)[1].nbytes

    def __len__(self) -> int:
        return len(self._entries)


@dataclass
class _Generation:
    """Model, index of its item vectors, and cache of its users."""

    network: SequenceModel
    sorted_items: np.ndarray
    id_of_sorted: np.ndarray
    max_len: int
    stride: int
    index: ItemIndex
    cache: _UserCache
    version: int
    is_causal: bool
    reader: OneEventModel | None = None
    users: dict[str, int] = field(default_factory=lambda: {"extended": 0, "whole": 0, "same": 0})

    def ids(self, items: np.ndarray) -> np.ndarray:
        """Return the model's ids of items; 0 for unknown items."""
        at = np.searchsorted(self.sorted_items, items)
        at[at == len(self.sorted_items)] = 0
        return np.where(self.sorted_items[at] == items, self.id_of_sorted[at], 0)


class SequenceRecall:
    """Candidate generator that predicts the next items from the events of a user.

    The events come from an :class:`EventStore`. Items that the model does not know are skipped;
    users without known events get no candidates, so that a :class:`Recommender` answers with
    popular items.

    Parameters
    ----------
    events : EventStore
        Keeps at least the events that the model reads.
    model : SavedSequenceModel, str or path-like
        Model, or the folder of ``SequenceRecommender.save``. Its items are integers.
    index_type : {"flat", "ivf", "hnsw"}, default "flat"
        `kind` of the index of the item vectors; see :class:`ItemIndex`.
    filter_seen : bool, default True
        Recommend no items of the user's events.
    cache_bytes : int, default 256 MiB
        Memory for the keys and values of recent users. Others are computed from their events.
    threads : int, default 1
        Faiss threads per search.
    version : int, default 1
        Number of the model in :attr:`version`.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.sequential import SequenceRecommender
    >>> from bigdl.friesian.serving import Event, SequenceRecall, open_events
    >>> rows = [(user, (user + time) % 5, time) for user in range(20) for time in range(4)]
    >>> clicks = pd.DataFrame(rows, columns=["user", "item", "time"])
    >>> model = SequenceRecommender("gru4rec", max_len=4, dim=16, epochs=40, learning_rate=0.02)
    >>> model.fit(clicks).save("model")
    >>> events = open_events("events")
    >>> recall = SequenceRecall(events, "model")
    >>> _ = events.append([Event(77, item, float(item)) for item in (1, 2)])
    >>> recall.candidates(np.array([77]), 1).ids.tolist()
    [3]
    >>> _ = events.append([Event(77, 3, 3.0)])
    >>> recall.candidates(np.array([77]), 1).ids.tolist()
    [4]
    >>> events.close()
    """

    def __init__(
        self,
        events: EventStore,
        model: SavedSequenceModel | str | os.PathLike,
        *,
        index_type: str = "flat",
        filter_seen: bool = True,
        cache_bytes: int = 256 << 20,
        threads: int = 1,
        version: int = 1,
    ):
        require("torch", "orca")
        self.events = events
        self._index_type = check_choice("index_type", index_type, KINDS)
        self._filter_seen = filter_seen
        self._cache_bytes = check_integer("cache_bytes", cache_bytes, 0)
        self._threads = check_integer("threads", threads, 1)
        self._attributes = ItemAttributes()
        self._swapping = threading.Lock()
        self._generation = self._generation_of(model, version)

    @property
    def version(self) -> int:
        """Number of the model."""
        return self._generation.version

    @property
    def index(self) -> ItemIndex:
        """Index of the item vectors of the current model."""
        return self._generation.index

    @property
    def attributes(self) -> ItemAttributes:
        """Attributes of the items, for filters."""
        return self._attributes

    @attributes.setter
    def attributes(self, attributes: ItemAttributes) -> None:
        with self._swapping:
            self._attributes = self._generation.index.attributes = attributes

    def cache_info(self) -> dict[str, int]:
        """Return the size of the cache, and counts of users by how they were computed.

        Returns
        -------
        dict
            ``users``, ``bytes``, and since the model was loaded: ``same`` (no new event),
            ``extended`` (only the new events were computed) and ``whole`` (all events).
        """
        now = self._generation
        return {"users": len(now.cache), "bytes": now.cache.nbytes, **now.users}

    def swap(
        self, model: SavedSequenceModel | str | os.PathLike, version: int | None = None
    ) -> int:
        """Switch to another model with its item vectors; running requests finish with the old one.

        Parameters
        ----------
        model : SavedSequenceModel, str or path-like
        version : int, optional
            Default: the next number.

        Returns
        -------
        int
            The new version.
        """
        number = self.version + 1 if version is None else check_integer("version", version, 0)
        generation = self._generation_of(model, number)
        with self._swapping:
            generation.index.attributes = self._attributes
            self._generation = generation
        return number

    def _generation_of(
        self, model: SavedSequenceModel | str | os.PathLike, version: int
    ) -> _Generation:
        import torch

        from bigdl.friesian.models.sequences import CausalModel, SavedSequenceModel
        from bigdl.friesian.models.sequences.one_event import OneEventModel

        if not isinstance(model, SavedSequenceModel):
            model = SavedSequenceModel.read(model)  # type: ignore[arg-type]
        if not pa.types.is_integer(model.items.type):
            raise UsageError(
                f"The items of the sequence model are of type {model.items.type}, but items are "
                "served by integer ids; encode them, for example by category_encode, and train "
                "again",
                code="data-dtype",
            )
        if model.max_len > self.events.most:
            raise UsageError(
                f"The model reads {model.max_len} events, but the event store keeps "
                f"{self.events.most}; open it with most={model.max_len} or more",
                code="argument-conflict",
                argument="most",
            )
        items = ids_of(model.items, "the items of the model")
        network = model.network.eval()
        with torch.inference_mode():
            vectors = network.items.matrix()[1:].numpy()
        reader = OneEventModel.of(network)
        is_causal = isinstance(network, CausalModel)
        order = np.argsort(items, kind="stable")
        index = ItemIndex(items, vectors, self._index_type, threads=self._threads)
        cache = _UserCache(self._cache_bytes)
        ids = order.astype(np.int64) + 1
        reads = model.max_len, model.stride
        return _Generation(
            *(network, items[order], ids, *reads, index, cache, version, is_causal, reader)
        )

    # -- answering --------------------------------------------------------------------------------

    def check_filter(self, item_filter: ItemFilter) -> None:
        """Raise a UsageError if a filter uses unknown attributes."""
        self._attributes.check(item_filter)

    def accepts(self, items: np.ndarray, item_filter: ItemFilter) -> np.ndarray:
        """Return a mask of the items that a filter accepts."""
        return self._attributes.mask(items, item_filter)

    def candidates(
        self, user_ids: np.ndarray, k: int, item_filter: ItemFilter | None = None
    ) -> Candidates:
        """Return up to `k` items per user, best first; users without events get no items."""
        now = self._generation
        histories = self.events.read(user_ids)
        vectors, known = self._vectors(now, user_ids, histories)
        if not len(known):
            none = np.zeros(0, np.int64)
            counts = np.zeros(len(user_ids), np.int64)
            return Candidates(none, np.zeros(0, np.float32), counts)
        seen = [histories[row].items for row in known] if self._filter_seen else None
        best = now.index.search(vectors, k, exclude=seen, item_filter=item_filter)
        if len(known) == len(user_ids):
            return best
        counts = np.zeros(len(user_ids), np.int64)
        counts[known] = best.counts
        return Candidates(best.ids, best.scores, counts, best.partial)

    def user_vectors(self, user_ids: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of users, and a mask of the users who have known events.

        Parameters
        ----------
        user_ids : sequence of int

        Returns
        -------
        vectors : ndarray of shape (users with events, dim)
        known : ndarray of bool
        """
        users = ids_of(user_ids)
        vectors, known = self._vectors(self._generation, users, self.events.read(users))
        mask = np.zeros(len(users), bool)
        mask[known] = True
        return vectors, mask

    def _vectors(
        self, now: _Generation, users: np.ndarray, histories: Sequence[UserHistory]
    ) -> tuple[np.ndarray, list[int]]:
        """Return the vectors of the users with known events, and their positions."""
        from bigdl.friesian.models.sequences.saved import window_start

        vectors: dict[int, np.ndarray] = {}
        whole: list[tuple[int, np.ndarray, np.ndarray]] = []
        for row, (user, history) in enumerate(zip(users.tolist(), histories, strict=True)):
            first = window_start(history.total, now.max_len, now.stride)
            first = max(first - (history.total - len(history.items)), 0)
            ids = now.ids(history.items[first:])
            times = np.floor(history.times[first:]).astype(np.int64)
            if not ids.all():
                ids, times = ids[ids > 0], times[ids > 0]
            if not len(ids):
                continue
            entry = now.cache.get(user)
            if entry is None or not entry.is_prefix_of(ids, times):
                whole.append((row, ids, times))
            elif len(entry.ids) == len(ids):
                now.users["same"] += 1
                vectors[row] = entry.vector
            elif not now.is_causal or (now.reader and len(ids) - len(entry.ids) > _MOST_NEW):
                whole.append((row, ids, times))
            else:
                now.users["extended"] += 1
                vectors[row] = self._extended(now, user, entry, ids, times)
        now.users["whole"] += len(whole)
        whole.sort(key=lambda each: len(each[1]))
        for start in range(0, len(whole), _AT_ONCE):
            self._read_whole(now, users, whole[start : start + _AT_ONCE], vectors)
        known = sorted(vectors)
        return np.stack([vectors[row] for row in known]) if known else np.zeros((0, 1)), known

    @staticmethod
    def _extended(
        now: _Generation, user: int, entry: _Entry, ids: np.ndarray, times: np.ndarray
    ) -> np.ndarray:
        import torch

        if now.reader is not None:
            vector, state = now.reader.extend(cast("HistoryState", entry.cache), ids, times)
            now.cache.put(user, _Entry(ids, times, vector, state))
            return vector
        network: Any = now.network
        new = slice(len(entry.ids), None)
        with torch.inference_mode():
            hidden, cache = network.extend(
                torch.from_numpy(ids[new])[None], torch.from_numpy(times[new])[None], entry.cache
            )
            vector = hidden[0, -1].numpy()
        now.cache.put(user, _Entry(ids, times, vector, cache))
        return vector

    @staticmethod
    def _read_whole(
        now: _Generation,
        users: np.ndarray,
        rows: Sequence[tuple[int, np.ndarray, np.ndarray]],
        vectors: dict[int, np.ndarray],
    ) -> None:
        """Compute the vectors of histories from all their events, and cache them."""
        import torch

        from bigdl.friesian.models.sequences import CausalModel

        network = now.network
        if isinstance(network, CausalModel) and network.reads_padding:
            lengths = sorted({len(each[1]) for each in rows})
            groups = [[each for each in rows if len(each[1]) == length] for length in lengths]
        else:
            groups = [list(rows)]
        for group in groups:
            longest = max(len(each[1]) for each in group) if now.is_causal else now.max_len
            ids = np.zeros((len(group), longest), np.int64)
            times = np.zeros((len(group), longest), np.int64)
            for number, (_, of_user, at) in enumerate(group):
                ids[number, : len(of_user)], times[number, : len(at)] = of_user, at
            with torch.inference_mode():
                item_seq, time_seq = torch.from_numpy(ids), torch.from_numpy(times)
                if isinstance(network, CausalModel):
                    hidden, cache = network.extend(item_seq, time_seq)
                    row_of = network.row_of if now.reader is None else now.reader.state_of
                    parts: list[Any] = [
                        row_of(cache, number, len(each[1])) for number, each in enumerate(group)
                    ]
                    last = [len(each[1]) - 1 for each in group]
                    last_rows = hidden[torch.arange(len(group)), torch.tensor(last)]
                else:
                    columns = [item_seq, *([time_seq] if network.uses_times else [])]
                    last_rows, parts = network(*columns), [None] * len(group)
                numbers: np.ndarray = last_rows.numpy()
            for (row, of_user, at), vector, part in zip(group, numbers, parts, strict=True):
                vectors[row] = vector.copy()
                now.cache.put(int(users[row]), _Entry(of_user, at, vectors[row], part))
