"""Image segmentation with Keras: train a small U-Net on image and mask files.

    python examples/orca/keras/segmentation.py --data-dir pets --epochs 20

The folder contains ``train/images``, ``train/masks``, ``test/images`` and ``test/masks``; the mask
of ``x.jpg`` is ``x.png``. Without ``--data-dir`` images are generated: discs and squares on a noisy
background; the masks mark the discs.
"""

import argparse
import os
import tempfile

import numpy as np
from PIL import Image, ImageDraw

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data.image import read_images
from bigdl.orca.learn.tf2 import Estimator

# -- the images ----------------------------------------------------------------------------------


def write_images(folder, count, size, seed):
    """Write files ``images/<n>.png`` and ``masks/<n>.png``."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        os.makedirs(os.path.join(folder, name))
    for number in range(count):
        image = Image.fromarray(rng.integers(0, 80, (size, size, 3), dtype=np.uint8))
        mask = Image.new("L", (size, size))
        for shape in ("rectangle", "ellipse"):
            x, y = rng.integers(0, size * 2 // 3, 2).tolist()
            box = (x, y, x + size // 3, y + size // 3)
            colour = tuple(rng.integers(120, 255, 3).tolist())
            getattr(ImageDraw.Draw(image), shape)(box, fill=colour)
            getattr(ImageDraw.Draw(mask), shape)(box, fill=255 if shape == "ellipse" else 0)
        for name, each in (("images", image), ("masks", mask)):
            each.save(os.path.join(folder, name, f"{number:04d}.png"))


def shards_of(folder, size):
    """Return XShards of ``{"x": images, "y": masks}`` with values from 0 to 1."""

    def as_arrays(sample):
        image, mask = (each.resize((size, size)) for each in sample)
        pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        return pixels, (np.asarray(mask.convert("L")) > 127).astype(np.float32)[..., None]

    images, masks = (os.path.join(folder, name) for name in ("images", "masks"))
    read = read_images(images, target_path=masks, image_type=(".jpg", ".jpeg", ".png"))
    return read.transform_shard(as_arrays).stack_feature_labels()


# -- the model -----------------------------------------------------------------------------------


def model_creator(config):
    """Return a small U-Net (Ronneberger et al., 2015)."""
    import keras
    from keras import layers

    def block(x, width):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization(momentum=0.8)(x))

    x = image = keras.Input((config["size"], config["size"], 3))
    widths, bridges = config["widths"], []
    for width in widths[:-1]:
        bridges.append(block(x, width))
        x = layers.MaxPooling2D()(bridges[-1])
    x = block(x, widths[-1])
    for width, bridge in zip(reversed(widths[:-1]), reversed(bridges), strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = block(layers.Concatenate()([bridge, x]), width)
    mask = layers.Conv2D(1, 1, activation="sigmoid")(x)
    model = keras.Model(image, mask)
    overlap = keras.metrics.BinaryIoU(target_class_ids=[1], threshold=0.5, name="iou")
    model.compile(
        keras.optimizers.Adam(config["lr"]), "binary_crossentropy", metrics=["accuracy", overlap]
    )
    return model


# -- the program ---------------------------------------------------------------------------------


def overlap(shard):
    """Return the pixel counts of the intersection and the union of true and predicted masks."""
    true, predicted = shard["y"] > 0.5, shard["prediction"] > 0.5
    return int((true & predicted).sum()), int((true | predicted).sum())


def main(argv=None):
    options = parse(argv)
    init_orca_context(options.cluster_mode, cores=options.cores, memory="2g")
    with tempfile.TemporaryDirectory() as folder:
        if options.data_dir is None:
            write_images(os.path.join(folder, "train"), options.images, options.size, seed=0)
            write_images(os.path.join(folder, "test"), options.images // 2, options.size, seed=1)
        folder = options.data_dir or folder
        train, test = (
            shards_of(os.path.join(folder, name), options.size) for name in ("train", "test")
        )
        est = Estimator.from_keras(
            model_creator=model_creator,
            config={"size": options.size, "widths": options.widths, "lr": options.lr},
            workers_per_node=options.workers_per_node,
            backend=options.backend,
        )
        stats = est.fit(train, epochs=options.epochs, batch_size=options.batch_size, seed=0)
        metrics = est.evaluate(test, batch_size=options.batch_size)
        predicted = est.predict(test, batch_size=options.batch_size)
        both, either = np.sum(predicted.transform_shard(overlap).collect(), axis=0)
    print(f"loss {stats['loss'][0]:.3f} ... {stats['loss'][-1]:.3f}")
    print(", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    return {"loss": stats["loss"], "overlap": float(both / either), **metrics}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder of images and masks")
    parser.add_argument("--cluster_mode", default="local", help="cluster_mode of init_orca_context")
    parser.add_argument("--backend", default="spark", help="backend of the Estimator")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers_per_node", type=int, default=2)
    parser.add_argument("--images", type=int, default=160, help="number of generated images")
    parser.add_argument(
        "--size", type=int, default=32, help="image size in pixels, a multiple of 4"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
    stop_orca_context()
