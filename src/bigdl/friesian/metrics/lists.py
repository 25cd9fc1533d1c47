"""Metrics of recommendation lists per user, computed in NumPy.

Rows become a matrix of users by ranks, for some thousand users at a time. All values of a user are
computed from the user's row alone, in rank order, so they do not depend on the other users of the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.friesian.metrics.items import ItemFacts
from bigdl.friesian.metrics.tables import index_in, sorted_codes

__all__ = ["METRICS", "ListOptions", "UserValues", "values_of_users"]

_USERS_AT_ONCE = 1 << 14
_PAIRS_AT_ONCE = 1 << 22

Matrix: TypeAlias = np.ndarray


@dataclass(frozen=True)
class ListOptions:
    """Options of the ranking metrics; see :func:`~bigdl.friesian.metrics.ranking_metrics`."""

    metrics: tuple[str, ...]
    ks: tuple[int, ...]
    map_divisor: str = "relevant"
    ndcg_ideal: str = "achievable"
    gain: str = "binary"
    ties: str = "item_descending"
    on_duplicates: str = "raise"
    is_ranked: bool = False

    @property
    def width(self) -> int:
        """Number of rank columns in the matrices: the largest k."""
        return max(self.ks)

    def keys_of_users(self) -> list[str]:
        """Return the names of the per-user metrics, such as ``"ndcg@10"``."""
        keys = [f"{name}@{k}" for name in self.metrics if name in _OF_USERS for k in self.ks]
        return [*keys, "gauc"] if "gauc" in self.metrics else keys

    def needs(self, *names: str) -> bool:
        """Return True if any metric in `names` is requested."""
        return not set(names).isdisjoint(self.metrics)


@dataclass
class UserValues:
    """Metric values of a batch of users.

    Attributes
    ----------
    users : pyarrow.Array
    values : dict of str to numpy.ndarray of float64
        By key such as ``"ndcg@10"``; NaN for users that the metric excludes.
    weights : numpy.ndarray of float64
        Relevant items in each user's list, the weights of ``"gauc"``.
    has_truth, has_list : numpy.ndarray of bool
    items : dict of int to (pyarrow.Array, numpy.ndarray of int64)
        By k: recommended items and how often each one is in the first k ranks.
    """

    users: pa.Array
    values: dict[str, np.ndarray]
    weights: np.ndarray
    has_truth: np.ndarray
    has_list: np.ndarray
    items: dict[int, tuple[pa.Array, np.ndarray]]


@dataclass
class _RankedLists:
    """Recommendation lists as user-by-rank matrices, with running sums over the ranks."""

    options: ListOptions
    hits: Matrix  # float64, 1 where the item at the rank is relevant
    present: Matrix  # bool, where the list has an item
    gains: Matrix  # float64, relevance of the item at the rank, after the gain function
    item_codes: Matrix  # int64, index into the facts; len(facts) where unknown or absent
    relevant: np.ndarray  # int64, relevant items of each user
    ideal_gains: Matrix  # float64, the user's gains in falling order
    facts: ItemFacts | None
    repeated: Matrix  # bool, True where the item already has an earlier rank
    pairs: Callable[[int, int | None], np.ndarray]

    def __post_init__(self) -> None:
        ranks = np.arange(1, self.options.width + 1)
        self.ranks = ranks
        self.discounts = 1.0 / np.log2(ranks + 1)
        self.hit_counts = np.cumsum(self.hits, axis=1)
        self.lengths = np.cumsum(self.present, axis=1)

    @cached_property
    def precision_sums(self) -> Matrix:
        """Running sums of the precision at each hit."""
        return np.cumsum(self.hits * (self.hit_counts / self.ranks), axis=1)

    @cached_property
    def discounted_gains(self) -> Matrix:
        """Running sums of the gains, each divided by the logarithm of its rank."""
        return np.cumsum(self.gains * self.discounts, axis=1)

    @cached_property
    def ideal_discounted_gains(self) -> Matrix:
        """Running sums of discounted gains for the ideal list of each user."""
        return np.cumsum(self.ideal_gains * self.discounts, axis=1)

    def mean_of(self, values: np.ndarray, k: int) -> np.ndarray:
        """Return the mean of the per-item `values` over each user's first `k` ranks."""
        sums = np.cumsum(np.where(self.present, values[self.item_codes], 0.0), axis=1)[:, k - 1]
        return sums / np.maximum(self.lengths[:, k - 1], 1)

    def known(self) -> ItemFacts:
        assert self.facts is not None  # checked with the arguments
        return self.facts


