"""Train a classifier on a pretrained backbone: the only change is where Trainer comes from.

The images are generated: discs and squares on noise. With a folder of images, take
``bigdl.nano.pytorch.vision.datasets.ImageFolder`` in the place of ``shapes``.

    python examples/nano/training/transfer_learning.py --epochs 3 --processes 1
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import Trainer
from bigdl.nano.pytorch.vision.models import ImageClassifier, resnet18


class Classifier(ImageClassifier):
    """ResNet18 with a new head."""

    def __init__(self, classes: int):
        super().__init__(resnet18(pretrained=False, include_top=False, freeze=False), classes)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def shapes(count: int, size: int, seed: int) -> TensorDataset:
    """Images ``(count, 3, size, size)`` of a disc (0) or a square (1)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    images = torch.rand(count, 3, size, size, generator=generator) * 0.5
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = (size - 1) / 2
    disc = ((y - centre) ** 2 + (x - centre) ** 2).sqrt() < size / 4
    square = ((y - centre).abs() < size / 4) & ((x - centre).abs() < size / 4)
    images += 0.5 * torch.stack([disc, square]).float()[labels][:, None]
    return TensorDataset(images, labels)


def main(argv: list[str] | None = None) -> float:
    """Train, and return the accuracy on other images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(argv)
    train = DataLoader(shapes(options.images, options.size, 0), batch_size=32, shuffle=True)
    test = DataLoader(shapes(64, options.size, 1), batch_size=64)

    model = Classifier(classes=2)
    trainer = Trainer(
        num_processes=options.processes,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, train)
    figures = trainer.test(model, test, verbose=False)[0]
    print(f"trained with {', '.join(trainer.settings)}")
    print(f"accuracy {figures['test_acc']:.3f}")
    return figures["test_acc"]


if __name__ == "__main__":
    main()
