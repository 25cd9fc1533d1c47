"""Wide & Deep preparation from Parquet to Parquet: pipelines, Spark, pandas and polars.

    python benchmarks/friesian.py [--rows 1000000] [--repeats 3] [--only pandas arrow] [--json FILE]

The data have the columns of Criteo: a label, 13 numbers with nulls, 26 categories, whose values are
drawn by Zipf's law from 10 to a million.  The work: fill nulls, scale the numbers to 0 … 1, number
the values of each category that occur at least 15 times by falling count (0 for all others), and
hash two pairs of categories by md5 into bins.

==========  =======================================================================================
side        what it is
==========  =======================================================================================
copy        Spark reads and writes the columns: the floor of all that moves rows through Spark
plain       Spark as programs write it: for each category a ``groupBy`` and a broadcast join
catalyst    ``FeaturePipeline.fit`` and ``transform``
arrow       ``FeaturePipeline.fit_files`` and ``transform_files`` in tasks of Spark
local       the same in processes of this machine, without Spark
pandas      one process
polars      streaming, if it is installed (``pip install polars``)
==========  =======================================================================================

``--sessions`` prepares histories for DIEN instead: numbers for users, items and categories, and the
last 50 items and categories before each record, padded.

``peak MB`` is the memory of this process and all below it that they do not share, the JVM's with
it; it means something only where a side runs alone (``--only``).

Every repeat runs all sides one after another.  The first one is the cold one: it starts workers and
compiles.  The start of Spark's session is in none.  All results are compared row by row.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
SIZES = [10, 100, 1_000, 10_000, 100_000, 1_000_000]  # of the categories, in turn
CROSSES = [("C1", "C2", 10_000), ("C3", "C4", 100_000)]
LEAST = 15
HISTORY = 50


# -- data ------------------------------------------------------------------------------------------


def write_criteo(path, rows):
    """Write files of at most a million rows."""
    os.makedirs(path)
    rng = np.random.default_rng(0)
    tables = {size: _zipf_table(size) for size in SIZES}
    for part, start in enumerate(range(0, rows, min(1_000_000, max(rows // 4, 1)))):
        count = min(1_000_000, max(rows // 4, 1), rows - start)
        columns = {"label": pa.array((rng.random(count) < 0.25).astype(np.int32))}
        for name in NUMBERS:
            values = rng.gamma(1.5, 40, count).astype(np.int32)
            columns[name] = pa.array(values, mask=rng.random(count) < 0.1)
        for i, name in enumerate(CATEGORIES):
            size = SIZES[i % len(SIZES)]
            drawn = np.searchsorted(tables[size], rng.random(count))
            drawn, codes = np.unique(drawn, return_inverse=True)
            texts = pa.array([f"{i:02x}{value * 2654435761 % 2**32:08x}" for value in drawn])
            codes = pa.array(codes.astype(np.int32), mask=rng.random(count) < 0.05)
            columns[name] = pa.DictionaryArray.from_arrays(codes, texts).cast(pa.string())
        pq.write_table(pa.table(columns), f"{path}/part-{part:04d}.parquet")


def _zipf_table(size):
    weights = np.arange(1, size + 1, dtype=float) ** -1.05
    return np.cumsum(weights / weights.sum())


def write_sessions(path, rows):
    os.makedirs(path)
    rng = np.random.default_rng(1)
    items = np.minimum(rng.zipf(1.2, rows), 100_000)
    table = pa.table(
        {
            "user": [f"u{user}" for user in rng.integers(0, max(rows // 20, 1), rows)],
            "item": [f"i{item}" for item in items],
            "category": [f"c{item % 500}" for item in items],
            "time": rng.permutation(rows),
        }
    )
    for part in range(4):
        piece = table.slice(rows * part // 4, rows * (part + 1) // 4 - rows * part // 4)
        pq.write_table(piece, f"{path}/part-{part}.parquet")


# -- Wide & Deep -----------------------------------------------------------------------------------


def wide_and_deep():
    from bigdl.friesian.feature.pipeline import FeaturePipeline

    return (
        FeaturePipeline()
        .fillna(0, NUMBERS)
        .min_max_scale(NUMBERS)
        .cross_columns([[a, b] for a, b, _ in CROSSES], [bins for _, _, bins in CROSSES])
        .category_encode(CATEGORIES, freq_limit=LEAST, order_by_freq=True)
        .fillna(0, CATEGORIES)
    )


def copy_side(spark, source, target):
    spark.read.parquet(source).write.parquet(target, mode="overwrite")


def catalyst_side(spark, source, target):
    pipeline = wide_and_deep().fit_files(source, executor="catalyst")
    pipeline.transform(spark.read.parquet(source)).write_parquet(target)


def arrow_side(spark, source, target):
    wide_and_deep().fit_files(source, host="spark").transform_files(source, target, host="spark")


def plain_side(spark, source, target):
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    df = spark.read.parquet(source).fillna(0, NUMBERS)
    for a, b, bins in CROSSES:
        binned = F.udf(lambda text, bins=bins: _md5_bin(text, bins), "int")
        df = df.withColumn(f"{a}_{b}", binned(F.concat(a, b)))
    for name in NUMBERS:
        low, high = df.agg(F.min(name), F.max(name)).first()
        df = df.withColumn(name, ((F.col(name) - low) / (high - low)).cast("float"))
    whole = df  # the values are counted in front of all joins
    for name in CATEGORIES:
        counts = whole.where(F.col(name).isNotNull()).groupBy(name).count()
        counts = counts.where(f"count >= {LEAST}")
        order = Window.orderBy(F.col("count").desc(), name)
        ids = counts.select(name, F.row_number().over(order).alias("id"))
        df = df.join(F.broadcast(ids), name, "left").drop(name).withColumnRenamed("id", name)
        df = df.fillna(0, name)
    df.write.parquet(target, mode="overwrite")


def _md5_bin(text, bins):
    return int(hashlib.md5(str(text).encode()).hexdigest(), 16) % bins


def pandas_side(_, source, target):
    frame = pd.read_parquet(source)
    for name in NUMBERS:
        values = frame[name].fillna(0).to_numpy(np.float64)
        low, high = values.min(), values.max()
        frame[name] = ((values - low) / (high - low)).astype(np.float32)
    for a, b, bins in CROSSES:  # each different pair is hashed once
        codes, pairs = pd.factorize(frame[a] + frame[b], use_na_sentinel=False)
        texts = ["None" if pd.isna(pair) else pair for pair in pairs]
        frame[f"{a}_{b}"] = np.array([_md5_bin(text, bins) for text in texts], np.int32)[codes]
    for name in CATEGORIES:
        counts = frame[name].value_counts().rename("count").rename_axis("value").reset_index()
        counts = counts[counts["count"] >= LEAST]
        values = counts.sort_values(["count", "value"], ascending=[False, True])["value"]
        ids = pd.Series(np.arange(1, len(values) + 1), index=values)
        frame[name] = frame[name].map(ids).fillna(0).astype(np.int32)
    _write_pandas(frame, target)


def _write_pandas(frame, target):
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    frame.to_parquet(f"{target}/part-0.parquet", index=False)


def polars_side(_, source, target):
    import polars as pl

    frame = pl.scan_parquet(f"{source}/*.parquet")
    numbers = [pl.col(name).fill_null(0).cast(pl.Float64) for name in NUMBERS]
    counted = [
        frame.select(pl.col(name).alias("value"))
        .drop_nulls()
        .group_by("value")
        .len("count")
        .filter(pl.col("count") >= LEAST)
        .sort(["count", "value"], descending=[True, False])
        for name in CATEGORIES
    ]
    pairs = [
        frame.select((pl.col(a) + pl.col(b)).fill_null("None").alias("pair")).unique()
        for a, b, _ in CROSSES
    ]
    limits = frame.select(
        *(each.min().name.prefix("min_") for each in numbers),
        *(each.max().name.prefix("max_") for each in numbers),
    )
    row, *tables = pl.collect_all([limits, *counted, *pairs], engine="streaming")
    row = row.row(0, named=True)
    scaled = [
        ((each - row[f"min_{name}"]) / (row[f"max_{name}"] - row[f"min_{name}"])).cast(pl.Float32)
        for name, each in zip(NUMBERS, numbers, strict=True)
    ]
    encoded = [
        pl.col(name).replace_strict(
            table["value"],
            pl.int_range(1, len(table) + 1, dtype=pl.Int32, eager=True),
            default=0,
            return_dtype=pl.Int32,
        )
        for name, table in zip(CATEGORIES, tables, strict=False)
    ]
    hashed = [
        (pl.col(a) + pl.col(b))
        .fill_null("None")
        .replace_strict(
            table["pair"],
            pl.Series([_md5_bin(text, bins) for text in table["pair"]], dtype=pl.Int32),
            return_dtype=pl.Int32,
        )
        .alias(f"{a}_{b}")
        for (a, b, bins), table in zip(CROSSES, tables[len(CATEGORIES) :], strict=True)
    ]
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    result = frame.select("label", *scaled, *encoded, *hashed)
    result.sink_parquet(f"{target}/part-0.parquet", compression="snappy", engine="streaming")


WIDE_AND_DEEP = {
    "plain": plain_side,
    "copy": copy_side,
    "catalyst": catalyst_side,
    "arrow": arrow_side,
    "pandas": pandas_side,
    "polars": polars_side,
}


# -- sessions --------------------------------------------------------------------------------------

_COLUMNS = ["user", "item", "category"]


def session_pipeline():
    from bigdl.friesian.feature.pipeline import FeaturePipeline

    histories = ["item_hist_seq", "category_hist_seq"]
    return (
        FeaturePipeline()
        .category_encode(_COLUMNS)
        .fillna(0, _COLUMNS)
        .add_hist_seq(["item", "category"], "user", "time", min_len=1, max_len=HISTORY)
        .pad(histories, seq_len=HISTORY, mask_cols="item_hist_seq")
    )


def catalyst_sessions(spark, source, target):
    session_pipeline().fit_transform(spark.read.parquet(source)).write_parquet(target)


def arrow_sessions(spark, source, target):
    pipeline = session_pipeline().fit_files(source, host="spark")
    pipeline.transform_files(source, target, host="spark")


def plain_sessions(spark, source, target):
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    df = spark.read.parquet(source)
    for name in _COLUMNS:
        ids = df.select(name).distinct()
        ids = ids.withColumn("id", F.row_number().over(Window.orderBy(name)))
        df = df.join(F.broadcast(ids), name).drop(name).withColumnRenamed("id", name)
    pairs = F.collect_list(F.struct("time", "item", "category"))
    whole = df.groupBy("user").agg(F.sort_array(pairs).alias("all"))
    rows = whole.select("user", "all", F.posexplode("all").alias("place", "one")).where("place > 0")
    start = F.greatest(F.col("place") - HISTORY, F.lit(0))
    past = F.slice("all", start + 1, F.col("place") - start)
    rows = rows.select("user", "one.item", "one.category", "one.time", past.alias("past"))
    for name in ("item", "category"):
        zeros = F.array_repeat(F.lit(0), HISTORY - F.size("past"))
        rows = rows.withColumn(f"{name}_hist_seq", F.concat(F.col("past")[name], zeros))
    ones = F.array_repeat(F.lit(1), F.size("past"))
    zeros = F.array_repeat(F.lit(0), HISTORY - F.size("past"))
    rows = rows.withColumn("item_hist_seq_mask", F.concat(ones, zeros)).drop("past")
    rows.write.parquet(target, mode="overwrite")


def pandas_sessions(_, source, target):
    frame = pd.read_parquet(source)
    for name in _COLUMNS:
        codes, _ = pd.factorize(frame[name], sort=True)
        frame[name] = (codes + 1).astype(np.int32)
    frame = frame.sort_values(["user", "time"], ignore_index=True)
    index = frame.groupby("user").cumcount().to_numpy()
    kept = np.flatnonzero(index > 0)
    length = np.minimum(index[kept], HISTORY)
    columns = np.arange(HISTORY)
    inside = columns < length[:, None]
    indices = np.where(inside, kept[:, None] - length[:, None] + columns, 0)
    selected = frame.iloc[kept].reset_index(drop=True)
    for name in ("item", "category"):
        values = np.where(inside, frame[name].to_numpy()[indices], 0).astype(np.int32)
        selected[f"{name}_hist_seq"] = list(values)
    selected["item_hist_seq_mask"] = list(inside.astype(np.int32))
    _write_pandas(selected, target)


def polars_sessions(_, source, target):
    import polars as pl

    frame = pl.scan_parquet(f"{source}/*.parquet")
    tables = pl.collect_all(
        [frame.select(pl.col(name).unique().sort()) for name in _COLUMNS], engine="streaming"
    )
    encoded = [
        pl.col(name).replace_strict(
            table[name],
            pl.int_range(1, len(table) + 1, dtype=pl.Int32, eager=True),
            return_dtype=pl.Int32,
        )
        for name, table in zip(_COLUMNS, tables, strict=True)
    ]
    frame = frame.with_columns(encoded).sort("user", "time")
    index = pl.int_range(pl.len(), dtype=pl.Int64).over("user")
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    frame = frame.with_columns(index.alias("place"), row.alias("row")).collect(engine="streaming")
    # A window of lists is not to be had without a loop over the rows, arrays by position are.
    kept = np.flatnonzero(frame["place"].to_numpy() > 0)
    length = np.minimum(frame["place"].to_numpy()[kept], HISTORY)
    columns = np.arange(HISTORY)
    inside = columns < length[:, None]
    indices = np.where(inside, kept[:, None] - length[:, None] + columns, 0)
    selected = frame[kept].drop("place", "row")
    lists = [
        _polars_lists(f"{name}_hist_seq", np.where(inside, frame[name].to_numpy()[indices], 0))
        for name in ("item", "category")
    ]
    lists.append(_polars_lists("item_hist_seq_mask", inside))
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    selected.with_columns(lists).write_parquet(f"{target}/part-0.parquet", compression="snappy")


def _polars_lists(name, values):
    import polars as pl

    return pl.Series(name, values.astype(np.int32)).arr.to_list()


SESSIONS = {
    "plain": plain_sessions,
    "copy": copy_side,
    "catalyst": catalyst_sessions,
    "arrow": arrow_sessions,
    "pandas": pandas_sessions,
    "polars": polars_sessions,
}


# -- measuring -------------------------------------------------------------------------------------

_seen = {}


def cpu_seconds():
    """Return the CPU seconds of this process and its children, including ended ones."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            _seen[process.pid, process.create_time()] = times.user + times.system
    return sum(_seen.values())


