"""Transfer learning on folders of JPEG files: a frozen trunk and a trained head.

    python examples/nano/training/transfer_learning.py --data-dir cats-dogs --weights resnet18.pth

The pipeline is that of Fig. 2 of Dai et al. (BigDL 2.0, CVPR 2022) with Nano's imports. The trunk
needs no gradients, so ``FrozenPrefixCallback`` runs it as inference. ``--data-dir`` contains
``train/cat/*.jpg``, ``train/dog/*.jpg`` and so on, and optionally the same in ``val``; or the
classes directly, of which every fifth image is held out for testing. Without it, discs and squares
are drawn to a temporary directory.

``--weights`` is a state dict with torchvision's names, such as the one published for ImageNet.
Nothing is downloaded: without the argument the trunk is first trained briefly on other shapes,
which demonstrates the program but is not useful for cats and dogs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from bigdl.nano.pytorch import Trainer
from bigdl.nano.pytorch.frozen import FrozenPrefixCallback
from bigdl.nano.pytorch.vision import transforms
from bigdl.nano.pytorch.vision.datasets import ImageFolder
from bigdl.nano.pytorch.vision.models import ImageClassifier, resnet18

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(ImageClassifier):
    """Classifier of a trunk and a linear head; frozen parameters are not optimized."""

    lr = 1e-3

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def pipeline(size: int, augmented: bool) -> transforms.Compose:
    """Return the transforms from an image to a tensor ``(3, size, size)``."""
    if augmented:
        crop = [transforms.RandomCrop(224), transforms.RandomHorizontalFlip()]
    else:
        crop = [transforms.CenterCrop(224)]
    as_published = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    resized = [transforms.Resize(size), transforms.ToTensor(), as_published]
    return transforms.Compose([transforms.Resize(256), transforms.ColorJitter(), *crop, *resized])


def folders(root: Path, size: int) -> tuple[Dataset, Dataset, list[str]]:
    """Return training and test data sets, and the names of the classes."""
    within = root / "train" if (root / "train").is_dir() else root
    train = ImageFolder(within, pipeline(size, augmented=True))
    if (root / "val").is_dir():
        return train, ImageFolder(root / "val", pipeline(size, augmented=False)), train.classes
    test = ImageFolder(within, pipeline(size, augmented=False))
    kept = [index for index in range(len(train)) if index % 5]
    return Subset(train, kept), Subset(test, range(0, len(test), 5)), train.classes


def some_of(dataset: Dataset, count: int | None) -> Dataset:
    """Return a subset of `count` images with all classes; by default all images."""
    if count is None or count >= len(dataset):
        return dataset
    return Subset(dataset, np.linspace(0, len(dataset) - 1, count).astype(int).tolist())


def draw(folder: Path, shapes: tuple[str, ...], count: int, seed: int) -> Path:
    """Write JPEG files of a bright shape on noise to ``folder/SHAPE``."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:256, :256]
    for number in range(count):
        shape = shapes[number % len(shapes)]
        radius = random.integers(40, 80)
        right, down = np.abs(np.stack([x, y]) - random.integers(90, 166, (2, 1, 1)))
        distance = np.hypot(right, down)
        inside = {
            "disc": distance < radius,
            "square": np.maximum(right, down) < 0.9 * radius,
            "ring": (distance < radius) & (distance > 0.6 * radius),
            "diamond": right + down < 1.2 * radius,
            "bar": (right < radius) & (down < 0.4 * radius),
            "cross": (np.minimum(right, down) < 0.25 * radius) & (np.maximum(right, down) < radius),
        }[shape]
        pixels = random.integers(0, 128, (256, 256, 3)) + 127 * inside[..., None]
        (folder / shape).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / shape / f"{number:04}.jpg")
    return folder


def learned_trunk(count: int, size: int) -> torch.nn.Module:
    """Return a trunk that is briefly trained on other shapes."""
    with tempfile.TemporaryDirectory() as directory:
        shapes = ("ring", "cross", "bar", "diamond")
        drawn = draw(Path(directory), shapes, count, seed=1)
        loader = loader_of(ImageFolder(drawn, pipeline(size, augmented=True)), shuffle=True)
        model = Classifier(resnet18(), len(shapes))
        Trainer(max_epochs=3, **QUIET).fit(model, loader)
    return model.backbone


def loader_of(dataset: Dataset, shuffle: bool) -> DataLoader:
    return DataLoader(dataset, batch_size=16, shuffle=shuffle)


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Train the head; return the test accuracy, the report and the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--weights", type=Path, help="state dict of ResNet18")
    parser.add_argument("--precision", choices=["fp32", "bf16", "int8"], default="bf16")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, help="number of training images; all by default")
    parser.add_argument(
        "--drawn", type=int, default=240, help="number of generated images without --data-dir"
    )
    parser.add_argument("--size", type=int, default=64, help="image size in pixels")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(argv)
    torch.manual_seed(0)

    trunk = (
        resnet18(weights=options.weights)
        if options.weights
        else learned_trunk(options.drawn, options.size)
    )
    with tempfile.TemporaryDirectory() as directory:
        root = options.data_dir or draw(Path(directory), ("disc", "square"), options.drawn, seed=0)
        train, test, classes = folders(root, options.size)
        train = some_of(train, options.images)
        test = some_of(test, options.images)
        model = Classifier(trunk.freeze(), len(classes))
        model.lr = 1e-2  # a single layer tolerates a higher rate
        prefix = FrozenPrefixCallback(precision=options.precision)
        trainer = Trainer(
            num_processes=options.processes, max_epochs=options.epochs, callbacks=[prefix], **QUIET
        )
        trainer.fit(model, loader_of(train, shuffle=True))
        accuracy = trainer.test(model, loader_of(test, shuffle=False), verbose=False)[0]["test_acc"]
    print(prefix.report)
    print(f"trained with {', '.join(trainer.settings)}")
    print(f"accuracy {accuracy:.3f} on {len(test)} images of {' and '.join(classes)}")
    return {"accuracy": accuracy, "report": prefix.report, "settings": trainer.settings}


if __name__ == "__main__":
    main()
