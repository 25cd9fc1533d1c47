"""Stages of a recommender: their interface, and the class that runs them.

A stage is an object with a ``name`` and ``run(batch) -> batch``. The built-in stages are ``recall``
(finds candidates), ``features`` (reads the ranker's columns) and ``ranking`` (scores candidates).
Custom stages may stand anywhere in the list. The runner times each stage and starts none after the
deadline. If a stage fails or is too slow, it answers with the results so far.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError, one_line
from bigdl.common.plugins import plugin
from bigdl.friesian.serving.errors import LogRateLimit, LostShardError
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.index import Candidates, best_first
from bigdl.friesian.serving.rows import Column, Features, Ids, ids_of
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.statuses import CallerGoneError

__all__ = ["Batch", "Recommendation", "Stage", "StageRunner", "load_stage"]

logger = logging.getLogger(__name__)

DEFAULT_STAGES = ("recall", "features", "ranking")
ENTRY_POINTS = "bigdl.stages"
RANKED, RECALLED, POPULAR = "ranked", "recalled", "popular"

Columns = dict[str, Column]
"""Arrays of one length, by column name."""
Rerank = Callable[[int, np.ndarray, np.ndarray], tuple[Sequence[int], Sequence[float]]]
"""Function of user, items and scores, best first, that returns items and scores."""


class FeatureReader(Protocol):
    """Protocol of objects that read features by id, such as a :class:`FeatureStore`."""

    def names(self, table: str) -> list[str]:
        """Return the column names of a table."""

    def read(self, table: str, ids: Ids, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of `ids`, in the same order."""


