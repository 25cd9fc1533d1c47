"""Model and data functions shared by the three NeuMF programs on MovieLens.

The model is NeuMF (He et al., "Neural Collaborative Filtering", WWW 2017).  The last rating of
every user is held out. The model learns to distinguish rated items from unrated ones (negatives),
and HR@10 is the share of users whose held-out item is among the top ten of it and 99 unrated items.

Negatives are a function of (seed, user, item, number) only: the Spark plan and the numpy functions
draw the same ones on any cluster.
"""

import argparse
import itertools
import os

import numpy as np
import torch
from torch import nn

from bigdl.orca.learn.metrics import AUC, Accuracy

FEATURES, LABELS = ["user", "item"], ["label"]
COLUMNS = ["user", "item", "rating", "time"]


# -- the model -----------------------------------------------------------------------------------


class NeuMF(nn.Module):
    """NeuMF: probability of a choice from a product and an MLP of embeddings."""

    def __init__(self, users, items, factors=8, layers=(64, 32, 16, 8)):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(users, factors), nn.Embedding(items, factors)
        half = layers[0] // 2
        self.user_mlp, self.item_mlp = nn.Embedding(users, half), nn.Embedding(items, half)
        steps = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(layers)]
        self.mlp = nn.Sequential(*[module for step in steps for module in step])
        self.head = nn.Linear(factors + layers[-1], 1)
        for table in (self.user_gmf, self.item_gmf, self.user_mlp, self.item_mlp):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, user, item):
        product = self.user_gmf(user) * self.item_gmf(item)
        hidden = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], 1))
        return torch.sigmoid(self.head(torch.cat([product, hidden], 1))).squeeze(1)


def model_creator(config):
    return NeuMF(config["users"], config["items"], config["factors"])


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=config["lr"], fused=config.get("fused"))


def scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def make_estimator(options, users, items, **more):
    """Return the Estimator of the three programs; `more` is added to its config."""
    from bigdl.orca.learn.pytorch import Estimator

    config = {"users": users, "items": items, "factors": options.factors, "lr": options.lr}
    config["fused"] = options.fused or None
    return Estimator.from_torch(
        model=model_creator,
        optimizer=optimizer_creator,
        loss=nn.BCELoss(),
        metrics=[Accuracy(), AUC()],
        scheduler_creator=scheduler_creator,
        config={**config, **more},
        workers_per_node=options.workers_per_node,
        backend=options.backend,
    )


# -- the data, as a Spark plan -------------------------------------------------------------------


def histories(ratings):
    """Return a row per user: all items by time (the last one is held out), and `unseen` items.

    Parameters
    ----------
    ratings : pyspark.sql.DataFrame
        ``user`` and ``item`` as numbers from 0 on, and ``time``.

    Returns
    -------
    DataFrame, int, int
        ``user``, ``chosen``, ``unseen``; the numbers of users and of items.
    """
    from pyspark.sql import functions as F

    users, items = ratings.agg(F.max("user") + 1, F.max("item") + 1).first()
    chosen = F.array_sort(F.collect_list(F.struct("time", "item")))["item"]
    every_item = F.sequence(F.lit(0), F.lit(items - 1))
    per_user = ratings.groupBy("user").agg(chosen.alias("chosen"))
    return per_user.withColumn("unseen", F.array_except(every_item, "chosen")), users, items


def training_rows(per_user, negatives, seed):
    """Return ``user``, ``item``, ``label`` of all chosen items but the last, and of negatives."""
    from pyspark.sql import functions as F

    kept = F.expr("slice(chosen, 1, size(chosen) - 1)")

    def rows_of(item):
        drawn = F.transform(_numbers(negatives), lambda k: _drawn(item, k, seed))
        return F.concat(F.array(item), drawn)

    rows = per_user.select("user", F.explode(F.transform(kept, rows_of)).alias("items"))
    rows = rows.select("user", F.posexplode("items").alias("position", "item"))
    label = (F.col("position") == 0).cast("float").alias("label")
    return rows.filter("item IS NOT NULL").select("user", "item", label)


