"""Baseline recommenders, and their comparison by cross-validation.

They are trained in the memory of the driver, from pandas, Arrow, Polars or Spark tables.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_number, check_positive
from bigdl.common.drawing import Chart
from bigdl.common.errors import UsageError
from bigdl.friesian.metrics.ranking import DEFAULT_METRICS, RankingMetrics, ranking_metrics
from bigdl.friesian.metrics.tables import Table, as_arrow, check_same_type, ids, sorted_codes

if TYPE_CHECKING:
    import pandas as pd

    from bigdl.friesian.splitters import Splitter

__all__ = [
    "ALS",
    "EASE",
    "CrossValidation",
    "HistoryRecommender",
    "ItemKNN",
    "Markov",
    "Popular",
    "Recommender",
    "cross_validate",
]

_USERS_AT_ONCE = 1024
_MOST_ITEMS = 50_000  # maximum size of a dense item-item matrix
_WIDTH, _LABELS, _BAR = 760, 150, 32  # pixels of a chart


class Recommender(Protocol):
    """Protocol of the models that :func:`cross_validate` compares.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import Popular, Recommender
    >>> class Newest:  # recommends the newest items to all users
    ...     def fit(self, table):
    ...         newest = table.to_pandas().sort_values("time")["item"][::-1]
    ...         self.items = newest.drop_duplicates().tolist()
    ...
    ...     def recommend(self, users, k, *, filter_seen):
    ...         ranks = range(1, len(self.items[:k]) + 1)
    ...         return pd.DataFrame(
    ...             [(u, i, r) for u in users for i, r in zip(self.items, ranks)],
    ...             columns=["user", "item", "rank"],
    ...         )
    >>> model: Recommender = Newest()
    """

    def fit(self, table: Table, /) -> object:
        """Train on a table of user-item interactions."""

    def recommend(self, users: Iterable[Any], k: int, *, filter_seen: bool) -> Table:
        """Return a table with user, item and ``rank`` columns and up to `k` items per user."""


@dataclass(frozen=True)
class History:
    """Items of each user, oldest first.

    Attributes
    ----------
    users, items : pyarrow.Array
        Distinct ids in ascending order.
    item : numpy.ndarray of int64
        Indices into `items`, grouped by user.
    time : numpy.ndarray of float64
        Time of each row; timestamps in seconds.
    starts : numpy.ndarray of int64, shape (users + 1,)
        Index of the first row of each user.
    """

    users: pa.Array
    items: pa.Array
    item: np.ndarray
    time: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, table: Table, user_col: str, item_col: str, time_col: str | None) -> History:
        """Build a History from a table; a user's rows with equal timestamps are ordered by item."""
        columns = [user_col, item_col, *([time_col] if time_col else [])]
        rows = as_arrow(table, "table", columns)
        if not rows.num_rows:
            raise UsageError("There are no rows to train on", code="data-empty")
        users, (user,) = sorted_codes(ids(rows, user_col, "table"))
        items, (item,) = sorted_codes(ids(rows, item_col, "table"))
        time = _seconds(rows[time_col], time_col) if time_col else np.zeros(rows.num_rows)
        order = np.lexsort((item, time, user))
        counts = np.bincount(user, minlength=len(users))
        starts = np.append(0, np.cumsum(counts))
        return cls(users, items, item[order], time[order], starts)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of rows of each item."""
        return np.bincount(self.item, minlength=len(self.items)).astype(np.float64)

    def matrix(self, users: np.ndarray) -> np.ndarray:
        """Return a float32 user-item matrix with 1 where the user has the item, otherwise 0."""
        result = np.zeros((len(users), len(self.items)), dtype=np.float32)
        for row, user in enumerate(users):
            result[row, self.item[self.starts[user] : self.starts[user + 1]]] = 1
        return result

    def batches(self) -> Iterator[np.ndarray]:
        """Yield the user-item matrix in batches of users."""
        for first in range(0, len(self.users), _USERS_AT_ONCE):
            yield self.matrix(np.arange(first, min(first + _USERS_AT_ONCE, len(self.users))))

    def table(self, user_col: str, item_col: str, time_col: str = "time") -> pa.Table:
        """Return the rows as a table that :meth:`of` reads again."""
        users = pa.array(np.repeat(np.arange(len(self.users)), np.diff(self.starts)))
        columns = [self.users.take(users), self.items.take(pa.array(self.item)), self.time]
        return pa.table(columns, names=[user_col, item_col, time_col])

    def joined(self, newer: History) -> History:
        """Return the history of both objects, ordered by time again."""
        tables = [each.table("user", "item") for each in (self, newer)]
        for name, column in (("user", self.users), ("item", self.items)):
            check_same_type(column.type, tables[1][name].type, "the new table", name)
        return History.of(pa.concat_tables(tables), "user", "item", "time")

    def co_occurrences(self) -> np.ndarray:
        """Return a float32 item-item matrix with the number of users who have both items."""
        if len(self.items) > _MOST_ITEMS:
            raise UsageError(
                f"{len(self.items)} items need a matrix of {4e-9 * len(self.items) ** 2:.0f} GB; "
                f"keep at most {_MOST_ITEMS} items, for instance by k_core",
                code="data-size",
            )
        result = np.zeros((len(self.items), len(self.items)), dtype=np.float32)
        for matrix in self.batches():
            result += matrix.T @ matrix
        return result


def _seconds(column: pa.ChunkedArray, name: str) -> np.ndarray:
    if column.null_count:
        raise UsageError(
            f"Column {name!r} has nulls; drop those rows", code="data-null", column=name
        )
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return np.asarray(column.cast(pa.timestamp("us")).cast(pa.int64())) / 1e6
    try:
        return np.asarray(column.cast(pa.float64(), safe=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UsageError(
            f"Column {name!r} should be numbers, dates or timestamps, got {column.type}",
            code="data-dtype",
            column=name,
        ) from None


class HistoryRecommender(ABC):
    """Base class of recommenders that keep user histories in the memory of the driver.

    It ranks the scores of a subclass, filters items, and recommends popular items to unknown users.

    Parameters
    ----------
    user_col, item_col, time_col : str
        Columns of the training rows.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import HistoryRecommender
    >>> class Alphabetical(HistoryRecommender):  # recommends items in alphabetical order
    ...     def _learn(self, history):
    ...         self.scores = -np.arange(len(history.items), dtype=float)
    ...
    ...     def _scores(self, history, users):
    ...         return np.tile(self.scores, (len(users), 1))
    >>> clicks = pd.DataFrame({"user": [1, 2], "item": ["b", "a"]})
    >>> Alphabetical().fit(clicks).recommend([1], k=1)["item"].tolist()
    ['a']
    """

    _needs_time = False

    def __init__(self, user_col: str = "user", item_col: str = "item", time_col: str = "time"):
        self.user_col, self.item_col, self.time_col = user_col, item_col, time_col
        self._history: History | None = None

    def fit(self, table: Table) -> Self:
        """Train on a table of user-item interactions.

        Parameters
        ----------
        table : pandas, Arrow, Polars or Spark table, or FeatureTable

        Returns
        -------
        This object.
        """
        time_col = self.time_col if self._needs_time else None
        history = History.of(table, self.user_col, self.item_col, time_col)
        self._learn(history)
        self._history = history
        return self

    @abstractmethod
    def _learn(self, history: History) -> None: ...

    @abstractmethod
    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        """Return a user-item matrix with the scores of all items for each user in `users`."""

    def recommend(
        self,
        users: Iterable[Any] | None = None,
        k: int = 10,
        *,
        filter_seen: bool = True,
        items: Iterable[Any] | None = None,
    ) -> pd.DataFrame:
        """Recommend items to users.

        Parameters
        ----------
        users : iterable of ids, optional
            Default: all users of :meth:`fit`. Unknown users get the most popular items.
        k : int, default 10
            Maximum number of items per user.
        filter_seen : bool, default True
            Leave out items that the user had in :meth:`fit`.
        items : iterable of ids, optional
            Recommend only these items; items that :meth:`fit` has not seen are ignored.

        Returns
        -------
        pandas.DataFrame
            Columns of users and items, ``score`` and ``rank`` from 1. Among equal scores the
            greater item id comes first.

        Raises
        ------
        UsageError
            Before :meth:`fit`.
        """
        import pandas as pd

        check_positive("k", k)
        history = self._history
        if history is None:
            raise UsageError("Call fit before recommend", code="not-fitted")
        user_ids = history.users if users is None else pa.array(_listed(users))
        user_ids = user_ids.cast(history.users.type) if not len(user_ids) else user_ids
        known = np.asarray(pc.fill_null(pc.index_in(user_ids, value_set=history.users), -1))
        allowed = np.ones(len(history.items), dtype=bool)
        if items is not None:
            allowed = np.asarray(pc.is_in(history.items, value_set=pa.array(_listed(items))))
        frames = []
        for first in range(0, len(user_ids), _USERS_AT_ONCE):
            part = known[first : first + _USERS_AT_ONCE]
            scores = np.tile(history.counts, (len(part), 1))
            has_rows = part >= 0
            if has_rows.any():
                of_users = self._scores(history, part[has_rows])
                if filter_seen:
                    of_users[history.matrix(part[has_rows]) > 0] = -np.inf
                scores[has_rows] = of_users
            scores[:, ~allowed] = -np.inf
            top = best_columns(scores, k)
            chosen = np.take_along_axis(scores, top, axis=1)
            row, column = np.nonzero(chosen > -np.inf)
            frames.append(
                pd.DataFrame(
                    {
                        self.user_col: user_ids.take(pa.array(first + row)).to_pandas(),
                        self.item_col: history.items.take(pa.array(top[row, column])).to_pandas(),
                        "score": chosen[row, column],
                        "rank": column + 1,
                    }
                )
            )
        names = [self.user_col, self.item_col, "score", "rank"]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=names)


def _listed(values: Iterable[Any]) -> list[Any]:
    return values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)


def best_columns(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the column indices of the `k` highest scores per row; ties go to the later column."""
    count = scores.shape[1]
    reverse = scores[:, ::-1]
    if k < count:
        # Keep all ties of the k-th score, so that their order is deterministic.
        limit = np.partition(reverse, count - k, axis=1)[:, count - k]
        reverse = np.where(reverse >= limit[:, None], reverse, -np.inf)
    return (count - 1 - np.argsort(-reverse, axis=1, kind="stable"))[:, :k]


