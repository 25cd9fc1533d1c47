"""Sequence models and baselines on MovieLens 100k, and those of RecTools: all items ranked.

    BIGDL_DATA=/path/to/data python benchmarks/sequence_models.py --epochs 40 \
        --rectools /path/to/env/bin/python

Each split is made once; all models are trained on its training rows, and ranked by the same
metrics. Rows of a user in one second are ordered by item, which matters here: 76 % of the rows
share their second. Items of the training rows are not recommended. Both sides have the same
dimensions, loss, optimizer, batch size, epochs and training windows (the newest events of each
user, as RecTools has no others), one thread, and nothing is tuned. The models of one name are
trained alternately, seed by seed. A line of JSON per training is printed, then a table of means,
and a paired bootstrap over the users of the NDCG averaged over the seeds. Ctrl-C ends a run with
the table of the trainings until then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil
import torch

from bigdl.friesian.baselines import ALS, EASE, ItemKNN, Markov, Popular, folds_as_arrow
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.metrics import compare_rankings, ranking_metrics
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.splitters import GlobalTime, LastN
from bigdl.orca import init_orca_context, stop_orca_context

BASELINES = {
    "popular": Popular,
    "popular, 30 days": lambda: Popular(period=30 * 86_400),
    "Markov": Markov,
    "ItemKNN": lambda: ItemKNN(50),
    "EASE": lambda: EASE(200.0),
    "ALS": ALS,
}
NETWORKS = {
    "SASRec": ("sasrec", {}),
    "SASRec, BCE": ("sasrec", {"loss": "bce"}),
    "SASRec, gBCE": ("sasrec", {"loss": "gbce"}),
    "eSASRec": ("sasrec", {"block": "ligr", "loss": "sampled_softmax"}),
    "HSTU": ("hstu", {}),
    "GRU4Rec": ("gru4rec", {}),
    "BERT4Rec": ("bert4rec", {}),
}
PEERS = ("SASRec", "eSASRec", "HSTU", "BERT4Rec")
SPLITS = {"leave-one-out": lambda: LastN(1), "global time": lambda: GlobalTime(test_size=0.1)}


def cpu_seconds():
    """Return the CPU seconds of this process and its children."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(
        each.user + each.system + each.children_user + each.children_system for each in times
    )


class OurModel:
    """Model of this project, trained in one worker."""

    def __init__(self, model):
        self.model = model

    def lists(self, train, users, k):
        began, cpu = time.perf_counter(), cpu_seconds()
        self.model.fit(train)
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        return self.model.recommend(users, k), {"seconds": seconds, "cpu_seconds": cpu}


class RecTools:
    """Model of RecTools, trained in a process of another environment."""

    def __init__(self, process, folder, task):
        self.process, self.folder, self.task = process, folder, task

    def lists(self, train, users, k):
        files = {"train": str(self.folder / "train.csv"), "lists": str(self.folder / "lists.csv")}
        train.to_csv(files["train"], index=False)
        task = {**self.task, **files, "users": [int(each) for each in users], "k": k}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        times = json.loads(self.process.stdout.readline())
        return pd.read_csv(files["lists"]), times


def models_of(options, process, folder):
    """Yield (name, seed, model); models of one name alternate."""
    for name in options.models:
        if name in BASELINES:
            yield name, 0, OurModel(BASELINES[name]())
    for seed in range(options.seeds):
        for name in options.models:
            if name in BASELINES:
                continue
            model, arguments = NETWORKS[name]
            heads = {} if model == "gru4rec" else {"heads": options.heads}
            sizes = {each: getattr(options, each) for each in ("epochs", "max_len", "batch_size")}
            made = SequenceRecommender(
                model,
                windows=options.windows,
                dim=options.dim,
                seed=seed,
                **sizes,
                **heads,
                **arguments,
            )
            yield name, seed, OurModel(made)
            if process is not None and name in PEERS:
                task = {"model": name, "seed": seed, "dim": options.dim, "heads": options.heads}
                yield f"{name} of RecTools", seed, RecTools(process, folder, task | sizes)


def run_split(split, table, options, process, folder):
    fold = next(iter(folds_as_arrow(table, SPLITS[split]())))
    train, test, dropped = fold.train.to_pandas(), fold.test.to_pandas(), fold.dropped
    columns = ["user", "item", "time"]
    train = train[columns].sort_values(columns)
    users = sorted(test["user"].unique())
    counts = train.groupby("user").size()
    samples = int((counts > 1).sum())
    facts = {"train": len(train), "test": len(test), "users": len(users), "dropped": dropped}
    print(json.dumps({"split": split, **facts}), flush=True)
    rows, per_user = [], {}
    try:
        for name, seed, model in models_of(options, process, folder):
            lists, times = model.lists(train, users, 10)
            metrics = ranking_metrics(
                lists, test, ["ndcg", "hit_rate", "coverage"], 10, train=train, per_user=True
            )
            row = {"split": split, "model": name, "seed": seed, **metrics, **times}
            if name not in BASELINES and options.windows == "last":
                row["samples_per_s"] = samples * options.epochs / times["seconds"]
                row["samples_per_cpu_s"] = samples * options.epochs / times["cpu_seconds"]
            rows.append(row)
            per_user.setdefault(name, []).append(metrics.per_user.set_index("user")["ndcg@10"])
            print(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
    except KeyboardInterrupt:
        print("interrupted; the table has the trainings until then", flush=True)
    if not rows:
        return
    frame = pd.DataFrame(rows).drop(columns="split")
    means = frame.groupby("model").agg(["mean", "std"]).drop(columns="seed", level=0)
    print(means.sort_values(("ndcg@10", "mean"), ascending=False).round(4).to_string())
    compared(per_user)


def compared(per_user):
    """Print paired comparisons: with RecTools, and of each network with the best baseline."""
    means = {
        name: pd.concat(seeds, axis=1).mean(axis=1).rename("ndcg@10").reset_index()
        for name, seeds in per_user.items()
    }
    pairs = [(f"{name} of RecTools", name) for name in PEERS]
    baselines = [name for name in means if name in BASELINES]
    if baselines:
        best = max(baselines, key=lambda name: means[name]["ndcg@10"].mean())
        pairs += [(best, name) for name in means if name in NETWORKS]
    for first, second in pairs:
        if first in means and second in means:
            result = compare_rankings(means[first], means[second], "ndcg@10")
            shown = {key: round(value, 4) for key, value in result.items()}
            print(json.dumps({"pair": f"{second} - {first}", **shown}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-len", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--windows", default="last", choices=["last", "all"])
    parser.add_argument("--models", nargs="*", default=[*BASELINES, *NETWORKS])
    parser.add_argument("--splits", nargs="*", default=list(SPLITS))
    parser.add_argument("--rectools", help="Python of an environment with rectools[torch]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_orca_context("local", cores=2)
    path = Path(os.environ["BIGDL_DATA"]) / "ml-100k" / "u.data"
    names = ["user", "item", "rating", "time"]
    table = FeatureTable.read_csv(str(path), "\t", names=names, dtype="int")
    table = table.select("user", "item", "time").cache()
    process = None
    if options.rectools:
        script = Path(__file__).parent / "sequence_sides" / "by_rectools.py"
        process = subprocess.Popen(
            [options.rectools, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            for split in options.splits:
                run_split(split, table, options, process, Path(folder))
    finally:
        if process is not None:
            process.stdin.close()
            process.wait()
        stop_orca_context()


if __name__ == "__main__":
    main()
