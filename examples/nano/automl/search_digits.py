"""Search the hyperparameters of a network for handwritten digits, with Nano's Trainer.

python examples/nano/automl/search_digits.py
python examples/nano/automl/search_digits.py --processes 2 --storage sqlite:///digits.db

With a storage, the same command with ``--resume`` resumes a search that was stopped or killed.
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigdl.nano.automl.hpo as hpo
from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.backend import PrunerType
from bigdl.nano.pytorch import Trainer
from bigdl.tuning import trial_table


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return handwritten digits for training and validation."""
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1300], labels[:1300]), TensorDataset(images[1300:], labels[1300:])


@hpo.plmodel()
class Classifier(pl.LightningModule):
    """Classifier with one hidden layer."""

    def __init__(
        self,
        width: int,
        activation: type[nn.Module] = nn.ReLU,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
    ):
        super().__init__()
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.net = nn.Sequential(
            nn.Linear(64, width), activation(), nn.Dropout(dropout), nn.Linear(width, 10)
        )
        self.rows, self.validation_rows = digits()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_rows, batch_size=512)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--pruner", choices=list(PrunerType), default=PrunerType.Median)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="a database, such as sqlite:///digits.db")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(argv)

    pl.seed_everything(options.seed)
    searched = Classifier(
        width=space.Categorical(16, 64, 128),
        activation=space.Categorical(nn.ReLU, nn.Tanh),
        dropout=space.Real(0.0, 0.5),
        learning_rate=space.Real(1e-4, 1e-1, log=True),
        batch_size=space.Categorical(32, 128),
    )
    trainer = Trainer(
        max_epochs=options.epochs, use_hpo=True, logger=False, enable_checkpointing=False
    )
    model = trainer.search(
        searched,
        target_metric="val_acc",
        direction="maximize",
        n_trials=options.trials,
        n_parallels=options.processes,
        sampler_kwargs={"seed": options.seed},
        pruner=options.pruner,
        storage=options.storage,
        study_name="digits" if options.storage else None,
        resume=options.resume,
    )
    study = trainer.search_summary()
    table = trial_table(study)
    epochs = sum(len(trial.intermediate_values) for trial in study.trials)
    print(table.sort_values("val_acc", ascending=False).head().to_string())
    print(f"Epochs after pruning: {epochs} of {len(table) * options.epochs}")

    trainer.fit(model)
    accuracy = trainer.validate(model, verbose=False)[0]["val_acc"]
    print(f"best model, trained again: {accuracy:.3f}")
    return {"table": table, "epochs": epochs, "best": study.best_value, "accuracy": accuracy}


if __name__ == "__main__":
    main()
