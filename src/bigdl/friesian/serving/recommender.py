"""The recommender: for users the best items, by candidates, features and scores.

The stages are objects with one method each, so each can be in this process or behind a service:

============  ==========================================  ========================================
stage         method                                      here, or remote
============  ==========================================  ========================================
features      ``read(table, ids, columns)``               :class:`FeatureStore`, `RemoteFeatures`
recall        ``candidates(user_ids, k)``                 :class:`IndexRecall`, `RemoteRecall`
ranking       ``predict(inputs)``                         any model with it, `RemoteRanker`
============  ==========================================  ========================================
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa

from bigdl.common.checks import check_integer, check_number
from bigdl.common.errors import BigDLError, UsageError, one_line
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.serving.index import Candidates, ItemIndex, best_first
from bigdl.friesian.serving.metrics import ServingMetrics
from bigdl.friesian.serving.pairs import PairScores
from bigdl.friesian.serving.rows import Features, as_numpy, ids_of
from bigdl.nano.openvino.split import SplitError
from bigdl.nano.serving.model import ServedModel
from bigdl.nano.serving.repository import ModelRepository

logger = logging.getLogger(__name__)

PAIRS_AT_ONCE = 100_000  # of users and candidates that are computed together
_LONGEST = 1e6  # seconds that a deadline may be away; locks take no time without end
_SILENCE = 10.0  # seconds between two messages about one stage that fails

Columns = dict[str, Any]
"""Arrays of one length by the names of columns."""

RANKED, RECALLED, POPULAR = "ranked", "recalled", "popular"


class FeatureReader(Protocol):
    """A source of features by id: a :class:`FeatureStore`, or a client of one."""

    def names(self, table: str) -> list[str]:
        """Return the columns of a table."""

    def read(self, table: str, ids: Any, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of ids, in their order."""


class Recall(Protocol):
    """A search for candidates of users."""

    def candidates(self, user_ids: np.ndarray, k: int) -> Candidates:
        """Return up to `k` items for each user, the best first; none for an unknown user."""


class Ranker(Protocol):
    """A model that scores rows; threads call it at the same time."""

    def predict(self, inputs: dict[str, np.ndarray]) -> Any:
        """Return a score for each row; a dict of them for several tasks."""


class IndexRecall:
    """Candidates by an index, with the vectors of users from a store.

    Parameters
    ----------
    store : FeatureReader
    index : ItemIndex
    vector_col : str, default "prediction"
        The users' vectors.
    seen_col : str, optional
        A column of lists with the items that are no candidates for a user.
    table : str, default "user"

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex
    >>> store = EmbeddedStore("features")
    >>> users = pd.DataFrame({"user": [1], "prediction": [[1.0, 0.5]], "seen": [[10]]})
    >>> _ = store.replace({"user": users})
    >>> recall = IndexRecall(store, ItemIndex([10, 20], np.eye(2)), seen_col="seen")
    >>> candidates = recall.candidates(np.array([1, 2]), 5)
    >>> candidates.ids.tolist(), candidates.counts.tolist()  # the user 2 is unknown
    ([20], [1, 0])
    """

    def __init__(
        self,
        store: FeatureReader,
        index: ItemIndex,
        vector_col: str = "prediction",
        seen_col: str | None = None,
        table: str = "user",
    ):
        self.store, self.index = store, index
        self._vector_col, self._seen_col, self._table = vector_col, seen_col, table
        self._columns = [vector_col] if seen_col is None else [vector_col, seen_col]

    def candidates(self, user_ids: np.ndarray, k: int) -> Candidates:
        """See :class:`Recall`."""
        users = self.store.read(self._table, user_ids, self._columns)
        known = np.flatnonzero(users.found)
        vectors = users[self._vector_col]
        if isinstance(vectors, pa.Array):
            raise UsageError(
                f"The column {self._vector_col} of the table {self._table} should have vectors of "
                f"one length without nulls, but is {vectors.type}",
                code="data-shape",
                column=self._vector_col,
            )
        seen = None
        if self._seen_col is not None:
            lists = users[self._seen_col]
            rows = lists.take(pa.array(known)) if isinstance(lists, pa.Array) else lists[known]
            seen = [_items_of(each) for each in rows]
        candidates = self.index.search(vectors[known], k, exclude=seen)
        if len(known) == len(users):
            return candidates
        counts = np.zeros(len(users), np.int64)
        counts[known] = candidates.counts
        return Candidates(candidates.ids, candidates.scores, counts, candidates.partial)


