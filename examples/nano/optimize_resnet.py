"""Find the fastest accelerated ResNet that keeps its accuracy.

    python examples/nano/optimize_resnet.py --data-dir cats-dogs

A ResNet-18 is trained briefly, Nano's default methods are measured, and the best one that keeps the
accuracy is saved, loaded and used. ``--data-dir`` contains ``train`` and ``val``, each with a
folder of image files per class; without it images are generated.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.vision.models import resnet18


def photographs(folder, size, limit):
    """Return normalized images (N, 3, size, size) and the indexes of their folders."""
    images, labels = [], []
    for label, name in enumerate(sorted(each.name for each in folder.iterdir())):
        for path in sorted((folder / name).iterdir())[:limit]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float32)
            images.append(pixels.transpose(2, 0, 1) / 127.5 - 1)
            labels.append(label)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def generated(count, size, seed):
    """Generate noise images with a bright horizontal (class 0) or vertical (class 1) bar."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(count, 3, size, size, generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    places = torch.randint(0, size - size // 4, (count,), generator=generator)
    for image, label, place in zip(images, labels, places, strict=True):
        bar = slice(place, place + size // 4)
        image[(slice(None), bar) if label == 0 else (slice(None), slice(None), bar)] += 1
    return images, labels


def trained(images, labels, epochs):
    torch.manual_seed(0)
    backbone = resnet18(include_top=False)
    model = nn.Sequential(backbone, nn.Flatten(), nn.Linear(backbone.get_output_size(), 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y in DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(pred, target):
    return (pred.argmax(1) == target).float().mean()


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="images are generated without it")
    parser.add_argument("--size", type=int, default=64, help="images are made squares of it")
    parser.add_argument("--images", type=int, default=60, help="of a class at most")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, help="default: as PyTorch has")
    parser.add_argument("--runs", type=int, default=10, help="calls that are timed")
    parser.add_argument("--methods", nargs="*", help="only these; default: those tried unasked")
    parser.add_argument("--drop", type=float, default=0.01, help="of the accuracy at most")
    parser.add_argument("--output", type=Path, help="folder for the model and the chart")
    options = parser.parse_args(argv)

    if options.data_dir:
        train, val = (
            photographs(options.data_dir / part, options.size, options.images)
            for part in ("train", "val")
        )
    else:
        train, val = (generated(2 * options.images, options.size, seed) for seed in (0, 1))
    model = trained(*train, options.epochs)

    optimizer = InferenceOptimizer()
    optimizer.optimize(
        model,
        training_data=DataLoader(TensorDataset(*train), batch_size=1),
        validation_data=DataLoader(TensorDataset(*val), batch_size=16),
        metric=accuracy,
        thread_num=options.threads,
        latency_sample_num=options.runs,
        includes=options.methods,
    )
    best, option = optimizer.get_best_model(accuracy_criterion=options.drop)
    print(f"best: {option}")

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        InferenceOptimizer.save(best, folder / "model")
        optimizer.plot(folder / "methods.html")
        loaded = InferenceOptimizer.load(folder / "model", model)
        images = val[0][:8]
        with InferenceOptimizer.get_context(best, loaded):
            difference = float((best(images) - loaded(images)).abs().max())
    print(f"the loaded model differs by {difference:.1g}")
    return {"results": optimizer.results(), "option": option, "difference": difference}


if __name__ == "__main__":
    main()
