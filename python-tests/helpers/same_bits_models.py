"""Models and fits of ``exact="bits"``, for its tests on every engine."""

import hashlib

import numpy as np
import torch
from torch import nn

from bigdl.orca.learn.pytorch import Estimator

ROWS = 203


def mlp(config):
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3)
    )


def cnn(config):
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 4, 4))).mean(1))


def transformer(config):
    return Transformer()


def adam(model, config):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def random_rows():
    """Features and labels, two rows of which are equal."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 16)).astype("float32")
    x[7] = x[3]  # equal rows may change places
    y = (x[:, :3] + draw.normal(size=(ROWS, 3))).argmax(1)
    y[7] = y[3]
    return x, y


def sha256(estimator):
    digest = hashlib.sha256()
    for name, tensor in sorted(estimator.get_model().state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def estimator(model=mlp, workers=1, optimizer=adam, loss=None, backend="local", **options):
    return Estimator.from_torch(
        model=model,
        optimizer=optimizer,
        loss=loss or nn.CrossEntropyLoss(),
        backend=backend,
        workers_per_node=workers,
        **options,
    )


def fitted(data, model=mlp, workers=1, fit=None, **options):
    """The digest of the weights and the history of two epochs of 4 steps."""
    trained = estimator(model, workers, **options)
    options = {"epochs": 2, "batch_size": 64, "seed": 3, "virtual_shards": 4, **(fit or {})}
    history = trained.fit(data, exact="bits", **options)
    return sha256(trained), [{k: v for k, v in each.items() if "loss" in k} for each in history]
