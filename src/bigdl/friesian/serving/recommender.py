"""Recommender: returns the best items for users by running a list of stages.

By default the stages are recall, features and ranking, each in this process or in a remote service.
See :mod:`.stages` for custom stages, and :mod:`.rankers` for the parts that the stages call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import UsageError, hide_frames
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.drift import DriftMonitor
from bigdl.friesian.serving.events import Appended, Event, EventStore
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.pairs import PairScores
from bigdl.friesian.serving.rankers import (
    CandidateGenerator,
    FilteringGenerator,
    Ranker,
    ServedRanker,
)
from bigdl.friesian.serving.rows import Column, as_numpy, ids_of
from bigdl.friesian.serving.stages import (
    DEFAULT_STAGES,
    POPULAR,
    RANKED,
    RECALLED,
    Batch,
    Columns,
    FeatureReader,
    Recommendation,
    Rerank,
    Stage,
    StageErrors,
    StageRunner,
    checked_stage,
    load_stage,
    take_rows,
)
from bigdl.nano.openvino.split import SplitError
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.model import ServedModel
from bigdl.nano.serving.signature import Signature
from bigdl.nano.serving.statuses import CallerGoneError as CallerGoneError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PAIRS_AT_ONCE = 100_000  # maximum number of user-candidate pairs per batch
_LONGEST = 1e6  # maximum seconds to a deadline; locks do not accept infinity


@hide_frames
class Recommender:
    """Recommender that finds and ranks items for users; several threads may call it at once.

    Parameters
    ----------
    features : FeatureStore or FeatureReader
    recall : CandidateGenerator
    ranker : Ranker
        Each of the three may be None if no stage uses it.
    inputs : sequence of str, optional
        Input columns of the ranker. Default: the columns that the ranker declares.
    pipeline : FeaturePipeline, optional
        Computes the inputs from the features, as in training.
    user_table, item_table : str
    candidates : int, default 500
        Number of items to rank per user.
    output : str, optional
        Score to sort by, for a ranker with several outputs.
    popular : sequence of int, optional
        Items for unknown users and for requests that fail or time out, best first.
    deadline : float, optional
        Seconds within which a request is answered, if necessary with the results so far. With a
        deadline, stages run in worker threads.
    prepare : callable, optional
        Maps the features of all candidates, a dict of columns with repeated user features, to
        another such dict, before the pipeline. Use it to join further columns.
    rerank : callable, optional
        Maps user, items and scores, best first, to items and scores. Use it to remove or reorder
        items.
    threads : int, default 8
        Worker threads for requests with a deadline.
    metrics : ServingMetrics, optional
    stages : sequence of Stage or str, optional
        Stages to run in order: objects, or names such as ``"recall"``, ``"features"``,
        ``"ranking"`` and those that :func:`load_stage` accepts. Default: these three.
    events : EventStore, optional
        Receives the events of the servers' clients. Default: that of a :class:`SequenceRecall`.
    drift : DriftMonitor, optional
        Observes the ranker's inputs: of some requests, one random candidate per user.
    split : bool, default True
        Split the ranker: compute its user part once per user and its item part once per item, and
        cache both. It applies to a :class:`ServedModel` or :class:`ServedRanker` in OpenVINO that
        can be split with equal scores up to rounding. It does not apply with `prepare`, or if a
        pipeline step reads columns of both tables.
    item_memory : int, default 1 GiB
        Maximum bytes of the item cache, per model and file of the store. Items beyond it are
        computed in each request.
    user_memory : int, default 64 MiB
        Maximum bytes of the user cache; the oldest entries are evicted.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex, Recommender
    >>> store = EmbeddedStore("features")
    >>> users = pd.DataFrame({"user": [1], "age": [30], "prediction": [[1.0, 0.0]]})
    >>> items = pd.DataFrame({"item": [7, 8, 9], "price": [5.0, 2.0, 9.0]})
    >>> _ = store.replace({"user": users, "item": items})
    >>> index = ItemIndex([7, 8, 9], np.array([[2, 0], [1, 0], [0, 1]]))
    >>> class Cheapest:
    ...     def predict(self, inputs):
    ...         return -inputs["price"]
    >>> recall = IndexRecall(store, index)
    >>> recommender = Recommender(
    ...     store, recall, Cheapest(), inputs=["price"], candidates=2, popular=[9, 7]
    ... )
    >>> for answer in recommender.recommend([1, 5], k=2):
    ...     print(answer.user_id, answer.item_ids.tolist(), answer.source)
    1 [8, 7] ranked
    5 [9, 7] popular
    """

    def __init__(
        self,
        features: FeatureReader | None,
        recall: CandidateGenerator | None,
        ranker: Ranker | None,
        inputs: Sequence[str] | None = None,
        *,
        pipeline: FeaturePipeline | None = None,
        user_table: str = "user",
        item_table: str = "item",
        candidates: int = 500,
        output: str | None = None,
        popular: Sequence[int] | np.ndarray = (),
        deadline: float | None = None,
        prepare: Callable[[Columns], Columns] | None = None,
        rerank: Rerank | None = None,
        threads: int = 8,
        metrics: ServingMetrics | None = None,
        split: bool = True,
        item_memory: int = 1 << 30,
        user_memory: int = 64 << 20,
        stages: Sequence[Stage | str] | None = None,
        events: EventStore | None = None,
        drift: DriftMonitor | None = None,
    ):
        self.features, self.recall, self.ranker = features, recall, ranker
        self.events: EventStore | None = events or getattr(recall, "events", None)
        self.default_candidates = check_integer("candidates", candidates, 1)
        self._deadline = None
        if deadline is not None:
            self._deadline = check_number("deadline", deadline, above=0)
        self.metrics = metrics or ServingMetrics()
        self._has_ended = False
        memory = (
            check_integer("item_memory", item_memory, 0),
            check_integer("user_memory", user_memory, 0),
        )
        errors, tables = StageErrors(self.metrics), (user_table, item_table)
        self._features: FeaturesStage | None = None
        stage_list: list[Stage] = []
        for each in DEFAULT_STAGES if stages is None else stages:
            if each == "recall":
                stage_list.append(RecallStage(_required("recall", recall)))
            elif each == "features":
                columns = _inputs_of(ranker, inputs)
                store, pairs = _required("features", features), None
                if (
                    split
                    and isinstance(ranker, ServedModel | ServedRanker)
                    and prepare is None
                    and not hasattr(store, "read_found")
                ):
                    options = columns, pipeline, output, *memory
                    pairs = partial(PairScores, ranker, store, tables, options)
                self._features = FeaturesStage(
                    store, columns, tables, errors, pipeline=pipeline, prepare=prepare, pairs=pairs
                )
                stage_list.append(self._features)
                if drift is not None:
                    stage_list.append(DriftStage(drift, self._features, errors))
            elif each == "ranking":
                stage_list.append(
                    RankingStage(_required("ranker", ranker), output, errors, self._features)
                )
            else:
                stage_list.append(
                    load_stage(each) if isinstance(each, str) else checked_stage(each)
                )
        if drift is not None and self._features is None:
            raise UsageError(
                "A DriftMonitor needs the stage features, whose columns it observes",
                code="argument-conflict",
                argument="drift",
            )
        self.drift = drift
        self._runner = StageRunner(
            stage_list,
            errors,
            self.metrics,
            check_integer("threads", threads, 1),
            ids_of(popular, "popular"),
            rerank,
        )

    @property
    def stages(self) -> list[str]:
        """Names of the stages, in order."""
        return [each.name for each in self._runner.stages]

    def recommend(
        self,
        user_ids: Sequence[int] | np.ndarray | int,
        k: int = 10,
        candidates: int | None = None,
        deadline: float | None = None,
        is_gone: Callable[[], bool] | None = None,
        item_filter: ItemFilter | None = None,
    ) -> list[Recommendation]:
        """Return the best items for each user, in the order of the users.

        Large requests are computed in batches of users, which limits memory.

        Parameters
        ----------
        user_ids : sequence of int, or int
        k : int, default 10
            Maximum number of items per user.
        candidates : int, optional
            Number of items to rank per user; at least `k`.
        deadline : float, optional
            Seconds. Default: the deadline of the recommender.
        is_gone : callable, optional
            Called before each stage, in any thread; True stops the work.
        item_filter : ItemFilter, optional
            Recommend only the items that it accepts, also where popular items replace an answer.

        Returns
        -------
        list of Recommendation
            A user may have fewer than `k` items, if the recall or `rerank` returns fewer.

        Raises
        ------
        UsageError
            If an argument is invalid. Failures of stages are logged and reported in the
            recommendation.
        CallerGoneError
            If `is_gone` returned True, or the recommender was closed during the call.
        """
        check_integer("k", k, 1)
        candidates = max(self.default_candidates, k) if candidates is None else candidates
        check_integer("candidates", candidates, 1)
        if candidates < k:
            raise UsageError(
                f"candidates should be at least k, which is {k}, got {candidates}",
                code="argument-value",
                argument="candidates",
            )
        allowed = self._deadline if deadline is None else check_number("deadline", deadline)
        end = None if allowed is None else time.monotonic() + min(allowed, _LONGEST)
        users = ids_of(user_ids)
        if not len(users):
            return []

        popular = None if item_filter is None else self._accepted_popular(item_filter)

        def stopped() -> bool:
            return self._has_ended or (is_gone is not None and is_gone())

        answers: list[Recommendation] = []
        step = max(PAIRS_AT_ONCE // candidates, 1)
        with self.metrics.time("request"):
            for start in range(0, len(users), step):
                batch = Batch(
                    *(users[start : start + step], k, candidates, self.features),
                    item_filter=item_filter,
                    popular=popular,
                )
                answers += self._runner.answers(batch, end, stopped)
        for source in (RANKED, RECALLED, POPULAR):
            if count := sum(each.source == source for each in answers):
                self.metrics.answered(source, count)
        return answers

    def append(self, events: Iterable[Event]) -> Appended:
        """Append events to the histories of users; later requests use them.

        Parameters
        ----------
        events : iterable of Event

        Raises
        ------
        UsageError
            If the recommender has no event store, or the store cannot be written.
        """
        if self.events is None:
            raise UsageError(
                "This recommender keeps no events; configure a history with events",
                code="unsupported",
                argument="events",
            )
        appended = list(events)
        with self.metrics.time("events"):
            result = self.events.append(appended)
        now = time.time()
        for each in appended:
            self.metrics.freshness("history", max(now - each.time, 0.0))
        return result

    def _accepted_popular(self, item_filter: ItemFilter) -> np.ndarray:
        """Check a filter, and return the popular items that it accepts."""
        recall = self.recall
        if not isinstance(recall, FilteringGenerator) or "recall" not in self.stages:
            name = "nothing" if recall is None else type(recall).__name__
            raise UsageError(
                f"This recommender finds candidates by {name}, which does not support filters",
                code="unsupported",
                argument="filter",
            )
        recall.check_filter(item_filter)
        popular = self._runner.popular
        return popular[recall.accepts(popular, item_filter)]

    def check(self) -> None:
        """Raise a UsageError if the features lack columns of the ranker or pipeline."""
        if self._features is not None:
            self._features.check()

    def warm_up(self) -> None:
        """Split the model and fill the item cache before the first request.

        Until that is done, requests use the whole model.
        """
        if self._features is not None and (pairs := self._features.pairs()) is not None:
            pairs.warm_up()

    def close(self) -> None:
        """Stop the threads when their current stages end; abort requests in progress."""
        self._has_ended = True
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RecallStage:
    """Stage that finds candidates for users."""

    name = "recall"

    def __init__(self, recall: CandidateGenerator):
        self._recall = recall

    def run(self, batch: Batch) -> Batch:
        if batch.item_filter is None:
            candidates = self._recall.candidates(batch.users, batch.max_candidates)
        else:
            recall: FilteringGenerator = self._recall  # type: ignore[assignment]
            candidates = recall.candidates(batch.users, batch.max_candidates, batch.item_filter)
        return replace(batch, candidates=candidates, partial=batch.partial or candidates.partial)


class FeaturesStage:
    """Stage that reads the ranker's columns, or prepares requests to a split model."""

    name = "features"

    def __init__(
        self,
        store: FeatureReader,
        columns: Sequence[str],
        tables: tuple[str, str],
        errors: StageErrors,
        *,
        pipeline: FeaturePipeline | None = None,
        prepare: Callable[[Columns], Columns] | None = None,
        pairs: Callable[[tuple[list[str], list[str]]], PairScores] | None = None,
    ):
        self._store, self._wanted, self._tables, self._errors = store, columns, tables, errors
        self._pipeline, self._prepare, self._make_pairs = pipeline, prepare, pairs
        self._pairs: tuple[tuple[list[str], list[str]], PairScores | None] | None = None
        # available columns, and columns to read
        self._chosen: tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]] | None = None

    def run(self, batch: Batch) -> Batch:
        pairs = self.pairs()
        if pairs is not None and batch.candidates is not None:
            try:
                prepared = pairs.prepare(batch.users, batch.candidates, batch.resources)
            except UsageError as error:  # e.g. nulls in features, which the whole model skips
                self._errors.replaced(self.name, error)
            else:
                if prepared is not None:
                    return replace(batch, pairs=prepared)
        return self.read(batch)

    def pairs(self) -> PairScores | None:
        """Return the scorer that runs the model's parts, or None if the model is not split."""
        if self._make_pairs is None:
            return None
        needed = self.needed()
        if self._pairs is None or self._pairs[0] != needed:
            try:
                pairs = self._make_pairs(needed)
            except SplitError as error:
                logger.info("The model is not split: %s", error)
                pairs = None
            self._pairs = needed, pairs
        return self._pairs[1]

    def read(self, batch: Batch) -> Batch:
        """Return the batch with the columns of the ranker.

        Candidates on a lost shard are removed. Candidates with nulls in their features stay,
        without a row.
        """
        candidates = batch.candidates
        if candidates is None:
            raise UsageError(
                "The stage features needs a stage before it that finds candidates", code="state"
            )
        of_user, of_item = self.needed()
        columns: Columns = {}
        if of_user:
            owner = np.repeat(np.arange(len(batch.users)), candidates.counts)
            of_users = self._store.read(self._tables[0], batch.users, of_user)
            columns.update(of_users.take(owner).columns)
        if of_item:
            read_found = getattr(self._store, "read_found", None)
            if read_found is None:
                rows = self._store.read(self._tables[1], candidates.ids, of_item)
            else:
                rows, lost = read_found(self._tables[1], candidates.ids, of_item)
                if lost.any():
                    batch, kept = replace(batch.keep(~lost), partial=True), np.flatnonzero(~lost)
                    if not len(kept):
                        return batch
                    rows = rows.take(kept)
                    columns = {name: take_rows(each, kept) for name, each in columns.items()}
            columns.update(rows.columns)
        if self._prepare is not None:
            columns = self._prepare(columns)
        if self._pipeline is not None:
            transformed = self._pipeline.transform_batch(columns)
            columns = dict(zip(transformed.schema.names, transformed.columns, strict=True))
        if missing := [name for name in self._wanted if name not in columns]:
            raise UsageError(
                f"The ranker needs {missing}, which neither the features nor the pipeline provide",
                code="column-missing",
                columns=missing,
            )
        columns = {name: columns[name] for name in self._wanted}
        whole = _rows_without_nulls(columns.values())
        if whole is not None:
            columns = {name: take_rows(each, whole) for name, each in columns.items()}
        if whole is None or len(whole):
            columns = {name: as_numpy(each, name) for name, each in columns.items()}
        return replace(batch, columns=columns, rows=whole)

    def needed(self) -> tuple[list[str], list[str]]:
        """Return the user columns and the item columns to read."""
        user, item = (self._store.names(table) for table in self._tables)
        chosen = self._chosen  # other threads may replace it
        if chosen is None or chosen[0] != (user, item):
            chosen = self._chosen = (user, item), self._choose(user, item)
        return chosen[1]

    def _choose(self, user: list[str], item: list[str]) -> tuple[list[str], list[str]]:
        if self._prepare is not None:
            wanted = {*user, *item}
        elif self._pipeline is not None:
            wanted = {*self._pipeline.inputs, *self._wanted}
        else:
            wanted = set(self._wanted)
        chosen = (
            [name for name in user if name in wanted],
            [name for name in item if name in wanted],
        )
        if both := set(chosen[0]) & set(chosen[1]):
            raise UsageError(
                f"{sorted(both)} are columns of {self._tables[0]} and of {self._tables[1]}; "
                "rename them in one",
                code="column-duplicate",
                columns=list(both),
            )
        return chosen

    def check(self) -> None:
        """Raise a UsageError if the features lack columns of the ranker or pipeline."""
        chosen = self.needed()
        columns = {*chosen[0], *chosen[1]}
        wanted: Sequence[str] = self._wanted
        if self._pipeline is not None:
            wanted = self._pipeline.inputs
        missing = [name for name in wanted if name not in columns]
        if missing and self._prepare is None:
            raise UsageError(
                f"The ranker or the pipeline needs {missing}, which neither {self._tables[0]} nor "
                f"{self._tables[1]} has",
                code="column-missing",
                columns=missing,
            )


