"""NCF (NeuMF) on MovieLens: BigDL and PyTorch programs, to the same HR@10.

    python benchmarks/ncf.py --data-dir ml-100k [--repeats 5] [--json results.json] [--quick]

Two data sets: MovieLens 100K (with ``--data-dir``), and a generated one of the shape of MovieLens
1M in which users choose by taste and popularity. Every repeat has a different seed and runs all
sides one after another (interleaved). All have the same model, optimizer, batch size, epochs
and cores, and train on the very same rows: the negatives are a function of the seed.

==============  =================================================================================
``bigdl, N×T``  N workers of T threads: a file of ratings -> Spark plan with negatives ->
                ``Estimator.fit``; Spark is running already
``loader``      (b) pandas, ``Dataset.__getitem__``, ``DataLoader(shuffle=True)``, Adam: the usual
                program; its negatives are drawn by vectorised numpy, which is not usual
``loader, N``   the same with ``num_workers=N``
``tensors``     (c) by hand: tensors in memory and one ``index_select`` per column and batch
``..., tuned``  the same with glibc set to keep freed memory (``bigdl.common.memory``)
==============  =================================================================================

End to end is from the file to trained weights; the loop is the epochs alone. Imports, the start of
Spark and the computation of HR@10 are not counted. Ratios are medians over the repeats of the
ratio within one repeat, with their range. ``--fused`` gives all sides Adam's fused form.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "orca" / "ncf"))

import neumf  # noqa: E402

LOADER, TENSORS = "loader", "tensors"


# -- the sides: each returns seconds, HR@10 and, of its epochs alone, seconds --------------------


def bigdl_side(spark, path, options, workers, seed):
    """Train with N workers over the cores of the machine."""
    started = time.perf_counter()
    ratings = spark.read.parquet(path)
    per_user, users, items = neumf.histories(ratings)
    rows = neumf.training_rows(per_user, options.negatives, seed)
    settings = argparse.Namespace(
        factors=options.factors,
        lr=options.lr,
        fused=options.fused,
        workers_per_node=workers,
        backend="spark",
    )
    est = neumf.make_estimator(settings, users, items)
    read = time.perf_counter()
    stats = est.fit(
        rows,
        epochs=options.epochs,
        batch_size=options.batch_size,
        feature_cols=neumf.FEATURES,
        label_cols=neumf.LABELS,
        seed=seed,
        profile=True,
    )
    seconds = time.perf_counter() - started
    profiles = [epoch["profile"] for epoch in stats]
    parts = {name: statistics.mean(p[name] for p in profiles) for name in profiles[0]}
    return {
        "seconds": seconds,
        "loop": sum(p["mean_train_epoch_s"] for p in profiles),
        "samples": sum(epoch["num_samples"] for epoch in stats),
        "hr": hit_rate(est.get_model(), path, options),
        "plan_s": read - started,
        **parts,
    }


class Rows(torch.utils.data.Dataset):
    """Data set of training rows."""

    def __init__(self, user, item, label):
        self.user, self.item, self.label = user, item, label

    def __len__(self):
        return len(self.user)

    def __getitem__(self, index):
        return self.user[index], self.item[index], self.label[index]


def torch_side(path, options, side, variant, seed):
    """Run a plain PyTorch program in a separate process."""
    import pandas as pd

    if variant == "tuned":
        from bigdl.common.memory import tune_allocator

        tune_allocator()
    torch.set_num_threads(options.cores)
    torch.manual_seed(seed)
    started = time.perf_counter()
    ratings = pd.read_parquet(path)
    users, items = int(ratings["user"].max()) + 1, int(ratings["item"].max()) + 1
    rows = neumf.Histories(ratings, items).training_rows(options.negatives, seed)
    config = {"users": users, "items": items, "factors": options.factors, "lr": options.lr}
    config["fused"] = options.fused or None
    model = neumf.model_creator(config)
    optimizer = neumf.optimizer_creator(model, config)
    scheduler = neumf.scheduler_creator(optimizer, config)
    criterion = torch.nn.BCELoss()
    if side == LOADER:
        batches = torch.utils.data.DataLoader(
            Rows(*rows),
            batch_size=options.batch_size,
            shuffle=True,
            num_workers=int(variant or 0),
        )
    else:
        batches = Shuffled([torch.from_numpy(column) for column in rows], options.batch_size)
    began = time.perf_counter()
    samples = 0
    for _ in range(options.epochs):
        total = 0.0
        for user, item, label in batches:
            optimizer.zero_grad()
            loss = criterion(model(user, item), label)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(label)
            samples += len(label)
        scheduler.step()
    ended = time.perf_counter()
    return {
        "seconds": ended - started,
        "loop": ended - began,
        "samples": samples,
        "hr": hit_rate(model, path, options),
    }


class Shuffled:
    """Batches of tensors in memory, reshuffled every epoch."""

    def __init__(self, columns, batch_size):
        self.columns, self.batch_size = columns, batch_size

    def __iter__(self):
        for index in torch.randperm(len(self.columns[0])).split(self.batch_size):
            yield [column.index_select(0, index) for column in self.columns]


def hit_rate(model, path, options):
    """Return HR@10 of a model, with the same candidates for all implementations and seeds."""
    import pandas as pd

    ratings = pd.read_parquet(path)
    histories = neumf.Histories(ratings, int(ratings["item"].max()) + 1)
    user, item, label = histories.test_rows(99, 0)
    model.eval()
    with torch.no_grad():
        pairs = zip(*(torch.from_numpy(x).split(65536) for x in (user, item)), strict=True)
        score = torch.cat([model(*pair) for pair in pairs]).numpy()
    return float(neumf.hits(user, label, score).mean())


# -- the data sets: Parquet files of user, item (from 0 on) and time -----------------------------


def movielens(folder, path):
    ratings = neumf.read_ratings(folder)
    ratings[["user", "item", "time"]].to_parquet(path)
    return len(ratings)


def generated(path, users, items, ratings, seed=0):
    """Generate choices by taste (factors of rank 8) and popularity, without replacement."""
    import pandas as pd

    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0, 1, users)
    counts = 20 + np.round(activity / activity.sum() * (ratings - 20 * users)).astype(int)
    counts = np.minimum(counts, items // 2)
    taste, kind = rng.normal(size=(users, 8)), rng.normal(size=(items, 8))
    popularity = rng.normal(0, 1.5, items)
    chosen = []
    for user in range(users):
        wish = kind @ taste[user] * 0.7 + popularity + rng.gumbel(size=items)
        chosen.append(rng.permutation(np.argpartition(-wish, counts[user])[: counts[user]]))
    table = pd.DataFrame(
        {
            "user": np.repeat(np.arange(users, dtype=np.int32), counts),
            "item": np.concatenate(chosen).astype(np.int32),
            "time": np.concatenate([np.arange(n) for n in counts]),
        }
    )
    table.sample(frac=1, random_state=seed).to_parquet(path)
    return len(table)


# -- the report ----------------------------------------------------------------------------------


def measure(spark, path, options):
    sides = {}
    for workers in options.workers:
        name = f"bigdl, {workers}×{max(1, options.cores // workers)}"
        sides[name] = lambda seed, n=workers: bigdl_side(spark, path, options, n, seed)
    for name in [LOADER, *(f"{LOADER}, {n}" for n in options.loader_workers)]:
        sides[name] = lambda seed, side=name: in_child(path, options, side, seed)
    for name in (TENSORS, f"{TENSORS}, tuned"):
        sides[name] = lambda seed, side=name: in_child(path, options, side, seed)
    for name, run in sides.items():  # the JVM compiles, worker processes start and import
        if name.startswith("bigdl"):
            run(options.repeats)
    measurements = {name: [] for name in sides}
    for seed in range(options.repeats):
        for name, run in sides.items():
            result = run(seed)
            measurements[name].append(result)
            metrics = ", ".join(f"{k} {v:.4g}" for k, v in result.items())
            print(f"  {seed + 1}/{options.repeats} {name}: {metrics}", flush=True)
    return measurements


def in_child(path, options, side, seed):
    command = [sys.executable, __file__, "--side", side, "--path", path, "--seed", str(seed)]
    for name in ("epochs", "batch_size", "lr", "factors", "negatives", "cores"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--fused"] * options.fused
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def ratio(measurements, side, base, metric):
    """Return the ratio of samples per second of `side` to `base`: median and range."""
    pairs = zip(measurements[side], measurements[base], strict=True)
    values = [b[metric] / a[metric] * a["samples"] / b["samples"] for a, b in pairs]
    return statistics.median(values), min(values), max(values)


def report(name, rows, measurements, options):
    print(
        f"\n{name}: {rows} ratings, {measurements[TENSORS][0]['samples']} samples in "
        f"{options.epochs} epochs, batches of {options.batch_size}, {options.repeats} seeds\n"
    )
    print("| Implementation | end to end, s | loop, s | loop, ksamples/s | HR@10, mean |")
    print("|---|---|---|---|---|")
    rates = {}
    for side, results in measurements.items():
        rates[side] = statistics.mean(r["hr"] for r in results)
        speeds = [r["samples"] / r["loop"] / 1e3 for r in results]
        columns = ([r["seconds"] for r in results], [r["loop"] for r in results], speeds)
        cells = [
            f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
            for values in columns
        ]
        print(f"| {side} | {' | '.join(cells)} | {rates[side]:.4f} |")
    ours = [side for side in measurements if side.startswith("bigdl")]
    best = min(ours, key=lambda side: statistics.median(r["seconds"] for r in measurements[side]))
    print("\n| bigdl's | against | ratio, median | range | gate |")
    print("|---|---|---|---|---|")
    for side in ours:
        for base in [base for base in measurements if base not in ours]:
            for metric, gate in (("seconds", 1.6), ("loop", 0.95)):
                wanted = side == best and (metric == "loop") == (base == TENSORS)
                wanted = wanted and base in (LOADER, TENSORS)
                middle, low, high = ratio(measurements, side, base, metric)
                met = "met" if middle >= gate else "MISSED"
                what = "end to end" if metric == "seconds" else "loop"
                verdict = f">= {gate}: {met}" if wanted else ""
                print(
                    f"| {side}, {what} | {base} | {middle:.2f} | {low:.2f}–{high:.2f} | {verdict} |"
                )
    below = rates[LOADER] - min(rates[side] for side in ours)
    verdict = "met" if below <= 0.005 else "MISSED"
    print(f"\nHR@10 of bigdl is at most {below:.4f} below {LOADER} (gate: 0.005: {verdict}).")
    for side in ours:
        results = measurements[side]
        parts = {k: statistics.median(r[k] for r in results) for k in results[0]}
        shown = ", ".join(f"{k} {v:.4g}" for k, v in parts.items() if k.endswith("_s"))
        rest = parts["seconds"] - parts["loop"]
        print(f"{side}: {rest:.1f} s in addition to the loop (Spark, spooling, result); {shown}")


def options_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", help="folder of MovieLens 100K's u.data")
    parser.add_argument("--repeats", type=int, default=5, help="each with a different seed")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--factors", type=int, default=8)
    parser.add_argument("--negatives", type=int, default=4)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 1])
    parser.add_argument("--loader-workers", type=int, nargs="*", default=[2])
    parser.add_argument("--memory", default="4g")
    parser.add_argument("--fused", action="store_true", help="torch.optim.Adam(fused=True)")
    parser.add_argument("--quick", action="store_true", help="two seeds, one small data set")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats = min(options.repeats, 2)
    return options


def main(argv=None):
    options = options_of(argv)
    if options.side:
        side, _, variant = options.side.partition(", ")
        result = torch_side(options.path, options, side, variant, options.seed)
        print(json.dumps(result))
        return

    import pyspark

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    results = {}
    with tempfile.TemporaryDirectory(prefix="bigdl-bench-") as folder:
        sets = {}
        if options.data_dir:
            path = os.path.join(folder, "100k.parquet")
            sets["MovieLens 100K"] = path, movielens(options.data_dir, path)
        if not (options.quick and sets):
            shape = (943, 1682, 100_000) if options.quick else (6040, 3706, 1_000_209)
            path = os.path.join(folder, "generated.parquet")
            sets[f"generated, {shape[0]} users × {shape[1]} items"] = path, generated(path, *shape)
        init_orca_context("local", cores=options.cores, memory=options.memory)
        spark = OrcaContext.get_spark_session()
        try:
            for name, (path, rows) in sets.items():
                print(name, flush=True)
                results[name] = rows, measure(spark, path, options)
        finally:
            stop_orca_context()
    print(
        f"\nPython {platform.python_version()}, torch {torch.__version__}, pyspark "
        f"{pyspark.__version__}, {options.cores} of {os.cpu_count()} cores, {_cpu()}; measured"
    )
    for name, (rows, measurements) in results.items():
        report(name, rows, measurements, options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({n: {"rows": r, "sides": f} for n, (r, f) in results.items()}, file, indent=1)


def _cpu():
    with open("/proc/cpuinfo") as file:
        return next((x.split(":")[1].strip() for x in file if x.startswith("model name")), "?")


if __name__ == "__main__":
    main()
