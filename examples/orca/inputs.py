"""Train one model on three input types: a PyTorch DataLoader, a Spark DataFrame and XShards.

Run it with ``python examples/orca/inputs.py``. The data are generated: two numbers, and whether the
first is greater.
"""

import argparse
import os
import tempfile

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.data.pandas import read_csv
from bigdl.orca.learn.metrics import Accuracy
from bigdl.orca.learn.pytorch import Estimator

COLUMNS = {"feature_cols": ["first", "second"], "label_cols": ["label"]}


class Comparison(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, first, second):
        return torch.sigmoid(self.linear(torch.stack([first, second], 1))).squeeze(1)


def estimator():
    """Return an Estimator from a PyTorch model, an optimizer and a loss."""
    torch.manual_seed(0)
    model = Comparison()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return Estimator.from_torch(
        model=model, optimizer=optimizer, loss=nn.BCELoss(), metrics=[Accuracy()]
    )


def table(rows=512):
    values = np.random.default_rng(0).normal(size=(rows, 2)).astype(np.float32)
    label = (values[:, 0] > values[:, 1]).astype(np.float32)
    return pd.DataFrame({"first": values[:, 0], "second": values[:, 1], "label": label})


def with_loader(data, epochs):
    """Train on a DataLoader; every worker takes its share of each batch."""
    columns = [torch.from_numpy(data[name].to_numpy(copy=True)) for name in data]
    train_loader = DataLoader(TensorDataset(*columns), batch_size=32, shuffle=True)
    est = estimator()
    est.fit(data=train_loader, epochs=epochs, batch_size=32, seed=0)
    return float(est.evaluate(train_loader)["Accuracy"])


def with_dataframe(data, epochs, folder):
    """Train on named columns of a Spark DataFrame."""
    spark = OrcaContext.get_spark_session()
    path = os.path.join(folder, "data.parquet")
    data.to_parquet(path)
    df = spark.read.parquet(path)
    est = estimator()
    est.fit(data=df, epochs=epochs, batch_size=32, seed=0, **COLUMNS)
    predicted = est.predict(df, feature_cols=COLUMNS["feature_cols"])
    return predicted.filter("(prediction > 0.5) = (label = 1)").count() / predicted.count()


def negative(df, column_name):
    """Negate a column of a shard with pandas."""
    df[column_name] = -df[column_name]
    return df


def with_xshards(data, epochs, folder):
    """Train on distributed pandas frames that a function transforms."""
    path = os.path.join(folder, "data.csv")
    data.to_csv(path, index=False)
    shards = read_csv(path)
    turned = shards.transform_shard(negative, "first").transform_shard(negative, "second")
    est = estimator()
    est.fit(data=turned, epochs=epochs, batch_size=32, seed=0, **COLUMNS)
    return float(est.evaluate(turned, **COLUMNS)["Accuracy"])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    data = table()
    with tempfile.TemporaryDirectory() as folder:
        accuracies = {
            "loader": with_loader(data, options.epochs),
            "dataframe": with_dataframe(data, options.epochs, folder),
            "xshards": with_xshards(data, options.epochs, folder),
        }
    for name, accuracy in accuracies.items():
        print(f"accuracy with {name} {accuracy:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
    stop_orca_context()
