"""Ranking metrics of recommendations, computed in one pass over tables of any size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.friesian.metrics.exact import ExactMoments
from bigdl.friesian.metrics.items import NEEDED_TABLES, ItemFacts, item_facts
from bigdl.friesian.metrics.lists import METRICS, ListOptions, UserValues, values_of_users
from bigdl.friesian.metrics.tables import (
    Table,
    as_table,
    check_same_type,
    id_type,
    ids,
    numbers,
)
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.data.xshards.frames import quoted

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

__all__ = ["RankingMetrics", "compare_rankings", "ranking_metrics"]

DEFAULT_METRICS = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")


class RankingMetrics(dict[str, float]):
    """Dict of metrics by name and k, such as ``{"ndcg@10": 0.47}``, with user counts.

    Attributes
    ----------
    users : int
        Users with at least one relevant item, over whom accuracy is averaged.
    users_without_recommendations : int
        Users with a relevant item but no recommendation, who count as 0.
    standard_errors : dict of str to float
        Standard error of each mean over users; not of ``gauc``, ``coverage`` and ``gini``.
    per_user : pandas.DataFrame, pyspark.sql.DataFrame or None
        One row per user with the metrics as columns, NaN where the metric excludes the user; None
        unless requested.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.metrics import ranking_metrics
    >>> reco = pd.DataFrame({"user": [1, 2], "item": [10, 20], "rank": [1, 1]})
    >>> truth = pd.DataFrame({"user": [1, 2], "item": [10, 10]})
    >>> ranking_metrics(reco, truth, "mrr", k=1, per_user=True).per_user["mrr@1"].tolist()
    [1.0, 0.0]
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        users: int = 0,
        users_without_recommendations: int = 0,
        standard_errors: Mapping[str, float] | None = None,
        per_user: pd.DataFrame | DataFrame | None = None,
    ):
        super().__init__(metrics)
        self.users = users
        self.users_without_recommendations = users_without_recommendations
        self.standard_errors = dict(standard_errors or {})
        self.per_user = per_user


