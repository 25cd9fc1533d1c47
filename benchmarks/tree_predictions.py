"""Prediction with trees of XGBoost: ONNX Runtime against XGBoost's own predictor.

    python benchmarks/tree_predictions.py [--trees 50 300] [--rows 1 16 256 8192] [--threads 1]
        [--repeats 9] [--json results.json]

Both predict the same float32 rows of 40 features in turns. The ratio is XGBoost's time divided by
ONNX Runtime's; the table has the median and the range over the repeats. ``difference`` is the
largest difference of the probabilities.
"""

import argparse
import json
import statistics
import time

import numpy as np

FEATURES = 40


def trained(count):
    """Return trees of XGBoost, as the bytes of their file."""
    import xgboost

    random = np.random.default_rng(0)
    x = random.random((20_000, FEATURES), dtype="float32")
    margin = x[:, 0] + x[:, 1] * x[:, 2] + random.normal(0, 0.2, len(x))
    x[random.random(x.shape) < 0.05] = np.nan
    matrix = xgboost.DMatrix(x, margin > 0.7)
    booster = xgboost.train({"objective": "binary:logistic", "max_depth": 6}, matrix, count)
    return bytes(booster.save_raw("ubj"))


def seconds(trees, block, calls):
    began = time.perf_counter()
    for _ in range(calls):
        trees.predict(block)
    return (time.perf_counter() - began) / calls


def measure(count, rows, threads, repeats):
    from bigdl.nano.acceleration.tree_network import TreeNetwork, network_of, sample_rows
    from bigdl.nano.acceleration.trees import read_trees

    trees = read_trees(trained(count), threads)
    network = TreeNetwork(trees, network_of(trees))
    block = sample_rows(trees, max(rows, 1000))
    difference = float(np.abs(trees.predict(block) - network.predict(block)).max())
    block = np.ascontiguousarray(block[:rows])
    calls = max(3, min(1000, 20_000 // rows))
    taken = {"xgboost": [], "onnxruntime": []}
    for repeat in range(repeats + 1):
        for party, each in (("xgboost", trees), ("onnxruntime", network)):
            value = seconds(each, block, calls)
            if repeat:  # the first is cold
                taken[party].append(value)
    return {"trees": count, "rows": rows, "difference": difference, **taken}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trees", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 8192])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    print("| trees | rows | XGBoost, us | ONNX Runtime, us | ratio | difference |")
    print("|---|---|---|---|---|---|")
    for count in options.trees:
        for rows in options.rows:
            result = measure(count, rows, options.threads, options.repeats)
            results.append(result)
            first, second = result["xgboost"], result["onnxruntime"]
            ratios = [a / b for a, b in zip(first, second, strict=True)]
            times = [1e6 * statistics.median(each) for each in (first, second)]
            print(
                f"| {count} | {rows} | {times[0]:.0f} | {times[1]:.0f} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) "
                f"| {result['difference']:.1e} |"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
