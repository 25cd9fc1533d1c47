"""Stages of a recommender: what one is given, what it returns, and the runner of a list of them.

A stage is an object with a ``name`` and ``run(batch) -> batch``.  The built-in ones are ``recall``
(finds candidates), ``features`` (reads the ranker's columns) and ``ranking`` (scores candidates);
another one may stand anywhere among them.  The runner times each, begins none after the deadline,
and answers by what was found so far where one fails or is late.
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
from bigdl.friesian.serving.errors import LostShardError
from bigdl.friesian.serving.index import Candidates, best_first
from bigdl.friesian.serving.rows import Column, Features, Ids, ids_of
from bigdl.nano.serving.metrics import ServingMetrics
from bigdl.nano.serving.statuses import CallerGoneError

__all__ = ["Batch", "Recommendation", "Stage", "StageRunner", "load_stage"]

logger = logging.getLogger(__name__)

DEFAULT_STAGES = ("recall", "features", "ranking")
ENTRY_POINTS = "bigdl.stages"
RANKED, RECALLED, POPULAR = "ranked", "recalled", "popular"
_SILENCE = 10.0  # seconds between two messages about one stage that fails

Columns = dict[str, Column]
"""Arrays of one length by the names of columns."""
Rerank = Callable[[int, np.ndarray, np.ndarray], tuple[Sequence[int], Sequence[float]]]
"""A function of user, items and scores, the best first, that returns items and scores."""


class FeatureReader(Protocol):
    """A source of features by id: a :class:`FeatureStore`, or a client of one."""

    def names(self, table: str) -> list[str]:
        """Return the columns of a table."""

    def read(self, table: str, ids: Ids, columns: Sequence[str] | None = None) -> Features:
        """Return the rows of ids, in their order."""


class PreparedScores(Protocol):
    """A request for the scores of a model that is split; see :class:`.pairs.PreparedPairs`."""

    def scores(self, candidates: Candidates, whole: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a score for each candidate."""


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


@dataclass(frozen=True)
class Batch:
    """Some users of a request, and what the stages have found for them so far.

    A stage returns another one: ``dataclasses.replace(batch, scores=...)``, or :meth:`keep`.

    Attributes
    ----------
    users : ndarray of int64
    k : int
        Items of an answer.
    max_candidates : int
        Candidates that are wanted for each user.
    store : FeatureReader or None
        Where a stage can read features by id.
    candidates : Candidates or None
        The candidates of all users, one user's behind the other's, the best first.
    columns : dict of str to array
        The ranker's input.
    rows : ndarray of int64 or None
        Indices of the candidates that have a row in `columns`; None if all have one.
    scores : ndarray of float32 or None
        One for each candidate; one that is not finite leaves its item out.
    partial : bool
        True if a shard was lost, so that its items are missing.
    resources : ExitStack
        Context managers that are entered here are left at the end of the request.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.serving import Batch, Candidates
    >>> found = Candidates(np.array([7, 8]), np.ones(2, np.float32), np.array([2]))
    >>> batch = Batch(np.array([1]), 1, 10, candidates=found)
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
                f"There are {len(self.scores)} scores for {count} candidates; leave candidates out "
                "by keep",
                code="data-shape",
            )

    def keep(self, kept: np.ndarray) -> Batch:
        """Return the batch with those candidates alone for which a mask is True.

        Parameters
        ----------
        kept : ndarray of bool
            One for each candidate.
        """
        if self.candidates is None:
            return self
        kept = np.asarray(kept, bool)
        columns, rows = self.columns, self.rows
        if columns or rows is not None:
            has_row = kept if rows is None else kept[rows]
            columns = {name: taken(each, np.flatnonzero(has_row)) for name, each in columns.items()}
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


def taken(column: Column, places: np.ndarray) -> Column:
    """Return the rows of a column at some indices."""
    return column.take(pa.array(places)) if isinstance(column, pa.Array) else column[places]


@runtime_checkable
class Stage(Protocol):
    """One step from users to scored candidates; threads call it at the same time.

    Attributes
    ----------
    name : str
        Of its times in the metrics, and in the reason of an answer for which it failed.

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
        """Return the batch with what this stage adds or leaves out."""


def function_of(name: str) -> Callable[..., object]:
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