class Popular(HistoryRecommender):
    """Baseline that recommends the items with the most rows, overall or in a recent period.

    Parameters
    ----------
    period : timedelta or float, optional
        Count only rows of the last `period`, in seconds for timestamps, otherwise in the unit of
        the time column. A short period is a strong baseline where tastes change.
    **columns
        ``user_col``, ``item_col`` and ``time_col``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import Popular
    >>> clicks = pd.DataFrame({"user": [1, 2, 2], "item": ["a", "a", "b"], "time": [1, 2, 3]})
    >>> Popular().fit(clicks).recommend([1, 7], k=1)[["user", "item"]].values.tolist()
    [[1, 'b'], [7, 'a']]
    """

    def __init__(self, period: datetime.timedelta | float | None = None, **columns: str):
        super().__init__(**columns)
        self.period = period
        self._needs_time = period is not None

    def _learn(self, history: History) -> None:
        recent = np.ones(len(history.item), dtype=bool)
        if self.period is not None:
            period = self.period
            length = period.total_seconds() if isinstance(period, datetime.timedelta) else period
            recent = history.time > history.time.max() - length
        self._counts = np.bincount(history.item[recent], minlength=len(history.items))

    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        return np.tile(self._counts.astype(np.float64), (len(users), 1))


class Markov(HistoryRecommender):
    """Baseline that recommends the items that most often followed the user's last item.

    Ties are ordered by popularity. Rows of a user at equal times are ordered by item.

    Parameters
    ----------
    **columns
        ``user_col``, ``item_col`` and ``time_col``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import Markov
    >>> clicks = pd.DataFrame(
    ...     {"user": [1, 1, 2, 3], "item": ["tea", "milk", "tea", "rice"], "time": [1, 2, 3, 4]}
    ... )
    >>> Markov().fit(clicks).recommend([2], k=1)["item"].tolist()
    ['milk']
    """

    _needs_time = True

    def _learn(self, history: History) -> None:
        item, starts = history.item, history.starts
        is_last = np.zeros(len(item), dtype=bool)
        is_last[starts[1:] - 1] = True
        before, after = item[:-1][~is_last[:-1]], item[1:][~is_last[:-1]]
        pairs, counts = np.unique(before * len(history.items) + after, return_counts=True)
        self._from, self._to = np.divmod(pairs, len(history.items))
        self._counts = counts

    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        popularity = history.counts
        scores = np.tile(popularity / (popularity.max() + 1), (len(users), 1))
        last = history.item[history.starts[users + 1] - 1]
        for row, item in enumerate(last):
            part = slice(*np.searchsorted(self._from, (item, item + 1)))
            scores[row, self._to[part]] += self._counts[part]
        return scores