def _items_of(value: Any) -> np.ndarray:
    values = value.values if isinstance(value, pa.Scalar) else value
    return np.zeros(0, np.int64) if values is None else ids_of(values, "the seen items")


class ModuleRanker:
    """A model of PyTorch, or what Nano made of one, as a ranker.

    Parameters
    ----------
    module : torch.nn.Module
        Takes columns as tensors.
    columns : sequence of str, optional
        In the order that it takes them; default: its ``feature_cols``.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.models import NCF
    >>> from bigdl.friesian.serving import ModuleRanker
    >>> ranker = ModuleRanker(NCF(10, 20))
    >>> ranker.predict({"user": np.array([1, 1]), "item": np.array([3, 4])}).shape
    (2,)
    """

    def __init__(self, module: Any, columns: Sequence[str] | None = None):
        if columns is None:
            columns = getattr(module, "feature_cols", None)
        if columns is None:
            raise UsageError(
                f"{type(module).__name__} does not say its columns; name them in their order",
                code="argument-missing",
                argument="columns",
            )
        if hasattr(module, "eval"):
            module.eval()
        self._served = module, list(columns)

    @property
    def columns(self) -> list[str]:
        """The columns that the model takes, in its order."""
        return self._served[1]

    def swap(self, other: ModuleRanker) -> None:
        """Use the model of another ranker from now on; calls that run end with the old one."""
        self._served = other._served

    def predict(self, inputs: dict[str, np.ndarray]) -> Any:
        """See :class:`Ranker`."""
        import torch

        module, columns = self._served
        with torch.inference_mode():
            tensors = [torch.from_numpy(_own(inputs[name])) for name in columns]
            output = module(*tensors)
        if isinstance(output, Mapping):
            return {name: np.asarray(each) for name, each in output.items()}
        return np.asarray(output)


class LostShardError(BigDLError, RuntimeError):
    """No replica of a shard answers.

    Examples
    --------
    >>> from bigdl.friesian.serving import LostShardError
    >>> issubclass(LostShardError, RuntimeError)
    True
    """

    code = "worker-lost"


