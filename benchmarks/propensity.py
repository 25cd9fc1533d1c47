"""Propensity to accept offers: transactions to features, to Wide & Deep, to a score per row.

    python benchmarks/propensity.py [--rows 100000 1000000 10000000] [--repeats 3] [--json FILE]
    python benchmarks/propensity.py --quick

Each row is a payment of a user at a merchant and the offer made with it: who, where, what kind, how
much, when, and whether the offer was taken.  The chance that it is taken is planted: what the
segment of the user thinks of the category, how good the merchant is, the amount, the hour, and how
active the user is.  Segments, merchants and activities are drawn unevenly; a tenth of the amounts
is missing.

==========  =======================================================================================
stage       what it does
==========  =======================================================================================
learn       ``FeaturePipeline.fit_files`` on the first four fifths of the time
transform   ``transform_files`` of all rows: counts, vocabularies, a cross, hashed users, scaled
            numbers, from Parquet to Parquet
train       one epoch (``--epochs``) of Wide & Deep by the Orca Estimator on the first four fifths
score       ``predict`` of all rows of the table, from Parquet to Parquet
==========  =======================================================================================

The AUC is that of the last fifth, compared with the AUC of the true probabilities, which nothing
can pass. A run on 20,000 rows, which starts workers and compiles, comes before all and is not
counted.

``growth`` is how much longer ten times the rows take, over ten (in general: over the ratio of the
rows): 1 is linear, below 1 fixed costs are spread over more rows.

The last table is a PROJECTION to the size that was published for such a system (hundreds of
billions of records on several hundred servers), from the rows/s/core of the largest run: no
network, no stragglers, no failures, cores as fast as these.  Users grow with the rows, and their
counts are merged in the calling process while the pipeline is fitted: for that many users, ``fit``
would count in Spark, which is slower.  It shows whether the size is feasible, not its duration.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "friesian"))

import synthetic  # noqa: E402

STAGES = ["learn", "transform", "train", "score"]
SEGMENTS, CATEGORIES, MERCHANTS = 12, 40, 5000
ROWS_PER_USER = 90  # 2 x 10^11 records of 2.2 x 10^9 users
BUCKETS = 2**17  # of users
CHUNK = 1_000_000
WIDE = ["segment_category"]
DEEP = ["user", "merchant", "category", "segment", "hour"]
NUMBERS = ["amount", "user_count", "merchant_count"]
NOT_MEASURED = "PROJECTION, not measured"


# -- data ------------------------------------------------------------------------------------------


def write_transactions(folder, rows, seed=0):
    """Write rows in time order: the first four fifths to ``train``, the others to ``test``."""
    rng = np.random.default_rng(seed)
    users = max(100, rows // ROWS_PER_USER)
    world = {
        "active": rng.lognormal(0, 1, users),
        "segment": np.minimum(rng.zipf(1.5, users), SEGMENTS) - 1,
        "category": rng.integers(0, CATEGORIES, MERCHANTS),
        "popular": 1 / np.arange(1, MERCHANTS + 1) ** 0.8,
        "taste": rng.normal(0, 1.2, (SEGMENTS, CATEGORIES)),
        "quality": rng.normal(0, 0.5, MERCHANTS),
    }
    cut = rows * 4 // 5
    for part, begin, end in (("train", 0, cut), ("test", cut, rows)):
        os.makedirs(f"{folder}/{part}")
        for number, start in enumerate(range(begin, end, CHUNK)):
            table = transactions(rng, world, start, min(CHUNK, end - start), rows)
            path = f"{folder}/{part}/part-{number:04d}.parquet"
            pq.write_table(table, path, row_group_size=100_000)


def transactions(rng, world, start, count, rows):
    """Return `count` rows starting at number `start`."""
    user, merchant = drawn(rng, world["active"], count), drawn(rng, world["popular"], count)
    segment, category = world["segment"][user], world["category"][merchant]
    number = np.arange(start, start + count)
    hour = rng.integers(0, 24, count)
    amount = rng.lognormal(3, 1, count)
    score = (
        -1.0
        + world["taste"][segment, category]
        + world["quality"][merchant]
        + 0.5 * (np.log(amount) - 3)
        + 0.5 * np.sin(hour / 24 * 2 * np.pi)
        + 0.4 * np.log(world["active"][user])
    )
    chance = 1 / (1 + np.exp(-score))
    return pa.table(
        {
            "id": number,
            "label": (rng.random(count) < chance).astype(np.int32),
            "chance": chance,
            "user": user.astype(np.int64),
            "merchant": texts("m", merchant, MERCHANTS),
            "segment": texts("s", segment, SEGMENTS),
            "category": texts("c", category, CATEGORIES),
            "amount": pa.array(amount.round(2), mask=rng.random(count) < 0.1),
            "hour": hour.astype(np.int32),
            "time": (number * (365 * 86400 / rows)).astype(np.int64),
        }
    )


def drawn(rng, weights, count):
    shares = np.cumsum(weights)
    return np.searchsorted(shares, rng.random(count) * shares[-1])


def texts(letter, codes, size):
    words = pa.array([f"{letter}{code:05d}" for code in range(size)])
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), words).cast(pa.string())


# -- stages ----------------------------------------------------------------------------------------


def pipeline():
    from bigdl.friesian.feature.pipeline import FeaturePipeline

    return (
        FeaturePipeline()
        .count_encode(["user", "merchant"])
        .hash_encode("user", BUCKETS)
        .cross_columns([["segment", "category"]], [1000])
        .category_encode(["merchant", "segment", "category"], freq_limit=5)
        .fillna(0, ["merchant", "segment", "category"])
        .cut_bins("hour", list(range(1, 24)), out_cols="hour")
        .fill_median("amount")
        .log(NUMBERS)
        .min_max_scale(NUMBERS, clip=True)
    )


def run(spark, source, folder, options, seed):
    """Return {stage: seconds} and the AUCs of one run."""
    import torch

    from bigdl.friesian.models import WideAndDeep
    from bigdl.orca.learn.pytorch import Estimator

    seconds, ready, scores = {}, f"{folder}/features", f"{folder}/scores"
    for path in (ready, scores):
        shutil.rmtree(path, ignore_errors=True)

    started = time.perf_counter()
    fitted = pipeline().fit_files(f"{source}/train", host="spark")
    seconds["learn"] = time.perf_counter() - started

    started = time.perf_counter()
    for part in ("train", "test"):
        fitted.transform_files(f"{source}/{part}", f"{ready}/part={part}", host="spark")
    seconds["transform"] = time.perf_counter() - started

    torch.manual_seed(seed)
    model = WideAndDeep.from_schema(fitted.feature_schema(), WIDE, DEEP, NUMBERS, hidden=(64, 32))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=torch.nn.BCELoss(),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    started = time.perf_counter()
    train = spark.read.parquet(f"{ready}/part=train")
    est.fit(train, epochs=options.epochs, label_cols="label", seed=seed, **columns)
    seconds["train"] = time.perf_counter() - started

    started = time.perf_counter()
    scores_frame = est.predict(spark.read.parquet(ready), **columns)
    scores_frame.select("id", "part", "label", "chance", "prediction").write.parquet(scores)
    seconds["score"] = time.perf_counter() - started
    return seconds, aucs(scores, pq.read_table(source, columns=["id"]).num_rows)


def aucs(scores, rows):
    """Return the AUCs of the last fifth of the time; every row must have one score."""
    frame = pq.read_table(scores).to_pandas()
    assert len(frame) == rows, f"{len(frame)} scores of {rows} rows"
    assert frame["id"].is_unique, "a row was scored twice"
    frame = frame[frame["part"] == "test"]
    return {
        "auc": float(synthetic.auc(frame["label"], frame["prediction"])),
        "ideal auc": float(synthetic.auc(frame["label"], frame["chance"])),
    }


# -- reports ---------------------------------------------------------------------------------------


def figures_of(rows, runs, options):
    """Return the medians of the runs of one size, each stage with its number of rows."""
    worked = {"learn": rows * 4 // 5, "transform": rows, "score": rows}
    worked["train"] = rows * 4 // 5 * options.epochs
    measurements = {"rows": rows, "stages": {}}
    for stage in STAGES:
        seconds = statistics.median(seconds[stage] for seconds, _ in runs)
        rate = worked[stage] / seconds
        measurements["stages"][stage] = {
            "seconds": seconds,
            "spread": [pick(each[stage] for each, _ in runs) for pick in (min, max)],
            "rows": worked[stage],
            "rows/s": rate,
            "rows/s/core": rate / options.cores,
        }
    for name in ("auc", "ideal auc"):
        measurements[name] = statistics.median(each[name] for _, each in runs)
    return measurements


def add_growth(measurements):
    """Add the growth of the time over the previous size to each size but the first."""
    for before, after in itertools.pairwise(measurements):
        ratio = after["rows"] / before["rows"]
        for stage in STAGES:
            first, second = before["stages"][stage], after["stages"][stage]
            second["growth"] = second["seconds"] / first["seconds"] / ratio


def projection(largest, options):
    """Return the projected hours for the published size, from the rates of the largest run."""
    hours = {}
    for stage, metrics in largest["stages"].items():
        share = metrics["rows"] / largest["rows"]  # how often a record goes through the stage
        work = options.published_rows * share / metrics["rows/s/core"]
        hours[stage] = work / options.published_cores / 3600
    growth = [metrics.get("growth") for metrics in largest["stages"].values()]
    return {
        "kind": NOT_MEASURED,
        "records": options.published_rows,
        "cores": options.published_cores,
        "from rows": largest["rows"],
        "from cores": options.cores,
        "hours": hours,
        "hours of all stages": sum(hours.values()),
        "all stages at most 10 % above linear": None
        if None in growth
        else all(each <= 1.1 for each in growth),
    }


def print_tables(measurements, projected):
    head = f"{'rows':>10s} {'stage':10s} {'seconds':>9s} {'(range)':>17s}"
    print(f"\nmeasured\n{head} {'rows/s':>12s} {'rows/s/core':>12s} {'growth':>7s}")
    for size in measurements:
        for stage, each in size["stages"].items():
            low, high = each["spread"]
            growth = f"{each['growth']:7.2f}" if "growth" in each else f"{'':7s}"
            print(
                f"{size['rows']:10d} {stage:10s} {each['seconds']:9.2f} {low:8.2f}-{high:8.2f} "
                f"{each['rows/s']:12,.0f} {each['rows/s/core']:12,.0f} {growth}"
            )
    print(f"\n{'rows':>10s} {'AUC':>7s} {'of the planted chances':>23s}")
    for size in measurements:
        print(f"{size['rows']:10d} {size['auc']:7.4f} {size['ideal auc']:23.4f}")
    print(
        f"\n{NOT_MEASURED}: {projected['records']:.3g} records on {projected['cores']} cores, from "
        f"{projected['from rows']} rows on {projected['from cores']} cores"
    )
    for stage, hours in projected["hours"].items():
        print(f"{'projected':>10s} {stage:10s} {hours:9.2f} h")
    print(f"{'projected':>10s} {'all':10s} {projected['hours of all stages']:9.2f} h", end="")
    linear = projected["all stages at most 10 % above linear"]
    print(f"; measured growth at most 1.10 in all stages: {'?' if linear is None else linear}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="which share the cores")
    parser.add_argument("--memory", default="6g", help="of Spark")
    parser.add_argument("--published-rows", type=float, default=2e11)
    parser.add_argument("--published-cores", type=int, default=300 * 56)
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--quick", action="store_true", help="20,000 and 100,000 rows, once")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeats = [20_000, 100_000], 1

    from bigdl.orca import init_orca_context, stop_orca_context

    context = init_orca_context("local", cores=options.cores, memory=options.memory)
    from bigdl.orca import OrcaContext

    spark = OrcaContext.get_spark_session()
    try:
        measurements = [measure(spark, rows, options) for rows in sorted(options.rows)]
        version = context.version
    finally:
        stop_orca_context()
    add_growth(measurements)
    projected = projection(measurements[-1], options)
    print(
        f"\nPython {platform.python_version()}, pyspark {version}, {options.cores} of "
        f"{os.cpu_count()} cores, {_cpu()}"
    )
    print_tables(measurements, projected)
    if options.json:
        report = {"measured": measurements, "projection": projected}
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def measure(spark, rows, options):
    """Return the metrics of one size; the first call of a process warms it up."""
    with tempfile.TemporaryDirectory() as folder:
        if not _warmed:
            write_transactions(f"{folder}/warm", 20_000)
            run(spark, f"{folder}/warm", folder, options, 0)
            _warmed.append(True)
        write_transactions(f"{folder}/data", rows)
        print(f"{rows} rows, load average {os.getloadavg()[0]:.1f}", flush=True)
        runs = []
        for seed in range(options.repeats):
            runs.append(run(spark, f"{folder}/data", folder, options, seed))
            line = ", ".join(f"{stage} {runs[-1][0][stage]:.1f} s" for stage in STAGES)
            print(f"  {seed}: {line}, AUC {runs[-1][1]['auc']:.4f}", flush=True)
        return figures_of(rows, runs, options)


_warmed = []


def _cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