def test_rows(per_user, candidates, seed):
    """Return the held-out item (``label`` 1) and its candidates (0) for every user."""
    from pyspark.sql import functions as F

    drawn = F.transform(_numbers(candidates), lambda k: _drawn(F.lit(-1), k, seed))
    ranked = F.concat(F.expr("slice(chosen, -1, 1)"), drawn)
    rows = per_user.select("user", F.posexplode(ranked).alias("position", "item"))
    label = (F.col("position") == 0).cast("float").alias("label")
    return rows.filter("item IS NOT NULL").select("user", "item", label)


def _numbers(count):
    from pyspark.sql import functions as F

    # empty for users who have seen all films
    return F.when(F.size("unseen") > 0, F.sequence(F.lit(1), F.lit(count))).otherwise(F.array())


def _drawn(item, number, seed):
    """Return a random item of the column ``unseen``."""
    from pyspark.sql import functions as F

    key = [c.cast("bigint") for c in (F.lit(seed), F.col("user"), item, number)]
    return F.get("unseen", F.pmod(F.xxhash64(*key), F.size("unseen")).cast("int"))


def hit_rate(predicted, best=10):
    """Return the share of users whose held-out item is among their `best` predictions."""
    from pyspark.sql import functions as F

    score = F.max(F.when(F.col("label") == 1, F.col("prediction"))).alias("score")
    others = F.collect_list(F.when(F.col("label") == 0, F.col("prediction"))).alias("others")
    above = F.expr("size(filter(others, x -> x >= score))")
    per_user = predicted.groupBy("user").agg(score, others)
    return per_user.select(F.avg((above < best).cast("double"))).first()[0]


# -- the data, as numpy functions ----------------------------------------------------------------


class Histories:
    """Array version of :func:`histories`, :func:`training_rows` and :func:`test_rows`.

    Parameters
    ----------
    ratings : pandas.DataFrame
        All ratings of some users.
    items : int
        Number of items.
    """

    def __init__(self, ratings, items):
        user, item, time = (ratings[name].to_numpy() for name in ("user", "item", "time"))
        order = np.lexsort((item, time, user))
        self._user, self._item = user[order].astype(np.int64), item[order].astype(np.int64)
        self.users, first, counts = np.unique(self._user, return_index=True, return_counts=True)
        self._is_last = np.zeros(len(order), bool)
        self._is_last[first + counts - 1] = True
        self._width = items + 1

        # item r + p is the r-th unseen item, if p seen items precede it
        row = np.searchsorted(self.users, self._user)
        seen = np.unique(row * self._width + self._item)
        owner = seen // self._width
        self._begin = np.searchsorted(owner, np.arange(len(self.users) + 1))
        self._gaps = seen - (np.arange(len(seen)) - self._begin[owner])
        self._unseen = items - np.diff(self._begin)

    def training_rows(self, negatives, seed):
        """Return user, item and label of all chosen items but the last, and of negatives."""
        user, item = self._user[~self._is_last], self._item[~self._is_last]
        return self._with_drawn(user, item, item, negatives, seed)

    def test_rows(self, candidates, seed):
        """Return user, item and label of the held-out items and their candidates."""
        user, item = self._user[self._is_last], self._item[self._is_last]
        return self._with_drawn(user, item, np.full(len(item), -1), candidates, seed)

    def _with_drawn(self, user, item, key, count, seed):
        row = np.searchsorted(self.users, user)
        unseen = self._unseen[row]
        has_any = unseen > 0
        rows = np.empty((len(user), 1 + count), np.int64)
        rows[:, 0] = item
        for number in range(1, count + 1):
            drawn = hashed(seed, user, key, number) % np.maximum(unseen, 1)
            gap = row * self._width + drawn
            before = np.searchsorted(self._gaps, gap, side="right") - self._begin[row]
            rows[:, number] = drawn + before
        keep = np.ones(rows.shape, bool)
        keep[:, 1:] = has_any[:, None]
        label = np.zeros(rows.shape, np.float32)
        label[:, 0] = 1
        users = np.broadcast_to(user[:, None], rows.shape)
        return users[keep].astype(np.int32), rows[keep].astype(np.int32), label[keep]


