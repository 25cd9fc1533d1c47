"""Scores of users and their candidates by a model that is split into parts.

All candidates of a request have the features of one user.  What the model makes of these is
computed once for the user, and kept for those who were here last; what it makes of an item is
computed once for each row of the store and kept in a table in memory; only the rest is computed for
each pair.  See :class:`bigdl.nano.openvino.SplitNetwork`.

A row of a table belongs to a row of the store's files, which never change, so an item that was
updated has another row, which is computed when it is asked for.  A model that is replaced takes its
tables with it.  The first request that a model answers is computed by the whole model, too; if the
scores differ by more than rounding, the whole model is used on.
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
from bigdl.friesian.serving.rows import Column, Features, Layout, StoredRows, as_numpy, gathered
from bigdl.friesian.serving.stages import FeatureReader
from bigdl.nano.openvino.split import SplitError, SplitNetwork
from bigdl.nano.serving.batching import BatchReport
from bigdl.nano.serving.model import ServedModel

logger = logging.getLogger(__name__)

_ARRAY_BYTES = 112  # of an array, besides its numbers
_CHUNK = 4096  # rows that are computed in one call
_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
_FEW = 64  # rows of items whose number may be any; each number of rows is a shape to compile for


class _ItemTable:
    """Results of a model for the rows of one file of the store, computed as they are asked for."""

    def __init__(self, rows: int, width: int):
        self._values = np.empty((rows, width), np.float32)  # untouched pages take no memory
        self._known = np.zeros(rows, bool)
        self._is_full = False

    def take(self, places: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the values of some rows; `compute` gives those of rows that are not known."""
        if not self._is_full:
            missing = np.unique(places[~self._known[places]])
            for start in range(0, len(missing), _CHUNK):
                part = missing[start : start + _CHUNK]
                self._values[part] = compute(part)
                self._known[part] = True  # after the values: other threads look
            self._is_full = bool(len(missing)) and bool(self._known.all())
        return self._values.take(places, axis=0)


class _UserMemory:
    """Results of a model for users, each a row of a file of the store; the oldest go first."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self.bytes_kept = most_bytes, 0
        self.kept: dict[int, list[np.ndarray]] = {}
        self._changing = threading.Lock()

    def get(self, place: int) -> list[np.ndarray] | None:
        return self.kept.get(place)

    def put(self, place: int, values: list[np.ndarray]) -> None:
        copies = [np.array(each) for each in values]
        size = _size_of(copies)
        with self._changing:
            if place in self.kept or size > self._most_bytes:
                return
            self.kept[place] = copies
            self.bytes_kept += size
            while self.bytes_kept > self._most_bytes:
                self.bytes_kept -= _size_of(self.kept.pop(next(iter(self.kept))))


def _size_of(arrays: Sequence[np.ndarray]) -> int:
    return sum(each.nbytes + _ARRAY_BYTES for each in arrays)


class _SplitModel:
    """A model in parts, with what it made of users and items."""

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
        """Return what is kept of the users of a file."""
        memory = self.users_kept.get(rows)
        if memory is None:
            with self._adding:
                memory = self.users_kept.setdefault(rows, _UserMemory(most_bytes))
        return memory

    def table(self, rows: StoredRows, most_bytes: int) -> _ItemTable | None:
        """Return the table for the rows of a file; None if it would be too large."""
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
    """The users of a request who have candidates.

    Attributes
    ----------
    counts : list of int
        Candidates of each.
    sources : sequence of (_UserMemory, int) or None
        Where what the model makes of each is kept.
    kept : sequence of list of ndarray or None
        What is known of it.
    features : Features or None
        Of those of whom nothing is known, in their order.
    """

    counts: list[int]
    sources: Sequence[tuple[_UserMemory, int] | None]
    kept: Sequence[list[np.ndarray] | None]
    features: Features | None


@dataclass(frozen=True)
class PreparedPairs:
    """A request for scores by the parts of a model, which stays the same until it ends."""

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
            Those that were prepared, or fewer.
        whole : callable
            Returns the scores of the whole model, which the first ones are compared with.
        """
        return self.pairs.scores(self, candidates, whole)


