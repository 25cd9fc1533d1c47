"""Encoding plans of BigDL's feature tables, compared with each other and with pandas.

    python benchmarks/friesian_feature.py [--rows 1000000] [--repeats 3] [--json results.json]

Two tables.  The first has columns of strings that are encoded by vocabularies of growing size, with
values that are all equally frequent or a few of which are most frequent (``skewed``):

============  ===================================================================================
``bigdl``     ``encode_string``, which collects the vocabulary once and broadcasts it for a join
``arrow``     the columns go through Arrow batches, with one look-up for each distinct value
``shuffle``   a join without broadcast
============  ===================================================================================

The second prepares a table for Wide & Deep (4 categorical columns, 2 numbers, a cross), from
Parquet to Parquet: BigDL, BigDL 2.x's way (a job and a join for each column) and pandas.

CPU seconds are those of this process and all below it, so that a loaded machine matters less.
Every repeat runs all sides one after another.  Ratios are medians over the repeats.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial

import numpy as np
import pandas as pd
import psutil

CATEGORIES = {"c1": 100, "c2": 5_000, "c3": 50_000, "c4": 200_000}


_seen = {}


def cpu_seconds():
    """Return the CPU seconds of this process and its children, including ended ones."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
            _seen[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return sum(_seen.values())


def measured(work):
    cpu, started = cpu_seconds(), time.perf_counter()
    work()
    return {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - cpu}


def drain(df):
    df.write.format("noop").mode("overwrite").save()


# -- encoding by vocabularies of growing size ---------------------------------------------------


def lookup_sides(spark, rows, columns, size, is_skewed):
    """Return the implementations for one size: name -> a function that encodes all columns."""
    from pyspark.sql import functions as F

    from bigdl.friesian.feature import FeatureTable, StringIndex
    from bigdl.friesian.ops.spark import arrow_function
    from bigdl.friesian.ops.vocabulary import _values

    names = [f"v{i}" for i in range(columns)]

    def value(i):
        number = F.rand(i)
        place = number * number * number * number if is_skewed else number
        return F.concat(F.lit("value-"), F.floor(place * size)).alias(names[i])

    table = FeatureTable(spark.range(rows).select(*map(value, range(columns))).cache())
    table.compute()
    ids = spark.range(size).select(
        F.concat(F.lit("value-"), "id").alias("v"), (F.col("id") + 1).cast("int").alias("id")
    )
    indices = [StringIndex(ids.withColumnRenamed("v", name), name) for name in names]
    shipped = {
        name: index.dictionary_of(name).shipped("string")
        for name, index in zip(names, indices, strict=True)
    }

    def bigdl():
        drain(table.encode_string(names, indices).df)

    def arrow():
        functions = {
            name: arrow_function(partial(_values, shipped[name], 0, None), "int") for name in names
        }
        drain(table.df.select(*(functions[name](name).alias(name) for name in names)))

    def shuffle():
        drain(table.encode_string(names, indices, broadcast=False).df)

    return {"bigdl": bigdl, "arrow": arrow, "shuffle": shuffle}, table.uncache


# -- Wide & Deep --------------------------------------------------------------------------------


def write_clicks(path, rows):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"n1": rng.normal(size=rows), "n2": rng.gamma(2, 2, rows)})
    frame.loc[rng.random(rows) < 0.1, "n1"] = np.nan
    for name, size in CATEGORIES.items():
        frame[name] = np.char.add("v", (size * rng.power(0.3, rows)).astype(int).astype(str))
    os.makedirs(path)
    for part, piece in enumerate(np.array_split(np.arange(rows), 4)):
        frame.iloc[piece].to_parquet(f"{path}/part-{part}.parquet", index=False)


def bigdl_side(source, target):
    from bigdl.friesian.feature import FeatureTable

    names = list(CATEGORIES)
    table = FeatureTable.read_parquet(source)
    indices = table.gen_string_idx(names, freq_limit=5, order_by_freq=True)
    table = table.cross_columns([["c1", "c2"]], [10_000], method="md5")
    table, _ = table.encode_string(names, indices).fillna(0, names).min_max_scale(["n1", "n2"])
    table.write_parquet(target)


