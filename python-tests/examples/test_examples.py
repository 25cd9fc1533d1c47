"""The examples, run as a user would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bigdl.orca.learn.pytorch import Estimator

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_digits_are_learned(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "orca" / "digits.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy (\S+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 0.97
    assert re.search(r"^trained 21555 rows in ", done.stdout, re.MULTILINE)
    # neither Spark nor what it starts says anything
    assert [line for line in done.stderr.splitlines() if not line.startswith("epoch ")] == []


class Recommender(nn.Module):
    """Whether a user likes an item, from their embeddings."""

    def __init__(self, config):
        super().__init__()
        self.users = nn.Embedding(config["users"], 8)
        self.items = nn.Embedding(config["items"], 8)

    def forward(self, user, item):
        return torch.sigmoid((self.users(user) * self.items(item)).sum(1))


@pytest.fixture
def ratings(orca_spark, tmp_path):
    """A Parquet file in which users like every item of their own parity."""
    path = str(tmp_path / "data.parquet")
    pairs = orca_spark.range(20 * 30).selectExpr("int(id / 30) AS user", "int(id % 30) AS item")
    pairs.selectExpr("*", "double((user + item) % 2) AS label").write.parquet(path)
    return path


def test_a_dataframe_is_trained_on_and_predicted(orca_spark, ratings):
    df = orca_spark.read.parquet(ratings)
    est = Estimator.from_torch(
        model=Recommender,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.05),
        loss=nn.BCELoss(),
        metrics=["accuracy"],
        config={"users": 20, "items": 30},
        workers_per_node=2,
    )
    stats = est.fit(data=df, epochs=10, feature_cols=["user", "item"], label_cols=["label"], seed=0)
    assert stats[-1]["train_loss"] < 0.1 * stats[0]["train_loss"]
    found = est.evaluate(df, feature_cols=["user", "item"], label_cols=["label"])
    assert float(found["Accuracy"]) == 1.0
    liked = est.predict(df, feature_cols=["user", "item"]).filter("prediction > 0.5")
    assert liked.columns == ["user", "item", "label", "prediction"]
    assert liked.count() == liked.filter("label = 1").count() == 300
