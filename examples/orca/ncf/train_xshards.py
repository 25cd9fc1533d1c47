"""NeuMF on MovieLens, with XShards: pandas and numpy code that runs on every shard.

    python examples/orca/ncf/train_xshards.py --data-dir ml-100k

Ids are indexed over all shards, the ratings of a user are moved to one shard, and a pandas function
draws the negatives of each shard. The Estimator trains on the shards and predicts them.
"""

import os
import tempfile

import neumf
import numpy as np
import pandas as pd

from bigdl.orca import stop_orca_context
from bigdl.orca.data.pandas import read_csv
from bigdl.orca.data.transformer import StringIndexer


def of_first_users(frame, users):
    return frame[frame["user"].astype(int) <= users]


def from_zero(frame):
    """Shift the ids of the indexer, which start at 1 because 0 is for unseen values."""
    return frame.assign(user=frame["user"] - 1, item=frame["item"] - 1)


def training_frame(frame, items, negatives, seed):
    rows = neumf.Histories(frame, items).training_rows(negatives, seed)
    return pd.DataFrame(dict(zip(["user", "item", "label"], rows, strict=True)))


def test_frame(frame, items, candidates, seed):
    rows = neumf.Histories(frame, items).test_rows(candidates, seed)
    return pd.DataFrame(dict(zip(["user", "item", "label"], rows, strict=True)))


def hits_of(frame):
    columns = (frame[name].to_numpy() for name in ("user", "label", "prediction"))
    return neumf.hits(*columns)


def read_ratings(options):
    """Return XShards of ``user``, ``item`` and ``time``, all rows of a user in one shard."""
    types = {"user": "str", "item": "str"}
    path = neumf.ratings_file(options)
    ratings = read_csv(path, sep="\t", names=neumf.COLUMNS, dtype=types)
    if options.users:
        ratings = ratings.transform_shard(of_first_users, options.users)
    ratings = StringIndexer(inputCol=["user", "item"]).fit_transform(ratings)
    return ratings.transform_shard(from_zero).partition_by("user", 2 * options.cores)


def main(argv=None):
    options = neumf.parse(argv, __doc__)
    neumf.start(options)
    ratings = read_ratings(options)
    users, items = (int(ratings.max_values(name)) + 1 for name in ("user", "item"))
    train = ratings.transform_shard(training_frame, items, options.negatives, options.seed)
    test = ratings.transform_shard(test_frame, items, options.candidates, options.seed)

    columns = {"feature_cols": neumf.FEATURES, "label_cols": neumf.LABELS}
    fit = {"batch_size": options.batch_size, "seed": options.seed, **columns}
    est = neumf.make_estimator(options, users, items)
    stats = est.fit(train, epochs=max(1, options.epochs - 1), **fit)

    with tempfile.TemporaryDirectory() as folder:
        folder = options.output or folder
        est.save_checkpoint(os.path.join(folder, "ncf.ckpt"))

        resumed = neumf.make_estimator(options, users, items)
        resumed.load_checkpoint(os.path.join(folder, "ncf.ckpt"))
        stats += resumed.fit(train, epochs=1, **fit)
        resumed.save(os.path.join(folder, "ncf.pt"))

        metrics = resumed.evaluate(test, batch_size=16384, **columns)
        predicted = resumed.predict(test, batch_size=16384, feature_cols=neumf.FEATURES)
        if options.output:
            predicted.save_pickle(os.path.join(folder, "predictions"))
        hr = float(np.concatenate(predicted.transform_shard(hits_of).collect()).mean())
    return neumf.report(stats, metrics, hr)


if __name__ == "__main__":
    main()
    stop_orca_context()
