"""Predict a Spark DataFrame with an accelerated model.

    python examples/nano/predict_with_orca.py --accelerate openvino_int8

An Orca Estimator is trained on a DataFrame and predicts it twice: with the original model, and with
a Nano method. The model is converted and calibrated once, on the driver, and runs in Spark tasks.
"""

import argparse

import pyarrow as pa
import torch
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import functions as F
from sklearn.datasets import load_digits
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator


def model_creator(config):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def digits(spark):
    """Return a DataFrame of id, image (a vector of 64 pixels) and label."""
    images, labels = load_digits(return_X_y=True)
    table = pa.table({"id": range(len(labels)), "image": list(images / 16), "label": labels})
    return spark.createDataFrame(table).withColumn("image", array_to_vector("image"))


def classes(predicted):
    """Add the class with the highest score to the DataFrame."""
    best = F.expr("array_position(scores, array_max(scores)) - 1")
    scores = predicted.withColumn("scores", vector_to_array("prediction"))
    return scores.select("id", "label", best.alias("class"))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerate", default="openvino_int8", help='a method, or "auto"')
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    df = digits(OrcaContext.get_spark_session())
    train, test = df.filter("id % 5 != 0"), df.filter("id % 5 = 0")
    est = Estimator.from_torch(
        model=model_creator, optimizer=optimizer_creator, loss=nn.CrossEntropyLoss()
    )
    est.fit(
        train,
        epochs=options.epochs,
        batch_size=64,
        feature_cols=["image"],
        label_cols=["label"],
        seed=0,
    )

    wanted = {"batch_size": 256, "feature_cols": ["image"]}
    original = classes(est.predict(test, **wanted))
    fast = classes(est.predict(test, accelerate=options.accelerate, **wanted))
    both = original.join(fast.select("id", F.col("class").alias("fast")), "id").toPandas()
    metrics = {
        "own": float((both["class"] == both["label"]).mean()),
        "accelerated": float((both["fast"] == both["label"]).mean()),
        "agreement": float((both["class"] == both["fast"]).mean()),
    }
    print(f"accuracy {metrics['own']:.3f}, with {options.accelerate} {metrics['accelerated']:.3f}")
    print(f"the same class on {100 * metrics['agreement']:.1f} % of the rows")
    return metrics


if __name__ == "__main__":
    main()
    stop_orca_context()
