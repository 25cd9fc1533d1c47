"""Detect the animal in each picture of a table and compute a binary code, in one Spark program.

    python examples/applications/image_pipeline.py --data-dir cats-dogs --pictures 2000

The program converts a Parquet table of JPEGs to a table of boxes, features and 64-bit codes for
similarity search. Each picture is decoded at a reduced size, a detector locates the animal, the box
is cropped, and a second network computes its features. All of that is one Spark stage: no picture
is written to a file, and each worker loads the networks once.

The scenes are generated from the photographs of ``--data-dir`` or from drawn animals, so that the
true boxes are known. Both networks are trained first, in less than a minute. For your own pictures,
pass a table of ``id`` and ``picture`` as ``--table``, and your own networks to :func:`described`.
"""

import argparse
import tempfile
import time

import cv2
import numpy as np
import scenes
import torch
from pyspark.sql import functions as F
from torch import nn

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.inference import InferenceModel, map_batches
from bigdl.orca.learn.pytorch import Estimator

HEIGHT, WIDTH = 96, 128  # input size of the detector
CROP = 64
BITS = 64
RETURNS = "box array<int>, score float, feature array<float>, code binary"


def block(channels, width, kernel, **options):
    """Return a normalized convolution, which the runtimes fuse into one operation."""
    return nn.Conv2d(channels, width, kernel, **options), nn.BatchNorm2d(width), nn.ReLU()


class Detector(nn.Module):
    """Detector from uint8 pictures to a score and a box for each cell of 8 x 8 pixels.

    Returns ``(pictures, 5, rows, columns)``: the score; where the centre is from that of the cell,
    in cells; logarithms of width and height in cells.
    """

    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.Sequential(
            *block(3, 24, 4, stride=4),
            *block(24, 48, 3, stride=2, padding=1),
            *block(48, 64, 3, padding=1),
            *block(64, 64, 3, padding=1),
            *block(64, 64, 3, padding=1),
            nn.Conv2d(64, 5, 1),
        )

    def forward(self, pictures):
        return self.layers(pictures.permute(0, 3, 1, 2).float() / 127.5 - 1)


class Describer(nn.Module):
    """Feature extractor for crops; the signs of the features are the bits of the code."""

    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.Sequential(
            *block(3, 24, 4, stride=4),
            *block(24, 64, 3, stride=2, padding=1),
            *block(64, 128, 3, stride=2, padding=1),
            nn.Flatten(),
            nn.Linear(128 * 16, BITS),
        )

    def forward(self, crops):
        return self.layers(crops.permute(0, 3, 1, 2).float() / 127.5 - 1)


class Pairs(nn.Module):
    """Wrapper that applies one feature extractor to both crops of a pair."""

    def __init__(self, config=None):
        super().__init__()
        self.describer = Describer()

    def forward(self, pairs):
        return torch.stack([self.describer(pairs[:, i]) for i in range(2)], 1)


# -- training --------------------------------------------------------------------------------------


def detection_loss(output, boxes):
    """Return the cross-entropy of the center cell plus the error of its box."""
    rows, columns = output.shape[2:]
    size = torch.tensor([columns, rows], dtype=torch.float32)
    low, high = boxes[:, :2] * size, boxes[:, 2:] * size
    centre = (low + high) / 2
    cell = torch.minimum(centre.floor(), size - 1)
    index = (cell[:, 1] * columns + cell[:, 0]).long()
    scores = nn.functional.cross_entropy(output[:, 0].flatten(1), index)
    wanted = torch.cat([centre - cell - 0.5, (high - low).log()], 1)
    predicted = output[:, 1:].flatten(2)[torch.arange(len(boxes)), :, index]
    return scores + 2 * nn.functional.smooth_l1_loss(predicted, wanted, beta=0.1)


def description_loss(features, unused):
    """Return a loss for equal features within a pair and independent bits."""
    first, second = (
        (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-4) for x in features.unbind(1)
    )
    correlation = first.T @ second / len(features)
    identity = torch.eye(len(correlation))
    off = ((correlation - identity) ** 2) * (identity + 0.02 * (1 - identity))
    balance = features.mean((0, 1)).pow(2).mean()
    return off.sum() / len(correlation) + balance


def pairs_of(images, boxes, seed):
    """Return two augmented crops of each box: shifted, brightened or darkened, and mirrored."""
    rng = np.random.default_rng(seed)
    sides = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT])
    pairs = np.empty((len(images), 2, CROP, CROP, 3), np.uint8)
    for i, image in enumerate(images):
        for k in range(2):
            moved = boxes[i] * sides + rng.uniform(-4, 4, 4)
            crop = cut_out(image, clipped(moved[None])[0]) * rng.uniform(0.8, 1.2)
            crop = crop[:, :: int(rng.choice([-1, 1]))]
            pairs[i, k] = np.clip(crop, 0, 255)
    return pairs


def trained(model, loss, x, y, epochs, batch_size, lr=3e-3):
    est = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=lr),
        loss=loss,
        workers_per_node=1,
    )
    stats = est.fit({"x": x, "y": y}, epochs=epochs, batch_size=batch_size, seed=0)
    print(f"{model.__name__}: loss {stats[0]['train_loss']:.3f} to {stats[-1]['train_loss']:.3f}")
    return est.get_model().eval()


def networks(animals, count=1500, epochs=12):
    """Train the detector and the feature extractor on small scenes with these animals."""
    images, boxes = scenes.small_scenes(animals, count, HEIGHT, WIDTH, seed=1)
    detector = trained(Detector, detection_loss, images, boxes, epochs, batch_size=16)
    pairs = pairs_of(images, boxes, seed=2)
    pairs = trained(
        Pairs, description_loss, pairs, np.zeros(count, np.float32), epochs, batch_size=64
    )
    return detector, pairs.describer, images, boxes


