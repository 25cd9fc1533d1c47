"""Peak memory and time of boosted trees: XGBEstimator against xgboost.spark on the same Spark.

    python benchmarks/trees.py [--rows 1000000] [--features 40] [--trees 10] [--rounds 2]
        [--workers 2] [--parties ours xgboost.spark] [--limit MIB] [--data FOLDER]
        [--json results.json]

Both train on the same Parquet files with the same parameters, in a new program for each
measurement; the parties take turns. Every 0.1 s the proportional set sizes (Pss) of the processes
of the program are added up: ``workers`` is the peak of Spark's Python processes, ``anonymous`` the
peak of the part that the kernel cannot drop (without mapped files), and ``jvm`` the peak of
Spark's JVM, which is driver and executor. ``auc`` is measured on 100,000 other rows.

With ``--limit`` the Python processes of Spark are in a memory cgroup with that limit, which also
counts their page cache. This needs root and a writable cgroup hierarchy. With ``--json`` the
results are added to those in the file, so the parties can be measured by several commands.
"""

import argparse
import contextlib
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
MARK = "BIGDL_BENCHMARK_TREES"


def make_rows(path, rows, features):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(10):
        random = np.random.default_rng(part)
        x = random.random((rows // 10, features), dtype="float32")
        margin = x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3] ** 2 + random.normal(0, 0.3, len(x))
        columns = {name: x[:, index] for index, name in enumerate(names(features))}
        columns["y"] = (margin > 0.4).astype("float32")
        pq.write_table(pa.table(columns), f"{path}/part-{part}.parquet", use_dictionary=False)


def names(features):
    return [f"x{index}" for index in range(features)]


class MemoryGroup:
    """A memory cgroup with a limit, of version 1 or 2; without a limit, nothing."""

    def __init__(self, limit_mib):
        self.folder = None
        if limit_mib is None:
            return
        is_v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
        root = "/sys/fs/cgroup" if is_v2 else "/sys/fs/cgroup/memory"
        self.folder = f"{root}/bigdl-trees-{os.getpid()}"
        os.mkdir(self.folder)
        name = "memory.max" if is_v2 else "memory.limit_in_bytes"
        with open(f"{self.folder}/{name}", "w") as file:
            file.write(str(limit_mib << 20))

    def add(self, pid):
        if self.folder is not None:
            with contextlib.suppress(OSError), open(f"{self.folder}/cgroup.procs", "w") as file:
                file.write(str(pid))

    @property
    def killed(self):
        """Number of processes that the kernel killed for their memory."""
        if self.folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError), open(f"{self.folder}/{name}") as file:
                return int(dict(line.split() for line in file)["oom_kill"])
        return 0

    def close(self):
        if self.folder is not None:
            os.rmdir(self.folder)


class MemoryMonitor(threading.Thread):
    """Thread that adds up the memory of the processes of a measurement, in MiB."""

    def __init__(self, mark, group):
        super().__init__(daemon=True)
        self.mark, self.group = f"{MARK}={mark}".encode(), group
        self.roles, self.end = {}, threading.Event()
        self.peaks = {"workers": 0, "anonymous": 0, "jvm": 0}

    def run(self):
        while not self.end.wait(0.1):
            sums = dict.fromkeys(self.peaks, 0)
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    self.add(pid, sums)
            for name, value in sums.items():
                self.peaks[name] = max(value / 1024, self.peaks[name])

    def add(self, pid, sums):
        role = self.role_of(pid)
        if role is None:
            return
        with open(f"/proc/{pid}/smaps_rollup") as file:
            next(file)
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
        sums[role] += sizes["Pss"]
        if role == "workers":
            sums["anonymous"] += sizes["Pss_Anon"]

    def role_of(self, pid):
        """Return "workers" or "jvm"; None for the program itself and for other processes."""
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
        key = pid, command
        if key in self.roles:
            return self.roles[key]
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
        role = None
        if self.mark in environment.split(b"\0"):
            program = command.split(b"\0")[0]
            if b"java" in program:
                role = "jvm"
            elif b"python" in program and b"pyspark" in command:  # not the JVM's shell script
                role = "workers"
        if role == "workers":
            self.group.add(pid)
        self.roles[key] = role
        return role


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
    began = time.perf_counter()
    if party == "ours":
        from bigdl.orca.learn.trees import XGBEstimator

        estimator = XGBEstimator(
            {"objective": "binary:logistic", **params}, num_rounds=trees, workers_per_node=workers
        )
        estimator.fit(frame, columns, "y", external_memory=True, max_failures=0)
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
    stop_orca_context()
    import xgboost

    held = np.random.default_rng(99)
    x = held.random((100_000, features), dtype="float32")
    margin = x[:, 0] + x[:, 1] * x[:, 2] - x[:, 3] ** 2 + held.normal(0, 0.3, len(x))
    matrix = xgboost.DMatrix(pd.DataFrame(x, columns=columns))
    auc = roc_auc_score(margin > 0.4, booster.predict(matrix, validate_features=False))
    print("MEASURED " + json.dumps({"seconds": seconds, "auc": auc}))


