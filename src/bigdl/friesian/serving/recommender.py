"""The recommender: for users the best items, by a list of stages.

By default these are recall, features and ranking, each in this process or behind a service; see
:mod:`.stages` for another one, and :mod:`.rankers` for what they call.
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
from bigdl.common.errors import UsageError
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.pairs import PairScores
from bigdl.friesian.serving.rankers import CandidateGenerator, Ranker, ServedRanker
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
    taken,
)
from bigdl.nano.openvino.split import SplitError
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.model import ServedModel
from bigdl.nano.serving.signature import Signature
from bigdl.nano.serving.statuses import CallerGoneError as CallerGoneError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PAIRS_AT_ONCE = 100_000  # of users and candidates that are computed together
_LONGEST = 1e6  # seconds that a deadline may be away; locks take no time without end


class Recommender:
    """Answers which items are best for users; any number of threads may call it.

    Parameters
    ----------
    features : FeatureStore or FeatureReader
    recall : CandidateGenerator
    ranker : Ranker
        Each may be None if no stage uses it.
    inputs : sequence of str, optional
        The columns that the ranker takes; default: those that it names itself.
    pipeline : FeaturePipeline, optional
        Makes them of the features, as it did for the training.
    user_table, item_table : str
    candidates : int, default 500
        How many items are ranked for a user.
    output : str, optional
        The score to sort by, of a ranker that gives several.
    popular : sequence of int, optional
        Items for unknown users and for requests that fail or are late, the best first.
    deadline : float, optional
        Seconds within which a request is answered, if need be by what was found so far.  Stages run
        in threads of their own then.
    prepare : callable, optional
        Gets the features of all candidates as a dict of columns, those of the users repeated, and
        returns such a dict: to join other columns, before the pipeline.
    rerank : callable, optional
        Gets user, items and scores, the best first, and returns items and scores: to leave some out
        or to order them anew.
    threads : int, default 8
        For requests with a deadline.
    metrics : ServingMetrics, optional
    stages : sequence of Stage or str, optional
        What runs one after the other: objects, or names such as ``"recall"``, ``"features"``,
        ``"ranking"`` and those that :func:`load_stage` takes.  Default: these three.
    split : bool, default True
        Compute what the ranker makes of a user once for all candidates, and keep it and what it
        makes of an item.  A :class:`ServedModel` or :class:`ServedRanker` in OpenVINO is split if
        it can be and its scores stay equal up to rounding; not with `prepare`, and not if a step of
        the pipeline reads columns of both tables.
    item_memory : int, default 1 GiB
        Bytes that what is kept of the items may take, for each model and file of the store; items
        that need more are computed with each request.
    user_memory : int, default 64 MiB
        The same for users; those who were kept first make room for others.

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
    ):
        self.features, self.recall, self.ranker = features, recall, ranker
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
        made: list[Stage] = []
        for each in DEFAULT_STAGES if stages is None else stages:
            if each == "recall":
                made.append(RecallStage(_given("recall", recall)))
            elif each == "features":
                columns = _inputs_of(ranker, inputs)
                store, pairs = _given("features", features), None
                if (
                    split
                    and isinstance(ranker, ServedModel | ServedRanker)
                    and prepare is None
                    and not hasattr(store, "read_found")
                ):
                    how = columns, pipeline, output, *memory
                    pairs = partial(PairScores, ranker, store, tables, how)
                self._features = FeaturesStage(
                    store, columns, tables, errors, pipeline=pipeline, prepare=prepare, pairs=pairs
                )
                made.append(self._features)
            elif each == "ranking":
                made.append(RankingStage(_given("ranker", ranker), output, errors, self._features))
            else:
                made.append(load_stage(each) if isinstance(each, str) else checked_stage(each))
        self._runner = StageRunner(
            made,
            errors,
            self.metrics,
            check_integer("threads", threads, 1),
            ids_of(popular, "popular"),
            rerank,
        )

    @property
    def stages(self) -> list[str]:
        """The names of the stages in their order."""
        return [each.name for each in self._runner.stages]

    def recommend(
        self,
        user_ids: Sequence[int] | np.ndarray | int,
        k: int = 10,
        candidates: int | None = None,
        deadline: float | None = None,
        is_gone: Callable[[], bool] | None = None,
    ) -> list[Recommendation]:
        """Return the best items for each user, in the order of the users.

        Many users are computed some at a time, so that memory does not grow with their number.

        Parameters
        ----------
        user_ids : sequence of int, or int
        k : int, default 10
        candidates : int, optional
            How many items are ranked; at least `k`.
        deadline : float, optional
            Seconds; default: that of the recommender.
        is_gone : callable, optional
            Asked before each stage, in any thread; True ends the work.

        Returns
        -------
        list of Recommendation
            A user may have fewer than `k` items, if the recall or `rerank` has no more.

        Raises
        ------
        UsageError
            If an argument is wrong.  What fails in a stage is logged, and the answer says so.
        CallerGoneError
            If `is_gone` returned True, or the recommender was closed meanwhile.
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

        def stopped() -> bool:
            return self._has_ended or (is_gone is not None and is_gone())

        answers: list[Recommendation] = []
        step = max(PAIRS_AT_ONCE // candidates, 1)
        with self.metrics.time("request"):
            for start in range(0, len(users), step):
                batch = Batch(users[start : start + step], k, candidates, self.features)
                answers += self._runner.answers(batch, end, stopped)
        for source in (RANKED, RECALLED, POPULAR):
            if count := sum(each.source == source for each in answers):
                self.metrics.answered(source, count)
        return answers

    def check(self) -> None:
        """Raise a UsageError if the features lack columns that ranker or pipeline take."""
        if self._features is not None:
            self._features.check()

    def warm_up(self) -> None:
        """Split the model, and compute what it makes of the items, before the first request.

        Otherwise the requests until that is done are computed by the whole model.
        """
        if self._features is not None and (pairs := self._features.pairs()) is not None:
            pairs.warm_up()

    def close(self) -> None:
        """End the threads, after the stages that run; requests under way are given up."""
        self._has_ended = True
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RecallStage:
    """Finds candidates of users."""

    name = "recall"

    def __init__(self, recall: CandidateGenerator):
        self._recall = recall

    def run(self, batch: Batch) -> Batch:
        candidates = self._recall.candidates(batch.users, batch.max_candidates)
        return replace(batch, candidates=candidates, partial=batch.partial or candidates.partial)


class FeaturesStage:
    """Reads the columns that the ranker takes, or prepares a model that is split for them."""

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
        # columns that there are, and those that are read
        self._chosen: tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]] | None = None

    def run(self, batch: Batch) -> Batch:
        pairs = self.pairs()
        if pairs is not None and batch.candidates is not None:
            try:
                prepared = pairs.prepare(batch.users, batch.candidates, batch.resources)
            except UsageError as error:  # e.g. features with nulls: the whole model skips these
                self._errors.replaced(self.name, error)
            else:
                if prepared is not None:
                    return replace(batch, pairs=prepared)
        return self.read(batch)

    def pairs(self) -> PairScores | None:
        """Return what computes scores by parts of the model, for the columns that there are."""
        if self._make_pairs is None:
            return None
        needed = self.needed()
        if self._pairs is None or self._pairs[0] != needed:
            try:
                pairs = self._make_pairs(needed)
            except SplitError as error:
                logger.info("The model is used as a whole: %s", error)
                pairs = None
            self._pairs = needed, pairs
        return self._pairs[1]

    def read(self, batch: Batch) -> Batch:
        """Return the batch with the columns of the ranker.

        Candidates whose rows are of a lost shard are left out.  Those whose features hold nulls
        stay, without a row.
        """
        candidates = batch.candidates
        if candidates is None:
            raise UsageError("No stage before features has found candidates", code="state")
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
                    columns = {name: taken(each, kept) for name, each in columns.items()}
            columns.update(rows.columns)
        if self._prepare is not None:
            columns = self._prepare(columns)
        if self._pipeline is not None:
            made = self._pipeline.transform_batch(columns)
            columns = dict(zip(made.schema.names, made.columns, strict=True))
        if missing := [name for name in self._wanted if name not in columns]:
            raise UsageError(
                f"The ranker takes {missing}, which neither the features nor the pipeline have",
                code="column-missing",
                columns=missing,
            )
        columns = {name: columns[name] for name in self._wanted}
        whole = _rows_without_nulls(columns.values())
        if whole is not None:
            columns = {name: taken(each, whole) for name, each in columns.items()}
        if whole is None or len(whole):
            columns = {name: as_numpy(each, name) for name, each in columns.items()}
        return replace(batch, columns=columns, rows=whole)

    def needed(self) -> tuple[list[str], list[str]]:
        """Return the columns that are read of users, and of items."""
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
        """Raise a UsageError if the features lack columns that ranker or pipeline take."""
        chosen = self.needed()
        columns = {*chosen[0], *chosen[1]}
        wanted: Sequence[str] = self._wanted
        if self._pipeline is not None:
            wanted = self._pipeline.inputs
        missing = [name for name in wanted if name not in columns]
        if missing and self._prepare is None:
            raise UsageError(
                f"The ranker or the pipeline takes {missing}, which neither {self._tables[0]} nor "
                f"{self._tables[1]} has",
                code="column-missing",
                columns=missing,
            )


class RankingStage:
    """Scores the candidates."""

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
            raise UsageError("No stage before ranking has found candidates", code="state")
        if batch.pairs is not None and features is not None:

            def whole() -> np.ndarray:
                return self._scored(features.read(batch))

            try:
                return replace(batch, scores=batch.pairs.scores(batch.candidates, whole))
            except UsageError as error:  # e.g. features with nulls: the whole model skips these
                self._errors.replaced(self.name, error)
                batch = features.read(batch)
        return replace(batch, scores=self._scored(batch))

    def _scored(self, batch: Batch) -> np.ndarray:
        """Return a score for each candidate, nan for those that have no row."""
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
                    f"The ranker gives {list(output)}; name one of them by output, "
                    f"got {self._output!r}",
                    code="argument-value",
                    argument="output",
                    allowed=list(output),
                )
            output = output[self._output]
        scores = np.asarray(output, np.float32).reshape(-1)
        if len(scores) != rows:
            raise UsageError(
                f"The ranker gave {len(scores)} scores for {rows} rows", code="model-output"
            )
        return scores


def _rows_without_nulls(columns: Iterable[Column]) -> np.ndarray | None:
    """Return the indices of the rows without a null in any column; None if no row has one."""
    has_null = None
    for column in columns:
        if isinstance(column, pa.Array | pa.ChunkedArray) and column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            has_null = nulls if has_null is None else has_null | nulls
    return None if has_null is None else np.flatnonzero(~has_null)


def _given(name: str, part: T | None) -> T:
    if part is None:
        raise UsageError(
            f"A stage of the recommender needs {name}, which is None; give it, or leave the stage "
            "out",
            code="argument-missing",
            argument=name,
        )
    return part


def _inputs_of(ranker: Ranker | None, inputs: Sequence[str] | None) -> list[str]:
    if ranker is not None and not hasattr(ranker, "predict"):
        raise UsageError(
            f"A ranker has a method predict, but got {type(ranker).__name__}; wrap a module of "
            "PyTorch by ModuleRanker",
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
        f"{type(ranker).__name__} does not say its columns; name them by inputs",
        code="argument-missing",
        argument="inputs",
    )