def load_stage(name: str, options: Mapping[str, object] | None = None) -> Stage:
    """Make a stage of another package.

    Parameters
    ----------
    name : str
        ``module:Class``, ``module.Class``, or the name of an entry point ``bigdl.stages``.
    options : dict, optional
        Keywords of the class.

    Raises
    ------
    UsageError
        If there is no such class, or it does not make a stage.

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
            f"The stage {name} cannot be made: {one_line(error)}", code="argument-value", name=name
        ) from error
    return checked_stage(stage)


def checked_stage(stage: object) -> Stage:
    """Return a stage; raises a UsageError if an object is none."""
    if not isinstance(stage, Stage) or not isinstance(stage.name, str):
        raise UsageError(
            f"A stage has a name and a method run(batch), but got {type(stage).__name__}",
            code="argument-type",
            argument="stages",
        )
    return stage


class StageErrors:
    """The log of stages that fail, with one message for each stage in some seconds."""

    def __init__(self, metrics: ServingMetrics):
        self._metrics = metrics
        self._logged: dict[str, float] = {}  # when, by stage

    def log(self, stage: str, error: Exception) -> None:
        """Log why a stage failed."""
        now = time.monotonic()
        if now - self._logged.get(stage, -_SILENCE) >= _SILENCE:
            self._logged[stage] = now
            logger.error("%s failed: %s", stage, one_line(error), exc_info=error)

    def replaced(self, stage: str, error: Exception) -> None:
        """Log and count an error of a stage that goes on by another way."""
        self._metrics.failed(stage)
        self.log(stage, error)


class _LateError(Exception):
    """The time of a request was over before a stage began."""


@dataclass
class _Progress:
    """The position of a batch in the list of stages."""

    batch: Batch
    deadline: float | None
    is_gone: Callable[[], bool]
    retries: list[int]
    """How many failures may still be narrowed down to their users; shared with parts of it."""
    stage: str = "a free thread"


class StageRunner:
    """Runs stages for batches of users, and answers within the deadline whatever they do.

    Parameters
    ----------
    stages : sequence of Stage
    errors : StageErrors
    metrics : ServingMetrics
    threads : int
        For batches with a deadline.
    popular : ndarray of int64
        Items for users without candidates, the best first.
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

    def answers(
        self, batch: Batch, deadline: float | None, is_gone: Callable[[], bool]
    ) -> list[Recommendation]:
        """Return the answer for each user of a batch.

        Parameters
        ----------
        batch : Batch
        deadline : float, optional
            When it has to be there, in the seconds of ``time.monotonic``.
        is_gone : callable
            Asked before each stage; True ends the work.

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
                answers = self._fallback(progress.batch, f"{progress.stage} was late")
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
            return self._fallback(progress.batch, f"{progress.stage} was late")
        except CallerGoneError:
            raise
        except LostShardError as error:
            progress.batch = replace(progress.batch, partial=True)
            logger.warning("%s: %s", progress.stage, error)
        except Exception as error:
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
        """Answer each half of the users separately, so that a fault of one costs that one alone."""
        progress.retries[0] -= 1
        batch, answers = progress.batch, []
        middle = len(batch.users) // 2
        for users in (batch.users[:middle], batch.users[middle:]):
            half = Batch(users, batch.k, batch.max_candidates, batch.store)
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
                answers.append(self._most_popular(user, batch.k, "the user has no candidates"))
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
        """Return the best items of one user; None if no score is finite."""
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
        """Answer by the candidates that were found, else by the popular items."""
        if batch.candidates is None:
            return [self._most_popular(user, batch.k, reason) for user in batch.users.tolist()]
        answers = []
        for user, part in zip(batch.users.tolist(), batch.candidates.split(), strict=True):
            if not len(part[0]):
                answers.append(self._most_popular(user, batch.k, "the user has no candidates"))
            else:
                ids, scores = (each[: batch.k] for each in part)
                answers.append(Recommendation(user, ids, scores, RECALLED, reason))
        return answers

    def _most_popular(self, user: int, k: int, reason: str) -> Recommendation:
        ids = self._popular[:k]
        return Recommendation(user, ids, np.zeros(len(ids), np.float32), POPULAR, reason)

    def close(self) -> None:
        """End the threads, after the stages that run."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
