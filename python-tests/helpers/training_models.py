"""Small models, data and trainers for the tests of training."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import Trainer

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(**arguments) -> Trainer:
    return Trainer(**(QUIET | arguments))


class OneWeight(nn.Module):
    """``y = w x`` with w = 1."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.fc.weight)

    def forward(self, x):
        return self.fc(x)


def steps_and_zeros(batch_size: int = 2) -> DataLoader:
    """Inputs 0, 0, 1, 1, and targets that are 0."""
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    return DataLoader(TensorDataset(x, torch.zeros(4, 1)), batch_size=batch_size)


class Cnn(nn.Module):
    """A small network for images of 8 × 8; flattens by `flatten`."""

    def __init__(self, flatten=None):
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 16, 10)
        self.flatten = flatten or (lambda x: x.flatten(1))

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(self.flatten(x))


def viewed(x):
    return x.view(x.shape[0], -1)


class Regression(pl.LightningModule):
    """A LightningModule that keeps a diary."""

    def __init__(self, lr: float = 0.1, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.lr = lr
        self.diary = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y), batch_size=len(x))

    def on_train_epoch_end(self):
        self.diary.append(self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def table(rows: int = 32, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + x[:, :1] ** 2)
