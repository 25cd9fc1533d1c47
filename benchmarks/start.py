"""Startup of Spark and its first Python job, with and without the archive of ``bigdl-prepare``.

Each start is a separate process, and the sides take turns.  Sides:

``pyspark``           ``SparkSession.builder`` in local mode with Spark's defaults;
``bigdl``             ``init_orca_context`` on a machine that has not been prepared;
``bigdl, prepared``   the same after ``bigdl-prepare``.

The job runs ``mapInArrow`` over two partitions; its tasks import torch, as those of a fit do.

With ``--fit SRC`` it measures a session of a program instead, from its first line to the end of its
first fit on a CSV file, with this BigDL and with that in the folder ``SRC``, which takes turns.

With ``--first`` it measures from the start of a program until its first result: bare pyspark until
its first Python job, whose tasks import torch, and BigDL until the end of the first fit of README's
program, with Spark and with ``backend="local"``.

With ``--profile`` it says where the time of such a session goes: the seconds of each part, and the
processor's seconds of the program, of the JVM and of Spark's Python processes, which depend less on
what else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from bigdl.orca.cluster.class_archive import make_class_archive

PROGRAM = """
import json, sys, time
import torch

def work(batches):
    import torch
    yield from batches

start = time.perf_counter()
if sys.argv[1] == "pyspark":
    from pyspark.sql import SparkSession
    session = SparkSession.builder.master("local[2]").getOrCreate()
else:
    from bigdl.orca import OrcaContext, init_orca_context
    init_orca_context("local", cores=2)
    session = OrcaContext.get_spark_session()
context = time.perf_counter()
session.range(0, 1000, 1, 2).mapInArrow(work, "id long").count()
job = time.perf_counter()
session.stop()
print(json.dumps({"context": context - start, "first job": job - context, "both": job - start}))
"""
SIDES = ("pyspark", "bigdl", "bigdl, prepared")
SESSION = """
import contextlib, json, sys, time
import psutil

SIDES = ("program", "JVM", "workers")

def state():
    spent = {"s": time.perf_counter(), **dict.fromkeys(SIDES, 0.0)}
    with contextlib.suppress(psutil.NoSuchProcess):
        program = psutil.Process()
        spent["program"] = sum(program.cpu_times()[:2])
        for jvm in program.children():
            if jvm.name() == "java":
                spent["JVM"] = sum(jvm.cpu_times()[:2])
                times = [each.cpu_times() for each in jvm.children(recursive=True)]
                spent["workers"] = sum(each.user + each.system for each in times)
    return spent

marks = {"": state()}
import torch
from torch import nn
marks["import torch"] = state()
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator
marks["import bigdl"] = state()
init_orca_context("local", cores=2)
marks["init"] = state()
from pyspark.sql import functions as F

spark = OrcaContext.get_spark_session()
rows = spark.read.csv(sys.argv[1], header=True, inferSchema=True)
rows = rows.select(F.array("a", "b", "c").alias("features"), F.array("y").alias("label"))
marks["read"] = state()
estimator = Estimator.from_torch(
    model=lambda config: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
    optimizer=lambda model, config: torch.optim.Adam(model.parameters()),
    loss=nn.MSELoss(),
)
columns = {"feature_cols": ["features"], "label_cols": ["label"]}
for name in ("first fit", "second fit"):
    estimator.fit(rows, epochs=1, batch_size=64, **columns)
    marks[name] = state()
stop_orca_context()
names = list(marks)
took = {
    part: {side: marks[part][side] - marks[before][side] for side in ("s", *SIDES)}
    for before, part in zip(names, names[1:])
}
total = "to the first fit's end"
took[total] = {side: marks["first fit"][side] - marks[""][side] for side in ("s", *SIDES)}
print(json.dumps(took))
"""
FIRST = {
    "pyspark, first Python job": """
import sys, time
import torch
from pyspark.sql import SparkSession

def work(batches):
    import torch
    yield from batches

session = SparkSession.builder.master("local[2]").getOrCreate()
session.range(0, 1000, 1, 2).mapInArrow(work, "id long").count()
print(time.time() - float(sys.argv[1]))
""",
    "bigdl, first fit": """
import sys, time
import torch
from torch import nn
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

init_orca_context("local", cores=2)
df = OrcaContext.get_spark_session().range(2000)
df = df.selectExpr("array(float(rand(1)), float(rand(2))) AS point")
df = df.selectExpr("point", "bigint(point[0] > point[1]) AS label")
est = Estimator.from_torch(
    model=lambda config: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
    optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.CrossEntropyLoss(), metrics=["accuracy"], workers_per_node=2)
columns = {"feature_cols": ["point"], "label_cols": ["label"]}
est.fit(df, epochs=5, batch_size=64, **columns)
first = time.time()
est.fit(df, epochs=5, batch_size=64, **columns)
print(first - float(sys.argv[1]), time.time() - first)
stop_orca_context()
""",
    'bigdl, first fit with backend="local"': """