_PRIMES = [
    np.uint64(p)
    for p in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
]


def hashed(*columns):
    """Return Spark's ``xxhash64`` of int64 columns."""
    first, second, third, fourth, fifth = _PRIMES
    hashes = np.uint64(42)
    with np.errstate(over="ignore"):
        for column in columns:
            value = np.asarray(column, np.int64).astype(np.uint64)
            hashes = (hashes + fifth + np.uint64(8)) ^ _rotated(value * second, 31) * first
            hashes = _rotated(hashes, 27) * first + fourth
            hashes = (hashes ^ (hashes >> np.uint64(33))) * second
            hashes = (hashes ^ (hashes >> np.uint64(29))) * third
            hashes = hashes ^ (hashes >> np.uint64(32))
    return hashes.astype(np.int64)


def _rotated(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def read_ratings(data_dir, users=None):
    """Return a pandas frame of ``user``, ``item``, ``rating``, ``time``, with ids from 0."""
    import pandas as pd

    ratings = pd.read_csv(os.path.join(data_dir, "u.data"), sep="\t", names=COLUMNS)
    if users:
        ratings = ratings[ratings["user"] <= users]
    for name in ("user", "item"):
        ratings[name] = ratings[name].factorize(sort=True)[0].astype(np.int32)
    return ratings


def hits(user, label, prediction, best=10):
    """Return for each user whether the held-out item is among the `best`."""
    order = np.argsort(user, kind="stable")
    user, label, score = user[order], label[order], prediction[order]
    users, user_index = np.unique(user, return_inverse=True)
    held_out_score = np.full(len(users), -np.inf)
    held_out_score[user_index[label == 1]] = score[label == 1]
    above = np.bincount(
        user_index, (label == 0) & (score >= held_out_score[user_index]), len(users)
    )
    return above < best


# -- the options of the programs -----------------------------------------------------------------


def parse(argv, description):
    """Parse the options of the three programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-dir", required=True, help="folder of MovieLens' u.data")
    parser.add_argument("--cluster_mode", default="local", help="cluster_mode of init_orca_context")
    parser.add_argument("--backend", default="spark", help="backend of the Estimator")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", default="2g")
    parser.add_argument("--workers_per_node", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--factors", type=int, default=8)
    parser.add_argument("--fused", action="store_true", help="use the fused implementation of Adam")
    parser.add_argument("--negatives", type=int, default=4, help="negatives per chosen item")
    parser.add_argument(
        "--candidates",
        type=int,
        default=99,
        help="number of candidates to rank with the held-out item",
    )
    parser.add_argument("--users", type=int, help="use only users with ids up to this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="folder for the weights, the checkpoint and predictions")
    return parser.parse_args(argv)


def ratings_file(options):
    return os.path.join(options.data_dir, "u.data")


def start(options):
    """Start Orca, or use the Spark that is running."""
    from bigdl.orca import init_orca_context

    return init_orca_context(options.cluster_mode, cores=options.cores, memory=options.memory)


def report(stats, metrics, hr):
    """Print the results of the training and return them."""
    results = {
        "samples": stats[-1]["num_samples"],
        "first_loss": stats[0]["train_loss"],
        "last_loss": stats[-1]["train_loss"],
        "accuracy": float(metrics["Accuracy"]),
        "auc": float(metrics["AUC"]),
        "hr": hr,
    }
    for name, value in results.items():
        print(f"{name} {value:.4f}")
    return results
