"""Custom training step: a variational autoencoder with a MainCallback.

Run it with ``python examples/orca/main_callback.py``. The model returns a dict and the loss uses
all of it, which the default ``loss(model(*features), target)`` does not support.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data import XShards
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback, MainCallback


class Autoencoder(nn.Module):
    """Variational autoencoder for images of 64 pixels (Kingma and Welling, 2014)."""

    def __init__(self, config):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mean = nn.Linear(48, config["numbers"])
        self.log_variance = nn.Linear(48, config["numbers"])
        self.decoder = nn.Sequential(nn.Linear(config["numbers"], 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, images):
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return {"mean": mean, "log_variance": log_variance, "image": self.decoder(code)}


class Variational(MainCallback):
    """Callback that minimizes the reconstruction loss and the divergence from a normal."""

    def on_iter_forward(self, runner):
        images, _ = runner.batch
        runner.output = output = runner.model(images)
        runner.target = images
        away = output["mean"] ** 2 + output["log_variance"].exp() - output["log_variance"] - 1
        back = nn.functional.mse_loss(output["image"], images, reduction="none").sum(1)
        runner.loss = (back + runner.config["weight"] * away.sum(1) / 2).mean()

    def on_pred_forward(self, runner):
        output = runner.model(*runner.batch)
        runner.output = {"code": output["mean"], "image": output["image"]}


class BestEpoch(Callback):
    """Callback that records the best epoch and stops when the loss does not improve."""

    def before_run(self, runner):
        runner.put("best", float("inf"))

    def after_train_epoch(self, runner):
        loss = runner.epoch_stats["train_loss"]
        if loss > 1.2 * runner.get("best"):
            runner.stop = True
        runner.update("best", min(loss, runner.get("best")))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    shards = XShards.partition({"x": images, "y": digits})
    est = Estimator.from_torch(
        model=Autoencoder,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=nn.MSELoss(),  # operations of the stage come before it
        config={"numbers": 8, "weight": 0.05},
        workers_per_node=options.workers,
    )
    callbacks = [Variational(), BestEpoch()]
    stats = est.fit(shards, options.epochs, batch_size=64, seed=0, callbacks=callbacks)
    predicted = est.predict(shards, batch_size=256, callbacks=[Variational()]).collect()
    back = np.concatenate([shard["image"] for shard in predicted])
    code = np.concatenate([shard["code"] for shard in predicted])
    errors = {
        "error": float(((back - images) ** 2).mean()),
        "spread": float(images.var(0).mean()),  # the error of the mean image
        "code": code,
        "stats": stats,
    }
    print(f"loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    print(f"error of an image {errors['error']:.4f}, of the mean image {errors['spread']:.4f}")
    return errors


if __name__ == "__main__":
    main()
    stop_orca_context()