class PreparedScores(Protocol):
    """Protocol of prepared requests to a split model; see :class:`.pairs.PreparedPairs`."""

    def scores(self, candidates: Candidates, whole: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a score for each candidate."""


@dataclass(frozen=True)
class Recommendation:
    """Recommendation for one user.

    Attributes
    ----------
    user_id : int
    item_ids : ndarray of int64
        Best first.
    scores : ndarray of float32
        Scores of the ranker. Without an answer of the ranker, scores of the recall, or 0.
    source : {"ranked", "recalled", "popular"}
        Source of the items: the ranker; the recall, because ranking failed or timed out; or the
        popular items, because the user is unknown or no stage finished in time.
    reason : str
        Why the items are not ranked, or how many candidates the ranker could not score, for example
        because of nulls in the features or a score that is not finite.
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


@dataclass(frozen=True)
class Batch:
    """Users of a request, and the results of the stages so far.

    A stage returns a new batch: ``dataclasses.replace(batch, scores=...)``, or :meth:`keep`.

    Attributes
    ----------
    users : ndarray of int64
    k : int
        Maximum number of items per user.
    max_candidates : int
        Number of candidates to find per user.
    store : FeatureReader or None
        Feature source that stages can read from.
    candidates : Candidates or None
        Candidates of all users, concatenated, best first per user.
    columns : dict of str to array
        Input of the ranker.
    rows : ndarray of int64 or None
        Indices of the candidates that have a row in `columns`; None if all have one.
    scores : ndarray of float32 or None
        One score per candidate; candidates with a score that is not finite are left out.
    partial : bool
        True if a shard was lost, so that its items are missing.
    resources : ExitStack
        Context managers to exit at the end of the request.
    item_filter : ItemFilter or None
        Filter of the request, which the stage ``recall`` applies.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import Batch, Candidates
    >>> candidates = Candidates(np.array([7, 8]), np.ones(2, np.float32), np.array([2]))
    >>> batch = Batch(np.array([1]), 1, 10, candidates=candidates)
    >>> batch.keep(batch.candidates.ids != 7).candidates.ids.tolist()
    [8]
    """

    users: np.ndarray
    k: int
    max_candidates: int
    store: FeatureReader | None = field(default=None, repr=False)
    candidates: Candidates | None = None
    columns: Columns = field(default_factory=dict)
    rows: np.ndarray | None = None
    scores: np.ndarray | None = None
    partial: bool = False
    resources: ExitStack = field(default_factory=ExitStack, repr=False)
    pairs: PreparedScores | None = field(default=None, repr=False)
    item_filter: ItemFilter | None = None
    popular: np.ndarray | None = field(default=None, repr=False)
    """Popular items that the filter accepts; None for all."""

    def __post_init__(self) -> None:
        if self.candidates is not None and len(self.candidates.counts) != len(self.users):
            raise UsageError(
                f"There are candidates for {len(self.candidates.counts)} users, but the batch has "
                f"{len(self.users)}",
                code="data-shape",
            )
        count = 0 if self.candidates is None else len(self.candidates.ids)
        if self.scores is not None and len(self.scores) != count:
            raise UsageError(
                f"There are {len(self.scores)} scores for {count} candidates; remove candidates "
                "with keep",
                code="data-shape",
            )

    def keep(self, kept: np.ndarray) -> Batch:
        """Return the batch with only the candidates for which a mask is True.

        Parameters
        ----------
        kept : ndarray of bool
            One value per candidate.
        """
        if self.candidates is None:
            return self
        kept = np.asarray(kept, bool)
        columns, rows = self.columns, self.rows
        if columns or rows is not None:
            has_row = kept if rows is None else kept[rows]
            columns = {
                name: take_rows(each, np.flatnonzero(has_row)) for name, each in columns.items()
            }
            if rows is not None:
                rows = (np.cumsum(kept) - 1)[rows[has_row]]
        owner = np.repeat(np.arange(len(self.users)), self.candidates.counts)[kept]
        candidates = Candidates(
            self.candidates.ids[kept],
            self.candidates.scores[kept],
            np.bincount(owner, minlength=len(self.users)).astype(np.int64),
            self.candidates.partial,
        )
        scores = None if self.scores is None else self.scores[kept]
        return replace(self, candidates=candidates, columns=columns, rows=rows, scores=scores)


def take_rows(column: Column, indices: np.ndarray) -> Column:
    """Return the rows of a column at `indices`."""
    return column.take(pa.array(indices)) if isinstance(column, pa.Array) else column[indices]


@runtime_checkable
class Stage(Protocol):
    """Protocol of stages; several threads may call a stage at once.

    Attributes
    ----------
    name : str
        Name in metrics, and in the reason of an answer for which the stage failed.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import Batch, Candidates
    >>> class InStock:
    ...     name = "in_stock"
    ...
    ...     def run(self, batch):
    ...         stock = batch.store.read("item", batch.candidates.ids, ["stock"])["stock"]
    ...         return batch.keep(stock > 0)
    """

    name: str

    def run(self, batch: Batch) -> Batch:
        """Run the stage; return a new batch with results added or candidates removed."""


def function_of(name: str) -> Callable[..., object]:
    """Import the function that a configuration names as ``module:name``."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(
            f"A function should be named as module:function, got {name!r}", code="argument-value"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"The function {name} cannot be imported: {error}", code="name-unknown"
        ) from error


def load_stage(name: str, options: Mapping[str, object] | None = None) -> Stage:
    """Import and construct a custom stage.

    Parameters
    ----------
    name : str
        ``module:Class``, ``module.Class``, or the name of an entry point ``bigdl.stages``.
    options : dict, optional
        Keywords of the class.

    Raises
    ------
    UsageError
        If the class does not exist, or does not construct a stage.

    Examples
    --------
    >>> from bigdl.friesian.serving import load_stage
    >>> try:
    ...     load_stage("shop:InStock")
    ... except ValueError as error:
    ...     print(error)
    The function shop:InStock cannot be imported: No module named 'shop'
    """
    if ":" in name or "." in name:
        make: object = function_of(name if ":" in name else ":".join(name.rsplit(".", 1)))
    elif (make := plugin(ENTRY_POINTS, name)) is None:
        raise UsageError(
            f"There is no stage {name!r}; known are {', '.join(DEFAULT_STAGES)}, classes as "
            f"module:Class, and the entry points {ENTRY_POINTS} of installed packages",
            code="name-unknown",
            name=name,
        )
    if not callable(make):
        return checked_stage(make)
    try:
        stage = make(**(options or {}))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"The stage {name} cannot be constructed: {one_line(error)}",
            code="argument-value",
            name=name,
        ) from error
    return checked_stage(stage)


def checked_stage(stage: object) -> Stage:
    """Return `stage`; raise a UsageError unless it is a stage."""
    if not isinstance(stage, Stage) or not isinstance(stage.name, str):
        raise UsageError(
            f"A stage should have a name and a method run(batch), but got {type(stage).__name__}",
            code="argument-type",
            argument="stages",
        )
    return stage


def _is_filter_error(error: Exception) -> bool:
    """Return whether a stage has found that the filter of the request is invalid."""
    return isinstance(error, UsageError) and error.facts.get("argument") == "filter"


class StageErrors:
    """Rate-limited log of stage failures."""

    def __init__(self, metrics: ServingMetrics):
        self._metrics = metrics
        self._log_limit = LogRateLimit()

    def log(self, stage: str, error: Exception) -> None:
        """Log the error of a stage."""
        if self._log_limit.allows(stage):
            logger.error("%s failed: %s", stage, one_line(error), exc_info=error)

    def replaced(self, stage: str, error: Exception) -> None:
        """Log and count an error of a stage that falls back to another method."""
        self._metrics.failed(stage)
        self.log(stage, error)


class _LateError(Exception):
    """Error raised when the deadline of a request passes before a stage begins."""


@dataclass
class _Progress:
    """Progress of a batch through the stages."""

    batch: Batch
    deadline: float | None
    is_gone: Callable[[], bool]
    retries: list[int]
    """Remaining number of retries with half of the users; shared with the halves."""
    stage: str = ""

    @property
    def late_reason(self) -> str:
        """Reason why the batch missed its deadline."""
        if not self.stage:
            return "timed out waiting for a worker thread"
        return f"{self.stage} timed out"


class StageRunner:
    """Runner that applies the stages to batches of users and always answers by the deadline.

    Parameters
    ----------
    stages : sequence of Stage
    errors : StageErrors
    metrics : ServingMetrics
    threads : int
        Worker threads for batches with a deadline.
    popular : ndarray of int64
        Items for users without candidates, best first.
    rerank : callable, optional
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        errors: StageErrors,
        metrics: ServingMetrics,
        threads: int,
        popular: np.ndarray,
        rerank: Rerank | None = None,
    ):
        self.stages, self._errors, self._metrics = list(stages), errors, metrics
        self._threads, self._popular, self._rerank = threads, popular, rerank
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    @property
    def popular(self) -> np.ndarray:
        """Items for users without candidates, best first."""
        return self._popular

    def answers(
        self, batch: Batch, deadline: float | None, is_gone: Callable[[], bool]
    ) -> list[Recommendation]:
        """Return the recommendation for each user of a batch.

        Parameters
        ----------
        batch : Batch
        deadline : float, optional
            Deadline in the seconds of ``time.monotonic``.
        is_gone : callable
            Called before each stage; True stops the work.

        Raises
        ------
        CallerGoneError
            If `is_gone` returned True.
        """
        progress = _Progress(batch, deadline, is_gone, [2 * len(batch.users).bit_length()])
        if deadline is None:
            answers = self._run(progress)
        else:
            with self._starting:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._threads, "recommend")
                pool = self._pool
            work = pool.submit(self._run, progress)
            try:
                answers = work.result(max(deadline - time.monotonic(), 0))
            except FutureTimeout:
                work.cancel()
                answers = self._fallback(progress.batch, progress.late_reason)
        if progress.batch.partial:
            answers = [replace(each, partial=True) for each in answers]
            self._metrics.partial(len(answers))
        return answers

    def _run(self, progress: _Progress) -> list[Recommendation]:
        try:
            with ExitStack() as resources:
                progress.batch = replace(progress.batch, resources=resources)
                return self._run_stages(progress)
        except _LateError:
            return self._fallback(progress.batch, progress.late_reason)
        except CallerGoneError:
            raise
        except LostShardError as error:
            progress.batch = replace(progress.batch, partial=True)
            logger.warning("%s: %s", progress.stage, error)
        except Exception as error:
            if _is_filter_error(error):
                raise
            self._errors.log(progress.stage, error)
            if len(progress.batch.users) > 1 and progress.retries[0] > 0:
                return self._answers_of_halves(progress)
        return self._fallback(progress.batch, f"{progress.stage} failed")

    def _run_stages(self, progress: _Progress) -> list[Recommendation]:
        batch = progress.batch
        for stage in self.stages:
            progress.stage = stage.name
            if progress.is_gone():
                raise CallerGoneError
            if progress.deadline is not None and time.monotonic() >= progress.deadline:
                raise _LateError
            with self._metrics.time(stage.name):
                batch = stage.run(batch)
                if not isinstance(batch, Batch):
                    raise UsageError(
                        f"The stage {stage.name} returned {type(batch).__name__}, but should "
                        "return a Batch",
                        code="function-result",
                    )
            progress.batch = batch
            if batch.candidates is not None and not len(batch.candidates.ids):
                return self._fallback(batch, "")
        progress.stage = "sorting"
        if batch.candidates is None or batch.scores is None:
            return self._fallback(batch, "")
        return self._sorted(batch, batch.candidates, batch.scores)

    def _answers_of_halves(self, progress: _Progress) -> list[Recommendation]:
        """Answer each half of the users separately, to isolate a user that causes a failure."""
        progress.retries[0] -= 1
        batch, answers = progress.batch, []
        middle = len(batch.users) // 2
        for users in (batch.users[:middle], batch.users[middle:]):
            half = Batch(
                *(users, batch.k, batch.max_candidates, batch.store),
                item_filter=batch.item_filter,
                popular=batch.popular,
            )
            part = replace(progress, batch=half)
            answers += self._run(part)
            if part.batch.partial:
                progress.batch = replace(progress.batch, partial=True)
        return answers

    def _sorted(
        self, batch: Batch, candidates: Candidates, scores: np.ndarray
    ) -> list[Recommendation]:
        answers, start = [], 0
        for user, count in zip(batch.users.tolist(), candidates.counts.tolist(), strict=True):
            rows = slice(start, start + count)
            start += count
            if not count:
                answers.append(self._most_popular(user, batch, "the user has no candidates"))
                continue
            answer, why = None, "no candidate has a finite score"
            try:
                answer = self._best(user, candidates.ids[rows], scores[rows], batch.k)
            except Exception as error:
                self._errors.log("rerank", error)
                why = "rerank failed"
            if answer is None:
                recalled = candidates.ids[rows][: batch.k], candidates.scores[rows][: batch.k]
                answer = Recommendation(user, *recalled, RECALLED, why)
            answers.append(answer)
        return answers

    def _best(
        self, user: int, ids: np.ndarray, scores: np.ndarray, k: int
    ) -> Recommendation | None:
        """Return the best items of one user, or None if no score is finite."""
        is_number, reason = np.isfinite(scores), ""
        if not is_number.all():
            reason = f"{np.count_nonzero(~is_number)} of {len(ids)} candidates have no finite score"
            ids, scores = ids[is_number], scores[is_number]
            if not len(ids):
                return None
        order = best_first(ids, scores, k if self._rerank is None else len(ids))
        ids, scores = ids[order], scores[order]
        if self._rerank is not None:
            items, values = self._rerank(user, ids, scores)
            ids, scores = ids_of(items, "rerank")[:k], np.asarray(values, np.float32)[:k]
            if len(ids) != len(scores):
                raise UsageError(
                    f"rerank returned {len(ids)} items and {len(scores)} scores", code="data-shape"
                )
        return Recommendation(user, ids, scores, reason=reason)

    def _fallback(self, batch: Batch, reason: str) -> list[Recommendation]:
        """Answer with the candidates found so far or, if there are none, with popular items."""
        if batch.candidates is None:
            return [self._most_popular(user, batch, reason) for user in batch.users.tolist()]
        answers = []
        for user, part in zip(batch.users.tolist(), batch.candidates.split(), strict=True):
            if not len(part[0]):
                answers.append(self._most_popular(user, batch, "the user has no candidates"))
            else:
                ids, scores = (each[: batch.k] for each in part)
                answers.append(Recommendation(user, ids, scores, RECALLED, reason))
        return answers

    def _most_popular(self, user: int, batch: Batch, reason: str) -> Recommendation:
        ids = (self._popular if batch.popular is None else batch.popular)[: batch.k]
        return Recommendation(user, ids, np.zeros(len(ids), np.float32), POPULAR, reason)

    def close(self) -> None:
        """Stop the threads when their current stages end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
