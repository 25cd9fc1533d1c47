"""Reports of predictions on Spark: rows, repetitions, durations and advice."""

import time

import numpy as np
import pytest
import torch

from bigdl.orca.data import XShards
from bigdl.orca.learn.prediction.report import PredictionReport
from bigdl.orca.learn.pytorch import Estimator
from helpers.refusals import refused


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def record(partition, rows, *, load=0.0, model=0.0, other=0.0):
    times = {"load_s": load, "model_s": model, "other_s": other}
    return {"partition": partition, "host": "a", "ended_at": 0.0, "rows": rows, **times}


def test_rows_are_counted_once_and_again_by_a_second_action(orca_spark, tmp_path):
    frame = orca_spark.range(100).repartition(4).selectExpr("id", "float(id) AS x")
    estimator = Estimator.from_torch(model=torch.nn.ReLU())
    with refused("not-fitted", "report="):
        estimator.prediction_report()
    page = tmp_path / "predict.html"
    predicted = estimator.predict(frame, feature_cols="x", batch_size=7, report=page)
    assert "No task has ended yet" in page.read_text()
    rows = {row["id"]: row["prediction"] for row in predicted.collect()}
    assert rows == {n: float(n) for n in range(100)}
    report = estimator.prediction_report()
    assert (report.rows(), report.repeated_rows()) == (100, 0)
    assert len({each["partition"] for each in report.records}) == 4
    wait_until(lambda: "100 rows in 4 partitions" in page.read_text())
    predicted.collect()
    assert (report.rows(), report.repeated_rows()) == (100, 100)
    assert any("write them once" in each for each in report.advice(worth_s=0))
    wait_until(lambda: "100 predicted again" in page.read_text())


def test_shards_and_classes_have_a_report_too(orca_spark, tmp_path):
    shards = XShards.partition({"x": np.ones((9, 2), "float32")}, num_shards=3)
    estimator = Estimator.from_torch(model=torch.nn.Identity(), loss=torch.nn.CrossEntropyLoss())
    page = tmp_path / "predict.html"
    made = estimator.predict(shards, feature_cols=None, output="class", report=page).collect()
    assert sum(len(shard["prediction"]) for shard in made) == 9
    assert estimator.prediction_report().rows() == 9


def test_predictions_without_spark_have_no_report(tmp_path):
    estimator = Estimator.from_torch(model=torch.nn.ReLU(), backend="local")
    with refused("unsupported", "report="):
        estimator.predict(np.ones((2, 1), "float32"), report=tmp_path / "predict.html")


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([record(0, 10, load=9, model=3), record(1, 10, load=9, model=3)], "loading the model"),
        ([record(0, 10, model=2, other=9)], "reading, converting and writing"),
        ([record(0, 10, model=9), record(0, 10, model=9)], "were predicted again"),
        ([record(n, 900 if n == 1 else 9, model=90 if n == 1 else 1) for n in range(4)], "evenly"),
        ([record(n, 100, model=9, other=1) for n in range(4)], None),
    ],
)
def test_advice_follows_from_the_shares(records, sentence):
    advice = PredictionReport({"data": "Spark DataFrame"}, records).advice()
    assert len(advice) == (sentence is not None), advice
    assert all(sentence in each for each in advice)
