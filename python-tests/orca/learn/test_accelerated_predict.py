"""Prediction by accelerated models: the same rows and types, nearly the same numbers."""

import logging
import os

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pyspark.sql import functions as F
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.orca.data import XShards
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import MainCallback

ROWS = 43  # the last batch of a partition has any size, 1 too
PIXELS = 3 * 8 * 8


class Images(nn.Module):
    """A small convolutional network over flattened images."""

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x.view(-1, 3, 8, 8)).mean((2, 3)))


class Ratings(nn.Module):
    """Two id columns in, a dict of outputs out, one of which is a number per row."""

    def __init__(self, config=None):
        super().__init__()
        torch.manual_seed(2)
        self.users, self.items = nn.Embedding(50, 4), nn.Embedding(50, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, user, item):
        x = torch.cat([self.users(user), self.items(item)], 1)
        return {"score": self.head(x).squeeze(1), "vector": x}


def estimator(model=Images, **options):
    return Estimator.from_torch(model=model, loss=nn.MSELoss(), workers_per_node=2, **options)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).normal(size=(ROWS, PIXELS)).astype(np.float32)


@pytest.fixture(scope="module")
def frame(orca_spark, images):
    table = pd.DataFrame(
        {"id": range(ROWS), "x": list(images), "text": [f"r{i}" for i in range(ROWS)]}
    )
    return orca_spark.createDataFrame(table).repartition(3, "id").cache()


@pytest.fixture(scope="module")
def eager(frame):
    return predicted(estimator().predict(frame, feature_cols=["x"]))


@pytest.fixture(scope="module")
def saved(images, tmp_path_factory):
    """A directory that InferenceOptimizer.save wrote."""
    path = tmp_path_factory.mktemp("saved") / "model"
    fast = InferenceOptimizer.trace(
        Images(), input_sample=torch.from_numpy(images[:4]), accelerator="openvino", thread_num=2
    )
    InferenceOptimizer.save(fast, path)
    return path


def predicted(found):
    return np.array([row.prediction.toArray() for row in found.orderBy("id").collect()])


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["openvino_fp32", "bf16"])
def test_rows_columns_and_types_are_those_of_the_eager_path(frame, eager, method):
    est = estimator()
    found = est.predict(frame, feature_cols=["x"], batch_size=7, accelerate=method)
    assert found.schema == est.predict(frame, feature_cols=["x"]).schema
    place = F.spark_partition_id()
    kept = ["id", "text", place.alias("place")]
    assert found.select(*kept).collect() == frame.select(*kept).collect()
    assert distance(predicted(found), eager) < (0.02 if method == "bf16" else 1e-5)


@pytest.mark.slow
def test_int8_is_calibrated_with_the_rows(frame, eager):
    found = estimator().predict(frame, feature_cols=["x"], accelerate="openvino_int8")
    assert 1e-5 < distance(predicted(found), eager) < 0.05


@pytest.mark.slow
def test_dicts_of_outputs_and_two_inputs(orca_spark):
    frame = orca_spark.range(0, 50, 1, 3).selectExpr("id", "id as user", "49 - id as item")
    est = estimator(Ratings)
    options = {"feature_cols": ["user", "item"], "batch_size": 16}
    expected = est.predict(frame, **options)
    found = est.predict(frame, accelerate="openvino_fp32", **options)
    assert found.schema == expected.schema
    for one, other in zip(found.collect(), expected.collect(), strict=True):
        assert one.id == other.id
        assert one.score == pytest.approx(other.score, abs=1e-5)
        np.testing.assert_allclose(one.vector, other.vector, atol=1e-5)


@pytest.mark.slow
def test_arrays_frames_and_xshards(images, eager, orca_spark):
    est = estimator()

    def close(found):
        np.testing.assert_allclose(found, eager, atol=1e-5)

    options = {"accelerate": "onnxruntime_fp32", "batch_size": 7}
    close(est.predict(images, **options))
    table = pd.DataFrame({"x": list(images)})
    close(np.stack(est.predict(table, feature_cols=["x"], **options)["prediction"]))
    shards = XShards.partition({"x": images}, num_shards=3)
    found = est.predict(shards, **options).collect()
    close(np.concatenate([shard["prediction"] for shard in found]))