def own_memory():
    """Return the unshared memory of this process and its children in MB."""
    resident = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            resident += memory.rss - memory.shared
    return resident / 1e6


def measured(work):
    peak, is_over = [0.0], threading.Event()

    def look():
        while not is_over.wait(0.1):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=look, daemon=True)
    load, cpu, started = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
    watcher.start()
    work()
    wall = time.perf_counter() - started
    is_over.set()
    watcher.join()
    return {"wall": wall, "cpu": cpu_seconds() - cpu, "load": load, "memory": peak[0]}


def repeated(sides, repeats):
    """Return {implementation: [metrics of each repeat]}; the first repeat is the cold one."""
    measurements = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, work in sides.items():
            measurements[name].append(measured(work))
            print(f"  {repeat} {name:9s} {measurements[name][-1]['wall']:8.2f} s", flush=True)
    return measurements


def print_table(measurements, base):
    print(
        f"\n{'side':10s} {'cold s':>8s} {'warm s':>8s} {'warm cpu s':>10s} {'peak MB':>8s}", end=""
    )
    print(f" {base + ' / cold':>14s} {base + ' / warm':>14s}")
    for name, runs in measurements.items():
        warm = statistics.median(run["wall"] for run in runs[1:])
        cpu = statistics.median(run["cpu"] for run in runs[1:])
        pairs = zip(measurements[base], runs, strict=True)
        cold_ratio, *ratios = [first["wall"] / run["wall"] for first, run in pairs]
        memory = max(run["memory"] for run in runs)
        print(f"{name:10s} {runs[0]['wall']:8.2f} {warm:8.2f} {cpu:10.2f} {memory:8.0f}", end="")
        print(f" {cold_ratio:14.2f} {statistics.median(ratios):14.2f}")


