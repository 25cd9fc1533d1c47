"""Custom training loops: a decorated function and a TorchNano subclass.

python examples/nano/training/own_loop.py --processes 2
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import TorchNano, nano


def network() -> nn.Module:
    """Return a small network for digits of 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return handwritten digits for training and testing."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1300], labels[:1300]), TensorDataset(images[1300:], labels[1300:])


def accuracy(model: nn.Module, rows: TensorDataset) -> float:
    """Return the accuracy of the model on a data set."""
    images, labels = rows.tensors
    with torch.inference_mode():
        return (model(images).argmax(1) == labels).float().mean().item()


class Loop(TorchNano):
    """Training loop as a TorchNano subclass."""

    def train(self, rows: TensorDataset, epochs: int) -> nn.Module:
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        loader = DataLoader(rows, batch_size=32, shuffle=True)
        model, optimizer, loader = self.setup(net, optimizer, loader)
        for epoch in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                self.backward(loss)
                optimizer.step()
            self.print(f"epoch {epoch}: loss {loss.item():.3f}")
        return net


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train in both ways and return the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(argv)
    train_rows, test_rows = digits()

    @nano(num_processes=options.processes)
    def train(model, optimizer, loader, epochs):
        for _ in range(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()

    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    train(net, optimizer, DataLoader(train_rows, batch_size=32, shuffle=True), options.epochs)
    accuracies = {"decorated function": accuracy(net, test_rows)}

    net = Loop(num_processes=options.processes).train(train_rows, options.epochs)
    accuracies["TorchNano"] = accuracy(net, test_rows)
    for name, value in accuracies.items():
        print(f"{name}: accuracy {value:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
