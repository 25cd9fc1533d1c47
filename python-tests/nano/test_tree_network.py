"""Trees of XGBoost as networks of ONNX Runtime: they predict what XGBoost does."""

import numpy as np
import pytest
from refusals import refused

from bigdl.nano.acceleration.tree_network import TreeNetwork, fastest_trees, network_of, sample_rows
from bigdl.nano.acceleration.trees import read_trees
from bigdl.nano.serving import ServedModel

xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed: bigdl[xgboost]")
pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: bigdl[nano]")


def trees_of(params, rounds=20, **options):
    random = np.random.default_rng(0)
    x = random.random((1500, 6), dtype="float32")
    y = (3 * x[:, 0] * x[:, 1] + x[:, 2]).round().clip(0, 2)
    if params["objective"].startswith("binary"):
        y = y > 0
    elif not params["objective"].startswith("multi"):
        y = y + 0.25
    x[random.random(x.shape) < 0.1] = np.nan
    booster = xgboost.train(params, xgboost.DMatrix(x, y, **options), rounds)
    return read_trees(bytes(booster.save_raw("ubj")), 1)


@pytest.mark.parametrize(
    "params",
    [
        {"objective": "binary:logistic", "base_score": 0.2},
        {"objective": "reg:squarederror", "gamma": 0.5},
        {"objective": "count:poisson"},
        {"objective": "multi:softprob", "num_class": 3, "num_parallel_tree": 2},
    ],
    ids=lambda params: params["objective"],
)
def test_onnxruntime_predicts_what_xgboost_does(params):
    trees = trees_of(params)
    network = TreeNetwork(trees, network_of(trees))
    rows = sample_rows(trees, 700)
    rows[0] = np.nan
    for result in ("value", "margin", "leaf", "contributions"):
        expected = trees.predict(rows, result)
        predicted = network.predict(rows, result)
        assert predicted.dtype == expected.dtype
        np.testing.assert_allclose(predicted, expected, rtol=2e-5, atol=2e-6)
    with_zeros = np.where(np.isnan(rows), np.float32(-9), rows)
    expected = trees.predict(with_zeros, missing=-9.0)
    np.testing.assert_allclose(network.predict(with_zeros, missing=-9.0), expected, rtol=2e-5)


def test_trees_that_onnx_cannot_represent_stay_in_xgboost():
    random = np.random.default_rng(0)
    x = np.stack([random.integers(0, 9, 500), random.random(500)], axis=1).astype("float32")
    matrix = xgboost.DMatrix(x, x[:, 0] % 3, feature_types=["c", "q"], enable_categorical=True)
    booster = xgboost.train({"max_cat_to_onehot": 1}, matrix, 3)
    categorical = read_trees(bytes(booster.save_raw("ubj")), 1)
    for trees in (
        categorical,
        trees_of({"objective": "reg:squarederror", "booster": "dart", "rate_drop": 0.5}),
        trees_of({"objective": "binary:hinge"}),
    ):
        assert network_of(trees) is None
        assert fastest_trees(trees, 16) is trees


@pytest.mark.parametrize(("gain", "platform"), [(0, "onnxruntime"), (np.inf, "xgboost")])
def test_a_server_selects_the_faster_runtime(monkeypatch, tmp_path, gain, platform):
    monkeypatch.setattr("bigdl.nano.acceleration.tree_network.LEAST_GAIN", gain)
    path = tmp_path / "trees.ubj"
    trees = trees_of({"objective": "binary:logistic"})
    assert fastest_trees(trees, 16).library == platform
    path.write_bytes(trees.with_facts({"missing": -9.0}))
    rows = sample_rows(trees, 50)
    with ServedModel(path, method="auto", thread_num=1) as model:
        assert model.platform == platform
        np.testing.assert_allclose(model.predict({"x": rows}), trees.predict(rows), atol=1e-6)
        with_nines = np.where(np.isnan(rows), np.float32(-9), rows)
        np.testing.assert_allclose(model.predict({"x": with_nines}), trees.predict(rows), atol=1e-6)
    with refused("argument-conflict", "runs as it was saved"):
        ServedModel(path, method="openvino_int8")
    with refused("path-missing", "no model"):
        ServedModel(tmp_path / "nothere.ubj", method="auto")