def check_equal(folder, sides, is_sessions):
    """Check that all implementations made the same rows, except for copies."""
    wanted = None
    for side in sides:
        if side == "copy":
            continue
        table = pq.read_table(f"{folder}/{side}")
        names = sorted(table.column_names)
        rows = hashlib.sha256()
        frame = table.select(names).to_pandas()
        if is_sessions:  # time is different in all rows
            frame = frame.sort_values("time")
        keys = np.zeros(len(frame), np.uint64)
        for name in names:
            values = frame[name]
            if values.dtype == object:
                values = pd.Series([bytes(np.asarray(each, np.int32)) for each in values])
            keys = keys * np.uint64(1_000_003) + pd.util.hash_array(values.to_numpy())
        rows.update(np.sort(keys).tobytes())
        content = (len(frame), names, rows.hexdigest())
        wanted = wanted or (side, content)
        assert content == wanted[1], f"{side} and {wanted[0]} differ: {content} {wanted[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--repeats", type=int, default=3, help="warm ones, after the cold one")
    parser.add_argument("--sessions", action="store_true")
    parser.add_argument("--only", nargs="*", help="sides to run")
    parser.add_argument("--memory", default="6g", help="of Spark")
    parser.add_argument("--data", help="folder that keeps the data for the next time")
    parser.add_argument("--json", help="write all results to this file")
    options = parser.parse_args()
    known = [*(SESSIONS if options.sessions else WIDE_AND_DEEP), "local"]
    if set(options.only or ()) - set(known):
        parser.error(f"--only takes {', '.join(known)}")
    results = {}
    with contextlib.ExitStack() as stack:
        spark = _spark(options) if set(options.only or known) - {"local", "pandas", "polars"} else 0
        for rows in options.rows:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            source = _data(options, rows, folder)
            sides = _sides(options, spark, source, folder, stack)
            print(f"{rows} rows, load average {os.getloadavg()[0]:.1f}", flush=True)
            results[rows] = repeated(sides, options.repeats)
            check_equal(folder, sides, options.sessions)
            print_table(results[rows], next(iter(sides)))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


