"""The cost of ``fit(exact="bits")`` beside an ordinary fit of the same micro-batches.

    python benchmarks/same_bits.py [--workers 1 2] [--shards 4] [--batch 1024] [--rows 65536]
        [--repeats 5] [--models mlp cnn transformer] [--json results.json]

The ordinary side has one thread per worker, too, and accumulates the gradients of as many batches
as make the micro-batches of both sides equal: with 4 virtual shards and 2 workers it accumulates 2
batches, of which each worker has half.  A repeat runs both sides one after the other on workers
that are kept, so that the noise of a shared machine meets both.  ``s`` is the median time of an
epoch, ``ratio`` the median of the ratios within a repeat, with their range.  ``sha256`` is that of
the weights of ``exact="bits"``, and another one for another number of workers ends the benchmark
with an error.
"""

import argparse
import hashlib
import json
import statistics

import numpy as np
import torch
from torch import nn


def mlp(config):
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), head(256))


def cnn(config):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        head(512),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.embed, self.encoder = nn.Linear(8, 32), nn.TransformerEncoder(layer, 2)
        self.head = head(32)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8))).mean(1))


def transformer(config):
    return Transformer()


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def head(width):
    torch.set_num_threads(1)  # on both sides
    return nn.Linear(width, 10)


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def sha256(estimator):
    digest = hashlib.sha256()
    for tensor in estimator.get_model().state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def epoch(model, data, workers, options, **fit):
    """Return the seconds of the second epoch of a new model, and the digest of its weights."""
    from bigdl.orca.learn.pytorch import Estimator

    estimator = Estimator.from_torch(
        model=MODELS[model],
        optimizer=adam,
        loss=nn.CrossEntropyLoss(),
        backend="local",
        workers_per_node=workers,
    )
    history = estimator.fit(data, epochs=2, seed=0, profile=True, **fit)
    return history[-1]["profile"]["mean_train_epoch_s"], sha256(estimator)


def measure(options):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((options.rows, 64), dtype=np.float32)
    data = x, x[:, :10].argmax(1)
    table = []
    for model in options.models:
        digests = set()
        for workers in options.workers:
            batches = options.shards // workers
            sides = {
                "ordinary": {
                    "batch_size": options.batch // batches,
                    "accumulate_grad_batches": batches,
                },
                "bits": {
                    "batch_size": options.batch,
                    "exact": "bits",
                    "virtual_shards": options.shards,
                },
            }
            seconds = {side: [] for side in sides}
            for repeat in range(options.repeats):
                for side in list(sides)[:: -1 if repeat % 2 else 1]:
                    taken, digest = epoch(model, data, workers, options, **sides[side])
                    seconds[side].append(taken)
                    if side == "bits":
                        digests.add(digest)
            ratios = [b / a for a, b in zip(seconds["ordinary"], seconds["bits"], strict=True)]
            row = {
                "model": model,
                "workers": workers,
                "ordinary_s": statistics.median(seconds["ordinary"]),
                "bits_s": statistics.median(seconds["bits"]),
                "ratio": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
                "sha256": " ".join(each[:12] for each in sorted(digests)),
            }
            table.append(row)
            spread = f"{row['ratio']:.2f} ({row['from']:.2f} to {row['to']:.2f})"
            print(
                f"{model:12} {workers} workers: {row['ordinary_s']:.3f} s, "
                f"bits {row['bits_s']:.3f} s, ratio {spread}, {row['sha256']}",
                flush=True,
            )
        if len(digests) != 1:
            raise SystemExit(f"{model}: {len(digests)} digests of the weights: {sorted(digests)}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json")
    options = parser.parse_args()
    table = measure(options)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