@pytest.mark.slow
def test_a_saved_directory_is_used_with_the_threads_of_a_task(frame, eager, saved, caplog):
    est = estimator()
    found = est.predict(frame, feature_cols=["x"], accelerate=saved)
    assert distance(predicted(found), eager) < 1e-5
    model = est._shipped_fast.load().model
    assert model.thread_num == 1
    assert model.final_config["INFERENCE_NUM_THREADS"] == 1
    if len(os.sched_getaffinity(0)) > 1:  # else the tasks of a machine share a core
        assert model.final_config["ENABLE_CPU_PINNING"] is False
    assert yaml.safe_load((saved / "nano_model_meta.yml").read_text())["thread_num"] == 2


@pytest.mark.slow
def test_one_model_is_converted_once_and_another_one_anew(frame, orca_spark):
    est = estimator()
    est.predict(frame, feature_cols=["x"], accelerate="openvino_fp32")
    first = est._shipped_fast
    est.predict(frame.limit(20), feature_cols=["x"], accelerate="openvino_fp32")
    assert est._shipped_fast is first
    est.predict(frame, feature_cols=["x"], accelerate="onnxruntime_fp32")
    assert est._shipped_fast is not first


@pytest.mark.slow
def test_weights_of_a_fit_are_those_that_predict(frame, images):
    est = estimator(optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1))
    old = est.predict(images, accelerate="openvino_fp32")
    est.fit({"x": images, "y": np.ones((ROWS, 4), np.float32)}, epochs=2, batch_size=8)
    found = est.predict(images, accelerate="openvino_fp32")
    assert distance(found, est.predict(images)) < 1e-5
    assert distance(found, old) > 0.1


def test_outputs_that_are_far_from_the_models_own_are_warned_of(frame, tmp_path, caplog):
    torch.manual_seed(3)
    other = Images()
    nn.init.normal_(other.head.weight)
    InferenceOptimizer.save(
        InferenceOptimizer.trace(
            other, input_sample=torch.zeros(2, PIXELS), accelerator="openvino"
        ),
        tmp_path / "other",
    )
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        estimator().predict(frame, feature_cols=["x"], accelerate=str(tmp_path / "other"))
    assert "the outputs differ from those of the original model" in caplog.text


def test_a_table_without_rows_is_predicted(frame):
    found = estimator().predict(frame.limit(0), feature_cols=["x"], accelerate="openvino_int8")
    assert found.columns == ["id", "x", "text", "prediction"]
    assert found.count() == 0


@pytest.mark.slow
def test_auto_takes_the_fastest_that_agrees_with_the_model(frame, eager, caplog, monkeypatch):
    from bigdl.orca.learn.pytorch import accelerated

    monkeypatch.setattr(accelerated, "AUTO_METHODS", ("openvino_fp32", "onnxruntime_fp32"))
    with caplog.at_level(logging.INFO, "bigdl.orca"):
        found = estimator().predict(frame, feature_cols=["x"], accelerate="auto")
    assert distance(predicted(found), eager) < accelerated.LARGEST_ERROR
    assert "accelerate='auto' chose" in caplog.text


class Spectrum(nn.Module):
    """What it computes has no operator in ONNX."""

    def forward(self, x):
        return torch.linalg.svdvals(x.view(-1, 3, 64))


class Own(MainCallback):
    def on_pred_forward(self, runner):
        runner.output = runner.batch[0].numpy()


WRONG = {
    "a method that is not there": ({"accelerate": "openvino_int4"}, "did you mean 'openvino_"),
    "neither method nor directory": ({"accelerate": 3}, "a method name, or a directory"),
    "a directory of something else": (
        {"accelerate": os.path.dirname(__file__)},
        "a model that InferenceOptimizer.save wrote",
    ),
    "a callback": (
        {"accelerate": "bf16", "callbacks": [Own()]},
        "is not supported with a custom on_pred",
    ),
    "a missing column": ({"accelerate": "bf16", "feature_cols": ["y"]}, "'y'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(frame, case):
    options, text = WRONG[case]
    with pytest.raises(UsageError, match=text):
        estimator().predict(frame, **{"feature_cols": ["x"], **options})


def test_a_model_that_cannot_be_converted_is_said(frame):
    with refused("model-unsupported"):
        estimator(lambda config: Spectrum()).predict(
            frame, feature_cols=["x"], accelerate="onnxruntime_fp32"
        )


def test_a_missing_package_is_said_with_its_cure(frame, monkeypatch):
    from bigdl.nano.acceleration import method

    monkeypatch.setattr(method, "is_installed", lambda package: package != "onnxruntime")
    with refused("package-missing"):
        estimator().predict(frame, feature_cols=["x"], accelerate="onnxruntime_fp32")