def ranking_metrics(
    recommendations: Table,
    truth: Table,
    metrics: Sequence[str] | str = DEFAULT_METRICS,
    k: Sequence[int] | int = 10,
    *,
    train: Table | None = None,
    catalogue: Table | Iterable[Any] | None = None,
    item_features: Table | None = None,
    user_col: str = "user",
    item_col: str = "item",
    rank_col: str | None = None,
    score_col: str | None = None,
    relevance_col: str | None = None,
    map_divisor: Literal["relevant", "min", "k"] = "relevant",
    ndcg_ideal: Literal["achievable", "k"] = "achievable",
    gain: Literal["linear", "exponential"] = "linear",
    ties: Literal["item_descending", "item_ascending", "pessimistic"] = "item_descending",
    on_duplicates: Literal["raise", "first"] = "raise",
    candidates: int | None = None,
    per_user: bool = False,
) -> RankingMetrics:
    """Compute ranking metrics of recommendations for several values of k in one pass.

    The result is identical to the last bit for any row order and number of partitions: sums over
    users are exact and rounded once.

    Parameters
    ----------
    recommendations : pandas, Arrow, Polars or Spark table, or FeatureTable
        One row per recommended item of a user, with a rank or a score.
    truth : as `recommendations`
        One row per relevant item of a user. Duplicate pairs count once.
    metrics : str or sequence of str
        Averaged over the users with relevant items; users without a recommendation count as 0:
        ``precision``, ``r_precision`` (divided by the smaller of k and the relevant items),
        ``recall``, ``f1``, ``hit_rate``, ``map``, ``mrr``, ``ndcg``, ``auc`` (pairs of hit and miss
        inside the first k), ``partial_auc`` and ``pap`` (pairs with the first k misses; both look
        beyond rank k), ``covered_users``; ``gauc`` (area under the ROC curve of each whole list,
        weighted by its hits, over the users with hits and misses; it has no k).
        Averaged over the users with recommendations: ``novelty`` (self-information in bits),
        ``popularity`` (rows of `train`), ``serendipity``, ``intra_list_diversity``,
        ``sufficient_recommendations`` (lists with at least k items), ``unrepeated_recommendations``
        (lists without duplicates).
        Over all lists: ``coverage`` (share of the catalogue) and ``gini`` (0: all items of the
        catalogue equally often).
    k : int or sequence of int, default 10
        Lengths at which lists are cut off. A list may be shorter.
    train : as `recommendations`, optional
        Training rows of the model: for novelty, popularity and serendipity.
    catalogue : table with `item_col`, or iterable of ids, optional
        Items that can be recommended. Default: those of `train`.
    item_features : table, optional
        `item_col` and categorical columns. The distance of two items is the number of columns in
        which they differ. Pairs with an item that the table lacks are ignored.
    user_col, item_col : str
    rank_col : str, optional
        Column with integer ranks; 1 is the best. Default: ``"rank"`` unless `score_col` is passed.
    score_col : str, optional
        Column with scores; the highest is the best and NaN the worst.
    relevance_col : str, optional
        Column of `truth` with graded relevance for ``ndcg``; items with 0 are not relevant.
    map_divisor : {"relevant", "min", "k"}, default "relevant"
        Divisor of a user's sum of precisions: the relevant items (RecTools, trec_eval), the smaller
        of them and k (RePlay, RecBole), or k.
    ndcg_ideal : {"achievable", "k"}, default "achievable"
        The ideal list has the user's relevant items (RePlay, trec_eval, scikit-learn), or k
        relevant items (RecTools' default).
    gain : {"linear", "exponential"}, default "linear"
        Gain of a relevance: the relevance itself (trec_eval, scikit-learn), or
        ``2 ** relevance - 1``.
    ties : {"item_descending", "item_ascending", "pessimistic"}, default "item_descending"
        Order of equal scores of a user: by item id, or relevant items last, so that a model that
        scores all items alike gets the worst metric.
    on_duplicates : {"raise", "first"}, default "raise"
        If an item is recommended to a user twice: raise an error, or keep its best rank and move
        later items up.
    candidates : int, optional
        Number of sampled negatives that each list was ranked among. The names then look like
        ``"ndcg@10/100neg"``, because such metrics are biased and may order models differently than
        a ranking of the whole catalogue.
    per_user : bool, default False
        Also return the values of each user.

    Returns
    -------
    RankingMetrics
        A dict from names such as ``"ndcg@10"`` to float.

    Raises
    ------
    UsageError
        For missing columns, null ids, ids of different types, duplicates, invalid ranks, unknown
        metrics, and metrics whose table is missing.

    References
    ----------
    Krichene and Rendle, "On Sampled Metrics for Item Recommendation", KDD 2020.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.metrics import ranking_metrics
    >>> reco = pd.DataFrame({"user": [1, 1, 2, 2], "item": [10, 20, 20, 30], "rank": [1, 2, 1, 2]})
    >>> truth = pd.DataFrame({"user": [1, 2, 3], "item": [20, 20, 10]})
    >>> result = ranking_metrics(reco, truth, ["hit_rate", "mrr"], k=[1, 2])
    >>> {name: round(value, 3) for name, value in result.items()}
    {'hit_rate@1': 0.333, 'hit_rate@2': 0.667, 'mrr@1': 0.333, 'mrr@2': 0.5}
    >>> result.users, result.users_without_recommendations
    (3, 1)
    """
    options = _options(
        metrics, k, map_divisor, ndcg_ideal, gain, ties, on_duplicates, rank_col, score_col
    )
    if relevance_col is not None and ndcg_ideal == "k":
        raise UsageError(
            "ndcg_ideal='k' needs relevant items without grades; leave out relevance_col=",
            code="argument-conflict",
            argument="ndcg_ideal",
        )
    if candidates is not None:
        check_positive("candidates", candidates)
    value_col = score_col or rank_col or "rank"
    reco = as_table(recommendations, "recommendations", [user_col, item_col, value_col])
    known = as_table(truth, "truth", [user_col, item_col, *filter(None, [relevance_col])])
    facts = None
    if options.needs(*NEEDED_TABLES):
        tables = {"train": train, "catalogue": catalogue, "item_features": item_features}
        _check_needed(options, {name for name, table in tables.items() if table is not None})
        facts = item_facts(train, catalogue, item_features, user_col, item_col)
    if isinstance(reco, pa.Table) != isinstance(known, pa.Table):
        raise UsageError(
            "recommendations and truth must both be Spark DataFrames, or neither; got "
            f"{type(recommendations)} and {type(truth)}",
            code="argument-type",
            argument="truth",
        )
    rankings_class = _InMemoryRankings if isinstance(reco, pa.Table) else _SparkRankings
    rankings = rankings_class(
        reco, known, _ColumnNames(user_col, item_col, value_col, relevance_col), options, facts
    )
    sums = rankings.sums()
    if not sums.users:
        raise UsageError(
            "The truth has no relevant items, so the metrics are undefined",
            code="data-empty",
        )
    suffix = f"/{candidates}neg" if candidates else ""
    return _result(sums, options, facts, rankings.per_user(suffix) if per_user else None, suffix)


