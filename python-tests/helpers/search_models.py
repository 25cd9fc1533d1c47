"""What the tests of searches train, and processes of a search import."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigdl.nano.automl.hpo as hpo
from bigdl.nano.automl.hpo import space


def points(count=32):
    x = torch.linspace(-1, 1, count).reshape(-1, 1)
    return TensorDataset(x, 3 * x)


@hpo.plmodel()
class Line(pl.LightningModule):
    """``y = w x`` from 0; a learning rate of 0.5 is about right. Logs its epochs as ``steps``."""

    def __init__(self, rate, batch_size=8, depth=1):
        super().__init__()
        self.save_hyperparameters()
        self.rate, self.batch_size = rate, batch_size
        layers = [nn.Linear(1, 1, bias=False) for _ in range(depth)]
        nn.init.zeros_(layers[0].weight)
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))
        self.log("steps", float(self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def train_dataloader(self):
        return DataLoader(points(), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(points(), batch_size=32)

    def _loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def line(**spaces):
    return Line(**({"rate": space.Real(0.01, 1.0, log=True)} | spaces))