class _ItemWeights(HistoryRecommender):
    """Base class of baselines that score an item by its summed weights with the user's items."""

    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        return (history.matrix(users) @ self._weights).astype(np.float64)

    @abstractmethod
    def _weights_of(self, co_occurrences: np.ndarray) -> np.ndarray: ...

    def _learn(self, history: History) -> None:
        self._weights = self._weights_of(history.co_occurrences())


class ItemKNN(_ItemWeights):
    """Baseline that recommends items similar to the user's items, by cosine similarity.

    Parameters
    ----------
    neighbours : int, default 100
        Number of most similar items to keep per item.
    shrink : float, default 0
        Added to the divisor of similarities, which reduces those of rare items.
    **columns
        ``user_col``, ``item_col`` and ``time_col``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import ItemKNN
    >>> clicks = pd.DataFrame(
    ...     {"user": [1, 1, 2, 3], "item": ["tea", "milk", "tea", "rice"]}
    ... )
    >>> ItemKNN(2).fit(clicks).recommend([2], k=1)["item"].tolist()
    ['milk']
    """

    def __init__(self, neighbours: int = 100, shrink: float = 0.0, **columns: str):
        super().__init__(**columns)
        self.neighbours = check_positive("neighbours", neighbours)
        self.shrink = check_number("shrink", shrink, 0)

    def _weights_of(self, co_occurrences: np.ndarray) -> np.ndarray:
        norms = np.sqrt(np.diag(co_occurrences))
        similar = co_occurrences / (np.outer(norms, norms) + np.float32(self.shrink))
        np.fill_diagonal(similar, 0)
        if self.neighbours < len(similar):
            limit = np.partition(similar, -self.neighbours, axis=0)[-self.neighbours]
            similar[similar < limit] = 0
        return similar


