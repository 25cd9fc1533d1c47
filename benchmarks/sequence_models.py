"""Sequence models and baselines on MovieLens 100k: all items ranked, leave-one-out and by time.

    BIGDL_DATA=/path/to/data python benchmarks/sequence_models.py --epochs 40

Each split is made once; baselines and models are trained on its training rows and ranked by the
same `cross_validate`. Rows of a user in one second are ordered by item, which matters here: 76 % of
the rows share their second. Items of the training rows are not recommended. The table has the
metrics of each model, and the seconds and samples per second of its training.
"""

import argparse
import json
import os
import time
from pathlib import Path

from bigdl.friesian.baselines import EASE, ItemKNN, Markov, Popular, cross_validate
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.splitters import GlobalTime, LastN
from bigdl.orca import init_orca_context, stop_orca_context

BASELINES = {
    "popular": Popular,
    "Markov": Markov,
    "ItemKNN": lambda: ItemKNN(50),
    "EASE": lambda: EASE(200.0),
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
SPLITS = {"leave-one-out": lambda: LastN(1), "global time": lambda: GlobalTime(test_size=0.1)}


class Timed:
    """Recommender that records the seconds of its training."""

    def __init__(self, model):
        self.model, self.seconds = model, 0.0

    def fit(self, table):
        started = time.perf_counter()
        self.model.fit(table)
        self.seconds = time.perf_counter() - started

    def recommend(self, users, k, *, filter_seen):
        return self.model.recommend(users, k, filter_seen=filter_seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-len", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--windows", default="all")
    parser.add_argument("--models", nargs="*", default=[*BASELINES, *NETWORKS])
    parser.add_argument("--splits", nargs="*", default=list(SPLITS))
    options = parser.parse_args()
    init_orca_context("local", cores=2)
    path = Path(os.environ["BIGDL_DATA"]) / "ml-100k" / "u.data"
    names = ["user", "item", "rating", "time"]
    table = FeatureTable.read_csv(str(path), "\t", names=names, dtype="int")
    table = table.select("user", "item", "time").cache()
    for split in options.splits:
        models = {}
        for name in options.models:
            if name in BASELINES:
                models[name] = Timed(BASELINES[name]())
                continue
            model, arguments = NETWORKS[name]
            for seed in range(options.seeds):
                made = SequenceRecommender(
                    model,
                    max_len=options.max_len,
                    windows=options.windows,
                    epochs=options.epochs,
                    batch_size=options.batch_size,
                    dim=options.dim,
                    seed=seed,
                    **arguments,
                )
                models[f"{name} #{seed}"] = Timed(made)
        result = cross_validate(
            table, SPLITS[split](), models, ["ndcg", "hit_rate", "coverage"], 10
        )
        for name, row in result.means.iterrows():
            entry = {"split": split, "model": name, "seconds": round(models[name].seconds, 1)}
            history = getattr(models[name].model, "epoch_metrics", None)
            if history:
                rows = history[-1]["num_samples"] * len(history)
                entry["samples/s"] = round(rows / models[name].seconds)
            print(json.dumps({**entry, **row.round(4)}), flush=True)
        print(json.dumps({"split": split, **result.folds.iloc[0].astype(str)}), flush=True)
    stop_orca_context()


if __name__ == "__main__":
    main()