class ServedRanker:
    """A model of a repository as a ranker: batched across requests, replaced while it is used.

    Requests are shared among the versions of the model as the repository says, and its shadow gets
    each of them, too.

    Parameters
    ----------
    repository : ModelRepository
    name : str

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.friesian.models import NCF
    >>> from bigdl.friesian.serving import ServedRanker
    >>> from bigdl.nano.serving import ModelRepository, ServedModel
    >>> repository = ModelRepository()
    >>> sample = torch.tensor([1, 2]), torch.tensor([3, 4])
    >>> _ = repository.add("ncf", ServedModel(NCF(10, 20), sample=sample))
    >>> ranker = ServedRanker(repository, "ncf")
    >>> ranker.columns, ranker.predict({"user": np.array([1, 1]), "item": np.array([3, 4])}).shape
    (['user', 'item'], (2,))
    >>> repository.close()
    """

    def __init__(self, repository: ModelRepository, name: str):
        repository.find(name)
        self._repository, self._name = repository, name

    @property
    def columns(self) -> list[str]:
        """The columns that the model takes, in its order."""
        return [each.name for each in self._repository.find(self._name).model.signature.inputs]

    @contextmanager
    def leased(self) -> Iterator[ServedModel | None]:
        """Keep a version of the model for the time of a request; None if it has a shadow.

        A shadow computes what the model itself is asked for.
        """
        with self._repository.lease(self._name) as deployed:
            has_shadow = self._repository.traffic(self._name).shadow is not None
            yield None if has_shadow else deployed.model

    def predict(
        self,
        inputs: Mapping[str, np.ndarray],
        version: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return a score for each row; see :class:`Ranker`.

        Parameters
        ----------
        inputs : dict of str to ndarray
            Others than those of the model are passed over.
        version : str, optional
            Of the model; by default the repository chooses.
        timeout : float, optional
            Seconds after which it is given up, with a ``DeadlineError``.
        """
        with self._repository.lease(self._name, version) as deployed:
            model = deployed.model
            signature = model.signature
            if missing := [each.name for each in signature.inputs if each.name not in inputs]:
                raise UsageError(
                    f"The ranker takes {missing}, which are not there",
                    code="column-missing",
                    columns=missing,
                )
            arrays = signature.arrays({each.name: inputs[each.name] for each in signature.inputs})
            self._repository.mirror(deployed, arrays, lambda well: None)
            results = model.call(arrays, timeout)
            return results[0] if len(results) == 1 else model.named(results)


def _own(array: Any) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()


@dataclass(frozen=True)
class Recommendation:
    """The answer for one user.

    Attributes
    ----------
    user_id : int
    item_ids : ndarray of int64
        The best first.
    scores : ndarray of float32
        Of the ranker; of the recall, or 0, where the ranker did not answer.
    source : {"ranked", "recalled", "popular"}
        Where the items come from: the ranker; the recall, since ranking failed or was late; or the
        popular items, since the user is unknown or no stage was in time.
    reason : str
        Why the items are not the ranker's, or how many candidates it could not score, e.g. since
        features hold nulls or its score is not a finite number.
    partial : bool
        True if a shard was lost, so that its items are missing.

    Examples
    --------
    >>> from bigdl.friesian.serving import Recommendation
    >>> import numpy as np
    >>> answer = Recommendation(1, np.array([7]), np.zeros(1), "popular", "no candidates")
    >>> answer.source, answer.item_ids.tolist()
    ('popular', [7])
    """

    user_id: int
    item_ids: np.ndarray
    scores: np.ndarray
    source: str = RANKED
    reason: str = ""
    partial: bool = False


@dataclass
class _Request:
    """One call, and how far it came."""

    users: np.ndarray
    k: int
    candidates: int
    deadline: float | None
    recalled: Candidates | None = None
    stage: str = "a free thread"
    partial: bool = False
    is_gone: Callable[[], bool] = lambda: False
    retries: list[int] = field(default_factory=lambda: [0])
    """How many failures may still be narrowed down to their users; shared with parts of it."""


class CallerGoneError(Exception):
    """The caller of a recommendation does not wait for it any more.

    Examples
    --------
    >>> from bigdl.friesian.serving.recommender import CallerGoneError
    >>> str(CallerGoneError())
    'The caller has gone'
    """

    def __init__(self) -> None:
        super().__init__("The caller has gone")


class _Late(Exception):
    """The time of a request was over before a stage began."""


class Recommender:
    """Answers which items are best for users; any number of threads may call it.

    Parameters
    ----------
    features : FeatureStore or FeatureReader
    recall : Recall
    ranker : Ranker
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
        features: FeatureReader,
        recall: Recall,
        ranker: Ranker,
        inputs: Sequence[str] | None = None,
        *,
        pipeline: FeaturePipeline | None = None,
        user_table: str = "user",
        item_table: str = "item",
        candidates: int = 500,
        output: str | None = None,
        popular: Any = (),
        deadline: float | None = None,
        prepare: Callable[[Columns], Columns] | None = None,
        rerank: Callable[[int, np.ndarray, np.ndarray], Any] | None = None,
        threads: int = 8,
        metrics: ServingMetrics | None = None,
        split: bool = True,
        item_memory: int = 1 << 30,
        user_memory: int = 64 << 20,
    ):
        self.features, self.recall, self.ranker = features, recall, ranker
        self._inputs = _inputs_of(ranker, inputs)
        self._pipeline = pipeline
        self._user_table, self._item_table = user_table, item_table
        self.default_candidates = check_integer("candidates", candidates, 1)
        self._output = output
        self._popular = ids_of(popular, "popular")
        self._deadline = None
        if deadline is not None:
            self._deadline = check_number("deadline", deadline, above=0)
        self._prepare, self._rerank = prepare, rerank
        self._threads = check_integer("threads", threads, 1)
        self.metrics = metrics or ServingMetrics()
        self._pool: ThreadPoolExecutor | None = None
        self._has_ended = False
        self._starting = threading.Lock()
        self._told: dict[str, float] = {}  # when, by stage
        self._memory = (
            check_integer("item_memory", item_memory, 0),
            check_integer("user_memory", user_memory, 0),
        )
        is_model = isinstance(ranker, ServedModel | ServedRanker)
        in_shards = hasattr(features, "read_found")
        self._may_split = split and is_model and prepare is None and not in_shards
        self._split: tuple[tuple[list[str], list[str]], PairScores | None] | None = None
        # columns that there are, and those that are read
        self._chosen: tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]] | None = None

    # -- answers --------------------------------------------------------------------------------

    def recommend(
        self,
        user_ids: Any,
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
                request = _Request(users[start : start + step], k, candidates, end, is_gone=stopped)
                request.retries[0] = 2 * len(request.users).bit_length()
                part = self._answers(request) if end is None else self._in_time(request, end)
                if request.partial:
                    part = [replace(each, partial=True) for each in part]
                    self.metrics.partial(len(part))
                answers += part
        for source in (RANKED, RECALLED, POPULAR):
            if count := sum(each.source == source for each in answers):
                self.metrics.answered(source, count)
        return answers

    def _in_time(self, request: _Request, end: float) -> list[Recommendation]:
        work = self._workers().submit(self._answers, request)
        try:
            return work.result(max(end - time.monotonic(), 0))
        except FutureTimeout:
            work.cancel()
            return self._fallback(request, f"{request.stage} was late")

    def _workers(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "recommend")
            return self._pool

    def _answers(self, request: _Request) -> list[Recommendation]:
        try:
            return self._ranked(request)
        except _Late:
            return self._fallback(request, f"{request.stage} was late")
        except CallerGoneError:
            raise
        except LostShardError as error:
            request.partial = True
            logger.warning("%s: %s", request.stage, error)
            return self._fallback(request, f"{request.stage} failed")
        except Exception as error:
            self._tell(request.stage, error)
            if len(request.users) > 1 and request.retries[0] > 0:
                return self._answers_of_halves(request)
            return self._fallback(request, f"{request.stage} failed")

    def _answers_of_halves(self, request: _Request) -> list[Recommendation]:
        """Answer each half of the users separately, so that a fault of one costs that one alone."""
        request.retries[0] -= 1
        middle = len(request.users) // 2
        answers = []
        for users in (request.users[:middle], request.users[middle:]):
            half = replace(request, users=users, recalled=None, partial=False)
            answers += self._answers(half)
            request.partial |= half.partial
        return answers

    def _tell(self, stage: str, error: Exception) -> None:
        """Log why a stage failed, and no more than once in some seconds each."""
        now = time.monotonic()
        if now - self._told.get(stage, -_SILENCE) >= _SILENCE:
            self._told[stage] = now
            logger.error("%s failed: %s", stage, one_line(error), exc_info=error)

    def _ranked(self, request: _Request) -> list[Recommendation]:
        with self._begun(request, "recall"):
            candidates = self.recall.candidates(request.users, request.candidates)
        request.recalled, request.partial = candidates, candidates.partial
        if not len(candidates.ids):
            return self._fallback(request, "")
        scores = self._scores_of_pairs(request, candidates)
        if scores is None:
            with self._begun(request, "features"):
                columns, lost, kept = self._columns(request.users, candidates)
                if lost is not None:
                    candidates, request.partial = _without(candidates, lost), True
                    request.recalled = candidates
                    if not len(candidates.ids):
                        return self._fallback(request, "the features are lost")
            with self._begun(request, "ranking"):
                scores = self._scores(columns, len(candidates.ids), kept)
        request.stage = "sorting"
        return self._sorted(request, candidates, scores)

    def _scores_of_pairs(self, request: _Request, candidates: Candidates) -> np.ndarray | None:
        """Return the scores by the parts of the model; None if the whole one has to be used."""
        request.stage = "features"
        pairs = self._pairs()
        if pairs is None:
            return None

        def whole() -> np.ndarray:
            columns, _, kept = self._columns(request.users, candidates)
            return self._scores(columns, len(candidates.ids), kept)

        stage = partial(self._begun, request)
        try:
            return pairs.scores(request.users, candidates, whole, stage)
        except UsageError as error:  # e.g. features with nulls: the whole model leaves these out
            self._tell(request.stage, error)
            return None

    def _pairs(self) -> PairScores | None:
        """Return what computes scores by parts of the model, for the columns that there are."""
        if not self._may_split:
            return None
        needed = self._needed()
        if self._split is None or self._split[0] != needed:
            tables = self._user_table, self._item_table
            how = needed, self._inputs, self._pipeline, self._output, *self._memory
            try:
                pairs = PairScores(self.ranker, self.features, tables, *how)
            except SplitError as error:
                logger.info("The model is used as a whole: %s", error)
                pairs = None
            self._split = needed, pairs
        return self._split[1]

    def warm_up(self) -> None:
        """Split the model, and compute what it makes of the items, before the first request.

        Otherwise the requests until that is done are computed by the whole model.
        """
        if (pairs := self._pairs()) is not None:
            pairs.warm_up()

    def _begun(self, request: _Request, name: str) -> AbstractContextManager[None]:
        """Begin a stage of a request, unless the request is late."""
        request.stage = name
        if request.is_gone():
            raise CallerGoneError
        if request.deadline is not None and time.monotonic() >= request.deadline:
            raise _Late
        return self.metrics.time(name)

    def _sorted(
        self, request: _Request, candidates: Candidates, scores: np.ndarray
    ) -> list[Recommendation]:
        answers, start = [], 0
        for user, count in zip(request.users.tolist(), candidates.counts.tolist(), strict=True):
            rows = slice(start, start + count)
            start += count
            if not count:
                answers.append(self._most_popular(user, request.k, "the user has no candidates"))
                continue
            answer, why = None, "no candidate has a finite score"
            try:
                answer = self._best(user, candidates.ids[rows], scores[rows], request.k)
            except Exception as error:
                self._tell("rerank", error)
                why = "rerank failed"
            if answer is None:
                recalled = candidates.ids[rows][: request.k], candidates.scores[rows][: request.k]
                answer = Recommendation(user, *recalled, RECALLED, why)
            answers.append(answer)
        return answers

    def _best(
        self, user: int, ids: np.ndarray, scores: np.ndarray, k: int
    ) -> Recommendation | None:
        """Return the best items of one user; None if the ranker gave no finite score."""
        is_number, reason = np.isfinite(scores), ""
        if not is_number.all():
            reason = f"{np.count_nonzero(~is_number)} of {len(ids)} candidates have no finite score"
            ids, scores = ids[is_number], scores[is_number]
            if not len(ids):
                return None
        order = best_first(ids, scores, k if self._rerank is None else len(ids))
        ids, scores = ids[order], scores[order]
        if self._rerank is not None:
            ids, scores = self._rerank(user, ids, scores)
            ids, scores = ids_of(ids, "rerank")[:k], np.asarray(scores, np.float32)[:k]
            if len(ids) != len(scores):
                raise UsageError(
                    f"rerank returned {len(ids)} items and {len(scores)} scores", code="data-shape"
                )
        return Recommendation(user, ids, scores, reason=reason)

    def _fallback(self, request: _Request, reason: str) -> list[Recommendation]:
        candidates = request.recalled
        parts = candidates.split() if candidates is not None else [None] * len(request.users)
        answers = []
        for user, part in zip(request.users.tolist(), parts, strict=True):
            if part is None or not len(part[0]):
                why = reason if candidates is None else "the user has no candidates"
                answers.append(self._most_popular(user, request.k, why))
            else:
                ids, scores = (each[: request.k] for each in part)
                answers.append(Recommendation(user, ids, scores, RECALLED, reason))
        return answers

    def _most_popular(self, user: int, k: int, reason: str) -> Recommendation:
        ids = self._popular[:k]
        return Recommendation(user, ids, np.zeros(len(ids), np.float32), POPULAR, reason)

    def check(self) -> None:
        """Raise a UsageError if the features lack columns that ranker or pipeline take."""
        chosen = self._needed()
        columns = {*chosen[0], *chosen[1]}
        wanted: Sequence[str] = self._inputs
        if self._pipeline is not None:
            wanted = self._pipeline.inputs
        missing = [name for name in wanted if name not in columns]
        if missing and self._prepare is None:
            raise UsageError(
                f"The ranker or the pipeline takes {missing}, which neither {self._user_table} nor "
                f"{self._item_table} has",
                code="column-missing",
                columns=missing,
            )

    # -- inputs of the ranker -------------------------------------------------------------------

    def _columns(
        self, users: np.ndarray, candidates: Candidates
    ) -> tuple[Columns, np.ndarray | None, np.ndarray | None]:
        """Return the columns that the ranker takes, with a row for each candidate.

        Candidates whose rows are of a lost shard have no row; the second value is True for them, or
        None where there are none. Of the others, those whose features hold nulls have no row
        either; the third value has the indices of those that have one, or is None if all have.
        """
        read_found = getattr(self.features, "read_found", None)
        lost = None
        of_user, of_item = self._needed()
        repeated = np.repeat(np.arange(len(users)), candidates.counts)
        columns: Columns = {}
        if of_user:
            read = self.features.read(self._user_table, users, of_user)
            columns.update(read.take(repeated).columns)
        if of_item:
            if read_found is None:
                rows = self.features.read(self._item_table, candidates.ids, of_item)
            else:
                rows, is_lost = read_found(self._item_table, candidates.ids, of_item)
                if is_lost.any():
                    lost, kept = is_lost, np.flatnonzero(~is_lost)
                    rows = rows.take(kept)
                    columns = {name: _taken(each, kept) for name, each in columns.items()}
            columns.update(rows.columns)
        if lost is not None and lost.all():
            return {}, lost, None
        if self._prepare is not None:
            columns = self._prepare(columns)
        if self._pipeline is not None:
            batch = self._pipeline.transform_batch(columns)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if missing := [name for name in self._inputs if name not in columns]:
            raise UsageError(
                f"The ranker takes {missing}, which neither the features nor the pipeline have",
                code="column-missing",
                columns=missing,
            )
        columns = {name: columns[name] for name in self._inputs}
        whole = _rows_without_nulls(columns.values())
        if whole is not None:
            columns = {name: _taken(each, whole) for name, each in columns.items()}
        if whole is None or len(whole):
            columns = {name: as_numpy(each, name) for name, each in columns.items()}
        return columns, lost, whole

    def _needed(self) -> tuple[list[str], list[str]]:
        """Return the columns that are read of users, and of items."""
        tables = self._user_table, self._item_table
        user, item = (self.features.names(table) for table in tables)
        chosen = self._chosen  # other threads may replace it
        if chosen is None or chosen[0] != (user, item):
            chosen = self._chosen = (user, item), self._choose(user, item)
        return chosen[1]

    def _choose(self, user: list[str], item: list[str]) -> tuple[list[str], list[str]]:
        if self._prepare is not None:
            wanted = {*user, *item}
        elif self._pipeline is not None:
            wanted = {*self._pipeline.inputs, *self._inputs}
        else:
            wanted = set(self._inputs)
        chosen = (
            [name for name in user if name in wanted],
            [name for name in item if name in wanted],
        )
        if both := set(chosen[0]) & set(chosen[1]):
            raise UsageError(
                f"{sorted(both)} are columns of {self._user_table} and of {self._item_table}; "
                "rename them in one",
                code="column-duplicate",
                columns=list(both),
            )
        return chosen

    def _scores(self, columns: Columns, rows: int, kept: np.ndarray | None = None) -> np.ndarray:
        """Return a score for each candidate, nan for those that have no row in `columns`."""
        if kept is not None:
            scores = np.full(rows, np.nan, np.float32)
            if len(kept):
                scores[kept] = self._scores(columns, len(kept))
            return scores
        output = self.ranker.predict(columns)
        if isinstance(output, Mapping):
            if self._output not in output:
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

    # -- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, after the stages that run; requests under way are given up."""
        self._has_ended = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _taken(column: Any, places: np.ndarray) -> Any:
    return column.take(pa.array(places)) if isinstance(column, pa.Array) else column[places]


def _rows_without_nulls(columns: Iterable[Any]) -> np.ndarray | None:
    """Return the indices of the rows without a null in any column; None if no row has one."""
    has_null = None
    for column in columns:
        if isinstance(column, pa.Array | pa.ChunkedArray) and column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            has_null = nulls if has_null is None else has_null | nulls
    return None if has_null is None else np.flatnonzero(~has_null)


def _without(candidates: Candidates, lost: np.ndarray) -> Candidates:
    """Return candidates without some of them."""
    owner = np.repeat(np.arange(len(candidates.counts)), candidates.counts)[~lost]
    counts = np.bincount(owner, minlength=len(candidates.counts)).astype(np.int64)
    return Candidates(candidates.ids[~lost], candidates.scores[~lost], counts, True)


def _inputs_of(ranker: Ranker, inputs: Sequence[str] | None) -> list[str]:
    if not hasattr(ranker, "predict"):
        raise UsageError(
            f"A ranker has a method predict, but got {type(ranker).__name__}; wrap a module of "
            "PyTorch by ModuleRanker",
            code="model-type",
        )
    if inputs is not None:
        return list(inputs)
    if hasattr(ranker, "columns"):
        return list(ranker.columns)
    signature = getattr(ranker, "signature", None)
    if signature is not None:
        return [each.name for each in signature.inputs]
    raise UsageError(
        f"{type(ranker).__name__} does not say its columns; name them by inputs",
        code="argument-missing",
        argument="inputs",
    )


def function_of(name: str) -> Callable[..., Any]:
    """Return the function that ``module:name`` means, such as one of a configuration file."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(
            f"A function is named as module:function, got {name!r}", code="argument-value"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"The function {name} cannot be imported: {error}", code="name-unknown"
        ) from error
