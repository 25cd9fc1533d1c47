"""Tests of ranking metrics: published values, table types and exact sums."""

import json
import math
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.friesian.metrics import compare_rankings, ranking_metrics
from bigdl.friesian.metrics.exact import ExactMoments


def lists(*items_of_users: tuple[int, list[int]]) -> pd.DataFrame:
    """Return a table of users, their items in order, and ranks."""
    rows = [
        (user, item, rank) for user, items in items_of_users for rank, item in enumerate(items, 1)
    ]
    return pd.DataFrame(rows, columns=["user", "item", "rank"])


def pairs(*rows: tuple[int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["user", "item"])


# User 4 has no recommendations, user 5 no relevant items.
RECO = lists((1, [10, 20, 30, 40]), (2, [20, 10, 50, 60]), (3, [30, 40]), (5, [10, 20, 30, 40]))
TRUTH = pairs((1, 20), (1, 40), (1, 70), (2, 20), (3, 10), (3, 40), (4, 10))
TRAIN = pairs((1, 10), (1, 30), (2, 10), (2, 30), (2, 40), (3, 10), (3, 20), (4, 30), (5, 50))
ALL = [
    "precision", "r_precision", "recall", "f1", "hit_rate", "map", "mrr", "ndcg", "auc",
    "partial_auc", "pap", "covered_users", "novelty", "popularity", "serendipity",
    "sufficient_recommendations", "unrepeated_recommendations", "gauc", "coverage", "gini",
]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "options", "expected"),
    [
        ("precision", {}, [0.25, 0.375, 0.25, 0.25, 0.2]),
        ("r_precision", {}, [0.25, 0.5, 0.458333, 0.541667, 0.541667]),
        ("recall", {}, [0.25, 0.458333, 0.458333, 0.541667, 0.541667]),
        ("f1", {}, [0.25, 0.391667, 0.308333, 0.32619, 0.279762]),
        ("hit_rate", {}, [0.25, 0.75, 0.75, 0.75, 0.75]),
        ("map", {}, [0.25, 0.354167, 0.354167, 0.395833, 0.395833]),
        ("map", {"map_divisor": "min"}, [0.25, 0.375, 0.354167, 0.395833, 0.395833]),
        ("map", {"map_divisor": "k"}, [0.25, 0.25, 0.166667, 0.15625, 0.125]),
        ("mrr", {}, [0.25, 0.5, 0.5, 0.5, 0.5]),
        ("ndcg", {}, [0.25, 0.443426, 0.420734, 0.471261, 0.471261]),
        ("ndcg", {"ndcg_ideal": "k"}, [0.25, 0.346713, 0.265361, 0.262778, 0.2283]),
        ("partial_auc", {}, [0.25, 0.354167, 0.416667, 0.447917, 0.466667]),
        ("pap", {}, [0.25, 0.375, 0.416667, 0.447917, 0.466667]),
        ("auc", {}, [0.25, 0.25, 0.375, 0.3125, 0.3125]),
        ("covered_users", {}, [0.75] * 5),
        ("sufficient_recommendations", {}, [1.0, 1.0, 0.75, 0.75, 0.0]),
        ("novelty", {"train": TRAIN}, [1.133206, 1.529447, 1.463407, 1.628507, 1.628507]),
        ("popularity", {"train": TRAIN}, [2.5, 2.0, 2.083333, 1.8125, 1.8125]),
        (
            "serendipity",
            {"train": TRAIN, "catalogue": range(10, 90, 10)},
            [0.03125, 0.015625, 0.010417, 0.007812, 0.007812],
        ),
        ("coverage", {"catalogue": range(10, 90, 10)}, [0.375, 0.5, 0.625, 0.75, 0.75]),
        ("coverage", {"train": TRAIN}, [0.6, 0.8, 1.0, 1.0, 1.0]),
    ],
)
def test_metrics_have_the_values_that_other_libraries_agree_on(metric, options, expected):
    result = ranking_metrics(RECO, TRUTH, metric, k=[1, 2, 3, 4, 5], **options)
    assert list(result) == [f"{metric}@{k}" for k in range(1, 6)]
    assert list(result.values()) == pytest.approx(expected, abs=1e-6)
    assert (result.users, result.users_without_recommendations) == (4, 1)


