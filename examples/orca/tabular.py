"""Clean a CSV file with XShards of pandas frames, then train and predict.

Run it with ``python examples/orca/tabular.py``. The table is generated: flats with missing values,
duplicate rows and a string column; the label is whether a flat is expensive.
"""

import argparse
import os
import tempfile

import numpy as np
import pandas as pd
import torch
from torch import nn

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data.pandas import read_csv
from bigdl.orca.data.transformer import MinMaxScaler, StringIndexer
from bigdl.orca.learn.metrics import AUC, Accuracy
from bigdl.orca.learn.pytorch import Estimator

CITIES = ["Aachen", "Bergen", "Como", "Delft"]


def write_table(path, rows, seed=0):
    """Write a CSV file with a tenth of the areas missing and a twentieth of the rows duplicated."""
    rng = np.random.default_rng(seed)
    area, age = rng.uniform(20, 150, rows).round(1), rng.integers(0, 100, rows)
    city = rng.integers(0, len(CITIES), rows)
    price = area * (1 + 0.5 * city) - 0.5 * age + rng.normal(0, 5, rows)
    table = pd.DataFrame(
        {
            "flat": np.arange(rows),
            "area": np.where(rng.random(rows) < 0.1, np.nan, area),
            "age": age,
            "city": np.array(CITIES)[city],
            "remark": None,
            "expensive": (price > np.median(price)).astype(np.float32),
        }
    )
    table = pd.concat([table, table.sample(frac=0.05, random_state=seed)])
    table.to_csv(path, index=False)
    return table


def filled(frame, means):
    """Fill missing values with the means of the columns."""
    return frame.fillna(means)


def without(frame, column):
    return frame.drop(columns=column)


def as_float(frame, column):
    return frame.assign(**{column: frame[column].astype(np.float32)})


class Classifier(nn.Module):
    """Classifier of numeric features and a city."""

    def __init__(self, config):
        super().__init__()
        self.cities = nn.Embedding(config["cities"] + 1, 4)  # 0: an unseen city
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, numbers, city):
        return self.layers(torch.cat([numbers, self.cities(city)], 1)).squeeze(1)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "flats.csv")
        write_table(path, options.rows)
        raw = read_csv(path, dtype={"remark": "str"})
        print(raw.get_null_sum())
        shards = raw.transform_shard(without, "remark").deduplicates()

        means = {"area": float(shards.select("area").concat_to_pdf()["area"].mean())}
        shards = shards.transform_shard(filled, means)
        indexer = StringIndexer(inputCol="city")
        shards = indexer.fit_transform(shards)
        scaler = MinMaxScaler(inputCol=["area", "age"], outputCol="numbers")
        shards = scaler.fit_transform(shards)
        cities = int(shards.max_values("city"))
        shards = shards.transform_shard(as_float, "expensive")

        est = Estimator.from_torch(
            model=Classifier,
            optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.02),
            loss=nn.BCELoss(),
            metrics=[Accuracy(), AUC()],
            config={"cities": cities},
            workers_per_node=2,
        )
        columns = {"feature_cols": ["numbers", "city"], "label_cols": ["expensive"]}
        stats = est.fit(shards, epochs=options.epochs, batch_size=64, seed=0, **columns)
        accuracy = float(est.evaluate(shards, batch_size=256, **columns)["Accuracy"])
        predicted = est.predict(shards, batch_size=256, feature_cols=columns["feature_cols"])
        table = predicted.select(["flat", "prediction"]).concat_to_pdf()
    print(f"rows {len(table)}")
    print(f"accuracy {accuracy:.3f}")
    return {"rows": len(table), "accuracy": accuracy, "stats": stats, "table": table}


if __name__ == "__main__":
    main()
    stop_orca_context()