def old_way_side(source, target):
    from pyspark.sql import SparkSession, Window
    from pyspark.sql import functions as F

    spark = SparkSession.getActiveSession()
    df = spark.read.parquet(source)
    cross, cached = F.udf(_md5_bin, "int"), []
    df = df.withColumn("c1_c2", cross(F.concat("c1", "c2")))
    for name in CATEGORIES:
        counts = df.groupBy(name).count().filter("count >= 5")
        ids = counts.withColumn(
            "id", F.row_number().over(Window.orderBy(F.col("count").desc(), name))
        )
        ids = ids.drop("count").cache()
        ids.count()
        cached.append(ids)
        df = df.join(F.broadcast(ids), name, "left").drop(name).withColumnRenamed("id", name)
        df = df.fillna(0, name)
    for name in ("n1", "n2"):
        low, high = df.agg(F.min(name), F.max(name)).first()
        df = df.withColumn(name, ((F.col(name) - low) / (high - low)).cast("float"))
    df.write.parquet(target, mode="overwrite")
    for ids in cached:  # 2.x kept them, which would help the next repeat
        ids.unpersist()


def _md5_bin(text):
    import hashlib

    return int(hashlib.md5(str(text).encode()).hexdigest(), 16) % 10_000


def pandas_side(source, target):
    frame = pd.read_parquet(source)
    frame["c1_c2"] = [_md5_bin(text) for text in frame["c1"] + frame["c2"]]
    for name in CATEGORIES:
        counts = frame[name].value_counts()
        counts = (
            counts[counts >= 5].reset_index().sort_values(["count", name], ascending=[False, True])
        )
        ids = pd.Series(np.arange(1, len(counts) + 1), index=counts[name])
        frame[name] = frame[name].map(ids).fillna(0).astype("int32")
    for name in ("n1", "n2"):
        low, high = frame[name].min(), frame[name].max()
        frame[name] = ((frame[name] - low) / (high - low)).astype("float32")
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    frame.to_parquet(f"{target}/part-0.parquet", index=False)


def check_equal(folder, sides):
    """Check that all implementations made the same encoded columns."""
    names = [*CATEGORIES, "c1_c2"]
    digests = {
        side: pd.read_parquet(f"{folder}/{side}")[names].astype("int64").sum().to_dict()
        for side in sides
    }
    assert len({json.dumps(each) for each in digests.values()}) == 1, digests


# -- report -------------------------------------------------------------------------------------


def repeated(sides, repeats):
    """Return {implementation: [{wall, cpu} of each repeat]} without the warm-up repeat."""
    measurements = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, work in sides.items():
            metrics = measured(work)
            if repeat:
                measurements[name].append(metrics)
    return measurements


def print_table(title, measurements):
    base = next(iter(measurements))
    print(f"\n{title}")
    print(f"{'side':12s} {'wall s':>8s} {'cpu s':>8s} {'cpu / ' + base:>14s}")
    for name, runs in measurements.items():
        wall = statistics.median(run["wall"] for run in runs)
        cpu = statistics.median(run["cpu"] for run in runs)
        ratio = statistics.median(
            run["cpu"] / first["cpu"] for run, first in zip(runs, measurements[base], strict=True)
        )
        print(f"{name:12s} {wall:8.2f} {cpu:8.2f} {ratio:14.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--columns", type=int, default=4, help="of the first table")
    parser.add_argument("--only", choices=["lookup", "pipeline"])
    parser.add_argument("--json", help="write all results to this file")
    options = parser.parse_args()

    from bigdl.orca import OrcaContext, init_orca_context

    init_orca_context("local", cores=2, memory="4g")
    spark = OrcaContext.get_spark_session()
    print(f"load average {os.getloadavg()[0]:.1f}, {options.rows} rows")
    results = {}
    for size in options.sizes if options.only != "pipeline" else []:
        for is_skewed in (True, False):
            sides, free = lookup_sides(spark, options.rows, options.columns, size, is_skewed)
            title = (
                f"{options.columns} columns, vocabularies of {size}, "
                f"{'skewed' if is_skewed else 'equally frequent'} values"
            )
            results[title] = repeated(sides, options.repeats)
            print_table(title, results[title])
            free()
    if options.only != "lookup":
        with tempfile.TemporaryDirectory() as folder:
            write_clicks(f"{folder}/source", options.rows)
            sides = {
                name: lambda side=side, name=name: side(f"{folder}/source", f"{folder}/{name}")
                for name, side in [
                    ("bigdl", bigdl_side),
                    ("2.x's way", old_way_side),
                    ("pandas", pandas_side),
                ]
            }
            results["pipeline"] = repeated(sides, options.repeats)
            check_equal(folder, sides)
            print_table("Wide & Deep, Parquet to Parquet", results["pipeline"])
    print(f"\nload average {os.getloadavg()[0]:.1f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": options.rows, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
