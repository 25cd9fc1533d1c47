"""From a cached Spark DataFrame to tensor batches: BigDL's feed and its alternatives.

    python benchmarks/feed.py [--rows 10000000] [--repeats 5] [--warm-up 10] [--json results.json]

Two tables: 8 numeric columns, and a vector of 128 floats. Every repeat runs all sides one after
another (interleaved), so that the noise of a shared machine meets all of them.

===========  ====================================================================================
``bigdl``    ``SparkEngine.run`` with a ``SparkDataFrameFeed``: the first epoch includes the Spark
             job, conversion and spooling; later epochs read the memory-mapped spool
``parquet``    ``SparkEngine.run`` with the path of Parquet files: the workers read them themselves
``scan``     the same with ``spark.read.parquet(path)``, and ``scan, filtered`` with a filter that
             keeps 90 % of the rows (of which rows/s is reported)
``rows``     (a) ``df.rdd`` -> dicts -> numpy -> ``TensorDataset`` -> ``DataLoader`` in the Spark
             workers, the way of BigDL 2.x (on a part of the rows; rows/s is reported)
``pandas``   (b) ``toPandas`` + ``DataLoader`` over a ``TensorDataset`` with batched indices
``ray``      (c) ``ray.data.read_parquet`` -> ``iter_torch_batches``, of the same table as Parquet
``pyarrow``  (d) Parquet record batches -> tensors, in this process
===========  ====================================================================================

Ratios are medians over the repeats of the ratio within one repeat, with their range.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time

import numpy as np
import torch

BATCH = 4096
KEPT = "label > 0"


# -- the sides: each returns {phase: rows per second} ------------------------------------------


def bigdl_side(data, columns, workers):
    """Run BigDL on a DataFrame or on a path."""
    from bigdl.orca.data.feeds import as_feed
    from bigdl.orca.engine import SparkEngine

    program = _epochs_program(columns)
    started = time.perf_counter()
    feed = as_feed(data, columns[:-1], columns[-1:])
    with SparkEngine().open(program, feed, workers) as job:
        results = job.attempt()
        ended = time.perf_counter()
    rows = sum(r["rows"] for r in results)
    rest = max(r["later"] for r in results)
    out = {"first epoch": rows / (ended - started - rest)}
    for phase in ("later epoch", "later epoch, shuffled"):
        out[phase] = rows / max(r[phase] for r in results)
    out["anonymous MB"] = max(r["anonymous"] for r in results) / 2**20
    out["mapped MB"] = max(r["mapped"] for r in results) / 2**20
    out["batch MB"] = results[0]["batch"] / 2**20
    return out


def _epochs_program(columns):
    batch = BATCH

    def program(worker):
        import time

        import psutil
        import torch

        from bigdl.runtime.shards.batches import permutation
        from bigdl.training.batches import TensorShard

        model = torch.nn.Linear(8, 1)  # memory is counted from here on
        before = psutil.Process().memory_info()
        peak = {"anonymous": 0, "mapped": 0}

        def look():
            now = psutil.Process().memory_info()
            mapped = now.shared - before.shared
            peak["anonymous"] = max(peak["anonymous"], now.rss - before.rss - mapped)
            peak["mapped"] = max(peak["mapped"], mapped)

        data = TensorShard(worker.shard, columns[:-1], columns[-1:])

        def epoch(order):
            seen = 0
            for step, start in enumerate(range(0, data.rows, batch)):
                stop = min(start + batch, data.rows)
                tensors = data.batch(start, stop, order)
                seen += len(tensors[0])
                if step % 200 == 0:
                    look()
            assert seen == data.rows

        epoch(None)
        batch_bytes = sum(t.nbytes for t in data.batch(0, batch))
        out = {"rows": data.rows, "batch": batch_bytes}
        began = time.perf_counter()
        epoch(None)
        out["later epoch"] = time.perf_counter() - began
        middle = time.perf_counter()
        epoch(permutation(data.rows, 0, 1, worker.rank))
        out["later epoch, shuffled"] = time.perf_counter() - middle
        out["later"] = time.perf_counter() - began
        del model
        return {**out, **peak}

    return program


def rows_side(df, columns):
    def consume(rows):
        import numpy as np
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        dicts = [row.asDict() for row in rows]
        arrays = []
        for name in columns:
            values = [d[name] for d in dicts]
            if hasattr(values[0], "toArray"):
                values = [v.toArray() for v in values]
            kind = np.int64 if isinstance(values[0], int) else np.float32
            arrays.append(torch.from_numpy(np.asarray(values, dtype=kind)))
        seen = 0
        for batch in DataLoader(TensorDataset(*arrays), batch_size=BATCH):
            seen += len(batch[0])
        yield seen

    started = time.perf_counter()
    rows = sum(df.select(*columns).rdd.mapPartitions(consume).collect())
    return {"first epoch": rows / (time.perf_counter() - started)}


def pandas_side(df, columns):
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    started = time.perf_counter()
    table = df.select(*columns).toPandas()
    arrays = []
    for name in columns:
        values = table[name]
        if values.dtype == object:
            values = np.stack([v.toArray() for v in values]).astype(np.float32)
        arrays.append(torch.from_numpy(np.array(values)))
    data = TensorDataset(*arrays)
    sampler = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
    seen = 0
    for batch in DataLoader(data, sampler=sampler, batch_size=None):
        seen += len(batch[0])
    return {"first epoch": seen / (time.perf_counter() - started)}


def ray_side(path, columns):
    import ray

    def collate(batch):
        return {
            name: torch.from_numpy(np.stack(v) if v.dtype == object else np.array(v))
            for name, v in batch.items()
        }

    def epoch(dataset, **options):
        started = time.perf_counter()
        seen = 0
        for batch in dataset.iter_torch_batches(batch_size=BATCH, collate_fn=collate, **options):
            seen += len(batch[columns[-1]])
        return seen / (time.perf_counter() - started)

    dataset = ray.data.read_parquet(path).select_columns(columns)
    return {
        "first epoch": epoch(dataset),
        "later epoch": epoch(dataset),
        "later epoch, shuffled": epoch(dataset, local_shuffle_buffer_size=10 * BATCH),
    }


def pyarrow_side(path, columns):
    import pyarrow.dataset as ds

    started = time.perf_counter()
    seen = 0
    for batch in ds.dataset(path).to_batches(columns=columns, batch_size=BATCH):
        tensors = []
        for column in batch.columns:
            if hasattr(column, "flatten") and column.type.num_fields:
                flat = column.flatten().to_numpy(zero_copy_only=False)
                tensors.append(torch.from_numpy(flat.reshape(len(column), -1).copy()))
            else:
                tensors.append(torch.from_numpy(column.to_numpy(zero_copy_only=False).copy()))
        seen += len(tensors[0])
    return {"first epoch": seen / (time.perf_counter() - started)}


# -- the tables --------------------------------------------------------------------------------


def numeric_table(spark, rows, partitions):
    from pyspark.sql import functions as F

    columns = [(F.rand(i) * 100).cast("float").alias(f"f{i}") for i in range(7)]
    label = (F.rand(7) * 10).cast("int").alias("label")
    frame = spark.range(0, rows, 1, partitions).select(*columns, label)
    return frame, [f"f{i}" for i in range(7)] + ["label"]


def vector_table(spark, rows, partitions):
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    values = F.array(*[F.rand(i) for i in range(128)])
    label = (F.rand(500) * 10).cast("int").alias("label")
    frame = spark.range(0, rows, 1, partitions).select(array_to_vector(values).alias("f"), label)
    return frame, ["f", "label"]


def as_parquet(frame, columns, path):
    """Write the table for the implementations that read files, with vectors as lists of float."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import types as T

    plain = [
        vector_to_array(name, "float32").alias(name)
        if not isinstance(frame.schema[name].dataType, T.NumericType)
        else name
        for name in columns
    ]
    frame.select(*plain).write.mode("overwrite").parquet(path)


