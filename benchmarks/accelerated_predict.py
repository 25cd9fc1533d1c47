"""Prediction of images in a Spark DataFrame with accelerated models and with eager PyTorch.

    python benchmarks/accelerated_predict.py [--model resnet50] [--size 224] [--rows 512]
        [--methods openvino_fp32 openvino_int8] [--tasks 2] [--batch 32] [--repeats 5]
        [--json results.json] [--quick]

The DataFrame is cached by Spark and holds flattened images of random numbers; the weights are
random too, which changes accuracy but not speed.  Every side is ``Estimator.predict`` with or
without ``accelerate=``, one thread for each task, with its models loaded before the clock starts.
A repeat runs all sides one after the other, so that the noise of a shared machine meets all of
them.  ``rows/s`` are medians; ratios are medians, with their range, of the ratio to eager within
one repeat.  CPU seconds are those of all processes below this one, so that a loaded machine
matters less.  ``error`` is the relative Euclidean distance of the predictions from eager's, and a
side whose rows differ by more than ``--tolerance`` ends the benchmark with an error.
"""

import argparse
import json
import logging
import os
import statistics
import time

import numpy as np
import pandas as pd
import psutil
import torch
from torch import nn

EAGER = "eager"


class Flat(nn.Module):
    """Image network that takes flat rows."""

    def __init__(self, config):
        super().__init__()
        from bigdl.nano.pytorch.vision import models

        torch.manual_seed(0)
        self.size = config["size"]
        self.network = getattr(models, config["model"])(include_top=True)

    def forward(self, x):
        return self.network(x.view(-1, 3, self.size, self.size))


def images(spark, rows, size, tasks):
    random = np.random.default_rng(0)
    pixels = list(random.standard_normal((rows, 3 * size * size), dtype=np.float32))
    frame = spark.createDataFrame(pd.DataFrame({"id": range(rows), "x": pixels}))
    frame = frame.repartition(tasks, "id").cache()
    frame.count()
    return frame


_seen = {}


def cpu_seconds():
    """Return the CPU seconds of all child processes, including the last reading of ended ones."""
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
            _seen[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return sum(_seen.values())


def measured(frame):
    cpu, began = cpu_seconds(), time.perf_counter()
    frame.select("prediction").write.format("noop").mode("overwrite").save()
    return {"wall": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}


def predictions(frame):
    rows = frame.select("id", "prediction").toPandas().sort_values("id")
    return np.stack([vector.toArray() for vector in rows["prediction"]])


def ratios(runs, side, clock):
    values = [one[clock] / other[clock] for one, other in zip(runs[EAGER], runs[side], strict=True)]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def benchmark(spark, args):
    from bigdl.orca.learn.pytorch import Estimator

    frame = images(spark, args.rows, args.size, args.tasks)
    est = Estimator.from_torch(model=Flat, config={"model": args.model, "size": args.size})
    sides, seconds = {}, {}
    for name in (EAGER, *args.methods):
        began = time.perf_counter()
        options = {} if name == EAGER else {"accelerate": name}
        sides[name] = est.predict(frame, feature_cols=["x"], batch_size=args.batch, **options)
        seconds[name] = time.perf_counter() - began
    outputs = {name: predictions(side) for name, side in sides.items()}  # loads the models as well
    expected, runs = outputs[EAGER], {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, side in sides.items():
            runs[name].append(measured(side))
    results = []
    for name in sides:
        error = float(np.linalg.norm(outputs[name] - expected) / np.linalg.norm(expected))
        if error > args.tolerance:
            raise SystemExit(f"{name}: the rows differ from eager's by {error:.3g}")
        results.append(
            {
                "side": name,
                "rows_per_second": args.rows / statistics.median(r["wall"] for r in runs[name]),
                "wall": ratios(runs, name, "wall"),
                "cpu": ratios(runs, name, "cpu"),
                "error": error,
                "seconds_to_make": seconds[name],
            }
        )
    return results


def show(results):
    print(
        f"{'side':<26}{'rows/s':>9}{'ratio (wall)':>24}{'ratio (CPU)':>24}{'error':>10}{'made':>8}"
    )
    for row in results:
        wall, cpu = (
            "{median:.2f} ({least:.2f} to {most:.2f})".format(**row[clock])
            for clock in ("wall", "cpu")
        )
        print(
            f"{row['side']:<26}{row['rows_per_second']:>9.1f}{wall:>24}{cpu:>24}"
            f"{row['error']:>10.1e}{row['seconds_to_make']:>7.1f}s"
        )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--methods", nargs="+", default=["openvino_fp32", "openvino_int8"])
    parser.add_argument("--tasks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="a small model, few rows and repeats")
    args = parser.parse_args()
    if args.quick:
        args.model, args.size, args.rows, args.repeats = "resnet18", 64, 192, 3
    return args


def main():
    from bigdl.orca import init_orca_context, stop_orca_context

    args = arguments()
    # an Arrow batch of the default 10000 images would have gigabytes
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(args.batch * 4)}
    context = init_orca_context("local", cores=args.tasks, memory="4g", conf=conf)
    logging.getLogger("bigdl.orca").setLevel(logging.WARNING)
    try:
        from pyspark.sql import SparkSession

        results = benchmark(SparkSession(context), args)
    finally:
        stop_orca_context()
    print(
        f"\n{args.model}, {args.rows} images of 3x{args.size}x{args.size}, batches of "
        f"{args.batch}, {args.tasks} tasks of one thread, {args.repeats} repeats\n"
    )
    show(results)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
