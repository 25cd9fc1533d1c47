"""Index of item vectors that finds candidates for users.

The index has an immutable *base*, which Faiss searches, and the items that were added since, which
are compared one by one. A search uses the state at its start, without a lock; adding an item
creates a new state. After many additions, a thread builds a new base.

Scores are recomputed from the vectors of the candidates, and ties are ordered by id. So a user gets
the same candidates in a batch as alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from bigdl.common.checks import check_choice, check_integer
from bigdl.common.errors import UsageError, require
from bigdl.friesian.serving.filters import ItemAttributes, ItemFilter
from bigdl.friesian.serving.rows import Ids, ids_of, table_of

if TYPE_CHECKING:
    from types import ModuleType

    from bigdl.friesian.serving.rows import TableSource

METRICS = ("inner_product", "cosine", "l2")
KINDS = ("flat", "ivf", "hnsw")

_FORMAT = "bigdl.friesian.ItemIndex"
_MANIFEST = "index.json"
_SLACK = 8  # extra candidates, because rounding may change the order of close scores in Faiss
_FEW_QUERIES = 16  # from 20 queries on Faiss uses another algorithm with different rounding
_FEW_ITEMS = 4096  # up to this number of accepted items, each of them is compared
_FEW_IN_GRAPH = 50_000  # the same for approximate indexes, which lose items with a strict filter
_OPTIONS: dict[str, dict[str, int | None]] = {
    "flat": {},
    "ivf": {"nlist": None, "nprobe": None},
    "hnsw": {"m": 32, "ef_construction": 40, "ef_search": 256},
}


@dataclass(frozen=True)
class Candidates:
    """Concatenated candidate items of several users, best first for each user.

    Attributes
    ----------
    ids : ndarray of int64
    scores : ndarray of float32
        Inner products, cosines or negative squared distances; higher is better.
    counts : ndarray of int64
        Number of items per user.
    partial : bool
        True if a shard of the items did not answer.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import ItemIndex
    >>> index = ItemIndex([10, 20], np.eye(2))
    >>> candidates = index.search(np.eye(2), k=5, exclude=[[20], []])
    >>> [ids.tolist() for ids, scores in candidates.split()]
    [[10], [20, 10]]
    """

    ids: np.ndarray
    scores: np.ndarray
    counts: np.ndarray
    partial: bool = False

    def split(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return a list with the ids and scores of each user."""
        ends = np.cumsum(self.counts)[:-1]
        return list(zip(np.split(self.ids, ends), np.split(self.scores, ends), strict=True))

    @classmethod
    def joined(
        cls, per_user: Sequence[tuple[np.ndarray, np.ndarray]], partial: bool = False
    ) -> Candidates:
        """Concatenate the ids and scores of several users."""
        if not per_user:
            none = np.zeros(0, np.int64)
            return cls(none, np.zeros(0, np.float32), none, partial)
        ids, scores = zip(*per_user, strict=True)
        counts = np.array([len(each) for each in ids], np.int64)
        return cls(np.concatenate(ids), np.concatenate(scores), counts, partial)