# -- the report --------------------------------------------------------------------------------


def measure(name, frame, columns, folder, options):
    path = os.path.join(folder, name)
    frame = frame.cache()
    rows = frame.count()
    as_parquet(frame, columns, path)
    some = frame.sample(min(1.0, options.row_path_rows / rows), seed=1).cache()
    some.count()
    other = frame.repartition(3 * options.workers).cache()
    other.count()
    read = frame.sparkSession.read.parquet
    sides = {
        "bigdl": lambda: bigdl_side(frame, columns, options.workers),
        "bigdl, other partitions": lambda: bigdl_side(other, columns, options.workers),
        "parquet": lambda: bigdl_side(path, columns, options.workers),
        "scan": lambda: bigdl_side(read(path), columns, options.workers),
        "scan, filtered": lambda: bigdl_side(read(path).where(KEPT), columns, options.workers),
        "rows": lambda: rows_side(some, columns),
        "pandas": lambda: pandas_side(frame, columns),
        "ray": lambda: ray_side(path, columns),
        "pyarrow": lambda: pyarrow_side(path, columns),
    }
    # A JVM compiles what it has run often enough: the sides on Spark settle in some ten runs.
    # Before that, worker processes start and import; the very first run is reported apart.
    if options.sides:
        sides = {side: run for side, run in sides.items() if side in options.sides}
    cold = sides["bigdl"]()["first epoch"] if "bigdl" in sides else None
    for _ in range(options.warm_up):
        for side in ("bigdl", "rows", "parquet", "scan", "scan, filtered"):
            if side in sides:
                sides[side]()
    if "ray" in sides:
        sides["ray"]()
    measurements = {side: [] for side in sides}
    for repeat in range(options.repeats):
        for side, run in sides.items():
            measurements[side].append(run())
            print(
                f"  {name} {repeat + 1}/{options.repeats} {side}: {_short(measurements[side][-1])}"
            )
    for table in (frame, some, other):
        table.unpersist()
    for result in measurements.get("bigdl", ()):
        result["first epoch of the process"] = cold
    return rows, measurements


