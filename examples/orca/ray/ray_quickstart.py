"""Train a network on Ray from arrays, a Ray Dataset and XShards.

Run it with ``python examples/orca/ray/ray_quickstart.py``; ``--help`` lists the options.  With
``--address`` it runs on a Ray cluster, otherwise it starts Ray.  The data are generated.
"""

import argparse

import numpy as np
import pandas as pd
import ray
import torch
from torch import nn

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data import XShards
from bigdl.orca.learn.pytorch import Estimator


def model_creator(config):
    return nn.Sequential(nn.Linear(4, config["width"]), nn.Tanh(), nn.Linear(config["width"], 1))


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def made_up(rows, seed=0):
    """Generate four-dimensional points and a smooth function of them."""
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return x, np.sin(x.sum(1))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="address of a Ray cluster, e.g. 10.0.0.1:6379")
    parser.add_argument("--cores", type=int, default=2, help="cores of a new Ray")
    parser.add_argument("--workers-per-node", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args(argv)

    if arguments.address:
        init_orca_context(runtime="ray", address=arguments.address)
    else:
        init_orca_context(runtime="ray", cores=arguments.cores)
    est = Estimator.from_torch(
        model=model_creator,
        optimizer=optimizer_creator,
        loss=nn.MSELoss(),
        metrics=["mae"],
        config={"width": 32},
        backend="ray",
        workers_per_node=arguments.workers_per_node,
    )
    x, y = made_up(arguments.rows)

    stats = est.fit((x, y), epochs=arguments.epochs, batch_size=64, seed=0)
    print(f"arrays: loss {stats[0]['train_loss']:.4f} -> {stats[-1]['train_loss']:.4f}")

    shards = XShards.partition({"x": x, "y": y}, num_shards=4)
    metrics = est.evaluate(shards, batch_size=256)
    print(f"XShards: loss {metrics['val_loss']:.4f}, mean absolute error {metrics['MAE']:.4f}")

    dataset = ray.data.from_pandas(pd.DataFrame({"point": list(x), "value": y}))
    predicted = est.predict(dataset, feature_cols="point").to_pandas()
    error = (predicted["prediction"] - predicted["value"]).abs().mean()
    print(f"Ray Dataset: columns {list(predicted.columns)}, mean absolute error {error:.4f}")
    return {"losses": [s["train_loss"] for s in stats], "figures": metrics, "error": error}


if __name__ == "__main__":
    main()
    stop_orca_context()