@dataclass(frozen=True)
class _IndexState:
    """Immutable state of an index: a Faiss base index, added items, and removed base ids."""

    index_type: str
    metric: str
    options: dict[str, int | None]
    base: Any  # a Faiss index
    ids: np.ndarray
    vectors: np.ndarray
    added_ids: np.ndarray
    added_vectors: np.ndarray
    stale: np.ndarray  # ids of the base that were replaced or removed

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and vectors of all current items."""
        kept = ~np.isin(self.ids, self.stale)
        ids = np.concatenate([self.ids[kept], self.added_ids])
        return ids, np.concatenate([self.vectors[kept], self.added_vectors])


class ItemIndex:
    """Index of item vectors that supports searches and additions at the same time.

    Parameters
    ----------
    ids : sequence or array of int
    vectors : array of shape ``(items, dim)``
        float32 vectors, as a tower predicts them.
    kind : {"flat", "ivf", "hnsw"}
        ``"flat"`` compares all vectors and is exact; the others are approximate and search a part
        of the vectors.
    metric : {"inner_product", "cosine", "l2"}
    threads : int, default 1
        Faiss threads per search. A server with concurrent requests needs only one.
    rebuild_after : int, default 4096
        Number of added items after which a new base is built in the background.
    **options : int
        For ``"ivf"``: ``nlist`` clusters, of which ``nprobe`` are searched. For ``"hnsw"``: ``m``
        neighbours, ``ef_construction`` and ``ef_search``.

    Raises
    ------
    UsageError
        If ids and vectors do not match, an id occurs twice, or a value is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import ItemIndex
    >>> index = ItemIndex([10, 20, 30], np.array([[1, 0], [0, 1], [1, 1]], np.float32))
    >>> candidates = index.search([[2.0, 1.0]], k=2)
    >>> candidates.ids.tolist(), candidates.scores.tolist()
    ([30, 10], [3.0, 2.0])
    >>> index.add_item(40, [2, 2])
    >>> index.search([[2.0, 1.0]], k=2, exclude=[[30]]).ids.tolist()
    [40, 10]
    """

    def __init__(
        self,
        ids: Ids,
        vectors: ArrayLike,
        kind: str = "flat",
        metric: str = "inner_product",
        threads: int = 1,
        rebuild_after: int = 4096,
        **options: int,
    ):
        check_choice("kind", kind, KINDS)
        check_choice("metric", metric, METRICS)
        self._threads = check_integer("threads", threads, 1)
        self._rebuild_after = check_integer("rebuild_after", rebuild_after, 1)
        if strange := [name for name in options if name not in _OPTIONS[kind]]:
            raise UsageError(
                f"An index of kind {kind!r} has no option {strange[0]!r}, only "
                f"{list(_OPTIONS[kind])}",
                code="argument-unknown",
                argument=strange[0],
                allowed=list(_OPTIONS[kind]),
            )
        for name, value in options.items():
            check_integer(name, value, 1)
        self.attributes = ItemAttributes()
        self._merged_ids: tuple[_IndexState, np.ndarray] | None = None
        self._changing = threading.Lock()
        self._building: Future[None] | None = None
        numbers = ids_of(ids, "the index")
        matrix = _checked(vectors, metric)
        _check_pairs(numbers, matrix)
        self._state = _built(kind, metric, {**_OPTIONS[kind], **options}, numbers, matrix)

    @classmethod
    def from_table(
        cls,
        source: TableSource,
        id_col: str = "item",
        vector_col: str = "prediction",
        **options: Any,
    ) -> ItemIndex:
        """Build an index from a table, such as the embeddings that an Estimator wrote.

        Parameters
        ----------
        source : FeatureTable, DataFrame, pyarrow.Table or str
            A str is the path of Parquet files. Vectors are lists, or Spark ML vectors.
        id_col, vector_col : str
        **options
            Arguments of :class:`ItemIndex`.
        """
        table = table_of(source, "the index")
        for name in (id_col, vector_col):
            if name not in table.column_names:
                raise UsageError(
                    f"The table for the index has no column {name!r}, only {table.column_names}",
                    code="column-missing",
                    column=name,
                    allowed=list(table.column_names),
                )
        lists = table[vector_col].combine_chunks()
        values = lists.flatten().to_numpy(zero_copy_only=False)
        if not len(lists) or len(values) % len(lists) or lists.null_count:
            raise UsageError(
                f"The vectors in {vector_col} should have one length and no nulls",
                code="data-shape",
                column=vector_col,
            )
        return cls(table[id_col], values.reshape(len(lists), -1), **options)

    # -- properties -------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Index type: flat, ivf or hnsw."""
        return self._state.index_type

    @property
    def metric(self) -> str:
        """Similarity measure of the vectors."""
        return self._state.metric

    @property
    def dim(self) -> int:
        """Length of the vectors."""
        return self._state.vectors.shape[1]

    @property
    def ids(self) -> np.ndarray:
        """Ids of all items; the same array until the items change."""
        state = self._state
        if not len(state.stale) and not len(state.added_ids):
            return state.ids
        known = self._merged_ids
        if known is None or known[0] is not state:
            known = self._merged_ids = state, state.merged()[0]
        return known[1]

    def __len__(self) -> int:
        state = self._state
        return len(state.ids) - len(state.stale) + len(state.added_ids)

    def __contains__(self, item_id: int) -> bool:
        state = self._state
        if item_id in state.added_ids:
            return True
        return item_id in state.ids and item_id not in state.stale

    def __repr__(self) -> str:
        return f"<ItemIndex of {len(self)} items, {self.kind}, {self.metric}, {self.dim} numbers>"

    # -- searching --------------------------------------------------------------------------------

    def search(
        self,
        queries: ArrayLike,
        k: int,
        exclude: Sequence[Any] | None = None,
        allowed: ArrayLike | None = None,
        item_filter: ItemFilter | None = None,
    ) -> Candidates:
        """Return the best items for user vectors.

        Parameters
        ----------
        queries : array of shape ``(users, dim)``
        k : int
        exclude : sequence of sequences of int, optional
            Items to exclude per user, such as seen items.
        allowed : sequence of int, optional
            Restrict the candidates of all users to these items.
        item_filter : ItemFilter, optional
            Restrict the candidates of all users, also by :attr:`attributes`.

        Returns
        -------
        Candidates
            Fewer than `k` items for a user if there are no more.
        """
        check_integer("k", k, 1)
        state = self._state
        users = _checked(queries, state.metric, state.vectors.shape[1])
        if exclude is not None and len(exclude) != len(users):
            raise UsageError(
                f"exclude has {len(exclude)} lists for {len(users)} users",
                code="data-shape",
                argument="exclude",
            )
        seen = None if exclude is None else [ids_of(each, "exclude") for each in exclude]
        if allowed is not None:
            return _search_allowed(state, users, k, seen, np.unique(ids_of(allowed, "allowed")))
        kept = self._accepted(state, item_filter)
        if kept is not None:
            count = int(kept[0].sum())
            few = _FEW_ITEMS if state.index_type == "flat" else _FEW_IN_GRAPH
            if count <= few or (state.index_type == "hnsw" and 20 * count < len(state.ids)):
                return _search_accepted(state, users, k, seen, kept)
        best = []
        for start in range(0, len(users), _FEW_QUERIES):
            part = users[start : start + _FEW_QUERIES]
            of_part = None if seen is None else seen[start : start + _FEW_QUERIES]
            rows = self._search_base(state, part, k, of_part, None if kept is None else kept[0])
            for row, query in enumerate(part):
                at = rows[row]
                if len(at) and at.min() < 0:
                    at = at[at >= 0]
                at = np.sort(at)  # so that ids ascend
                ids, vectors = state.ids.take(at), state.vectors.take(at, axis=0)
                if len(state.stale):
                    current = ~np.isin(ids, state.stale)
                    ids, vectors = ids[current], vectors[current]
                if len(state.added_ids):
                    added = slice(None) if kept is None else kept[1]
                    ids = np.concatenate([ids, state.added_ids[added]])
                    vectors = np.concatenate([vectors, state.added_vectors[added]])
                best.append(_best(state, query, ids, vectors, k, of_part and of_part[row]))
        return Candidates.joined(best)

    def _accepted(
        self, state: _IndexState, item_filter: ItemFilter | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return masks of the base items and of the added items that a filter accepts."""
        if item_filter is None:
            return None
        attributes = self.attributes
        base = attributes.mask(state.ids, item_filter)
        if len(state.stale):
            base = base & ~np.isin(state.ids, state.stale)
        return base, attributes.mask(state.added_ids, item_filter)

    def _search_base(
        self,
        state: _IndexState,
        users: np.ndarray,
        k: int,
        seen: list[np.ndarray] | None,
        kept: np.ndarray | None,
    ) -> Sequence[np.ndarray] | np.ndarray:
        """Return base positions per user that contain the best accepted items."""
        faiss = require("faiss", "serving")
        faiss.omp_set_num_threads(self._threads)  # applies to the calling thread
        longest = max(map(len, seen), default=0) if seen else 0
        if state.index_type == "flat" or not longest:
            # More results than `k`; those that the user has seen are removed from them.
            fetch = min(k + longest + len(state.stale) + _SLACK, len(state.ids))
            bits = None if kept is None else np.packbits(kept, bitorder="little")
            return list(self._search_bits(faiss, state, users, fetch, bits))
        # An approximate search with seen items among its results would find too few others.
        fetch = min(k + len(state.stale) + _SLACK, len(state.ids))
        rows = []
        for user, items in zip(users, seen or (), strict=True):
            free = np.ones(len(state.ids), bool) if kept is None else kept.copy()
            at = np.searchsorted(state.ids, items)
            at = at[at < len(state.ids)]
            free[at[np.isin(state.ids[at], items)]] = False
            bits = np.packbits(free, bitorder="little")
            rows.append(self._search_bits(faiss, state, user[None], fetch, bits)[0])
        return rows

    @staticmethod
    def _search_bits(
        faiss: ModuleType,
        state: _IndexState,
        users: np.ndarray,
        fetch: int,
        bits: np.ndarray | None,
    ) -> np.ndarray:
        if not fetch:
            return np.zeros((len(users), 0), np.int64)
        selector = None if bits is None else faiss.IDSelectorBitmap(bits)
        if state.index_type == "hnsw":
            ef_search = max(state.options["ef_search"] or 0, fetch)
            parameters = faiss.SearchParametersHNSW(efSearch=ef_search)
        elif state.index_type == "ivf":
            parts = state.options["nprobe"] or max(8, state.base.nlist // 8)
            parameters = faiss.SearchParametersIVF(nprobe=min(parts, state.base.nlist))
        else:
            parameters = None if selector is None else faiss.SearchParameters()
        if selector is not None:
            parameters.sel = selector
        positions: np.ndarray = state.base.search(users, fetch, params=parameters)[1]
        return positions

    # -- changing ---------------------------------------------------------------------------------

    def add_item(self, item_id: int, vector: ArrayLike) -> None:
        """Add an item, or replace its vector; later searches use the new vector."""
        self.add_items([item_id], [vector])

    def add_items(self, ids: Ids, vectors: ArrayLike | Sequence[ArrayLike]) -> None:
        """Add several items, or replace their vectors, atomically.

        Parameters
        ----------
        ids : sequence of int
        vectors : array of shape ``(items, dim)``
        """
        numbers = ids_of(ids, "the index")
        matrix = _checked(vectors, self.metric, self.dim)
        _check_pairs(numbers, matrix)
        with self._changing:
            self._state = _with_items(self._state, numbers, matrix)
        if len(self._state.added_ids) >= self._rebuild_after:
            self.rebuild()

    def remove_items(self, ids: Ids) -> None:
        """Remove items; ignore unknown ids."""
        with self._changing:
            self._state = _without_items(self._state, ids_of(ids, "the index"))

    def rebuild(self) -> Future[None]:
        """Build a new base index from all items in the background.

        Searches use the new base when it is ready.

        Returns
        -------
        concurrent.futures.Future
            Future of the running rebuild; a new one starts if none is running.
        """
        with self._changing:
            if self._building is not None and not self._building.done():
                return self._building
            done: Future[None] = Future()
            self._building = done
        worker = threading.Thread(target=self._rebuild, args=(done,), name="rebuild", daemon=True)
        worker.start()
        return done

    def _rebuild(self, done: Future[None]) -> None:
        try:
            before = self._state
            state = _rebuilt(before)
            with self._changing:
                now = self._state
                removed = np.setdiff1d(before.merged()[0], now.merged()[0])
                state = _without_items(state, removed)
                is_new = ~_same_rows(now, before)
                self._state = _with_items(state, now.added_ids[is_new], now.added_vectors[is_new])
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def swap(self, other: ItemIndex) -> None:
        """Switch to the contents of another index; running searches keep the old contents.

        Parameters
        ----------
        other : ItemIndex
            Index with vectors of the same length, for example a newly loaded one.
        """
        if other.dim != self.dim:
            raise UsageError(
                f"The vectors of the other index have {other.dim} numbers, not {self.dim}",
                code="data-shape",
            )
        with self._changing:
            self._state = other._state

    # -- folders ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write the index to a folder atomically, and replace an existing index.

        Parameters
        ----------
        path : str or path-like
        """
        faiss = require("faiss", "serving")
        folder = Path(path)
        if folder.exists() and not (folder / _MANIFEST).exists() and any(folder.iterdir()):
            raise UsageError(
                f"{path} contains other files and no index; choose another folder",
                code="path-exists",
                path=str(path),
            )
        state = self._state
        if len(state.stale) or len(state.added_ids):
            state = _rebuilt(state)
        inner = folder / f"files-{uuid.uuid4().hex}"
        try:
            inner.mkdir(parents=True)
            np.save(inner / "ids.npy", state.ids)
            np.save(inner / "vectors.npy", state.vectors)
            faiss.write_index(state.base, str(inner / "base.faiss"))
            content = {
                "format": _FORMAT,
                "kind": state.index_type,
                "metric": state.metric,
                "options": state.options,
                "folder": inner.name,
                "checksums": {each.name: _checksum(each) for each in sorted(inner.iterdir())},
            }
            temporary = folder / f"{_MANIFEST}.new"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / _MANIFEST)
        except OSError as error:
            shutil.rmtree(inner, ignore_errors=True)
            raise UsageError(
                f"The index cannot be written to {path}: {error}",
                code="path-unusable",
                path=str(path),
            ) from error
        for each in folder.glob("files-*"):
            if each != inner:
                shutil.rmtree(each, ignore_errors=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike, threads: int = 1, rebuild_after: int = 4096
    ) -> ItemIndex:
        """Load an ItemIndex that :meth:`save` wrote.

        Parameters
        ----------
        path : str or path-like
        threads, rebuild_after : int
            As for :class:`ItemIndex`.

        Raises
        ------
        UsageError
            If the folder has no index, or the index is damaged.
        """
        faiss = require("faiss", "serving")
        folder = Path(path)
        if not (folder / _MANIFEST).exists():
            raise UsageError(
                f"There is no index at {path}: {_MANIFEST} is missing",
                code="path-missing",
                path=str(path),
            )
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            inner = folder / content["folder"]
            for name, checksum in content["checksums"].items():
                if _checksum(inner / name) != checksum:
                    raise ValueError(f"{name} has changed since it was written")
            index = cls.__new__(cls)
            index._threads = check_integer("threads", threads, 1)
            index._rebuild_after = check_integer("rebuild_after", rebuild_after, 1)
            index._changing, index._building = threading.Lock(), None
            index.attributes, index._merged_ids = ItemAttributes(), None
            index._state = _initial_state(
                check_choice("kind", content["kind"], KINDS),
                check_choice("metric", content["metric"], METRICS),
                content["options"],
                faiss.read_index(str(inner / "base.faiss")),
                np.load(inner / "ids.npy"),
                np.load(inner / "vectors.npy"),
            )
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"The index at {path} cannot be read: {error}", code="file-damaged", path=str(path)
            ) from error
        return index