def _precision(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.hit_counts[:, k - 1] / k


def _r_precision(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.hit_counts[:, k - 1] / np.minimum(lists.relevant, k)


def _recall(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.hit_counts[:, k - 1] / lists.relevant


def _f1(lists: _RankedLists, k: int) -> np.ndarray:
    precision, recall = _precision(lists, k), _recall(lists, k)
    return 2 * precision * recall / np.where(precision + recall > 0, precision + recall, 1.0)


def _hit_rate(lists: _RankedLists, k: int) -> np.ndarray:
    return (lists.hit_counts[:, k - 1] > 0).astype(np.float64)


def _map(lists: _RankedLists, k: int) -> np.ndarray:
    sums = lists.precision_sums[:, k - 1]
    divisors = {"relevant": lists.relevant, "min": np.minimum(lists.relevant, k)}
    return sums / divisors.get(lists.options.map_divisor, np.full(len(sums), k))


def _mrr(lists: _RankedLists, k: int) -> np.ndarray:
    first = np.argmax(lists.hits[:, :k], axis=1)
    return np.where(lists.hit_counts[:, k - 1] > 0, 1.0 / (first + 1), 0.0)


def _ndcg(lists: _RankedLists, k: int) -> np.ndarray:
    gained = lists.discounted_gains[:, k - 1]
    if lists.options.ndcg_ideal == "k":
        return gained / np.cumsum(lists.discounts)[k - 1]
    return gained / lists.ideal_discounted_gains[:, k - 1]


def _auc(lists: _RankedLists, k: int) -> np.ndarray:
    hits = lists.hit_counts[:, k - 1]
    misses = lists.lengths[:, k - 1] - hits
    above = lists.lengths - lists.hit_counts  # misses at or above each rank
    ordered = (lists.hits * (misses[:, None] - above))[:, :k].sum(axis=1)  # whole numbers
    shares = ordered / np.maximum(hits * misses, 1)
    return np.where(hits == 0, 0.0, np.where(misses == 0, 1.0, shares))


def _partial_auc(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.pairs(k, None) / (k * lists.relevant)


def _pap(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.pairs(k, k) / (k * np.minimum(lists.relevant, k))


def _covered(lists: _RankedLists, k: int) -> np.ndarray:
    return (lists.lengths[:, k - 1] > 0).astype(np.float64)


def _sufficient(lists: _RankedLists, k: int) -> np.ndarray:
    return (lists.lengths[:, k - 1] >= k).astype(np.float64)


def _unrepeated(lists: _RankedLists, k: int) -> np.ndarray:
    return 1.0 - lists.repeated[:, :k].max(axis=1)


def _novelty(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.mean_of(lists.known().self_information, k)


def _popularity(lists: _RankedLists, k: int) -> np.ndarray:
    return lists.mean_of(lists.known().counts, k)


def _serendipity(lists: _RankedLists, k: int) -> np.ndarray:
    facts = lists.known()
    expected = (facts.catalogue_size + 1 - lists.ranks) / facts.catalogue_size
    surprise = np.maximum(expected - facts.popularity[lists.item_codes], 0.0) * lists.hits
    return np.cumsum(surprise, axis=1)[:, k - 1] / np.maximum(lists.lengths[:, k - 1], 1)


def _diversity(lists: _RankedLists, k: int) -> np.ndarray:
    features = lists.known().features
    features = np.vstack([features, np.full(features.shape[1], -1)])
    users, result = len(lists.hits), np.zeros(len(lists.hits))
    step = max(_PAIRS_AT_ONCE // max(k * k * features.shape[1], 1), 1)
    upper = np.triu(np.ones((k, k), dtype=bool), 1)
    for start in range(0, users, step):
        part = slice(start, start + step)
        codes = features[lists.item_codes[part, :k]]
        known = lists.present[part, :k] & (codes[:, :, 0] >= 0)
        pairs = known[:, :, None] & known[:, None, :] & upper
        distances = (codes[:, :, None, :] != codes[:, None, :, :]).sum(axis=3)
        counts = pairs.sum(axis=(1, 2))
        result[part] = (distances * pairs).sum(axis=(1, 2)) / np.maximum(counts, 1)
    return result


# The metrics that are means over users with relevant items, and over users with a list.
_OF_TRUTH: dict[str, Callable[[_RankedLists, int], np.ndarray]] = {
    "precision": _precision,
    "r_precision": _r_precision,
    "recall": _recall,
    "f1": _f1,
    "hit_rate": _hit_rate,
    "map": _map,
    "mrr": _mrr,
    "ndcg": _ndcg,
    "auc": _auc,
    "partial_auc": _partial_auc,
    "pap": _pap,
    "covered_users": _covered,
}
_OF_LISTS: dict[str, Callable[[_RankedLists, int], np.ndarray]] = {
    "novelty": _novelty,
    "popularity": _popularity,
    "serendipity": _serendipity,
    "intra_list_diversity": _diversity,
    "sufficient_recommendations": _sufficient,
    "unrepeated_recommendations": _unrepeated,
}
_OF_USERS = {**_OF_TRUTH, **_OF_LISTS}
METRICS = (*_OF_USERS, "gauc", "coverage", "gini")


# -- matrices from rows ----------------------------------------------------------------------------


@dataclass
class _RankedRows:
    """Recommendations sorted by user and rank, and relevant user-item pairs, as integer codes."""

    users: pa.Array
    items: pa.Array
    user: np.ndarray  # int64, of each recommended row
    item: np.ndarray
    rank: np.ndarray  # 1 is the best
    value: np.ndarray  # the score, or minus the rank: a higher one is better
    hit: np.ndarray  # bool
    gain: np.ndarray
    repeated: np.ndarray  # bool
    relevant: np.ndarray  # int64, relevant items of each user
    truth_user: np.ndarray  # in the order of (user, falling gain)
    truth_gain: np.ndarray


def _starts(sorted_codes: np.ndarray) -> np.ndarray:
    """Return the start index of each element's run of equal values."""
    is_first = np.append(True, sorted_codes[1:] != sorted_codes[:-1])[: len(sorted_codes)]
    return np.maximum.accumulate(np.where(is_first, np.arange(len(sorted_codes)), 0))


def _rows_of(reco: pa.Table, truth: pa.Table, options: ListOptions) -> _RankedRows:
    users, (user, truth_user) = sorted_codes(reco["user"], truth["user"])
    items, (item, truth_item) = sorted_codes(reco["item"], truth["item"])
    value = np.asarray(reco["value"], dtype=np.float64)
    relevance = np.asarray(truth["relevance"], dtype=np.float64)
    gain = np.exp2(relevance) - 1 if options.gain == "exponential" else relevance

    # Of duplicate pairs the highest relevance counts.
    pairs = truth_user * len(items) + truth_item
    order = np.lexsort((-gain, pairs))
    order = order[_starts(pairs[order]) == np.arange(len(order))]
    pairs, gain = pairs[order], gain[order]
    listed_pairs = user * len(items) + item
    at = np.searchsorted(pairs, listed_pairs)
    hit = np.append(pairs, -1)[at] == listed_pairs
    row_gain = np.where(hit, np.append(gain, 0.0)[at], 0.0)

    by_item = {
        "item_descending": -item,
        "item_ascending": item,
        "pessimistic": hit * len(items) + item,  # relevant items last among equal scores
    }
    if options.is_ranked:
        value = -value
    order = np.lexsort((by_item[options.ties], -value, user))  # NaN is sorted to the end
    user, item, value, listed_pairs = user[order], item[order], value[order], listed_pairs[order]
    hit, row_gain = hit[order], row_gain[order]
    rank = np.arange(len(user)) - _starts(user) + 1
    if options.is_ranked:
        rank = _checked_ranks(users, user, -value)
    repeated = _repeated(listed_pairs)
    if repeated.any() and options.on_duplicates == "raise":
        index = int(np.flatnonzero(repeated)[0])
        raise UsageError(
            f"The recommendations have item {items[item[index]].as_py()!r} twice for user "
            f"{users[user[index]].as_py()!r}; drop duplicates, or pass on_duplicates='first'",
            code="data-order",
        )
    ranked_truth = np.lexsort((-gain, pairs // len(items)))
    truth_user = (pairs // len(items))[ranked_truth]
    return _RankedRows(
        users=users,
        items=items,
        user=user,
        item=item,
        rank=rank,
        value=value,
        hit=hit,
        gain=row_gain,
        repeated=repeated,
        relevant=np.bincount(truth_user, minlength=len(users)),
        truth_user=truth_user,
        truth_gain=gain[ranked_truth],
    )


def _repeated(pairs: np.ndarray) -> np.ndarray:
    """Return a mask of rows whose user-item pair occurs in an earlier row."""
    order = np.argsort(pairs, kind="stable")
    later = _starts(pairs[order]) != np.arange(len(pairs))
    result = np.zeros(len(pairs), dtype=bool)
    result[order[later]] = True
    return result


def _checked_ranks(users: pa.Array, user: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the ranks as integers; raise unless they are distinct positive integers."""
    whole = np.isfinite(rank) & (rank >= 1) & (rank == np.floor(rank))
    if not whole.all():
        index = int(np.flatnonzero(~whole)[0])
        raise UsageError(
            f"Ranks must be whole numbers from 1, but user {users[user[index]].as_py()!r} has "
            f"{rank[index]:g}; pass score_col= if the column has scores",
            code="data-value",
        )
    twice = (user[1:] == user[:-1]) & (rank[1:] == rank[:-1])
    if twice.any():
        index = int(np.flatnonzero(twice)[0])
        raise UsageError(
            f"User {users[user[index]].as_py()!r} has rank {rank[index]:g} twice; give each "
            "recommended item of a user a different rank",
            code="data-order",
        )
    return rank.astype(np.int64)


def _without_repeated(rows: _RankedRows) -> _RankedRows:
    """Remove repeated items from the lists, and move later items up."""
    if not rows.repeated.any():
        return rows
    dropped = np.cumsum(rows.repeated)
    starts = _starts(rows.user)
    earlier = dropped - np.append(0, dropped)[starts]
    keep = ~rows.repeated
    return _RankedRows(
        users=rows.users,
        items=rows.items,
        user=rows.user[keep],
        item=rows.item[keep],
        rank=(rows.rank - earlier)[keep],
        value=rows.value[keep],
        hit=rows.hit[keep],
        gain=rows.gain[keep],
        repeated=rows.repeated[keep],
        relevant=rows.relevant,
        truth_user=rows.truth_user,
        truth_gain=rows.truth_gain,
    )


def _pair_counts(rows: _RankedRows) -> Callable[[int, int | None], np.ndarray]:
    """Return a function that counts, per user, pairs of a hit and a miss at a later rank.

    For each hit with fewer than k misses above it, the function adds k minus those misses, for at
    most the first ``limit`` hits.
    """
    starts = _starts(rows.user)
    hits = np.cumsum(rows.hit)
    hits_before = hits - rows.hit - np.append(0, hits)[starts]
    misses_above = np.arange(len(rows.user)) - starts - hits_before

    def count(k: int, limit: int | None) -> np.ndarray:
        counts = rows.hit & (misses_above < k)
        if limit is not None:
            counts &= hits_before < limit
        weights = np.where(counts, k - misses_above, 0)
        return np.bincount(rows.user, weights=weights, minlength=len(rows.users))

    return count


def _user_auc(rows: _RankedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the AUC and the number of hits of each user's list; ties count as one half."""
    count = len(rows.users)
    value = np.where(np.isnan(rows.value), -np.inf, rows.value)
    order = np.lexsort((value, rows.user))
    user, value, hit = rows.user[order], value[order], rows.hit[order]
    position = np.arange(len(user)) - _starts(user)
    is_first = np.append(True, (user[1:] != user[:-1]) | (value[1:] != value[:-1]))[: len(user)]
    group = np.cumsum(is_first) - 1
    sizes = np.bincount(group) if len(group) else group
    doubled_rank = 2 * position[is_first][group] + sizes[group] + 1 if len(group) else position
    hits = np.bincount(user, weights=hit, minlength=count)
    misses = np.bincount(user, minlength=count) - hits
    ranks = np.bincount(user, weights=np.where(hit, doubled_rank, 0), minlength=count) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        area = (ranks - hits * (hits + 1) / 2) / (hits * misses)
    return np.where((hits > 0) & (misses > 0), area, np.nan), hits


def values_of_users(
    reco: pa.Table, truth: pa.Table, options: ListOptions, facts: ItemFacts | None
) -> UserValues:
    """Compute the metrics of all users in two tables.

    Parameters
    ----------
    reco : pyarrow.Table
        Columns ``user``, ``item`` and ``value`` (scores, or ranks if the options say so); all rows
        of its users.
    truth : pyarrow.Table
        Columns ``user``, ``item`` and ``relevance`` > 0; all rows of its users.
    options : ListOptions
    facts : ItemFacts or None
        Required by the metrics of novelty, popularity, serendipity and diversity.

    Returns
    -------
    UserValues

    Raises
    ------
    UsageError
        For invalid ranks, and for repeated items unless the options allow them.
    """
    rows = _rows_of(reco, truth, options)
    with_repeated, rows = rows, _without_repeated(rows)
    has_truth = rows.relevant > 0
    has_list = np.zeros(len(rows.users), dtype=bool)
    has_list[rows.user] = True
    columns: dict[str, list[np.ndarray]] = {}
    for lists in _batches(rows, with_repeated, options, facts):
        with np.errstate(invalid="ignore", divide="ignore"):  # users without truth, made NaN below
            for name in options.metrics:
                if name in _OF_USERS:
                    for k in options.ks:
                        columns.setdefault(f"{name}@{k}", []).append(_OF_USERS[name](lists, k))
    values = {}
    for key, parts in columns.items():
        counts = has_truth if key.partition("@")[0] in _OF_TRUTH else has_list
        values[key] = np.where(counts, np.concatenate(parts), np.nan)
    weights = np.zeros(len(rows.users))
    if "gauc" in options.metrics:
        values["gauc"], weights = _user_auc(rows)
    items: dict[int, tuple[pa.Array, np.ndarray]] = {}
    if options.needs("coverage", "gini"):
        for k in options.ks:
            counts = np.bincount(rows.item[rows.rank <= k], minlength=len(rows.items))
            used = np.flatnonzero(counts)
            items[k] = rows.items.take(pa.array(used)), counts[used]
    return UserValues(rows.users, values, weights, has_truth, has_list, items)


def _batches(
    rows: _RankedRows, with_repeated: _RankedRows, options: ListOptions, facts: ItemFacts | None
) -> Iterator[_RankedLists]:
    width, pairs = options.width, _pair_counts(rows)
    unknown = len(facts.items) if facts is not None else 0
    codes = index_in(rows.items, facts.items) if facts is not None else np.zeros(0, np.int64)
    truth_rank = np.arange(len(rows.truth_user)) - _starts(rows.truth_user)
    counted: dict[tuple[int, int | None], np.ndarray] = {}
    for first in range(0, len(rows.users), _USERS_AT_ONCE):
        last = min(first + _USERS_AT_ONCE, len(rows.users))

        def filled(
            owners: np.ndarray, columns: np.ndarray, values: np.ndarray, default: float = 0.0
        ) -> Matrix:
            part = slice(*np.searchsorted(owners, (first, last)))  # noqa: B023
            inside = columns[part] < width
            matrix = np.full((last - first, width), default, dtype=values.dtype)  # noqa: B023
            positions = owners[part][inside] - first, columns[part][inside]  # noqa: B023
            matrix[positions] = values[part][inside]
            return matrix

        def counts(k: int, limit: int | None, part: slice = slice(first, last)) -> np.ndarray:
            if (k, limit) not in counted:
                counted[k, limit] = pairs(k, limit)
            return counted[k, limit][part]

        column = rows.rank - 1
        item_codes = codes[rows.item] if facts is not None else rows.item
        yield _RankedLists(
            options,
            hits=filled(rows.user, column, rows.hit.astype(np.float64)),
            present=filled(rows.user, column, np.ones(len(rows.user), dtype=bool)),
            gains=filled(rows.user, column, rows.gain),
            item_codes=filled(rows.user, column, item_codes, unknown),
            relevant=rows.relevant[first:last],
            ideal_gains=filled(rows.truth_user, truth_rank, rows.truth_gain),
            facts=facts,
            repeated=filled(with_repeated.user, with_repeated.rank - 1, with_repeated.repeated),
            pairs=counts,
        )
