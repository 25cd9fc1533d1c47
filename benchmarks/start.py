"""How long Spark takes to start on this machine, and its first job in Python, with and without
the archive of classes that ``bigdl-prepare`` makes.

Each start is a process of its own, and the sides take turns.  Sides:

``pyspark``           ``SparkSession.builder`` in local mode with Spark's defaults;
``bigdl``             ``init_orca_context`` on a machine that has not been prepared;
``bigdl, prepared``   the same after ``bigdl-prepare``.

The job runs ``mapInArrow`` over two partitions; its tasks import torch, as those of a fit do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

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


def run(side: str, cold: str) -> dict[str, float]:
    """Seconds of one start."""
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    if side == "bigdl":
        environment["XDG_CACHE_HOME"] = cold
    command = [sys.executable, "-c", PROGRAM, side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    make_class_archive()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as cold:
        for _ in range(options.repeats):
            for side in SIDES:
                found[side].append(run(side, cold))
    figures = ("context", "first job", "both")
    print(f"| side | {' | '.join(f'{figure}, s' for figure in figures)} | pyspark to side |")
    print("|---" * (len(figures) + 2) + "|")
    for side, results in found.items():
        cells = []
        for figure in figures:
            values = [result[figure] for result in results]
            middle = statistics.median(values)
            cells.append(f"{middle:.1f} ({min(values):.1f}–{max(values):.1f})")
        pairs = zip(found["pyspark"], results, strict=True)
        ratios = [base["both"] / result["both"] for base, result in pairs]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(f"| {side} | {' | '.join(cells)} | {ratio} |")


if __name__ == "__main__":
    main()
