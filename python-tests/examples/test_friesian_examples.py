"""The programs of examples/friesian, on as little data as shows that they learn."""

import importlib.util
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import rank_trees
import recall_items
import serve_films
import synthetic
import train_deepfm
import train_dien
import train_din
import train_mmoe
import train_ncf
import train_ple
import train_trees
import train_two_tower
import train_wide_and_deep
import tree_features
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "friesian" / "recommender.ipynb"


def share(found, ideal, chance):
    """How much of what can be known beyond chance was learned."""
    return (found - chance) / (ideal - chance)


def test_figures_are_those_of_their_definitions():
    label, score = np.array([1, 0, 1, 0, 0]), np.array([0.9, 0.9, 0.2, 0.1, 0.4])
    pairs = [(p, n) for p in (0.9, 0.2) for n in (0.9, 0.1, 0.4)]
    wanted = np.mean([1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs])
    assert synthetic.auc(label, score) == pytest.approx(wanted)
    users = [1, 1, 1, 2, 2, 2]
    assert synthetic.hit_rate(users, [1, 0, 0] * 2, [0.5, 0.6, 0.1, 0.2, 0.4, 0.3], best=2) == 0.5
    assert synthetic.hit_rate([1, 1], [1, 0], [0.5, 0.5], best=1) == 0.0  # a tie is no hit


def test_ndcg_is_that_of_its_definition():
    users, rating, score = [1, 1, 1, 2, 2], [3, 1, 2, 1, 5], [0.1, 0.9, 0.5, 0.2, 0.7]
    first = (1 + 3 / np.log2(3)) / (7 + 3 / np.log2(3))
    assert synthetic.ndcg(users, rating, score, best=2) == pytest.approx((first + 1) / 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: synthetic.movielens(20, 30, 5)[0],
        lambda: synthetic.opinions(20, 30, 5)[0],
        lambda: synthetic.criteo(50)[0],
        lambda: synthetic.recsys(50)[0],
        lambda: synthetic.sessions(20)[0],
    ],
    ids=["movielens", "opinions", "criteo", "recsys", "sessions"],
)
def test_generated_data_are_the_same_every_time(make):
    pd.testing.assert_frame_equal(make(), make())


@pytest.mark.slow
def test_ncf_finds_the_films_of_a_user(orca_spark):
    found = train_ncf.main(["--users", "150", "--items", "120", "--epochs", "8"])
    assert share(found["hr@10"], found["ideal hr@10"], 0.1) > 0.4


@pytest.mark.slow
def test_wide_and_deep_learns_clicks(orca_spark):
    argv = ["--rows", "5000", "--numbers", "4", "--categories", "6", "--epochs", "4"]
    found = train_wide_and_deep.main(argv)
    assert share(found["auc"], found["ideal auc"], 0.5) > 0.5
    assert found["clicks in the best tenth"] > 0.7


@pytest.mark.slow
def test_dien_learns_how_interests_go_on(orca_spark):
    argv = ["--users", "300", "--items", "80", "--steps", "5", "--epochs", "6", "--lr", "0.01"]
    found = train_dien.main(argv)
    assert found["auc"] > 0.75
    assert found["purchases in the best tenth"] > 0.8


@pytest.mark.slow
def test_two_towers_find_the_films_of_a_user(orca_spark):
    found = train_two_tower.main(["--epochs", "10"])
    assert share(found["hr@10"], found["ideal hr@10"], 0.1) > 0.4


@pytest.mark.slow
def test_deepfm_learns_likes(orca_spark):
    found = train_deepfm.main([])
    assert share(found["auc"], found["ideal auc"], 0.5) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepfm", "wide_and_deep"])
def test_models_of_keras_find_the_planted_signal(orca_spark, model):
    pytest.importorskip("keras")
    import train_keras

    size = ["--rows", "6000", "--numbers", "4", "--categories", "8"]
    found = train_keras.main(["--model", model, *size])
    assert share(found["auc"], found["ideal auc"], 0.5) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ncf", "two_tower"])
def test_models_of_keras_find_the_films_of_a_user(orca_spark, model):
    pytest.importorskip("keras")
    import train_keras

    found = train_keras.main(["--model", model])
    assert share(found["hr@10"], found["ideal hr@10"], 0.1) > 0.4