class EASE(_ItemWeights):
    """Baseline with linear item-item weights, computed in closed form (EASE).

    Parameters
    ----------
    l2 : float, default 200
        L2 regularisation, usually between 10 and 1,000.
    **columns
        ``user_col``, ``item_col`` and ``time_col``.

    References
    ----------
    Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import EASE
    >>> clicks = pd.DataFrame(
    ...     {"user": [1, 1, 2, 3], "item": ["tea", "milk", "tea", "rice"]}
    ... )
    >>> EASE(1.0).fit(clicks).recommend([2], k=1)["item"].tolist()
    ['milk']
    """

    def __init__(self, l2: float = 200.0, **columns: str):
        super().__init__(**columns)
        self.l2 = check_number("l2", l2, above=0)

    def _weights_of(self, co_occurrences: np.ndarray) -> np.ndarray:
        inverse = np.linalg.inv(
            co_occurrences.astype(np.float64) + self.l2 * np.eye(len(co_occurrences))
        )
        weights = inverse / -np.diag(inverse)
        np.fill_diagonal(weights, 0)
        return weights.astype(np.float32)


class ALS(HistoryRecommender):
    """Baseline that factorises implicit feedback with Spark's ALS.

    Parameters
    ----------
    rank : int, default 64
        Number of factors.
    iterations : int, default 10
        With many more, Spark tasks overflow the stack unless the SparkContext has a checkpoint
        directory.
    l2 : float, default 0.1
        Regularisation.
    alpha : float, default 40.0
        Confidence of a row.
    seed : int, default 0
    **columns
        ``user_col``, ``item_col`` and ``time_col``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import ALS
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> clicks = pd.DataFrame({"user": [1, 1, 2, 3], "item": [5, 6, 5, 7]})
    >>> ALS(rank=2, iterations=3).fit(clicks).recommend([2], k=1)["item"].tolist()
    [6]
    """

    def __init__(
        self,
        rank: int = 64,
        iterations: int = 10,
        l2: float = 0.1,
        alpha: float = 40.0,
        seed: int = 0,
        **columns: str,
    ):
        super().__init__(**columns)
        self.rank, self.iterations = (
            check_positive("rank", rank),
            check_positive("iterations", iterations),
        )
        self.l2, self.alpha = check_number("l2", l2, 0), check_number("alpha", alpha, 0)
        self.seed = seed

    def _learn(self, history: History) -> None:
        from pyspark.ml.recommendation import ALS as SparkALS

        from bigdl.orca.cluster.versions import frame_of_arrow, to_arrow
        from bigdl.orca.settings import OrcaContext

        counts = np.diff(history.starts)
        pairs = pa.table(
            {"user": np.repeat(np.arange(len(counts)), counts), "item": history.item}
        ).cast(pa.schema([("user", pa.int32()), ("item", pa.int32())]))
        rows = pairs.group_by(["user", "item"]).aggregate([("item", "count")])
        rows = rows.rename_columns(["user", "item", "rating"])
        rows = rows.set_column(2, "rating", rows["rating"].cast(pa.float32()))
        estimator = SparkALS(
            rank=self.rank,
            maxIter=self.iterations,
            regParam=self.l2,
            alpha=self.alpha,
            implicitPrefs=True,
            seed=self.seed,
            userCol="user",
            itemCol="item",
            ratingCol="rating",
        )
        model = estimator.fit(frame_of_arrow(OrcaContext.get_spark_session(), rows))
        factors = []
        for frame, count in (
            (model.userFactors, len(history.users)),
            (model.itemFactors, len(history.items)),
        ):
            table = to_arrow(frame)
            matrix = np.zeros((count, self.rank), dtype=np.float32)
            values = np.asarray(table["features"].combine_chunks().flatten())
            matrix[np.asarray(table["id"])] = values.reshape(-1, self.rank)
            factors.append(matrix)
        self._users, self._items = factors

    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        return (self._users[users] @ self._items.T).astype(np.float64)


