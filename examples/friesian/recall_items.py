"""Retrieve candidates for every user by nearest-neighbor search of two-tower vectors.

    python examples/friesian/recall_items.py --data-dir ml-100k --batch-size 1024 --lr 0.002

A two-tower model is trained. The film vectors form an index, of Faiss if installed, which is sent
to the Spark workers; each searches it for its part of the users. Seen films are not candidates.
Without a folder the ratings are generated.
"""

import importlib.util
import os

import films
import numpy as np
import pandas as pd
import programs
import torch
from pyspark.ml.functions import vector_to_array

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import InBatchSoftmax, TwoTower
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

TEMPERATURE = 0.15
CANDIDATES = 50


def embed(tower, table):
    """Add the vectors of a tower to a table as the column ``prediction``."""
    est = Estimator.from_torch(model=tower)
    return est.predict(table.df, feature_cols=tower.feature_cols, batch_size=1024)


def vectors_of_items(predicted, counts):
    """Return item ids and vectors, with the popularity as an additional dimension.

    Training took that off for frequent films, but it is a part of what is chosen.
    """
    frame = predicted.select("item", "prediction").toPandas()
    vectors = np.stack([each.toArray() for each in frame["prediction"]])
    popular = TEMPERATURE * np.log(np.maximum(counts[frame["item"]], 1))
    return frame["item"].to_numpy(), np.column_stack([vectors, popular]).astype(np.float32)


def search_in(vectors):
    """Return a search function for the indexes of the `k` largest inner products."""
    if importlib.util.find_spec("faiss") is not None:
        import faiss

        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return lambda queries, k: index.search(queries, k)[1]

    def search(queries, k):
        scores = queries @ vectors.T
        best = np.argpartition(-scores, k - 1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, 1), 1)
        return np.take_along_axis(best, order, 1)

    return search


def recall(users, numbers, vectors):
    """Return `CANDIDATES` unseen items for each user, the best first.

    Parameters
    ----------
    users : pyspark.sql.DataFrame
        ``user``, ``prediction`` with the vectors, ``seen`` with arrays of items.
    numbers, vectors : ndarray
        Of the items.

    Returns
    -------
    FeatureTable
        ``user``, ``candidates``.
    """

    def candidates(frames):
        search = search_in(vectors)
        for frame in frames:
            queries = np.column_stack([np.stack(frame["vector"]), np.ones(len(frame))])
            k = min(CANDIDATES + int(frame["seen"].str.len().max()), len(numbers))
            nearest = numbers[search(queries.astype(np.float32), k)]
            fresh = [
                row[~np.isin(row, seen)][:CANDIDATES]
                for row, seen in zip(nearest, frame["seen"], strict=True)
            ]
            yield pd.DataFrame({"user": frame["user"], "candidates": fresh})

    queries = users.select("user", "seen", vector_to_array("prediction").alias("vector"))
    return FeatureTable(queries.mapInPandas(candidates, "user int, candidates array<int>"))


def share_found(candidates, last):
    """Return the share of candidate arrays that contain the held-out item."""
    return float(np.mean([item in row for row, item in zip(candidates, last, strict=True)]))


def main(argv=None):
    size, data = {"users": 600, "items": 500}, "MovieLens 100K"
    options = programs.parse(argv, __doc__, size=size, epochs=10, lr=0.005, data=data, output=True)
    programs.start(options)
    train, test, users, items, schema, counts, chance = films.towers(options)
    model = TwoTower.from_schema(schema, films.USER, films.ITEM, dim=32, hidden=(64,))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=InBatchSoftmax(TEMPERATURE, counts),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "label_cols": "item"}
    est.fit(train.df, options.epochs, batch_size=options.batch_size, seed=options.seed, **columns)

    towers = est.get_model()
    numbers, vectors = vectors_of_items(embed(towers.item, items), counts)
    seen = train.group_by("user", {"item": "collect_set"}).rename({"collect_set(item)": "seen"})
    last = test.filter("label = 1").select("user", "item")
    queries = FeatureTable(embed(towers.user, users)).join(seen, on="user")
    recalled = recall(queries.df, numbers, vectors).cache()
    if options.output:
        recalled.write_parquet(os.path.join(options.output, "candidates"))

    # the most popular films that the user has not seen
    recalled = recalled.join(last, on="user").join(seen, on="user").to_pandas()
    popular = np.argsort(-counts)
    popular = [popular[~np.isin(popular, each)][:CANDIDATES] for each in recalled["seen"]]
    metrics = {
        f"recall@{CANDIDATES}": share_found(recalled["candidates"], recalled["item"]),
        f"recall@{CANDIDATES} of popular films": share_found(popular, recalled["item"]),
    }
    if chance is not None:
        ideal = np.argsort(-chance[recalled["user"]])
        ideal = [
            row[~np.isin(row, each)][:CANDIDATES]
            for row, each in zip(ideal, recalled["seen"], strict=True)
        ]
        metrics[f"ideal recall@{CANDIDATES}"] = share_found(ideal, recalled["item"])
    return programs.report(metrics)


if __name__ == "__main__":
    main()
    stop_orca_context()