def _short(result):
    return ", ".join(
        f"{k} {v / 1e6:.2f}M" if "MB" not in k else f"{k} {v:.0f}" for k, v in result.items()
    )


def ratio(measurements, side, phase, base):
    values = [
        a[phase] / b[phase] for a, b in zip(measurements[side], measurements[base], strict=True)
    ]
    return statistics.median(values), min(values), max(values)


GATES = [
    ("bigdl", "first epoch", "rows", 12.0),
    ("bigdl", "first epoch", "ray", 1.2),
    ("bigdl", "first epoch", "pandas", None),
    ("bigdl", "first epoch", "pyarrow", None),
    ("bigdl", "later epoch", "ray", 10.0),
    ("bigdl", "later epoch, shuffled", "ray", 2.0),
    ("parquet", "first epoch", "ray", 5.0),
    ("parquet", "first epoch", "pyarrow", None),
    ("parquet", "later epoch", "ray", 10.0),
    ("parquet", "later epoch, shuffled", "ray", 2.0),
    ("scan", "first epoch", "parquet", 0.9),
    ("scan, filtered", "first epoch", "parquet", 0.7),
]
NUMERIC_ONLY = {("parquet", "first epoch", "ray")}  # gates that one table has to meet


def report(name, rows, measurements):
    print(f"\n{name}: {rows} rows, batches of {BATCH}\n")
    print("| Implementation | phase | Mrows/s, median | range |")
    print("|---|---|---|---|")
    for side, results in measurements.items():
        for phase in results[0]:
            values = [r[phase] for r in results]
            unit = 1 if "MB" in phase else 1e6
            low, middle, high = (
                f"{v / unit:.2f}" for v in (min(values), statistics.median(values), max(values))
            )
            print(f"| {side} | {phase} | {middle} | {low}-{high} |")
    print("\n| Implementation | phase | against | ratio, median | range | gate |")
    print("|---|---|---|---|---|---|")
    for side, phase, base, gate in GATES:
        if side not in measurements or base not in measurements:
            continue
        if (side, phase, base) in NUMERIC_ONLY and "numeric" not in name:
            gate = None
        middle, low, high = ratio(measurements, side, phase, base)
        verdict = "" if gate is None else f">= {gate:g}: {'met' if middle >= gate else 'MISSED'}"
        print(f"| {side} | {phase} | {base} | {middle:.1f} | {low:.1f}-{high:.1f} | {verdict} |")
    for side in ("bigdl", "parquet"):
        if side in measurements:
            _report_memory(side, measurements[side])


def _report_memory(side, results):
    grown = max(r["anonymous MB"] for r in results)
    allowed = 64 + 2 * results[0]["batch MB"]
    verdict = "met" if grown <= allowed else "MISSED"
    print(
        f"\n{side}: anonymous memory of a worker grew by at most {grown:.0f} MB after the model "
        f"was made (gate: 2 batches + 64 MB = {allowed:.0f} MB: {verdict}); mapped pages apart."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--vector-rows", type=int, default=200_000)
    parser.add_argument("--row-path-rows", type=int, default=500_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=10, help="runs before the repeats")
    parser.add_argument("--memory", default="8g")
    parser.add_argument("--tables", nargs="+", help="only tables whose names hold one of these")
    parser.add_argument("--sides", nargs="+", help="only these sides")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()

    import pyarrow
    import pyspark

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    folder = tempfile.mkdtemp(prefix="bigdl-bench-")
    with_ray = not options.sides or "ray" in options.sides
    if with_ray:
        import ray

        ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
    init_orca_context("local", cores=options.workers, memory=options.memory)
    spark = OrcaContext.get_spark_session()
    results = {}
    try:
        tables = {
            "8 numeric columns": numeric_table(spark, options.rows, options.workers),
            "vector of 128": vector_table(spark, options.vector_rows, options.workers),
        }
        for name, (frame, columns) in tables.items():
            if options.tables and not any(part in name for part in options.tables):
                continue
            results[name] = measure(name, frame, columns, folder, options)
    finally:
        stop_orca_context()
        if with_ray:
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"\nPython {platform.python_version()}, torch {torch.__version__}, pyspark "
        f"{pyspark.__version__}, pyarrow {pyarrow.__version__}, ray {_version('ray')}, "
        f"{options.workers} workers, {os.cpu_count()} cores, {_cpu()}; measured"
    )
    for name, (rows, measurements) in results.items():
        report(name, rows, measurements)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({n: {"rows": r, "sides": f} for n, (r, f) in results.items()}, file, indent=1)


def _version(package):
    from importlib.metadata import version

    return version(package)


def _cpu():
    with open("/proc/cpuinfo") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
