"""Tasks that predict read the Parquet files of a DataFrame that selects, casts and filters them."""

import datetime
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from bigdl.orca.learn.pytorch import Estimator

ROWS = 500


@pytest.fixture(scope="module")
def frame(orca_spark, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("predict") / "rows")
    rows = np.arange(ROWS)
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "id": rows,
            "x": pa.array(np.sin(rows), mask=rows % 50 == 7),
            "text": [f"t{n}" for n in rows],
            "time": pa.array([start + datetime.timedelta(hours=int(n)) for n in rows]),
            "day": pa.array([datetime.date(2020, 1, 1 + n % 31) for n in rows]),
            "pair": [{"a": int(n), "b": "b" * (n % 3)} for n in rows],
            "xs": [[float(n), 1.0] for n in rows],
        }
    )
    for part, rows_of_part in enumerate(np.array_split(rows, 3)):
        part_path = f"{path}-{part}"
        pq.write_table(table.take(pa.array(rows_of_part)), part_path, row_group_size=40)
    return orca_spark.read.parquet(*(f"{path}-{part}" for part in range(3)))


@pytest.fixture(scope="module")
def estimator(orca_spark):
    return Estimator.from_torch(model=Scale(), workers_per_node=2)


class Scale(torch.nn.Module):
    def forward(self, x):
        return x.reshape(len(x), -1).sum(1) * 3


@pytest.fixture
def way(caplog):
    caplog.set_level(logging.DEBUG, logger="bigdl.orca")

    def last():
        messages = [r.getMessage() for r in caplog.records]
        (message,) = [each for each in messages if "that predict read" in each]
        return message.rpartition("from ")[2]

    return last


def vectors(df):
    return df.select("id", array_to_vector("xs").alias("x"))


@pytest.mark.slow_cases("vectors", "arrays")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda df: df, "Parquet files"),
        (lambda df: df.where("id > 100 AND (x > 0 OR x IS NULL)"), "Parquet files"),
        (lambda df: df.select("text", F.col("id").cast("int").alias("x"), "time"), "Parquet files"),
        (lambda df: df.select("id", F.col("xs").alias("x")), "Parquet files"),
        (lambda df: df.where("id > 600"), "Parquet files"),
        (lambda df: df.withColumn("x", F.col("x") + 1), "Spark"),
        (vectors, "Spark"),
    ],
    ids=["all", "filtered", "cast", "arrays", "no rows", "computed", "vectors"],
)
def test_predictions_and_rows_are_those_of_spark(
    frame, estimator, way, monkeypatch, change, expected
):
    frame.sparkSession.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        df = change(frame)
        predicted = estimator.predict(df, feature_cols=["x"], batch_size=64)
        assert way() == expected
        monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
        by_spark = estimator.predict(df, feature_cols=["x"], batch_size=64)
        assert predicted.schema == by_spark.schema
        assert predicted.collect() == by_spark.collect()
        assert predicted.drop("prediction").collect() == df.collect()
        assert predicted.rdd.getNumPartitions() == df.rdd.getNumPartitions()
    finally:
        frame.sparkSession.conf.unset("spark.sql.session.timeZone")


def test_vectors_of_files_are_read_by_the_tasks(frame, estimator, way, tmp_path, monkeypatch):
    vectors(frame).write.parquet(str(tmp_path / "vectors"))
    df = frame.sparkSession.read.parquet(str(tmp_path / "vectors")).where("id < 77")
    predicted = estimator.predict(df, feature_cols=["x"]).collect()
    assert way() == "Parquet files"
    monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
    assert predicted == estimator.predict(df, feature_cols=["x"]).collect()