import sys, time
import torch
from torch import nn
from bigdl.orca.learn.pytorch import Estimator

x = torch.rand(2000, 2).numpy()
y = (x[:, 0] > x[:, 1]).astype("int64")
est = Estimator.from_torch(
    model=lambda config: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
    optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
    loss=nn.CrossEntropyLoss(), metrics=["accuracy"], workers_per_node=2, backend="local")
est.fit((x, y), epochs=5, batch_size=64)
first = time.time()
est.fit((x, y), epochs=5, batch_size=64)
print(first - float(sys.argv[1]), time.time() - first)
""",
}


def compare_first_results(repeats: int) -> None:
    """Print a table of the seconds from the start of a program until its first result."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in FIRST}
    for _ in range(repeats):
        for name, program in FIRST.items():
            environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
            command = [sys.executable, "-c", program, str(time.time())]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            seconds[name].append([float(each) for each in done.stdout.splitlines()[-1].split()])
    bare = [each[0] for each in next(iter(seconds.values()))]
    print("| Program | first result, s | to pyspark | second fit, s |\n|---|---|---|---|")
    for name, results in seconds.items():
        first = [each[0] for each in results]
        ratios = [one / base for one, base in zip(first, bare, strict=True)]
        second = spread([each[1] for each in results], 2) if len(results[0]) > 1 else ""
        print(f"| {name} | {spread(first, 1)} | {spread(ratios, 2)} | {second} |")


def run(side: str, cold: str) -> dict[str, float]:
    """Return the seconds of one start."""
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    if side == "bigdl":
        environment["XDG_CACHE_HOME"] = cold
    command = [sys.executable, "-c", PROGRAM, side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def session(source: str | None, rows: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of the parts of a session, with this BigDL or one in a folder."""
    environment = dict(os.environ)
    if source is not None:
        environment["PYTHONPATH"] = source
    command = [sys.executable, "-c", SESSION, str(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_sessions(before: str, repeats: int) -> None:
    """Print a table of interleaved sessions with two versions."""
    measurements: dict[str, list[dict[str, dict[str, float]]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_in(folder)
        for _ in range(repeats):
            for side, source in (("before", before), ("now", None)):
                measurements[side].append(session(source, rows))
    print("| part | before, s | now, s | before to now |\n|---|---|---|---|")
    for part in measurements["now"][0]:
        old, new = ([result[part]["s"] for result in results] for results in measurements.values())
        ratios = [a / b for a, b in zip(old, new, strict=True)]
        print(f"| {part} | {spread(old, 1)} | {spread(new, 1)} | {spread(ratios, 2)} |")


def profile(repeats: int) -> None:
    """Print a table of the time of the parts of a session."""
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_in(folder)
        results = [session(None, rows) for _ in range(repeats)]
    sides = ("s", "program", "JVM", "workers")
    print("| part | s | CPU of the program, s | of the JVM, s | of the workers, s |")
    print("|---" * 5 + "|")
    for part in results[0]:
        cells = [spread([result[part][side] for result in results], 1) for side in sides]
        print(f"| {part} | {' | '.join(cells)} |")


def rows_in(folder: str) -> Path:
    """Write a CSV file of 20,000 rows to a folder."""
    path = Path(folder, "rows.csv")
    numbers = np.random.default_rng(0).normal(size=(20000, 4))
    pd.DataFrame(numbers, columns=["a", "b", "c", "y"]).to_csv(path, index=False)
    return path


def spread(values: list[float], digits: int) -> str:
    """Return median and range."""
    middle, low, high = (
        f"{each:.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low}–{high})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--fit", metavar="SRC", help="folder with another version of bigdl")
    parser.add_argument("--first", action="store_true", help="seconds until the first result")
    parser.add_argument("--profile", action="store_true", help="parts of a session")
    options = parser.parse_args(argv)
    make_class_archive()
    if options.first:
        compare_first_results(options.repeats)
        return
    if options.profile:
        profile(options.repeats)
        return
    if options.fit:
        compare_sessions(options.fit, options.repeats)
        return
    measurements: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as cold:
        for _ in range(options.repeats):
            for side in SIDES:
                measurements[side].append(run(side, cold))
    metrics = ("context", "first job", "both")
    print(
        f"| Implementation | {' | '.join(f'{metric}, s' for metric in metrics)} | pyspark to it |"
    )
    print("|---" * (len(metrics) + 2) + "|")
    for side, results in measurements.items():
        cells = [spread([result[metric] for result in results], 1) for metric in metrics]
        pairs = zip(measurements["pyspark"], results, strict=True)
        ratios = [base["both"] / result["both"] for base, result in pairs]
        print(f"| {side} | {' | '.join(cells)} | {spread(ratios, 2)} |")


if __name__ == "__main__":
    main()