def measure(party, path, options):
    """Train in a new program and return its measurements; None if it failed at the limit."""
    command = [sys.executable, "-P", os.path.abspath(__file__), "--party", party, "--data", path]
    for name in ("features", "trees", "workers"):
        command += [f"--{name}", str(getattr(options, name))]
    mark = f"{os.getpid()}-{time.time()}"
    group = MemoryGroup(options.limit)
    monitor = MemoryMonitor(mark, group)
    monitor.start()
    environment = {**os.environ, MARK: mark}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    monitor.end.set()
    monitor.join()
    killed = group.killed
    time.sleep(1)  # its last processes end
    group.close()
    lines = [line for line in answer.stdout.splitlines() if line.startswith("MEASURED ")]
    if lines:
        return {**json.loads(lines[-1].removeprefix("MEASURED ")), **monitor.peaks}
    if killed:
        print(f"{party}: the kernel killed {killed} workers at the limit of {options.limit} MiB")
        return None
    sys.exit(answer.stdout[-2000:] + answer.stderr[-4000:])


def show(results):
    columns = {"workers": 0, "anonymous": 0, "jvm": 0, "seconds": 1, "auc": 4}
    print("| party | workers, MiB | anonymous, MiB | JVM, MiB | seconds | AUC |")
    print("|---|---|---|---|---|---|")
    for party, runs in results.items():
        cells = [
            f"{statistics.median(r[key] for r in runs):.{digits}f} "
            f"({min(r[key] for r in runs):.{digits}f}..{max(r[key] for r in runs):.{digits}f})"
            for key, digits in columns.items()
        ]
        print(f"| {party} | {' | '.join(cells)} |")
    if len(results) < 2:
        return
    for key in ("workers", "anonymous", "seconds"):
        pairs = zip(results["ours"], results["xgboost.spark"], strict=False)
        ratios = [a[key] / b[key] for a, b in pairs]
        print(f"{key}: {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=40)
    parser.add_argument("--trees", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parties", nargs="+", choices=PARTIES, default=PARTIES)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--data", help="folder of the Parquet files, written if it is missing")
    parser.add_argument("--json")
    parser.add_argument("--party", choices=PARTIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.party:
        train(options.party, options.data, options.features, options.trees, options.workers)
        return
    results = {}
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            results = json.load(file)
    with contextlib.ExitStack() as stack:
        path = options.data or stack.enter_context(tempfile.TemporaryDirectory(prefix="trees-"))
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):
            make_rows(path, options.rows, options.features)
        for _ in range(options.rounds):
            for party in options.parties:
                measured = measure(party, path, options)
                if measured is not None:
                    results.setdefault(party, []).append(measured)
                    print(party, {name: round(value, 4) for name, value in measured.items()})
    print(f"\n{options.rows:,} rows x {options.features}, {options.trees} trees")
    show(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
