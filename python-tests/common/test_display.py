"""Representations say what an object holds; a notebook shows them as a table."""

import numpy as np
import pandas as pd
import torch

from bigdl.common.display import call_text, html_table
from bigdl.orca.learn.pytorch import Estimator


def test_values_are_escaped_and_none_is_left_out():
    fields = {"a": "<b>", "c": None, "d": 0.123456, "e": dict}
    assert call_text("X", fields) == "X(a='<b>', d=0.1235, e=dict)"
    table = html_table("T & U", fields)
    assert "T &amp; U" in table
    assert "&lt;b&gt;" in table
    assert ">c<" not in table


def test_an_estimator_shows_its_model_backend_and_last_metrics():
    estimator = Estimator.from_torch(
        model=torch.nn.Linear(1, 1),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), 0.1),
        loss=torch.nn.MSELoss(),
        backend="local",
    )
    new = "PyTorchEstimator(model='Linear', backend='local', workers_per_node=1)"
    assert repr(estimator) == new
    assert "<svg" not in estimator._repr_html_()
    x = np.linspace(0, 1, 8, dtype="float32")[:, None]
    estimator.fit((x, x), epochs=2, validation_data=(x, x))
    shown = repr(estimator)
    assert shown.startswith(new[:-1] + ", epochs=2, train_loss=")
    assert "val_loss=" in shown
    assert "<svg" in estimator._repr_html_()


def test_shards_and_tables_show_partitions_and_columns(orca_spark):
    from bigdl.friesian.feature import FeatureTable
    from bigdl.orca.data import XShards

    shards = XShards.partition({"x": np.zeros(4)}, num_shards=2)
    assert repr(shards).startswith("SparkXShards(partitions=2")
    assert "partitions" in shards._repr_html_()
    frame = orca_spark.createDataFrame(pd.DataFrame({"user": [1], "price": [2.0]}))
    table = FeatureTable(frame)
    assert repr(table) == "FeatureTable[user: bigint, price: double]"
    assert "price" in table._repr_html_()
    assert "2.0" not in table._repr_html_()
    orca_spark.conf.set("spark.sql.repl.eagerEval.enabled", True)
    try:
        assert "2.0" in table._repr_html_()
    finally:
        orca_spark.conf.unset("spark.sql.repl.eagerEval.enabled")
