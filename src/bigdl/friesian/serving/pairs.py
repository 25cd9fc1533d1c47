"""Scores of user-candidate pairs from a ranking model that is split into user and item parts.

All candidates of a request share the features of one user. The user part of the model is computed
once per user and cached for recent users. The item part is computed once per row of the store and
cached in memory. Only the joint part is computed for each pair. See
:class:`bigdl.nano.openvino.SplitNetwork`.

The caches belong to rows of the store's files, which never change. An updated item has a new row,
which is computed on first use. The caches of a replaced model are dropped with it. The first
request of a model is also computed by the whole model. If the scores differ by more than rounding,
the whole model is used from then on.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import one_line
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.index import Candidates
from bigdl.friesian.serving.rankers import ServedRanker
from bigdl.friesian.serving.rows import (
    Column,
    Features,
    Layout,
    StoredRows,
    as_numpy,
    gather_features,
)
from bigdl.friesian.serving.stages import FeatureReader
from bigdl.nano.openvino.split import SplitError, SplitNetwork
from bigdl.nano.serving.batching import BatchReport
from bigdl.nano.serving.model import ServedModel

logger = logging.getLogger(__name__)

_ARRAY_BYTES = 112  # overhead of an array object
_CHUNK = 4096  # rows per call of the model
_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


class _ItemTable:
    """Cache of a model's item-side outputs for the rows of one store file."""

    def __init__(self, rows: int, width: int):
        self._values = np.empty((rows, width), np.float32)  # untouched pages use no memory
        self._known = np.zeros(rows, bool)
        self._is_full = False

    def take(
        self, positions: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return the cached outputs of rows; compute missing outputs with `compute`."""
        if not self._is_full:
            missing = np.unique(positions[~self._known[positions]])
            for start in range(0, len(missing), _CHUNK):
                part = missing[start : start + _CHUNK]
                self._values[part] = compute(part)
                self._known[part] = True  # set after the values, because other threads read both
            self._is_full = bool(len(missing)) and bool(self._known.all())
        return self._values.take(positions, axis=0)


class _UserMemory:
    """Cache of a model's user-side outputs per row of a store file; evicts the oldest entries."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self.bytes_kept = most_bytes, 0
        self.kept: dict[int, list[np.ndarray]] = {}
        self._changing = threading.Lock()

    def get(self, row: int) -> list[np.ndarray] | None:
        return self.kept.get(row)

    def put(self, row: int, values: list[np.ndarray]) -> None:
        copies = [np.array(each) for each in values]
        size = _size_of(copies)
        with self._changing:
            if row in self.kept or size > self._most_bytes:
                return
            self.kept[row] = copies
            self.bytes_kept += size
            while self.bytes_kept > self._most_bytes:
                self.bytes_kept -= _size_of(self.kept.pop(next(iter(self.kept))))


def _size_of(arrays: Sequence[np.ndarray]) -> int:
    return sum(each.nbytes + _ARRAY_BYTES for each in arrays)


class _SplitModel:
    """Split model: a user part, an item part, and a part that combines their cached outputs."""

    def __init__(self, network: SplitNetwork, tolerance: float):
        self.network, self.tolerance = network, tolerance
        self.users_kept: weakref.WeakKeyDictionary[StoredRows, _UserMemory] = (
            weakref.WeakKeyDictionary()
        )
        self.is_checked = False
        self._tables: weakref.WeakKeyDictionary[StoredRows, _ItemTable] = (
            weakref.WeakKeyDictionary()
        )
        self._adding = threading.Lock()

    def users(self, rows: StoredRows, most_bytes: int) -> _UserMemory:
        """Return the cache of user-side outputs for a store file."""
        memory = self.users_kept.get(rows)
        if memory is None:
            with self._adding:
                memory = self.users_kept.setdefault(rows, _UserMemory(most_bytes))
        return memory

    def table(self, rows: StoredRows, most_bytes: int) -> _ItemTable | None:
        """Return the cache of item-side outputs for a store file, or None if it is too large."""
        if 4 * len(rows) * self.network.width > most_bytes:
            return None
        table = self._tables.get(rows)
        if table is None:
            with self._adding:
                table = self._tables.get(rows)
                if table is None:
                    table = self._tables[rows] = _ItemTable(len(rows), self.network.width)
        return table


@dataclass(frozen=True)
class _Requested:
    """Users of a request who have candidates, with their cached outputs or their features.

    Attributes
    ----------
    counts : list of int
        Number of candidates per user.
    sources : sequence of (_UserMemory, int) or None
        Cache and row for the user part of each user.
    kept : sequence of list of ndarray or None
        Cached user part of each user.
    features : Features or None
        Features of the users without a cached user part, in order.
    """

    counts: list[int]
    sources: Sequence[tuple[_UserMemory, int] | None]
    kept: Sequence[list[np.ndarray] | None]
    features: Features | None


@dataclass(frozen=True)
class PreparedPairs:
    """Prepared request, which keeps one version of the split model until the request ends."""

    pairs: PairScores
    model: ServedModel
    split: _SplitModel
    users: np.ndarray
    candidates: Candidates
    requested: _Requested

    def scores(self, candidates: Candidates, whole: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a score for each candidate.

        Parameters
        ----------
        candidates : Candidates
            The prepared candidates, or a subset.
        whole : callable
            Returns the scores of the whole model, to check the first scores of a split model.
        """
        return self.pairs.scores(self, candidates, whole)


class PairScores:
    """Scorer of user-candidate pairs that runs the parts of a split model separately.

    Parameters
    ----------
    ranker : ServedRanker or ServedModel
    features : FeatureReader
    tables : (str, str)
        Names of the user table and the item table.
    options : (sequence of str, FeaturePipeline or None, str or None, int, int)
        Input columns of the model; pipeline that computes them; output to use as score; maximum
        bytes of an item cache; maximum bytes of a user cache.
    columns : (list of str, list of str)
        Columns to read of users, and of items.

    Raises
    ------
    SplitError
        If an input depends on both user and item.
    """

    def __init__(
        self,
        ranker: ServedRanker | ServedModel,
        features: FeatureReader,
        tables: tuple[str, str],
        options: tuple[Sequence[str], FeaturePipeline | None, str | None, int, int],
        columns: tuple[list[str], list[str]],
    ):
        inputs, self._pipeline, self._output, self._most_bytes, self._user_bytes = options
        self._ranker, self._features = ranker, features
        self._tables, self._columns = tables, columns
        self._of_user, self._of_item = _sides(columns, inputs, self._pipeline)
        self.split_models: weakref.WeakKeyDictionary[ServedModel, _SplitModel | None] = (
            weakref.WeakKeyDictionary()
        )
        self._making, self._splitting = threading.Lock(), threading.Lock()

    # -- models -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Split the current model, and fill the cache of item-side outputs.

        A model that cannot be split stays whole; the reason is logged.
        """
        with _leased(self._ranker) as model:
            if model is not None:
                self._split_once(model)

    def _split_of(self, model: ServedModel) -> _SplitModel | None:
        """Return the split model, or None; start the split in the background on the first call."""
        if model in self.split_models:
            return self.split_models[model]
        with self._making:
            if model not in self.split_models:
                self.split_models[model] = None
                worker = threading.Thread(
                    target=self._split_once, args=(model,), name="split", daemon=True
                )
                worker.start()
        return None

    def _split_once(self, model: ServedModel) -> None:
        with self._splitting:
            if self.split_models.get(model) is None:
                self.split_models[model] = self._try_split(model)

    def _try_split(self, model: ServedModel) -> _SplitModel | None:
        try:
            network = model.split([n for n in _names(model) if n in self._of_user])
            tolerance = _TOLERANCE["bf16" if "bf16" in model.method else "fp32"]
            split = _SplitModel(network, tolerance)
            self._fill(model, split)
        except Exception as error:
            logger.info("The model is not split: %s", one_line(error))
            return None
        return split

    def _fill(self, model: ServedModel, split: _SplitModel) -> None:
        if not hasattr(self._features, "parts"):
            return
        layout, parts = self._features.parts(self._tables[1])
        for rows in parts:
            table = split.table(rows, self._most_bytes)
            for start in range(0, len(rows) if table is not None else 0, _CHUNK):
                rows_of_chunk = np.arange(start, min(start + _CHUNK, len(rows)))
                table.take(rows_of_chunk, self._computing(model, split, layout, rows))  # type: ignore[union-attr]

    # -- scores -----------------------------------------------------------------------------------

    def prepare(
        self, users: np.ndarray, candidates: Candidates, resources: ExitStack
    ) -> PreparedPairs | None:
        """Look up cached user-side outputs, and read the features of the other users.

        Parameters
        ----------
        users : ndarray of int64
        candidates : Candidates
        resources : ExitStack
            Holds the model version until the end of the request.

        Returns
        -------
        PreparedPairs or None
            None if the whole model has to be used.
        """
        with ExitStack() as leasing:
            model = leasing.enter_context(_leased(self._ranker))
            split = None if model is None else self._split_of(model)
            if model is None or split is None:
                return None
            requested = self._requested(split, users, candidates)
            resources.push(leasing.pop_all())
        return PreparedPairs(self, model, split, users, candidates, requested)

    def scores(
        self, prepared: PreparedPairs, candidates: Candidates, whole: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return a score for each candidate; see :meth:`PreparedPairs.scores`."""
        model, split, requested = prepared.model, prepared.split, prepared.requested
        if candidates is not prepared.candidates:  # a stage changed the candidates
            requested = self._requested(split, prepared.users, candidates)
        if split.is_checked:
            return self._computed(model, split, requested, candidates)
        expected = whole()
        try:
            scores = self._computed(model, split, requested, candidates)
            self._check(split, scores, expected)
        except Exception as error:
            logger.warning("The model is not split: %s", one_line(error))
            self.split_models[model] = None
        return expected

    def _check(self, split: _SplitModel, scores: np.ndarray, expected: np.ndarray) -> None:
        scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=1e-6))
        close = np.isclose(scores, expected, split.tolerance, split.tolerance * scale, True)
        if not close.all():
            most = float(np.abs(scores - expected).max())
            raise SplitError(f"the scores of its parts differ by {most:.3g}")
        split.is_checked = True

    def _requested(
        self, split: _SplitModel, users: np.ndarray, candidates: Candidates
    ) -> _Requested:
        """Look up cached user-side outputs; read the features of users without cached outputs."""
        with_candidates = np.flatnonzero(candidates.counts)
        counts, ids = candidates.counts[with_candidates].tolist(), users[with_candidates]
        table, columns = self._tables[0], self._columns[0]
        if not hasattr(self._features, "parts"):
            nones = [None] * len(ids)
            return _Requested(counts, nones, nones, self._features.read(table, ids, columns))
        layout, parts = self._features.parts(table)
        sources: list[tuple[_UserMemory, int] | None] = [None] * len(ids)
        for rows in parts:  # later parts take precedence
            memory = split.users(rows, self._user_bytes)
            for number, row in enumerate(rows.positions(ids).tolist()):
                if row >= 0:
                    sources[number] = memory, row
        kept = [None if source is None else source[0].get(source[1]) for source in sources]
        missing = [number for number, values in enumerate(kept) if values is None]
        # read these parts, even if the store has changed since
        features = gather_features(layout, parts, ids[missing], columns) if missing else None
        return _Requested(counts, sources, kept, features)

    def _computed(
        self, model: ServedModel, split: _SplitModel, requested: _Requested, candidates: Candidates
    ) -> np.ndarray:
        begin = time.perf_counter()
        items = self._items(model, split, candidates.ids)
        of_user: list[np.ndarray] = []
        if requested.features is not None:
            of_user = self._inputs(model, self._of_user, requested.features.columns, 0)
        scores, start, user_index = [], 0, 0
        for count, source, common in zip(
            requested.counts, requested.sources, requested.kept, strict=True
        ):
            if common is None:
                common = split.network.common(
                    [each[user_index : user_index + 1] for each in of_user]
                )
                user_index += 1
                if source is not None:
                    source[0].put(source[1], common)
            rows = items[start : start + count]
            start += count
            scores.append(self._score(model, split.network.joint(common, rows)))
        model.report(BatchReport(len(candidates.ids), [0.0], time.perf_counter() - begin))
        return scores[0] if len(scores) == 1 else np.concatenate(scores)

    def _score(self, model: ServedModel, results: list[np.ndarray]) -> np.ndarray:
        output_index = 0
        if self._output is not None and len(results) > 1:
            output_index = [each.name for each in model.signature.outputs].index(self._output)
        return np.asarray(results[output_index], np.float32).reshape(-1)

    def _items(self, model: ServedModel, split: _SplitModel, ids: np.ndarray) -> np.ndarray:
        """Return the item-side outputs of the model, from the cache where possible."""
        table_name, columns = self._tables[1], self._columns[1]
        if not hasattr(self._features, "parts"):
            return self._item_part(model, split, self._features.read(table_name, ids, columns))
        layout, parts = self._features.parts(table_name)
        tables = [split.table(rows, self._most_bytes) for rows in parts]
        if None in tables:
            return self._item_part(model, split, gather_features(layout, parts, ids, columns))
        positions = [rows.positions(ids) for rows in parts]
        if len(parts) == 1 and (not len(ids) or positions[0].min() >= 0):
            compute = self._computing(model, split, layout, parts[0])
            return tables[0].take(positions[0], compute)  # type: ignore[union-attr]
        values = np.empty((len(ids), split.network.width), np.float32)
        is_open = np.ones(len(ids), bool)
        for rows, table, at in reversed([*zip(parts, tables, positions, strict=True)]):
            here = np.flatnonzero(is_open & (at >= 0))
            if len(here):
                compute = self._computing(model, split, layout, rows)
                values[here] = table.take(at[here], compute)  # type: ignore[union-attr]
                is_open[here] = False
        if is_open.any():  # unknown ids get the default features
            unknown = gather_features(layout, parts, ids[is_open], columns)
            values[is_open] = self._item_part(model, split, unknown)
        return values

    def _computing(
        self, model: ServedModel, split: _SplitModel, layout: Layout, rows: StoredRows
    ) -> Callable[[np.ndarray], np.ndarray]:
        def compute(positions: np.ndarray) -> np.ndarray:
            features = gather_features(layout, [rows], rows.ids[positions], self._columns[1])
            return self._item_part(model, split, features)

        return compute

    def _item_part(self, model: ServedModel, split: _SplitModel, items: Features) -> np.ndarray:
        return split.network.own(self._inputs(model, self._of_item, items.columns, 1))

    def _inputs(
        self, model: ServedModel, wanted: set[str], columns: dict[str, Column], side: int
    ) -> list[np.ndarray]:
        """Return the model inputs in `wanted`, computed from user columns or from item columns."""
        if self._pipeline is not None:
            columns = self._transformed(columns, side)
        signature = model.signature
        return [
            each.checked(as_numpy(columns[each.name], each.name))
            for each in signature.inputs
            if each.name in wanted
        ]

    def _transformed(self, columns: dict[str, Column], side: int) -> dict[str, Column]:
        """Run the pipeline on user or item columns only, with placeholders in the other columns."""
        assert self._pipeline is not None
        other = 1 - side
        rows = len(next(iter(columns.values())))
        filler: dict[str, Any] = {}
        if self._columns[other]:  # any row will do, because its results are not used
            read = self._features.read(self._tables[other], [0], self._columns[other])
            filler = read.take(np.zeros(rows, np.int64)).columns
        batch = self._pipeline.transform_batch({**columns, **filler})
        return dict(zip(batch.schema.names, batch.columns, strict=True))


def _names(model: ServedModel) -> list[str]:
    return [each.name for each in model.signature.inputs]


def _sides(
    columns: tuple[list[str], list[str]], inputs: Sequence[str], pipeline: FeaturePipeline | None
) -> tuple[set[str], set[str]]:
    """Divide the model inputs into inputs from user columns and inputs from item columns."""
    of_user, of_item = map(set, columns)
    sides: tuple[set[str], set[str]] = (set(), set())
    for name in inputs:
        sources = {name} if pipeline is None else pipeline.sources(name)
        if sources <= of_user:
            sides[0].add(name)
        elif sources <= of_item:
            sides[1].add(name)
        else:
            raise SplitError(f"The input {name} depends on both user and item")
    return sides


def _leased(ranker: ServedRanker | ServedModel) -> AbstractContextManager[ServedModel | None]:
    """Return a context manager that yields the ranker's model, or None if it must not be split."""
    return nullcontext(ranker) if isinstance(ranker, ServedModel) else ranker.leased()
