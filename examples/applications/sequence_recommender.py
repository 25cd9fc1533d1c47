"""Recommend the next item from clicks and context: trained on Ray, served by Friesian.

    python examples/applications/sequence_recommender.py --data-dir ml-100k --users 943 --epochs 10

Spark converts the clicks of each user to sequences and adds the context (hour and weekday). One
transformer reads the sequence and another reads the context; the scores are the products of their
combined output with the item embeddings. The model is trained on Ray workers with the Spark
DataFrame, in the same program. It follows TxT, the transformer cross transformer of Burger King
(Wang et al., "Context-Aware Drive-thru Recommendation Service at Fast Food Restaurants", 2020). A
two-tower model is trained on the same clicks as a baseline and for candidate retrieval. The last
click of each user is held out; NDCG@10 ranks it among all items that the user has not clicked.

For serving, the two-tower model retrieves candidates and the transformer ranks them. OpenVINO runs
it in two parts, so the output for a user's clicks is computed once for all candidates of a request.

Without a folder the clicks are generated. For your own clicks, make a FeatureTable of ``user``,
``item`` (numbers from 1) and ``time`` (seconds since 1970) for :func:`sequences`.
"""

import argparse
import tempfile
import time

import numpy as np
import pandas as pd
import torch
from pyspark.sql import Window
from pyspark.sql import functions as F
from torch import nn

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import InBatchSoftmax, Tower, TwoTower
from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex, Recommender
from bigdl.nano.serving import ServedModel
from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

LENGTH, BEST, CANDIDATES = 20, 10, 200
CONTEXT = {"hour": 24, "weekday": 7}
CLICKS = "item_hist_seq"
TEMPERATURE = 0.15


# -- clicks ----------------------------------------------------------------------------------------


def read_clicks(data_dir, users):
    """Read the clicks of the first users of MovieLens 100K."""
    names = ["user", "item", "rating", "time"]
    table = FeatureTable.read_csv(f"{data_dir}/u.data", "\t", names=names, dtype="int")
    return table.filter(f"user <= {users}").select("user", "item", "time")


def made_up_clicks(users, items=120, seed=0):
    """Generate clicks that continue a series of ten items or start one that suits the hour."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(1, users + 1):
        now, item = 1_700_000_000 + int(rng.integers(0, 86400)), int(rng.integers(1, items + 1))
        for _ in range(int(rng.integers(15, 40))):
            now += int(rng.integers(600, 30_000))
            hour = now // 3600 % 24
            if item % 10 and rng.random() < 0.7:
                item += 1
            else:
                series = items // 10
                item = 10 * int((hour * series // 24 + rng.integers(0, 2)) % series) + 1
            rows.append((user, item, now))
    return FeatureTable.from_pandas(pd.DataFrame(rows, columns=["user", "item", "time"]))


def sequences(clicks):
    """Return rows of a click, the previous clicks and the context, split into train and last click.

    Returns
    -------
    train, last : FeatureTable
        ``user``, ``item``, ``item_hist_seq``, ``hour`` and ``weekday``.
    """
    of_user = Window.partitionBy("user").orderBy("time", "item")
    rows = clicks.df.withColumn("place", F.row_number().over(of_user))
    rows = rows.withColumn("hour", F.expr("int(time div 3600 % 24)"))
    rows = rows.withColumn("weekday", F.expr("int((time div 86400 + 4) % 7)"))
    most = F.max("place").over(Window.partitionBy("user"))
    rows = rows.withColumn("is_last", F.col("place") == most)
    table = FeatureTable(rows).add_hist_seq("item", "user", "place", max_len=LENGTH)
    table = table.pad(CLICKS, LENGTH).cache()
    columns = ["user", "item", CLICKS, *CONTEXT]
    return (table.filter(f"is_last = {flag}").select(*columns) for flag in ("false", "true"))


# -- networks --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Transformer layer."""

    def __init__(self, dim, heads=2, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.join = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.think = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, hidden):
        rows, length, dim = x.shape
        parts = self.mix(self.before(x)).reshape(rows, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        weights = query @ key.transpose(-1, -2) / (dim // self.heads) ** 0.5
        weights = (weights + hidden).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).reshape(rows, length, dim)
        x = x + self.dropout(self.join(mixed))
        return x + self.dropout(self.think(self.between(x)))


class TransformerCross(nn.Module):
    """Model that scores all items from clicks and their context."""

    feature_cols = (CLICKS, *CONTEXT)

    def __init__(self, items, dim=64, layers=2):
        super().__init__()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(LENGTH, dim))
        self.context = nn.ModuleList(nn.Embedding(size, dim) for size in CONTEXT.values())
        for table in (self.items, *self.context):
            nn.init.normal_(table.weight, std=0.05)
        self.of_clicks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.of_context = Block(dim)
        self.ends = nn.LayerNorm(dim)
        self.popular = nn.Parameter(torch.zeros(items))

    def user(self, clicks, *context):
        """Return the user vector for clicks and context."""
        clicks = clicks.long()
        is_there = clicks != 0
        hidden = torch.where(is_there, 0.0, -1e4)[:, None, None, :]
        x = self.items(clicks) + self.places
        for block in self.of_clicks:
            x = block(x, hidden)
        newest = torch.nn.functional.one_hot(is_there.sum(1) - 1, LENGTH).unsqueeze(-1)
        sequence = self.ends((x * newest).sum(1))
        pairs = zip(self.context, context, strict=True)
        now = torch.stack([table(each.long()) for table, each in pairs], 1)
        return sequence * (1 + self.of_context(now, torch.zeros(())).mean(1))

    def forward(self, clicks, *context):
        return self.user(clicks, *context) @ self.items.weight.T + self.popular


