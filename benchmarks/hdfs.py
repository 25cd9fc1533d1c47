"""Parquet files on HDFS to tensors: read directly by the workers, and by Spark.

    python benchmarks/hdfs.py [--rows 10000000] [--repeats 5] [--warm-up 5]

YARN with HDFS (scripts/clusters/yarn.py) is started on this machine, with two executors of a core.
The table has 8 numeric columns, as the first one of benchmarks/feed.py.  Every repeat asks all
sides in turn for an epoch of its rows, spooling included:

* ``path``: ``ParquetFeed``, whose workers read HDFS by HTTP (WebHDFS);
* ``DataFrame``: ``spark.read.parquet`` and ``SparkDataFrameFeed``: Spark's reader;
* ``path, local``: as the first, from the disk of this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from feed import as_parquet, bigdl_side, numeric_table
from start import spread

from clusters import cluster

WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=5)
    options = parser.parse_args()
    with cluster("yarn.py") as folder:
        if folder is None:
            raise SystemExit("YARN cannot run here")
        report(options.rows, measured(folder, options))


def measured(folder: Path, options) -> dict[str, list[float]]:
    """Return the rows per second of every implementation, in all repeats."""
    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
    from bigdl.orca.data.feeds import as_feed

    os.environ.update(HADOOP_CONF_DIR=str(folder / "conf"), SPARK_LOCAL_IP="127.0.0.1")
    init_orca_context(
        "yarn-client",
        num_nodes=WORKERS,
        cores=1,
        memory="1g",
        extra_executor_memory_for_ray="1g",
        python_location=sys.executable,
        conf={"spark.driver.host": "127.0.0.1"},
    )
    spark = OrcaContext.get_spark_session()
    frame, columns = numeric_table(spark, options.rows, partitions=4)
    with tempfile.TemporaryDirectory() as local:
        remote, near = "hdfs:///benchmark.parquet", f"file://{local}/benchmark.parquet"
        for path in (remote, near):
            as_parquet(frame, columns, path)
        feeds = [as_feed(path, columns[:-1], columns[-1:]) for path in (remote, near)]
        counts = [spark.read.parquet(remote).count(), *(feed.rows for feed in feeds)]
        assert counts == [options.rows] * 3, counts
        sides = {
            "path": lambda: remote,
            "DataFrame": lambda: spark.read.parquet(remote),
            "path, local": lambda: near,
        }
        measurements: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(-options.warm_up, options.repeats):
            for side, data in sides.items():
                rows_per_s = bigdl_side(data(), columns, WORKERS)["first epoch"]
                if repeat >= 0:
                    measurements[side].append(rows_per_s)
        stop_orca_context()
    return measurements


def report(rows: int, measurements: dict[str, list[float]]) -> None:
    print(f"{rows:,} rows\n")
    print("| Implementation | million rows/s, median (range) | to `DataFrame` |\n|---|---|---|")
    for side, each in measurements.items():
        millions = [rows_per_s / 1e6 for rows_per_s in each]
        ratios = [own / base for own, base in zip(each, measurements["DataFrame"], strict=True)]
        print(f"| {side} | {spread(millions, 2)} | {spread(ratios, 2)} |")


if __name__ == "__main__":
    main()
