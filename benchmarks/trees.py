"""Peak memory and time of boosted trees: XGBEstimator against xgboost.spark on the same Spark.

    python benchmarks/trees.py [--rows 1000000] [--features 40] [--trees 10] [--rounds 2]
        [--workers 2] [--json results.json]

Both train on the same Parquet files with the same parameters, in a new program for each
measurement; the parties take turns. ``memory`` is the sum of the peaks (VmHWM) of the Python
workers of Spark, without the memory of a worker that only imported the libraries. ``auc`` is
measured on 100,000 other rows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

PARTIES = ("ours", "xgboost.spark")


def make_rows(path, rows, features):
    import pandas as pd

    for part in range(10):
        random = np.random.default_rng(part)
        x = random.random((rows // 10, features), dtype="float32")
        margin = x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3] ** 2 + random.normal(0, 0.3, len(x))
        frame = pd.DataFrame(x, columns=names(features))
        frame["y"] = (margin > 0.4).astype("float32")
        frame.to_parquet(f"{path}/part-{part}.parquet")


def names(features):
    return [f"x{index}" for index in range(features)]


def python_peaks(root):
    """Return the peak in MiB of each Python process below a process that loaded XGBoost."""
    parents, peaks = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/status") as file:
                status = dict(line.rstrip().split(":\t", 1) for line in file if ":\t" in line)
            with open(f"/proc/{pid}/maps") as file:
                loads_xgboost = "libxgboost" in file.read()
        except (OSError, ValueError):
            continue
        parents[int(pid)] = int(status["PPid"])
        if loads_xgboost:
            peaks[int(pid)] = int(status["VmHWM"].split()[0]) / 1024

    def is_below(pid):
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return {pid: peak for pid, peak in peaks.items() if pid != root and is_below(pid)}


class PeakMonitor(threading.Thread):
    """Thread that records the peaks of the workers of this process."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peaks, self.end = {}, threading.Event()

    def run(self):
        while not self.end.wait(0.2):
            for pid, peak in python_peaks(os.getpid()).items():
                self.peaks[pid] = max(peak, self.peaks.get(pid, 0))


def train(party, path, features, trees, workers):
    """Train in this process and print the measurements as JSON."""
    import pandas as pd
    from sklearn.metrics import roc_auc_score

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    init_orca_context("local", cores=workers, memory="2g")
    spark = OrcaContext.get_spark_session()
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    frame = spark.read.parquet(path)
    params = {"max_depth": 6, "max_bin": 256, "learning_rate": 0.3}
    columns = names(features)
    monitor = PeakMonitor()
    monitor.start()
    began = time.perf_counter()
    if party == "ours":
        from bigdl.orca.learn.trees import XGBEstimator

        estimator = XGBEstimator(
            {"objective": "binary:logistic", **params}, num_rounds=trees, workers_per_node=workers
        )
        estimator.fit(frame, columns, "y", external_memory=True)
        booster = estimator.get_model()
    else:
        from xgboost.spark import SparkXGBClassifier

        stage = SparkXGBClassifier(
            features_col=columns,
            label_col="y",
            num_workers=workers,
            n_estimators=trees,
            tree_method="hist",
            **params,
        )
        booster = stage.fit(frame).get_booster()
    seconds = time.perf_counter() - began
    monitor.end.set()
    monitor.join()
    stop_orca_context()
    import xgboost

    held = np.random.default_rng(99)
    x = held.random((100_000, features), dtype="float32")
    margin = x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3] ** 2 + held.normal(0, 0.3, len(x))
    matrix = xgboost.DMatrix(pd.DataFrame(x, columns=columns))
    auc = roc_auc_score(margin > 0.4, booster.predict(matrix, validate_features=False))
    measured = {"seconds": seconds, "peaks": list(monitor.peaks.values()), "auc": auc}
    print("MEASURED " + json.dumps(measured))


def idle_memory():
    """Return the peak in MiB of a process that imports what a worker imports."""
    code = (
        "import pandas, pyarrow, torch, xgboost\n"
        "print(next(x for x in open('/proc/self/status') if 'VmHWM' in x).split()[1])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(answer.stdout) / 1024


def measure(party, path, options):
    command = [sys.executable, "-P", __file__, "--party", party, "--path", path]
    for name in ("features", "trees", "workers"):
        command += [f"--{name}", str(getattr(options, name))]
    answer = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("MEASURED ")]
    if not lines:
        sys.exit(answer.stdout[-2000:] + answer.stderr[-4000:])
    return json.loads(lines[-1].removeprefix("MEASURED "))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--trees", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--party", choices=PARTIES, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        train(options.party, options.path, options.features, options.trees, options.workers)
        return
    results = {party: [] for party in PARTIES}
    idle = idle_memory()
    with tempfile.TemporaryDirectory(prefix="trees-") as path:
        make_rows(path, options.rows, options.features)
        for _ in range(options.rounds):
            for party in PARTIES:
                measured = measure(party, path, options)
                peaks = sorted(measured["peaks"])[-options.workers :]
                measured["memory"] = sum(peaks) - idle * len(peaks)
                results[party].append(measured)
                print(party, {k: round(measured[k], 4) for k in ("memory", "seconds", "auc")})
    print(
        f"\n{options.rows:,} rows x {options.features}, {options.trees} trees, idle {idle:.0f} MiB"
    )
    print("| party | memory, MiB | seconds | AUC |\n|---|---|---|---|")
    for party, runs in results.items():
        cells = [
            f"{statistics.median(r[key] for r in runs):.{digits}f} "
            f"({min(r[key] for r in runs):.{digits}f}..{max(r[key] for r in runs):.{digits}f})"
            for key, digits in (("memory", 0), ("seconds", 1), ("auc", 4))
        ]
        print(f"| {party} | {' | '.join(cells)} |")
    for key in ("memory", "seconds"):
        ratios = [
            a[key] / b[key] for a, b in zip(results["ours"], results["xgboost.spark"], strict=True)
        ]
        print(f"{key}: {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