def compare_rankings(
    first: RankingMetrics | pd.DataFrame,
    second: RankingMetrics | pd.DataFrame,
    metric: str,
    *,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    user_col: str = "user",
) -> dict[str, float]:
    """Compare two models with a paired bootstrap over the users.

    Parameters
    ----------
    first, second : RankingMetrics with ``per_user``, or its pandas DataFrame
        Metrics of both models for the same truth.
    metric : str
        Such as ``"ndcg@10"``.
    samples : int, default 2000
        Number of bootstrap samples; each draws as many users as the data has.
    confidence : float, default 0.95
        Confidence level of the interval.
    seed : int, default 0
    user_col : str, default "user"

    Returns
    -------
    dict of str to float
        ``first`` and ``second`` (means), ``difference`` (second minus first), ``low`` and ``high``
        (its interval), ``p_value`` (two-sided, of no difference) and ``users``.

    Raises
    ------
    UsageError
        If the users differ, or one side has no values of the metric.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.metrics import compare_rankings
    >>> users = list(range(100))
    >>> old = pd.DataFrame({"user": users, "ndcg@10": [0.2, 0.4] * 50})
    >>> new = pd.DataFrame({"user": users, "ndcg@10": [0.3, 0.4] * 50})
    >>> result = compare_rankings(old, new, "ndcg@10")
    >>> round(result["difference"], 3), result["p_value"] < 0.01
    (0.05, True)
    """
    check_positive("samples", samples)
    if not 0 < confidence < 1:
        raise UsageError(
            f"confidence must be between 0 and 1, got {confidence!r}",
            code="argument-value",
            argument="confidence",
        )
    sides = [
        _values_by_user(side, metric, user_col, name)
        for side, name in ((first, "first"), (second, "second"))
    ]
    if not sides[0].index.equals(sides[1].index):
        missing = sides[0].index.symmetric_difference(sides[1].index)
        raise UsageError(
            f"Both must have the same users, but {len(missing)} are in one only, such as "
            f"{missing[0]!r}",
            code="data-schema",
        )
    means = [math.fsum(side) / len(side) for side in sides]
    differences = sides[1].to_numpy() - sides[0].to_numpy()
    random, count = np.random.default_rng(seed), len(differences)
    step = max((1 << 22) // count, 1)
    drawn = np.concatenate(
        [
            differences[random.integers(0, count, (min(step, samples - start), count))].mean(axis=1)
            for start in range(0, samples, step)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    one_sided = min(float(np.mean(drawn <= 0)), float(np.mean(drawn >= 0)))
    return {
        "first": means[0],
        "second": means[1],
        "difference": math.fsum(differences) / count,
        "low": float(low),
        "high": float(high),
        "p_value": min(1.0, 2 * max(one_sided, 1 / samples)),
        "users": float(count),
    }


def _values_by_user(
    side: RankingMetrics | pd.DataFrame, metric: str, user_col: str, name: str
) -> pd.Series:
    frame: Any = side.per_user if isinstance(side, RankingMetrics) else side  # Any: either library
    if frame is None:
        raise UsageError(
            f"{name} has no values by user; pass per_user=True to ranking_metrics",
            code="argument-value",
            argument=name,
        )
    frame = frame.toPandas() if hasattr(frame, "toPandas") else frame
    missing = [column for column in (user_col, metric) if column not in frame.columns]
    if missing:
        raise UsageError(
            f"{name} has no column {missing[0]!r}; its columns are {list(frame.columns)}",
            code="column-missing",
            column=missing[0],
        )
    values = frame.set_index(user_col)[metric].dropna().sort_index()
    if values.empty:
        raise UsageError(f"{name} has no user with a value of {metric!r}", code="data-empty")
    return values


# -- arguments -------------------------------------------------------------------------------------


def _options(
    metrics: Sequence[str] | str,
    k: Sequence[int] | int,
    map_divisor: str,
    ndcg_ideal: str,
    gain: str,
    ties: str,
    on_duplicates: str,
    rank_col: str | None,
    score_col: str | None,
) -> ListOptions:
    names = (metrics,) if isinstance(metrics, str) else tuple(dict.fromkeys(metrics))
    ks = (k,) if isinstance(k, int | np.integer) else tuple(k)
    for name in names:
        if name not in METRICS:
            raise UsageError(
                f"There is no ranking metric {name!r}; choose from {', '.join(METRICS)}",
                code="name-unknown",
                name=name,
            )
    if not names or not ks:
        raise UsageError("Name at least one metric and one k", code="argument-value")
    for value, name, allowed in (
        (map_divisor, "map_divisor", ("relevant", "min", "k")),
        (ndcg_ideal, "ndcg_ideal", ("achievable", "k")),
        (gain, "gain", ("linear", "exponential")),
        (ties, "ties", ("item_descending", "item_ascending", "pessimistic")),
        (on_duplicates, "on_duplicates", ("raise", "first")),
    ):
        check_choice(name, value, allowed)
    if rank_col is not None and score_col is not None:
        raise UsageError(
            "Pass rank_col= or score_col=, not both", code="argument-conflict", argument="rank_col"
        )
    return ListOptions(
        names,
        tuple(sorted({check_positive("k", each) for each in ks})),
        map_divisor,
        ndcg_ideal,
        gain,
        ties,
        on_duplicates,
        is_ranked=score_col is None,
    )


def _check_needed(options: ListOptions, passed: set[str]) -> None:
    for name in options.metrics:
        needed = NEEDED_TABLES.get(name, ())
        if needed and passed.isdisjoint(needed):
            raise UsageError(
                f"The metric {name!r} needs {'= or '.join(needed)}=; pass it",
                code="argument-missing",
                argument=needed[0],
            )


# -- sums over users -------------------------------------------------------------------------------


@dataclass
class _MetricSums:
    """Sums of metrics over users, which can be merged without rounding.

    Attributes
    ----------
    moments : dict of str to ExactMoments
    users, without_list : int
    gauc : (ExactMoments, ExactMoments)
        Moments of areas times weights, and of weights.
    items : dict of int to dict
        By k: how often each item is in the first k ranks.
    """

    moments: dict[str, ExactMoments] = field(default_factory=dict)
    users: int = 0
    without_list: int = 0
    gauc: tuple[ExactMoments, ExactMoments] = (ExactMoments(), ExactMoments())
    items: dict[int, pa.Table] = field(default_factory=dict)

    @classmethod
    def of(cls, values: UserValues) -> _MetricSums:
        moments = {}
        for key, column in values.values.items():
            if key != "gauc":
                moments[key] = ExactMoments.of(column[~np.isnan(column)])
        gauc = (ExactMoments(), ExactMoments())
        if "gauc" in values.values:
            counts = ~np.isnan(values.values["gauc"])
            areas, weights = values.values["gauc"][counts], values.weights[counts]
            gauc = ExactMoments.of(areas * weights), ExactMoments.of(weights)
        items = {
            k: pa.table({"item": ids, "count": pa.array(counts)})
            for k, (ids, counts) in values.items.items()
        }
        without = int((values.has_truth & ~values.has_list).sum())
        return cls(moments, int(values.has_truth.sum()), without, gauc, items)

    def merge(self, other: _MetricSums) -> None:
        for key, moments in other.moments.items():
            self.moments[key] = self.moments.get(key, ExactMoments()) + moments
        self.users += other.users
        self.without_list += other.without_list
        self.gauc = self.gauc[0] + other.gauc[0], self.gauc[1] + other.gauc[1]
        for k, table in other.items.items():
            both = [self.items[k], table] if k in self.items else [table]
            summed = pa.concat_tables(both).group_by("item").aggregate([("count", "sum")])
            self.items[k] = summed.select(["item", "count_sum"]).rename_columns(["item", "count"])

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield batches with the schema ``_ROWS``: the sums as JSON, then the item counts by k."""
        sums = {
            "moments": {k: [m.count, m.total, m.squares] for k, m in self.moments.items()},
            "users": [self.users, self.without_list],
            "gauc": [[m.count, m.total, m.squares] for m in self.gauc],
        }
        yield pa.record_batch([[json.dumps(sums)], [0], [b""]], schema=_ROWS)
        for k, table in self.items.items():
            for start in range(0, table.num_rows, 1 << 20):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table.slice(start, 1 << 20))
                yield pa.record_batch([[""], [k], [sink.getvalue().to_pybytes()]], schema=_ROWS)

    @classmethod
    def from_row(cls, sums: str, k: int, items: bytes) -> _MetricSums:
        if not sums:
            return cls(items={k: pa.ipc.open_stream(items).read_all()})
        read = json.loads(sums)
        if "error" in read:
            raise UsageError(read["error"], code=read["code"])
        moments = {key: ExactMoments(*each) for key, each in read["moments"].items()}
        first, second = (ExactMoments(*each) for each in read["gauc"])
        users, without_list = read["users"]
        return cls(moments, users, without_list, (first, second))


_ROWS = pa.schema([("sums", pa.string()), ("k", pa.int64()), ("items", pa.binary())])


def _result(
    sums: _MetricSums,
    options: ListOptions,
    facts: ItemFacts | None,
    frame: pd.DataFrame | DataFrame | None,
    suffix: str,
) -> RankingMetrics:
    result: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name in options.metrics:
        if name == "gauc":
            areas, weights = sums.gauc
            result[name + suffix] = areas.total / weights.total if weights.total else math.nan
            continue
        for k in options.ks:
            key = f"{name}@{k}"
            if name in ("coverage", "gini"):
                assert facts is not None
                result[key + suffix] = _concentration(name, sums.items.get(k), facts)
            else:
                moments = sums.moments.get(key, ExactMoments())
                result[key + suffix] = moments.mean
                errors[key + suffix] = moments.standard_error
    return RankingMetrics(result, sums.users, sums.without_list, errors, frame)


def _concentration(name: str, items: pa.Table | None, facts: ItemFacts) -> float:
    """Return the metric `name`: catalogue coverage, or the Gini index of recommendation counts."""
    if items is None or not items.num_rows:
        return 0.0 if name == "coverage" else math.nan
    catalogue = facts.items.filter(pa.array(facts.in_catalogue))
    listed = items.filter(pc.is_in(items["item"], value_set=catalogue))
    counts = np.sort(np.asarray(listed["count"]))
    size, used = facts.catalogue_size, len(counts)
    if name == "coverage":
        return used / size
    positions = np.arange(size - used + 1, size + 1)
    weighted = sum(int(each) for each in (2 * positions - size - 1) * counts)
    total = size * int(counts.sum())
    return weighted / total if total else math.nan


# -- tables ----------------------------------------------------------------------------------------


class _ColumnNames(NamedTuple):
    """Column names of the recommendations and the ground truth."""

    user: str
    item: str
    value: str
    relevance: str | None


class _InMemoryRankings:
    """Recommendations and ground truth as Arrow tables.

    Parameters
    ----------
    reco, truth : pyarrow.Table
    columns : _ColumnNames
    options : ListOptions
    facts : ItemFacts or None
    """

    def __init__(
        self,
        reco: pa.Table,
        truth: pa.Table,
        columns: _ColumnNames,
        options: ListOptions,
        facts: ItemFacts | None,
    ):
        self._user_col = columns.user
        users = ids(reco, columns.user, "recommendations"), ids(truth, columns.user, "truth")
        items = ids(reco, columns.item, "recommendations"), ids(truth, columns.item, "truth")
        check_same_type(users[0].type, users[1].type, "truth", columns.user)
        check_same_type(items[0].type, items[1].type, "truth", columns.item)
        values = numbers(reco, columns.value, "recommendations")
        relevance = pa.chunked_array([np.ones(truth.num_rows)])
        if columns.relevance is not None:
            relevance = numbers(truth, columns.relevance, "truth")
        relevant = pa.table({"user": users[1], "item": items[1], "relevance": relevance})
        self.values = values_of_users(
            pa.table({"user": users[0], "item": items[0], "value": values}),
            relevant.filter(pc.greater(relevance, 0)),
            options,
            facts,
        )

    def sums(self) -> _MetricSums:
        return _MetricSums.of(self.values)

    def per_user(self, suffix: str) -> pd.DataFrame:
        import pandas as pd

        values = {key + suffix: column for key, column in self.values.values.items()}
        return pd.DataFrame({self._user_col: self.values.users.to_pandas(), **values})


class _SparkRankings:
    """Recommendations and ground truth as Spark DataFrames; each user's rows are in one task."""

    def __init__(
        self,
        reco: DataFrame,
        truth: DataFrame,
        columns: _ColumnNames,
        options: ListOptions,
        facts: ItemFacts | None,
    ):
        types = _types_on_spark(reco, "recommendations", columns, columns.value)
        others = _types_on_spark(truth, "truth", columns, columns.relevance)
        check_same_type(types[0], others[0], "truth", columns.user)
        check_same_type(types[1], others[1], "truth", columns.item)
        rows = _selected(reco, columns, types, columns.value, is_truth=False)
        rows = rows.unionAll(_selected(truth, columns, types, columns.relevance, is_truth=True))
        self._rows = rows.repartition("user")
        self._work = partial(_values_of_task, columns, options, facts)
        self._user = f"{quoted(columns.user)} {_SPARK_IDS[types[0]]}"
        self._keys = options.keys_of_users()

    def sums(self) -> _MetricSums:
        work = silent_when_closed(partial(_states_of_task, self._work))
        rows = self._rows.mapInArrow(work, "sums string, k bigint, items binary").collect()
        state = _MetricSums()
        for row in rows:
            state.merge(_MetricSums.from_row(row["sums"], row["k"], row["items"]))
        return state

    def per_user(self, suffix: str) -> DataFrame:
        columns = [self._user, *(f"{quoted(key + suffix)} double" for key in self._keys)]
        work = silent_when_closed(partial(_users_of_task, self._work, self._keys))
        return self._rows.mapInArrow(work, ", ".join(columns))


_SPARK_IDS = {pa.int64(): "bigint", pa.string(): "string"}


def _types_on_spark(
    frame: DataFrame, what: str, columns: _ColumnNames, number: str | None
) -> tuple[pa.DataType, pa.DataType]:
    """Return the types of user and item ids; raise for unsuitable columns."""
    from bigdl.orca.cluster.versions import arrow_schema

    schema = arrow_schema(frame.schema)
    if number is not None:
        numbers(schema.empty_table(), number, what)
    user, item = (schema.field(name).type for name in (columns.user, columns.item))
    return id_type(user, what, columns.user), id_type(item, what, columns.item)


def _selected(
    frame: DataFrame,
    columns: _ColumnNames,
    types: tuple[pa.DataType, pa.DataType],
    number: str | None,
    *,
    is_truth: bool,
) -> DataFrame:
    from pyspark.sql import functions as F

    return frame.select(
        F.col(quoted(columns.user)).cast(_SPARK_IDS[types[0]]).alias("user"),
        F.col(quoted(columns.item)).cast(_SPARK_IDS[types[1]]).alias("item"),
        (F.lit(1.0) if number is None else F.col(quoted(number)).cast("double")).alias("value"),
        F.lit(is_truth).alias("is_truth"),
    )


def _values_of_task(
    columns: _ColumnNames,
    options: ListOptions,
    facts: ItemFacts | None,
    batches: Iterable[pa.RecordBatch],
) -> UserValues | None:
    """Return the metrics of the users in a Spark task, or None if it has no rows."""
    pa.set_cpu_count(1)
    received = [batch for batch in batches if batch.num_rows]
    if not received:
        return None
    rows = pa.Table.from_batches(received)
    is_truth = rows["is_truth"]
    rows = rows.drop_columns(["is_truth"])
    names = [columns.user, columns.item, "value"]
    reco = rows.filter(pc.invert(is_truth)).rename_columns([*names[:2], columns.value])
    truth = rows.filter(is_truth).rename_columns([*names[:2], columns.relevance or "value"])
    return _InMemoryRankings(reco, truth, columns, options, facts).values


def _states_of_task(
    work: Callable[[Iterable[pa.RecordBatch]], UserValues | None],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    try:
        values = work(batches)
    except UsageError as error:
        refused = json.dumps({"error": str(error), "code": error.code})
        yield pa.record_batch([[refused], [0], [b""]], schema=_ROWS)
    else:
        if values is not None:
            yield from _MetricSums.of(values).to_batches()


def _users_of_task(
    work: Callable[[Iterable[pa.RecordBatch]], UserValues | None],
    keys: Sequence[str],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    values = work(batches)
    if values is not None:
        columns = [values.users, *(pa.array(values.values[key]) for key in keys)]
        yield pa.record_batch(columns, names=["user", *keys])
