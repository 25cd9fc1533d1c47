"""Recommend the next item from a user's clicks: trained on Ray, served by Friesian.

    python examples/applications/sequence_recommender.py --data-dir ml-100k --users 943 --epochs 15

Spark converts the clicks of each user to sequences. SASRec is trained on Ray workers with the Spark
DataFrame, in the same program. The last click of each user is held out; NDCG@10 ranks it among all
items that the user has not clicked, next to two baselines. At equal times, clicks are ordered by
item.

For serving, an index finds the items whose vectors have the largest products with the user's
vector, and the model ranks these candidates from the user's current clicks. OpenVINO runs it in two
parts, so the output for a user's clicks is computed once for all candidates of a request.

Without a folder the clicks are generated. For your own clicks, make a FeatureTable of ``user``,
``item`` and ``time`` (seconds since 1970).
"""

import argparse
import tempfile
import time

import numpy as np
import pandas as pd
import torch
from torch import nn

from bigdl.friesian.baselines import Markov, Popular
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.metrics import ranking_metrics
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex, Recommender
from bigdl.friesian.splitters import LastN
from bigdl.nano.serving import ServedModel
from bigdl.orca import init_orca_context, stop_orca_context

LENGTH, BEST, CANDIDATES = 50, 10, 200


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


# -- training and comparison -----------------------------------------------------------------------


def compare(train, last, options):
    """Train SASRec on Ray; return the recommender, the sequences, and the metrics of all models."""
    sequences = train.sequences("user", "item", "time", max_len=LENGTH, windows="all")
    recommender = SequenceRecommender(
        "sasrec",
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=0.002,
        backend="ray",
        workers_per_node=options.workers,
        seed=options.seed,
    )
    began = time.perf_counter()
    recommender.fit(sequences)
    metrics = {"seconds of training on Ray": time.perf_counter() - began}
    truth = last.to_pandas()
    metrics["ndcg@10 of SASRec"] = recommender.evaluate(truth, "ndcg", BEST)["ndcg@10"]
    for name, baseline in (("Markov", Markov()), ("what is popular", Popular())):
        lists = baseline.fit(train).recommend(truth["user"], BEST)
        metrics[f"ndcg@10 of {name}"] = ranking_metrics(lists, truth, "ndcg", BEST)["ndcg@10"]
    return recommender, sequences, metrics


# -- serving ---------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Ranker that scores one item per row."""

    feature_cols = ("item_seq", "item")

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, item_seq, item):
        user = self.network.user_vectors(item_seq.long())
        return (user * self.network.items(item.long())).sum(1)


def serve(recommender, sequences, folder):
    """Serve recommendations for all users; return them and the milliseconds per request."""
    network = recommender.network
    people = sequences.histories.toPandas().sort_values("user", ignore_index=True)
    clicks = torch.tensor(np.stack(people["item_seq"]))
    with torch.inference_mode():
        vectors, users = network.items.matrix().numpy(), network(clicks).numpy()
    store = EmbeddedStore(folder)
    numbers = np.arange(1, len(vectors))
    people = people.drop(columns="time_seq").assign(prediction=list(users))
    store.replace({"user": people, "item": pd.DataFrame({"item": numbers})})
    recall = IndexRecall(store, ItemIndex(numbers, vectors[1:]), seen_col="seen")
    ranker = Scores(network).eval()
    sample = clicks[:2], torch.tensor([1, 2])
    names, answers, times = list(ranker.feature_cols), {}, []
    with (
        ServedModel(ranker, sample=sample, input_names=names, thread_num=1) as served,
        Recommender(store, recall, served, candidates=CANDIDATES) as service,
    ):
        service.warm_up()
        for user in people["user"].tolist():
            began = time.perf_counter()
            (answer,) = service.recommend([user], BEST)
            times.append(1000 * (time.perf_counter() - began))
            answers[user] = sequences.items.take(answer.item_ids - 1).to_pylist()
    return answers, float(np.median(times))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder of MovieLens 100K, instead of generated clicks")
    parser.add_argument("--users", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    init_orca_context("local", cores=2, memory="2g", init_ray_on_spark=True)
    if options.data_dir:
        clicks = read_clicks(options.data_dir, options.users)
    else:
        clicks = made_up_clicks(options.users)
    split = LastN(1).split(clicks.cache())
    recommender, sequences, metrics = compare(split.train, split.test, options)
    with tempfile.TemporaryDirectory() as folder:
        answers, metrics["ms of a request"] = serve(recommender, sequences, folder)
    last = split.test.to_pandas()
    hits = [
        item in answers.get(user, ()) for user, item in zip(last["user"], last["item"], strict=True)
    ]
    metrics["hr@10 of what is served"] = float(np.mean(hits))
    for name, value in metrics.items():
        print(f"{name}: {value:.3f}")
    return {**metrics, "answers": answers, "lists": recommender.recommend(k=BEST)}


if __name__ == "__main__":
    main()
    stop_orca_context()