def test_a_second_published_set_of_lists():
    reco = lists((1, [3, 7, 10, 11, 2]), (2, [5, 8, 11, 1, 3]), (3, [4, 9, 2]))
    truth = pairs(
        *((1, item) for item in range(5, 11)),
        *((2, item) for item in (6, 7, 4, 10, 11)),
        *((3, item) for item in range(1, 6)),
    )
    names = ["hit_rate", "map", "mrr", "ndcg", "precision", "recall", "auc"]
    result = ranking_metrics(reco, truth, names, k=2, map_divisor="min")
    expected = [0.666667, 0.25, 0.5, 0.333333, 0.333333, 0.122222, 0.333333]
    assert list(result.values()) == pytest.approx(expected, abs=1e-6)
    half_width = 1.959964 * result.standard_errors["ndcg@2"]
    assert half_width == pytest.approx(0.350857, abs=1e-6)


def test_graded_relevance_has_linear_or_exponential_gain():
    reco = pd.DataFrame({"user": "u", "item": ["b", "c", "a"], "score": [3.0, 2.0, 1.0]})
    truth = pd.DataFrame({"user": "u", "item": ["a", "b", "c"], "grade": [3, 1, 0]})
    options = {"k": [2, 3], "score_col": "score", "relevance_col": "grade"}
    result = ranking_metrics(reco, truth, "ndcg", **options)
    assert list(result.values()) == pytest.approx([0.275412, 0.688529], abs=1e-6)
    gained, best = 1 + 7 / 2, 7 + 1 / math.log2(3)
    result = ranking_metrics(reco, truth, "ndcg", **options, gain="exponential")
    assert result["ndcg@3"] == pytest.approx(gained / best)
    with refused("argument-conflict", "ndcg_ideal"):
        ranking_metrics(reco, truth, "ndcg", **options, ndcg_ideal="k")


def test_diversity_is_the_mean_number_of_features_that_differ():
    features = pd.DataFrame({"item": [1, 2, 3, 4], "a": [0, 0, 1, 0], "b": [0, 1, 1, 0]})
    reco = lists((1, [1, 2, 3]), (2, [1, 4]), (3, [1, 99, 3]))
    result = ranking_metrics(
        reco, reco, "intra_list_diversity", k=[1, 2, 3], item_features=features, per_user=True
    )
    by_user = result.per_user.drop(columns="user").to_numpy().tolist()
    assert by_user == [[0, 1, pytest.approx(4 / 3)], [0, 0, 0], [0, 0, 2]]


def test_area_under_the_curve_of_whole_lists_counts_ties_as_half():
    reco = pd.DataFrame(
        {"user": [1, 1, 1, 2, 2], "item": [1, 2, 3, 1, 2], "score": [0.9, 0.5, 0.5, 0.1, 0.2]}
    )
    truth = pairs((1, 2), (2, 2), (3, 1))
    # User 1: one of two misses is above, one is tied; user 2: all in order; user 3 has no list.
    result = ranking_metrics(reco, truth, "gauc", score_col="score")
    assert result == {"gauc": pytest.approx((0.25 + 1) / 2)}


@pytest.mark.parametrize(
    ("ties", "expected"), [("item_descending", 9), ("item_ascending", 1), ("pessimistic", 9)]
)
def test_ties_have_a_stated_order(ties, expected):
    reco = pd.DataFrame({"user": 1, "item": range(1, 10), "score": 1.0})
    truth = pairs((1, expected))
    result = ranking_metrics(reco, truth, "mrr", k=9, score_col="score", ties=ties)
    assert result["mrr@9"] == (1 / 9 if ties == "pessimistic" else 1.0)


def test_missing_scores_are_the_worst():
    reco = pd.DataFrame({"user": 1, "item": [1, 2, 3], "score": [np.nan, -np.inf, 0.0]})
    result = ranking_metrics(reco, pairs((1, 1)), "mrr", k=3, score_col="score")
    assert result["mrr@3"] == 1 / 3


def test_duplicates_are_refused_or_keep_their_best_rank():
    reco = lists((1, [10, 10, 20, 30]), (2, [20, 30]))
    truth = pairs((1, 30), (1, 30), (2, 20))
    with refused("data-order", "10", "user 1"):
        ranking_metrics(reco, truth, "mrr")
    names = ["mrr", "recall", "unrepeated_recommendations"]
    result = ranking_metrics(reco, truth, names, k=3, on_duplicates="first")
    assert list(result.values()) == pytest.approx([(1 / 3 + 1) / 2, 1.0, 0.5])


