"""Image segmentation with XShards: train a small U-Net on image and mask files.

Run it with ``python examples/orca/segmentation.py``. The images are generated: discs and squares on
a noisy background; the masks mark the discs.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data.image import read_images
from bigdl.orca.learn.metrics import Accuracy
from bigdl.orca.learn.pytorch import Estimator


def write_images(folder, count, size, seed=0):
    """Write files ``images/<n>.png`` and ``masks/<n>_mask.png``."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        os.makedirs(os.path.join(folder, name))
    for number in range(count):
        noise = rng.integers(0, 80, (size, size, 3), dtype=np.uint8)
        image, mask = Image.fromarray(noise), Image.new("L", (size, size))
        shapes = [(ImageDraw.Draw(image).rectangle, None)]
        shapes += [(ImageDraw.Draw(image).ellipse, ImageDraw.Draw(mask).ellipse)]
        for draw, mark in shapes:
            x, y = rng.integers(0, size * 2 // 3, 2).tolist()
            box = (x, y, x + size // 3, y + size // 3)
            draw(box, fill=(90, 90, 220) if mark is None else (220, 90, 90))
            if mark is not None:
                mark(box, fill=255)
        image.save(os.path.join(folder, "images", f"{number:04d}.png"))
        mask.save(os.path.join(folder, "masks", f"{number:04d}_mask.png"))


def as_arrays(sample):
    """Convert an image and a mask to arrays of (3, height, width) and (1, height, width)."""
    image, mask = sample
    pixels = np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255
    return pixels, (np.asarray(mask.convert("L"), np.float32) > 127)[None].astype(np.float32)


class Segmenter(nn.Module):
    """U-Net with one level (Ronneberger et al., 2015)."""

    def __init__(self, config):
        super().__init__()
        width = config["channels"]
        self.before = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.below = nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
        )
        self.after = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, images):
        before = self.before(images)
        return torch.sigmoid(self.after(torch.cat([before, self.below(before)], 1)))


def overlap(shard):
    """Return the sums of the intersection and the union of predicted and true masks."""
    true = shard["y"].reshape(len(shard["y"]), -1) > 0.5
    predicted = np.asarray(shard["prediction"]).reshape(true.shape) > 0.5
    return int((true & predicted).sum()), int((true | predicted).sum())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=80)
    parser.add_argument("--size", type=int, default=32)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    with tempfile.TemporaryDirectory() as folder:
        write_images(folder, options.images, options.size)
        images = read_images(
            os.path.join(folder, "images"),
            target_path=os.path.join(folder, "masks"),
            image_type=".png",
        )
        shards = images.transform_shard(as_arrays).stack_feature_labels()
        est = Estimator.from_torch(
            model=Segmenter,
            optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
            loss=nn.BCELoss(),
            metrics=[Accuracy()],
            config={"channels": 8},
            workers_per_node=options.workers,
        )
        stats = est.fit(shards, epochs=options.epochs, batch_size=16, seed=0)
        predicted = est.predict(shards, batch_size=16)
        both, either = np.sum(predicted.transform_shard(overlap).collect(), axis=0)
    iou = float(both / either)
    print(f"loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    print(f"intersection over union {iou:.3f}")
    return {"iou": iou, "stats": stats}


if __name__ == "__main__":
    main()
    stop_orca_context()