def _search_allowed(
    state: _IndexState,
    users: np.ndarray,
    k: int,
    seen: list[np.ndarray] | None,
    allowed: np.ndarray,
) -> Candidates:
    """Search only the allowed items, by computing the score of each allowed item."""
    positions = np.searchsorted(state.ids, allowed)
    positions[positions == len(state.ids)] = 0
    is_in_base = state.ids[positions] == allowed if len(state.ids) else np.zeros(len(allowed), bool)
    is_in_base &= ~np.isin(allowed, state.stale)
    is_added = np.isin(state.added_ids, allowed)
    ids = np.concatenate([allowed[is_in_base], state.added_ids[is_added]])
    vectors = np.concatenate([state.vectors[positions[is_in_base]], state.added_vectors[is_added]])
    return Candidates.joined(
        [
            _best(state, query, ids, vectors, k, seen and seen[row])
            for row, query in enumerate(users)
        ]
    )


def _search_accepted(
    state: _IndexState,
    users: np.ndarray,
    k: int,
    seen: list[np.ndarray] | None,
    kept: tuple[np.ndarray, np.ndarray],
) -> Candidates:
    """Search only the items of the masks in `kept`, by computing the score of each of them."""
    base = np.flatnonzero(kept[0])
    ids = np.concatenate([state.ids[base], state.added_ids[kept[1]]])
    vectors = np.concatenate([state.vectors[base], state.added_vectors[kept[1]]])
    best = []
    for row, query in enumerate(users):
        of_user = None if seen is None else seen[row]
        fetch = k + _SLACK + (0 if of_user is None else len(of_user))
        at = np.arange(len(ids))
        if 4 * fetch < len(ids):  # in float32 first; the best are compared exactly
            rough = vectors @ query
            if state.metric == "l2":
                rough = 2 * rough - np.square(vectors).sum(1)
            at = np.sort(np.argpartition(-rough, fetch)[:fetch])
        best.append(_best(state, query, ids[at], vectors[at], k, of_user))
    return Candidates.joined(best)