def test_sampled_candidates_are_named_in_the_result():
    result = ranking_metrics(RECO, TRUTH, ["ndcg", "gauc"], k=10, candidates=100)
    assert list(result) == ["ndcg@10/100neg", "gauc/100neg"]
    assert list(result.standard_errors) == ["ndcg@10/100neg"]
    json.dumps(result)


def test_gini_tells_even_lists_from_concentrated_ones():
    even = lists(*((user, [user]) for user in range(4)))
    one = lists(*((user, [0]) for user in range(4)))
    ginis = [
        ranking_metrics(reco, TRUTH, "gini", k=1, catalogue=range(4))["gini@1"]
        for reco in (even, one)
    ]
    assert ginis == [0.0, 0.75]


def reference(reco: dict, truth: dict, k: int) -> dict[str, float]:
    """Compute some metrics by their definitions."""
    sums = {"recall": 0.0, "map": 0.0, "mrr": 0.0, "ndcg": 0.0}
    for user, relevant in truth.items():
        top = reco.get(user, [])[:k]
        hits = [item in relevant for item in top]
        sums["recall"] += sum(hits) / len(relevant)
        precisions = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
        sums["map"] += sum(precisions) / len(relevant)
        sums["mrr"] += next((1 / (i + 1) for i, hit in enumerate(hits) if hit), 0)
        gained = sum(1 / math.log2(i + 2) for i, hit in enumerate(hits) if hit)
        best = sum(1 / math.log2(i + 2) for i in range(min(k, len(relevant))))
        sums["ndcg"] += gained / best
    return {f"{name}@{k}": each / len(truth) for name, each in sums.items()}


@settings(max_examples=50, deadline=None)
@given(
    reco=st.dictionaries(
        st.integers(0, 9), st.lists(st.integers(0, 12), unique=True, min_size=1), min_size=1
    ),
    truth=st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 12), min_size=1), min_size=1),
    k=st.integers(1, 15),
)
def test_any_lists_have_the_metrics_of_the_definitions(reco, truth, k):
    truth_rows = pairs(*((user, item) for user, items in truth.items() for item in items))
    names = ["recall", "map", "mrr", "ndcg"]
    result = ranking_metrics(lists(*reco.items()), truth_rows, names, k=k)
    assert result == pytest.approx(reference(reco, truth, k), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e150, 1e150), min_size=1),
    st.integers(0, 10**6),
)
def test_sums_of_parts_in_any_order_are_the_sum_of_all(values, seed):
    whole = ExactMoments.of(np.array(values))
    random.Random(seed).shuffle(values)
    cut = seed % len(values)
    parts = ExactMoments.of(np.array(values[:cut])) + ExactMoments.of(np.array(values[cut:]))
    assert (parts.count, parts.total) == (whole.count, whole.total)
    assert math.fsum(values) == whole.total / (1 << 1126)


def many(users: int, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((users, 40)), axis=1)[:, :20]
    reco = pd.DataFrame(
        {
            "user": np.repeat(np.arange(users), 20),
            "item": order.ravel(),
            "score": rng.random(users * 20),
        }
    )
    truth = pd.DataFrame(
        {"user": rng.integers(0, users + 50, users * 4), "item": rng.integers(0, 40, users * 4)}
    )
    return reco.sample(frac=1, random_state=seed), truth


@pytest.fixture(scope="module")
def spark(orca_spark):
    return orca_spark


@pytest.mark.parametrize("partitions", [1, 5])
def test_spark_has_the_bits_of_pandas_for_any_partitions(spark, partitions):
    reco, truth = many(300, 1)
    options = {
        "metrics": [name for name in ALL if name != "gauc"] + ["gauc"],
        "k": [1, 5, 10],
        "score_col": "score",
        "catalogue": range(40),
    }
    expected = ranking_metrics(reco, truth, train=truth, **options, per_user=True)
    old = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", partitions)
    try:
        frames = [spark.createDataFrame(each).repartition(partitions) for each in (reco, truth)]
        result = ranking_metrics(*frames, train=frames[1], **options, per_user=True)
        by_user = result.per_user.toPandas().sort_values("user", ignore_index=True)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", old)
    assert result == expected
    assert result.standard_errors == expected.standard_errors
    assert (result.users, result.users_without_recommendations) == (
        expected.users,
        expected.users_without_recommendations,
    )
    pd.testing.assert_frame_equal(by_user, expected.per_user, check_dtype=False, check_exact=True)