@pytest.mark.slow
def test_two_tasks_are_learned_by_one_model_of_keras(orca_spark):
    pytest.importorskip("keras")
    import train_keras

    found = train_keras.main(["--model", "mmoe"])
    for label in ("like", "retweet"):
        assert share(found[f"{label} auc"], found[f"ideal {label} auc"], 0.5) > 0.5


@pytest.mark.slow
def test_two_tasks_are_learned_by_one_model(orca_spark):
    found = train_mmoe.main([])
    for label in ("like", "retweet"):
        assert share(found[f"{label} auc"], found[f"ideal {label} auc"], 0.5) > 0.5


@pytest.mark.slow
def test_progressive_layers_learn_two_tasks(orca_spark):
    found = train_ple.main([])
    for label in ("like", "retweet"):
        assert share(found[f"{label} auc"], found[f"ideal {label} auc"], 0.5) > 0.5
        assert found[f"{label} auc"] > found[f"{label} auc of the author's mean"] + 0.05


@pytest.mark.slow
def test_din_finds_what_matters_of_a_history(orca_spark):
    found = train_din.main([])
    assert found["auc"] > 0.8
    assert found["auc of popularity"] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--lists", "pad", "--epochs", "20", "--batch-size", "64"]],
    ids=["sample", "pad"],
)
def test_lists_are_ranked_by_a_model_of_keras(orca_spark, more):
    pytest.importorskip("keras")
    import train_listwise

    found = train_listwise.main(more)
    assert found["ndcg@10"] > found["ndcg@10 of mean ratings"] + 0.01


@pytest.mark.slow
def test_what_is_served_is_what_was_evaluated_offline(orca_spark, tmp_path):
    """Both models trained, store and index written, 200 requests: every answer is the same."""
    options = ["--epochs", "2", "--users", "150", "--items", "120", "--output", str(tmp_path)]
    found = serve_films.main(options)
    assert found["users with the same answer"] == found["users"] == 150
    assert found["hr@10 in one process"] == found["hr@10 offline"] > 2 * 10 / 120
    assert found["hr@10 by four services"] == found["hr@10 offline"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["features", "index"]


@pytest.mark.slow
def test_candidates_are_the_nearest_films_of_a_user(orca_spark, tmp_path):
    found = recall_items.main(["--output", str(tmp_path)])
    assert found["recall@50"] > 2 * found["recall@50 of popular films"]
    candidates = pd.read_parquet(tmp_path / "candidates")
    assert (candidates["candidates"].str.len() == 50).all()


@pytest.mark.slow
def test_trees_rank_the_films_of_a_user(orca_spark):
    pytest.importorskip("xgboost")
    found = rank_trees.main([])
    assert found["ndcg@10"] > found["ndcg@10 of mean ratings"] + 0.02


@pytest.mark.slow
def test_trees_learn_likes_on_spark(orca_spark):
    pytest.importorskip("xgboost")
    found = train_trees.main(["--rows", "10000"])
    assert found["auc"] > 0.7


@pytest.mark.slow
def test_features_for_trees_are_written(orca_spark, tmp_path):
    found = tree_features.main(["--rows", "6000", "--output", str(tmp_path)])
    assert found["features"] == 11
    assert found["auc of one code"] > 0.6
    assert ("auc" in found) == (importlib.util.find_spec("xgboost") is not None)
    train = pd.read_parquet(tmp_path / "train")
    assert not train.isna().any().any()


@pytest.mark.slow
def test_ncf_on_movielens(orca_spark, data_dir):
    argv = ["--data-dir", str(data_dir / "ml-100k"), "--batch-size", "1024", "--lr", "0.002"]
    assert train_ncf.main(argv)["hr@10"] > 0.55


@pytest.mark.slow
def test_two_towers_on_movielens(orca_spark, data_dir):
    argv = ["--data-dir", str(data_dir / "ml-100k"), "--batch-size", "1024", "--lr", "0.002"]
    assert train_two_tower.main(argv)["hr@10"] > 0.45


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    notebook.cells.append(nbformat.v4.new_code_cell("assert auc > 0.6, auc"))
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