class DriftStage:
    """Stage that shows some of the ranker's inputs to a monitor; it changes no request."""

    name = "drift"

    def __init__(self, monitor: DriftMonitor, features: FeaturesStage, errors: StageErrors):
        self._monitor, self._features, self._errors = monitor, features, errors
        self._random = np.random.default_rng()

    def run(self, batch: Batch) -> Batch:
        if batch.candidates is None or not self._monitor.is_due():
            return batch
        try:
            counts = batch.candidates.counts
            chosen = (np.cumsum(counts) - counts + self._random.random(len(counts)) * counts)[
                counts > 0
            ].astype(np.int64)
            kept = np.zeros(len(batch.candidates.ids), bool)
            kept[chosen] = True
            observed = batch.keep(kept)
            if batch.pairs is not None:  # the columns were not read
                observed = self._features.read(replace(observed, pairs=None))
            self._monitor.observe(observed.columns)
        except Exception as error:  # monitoring does not fail a request
            self._errors.replaced(self.name, error)
        return batch


class RankingStage:
    """Stage that scores the candidates."""

    name = "ranking"

    def __init__(
        self,
        ranker: Ranker,
        output: str | None,
        errors: StageErrors,
        features: FeaturesStage | None,
    ):
        self._ranker, self._output, self._errors = ranker, output, errors
        self._features = features

    def run(self, batch: Batch) -> Batch:
        features = self._features
        if batch.candidates is None:
            raise UsageError(
                "The stage ranking needs a stage before it that finds candidates", code="state"
            )
        if batch.pairs is not None and features is not None:

            def whole() -> np.ndarray:
                return self._scored(features.read(batch))

            try:
                return replace(batch, scores=batch.pairs.scores(batch.candidates, whole))
            except UsageError as error:  # e.g. nulls in features, which the whole model skips
                self._errors.replaced(self.name, error)
                batch = features.read(batch)
        return replace(batch, scores=self._scored(batch))

    def _scored(self, batch: Batch) -> np.ndarray:
        """Return a score for each candidate, or NaN for candidates without a feature row."""
        count = 0 if batch.candidates is None else len(batch.candidates.ids)
        if batch.rows is None:
            return self._predicted(batch.columns, count)
        scores = np.full(count, np.nan, np.float32)
        if len(batch.rows):
            scores[batch.rows] = self._predicted(batch.columns, len(batch.rows))
        return scores

    def _predicted(self, columns: Columns, rows: int) -> np.ndarray:
        output = self._ranker.predict(columns)
        if isinstance(output, Mapping):
            if self._output is None or self._output not in output:
                raise UsageError(
                    f"The ranker has the outputs {list(output)}; pass one of them as output, "
                    f"got {self._output!r}",
                    code="argument-value",
                    argument="output",
                    allowed=list(output),
                )
            output = output[self._output]
        scores = np.asarray(output, np.float32).reshape(-1)
        if len(scores) != rows:
            raise UsageError(
                f"The ranker returned {len(scores)} scores for {rows} rows", code="model-output"
            )
        return scores