# -- comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossValidation:
    """Metrics of several models over the folds of a splitter.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per model and fold: ``model``, ``fold`` from 0 for the oldest, and the metrics.
    folds : pandas.DataFrame
        One row per fold: training and test rows, and the dropped rows by reason.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import CrossValidation
    >>> results = [("EASE", 0, 0.3), ("EASE", 1, 0.5), ("popular", 0, 0.2), ("popular", 1, 0.2)]
    >>> table = pd.DataFrame(results, columns=["model", "fold", "ndcg@10"])
    >>> CrossValidation(table, pd.DataFrame()).means["ndcg@10"].to_dict()
    {'EASE': 0.4, 'popular': 0.2}
    """

    table: pd.DataFrame
    folds: pd.DataFrame

    @property
    def means(self) -> pd.DataFrame:
        """Mean of each metric over the folds, one row per model, sorted by the first metric."""
        means = self.table.drop(columns="fold").groupby("model", sort=False).mean()
        return means.sort_values(means.columns[0], ascending=False, kind="stable")

    def write_chart(self, path: str | Path, metric: str | None = None) -> None:
        """Write a bar chart of a metric and its range over the folds to a file.

        Parameters
        ----------
        path : str or Path
            File name that ends with ``.html`` or ``.svg``, or with a format of matplotlib such as
            ``.png``.
        metric : str, optional
            Default: the first metric.

        Raises
        ------
        UsageError
            For an unknown metric, and if the file cannot be written.
        """
        metric = metric or self.means.columns[0]
        if metric not in self.means.columns:
            raise UsageError(
                f"There is no metric {metric!r}; choose from {list(self.means.columns)}",
                code="name-unknown",
                name=metric,
            )
        self._chart(metric).write(Path(path), metric, self.means.to_string())

    def _repr_html_(self) -> str:
        return self.means.to_html() + self._chart(self.means.columns[0]).svg()

    def _chart(self, metric: str) -> Chart:
        means = self.means[metric]
        ranges = self.table.groupby("model")[metric].agg(["min", "max"])
        chart = Chart(_WIDTH, _BAR * (len(means) + 1))
        length = _WIDTH - 2 * _LABELS
        scale = length / max(float(ranges["max"].max()), 1e-12)
        for row, (name, mean) in enumerate(means.items()):
            top = _BAR * row + 10
            chart.text(str(name), _LABELS - 8, top + 14, "end")
            chart.box(_LABELS, top, mean * scale, _BAR - 10, "#4c78a8", f"{metric} {mean:.4f}")
            low, high = ranges.loc[[str(name)]].to_numpy()[0]
            ends = [(_LABELS + end * scale, top + _BAR / 2 - 5) for end in (low, high)]
            chart.line(ends, "#222", 1)
            chart.text(f"{mean:.4f}", ends[1][0] + 6, top + 14)
        chart.text(metric, _LABELS, _BAR * (len(means) + 1) - 6)
        return chart