class PairScores:
    """Scores of users and candidates by the parts of a model.

    Parameters
    ----------
    ranker : ServedRanker or ServedModel
    features : FeatureReader
    tables : (str, str)
        Of users and of items.
    how : (sequence of str, FeaturePipeline or None, str or None, int, int)
        The columns that the model takes; what makes them; the score, of a model that gives several;
        the most bytes that a table of items may have, and what is kept of users.
    columns : (list of str, list of str)
        Those that are read of users, and of items.

    Raises
    ------
    SplitError
        If an input depends on user and item.
    """

    def __init__(
        self,
        ranker: ServedRanker | ServedModel,
        features: FeatureReader,
        tables: tuple[str, str],
        how: tuple[Sequence[str], FeaturePipeline | None, str | None, int, int],
        columns: tuple[list[str], list[str]],
    ):
        inputs, self._pipeline, self._output, self._most_bytes, self._user_bytes = how
        self._ranker, self._features = ranker, features
        self._tables, self._columns = tables, columns
        self._of_user, self._of_item = _sides(columns, inputs, self._pipeline)
        self.split_models: weakref.WeakKeyDictionary[ServedModel, _SplitModel | None] = (
            weakref.WeakKeyDictionary()
        )
        self._making, self._splitting = threading.Lock(), threading.Lock()

    # -- models -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Split the model that answers now, and compute the table of all items.

        What cannot be split stays whole; that is logged.
        """
        with _leased(self._ranker) as model:
            if model is not None:
                self._make(model)

    def _split_of(self, model: ServedModel) -> _SplitModel | None:
        """Return the parts of a model; None while they are made, and if there are none."""
        if model in self.split_models:
            return self.split_models[model]
        with self._making:
            if model not in self.split_models:
                self.split_models[model] = None
                worker = threading.Thread(
                    target=self._make, args=(model,), name="split", daemon=True
                )
                worker.start()
        return None

    def _make(self, model: ServedModel) -> None:
        with self._splitting:
            if self.split_models.get(model) is None:
                self.split_models[model] = self._made(model)

    def _made(self, model: ServedModel) -> _SplitModel | None:
        try:
            network = model.split([n for n in _names(model) if n in self._of_user])
            tolerance = _TOLERANCE["bf16" if "bf16" in model.method else "fp32"]
            split = _SplitModel(network, tolerance)
            self._fill(model, split)
        except Exception as error:
            logger.info("The model is used as a whole: %s", one_line(error))
            return None
        return split

    def _fill(self, model: ServedModel, split: _SplitModel) -> None:
        if not hasattr(self._features, "parts"):
            return
        layout, parts = self._features.parts(self._tables[1])
        for rows in parts:
            table = split.table(rows, self._most_bytes)
            for start in range(0, len(rows) if table is not None else 0, _CHUNK):
                places = np.arange(start, min(start + _CHUNK, len(rows)))
                table.take(places, self._computing(model, split, layout, rows))  # type: ignore[union-attr]

    # -- scores -----------------------------------------------------------------------------------

    def prepare(
        self, users: np.ndarray, candidates: Candidates, resources: ExitStack
    ) -> PreparedPairs | None:
        """Look what is known of users and read the features of others.

        Parameters
        ----------
        users : ndarray of int64
        candidates : Candidates
        resources : ExitStack
            Keeps the version of the model that answers until the end of the request.

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
        if candidates is not prepared.candidates:  # a stage has changed them
            requested = self._requested(split, prepared.users, candidates)
        if split.is_checked:
            return self._computed(model, split, requested, candidates)
        expected = whole()
        try:
            scores = self._computed(model, split, requested, candidates)
            self._check(split, scores, expected)
        except Exception as error:
            logger.warning("The model is used as a whole: %s", one_line(error))
            self.split_models[model] = None
        return expected

    def _check(self, split: _SplitModel, scores: np.ndarray, expected: np.ndarray) -> None:
        scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=1e-6))
        close = np.isclose(scores, expected, split.tolerance, split.tolerance * scale, True)
        if not close.all():
            most = float(np.abs(scores - expected).max())
            raise SplitError(f"its parts give other scores, which differ by {most:.3g}")
        split.is_checked = True

    def _requested(
        self, split: _SplitModel, users: np.ndarray, candidates: Candidates
    ) -> _Requested:
        """Look what is kept of the users who have candidates; read the features of the others."""
        asked = np.flatnonzero(candidates.counts)
        counts, ids = candidates.counts[asked].tolist(), users[asked]
        table, columns = self._tables[0], self._columns[0]
        if not hasattr(self._features, "parts"):
            nothing = [None] * len(ids)
            return _Requested(counts, nothing, nothing, self._features.read(table, ids, columns))
        layout, parts = self._features.parts(table)
        sources: list[tuple[_UserMemory, int] | None] = [None] * len(ids)
        for rows in parts:  # later ones replace earlier ones
            memory = split.users(rows, self._user_bytes)
            for number, place in enumerate(rows.places(ids).tolist()):
                if place >= 0:
                    sources[number] = memory, place
        kept = [None if source is None else source[0].get(source[1]) for source in sources]
        missing = [number for number, values in enumerate(kept) if values is None]
        # of these parts, whatever the store has by now
        features = gathered(layout, parts, ids[missing], columns) if missing else None
        return _Requested(counts, sources, kept, features)

    def _computed(
        self, model: ServedModel, split: _SplitModel, requested: _Requested, candidates: Candidates
    ) -> np.ndarray:
        begin = time.perf_counter()
        items = self._items(model, split, candidates.ids)
        of_user: list[np.ndarray] = []
        if requested.features is not None:
            of_user = self._inputs(model, self._of_user, requested.features.columns, 0)
        scores, start, place = [], 0, 0
        for count, source, common in zip(
            requested.counts, requested.sources, requested.kept, strict=True
        ):
            if common is None:
                common = split.network.common([each[place : place + 1] for each in of_user])
                place += 1
                if source is not None:
                    source[0].put(source[1], common)
            rows = items[start : start + count]
            start += count
            scores.append(self._score(model, split.network.joint(common, rows)))
        model.report(BatchReport(len(candidates.ids), [0.0], time.perf_counter() - begin))
        return scores[0] if len(scores) == 1 else np.concatenate(scores)

    def _score(self, model: ServedModel, results: list[np.ndarray]) -> np.ndarray:
        place = 0
        if self._output is not None and len(results) > 1:
            place = [each.name for each in model.signature.outputs].index(self._output)
        return np.asarray(results[place], np.float32).reshape(-1)

    def _items(self, model: ServedModel, split: _SplitModel, ids: np.ndarray) -> np.ndarray:
        """Return what the model makes of items, from the tables as far as there are some."""
        table_name, columns = self._tables[1], self._columns[1]
        if not hasattr(self._features, "parts"):
            return self._own(model, split, self._features.read(table_name, ids, columns))
        layout, parts = self._features.parts(table_name)
        tables = [split.table(rows, self._most_bytes) for rows in parts]
        if None in tables:
            return self._own(model, split, gathered(layout, parts, ids, columns))
        places = [rows.places(ids) for rows in parts]
        if len(parts) == 1 and (not len(ids) or places[0].min() >= 0):
            compute = self._computing(model, split, layout, parts[0])
            return tables[0].take(places[0], compute)  # type: ignore[union-attr]
        values = np.empty((len(ids), split.network.width), np.float32)
        is_open = np.ones(len(ids), bool)
        for rows, table, at in reversed([*zip(parts, tables, places, strict=True)]):
            here = np.flatnonzero(is_open & (at >= 0))
            if len(here):
                compute = self._computing(model, split, layout, rows)
                values[here] = table.take(at[here], compute)  # type: ignore[union-attr]
                is_open[here] = False
        if is_open.any():  # unknown ids have the defaults
            unknown = gathered(layout, parts, ids[is_open], columns)
            values[is_open] = self._own(model, split, unknown)
        return values

    def _computing(
        self, model: ServedModel, split: _SplitModel, layout: Layout, rows: StoredRows
    ) -> Callable[[np.ndarray], np.ndarray]:
        def compute(places: np.ndarray) -> np.ndarray:
            features = gathered(layout, [rows], rows.ids[places], self._columns[1])
            return self._own(model, split, features)

        return compute

    def _own(self, model: ServedModel, split: _SplitModel, items: Features) -> np.ndarray:
        return split.network.own(self._inputs(model, self._of_item, items.columns, 1))

    def _inputs(
        self, model: ServedModel, wanted: set[str], columns: dict[str, Column], side: int
    ) -> list[np.ndarray]:
        """Return the inputs of the model that one side has, in its order."""
        if self._pipeline is not None:
            columns = self._transformed(columns, side)
        signature = model.signature
        return [
            each.checked(as_numpy(columns[each.name], each.name))
            for each in signature.inputs
            if each.name in wanted
        ]

    def _transformed(self, columns: dict[str, Column], side: int) -> dict[str, Column]:
        """Run the pipeline, which reads both sides, on the rows of one."""
        assert self._pipeline is not None
        other = 1 - side
        rows = len(next(iter(columns.values())))
        filler: dict[str, Any] = {}
        if self._columns[other]:  # any row: what is computed of it is not used
            read = self._features.read(self._tables[other], [0], self._columns[other])
            filler = read.take(np.zeros(rows, np.int64)).columns
        batch = self._pipeline.transform_batch({**columns, **filler})
        return dict(zip(batch.schema.names, batch.columns, strict=True))


def _names(model: ServedModel) -> list[str]:
    return [each.name for each in model.signature.inputs]


def _sides(
    columns: tuple[list[str], list[str]], inputs: Sequence[str], pipeline: FeaturePipeline | None
) -> tuple[set[str], set[str]]:
    """Return the inputs that depend on the user alone, and those that depend on the item alone."""
    of_user, of_item = map(set, columns)
    sides: tuple[set[str], set[str]] = (set(), set())
    for name in inputs:
        sources = {name} if pipeline is None else pipeline.sources(name)
        if sources <= of_user:
            sides[0].add(name)
        elif sources <= of_item:
            sides[1].add(name)
        else:
            raise SplitError(f"The input {name} depends on user and item")
    return sides


def _leased(ranker: ServedRanker | ServedModel) -> AbstractContextManager[ServedModel | None]:
    """Return the model of a ranker for the time of a request; None where it has to be whole."""
    return nullcontext(ranker) if isinstance(ranker, ServedModel) else ranker.leased()
