"""Workers read the Parquet files of a DataFrame that selects, casts and filters their columns."""

import logging

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import functions as F
from refusals import refused

from bigdl.orca.engine import SparkEngine
from bigdl.orca.learn.pytorch import Estimator

ROWS = 1003


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("frames") / "rows"
    path.mkdir()
    x = np.random.default_rng(0).random((ROWS, 3))
    frame = pd.DataFrame({"id": np.arange(ROWS), "x": x[:, 0], "y": x[:, 1], "xs": list(x)})
    for part, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        table = pa.Table.from_pandas(frame.iloc[rows], preserve_index=False)
        pq.write_table(table, path / f"{part}.parquet", row_group_size=100)
    return str(path)


def rows_of(frame, workers=2):
    """Ids and targets of the rows of each worker."""
    from bigdl.orca.data.feeds import as_feed

    def program(worker):
        ids, targets = sorted(worker.shard.arrays, key=lambda array: array.dtype.kind != "i")
        return [[int(n) for n in ids.ravel()], [float(n) for n in targets.ravel()]]

    feed = as_feed(frame, ["number"], ["y"], {})
    return SparkEngine(workers_per_node=workers).run(program, feed)


def way(caplog):
    (record,) = [r.getMessage() for r in caplog.records if "read the rows of" in r.getMessage()]
    return "files" if "Parquet files" in record else "Spark"


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.DEBUG, logger="bigdl.orca")
    return caplog


def fit(frame, workers=2, **options):
    torch.manual_seed(0)
    estimator = Estimator.from_torch(
        model=lambda config: Line(),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
        workers_per_node=workers,
        config=options.pop("config", None),
    )
    columns = {"feature_cols": ["x"], "label_cols": "y", "batch_size": 100, "seed": 1}
    history = estimator.fit(frame, epochs=2, **{**columns, **options})
    return history, estimator


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.line(x[:, None])[:, 0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda df: df, "files"),
        (lambda df: df.select("y", "x", "xs"), "files"),
        (
            lambda df: df.withColumnRenamed("x", "a.b").select(F.col("`a.b`").alias("x"), "y"),
            "files",
        ),
        (lambda df: df.where("x > 0.5"), "files"),
        (lambda df: df.withColumn("x", F.col("x").cast("float")), "files"),
        (lambda df: df.dropna().where(F.col("id").isin(*range(500))), "files"),
        (lambda df: df.where("x > 0.5 AND length(string(id)) > 1"), "Spark"),
        (lambda df: df.withColumn("x", F.col("x") * 2), "Spark"),
        (lambda df: df.repartition(3), "Spark"),
        (lambda df: df.limit(500), "Spark"),
    ],
    ids=[
        "all",
        "selected",
        "renamed",
        "filter",
        "cast",
        "dropna",
        "unknown filter",
        "computed",
        "repartitioned",
        "limit",
    ],
)
def test_plans_that_only_select_columns_are_read_from_files(
    folder, orca_spark, messages, change, expected
):
    frame = change(orca_spark.read.parquet(folder))
    history, _ = fit(frame)
    assert way(messages) == expected
    assert history[0]["num_samples"] == frame.count()


def test_each_row_reaches_one_worker_once_with_its_values(folder, orca_spark, messages):
    frame = orca_spark.read.parquet(folder)
    expected = {row.id: row.y for row in frame.select("id", "y").collect()}
    results = rows_of(frame.select(F.col("id").alias("number"), "y"))
    assert way(messages) == "files"
    assert [len(ids) for ids, _ in results] == [501, 502]
    pairs = [pair for ids, targets in results for pair in zip(ids, targets, strict=True)]
    assert len(pairs) == ROWS
    for number, target in pairs:
        assert target == np.float32(expected.pop(number))


def test_filtered_rows_are_divided_evenly_and_keep_their_values(folder, orca_spark, messages):
    frame = orca_spark.read.parquet(folder).where("x > 0.9 OR id BETWEEN 300 AND 650")
    expected = {row.id: row.y for row in frame.select("id", "y").collect()}
    results = rows_of(frame.select(F.col("id").alias("number"), "y"))
    assert way(messages) == "files"
    numbers = [n for ids, _ in results for n in ids]
    assert sorted(numbers) == sorted(expected)
    assert abs(len(results[0][0]) - len(results[1][0])) <= 1
    for ids, targets in results:
        for number, target in zip(ids, targets, strict=True):
            assert target == np.float32(expected[number])


def test_a_filter_without_rows_is_refused_by_either_way(folder, orca_spark):
    with refused("data-empty"):
        fit(orca_spark.read.parquet(folder).where("x > 5"))


def test_a_cast_that_overflows_is_an_error(folder, orca_spark):
    frame = orca_spark.read.parquet(folder).where("id > 100").withColumn("x", F.expr("tinyint(id)"))
    with refused("data-value", "cannot be cast to int8"):
        fit(frame)


def test_a_fit_equals_that_of_the_path(folder, orca_spark):
    of_frame, _ = fit(orca_spark.read.parquet(folder), workers=1)
    of_path, _ = fit(folder, workers=1)
    assert of_frame[-1]["num_samples"] == of_path[-1]["num_samples"] == ROWS
    assert of_frame[-1]["train_loss"] == pytest.approx(of_path[-1]["train_loss"], rel=0.05)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("filtered", [False, True])
def test_the_bits_of_weights_do_not_depend_on_the_way(folder, orca_spark, monkeypatch, filtered):
    frame = orca_spark.read.parquet(folder)
    frame = frame.where("x < 0.8") if filtered else frame
    weights = []
    for workers, switched_off in ((1, False), (2, False), (2, True)):
        if switched_off:
            monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
        _, estimator = fit(frame, workers, exact="bits")
        weights.append(estimator.get_model().line.weight.item())
    assert len(set(weights)) == 1


def test_an_order_that_is_kept_and_a_switch_leave_the_files_to_spark(
    folder, orca_spark, messages, monkeypatch
):
    frame = orca_spark.read.parquet(folder)
    fit(frame, config={"shuffle": False})
    assert not any("read the rows of" in r.getMessage() for r in messages.records)
    monkeypatch.setenv("BIGDL_NO_PLAN_INSPECTION", "1")
    fit(frame)
    assert way(messages) == "Spark"


def test_validation_rows_are_read_from_files_too(folder, orca_spark, messages):
    frame = orca_spark.read.parquet(folder)
    history, estimator = fit(frame, validation_data=frame.select("y", "x"))
    assert history[-1]["val_num_samples"] == ROWS
    ways = {r.getMessage() for r in messages.records if "read the rows of" in r.getMessage()}
    assert all("Parquet files" in each for each in ways)
    figures = estimator.evaluate(frame, feature_cols=["x"], label_cols="y")
    assert figures["val_loss"] == pytest.approx(history[-1]["val_loss"], rel=1e-5)


def test_a_null_is_refused_by_its_column(tmp_path, orca_spark):
    table = pa.table({"x": [1.0, None, 2.0], "y": [1.0, 2.0, 3.0]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with refused("data-null", "'x'"):
        fit(orca_spark.read.parquet(str(tmp_path / "rows.parquet")))