# -- the pipeline ----------------------------------------------------------------------------------


def best_boxes(output):
    """Return the best box of each picture (left, top, right, bottom in pixels) and its score."""
    count, _, rows, columns = output.shape
    flat = output.reshape(count, 5, rows * columns)
    best = flat[:, 0].argmax(1)
    chosen = flat[np.arange(count), :, best]
    scores = 1 / np.exp(flat[:, 0] - chosen[:, :1]).sum(1)
    cell = np.stack([best % columns, best // columns], 1) + 0.5
    centre, half = cell + chosen[:, 1:3], np.exp(chosen[:, 3:]) / 2
    boxes = np.concatenate([centre - half, centre + half], 1) * (WIDTH / columns)
    return clipped(boxes), scores.astype(np.float32)


def clipped(boxes):
    """Clip boxes to non-empty integer boxes inside the picture."""
    boxes = np.rint(boxes).astype(np.int32)
    low = np.clip(boxes[:, :2], 0, [WIDTH - 1, HEIGHT - 1])
    return np.concatenate([low, np.clip(boxes[:, 2:], low + 1, [WIDTH, HEIGHT])], 1)


def cut_out(picture, box):
    left, top, right, bottom = box
    crop = picture[top:bottom, left:right]
    return cv2.resize(crop, (CROP, CROP), interpolation=cv2.INTER_LINEAR)


def find_and_describe(batch, models):
    """Compute boxes, scores, features and codes of a batch of pictures."""
    pictures = batch["picture"]
    boxes, scores = best_boxes(models["detector"].predict(pictures))
    crops = np.stack([cut_out(*pair) for pair in zip(pictures, boxes, strict=True)])
    features = models["describer"].predict(crops)
    codes = np.packbits(features > 0, axis=1)
    return {"box": boxes, "score": scores, "feature": features, "code": codes}


def inference_models(detector, describer, images, boxes, accelerate):
    """Convert both networks for inference on the workers, with some pictures as samples."""
    pictures = images[:128]
    pixels = clipped(boxes[:128] * np.array([WIDTH, HEIGHT, WIDTH, HEIGHT]))
    crops = np.stack([cut_out(*pair) for pair in zip(pictures, pixels, strict=True)])

    def model(module, sample):
        return InferenceModel().load_module(module, accelerate=accelerate, sample=sample)

    return {"detector": model(detector, pictures), "describer": model(describer, crops)}


def described(table, models, **options):
    """Replace the pictures of a table by box, score, feature and code."""
    return map_batches(
        table,
        find_and_describe,
        RETURNS,
        models=models,
        images={"picture": (HEIGHT, WIDTH)},
        **options,
    )


# -- accuracy -------------------------------------------------------------------------------------


def overlaps(boxes, truth):
    """Return the intersection over union of boxes, in fractions of the picture."""
    low = np.maximum(boxes[:, :2], truth[:, :2])
    high = np.minimum(boxes[:, 2:], truth[:, 2:])
    both = np.clip(high - low, 0, None).prod(1)
    areas = sum((b[:, 2:] - b[:, :2]).prod(1) for b in (boxes, truth))
    return both / (areas - both)


def found_again(codes, animals):
    """Return the share of pictures whose nearest code (Hamming distance) is of the same animal."""
    bits = np.unpackbits(np.stack([np.frombuffer(c, np.uint8) for c in codes]), axis=1)
    bits = bits.astype(np.float32) * 2 - 1
    alike = bits @ bits.T
    np.fill_diagonal(alike, -np.inf)
    return float((animals[alike.argmax(1)] == animals).mean())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="train and val, each with a folder per class")
    parser.add_argument("--table", help="a Parquet table of id and picture instead of scenes")
    parser.add_argument("--output", help="output folder, as Parquet")
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--animals", type=int, default=100, help="number of animals in the scenes")
    parser.add_argument("--training-scenes", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--accelerate", default="openvino_int8", help="a method of Nano")
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args(argv)

    init_orca_context("local", cores=options.cores)
    spark = OrcaContext.get_spark_session()
    if options.data_dir:
        train = scenes.photographs(options.data_dir, "train")
        animals = scenes.photographs(options.data_dir, "val", options.animals)
    else:
        train, animals = scenes.drawn_animals(300, 0), scenes.drawn_animals(options.animals, 1)
    *modules, images, boxes = networks(train, options.training_scenes, options.epochs)
    models = inference_models(*modules, images, boxes, options.accelerate)

    with tempfile.TemporaryDirectory() as folder:
        table, output = options.table, options.output or f"{folder}/described"
        if table is None:
            table = f"{folder}/scenes"
            scenes.write_scenes(table, animals, options.pictures, seed=3)
        pictures = spark.read.parquet(table)
        started = time.perf_counter()
        described(pictures, models).write.mode("overwrite").parquet(output)
        seconds = time.perf_counter() - started
        result = spark.read.parquet(output)
        print(f"{result.count()} pictures in {seconds:.1f} s")
        if options.table is not None:
            result.select("id", "box", "score", F.hex("code").alias("code")).show(5)
            return None
        rows = result.toPandas()
    sides = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT])
    iou = overlaps(np.stack(rows["box"]) / sides, np.stack(rows["truth"]))
    metrics = {
        "ids": sorted(rows["id"]),
        "iou": float(iou.mean()),
        "found": float((iou > 0.5).mean()),
        "again": found_again(rows["code"], rows["animal"].to_numpy()),
    }
    print(f"boxes: IoU {metrics['iou']:.3f}, {100 * metrics['found']:.1f} % above 0.5")
    print(f"nearest code of the same animal: {100 * metrics['again']:.1f} %")
    return metrics


if __name__ == "__main__":
    main()
    stop_orca_context()