def _best(
    state: _IndexState,
    query: np.ndarray,
    ids: np.ndarray,
    vectors: np.ndarray,
    k: int,
    seen: Any,
) -> tuple[np.ndarray, np.ndarray]:
    if seen is not None and len(seen):
        kept = ~np.isin(ids, seen)
        ids, vectors = ids[kept], vectors[kept]
    exact, wanted = vectors.astype(np.float64), query.astype(np.float64)
    scores: np.ndarray
    scores = -np.square(exact - wanted).sum(1) if state.metric == "l2" else exact @ wanted
    rounded = scores.astype(np.float32)
    order = best_first(ids, rounded, k)
    return ids.take(order), rounded.take(order)


def best_first(ids: np.ndarray, scores: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the `k` best scores, best first; equal scores are ordered by id.

    Parameters
    ----------
    ids : ndarray of int64
    scores : ndarray of float32
        Without NaN.
    k : int
    """
    if 4 * k >= len(scores):
        if (ids[1:] > ids[:-1]).all():  # a stable sort keeps this order
            return np.argsort(-scores, kind="stable")[:k]
        return np.lexsort((ids, -scores))[:k]
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    near = np.flatnonzero(scores >= least)
    return near[np.lexsort((ids[near], -scores[near]))[:k]]


def _built(
    index_type: str,
    metric: str,
    options: dict[str, int | None],
    ids: np.ndarray,
    vectors: np.ndarray,
) -> _IndexState:
    """Build an index state with all items in its base index."""
    faiss = require("faiss", "serving")
    order = np.argsort(ids, kind="stable")
    ids, vectors = ids[order], np.ascontiguousarray(vectors[order])
    dim, count = vectors.shape[1], len(vectors)
    measure = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    if index_type == "hnsw":
        base = faiss.IndexHNSWFlat(dim, options["m"], measure)
        base.hnsw.efConstruction = options["ef_construction"]
    elif index_type == "ivf":
        parts = options["nlist"] or int(4 * np.sqrt(count))
        parts = max(1, min(parts, count // 8 or 1))
        base = faiss.IndexIVFFlat(faiss.IndexFlat(dim, measure), dim, parts, measure)
        base.cp.min_points_per_centroid = 1  # no warning for small catalogues
        if count:
            base.train(vectors)
    else:
        base = faiss.IndexFlat(dim, measure)
    if count:
        base.add(vectors)
    return _initial_state(index_type, metric, options, base, ids, vectors)


def _rebuilt(state: _IndexState) -> _IndexState:
    return _built(state.index_type, state.metric, state.options, *state.merged())


def _initial_state(
    index_type: str,
    metric: str,
    options: dict[str, int | None],
    base: Any,
    ids: np.ndarray,
    vectors: np.ndarray,
) -> _IndexState:
    none = np.zeros(0, np.int64)
    no_vectors = np.zeros((0, vectors.shape[1]), np.float32)
    return _IndexState(index_type, metric, options, base, ids, vectors, none, no_vectors, none)


def _checked(
    vectors: ArrayLike | Sequence[ArrayLike], metric: str, dim: int | None = None
) -> np.ndarray:
    try:
        matrix: np.ndarray = np.ascontiguousarray(vectors, np.float32)
    except (TypeError, ValueError):
        raise UsageError(
            "Vectors should be a numeric array with rows of one length", code="data-shape"
        ) from None
    if matrix.ndim != 2 or not matrix.shape[1] or dim not in (None, matrix.shape[1]):
        wanted = "(n, dim)" if dim is None else f"(n, {dim})"
        raise UsageError(
            f"Vectors should be of shape {wanted}, got {matrix.shape}", code="data-shape"
        )
    if not np.isfinite(matrix).all():
        raise UsageError("A vector has a value that is not finite", code="data-value")
    if metric == "cosine":
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        matrix = matrix / np.where(lengths > 0, lengths, 1)
    return matrix


def _check_pairs(ids: np.ndarray, vectors: np.ndarray) -> None:
    if len(ids) != len(vectors):
        raise UsageError(f"There are {len(ids)} ids, but {len(vectors)} vectors", code="data-shape")
    if len(np.unique(ids)) < len(ids):
        raise UsageError("An id occurs twice; keep one vector of each item", code="data-order")


def _with_items(state: _IndexState, ids: np.ndarray, vectors: np.ndarray) -> _IndexState:
    kept = ~np.isin(state.added_ids, ids)
    return replace(
        state,
        added_ids=np.concatenate([state.added_ids[kept], ids]),
        added_vectors=np.concatenate([state.added_vectors[kept], vectors]),
        stale=np.union1d(state.stale, ids[np.isin(ids, state.ids)]),
    )


def _without_items(state: _IndexState, ids: np.ndarray) -> _IndexState:
    kept = ~np.isin(state.added_ids, ids)
    return replace(
        state,
        added_ids=state.added_ids[kept],
        added_vectors=state.added_vectors[kept],
        stale=np.union1d(state.stale, ids[np.isin(ids, state.ids)]),
    )


def _same_rows(now: _IndexState, before: _IndexState) -> np.ndarray:
    """Return a mask of the added items in `now` that have the same vector in `before`."""
    known = {int(each): position for position, each in enumerate(before.added_ids)}
    same = np.zeros(len(now.added_ids), bool)
    for position, each in enumerate(now.added_ids):
        at = known.get(int(each))
        same[position] = at is not None and np.array_equal(
            before.added_vectors[at], now.added_vectors[position]
        )
    return same


def _checksum(path: Path) -> int:
    value = 0
    with contextlib.closing(open(path, "rb")) as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