def test_errors_of_tasks_are_those_of_pandas(spark):
    from bigdl.friesian.feature import FeatureTable

    twice = FeatureTable(spark.createDataFrame(lists((1, [10, 10]))))
    truth = FeatureTable(spark.createDataFrame(TRUTH))
    with refused("data-order", "10", "user 1"):
        ranking_metrics(twice, truth, "mrr")
    result = ranking_metrics(twice, truth, "mrr", on_duplicates="first")
    assert result == ranking_metrics(lists((1, [10, 10])), TRUTH, "mrr", on_duplicates="first")
    with refused("argument-type", "Spark"):
        ranking_metrics(twice, TRUTH, "mrr")


def test_tables_of_arrow_and_polars_give_the_same(spark):
    expected = ranking_metrics(RECO, TRUTH)
    assert ranking_metrics(pa.Table.from_pandas(RECO), pa.Table.from_pandas(TRUTH)) == expected
    polars = pytest.importorskip("polars")
    assert ranking_metrics(polars.from_pandas(RECO), polars.from_pandas(TRUTH)) == expected


def test_text_and_numbers_can_be_ids():
    texts = [frame.astype({"user": str, "item": str}) for frame in (RECO, TRUTH)]
    assert ranking_metrics(*texts) == ranking_metrics(RECO, TRUTH)
    with refused("data-schema", "item", "string"):
        ranking_metrics(RECO, TRUTH.astype({"item": str}))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"metrics": "ndgc"}, "name-unknown", ["'ndgc'", "ndcg"]),
        ({"k": 0}, "argument-value", ["k", "0"]),
        ({"metrics": "novelty"}, "argument-missing", ["novelty", "train"]),
        ({"metrics": "coverage"}, "argument-missing", ["catalogue", "train"]),
        ({"item_col": "movie"}, "column-missing", ["'movie'"]),
        ({"map_divisor": "all"}, "argument-value", ["'all'", "relevant"]),
        ({"rank_col": "rank", "score_col": "rank"}, "argument-conflict", ["rank_col"]),
        ({"recommendations": [1, 2]}, "argument-type", ["recommendations"]),
        ({"truth": TRUTH[:0].astype(int)}, "data-empty", ["truth"]),
        ({"recommendations": RECO.assign(rank=0)}, "data-value", ["Ranks", "score_col"]),
        ({"recommendations": RECO.assign(rank=1)}, "data-order", ["rank 1"]),
        ({"recommendations": RECO.replace({"user": {5: None}})}, "data-null", ["'user'"]),
        ({"recommendations": RECO.assign(rank="a")}, "data-dtype", ["'rank'"]),
        ({"recommendations": RECO.assign(user=0.5)}, "data-dtype", ["'user'"]),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, code, words):
    arguments = {"recommendations": RECO, "truth": TRUTH, **change}
    with refused(code, *words):
        ranking_metrics(**arguments)


def test_two_models_are_compared_user_by_user():
    reco, truth = many(400, 2)
    same = ranking_metrics(reco, truth, k=10, score_col="score", per_user=True)
    good = reco.merge(truth.drop_duplicates().assign(score_of_hit=1.0), how="left")
    good["score"] += good.pop("score_of_hit").fillna(0)
    better = ranking_metrics(good, truth, k=10, score_col="score", per_user=True)
    result = compare_rankings(same, better, "ndcg@10")
    assert result["difference"] == pytest.approx(better["ndcg@10"] - same["ndcg@10"])
    assert 0 < result["low"] < result["difference"] < result["high"]
    assert result["p_value"] < 0.01
    assert compare_rankings(same, same, "ndcg@10")["p_value"] == 1.0
    with refused("data-schema", "in one only"):
        compare_rankings(same, better.per_user[3:], "ndcg@10")
    with refused("argument-value", "per_user=True"):
        compare_rankings(ranking_metrics(RECO, TRUTH), better, "ndcg@10")
