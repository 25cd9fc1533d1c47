"""Objects in images: the annotations of PASCAL VOC and of COCO.

Both become a float32 array with a row ``xmin, ymin, xmax, ymax, class`` per object (VOC adds
``difficult``): the box in fractions of the image's width and height, the class as its number.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.file import is_file, listdir, open_text, read_bytes

__all__ = ["VOC_CLASSES", "class_numbers", "coco_records", "voc_boxes", "voc_images"]
__all__ += ["voc_records"]

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


def class_numbers(classes: Any) -> dict[str, int]:
    """The number of each class, from a list or a dict."""
    if classes is None:
        classes = VOC_CLASSES
    if isinstance(classes, Mapping):
        return dict(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise UsageError(
            f"classes must be a list of names, or a dict of name to number: {classes!r}"
        )
    return {name: number for number, name in enumerate(classes)}


def voc_images(root: str, splits: Any) -> list[tuple[str, str]]:
    """Paths of image and annotation of everything in these splits of a ``VOCdevkit``."""
    found = []
    for split in splits:
        if not isinstance(split, list | tuple) or len(split) != 2:
            raise UsageError(
                f'A split must be a pair of year and name, e.g. (2007, "trainval"), got {split!r}'
            )
        year, name = split
        folder = f"{root.rstrip('/')}/VOC{year}"
        listed = f"{folder}/ImageSets/Main/{name}.txt"
        if not is_file(listed):
            raise UsageError(f"There is no split {name!r} of VOC{year}: no file {listed!r}")
        for line in open_text(listed):
            if line:
                number = line.split()[0]
                found.append(
                    (f"{folder}/JPEGImages/{number}.jpg", f"{folder}/Annotations/{number}.xml")
                )
    return found


def voc_boxes(annotation: str, numbers: Mapping[str, int]) -> np.ndarray:
    """The objects of an annotation file: float32 of shape (objects, 6)."""
    try:
        tree = ElementTree.fromstring(read_bytes(annotation))
        width, height = (float(tree.findtext(f"size/{side}")) for side in ("width", "height"))
        rows = []
        for item in tree.iter("object"):
            number = numbers.get((item.findtext("name") or "").strip())
            if number is None:
                continue
            box = [float(item.findtext(f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax")]
            scaled = [value / side for value, side in zip(box, [width, height] * 2, strict=True)]
            rows.append([*scaled, number, int(item.findtext("difficult") or 0)])
    except (ElementTree.ParseError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{annotation!r} is no annotation of PASCAL VOC: {error}") from error
    return np.array(rows, dtype=np.float32).reshape(-1, 6)


def voc_records(root: str, splits: Any, classes: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """Path and objects of every image."""
    numbers = class_numbers(classes)
    for image, annotation in voc_images(root, splits):
        yield image, voc_boxes(annotation, numbers)


def coco_records(root: str, split: str) -> list[tuple[str, np.ndarray]]:
    """Path and objects of every image of a split of COCO; float32 of shape (objects, 5).

    Classes are numbered from 0 in the order of their ``category_id``.
    """
    root = root.rstrip("/")
    listed = _one(f"{root}/annotations", f"instances_{split}", ".json")
    folder = _images_of(root, posixpath.basename(listed)[len("instances_") : -len(".json")])
    try:
        content = json.loads(read_bytes(listed))
        ids = sorted(category["id"] for category in content["categories"])
        numbers = {category: number for number, category in enumerate(ids)}
        images = {image["id"]: image for image in content["images"]}
        boxes: dict[Any, list] = {image: [] for image in images}
        for item in content["annotations"]:
            width, height = (float(images[item["image_id"]][s]) for s in ("width", "height"))
            x, y, w, h = item["bbox"]
            corners = [x / width, y / height, (x + w) / width, (y + h) / height]
            boxes[item["image_id"]].append([*corners, numbers[item["category_id"]]])
        return [
            (f"{folder}/{image['file_name']}", np.array(boxes[i], np.float32).reshape(-1, 5))
            for i, image in images.items()
        ]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{listed!r} has no annotations of COCO: {error!r}") from error


def _one(folder: str, start: str, end: str) -> str:
    """The only file in a directory with such a name."""
    names = [posixpath.basename(path) for path in listdir(folder)]
    found = [name for name in names if name.startswith(start) and name.endswith(end)]
    exact = [name for name in found if name == start + end]
    if len(exact or found) != 1:
        raise UsageError(
            f"There must be one file {start}*{end} in {folder!r}, but there are {found or names}"
        )
    return f"{folder}/{(exact or found)[0]}"


def _images_of(root: str, split: str) -> str:
    there = {posixpath.basename(path) for path in listdir(root)}
    if split in there:
        return f"{root}/{split}"
    if "images" in there and f"{root}/images/{split}" in listdir(f"{root}/images"):
        return f"{root}/images/{split}"
    raise UsageError(f"There is no directory {split!r} of images in {root!r} or in its images")
