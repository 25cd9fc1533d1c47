"""Train a model with torch.distributed and with three settings of BigDL's parameter layer.

Run it with ``python examples/orca/parameter_layer.py``; ``--help`` lists the options. The data are
generated: points of two intertwined spirals. All settings make the same updates, so their losses
agree up to rounding. They differ in how workers run, how gradients are all-reduced, and in the cost
of a lost worker.

===================  ==============================================================================
``spark``            ``backend="spark"``: one barrier stage, all-reduce by torch.distributed
``ray``              ``backend="ray"``: the same by actors of a Ray that is started on Spark
``bigdl, shuffle``   ``backend="bigdl"``: stateless Spark tasks, everything through Spark's shuffle
``bigdl, barrier``   ``backend="bigdl"``: a barrier stage for each group of steps, peer to peer
===================  ==============================================================================
"""

import argparse
import time

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

COLUMNS = {"feature_cols": ["point"], "label_cols": ["spiral"]}
RUNS = {
    "spark": ("spark", {}),
    "ray": ("ray", {}),
    "bigdl, shuffle": ("bigdl", {"transport": "shuffle"}),
    "bigdl, barrier": ("bigdl", {"transport": "barrier"}),
}
PHASES = {
    "get_weights_s": "get weights",
    "compute_s": "compute",
    "put_gradient_s": "put gradient",
    "aggregate_s": "aggregate",
    "compute_weight_s": "compute weight",
    "step_s": "whole step",
}


def spirals(spark, rows, seed=0):
    """Return a DataFrame of points and the index of their spiral."""
    random = np.random.default_rng(seed)
    spiral = np.arange(rows) % 2
    radius = random.uniform(0.2, 1.0, rows)
    angle = 1.5 * np.pi * radius + np.pi * spiral
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    points += random.normal(0, 0.02, points.shape)
    table = {"point": list(points.astype(np.float32)), "spiral": spiral.astype(np.float32)}
    return spark.createDataFrame(pa.table(table))


class Classifier(nn.Module):
    """Classifier that returns the logit of the spiral of a point."""

    def __init__(self, config):
        super().__init__()
        width = config["width"]
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, point):
        return self.layers(point).squeeze(1)


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(frame, backend, options, arguments):
    """Train a new model; return its seconds, losses and the mean seconds of the step phases."""
    est = Estimator.from_torch(
        model=Classifier,
        optimizer=adam,
        loss=nn.BCEWithLogitsLoss(),
        config={"width": arguments.width},
        workers_per_node=arguments.workers,
        backend=backend,
    )
    started = time.perf_counter()
    stats = est.fit(
        frame,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        profile=True,
        seed=0,
        **COLUMNS,
        **options,
    )
    seconds = time.perf_counter() - started
    profile = stats[-1]["profile"]
    return {
        "seconds": seconds,
        "losses": [epoch["train_loss"] for epoch in stats],
        "phases": {name: profile[key] for key, name in PHASES.items() if key in profile},
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    arguments = parser.parse_args(argv)

    init_orca_context("local", cores=arguments.cores)
    frame = spirals(OrcaContext.get_spark_session(), arguments.rows)
    results = {}
    for name in arguments.runs:
        backend, options = RUNS[name]
        results[name] = train(frame, backend, options, arguments)
        losses = results[name]["losses"]
        print(f"{name}: loss {losses[-1]:.4f}, {results[name]['seconds']:.1f} s")
        for phase, seconds in results[name]["phases"].items():
            print(f"    {phase:<15}{1e3 * seconds:8.2f} ms")
    return results


if __name__ == "__main__":
    main()
    stop_orca_context()