def cross_validate(
    table: Table,
    splitter: Splitter,
    models: Mapping[str, Recommender],
    metrics: Sequence[str] | str = DEFAULT_METRICS,
    k: Sequence[int] | int = 10,
    *,
    filter_seen: bool = True,
    drop_cold: bool = True,
) -> CrossValidation:
    """Train models on the folds of a splitter and compare their ranking metrics.

    Parameters
    ----------
    table : FeatureTable or pyspark.sql.DataFrame
    splitter : Splitter
    models : dict of str to Recommender
        Each model is trained again for each fold.
    metrics, k
        As in :func:`~bigdl.friesian.metrics.ranking_metrics`. The catalogue is the items of the
        fold's training rows.
    filter_seen : bool, default True
        Neither recommend nor test items that the user has in the training rows.
    drop_cold : bool, default True
        Leave out test rows of users and items without training rows.

    Returns
    -------
    CrossValidation

    Raises
    ------
    UsageError
        Without models, or if a fold has no remaining test row.

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.baselines import EASE, Popular, cross_validate
    >>> from bigdl.friesian.feature import FeatureTable
    >>> from bigdl.friesian.splitters import GlobalTime
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> random = np.random.default_rng(0)
    >>> user = random.integers(0, 40, 600)
    >>> item = 2 * random.integers(0, 10, 600) + user % 2  # odd users like odd items
    >>> clicks = pd.DataFrame({"user": user, "item": item, "time": np.arange(600)})
    >>> models = {"popular": Popular(), "EASE": EASE(10)}
    >>> result = cross_validate(
    ...     FeatureTable.from_pandas(clicks), GlobalTime(test_size=0.3), models, "ndcg"
    ... )
    >>> result.means.index.tolist()
    ['EASE', 'popular']
    """
    if not models:
        raise UsageError("models is empty; name at least one", code="argument-value")
    import pandas as pd

    user_col, item_col = splitter.user_col, splitter.item_col
    results, folds = [], []
    for fold, rows in enumerate(
        folds_as_arrow(table, splitter, filter_seen=filter_seen, without_cold=drop_cold)
    ):
        counts = {"train": rows.train.num_rows, "test": rows.test.num_rows}
        folds.append({"fold": fold, "start": rows.start, **counts, **rows.dropped})
        for name, model in models.items():
            result = ranked(
                *(name, model, rows.train, rows.test, metrics, k, user_col, item_col),
                filter_seen=filter_seen,
            )
            results.append({"model": name, "fold": fold, **result})
    return CrossValidation(pd.DataFrame(results), pd.DataFrame(folds))


class FoldRows(NamedTuple):
    """Training and test rows of a fold in memory."""

    train: pa.Table
    test: pa.Table
    start: object
    dropped: dict[str, int]


def folds_as_arrow(
    table: Table, splitter: Splitter, *, filter_seen: bool = True, without_cold: bool = True
) -> Iterator[FoldRows]:
    """Collect the folds of a splitter; see :func:`cross_validate`.

    Raises
    ------
    UsageError
        If a fold has no remaining test row.
    """
    from bigdl.friesian.splitters import drop_cold, drop_seen

    names = {"user_col": splitter.user_col, "item_col": splitter.item_col}
    columns = [*names.values(), splitter.time_col]
    for fold, split in enumerate(splitter.folds(table)):
        test, dropped = split.test, dict[str, int]()
        drops = [*([drop_cold] if without_cold else []), *([drop_seen] if filter_seen else [])]
        for drop in drops:
            filtered = drop(test, split.train, **names)
            test, dropped = filtered.table, {**dropped, **filtered.dropped}
        train_rows = as_arrow(split.train, "table", columns)
        test_rows = as_arrow(test, "table", columns)
        if not test_rows.num_rows:
            raise UsageError(
                f"Fold {fold} has no remaining test rows; dropped rows: {dropped}",
                code="data-empty",
            )
        yield FoldRows(train_rows, test_rows, split.start, dropped)


def ranked(
    name: str,
    model: Recommender,
    train: pa.Table,
    test: pa.Table,
    metrics: Sequence[str] | str,
    k: Sequence[int] | int,
    user_col: str,
    item_col: str,
    *,
    filter_seen: bool = True,
) -> RankingMetrics:
    """Train a model, and return the metrics of its recommendations to the users of test rows."""
    users = pc.unique(test[user_col])
    most = k if isinstance(k, int) else max(k)
    model.fit(train)
    lists = model.recommend(users.to_pylist(), most, filter_seen=filter_seen)
    lists = as_arrow(lists, f"recommend of {name}", [user_col, item_col, "rank"])
    return ranking_metrics(
        lists, test, metrics, k, train=train, user_col=user_col, item_col=item_col
    )
