"""Transfer learning on photographs: a frozen backbone and a new head.

    python examples/orca/transfer_learning.py --data-dir cats-dogs

The backbone learns to predict the rotation of photographs, without labels. Then it is frozen, and a
head is trained on its features to distinguish cats from dogs. ``--data-dir`` contains ``train`` and
``val``, each with a folder of JPEG files per class.
"""

import argparse
import os

import numpy as np
import torch
from torch import nn

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data.image import read_images
from bigdl.orca.learn.metrics import Accuracy
from bigdl.orca.learn.pytorch import Estimator

CLASSES = ["cat", "dog"]


def label_of(path):
    return CLASSES.index(os.path.basename(os.path.dirname(path)))


def as_array(sample, size):
    """Convert an image and its label to channels-first normalized arrays."""
    image, label = sample
    pixels = np.asarray(image.convert("RGB").resize((size, size)), np.float32) / 127.5 - 1
    return pixels.transpose(2, 0, 1), np.array(label, np.float32)


def rotations(shard):
    """Rotate every image by four quarter turns; the label is the number of turns."""
    turned = [np.rot90(shard["x"], k, axes=(2, 3)) for k in range(4)]
    turns = np.repeat(np.arange(4, dtype=np.int64), len(shard["x"]))
    return {"x": np.ascontiguousarray(np.concatenate(turned)), "y": turns}


def read(folder, size, limit):
    """Return XShards of ``{"x": images, "y": labels}``, one shard per partition."""
    paths = []
    for name in CLASSES:
        files = sorted(os.listdir(os.path.join(folder, name)))
        paths += [os.path.join(folder, name, file) for file in files[:limit]]
    images = read_images(paths, label_func=label_of, backend="pillow")
    return images.transform_shard(as_array, size).stack_feature_labels()


def backbone(channels):
    steps, in_channels = [], 3
    for width in (channels, 2 * channels, 4 * channels):
        steps += [nn.Conv2d(in_channels, width, 3, stride=2, padding=1), nn.ReLU()]
        in_channels = width
    return nn.Sequential(*steps, nn.AdaptiveAvgPool2d(2), nn.Flatten())


class Network(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = backbone(config["channels"])
        self.head = nn.Linear(16 * config["channels"], config["classes"])

    def forward(self, images):
        return self.head(self.backbone(images))


def frozen_network(config):
    """Return a network with a frozen backbone that has the weights of the config."""
    network = Network(config)
    network.backbone.load_state_dict(config["weights"])
    network.backbone.requires_grad_(False)
    return network


def optimizer_creator(model, config):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=config["lr"])


def estimator(model, config, workers):
    return Estimator.from_torch(
        model=model,
        optimizer=optimizer_creator,
        loss=nn.CrossEntropyLoss(),
        metrics=[Accuracy()],
        config=config,
        workers_per_node=workers,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=64, help="image size in pixels")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--limit", type=int, help="images per class; default: all")
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    train, val = (
        read(os.path.join(options.data_dir, part), options.size, options.limit)
        for part in ("train", "val")
    )
    config = {"channels": options.channels, "classes": 4, "lr": 2e-3}
    first = estimator(Network, config, options.workers)
    turns = first.fit(train.transform_shard(rotations), options.epochs, batch_size=64, seed=0)

    weights = first.get_model().backbone.state_dict()
    config = {**config, "classes": len(CLASSES), "weights": weights, "lr": 1e-2}
    second = estimator(frozen_network, config, options.workers)
    stats = second.fit(train, options.epochs, batch_size=32, validation_data=val, seed=0)

    kept = second.get_model().backbone.state_dict()
    assert all(torch.equal(kept[name], weights[name]) for name in kept), "the backbone changed"
    predicted = second.predict(val, batch_size=64)
    right = np.concatenate(
        [s["prediction"].argmax(1) == s["y"].astype(int).ravel() for s in predicted.collect()]
    )
    accuracy = float(stats[-1]["val_accuracy"])
    print(f"turns: loss {turns[0]['train_loss']:.3f} to {turns[-1]['train_loss']:.3f}")
    print(f"head: loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    print(f"accuracy {accuracy:.3f}")
    return {"accuracy": accuracy, "right": right, "turns": turns, "stats": stats}


if __name__ == "__main__":
    main()
    stop_orca_context()
