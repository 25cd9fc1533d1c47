"""Tests of the search over recommenders by ranking metrics."""

import numpy as np
import optuna
import pandas as pd
import pytest
from refusals import refused

from bigdl.friesian.automl import MODELS, RecommenderSearch, search_recommenders
from bigdl.friesian.baselines import EASE, Markov, cross_validate
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.splitters import GlobalTime, LastN


@pytest.fixture(scope="module")
def table(orca_spark):
    """Return clicks in which an item determines the next one."""
    user = np.repeat(np.arange(40), 12)
    item = (user + 3 * np.tile(np.arange(12), 40)) % 50
    frame = pd.DataFrame({"who": user, "what": item, "when": np.tile(np.arange(12), 40)})
    return FeatureTable.from_pandas(frame)


COLUMNS = {"user_col": "who", "item_col": "what", "time_col": "when"}


def test_a_search_compares_all_models_and_returns_the_best_one(table):
    splitter = LastN(1, **COLUMNS)
    names = ["popular", "markov", "item_knn", "ease", "sasrec"]
    search = search_recommenders(table, splitter, names, n_trials=6, epochs=1, max_len=[8])
    assert search.table["model"].head(1).tolist() == ["markov"]
    assert set(search.table["model"]) == set(names)
    assert search.best_params["model"] == "markov"
    assert search.table["ndcg@10"].iloc[0] == search.study.best_value
    best = search.best_model()
    assert isinstance(best, Markov)
    expected = cross_validate(table, splitter, {"best": best}, "ndcg", 10)
    assert expected.means["ndcg@10"].iloc[0] == search.study.best_value
    network = search.best_model("sasrec")
    assert isinstance(network, SequenceRecommender)
    assert network.options["dim"] in (32, 64, 128)
    assert (network.max_len, network.epochs, network.user_col) == (8, 1, "who")


@pytest.mark.slow
def test_a_search_with_other_models_and_metrics_resumes(table, tmp_path):
    def strong(trial, common):
        return EASE(trial.suggest_float("strong.l2", 1, 10), **common["columns"])

    options = {
        "metric": "recall@3",
        "storage": f"sqlite:///{tmp_path / 'search.db'}",
        "resume": True,
    }
    splitter = GlobalTime(test_size=0.3, **COLUMNS)
    models = {"strong": strong, "markov": MODELS["markov"]}
    for trials in (2, 3):
        search = search_recommenders(table, splitter, models, n_trials=trials, **options)
    assert len(search.study.trials) == 5
    assert search.table["recall@3"].is_monotonic_decreasing
    assert 1 <= search.best_model("strong").l2 <= 10


@pytest.mark.slow
def test_a_search_with_other_arguments_or_rows_is_not_resumed(table, tmp_path):
    options = {"storage": f"sqlite:///{tmp_path / 'search.db'}", "resume": True, "n_trials": 1}
    names = ["popular", "markov"]
    splitter = LastN(1, **COLUMNS)
    search_recommenders(table, splitter, names, **options)
    with refused("checkpoint-mismatch", "metric", "'recall@3'"):
        search_recommenders(table, splitter, names, metric="recall@3", **options)
    with refused("checkpoint-mismatch", "folds"):
        search_recommenders(table, LastN(2, **COLUMNS), names, **options)


@pytest.mark.slow
def test_a_resumed_search_draws_new_parameters(table, tmp_path):
    options = {"storage": f"sqlite:///{tmp_path / 'search.db'}", "resume": True}
    for _ in range(3):
        search = search_recommenders(table, LastN(1, **COLUMNS), ["ease"], n_trials=1, **options)
    assert search.table["ease.l2"].nunique() == 3


def test_a_model_that_cannot_be_trained_does_not_end_a_search(table):
    def broken(trial, common):
        raise MemoryError("too many items")

    splitter = LastN(1, **COLUMNS)
    models = {"broken": broken, "markov": MODELS["markov"]}
    search = search_recommenders(table, splitter, models, n_trials=2)
    assert set(search.table["state"]) == {"COMPLETE", "FAIL"}
    assert search.best_params == {"model": "markov"}
    with refused("name-unknown", "broken"):
        search.best_model("broken")
    with refused("search-failed", "broken", "MemoryError: too many items"):
        search_recommenders(table, splitter, {"broken": broken}, n_trials=1)


def test_a_search_without_an_ended_trial_has_no_best_model():
    search = RecommenderSearch(optuna.create_study(), "ndcg@10", MODELS, {"columns": {}})
    with refused("data-empty", "any model"):
        search.best_model()
    with refused("data-empty", "any model"):
        _ = search.best_params


def test_unknown_models_and_metrics_of_a_search_are_rejected(table):
    splitter = LastN(1, **COLUMNS)
    with refused("argument-value", "'als'"):
        search_recommenders(table, splitter, ["als"])
    with refused("argument-value", "'coverage@10'"):
        search_recommenders(table, splitter, ["markov"], metric="coverage@10")
    search = search_recommenders(table, splitter, ["markov"], n_trials=1)
    with refused("name-unknown", "ease"):
        search.best_model("ease")
