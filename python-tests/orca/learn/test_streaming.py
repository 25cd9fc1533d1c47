"""Tests of training on streams: each row once through failures, and the same state as without."""

import json

import pandas as pd
import pytest
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.streaming import StreamLearner, newest_batch, train_stream


class Total(StreamLearner):
    """Learner whose state is the list of all values that it was trained on."""

    def __init__(self, fails_at=(), where=""):
        self.values, self.fails_at, self.where = [], set(fails_at), where

    def _fail(self, where):
        if where == self.where and len(self.values) in self.fails_at:
            raise OSError("planned failure")

    def update(self, rows):
        self.values += rows["x"].to_pylist()
        self._fail("update")
        return {"count": len(self.values)}

    def save(self, folder):
        (folder / "values.json").write_text(json.dumps(self.values))
        self._fail("save")

    def load(self, folder):
        self.values = json.loads((folder / "values.json").read_text())

    def publish(self, batch):
        self._fail("publish")


def folder_stream(spark, path):
    return spark.readStream.schema("x INT").option("maxFilesPerTrigger", 1).parquet(str(path))


@pytest.fixture
def arrived(orca_spark, tmp_path):
    """Return a folder with two files of five rows each, and a stream of them."""
    folder = tmp_path / "arrived"
    folder.mkdir()
    for number in range(2):
        rows = pd.DataFrame({"x": range(5 * number, 5 * number + 5)}, dtype="int32")
        rows.to_parquet(folder / f"{number}.parquet")
    return folder_stream(orca_spark, folder)


@pytest.mark.parametrize("where", ["update", "save", "publish"])
def test_each_row_is_trained_once_through_failures(arrived, tmp_path, where):
    from pyspark.errors import StreamingQueryException

    published = []
    for learner in (Total([5], where), Total([10], where), Total()):

        def publish(batch, learner=learner):
            learner.publish(batch)
            published.append(batch.number)

        query = train_stream(
            arrived, learner, tmp_path / "state", available_now=True, on_commit=publish
        )
        if learner.where:
            with pytest.raises(StreamingQueryException, match=r"planned failure|cannot be written"):
                query.awaitTermination()
        else:
            query.awaitTermination()
    assert sorted(learner.values) == list(range(10))  # Spark may take either file first
    assert sorted(set(published)) == [0, 1]
    newest = newest_batch(tmp_path / "state")
    assert (newest.number, newest.rows, newest.metrics) == (1, 5, {"count": 10.0})


@pytest.mark.slow
def test_a_restarted_stream_trains_as_an_uninterrupted_one(orca_spark, tmp_path):
    torch.manual_seed(0)
    rows = pd.DataFrame(torch.rand(64, 3).numpy(), columns=["a", "b", "y"])
    weights = []
    for parts in (1, 2):
        folder, state = tmp_path / f"rows{parts}", tmp_path / f"state{parts}"
        folder.mkdir()
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(2, 1))
        numbers = []
        for part in range(2):
            rows[32 * part : 32 * part + 32].to_parquet(folder / f"{part}.parquet")
            if part < 2 - parts:
                continue
            estimator = Estimator.from_torch(
                model=module,
                loss=torch.nn.MSELoss(),
                optimizer=lambda model, config: torch.optim.Adam(model.parameters(), 0.01),
                backend="local",
            )
            schema = "a FLOAT, b FLOAT, y FLOAT"
            reader = orca_spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
            query = estimator.fit_stream(
                reader.parquet(str(folder)),
                state,
                transform=lambda table: (
                    table.select(["a", "b"]).to_pandas().to_numpy(),
                    table.select(["y"]).to_pandas().to_numpy(),
                ),
                batch_size=16,
                seed=5,
                evaluate=False,
                available_now=True,
                on_commit=lambda batch, numbers=numbers: numbers.append(batch.number),
            )
            query.awaitTermination()
        weights.append(estimator.get_model()[1].weight.detach())
        assert numbers == [0, 1]
    assert torch.equal(*weights)


def test_tables_that_are_no_streams_are_rejected(orca_spark, tmp_path):
    with pytest.raises(UsageError, match="streaming DataFrame"):
        train_stream(orca_spark.range(3), Total(), tmp_path / "state")
