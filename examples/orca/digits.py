"""Train, evaluate, predict, save and load with scikit-learn's digits in a Spark DataFrame.

Run it with ``python examples/orca/digits.py``; ``--help`` lists the options.
"""

import argparse
import os
import tempfile
import time

import pyarrow as pa
import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import functions as F
from sklearn.datasets import load_digits
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.metrics import Accuracy
from bigdl.orca.learn.pytorch import Estimator


def model_creator(config):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, config["channels"], 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(config["channels"], 2 * config["channels"], 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * config["channels"] * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=config["lr"])


def digits(spark):
    """Return a DataFrame of id, image (a vector of 64 pixels) and label."""
    images, labels = load_digits(return_X_y=True)
    table = pa.table({"id": range(len(labels)), "image": list(images / 16), "label": labels})
    return spark.createDataFrame(table).withColumn("image", array_to_vector("image"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    started = time.time()
    init_orca_context("local", cores=options.cores)
    df = digits(OrcaContext.get_spark_session())
    train, test = df.filter("id % 5 != 0"), df.filter("id % 5 = 0")

    est = Estimator.from_torch(
        model=model_creator,
        optimizer=optimizer_creator,
        loss=nn.CrossEntropyLoss(),
        metrics=[Accuracy()],
        config={"channels": 16, "lr": 3e-3},
        workers_per_node=options.workers,
        backend="spark",
    )
    columns = {"feature_cols": ["image"], "label_cols": ["label"]}
    fit_started = time.time()
    stats = est.fit(train, epochs=options.epochs, batch_size=64, seed=0, **columns)
    seconds = time.time() - fit_started
    rows = sum(epoch["num_samples"] for epoch in stats)

    accuracy = float(est.evaluate(test, batch_size=256, **columns)["Accuracy"])
    predicted = est.predict(test, batch_size=256, feature_cols=["image"])
    best = F.expr("array_position(scores, array_max(scores)) - 1")
    digit = predicted.withColumn("scores", vector_to_array("prediction")).withColumn("digit", best)
    right = digit.filter("digit = label").count() / digit.count()

    with tempfile.TemporaryDirectory() as folder:
        path = est.save(os.path.join(folder, "digits.pt"))
        other = Estimator.from_torch(model=model_creator, config={"channels": 16})
        other.load(path)
        again = other.predict(test, batch_size=256, feature_cols=["image"])
        same = predicted.select("id", "prediction").exceptAll(again.select("id", "prediction"))
        assert same.count() == 0, "the loaded model predicts differently"

    stop_orca_context()
    assert abs(right - accuracy) < 1e-6, (right, accuracy)
    print(f"trained {rows} rows in {seconds:.1f} s ({rows / seconds:.0f} rows/s)")
    print(f"accuracy {accuracy:.3f}")
    print(f"finished in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