class Scores(nn.Module):
    """Wrapper that scores one item per row, for use as a ranker."""

    feature_cols = (CLICKS, *CONTEXT, "item")

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, clicks, hour, weekday, item):
        item = item.long()
        user = self.model.user(clicks, hour, weekday)
        return (user * self.model.items(item)).sum(1) + self.model.popular[item]


def towers_of(users, items, dim=64):
    of_user = Tower({"user": users, **CONTEXT}, dim=dim, sequences={CLICKS: items})
    return TwoTower(of_user, Tower({"item": items}, dim=dim))


# -- training and comparison -----------------------------------------------------------------------


def trained(model, table, loss, options, rate, backend):
    """Train a model with an Estimator on a table and return it."""
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        loss=loss,
        backend=backend,
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": list(model.feature_cols), "label_cols": "item"}
    data, seed = table.df, options.seed
    est.fit(data, epochs=options.epochs, batch_size=options.batch_size, seed=seed, **columns)
    return est.get_model().eval()


def tensors(frame, names):
    return [torch.from_numpy(np.stack(frame[name])) for name in names]


def ndcg(scores, last):
    """Return the mean NDCG@10 of held-out items among the items that the user has not clicked."""
    gains = []
    for row, item, seen in zip(scores, last["item"], last["seen"], strict=True):
        row[[0, *seen]] = -np.inf
        rank = 1 + int((row > row[item]).sum())
        gains.append(1 / np.log2(rank + 1) if rank <= BEST else 0.0)
    return float(np.mean(gains))


def compare(train, last, items, options):
    """Train both models; return them, the user and item vectors, and the metrics."""
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    model = TransformerCross(items)
    model = trained(model, train, nn.CrossEntropyLoss(), options, 0.002, "ray")
    metrics = {"seconds of training on Ray": time.perf_counter() - began}
    counts = np.bincount(train.to_list("item"), minlength=items)
    towers = towers_of(int(last["user"].max()) + 1, items)
    towers = trained(towers, train, InBatchSoftmax(TEMPERATURE, counts), options, 0.005, "spark")
    with torch.inference_mode():
        scores = model(*tensors(last, model.feature_cols)).numpy()
        users = towers.user(*tensors(last, towers.user.feature_cols)).numpy()
        vectors = towers.item(torch.arange(items)).numpy()
    # training removed the popularity of items, which affects choices
    popular = TEMPERATURE * np.log(np.maximum(counts, 1))
    users = np.column_stack([users, np.ones(len(users))]).astype(np.float32)
    vectors = np.column_stack([vectors, popular]).astype(np.float32)
    metrics["ndcg@10 of the transformers"] = ndcg(scores.copy(), last)
    metrics["ndcg@10 of two towers"] = ndcg(users @ vectors.T, last)
    metrics["ndcg@10 of what is popular"] = ndcg(np.tile(1.0 * counts, (len(last), 1)), last)
    return model, users, vectors, scores, metrics


# -- serving ---------------------------------------------------------------------------------------


def serve(model, users, vectors, last, folder):
    """Serve recommendations for all users; return them and the milliseconds per request."""
    store = EmbeddedStore(folder)
    people = last.drop(columns="item").assign(prediction=list(users))
    numbers = np.arange(1, len(vectors))
    store.replace({"user": people, "item": pd.DataFrame({"item": numbers})})
    index = ItemIndex(numbers, vectors[1:])
    recall = IndexRecall(store, index, seen_col="seen")
    ranker = Scores(model).eval()
    sample = (*tensors(last[:2], model.feature_cols), torch.tensor([1, 2]))
    answers, times = {}, []
    names = list(ranker.feature_cols)
    with (
        ServedModel(ranker, sample=sample, input_names=names, thread_num=1) as served,
        Recommender(store, recall, served, candidates=CANDIDATES) as recommender,
    ):
        recommender.warm_up()
        for user in last["user"].tolist():
            began = time.perf_counter()
            (answer,) = recommender.recommend([user], BEST)
            times.append(1000 * (time.perf_counter() - began))
            answers[user] = answer.item_ids.tolist()
    return answers, float(np.median(times))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder of MovieLens 100K, instead of generated clicks")
    parser.add_argument("--users", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    init_orca_context("local", cores=2, memory="2g", init_ray_on_spark=True)
    if options.data_dir:
        clicks = read_clicks(options.data_dir, options.users)
    else:
        clicks = made_up_clicks(options.users)
    train, last = sequences(clicks)
    known = clicks.to_pandas().groupby("user")["item"].agg(set).rename("seen")
    last = last.to_pandas().merge(known, on="user").sort_values("user", ignore_index=True)
    pairs = zip(last["seen"], last["item"], strict=True)
    last["seen"] = [sorted(seen - {item}) for seen, item in pairs]
    items = 1 + max(max(seen, default=0) for seen in [*last["seen"], last["item"]])
    model, users, vectors, scores, metrics = compare(train, last, items, options)
    with tempfile.TemporaryDirectory() as folder:
        answers, metrics["ms of a request"] = serve(model, users, vectors, last, folder)
    hits = [item in answers[user] for user, item in zip(last["user"], last["item"], strict=True)]
    metrics["hr@10 of what is served"] = float(np.mean(hits))
    for name, value in metrics.items():
        print(f"{name}: {value:.3f}")
    return {**metrics, "answers": answers, "scores": scores, "last": last}


if __name__ == "__main__":
    main()
    stop_orca_context()
