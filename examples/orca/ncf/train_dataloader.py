"""NeuMF on MovieLens, from creators of PyTorch DataLoaders.

    python examples/orca/ncf/train_dataloader.py --data-dir ml-100k

The data set is a plain ``torch.utils.data.Dataset``: the code of a single-process program, in
functions that every worker calls. Each worker takes its share of the rows of every batch.
"""

import os
import tempfile

import neumf
import numpy as np
from torch.utils.data import DataLoader, Dataset

from bigdl.orca import stop_orca_context
from bigdl.orca.data import XShards


class Interactions(Dataset):
    """Data set of users, items and labels."""

    def __init__(self, user, item, label):
        self.user, self.item, self.label = user, item, label

    def __len__(self):
        return len(self.user)

    def __getitem__(self, index):
        return self.user[index], self.item[index], self.label[index]


def histories(config):
    return neumf.Histories(neumf.read_ratings(config["data_dir"], config["up_to"]), config["items"])


def train_loader_creator(config, batch_size):
    rows = histories(config).training_rows(config["negatives"], config["seed"])
    return DataLoader(Interactions(*rows), batch_size=batch_size, shuffle=True)


def test_loader_creator(config, batch_size):
    rows = histories(config).test_rows(config["candidates"], config["seed"])
    return DataLoader(Interactions(*rows), batch_size=batch_size)


def main(argv=None):
    options = neumf.parse(argv, __doc__)
    neumf.start(options)
    ratings = neumf.read_ratings(options.data_dir, options.users)
    users, items = (int(ratings[name].max()) + 1 for name in ("user", "item"))
    config = {
        "data_dir": options.data_dir,  # the workers read it: on a cluster a shared folder
        "up_to": options.users,
        "negatives": options.negatives,
        "candidates": options.candidates,
        "seed": options.seed,
    }

    fit = {"batch_size": options.batch_size, "seed": options.seed}
    est = neumf.make_estimator(options, users, items, **config)
    stats = est.fit(train_loader_creator, epochs=max(1, options.epochs - 1), **fit)

    with tempfile.TemporaryDirectory() as folder:
        folder = options.output or folder
        est.save_checkpoint(os.path.join(folder, "ncf.ckpt"))

        resumed = neumf.make_estimator(options, users, items, **config)
        resumed.load_checkpoint(os.path.join(folder, "ncf.ckpt"))
        stats += resumed.fit(train_loader_creator, epochs=1, **fit)
        resumed.save(os.path.join(folder, "ncf.pt"))

        metrics = resumed.evaluate(test_loader_creator, batch_size=4096)
        user, item, label = histories({**config, "items": items}).test_rows(
            options.candidates, options.seed
        )
        predicted = resumed.predict(XShards.partition({"x": (user, item)}), batch_size=16384)
        scores = np.concatenate([shard["prediction"] for shard in predicted.collect()])
        hr = float(neumf.hits(user, label, scores).mean())
    return neumf.report(stats, metrics, hr)


if __name__ == "__main__":
    main()
    stop_orca_context()
