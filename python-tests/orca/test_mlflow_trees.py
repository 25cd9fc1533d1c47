"""Test XGBEstimators as MLflow models."""

import numpy as np
import pandas as pd
import pytest
from refusals import refused

mlflow = pytest.importorskip(
    "mlflow", reason="MLflow is not installed: pip install 'bigdl[mlflow]'"
)
pytest.importorskip("xgboost", reason="XGBoost is not installed: pip install 'bigdl[xgboost]'")

import bigdl.mlflow  # noqa: E402
from bigdl.orca.learn.trees import LGBMEstimator, XGBEstimator  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": random.normal(size=200), "city": random.choice(["Oslo", "Rome"], 200)}
    )
    frame["paid"] = (frame.age + (frame.city == "Oslo") > 0.5).astype(float)
    frame.loc[::9, "age"] = np.nan
    return frame


@pytest.fixture(scope="module")
def estimator(rows):
    trees = XGBEstimator(objective="binary:logistic", num_rounds=5, backend="local")
    trees.fit(rows, ["age", "city"], "paid", categorical_cols="city")
    return trees


def test_saved_trees_predict_what_the_estimator_does(rows, estimator, tmp_path):
    features = rows[["age", "city"]]
    bigdl.mlflow.save_model(estimator, tmp_path / "trees", input_example=features[:3])
    expected = estimator.predict(rows)["prediction"].to_numpy()
    served = mlflow.pyfunc.load_model(str(tmp_path / "trees"))
    assert [each.name for each in served.metadata.signature.inputs] == ["age", "city"]
    assert np.array_equal(served.predict(features), expected)
    loaded = bigdl.mlflow.load_model(str(tmp_path / "trees"))
    assert np.array_equal(loaded.predict(rows)["prediction"], expected)
    classes = estimator.predict(rows, output="class")["prediction"]
    assert loaded.predict(rows, output="class")["prediction"].equals(classes)
    history = loaded.fit(rows, ["age", "city"], "paid", categorical_cols="city", num_rounds=1)
    assert history[-1]["round"] == 6


def test_a_loaded_multiclass_estimator_has_its_parameters(rows, tmp_path):
    trees = XGBEstimator(
        objective="multi:softprob", num_class=3, max_depth=2, num_rounds=4, backend="local"
    )
    rows = rows.assign(tier=np.digitize(rows["age"].fillna(0), [-0.5, 0.5]))
    trees.fit(rows, "age", "tier")
    bigdl.mlflow.save_model(trees, tmp_path / "trees")
    loaded = bigdl.mlflow.load_model(str(tmp_path / "trees"))
    classes = trees.predict(rows, output="class")["prediction"]
    assert loaded.predict(rows, output="class")["prediction"].equals(classes)
    assert trees.fit(rows, "age", "tier") == loaded.fit(rows, "age", "tier")
    x = rows[["age"]].to_numpy("float32")
    assert np.array_equal(loaded.predict(x), trees.predict(x))


def test_a_function_is_not_saved_with_trees(tmp_path, caplog):
    def error(predictions, matrix):
        return predictions - matrix.get_label(), np.ones_like(predictions)

    x = np.linspace(-1, 1, 100, dtype="float32")[:, None]
    trees = XGBEstimator(objective=error, num_rounds=2, backend="local")
    trees.fit((x, x[:, 0]))
    bigdl.mlflow.save_model(trees, tmp_path / "trees")
    assert "does not contain the functions" in caplog.text


def test_saved_trees_of_arrays_take_arrays(tmp_path):
    x = np.linspace(-1, 1, 100, dtype="float32")[:, None]
    trees = XGBEstimator(num_rounds=3, backend="local")
    trees.fit((x, x[:, 0]))
    bigdl.mlflow.save_model(trees, tmp_path / "trees", input_example=x[:2])
    served = mlflow.pyfunc.load_model(str(tmp_path / "trees"))
    assert np.array_equal(served.predict(x), trees.predict(x))


def test_trees_take_no_methods_of_networks_for_mlflow(estimator, tmp_path):
    with refused("argument-value", "openvino", "auto"):
        bigdl.mlflow.save_model(estimator, tmp_path / "trees", accelerate="openvino")


def test_loaded_files_of_multiclass_trees_are_mlflow_models(rows, tmp_path):
    pytest.importorskip("lightgbm", reason="LightGBM is not installed")
    rows = rows.assign(tier=np.digitize(rows["age"].fillna(0), [-0.5, 0.5]))
    for made, name in ((XGBEstimator, "multi:softprob"), (LGBMEstimator, "multiclass")):
        trees = made(objective=name, num_class=3, num_rounds=2, backend="local")
        trees.fit(rows, "age", "tier")
        of_file = made(backend="local")
        of_file.load(trees.save(str(tmp_path / name.partition(":")[0])))
        bigdl.mlflow.save_model(of_file, tmp_path / made.framework)
        loaded = bigdl.mlflow.load_model(str(tmp_path / made.framework))
        classes = trees.predict(rows, output="class")["prediction"]
        assert loaded.predict(rows, output="class")["prediction"].equals(classes)
