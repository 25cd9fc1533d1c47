"""Estimators as models of MLflow, and fits as its runs."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch import Estimator

mlflow = pytest.importorskip("mlflow")

import bigdl.mlflow  # noqa: E402
from bigdl.mlflow.pytorch import MLflowCallback  # noqa: E402

X = np.linspace(-1, 1, 40, dtype="float32").reshape(20, 2)
FRAME = pd.DataFrame({"x": list(X), "item": np.arange(20) % 3})


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = torch.nn.Linear(2, 3), torch.nn.Embedding(3, 2)

    def forward(self, x, item):
        return {"wide": self.linear(x), "deep": self.embedding(item).sum(1)}


@pytest.fixture(autouse=True)
def tracking(tmp_path, monkeypatch):
    """A store of runs of its own, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")  # MLflow keeps a store by its URI
    yield
    mlflow.set_tracking_uri(before)


def estimator(model=None):
    return Estimator.from_torch(model=model or torch.nn.Linear(2, 3), backend="local")


@pytest.mark.slow
def test_a_logged_model_predicts_what_the_estimator_does():
    est = estimator()
    info = bigdl.mlflow.log_model(est, input_example=X[:3], params={"size": 3})
    assert info.signature.inputs.to_dict()[0]["tensor-spec"] == {
        "dtype": "float32",
        "shape": (-1, 2),
    }
    expected = est.predict(X)
    assert np.array_equal(mlflow.pyfunc.load_model(info.model_uri).predict(X), expected)
    assert np.array_equal(bigdl.mlflow.load_model(info.model_uri).predict(X), expected)


@pytest.mark.slow
def test_a_frame_is_predicted_by_its_columns_and_by_spark(orca_spark):
    est = estimator(Named())
    bigdl.mlflow.save_model(est, "named", input_example=FRAME[:3])
    loaded = mlflow.pyfunc.load_model("named")
    assert loaded.metadata.signature.inputs.input_names() == ["x", "item"]
    expected = est.predict(FRAME, feature_cols=["x", "item"])
    predicted = loaded.predict(FRAME)
    for name in ("wide", "deep"):
        assert np.array_equal(np.stack(predicted[name]), np.stack(expected[name]))
    udf = mlflow.pyfunc.spark_udf(
        orca_spark, "named", "struct<wide: array<float>, deep: float>", env_manager="local"
    )
    rows = [(each.tolist(), int(item)) for each, item in zip(X, FRAME["item"], strict=True)]
    frame = orca_spark.createDataFrame(rows, "x array<float>, item long")
    rows = frame.select(udf("x", "item").alias("y")).collect()
    assert np.array_equal([row.y.wide for row in rows], np.stack(expected.wide))
    assert np.array_equal(np.float32([row.y.deep for row in rows]), np.stack(expected.deep))


@pytest.mark.slow
def test_one_output_by_spark(orca_spark):
    est = estimator()
    bigdl.mlflow.save_model(est, "one", input_example=FRAME[["x"]][:3])
    udf = mlflow.pyfunc.spark_udf(orca_spark, "one", "array<float>", env_manager="local")
    frame = orca_spark.createDataFrame([(each.tolist(),) for each in X], "x array<float>")
    rows = frame.select(udf("x").alias("y")).collect()
    assert np.array_equal(np.float32([row.y for row in rows]), est.predict(X))


@pytest.mark.slow
def test_an_accelerated_model_is_saved(monkeypatch):
    est = estimator()
    bigdl.mlflow.save_model(est, "fast", input_example=X, accelerate="openvino_fp32")
    predicted = mlflow.pyfunc.load_model("fast").predict(X)
    assert np.allclose(predicted, est.predict(X), atol=1e-5)
    with refused("unsupported"):
        bigdl.mlflow.load_model("fast")
    with pytest.raises(UsageError, match="or input_example= to MLflow"):
        bigdl.mlflow.save_model(est, "none", accelerate="openvino_fp32")
    assert not Path("none").exists()


def test_a_model_names_what_it_needs():
    bigdl.mlflow.save_model(estimator(), "model", extra_pip_requirements=["pyspark"])
    lines = Path("model/requirements.txt").read_text().split()
    assert [line.partition("==")[0] for line in lines] == [
        "bigdl[orca]",
        "mlflow-skinny",
        "torch",
        "pyspark",
    ]
    assert mlflow.models.get_model_info("model").signature is None


def test_another_flavour_is_not_loaded(tmp_path):
    class Plain(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input, params=None):
            return model_input

    mlflow.pyfunc.save_model("plain", python_model=Plain(), pip_requirements=[])
    with refused("file-format", "python_function"):
        bigdl.mlflow.load_model("plain")


# Runs ---------------------------------------------------------------------------------------------


def fitting():
    return Estimator.from_torch(
        model=torch.nn.Linear(2, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), config["lr"]),
        loss=torch.nn.MSELoss(),
        config={"lr": 0.05},
        backend="local",
        workers_per_node=2,
    )


@pytest.mark.slow
def test_a_fit_is_logged_to_the_active_run():
    est, data = fitting(), (X, X[:, :1])
    with mlflow.start_run() as run:
        callback = MLflowCallback()
        figures = est.fit(data, epochs=2, validation_data=data, callbacks=[callback])
        with pytest.raises(UsageError, match="there is a run already; leave them out"):
            MLflowCallback(run_name="another")
    assert callback.run_id == run.info.run_id
    logged = mlflow.get_run(run.info.run_id)
    assert logged.data.params["lr"] == logged.data.params["optimizer.lr"] == "0.05"
    assert logged.data.params["optimizer"] == "SGD"
    assert logged.data.params["workers"] == logged.data.params["epochs"] == "2"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train_loss")
    assert [(each.step, each.value) for each in history] == [
        (figure["epoch"], figure["train_loss"]) for figure in figures
    ]
    assert logged.data.metrics["val_loss"] == figures[-1]["val_loss"]


def test_a_fit_without_a_run_makes_one_that_ends_with_it():
    callback = MLflowCallback(experiment_name="clicks", run_name="first")
    fitting().fit((X, X[:, :1]), callbacks=[callback])
    run = mlflow.get_run(callback.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert mlflow.get_experiment(run.info.experiment_id).name == "clicks"
    assert mlflow.active_run() is None


# Keras --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_keras_model_and_its_fit():
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    keras = pytest.importorskip("keras")
    from bigdl.mlflow.keras import MLflowCallback as KerasCallback
    from bigdl.orca.learn.tf2 import Estimator as KerasEstimator

    def creator(config):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    est = KerasEstimator.from_keras(model_creator=creator, backend="local", workers_per_node=2)
    callback = KerasCallback()
    history = est.fit((X, X[:, :1]), epochs=2, batch_size=10, callbacks=[callback], verbose=0)
    run = mlflow.get_run(callback.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer"] == "SGD"
    logged = mlflow.MlflowClient().get_metric_history(callback.run_id, "loss")
    assert [each.value for each in logged] == pytest.approx(history["loss"])
    info = bigdl.mlflow.log_model(est, input_example=X[:3])
    expected = est.predict(X)
    assert np.array_equal(mlflow.pyfunc.load_model(info.model_uri).predict(X), expected)
    assert np.array_equal(bigdl.mlflow.load_model(info.model_uri).predict(X), expected)
    with pytest.raises(UsageError, match="is for PyTorch models"):
        bigdl.mlflow.log_model(est, input_example=X, accelerate="openvino_fp32")