def _spark(options):
    from bigdl.orca import OrcaContext, init_orca_context

    init_orca_context("local", cores=2, memory=options.memory)
    return OrcaContext.get_spark_session()


def _data(options, rows, folder):
    kind = "sessions" if options.sessions else "criteo"
    path = f"{options.data or folder}/{kind}-{rows}"
    if not os.path.exists(path):
        (write_sessions if options.sessions else write_criteo)(path, rows)
    return path


def _sides(options, spark, source, folder, stack):
    functions = dict(SESSIONS if options.sessions else WIDE_AND_DEEP)
    functions["local"] = _local_side(session_pipeline if options.sessions else wide_and_deep, stack)
    if "polars" in functions:
        with contextlib.suppress(ModuleNotFoundError):
            import polars  # noqa: F401
        if "polars" not in __import__("sys").modules:
            print("polars is not installed; its side is left out")
            del functions["polars"]
    chosen = options.only or list(functions)
    return {
        name: lambda side=functions[name], name=name: side(spark, source, f"{folder}/{name}")
        for name in functions
        if name in chosen
    }


def _local_side(recorded, stack):
    """Return a function that runs local workers, which start at the first call and are reused."""
    workers = []

    def side(_, source, target):
        from bigdl.friesian.feature.pipeline import LocalWorkers

        if not workers:
            workers.append(stack.enter_context(LocalWorkers()))
        pipeline = recorded().fit_files(source, host=workers[0])
        pipeline.transform_files(source, target, host=workers[0])

    return side


if __name__ == "__main__":
    main()
