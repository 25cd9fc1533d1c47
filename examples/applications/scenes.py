"""Generated scenes with one animal each, as JPEGs in a Parquet table.

The animals are photographs from a folder, or drawn. Each is pasted at a random position and size,
as an ellipse with a soft edge, onto a background of clouds, boxes and lines, so that its box is
known.
"""

import os
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def photographs(data_dir, part, limit=None):
    """Return the JPEGs of a folder with one subfolder per class as RGB arrays."""
    paths = sorted(Path(data_dir, part).glob("*/*.jpg"))
    paths = paths[:: max(1, len(paths) // limit)][:limit] if limit else paths
    return [cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB) for path in paths]


def drawn_animals(count, seed):
    """Draw animal heads with two ears and two eyes, in random colors and stripes."""
    rng = np.random.default_rng(seed)
    animals = []
    for _ in range(count):
        image = clouds(rng, 240, 320)
        fur, dark = (tuple(map(int, rng.integers(low, low + 120, 3))) for low in (100, 0))
        wide = int(rng.integers(80, 140))
        for side in (-1, 1):
            tip = (160 + side * wide, int(rng.integers(5, 60)))
            ear = np.array([(160 + side * wide // 4, 60), tip, (160 + side * wide, 130)])
            cv2.fillPoly(image, [ear], dark)
        cv2.ellipse(image, (160, 130), (wide, 100), 0, 0, 360, fur, -1)
        for row in range(60, 200, int(rng.integers(12, 40))):
            cv2.line(image, (160 - wide // 2, row), (160 + wide // 2, row), dark, 4)
        for side in (-1, 1):
            cv2.circle(image, (160 + side * 40, 110), 16, (255, 255, 200), -1)
            cv2.circle(image, (160 + side * 40, 110), 8, (0, 0, 0), -1)
        animals.append(image)
    return animals


def clouds(rng, height, width):
    coarse = rng.integers(30, 226, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def scene(rng, animal, height, width):
    """Return a picture with an animal, and its box (left, top, right, bottom as fractions)."""
    image = clouds(rng, height, width)
    for _ in range(int(rng.integers(3, 9))):
        (x0, x1), (y0, y1) = rng.integers(0, width, 2), rng.integers(0, height, 2)
        colour = tuple(map(int, rng.integers(0, 256, 3)))
        if rng.random() < 0.5:
            cv2.line(image, (x0, y0), (x1, y1), colour, max(1, height // 100))
        else:
            x1, y1 = x0 + abs(x1 - x0) // 4, y0 + abs(y1 - y0) // 4
            cv2.rectangle(image, (x0, y0), (x1, y1), colour, -1)
    tall = int(height * rng.uniform(0.35, 0.6))
    wide = int(np.clip(tall * animal.shape[1] / animal.shape[0], height * 0.3, width * 0.6))
    left, top = int(rng.integers(0, width - wide)), int(rng.integers(0, height - tall))
    y, x = np.mgrid[-1 : 1 : tall * 1j, -1 : 1 : wide * 1j]
    share = np.clip((1 - x**2 - y**2) * 8, 0, 1)[..., None]
    region = image[top : top + tall, left : left + wide]
    pasted = cv2.resize(animal, (wide, tall), interpolation=cv2.INTER_AREA)
    region[...] = (share * pasted + (1 - share) * region).astype(np.uint8)
    sides = np.array([width, height, width, height])
    return image, np.array([left, top, left + wide, top + tall]) / sides


def small_scenes(animals, count, height, width, seed):
    """Return scenes in the input size of the detector, for training.

    Returns
    -------
    ndarray (count, height, width, 3)
        uint8.
    ndarray (count, 4)
        float32, the boxes.
    """
    rng = np.random.default_rng(seed)
    images, boxes = np.empty((count, height, width, 3), np.uint8), np.empty((count, 4), np.float32)
    for i in range(count):
        big, boxes[i] = scene(rng, animals[rng.integers(len(animals))], 2 * height, 2 * width)
        images[i] = cv2.resize(big, (width, height), interpolation=cv2.INTER_AREA)
    return images, boxes


def write_scenes(folder, animals, count, seed, height=768, width=1024, rows=100):
    """Write a table of scenes with id, animal (index), picture (JPEG) and the true box."""
    rng = np.random.default_rng(seed)
    os.makedirs(folder, exist_ok=True)
    grain = rng.normal(0, 5, (height + 64, width + 64, 3)).astype(np.int16)  # of a camera
    for low in range(0, count, rows):
        ids = range(low, min(low + rows, count))
        pictures, boxes = [], []
        for i in ids:
            image, box = scene(rng, animals[i % len(animals)], height, width)
            y, x = rng.integers(0, 64, 2)
            noisy = np.clip(image + grain[y : y + height, x : x + width], 0, 255).astype(np.uint8)
            noisy = cv2.cvtColor(noisy, cv2.COLOR_RGB2BGR)
            pictures.append(
                cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
            )
            boxes.append(box.tolist())
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "animal": pa.array([i % len(animals) for i in ids], pa.int32()),
                "picture": pa.array(pictures, pa.binary()),
                "truth": pa.array(boxes, pa.list_(pa.float32())),
            }
        )
        pq.write_table(table, f"{folder}/part-{low // rows:04d}.parquet")