def _rows_without_nulls(columns: Iterable[Column]) -> np.ndarray | None:
    """Return the indices of rows without nulls, or None if no column has nulls."""
    has_null = None
    for column in columns:
        if isinstance(column, pa.Array | pa.ChunkedArray) and column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            has_null = nulls if has_null is None else has_null | nulls
    return None if has_null is None else np.flatnonzero(~has_null)


def _required(name: str, part: T | None) -> T:
    if part is None:
        raise UsageError(
            f"A stage of the recommender needs {name}, which is None; pass it, or remove the stage",
            code="argument-missing",
            argument=name,
        )
    return part


def _inputs_of(ranker: Ranker | None, inputs: Sequence[str] | None) -> list[str]:
    if ranker is not None and not hasattr(ranker, "predict"):
        raise UsageError(
            f"A ranker needs a method predict, but got {type(ranker).__name__}; wrap a PyTorch "
            "module in ModuleRanker",
            code="model-type",
        )
    if inputs is not None:
        return list(inputs)
    columns: Sequence[str] | None = getattr(ranker, "columns", None)
    if columns is not None:
        return list(columns)
    signature: Signature | None = getattr(ranker, "signature", None)
    if signature is not None:
        return [each.name for each in signature.inputs]
    raise UsageError(
        f"{type(ranker).__name__} does not declare its columns; pass them as inputs",
        code="argument-missing",
        argument="inputs",
    )
