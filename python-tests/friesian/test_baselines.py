"""Tests of baseline recommenders: definitions, published metrics and cross-validation."""

import itertools
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from refusals import refused

from bigdl.friesian.baselines import (
    ALS,
    EASE,
    ItemKNN,
    Markov,
    Popular,
    cross_validate,
)
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.metrics import ranking_metrics
from bigdl.friesian.splitters import GlobalTime, LastN


def clicks(rows: int = 800, users: int = 40) -> pd.DataFrame:
    """Return random clicks: odd users like odd items, and some items are popular."""
    random = np.random.default_rng(1)
    user = random.integers(0, users, rows)
    item = 2 * np.minimum(random.zipf(1.5, rows), 15) + user % 2
    return pd.DataFrame({"user": user, "item": item, "time": random.permutation(rows)})


def test_popular_items_of_all_times_and_of_the_newest():
    rows = pd.DataFrame({"user": range(5), "item": list("aaabb"), "time": [1, 2, 3, 8, 9]})
    users = [100]  # without a history
    assert Popular().fit(rows).recommend([0], filter_seen=False)["item"].tolist() == ["a", "b"]
    recent = Popular(period=5).fit(rows)
    assert recent.recommend([0], filter_seen=False)["item"].tolist() == ["b", "a"]
    assert recent.recommend(users)["item"].tolist() == ["a", "b"]


def test_transitions_are_counted_between_neighbours_of_a_user():
    rows = clicks()
    ordered = rows.sort_values(["user", "time", "item"])
    counts: dict[tuple, int] = {}
    for _, group in ordered.groupby("user"):
        items = group["item"].tolist()
        for pair in itertools.pairwise(items):
            counts[pair] = counts.get(pair, 0) + 1
    popular = rows["item"].value_counts()
    lists = Markov().fit(rows).recommend(k=40, filter_seen=False)
    for user, group in ordered.groupby("user"):
        last = group["item"].iloc[-1]
        scores = {
            item: counts.get((last, item), 0) + popular[item] / (popular.max() + 1)
            for item in popular.index
        }
        expected = sorted(scores, key=lambda item: (scores[item], item), reverse=True)
        assert lists[lists["user"] == user]["item"].tolist() == expected


def test_item_neighbours_and_ease_follow_their_formulas():
    rows = clicks()
    users, items = np.unique(rows["user"]), np.unique(rows["item"])
    matrix = np.zeros((len(users), len(items)))
    matrix[np.searchsorted(users, rows["user"]), np.searchsorted(items, rows["item"])] = 1
    together = matrix.T @ matrix
    norms = np.sqrt(np.diag(together))
    cosine = together / (np.outer(norms, norms) + 2.0)
    np.fill_diagonal(cosine, 0)
    inverse = np.linalg.inv(together + 30 * np.eye(len(items)))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    for model, expected in ((ItemKNN(len(items), shrink=2.0), cosine), (EASE(30), weights)):
        lists = model.fit(rows).recommend(k=len(items), filter_seen=False)
        scores = lists.pivot_table(index="user", columns="item", values="score").to_numpy()
        assert scores == pytest.approx(matrix @ expected, abs=1e-4)


def test_seen_items_and_those_not_allowed_are_left_out():
    rows = clicks()
    seen = set(rows[["user", "item"]].itertuples(index=False, name=None))
    for model in (Popular(), Markov(), ItemKNN(5), EASE()):
        lists = model.fit(rows).recommend([3, 4], k=50, items=range(10))
        pairs = set(lists[["user", "item"]].itertuples(index=False, name=None))
        assert seen.isdisjoint(pairs)
        assert set(lists["item"]) <= set(range(10))
        assert (lists.groupby("user")["rank"].max() == lists.groupby("user").size()).all()


def test_factors_of_spark_prefer_what_similar_users_have(orca_spark):
    rows = clicks(1500)
    lists = ALS(rank=4, iterations=3, seed=1).fit(rows).recommend(k=5, filter_seen=False)
    assert ((lists["user"] % 2) == (lists["item"] % 2)).mean() > 0.9


@pytest.mark.slow
def test_models_are_compared_over_folds(orca_spark, tmp_path):
    table = FeatureTable.from_pandas(clicks())
    models = {"popular": Popular(), "EASE": EASE(10), "Markov": Markov()}
    splitter = GlobalTime(period=100, folds=2)
    result = cross_validate(table, splitter, models, ["ndcg", "coverage"], k=[3, 5])
    assert result.table[["model", "fold"]].to_numpy().tolist() == [
        [name, fold] for fold in (0, 1) for name in models
    ]
    assert result.folds["test"].tolist() == [
        100 - row["cold users"] - row["cold items"] - row["seen"]
        for row in result.folds.to_dict("records")
    ]
    split = splitter.split(table)
    rows = split.train.df.toPandas()
    lists = EASE(10).fit(rows).recommend(k=5)
    test = split.test.df.toPandas().merge(rows[["user", "item"]], how="left", indicator=True)
    test = test[test["_merge"] == "left_only"]
    expected = ranking_metrics(lists, test, "ndcg", k=5)["ndcg@5"]
    found = result.table.query("model == 'EASE' and fold == 1")["ndcg@5"].item()
    assert found == pytest.approx(expected)
    assert result.means.index[0] == "EASE"
    result.write_chart(tmp_path / "chart.svg", "coverage@5")
    assert "EASE" in (tmp_path / "chart.svg").read_text()
    assert "<table" in result._repr_html_()
    with refused("name-unknown", "'recall@5'"):
        result.write_chart(tmp_path / "chart.svg", "recall@5")


def test_wrong_use_is_named(orca_spark):
    table = FeatureTable.from_pandas(clicks(100, 100))
    with refused("not-fitted", "fit"):
        Popular().recommend([1])
    with refused("data-empty"):
        Popular().fit(clicks().iloc[:0])
    with refused("column-missing", "'film'"):
        Popular(item_col="film").fit(clicks())
    with refused("argument-value", "l2"):
        EASE(0)
    with refused("argument-value", "models"):
        cross_validate(table, LastN(1), {})


@pytest.mark.skipif("BIGDL_DATA" not in os.environ, reason="BIGDL_DATA names no folder of data")
def test_published_figures_of_movielens():
    path = Path(os.environ["BIGDL_DATA"]) / "ml-100k" / "u.data"
    rows = pd.read_csv(path, sep="\t", names=["user", "item", "rating", "time"])
    rows = rows.sort_values(["user", "time", "item"])
    test = rows.groupby("user").tail(1)
    train = rows.drop(test.index)
    expected = {
        Popular(): [0.0498, 0.0254],
        ItemKNN(50): [0.0859, 0.0407],
        EASE(200): [0.0880, 0.0407],
    }
    for model, figures in expected.items():
        lists = model.fit(train).recommend(k=10)
        found = ranking_metrics(lists, test, ["hit_rate", "ndcg"], k=10)
        assert list(found.values()) == pytest.approx(figures, abs=1e-4)
