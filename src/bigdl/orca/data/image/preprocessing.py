"""Functions that read images with their labels, masks or boxes into XShards."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from xml.etree import ElementTree

import numpy as np

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.cluster.versions import by_partition, condition_of
from bigdl.orca.data.file import (
    decode_image,
    files_of,
    is_file,
    listdir,
    open_image,
    open_text,
    plain_path,
    read_bytes,
)
from bigdl.orca.data.xshards import SparkXShards
from bigdl.orca.data.xshards.connect import parallelize, rows_of
from bigdl.orca.data.xshards.frames import F
from bigdl.orca.settings import OrcaContext

if TYPE_CHECKING:
    from pyspark import RDD


def read_images(
    file_path: str | list[str],
    label_func: Callable[[str], Any] | None = None,
    target_path: str | list[str] | None = None,
    image_type: str | tuple[str, ...] = ".jpg",
    target_type: str | tuple[str, ...] = ".png",
    backend: str = "spark",
) -> SparkXShards:
    """Read images into XShards, sorted by path.

    Parameters
    ----------
    file_path : str or list of str
        Directory, file, or glob pattern such as ``"train/*"`` of directories and files; or a list
        of them.  Subdirectories are not read.
    label_func : callable, optional
        Function of an image's path that returns its label.
    target_path : str or list of str, optional
        Paths of masks.  The mask of ``x.jpg`` is ``x.png``, or a file whose name starts with ``x``
        followed by ``_``, ``-`` or ``.``, such as ``x_mask.png``.
    image_type, target_type : str or tuple of str
        File name suffixes, case-insensitive.
    backend : {"spark", "pillow"}, default "spark"
        ``"spark"`` reads files through Spark, from any storage that Spark supports; ``"pillow"``
        reads them in the Python workers with :mod:`bigdl.orca.data.file`.

    Returns
    -------
    SparkXShards
        A shard is a ``PIL.Image.Image``, or a tuple (image, label) or (image, mask).

    Raises
    ------
    UsageError
        If there are no images, or a mask is missing.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.file import makedirs
    >>> from bigdl.orca.data.image import read_images
    >>> sc = init_orca_context("local", cores=2)
    >>> makedirs("pets")
    >>> for name in ("cat.1.jpg", "dog.1.jpg"):
    ...     Image.new("RGB", (8, 6)).save(f"pets/{name}")
    >>> def is_dog(path):
    ...     return int(path.rpartition("/")[2].startswith("dog"))
    >>> shards = read_images("pets", label_func=is_dog)
    >>> [(image.size, label) for image, label in shards.collect()]
    [((8, 6), 0), ((8, 6), 1)]
    """
    check_choice("backend", backend, ("spark", "pillow"))
    if label_func is not None and not callable(label_func):
        raise UsageError(
            f"label_func must be a function of a path, got {label_func!r}",
            code="argument-type",
            argument="label_func",
        )
    if label_func is not None and target_path is not None:
        raise UsageError(
            "label_func and target_path cannot be combined; omit one",
            code="argument-conflict",
            argument="label_func",
        )
    read = _read_by_spark if backend == "spark" else _read_by_workers
    masks = None if target_path is None else (target_path, target_type)
    files = read((file_path, image_type), masks)

    def decode(
        file: tuple[str, bytes, str | None, bytes | None],
    ) -> object:
        path, content, mask_path, mask = file
        image = decode_image(content, path)
        if mask_path is not None and mask is not None:
            return image, decode_image(mask, mask_path)
        return image if label_func is None else (image, label_func(plain_path(path)))

    return SparkXShards(files.map(decode))


def read_images_pil(
    file_path: str | list[str],
    label_func: Callable[[str], Any] | None = None,
    target_path: str | list[str] | None = None,
    image_type: str | tuple[str, ...] = ".jpg",
    target_type: str | tuple[str, ...] = ".png",
) -> SparkXShards:
    """Read images with Pillow in the Python workers; see :func:`read_images`.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.image import read_images_pil
    >>> sc = init_orca_context("local", cores=2)
    >>> Image.new("L", (8, 6)).save("scan.png")
    >>> read_images_pil("scan.png", image_type=".png").first().size
    (8, 6)
    """
    return read_images(file_path, label_func, target_path, image_type, target_type, "pillow")


def read_images_spark(
    file_path: str | list[str],
    label_func: Callable[[str], Any] | None = None,
    target_path: str | list[str] | None = None,
    image_type: str | tuple[str, ...] = ".jpg",
    target_type: str | tuple[str, ...] = ".png",
) -> SparkXShards:
    """Read images through Spark's file sources; see :func:`read_images`.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.image import read_images_spark
    >>> sc = init_orca_context("local", cores=2)
    >>> Image.new("RGB", (8, 6)).save("photo.jpg")
    >>> Image.new("L", (8, 6), 255).save("photo_mask.png")
    >>> shards = read_images_spark("photo.jpg", target_path="photo_mask.png")
    >>> image, mask = shards.first()
    >>> mask.getpixel((0, 0))
    255
    """
    return read_images(file_path, label_func, target_path, image_type, target_type, "spark")


def read_voc(
    file_path: str = "VOCdevkit",
    split_names: Iterable[tuple[int, str]] = ((2009, "trainval"),),
    classes: Sequence[str] | Mapping[str, int] | None = None,
    diff: bool = False,
    max_samples: int | None = None,
) -> SparkXShards:
    r"""Read the images and bounding boxes of PASCAL VOC.

    Parameters
    ----------
    file_path : str, default "VOCdevkit"
        Directory that contains ``VOC<year>``.
    split_names : list of (int, str)
        Years and splits.
    classes : list of str or dict of str to int, optional
        Class names, or a dict of their numbers; by default the 20 VOC classes.  Objects of other
        classes are ignored.
    diff : bool, default False
        Keep the column ``difficult``.
    max_samples : int, optional
        Maximum number of images.

    Returns
    -------
    SparkXShards
        Each shard is a tuple of the image and a float32 array with a row ``xmin, ymin, xmax, ymax,
        class`` (and ``difficult``) per object, with boxes relative to the image size.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.file import write_text, makedirs
    >>> from bigdl.orca.data.image import read_voc
    >>> sc = init_orca_context("local", cores=2)
    >>> for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
    ...     makedirs(f"VOCdevkit/VOC2007/{folder}")
    >>> Image.new("RGB", (100, 50)).save("VOCdevkit/VOC2007/JPEGImages/1.jpg")
    >>> _ = write_text("VOCdevkit/VOC2007/ImageSets/Main/train.txt", "1\n")
    >>> _ = write_text("VOCdevkit/VOC2007/Annotations/1.xml", '''<annotation>
    ...   <size><width>100</width><height>50</height></size>
    ...   <object><name>dog</name><difficult>0</difficult><bndbox>
    ...     <xmin>10</xmin><ymin>10</ymin><xmax>60</xmax><ymax>40</ymax>
    ...   </bndbox></object>
    ... </annotation>''')
    >>> image, boxes = read_voc("VOCdevkit", [(2007, "train")], classes=["cat", "dog"]).first()
    >>> boxes.tolist()  # box relative to the image size, and class
    [[...]]
    """
    numbers = class_numbers(classes)
    columns = 6 if diff else 5
    rdd = _distribute(voc_images(file_path, split_names)[: _at_most(max_samples)])
    return SparkXShards(
        rdd.map(lambda pair: (open_image(pair[0]), voc_boxes(pair[1], numbers)[:, :columns]))
    )


def read_coco(file_path: str, split: str = "train", max_samples: int | None = None) -> SparkXShards:
    """Read the images and bounding boxes of COCO.

    Parameters
    ----------
    file_path : str
        Directory with ``annotations/instances_<split>….json`` and images in ``<split>…`` or
        ``images/<split>…``.
    split : str, default "train"
        Name or prefix of the split; ``"train"`` also matches ``train2017``.
    max_samples : int, optional
        Maximum number of images.

    Returns
    -------
    SparkXShards
        Each shard is a tuple of the image and a float32 array with a row ``xmin, ymin, xmax, ymax,
        class`` per object.  Boxes are relative to the image size, and classes are numbered from 0
        in the order of their ``category_id``.

    Examples
    --------
    >>> import json
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.file import makedirs, write_text
    >>> from bigdl.orca.data.image import read_coco
    >>> sc = init_orca_context("local", cores=2)
    >>> makedirs("coco/annotations"); makedirs("coco/train2017")
    >>> Image.new("RGB", (100, 50)).save("coco/train2017/1.jpg")
    >>> _ = write_text("coco/annotations/instances_train2017.json", json.dumps({
    ...     "images": [{"id": 1, "file_name": "1.jpg", "width": 100, "height": 50}],
    ...     "categories": [{"id": 18, "name": "dog"}],
    ...     "annotations": [{"image_id": 1, "category_id": 18, "bbox": [10, 10, 50, 25]}],
    ... }))
    >>> image, boxes = read_coco("coco").first()
    >>> boxes.round(2).tolist()  # box relative to the image size, and class
    [[...]]
    """
    rdd = _distribute(coco_records(file_path, split)[: _at_most(max_samples)])
    return SparkXShards(rdd.map(lambda pair: (open_image(pair[0]), pair[1])))


def _at_most(max_samples: int | None) -> int | None:
    return None if max_samples is None else check_positive("max_samples", max_samples)


Sources = tuple["str | list[str]", "str | tuple[str, ...]"]  # paths, and file name suffixes


def _read_by_workers(images: Sources, masks: Sources | None) -> RDD:
    """Read the path and content of every image and its mask (or None) in Python workers."""
    paths = _list_files(*images)
    pairs = (
        pairs_of_images(paths, _list_files(*masks)) if masks else [(path, None) for path in paths]
    )
    return _distribute(pairs).map(
        lambda pair: (pair[0], read_bytes(pair[0]), pair[1], pair[1] and read_bytes(pair[1]))
    )


def _read_by_spark(images: Sources, masks: Sources | None) -> RDD:
    """Read the path and content of every image and its mask (or None) with Spark."""
    frame, paths = _list_with_spark(*images)
    parts = _partitions(len(paths))
    mask_frame, mask_paths = _list_with_spark(*masks) if masks else (None, [])
    pairs = pairs_of_images(paths, mask_paths) if masks else [(path, None) for path in paths]
    # assign partitions here, because a global sort would read every file twice (sampling and
    # sorting)
    rows = [(*pair, i * parts // len(pairs)) for i, pair in enumerate(pairs)]
    assignment = OrcaContext.get_spark_session().createDataFrame(
        rows, "path string, mask_path string, part int"
    )
    frame = frame.select("path", "content").join(F.broadcast(assignment), "path")
    if mask_frame is None:
        frame = frame.withColumn("mask", F.lit(None))
    else:
        columns = F.col("path").alias("mask_path"), F.col("content").alias("mask")
        frame = frame.join(mask_frame.select(*columns), "mask_path")
    ordered = by_partition(frame, parts, "part").sortWithinPartitions("path")
    return rows_of(ordered.select("path", "content", "mask_path", "mask")).map(tuple)


def _suffixes(types: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(t.lower() for t in ([types] if isinstance(types, str) else types))


def _list_files(where: str | Iterable[str], types: str | Iterable[str]) -> list[str]:
    """Return the sorted paths of files under paths or patterns that have the given suffixes."""
    paths = [where] if isinstance(where, str) else where
    files = {file for path in paths for file in files_of(path)}
    # Spark ignores hidden and temporary files
    visible = (path for path in files if not posixpath.basename(path).startswith(("_", ".")))
    chosen = sorted(path for path in visible if path.lower().endswith(_suffixes(types)))
    if not chosen:
        raise UsageError(
            f"There is no file with suffix {types!r} at {where!r}", code="path-missing", path=where
        )
    return chosen


def _list_with_spark(where: str | list[str], types: str | Iterable[str]) -> tuple[Any, list[str]]:
    """Return a Spark frame of the files with the given suffixes, and their sorted paths."""
    from pyspark.errors import AnalysisException

    paths = [where] if isinstance(where, str) else list(where)
    letters = [
        "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in e) for e in _suffixes(types)
    ]
    reader = OrcaContext.get_spark_session().read.format("binaryFile")
    try:
        frame = reader.option("pathGlobFilter", f"*{{{','.join(letters)}}}").load(paths)
    except AnalysisException as error:
        raise UsageError(
            f"There is no file at {where!r}: {condition_of(error)}", code="path-missing", path=where
        ) from error
    files = sorted(
        row["path"] for row in frame.select("path").collect()
    )  # does not read the contents
    if not files:
        raise UsageError(
            f"There is no file with suffix {types!r} at {where!r}", code="path-missing", path=where
        )
    return frame, files


def _stem(path: str) -> str:
    return posixpath.basename(path).rpartition(".")[0]


def pairs_of_images(images: list[str], masks: list[str]) -> list[tuple[str, str]]:
    """Pair every image with its mask; raise UsageError unless every image has exactly one mask."""
    by_stem: dict[str, list[str]] = {}
    for mask in masks:
        by_stem.setdefault(_stem(mask), []).append(mask)
    stems = {_stem(path) for path in images}
    longer = [stem for stem in by_stem if stem not in stems]
    prefixes: dict[str, list[str]] = {}
    for stem in longer:  # its image has the longest name that is a prefix of the mask's name
        cuts = [i for i, letter in enumerate(stem) if letter in "_-." and stem[:i] in stems]
        if cuts:
            prefixes.setdefault(stem[: cuts[-1]], []).extend(by_stem[stem])
    pairs = []
    for image in images:
        matching = by_stem.get(_stem(image)) or prefixes.get(_stem(image), [])
        if len(matching) != 1:
            raise UsageError(
                f"The image {image!r} must have exactly one mask with its name, got "
                f"{matching or 'none'}",
                code="path-missing",
                path=image,
            )
        pairs.append((image, matching[0]))
    return pairs


def _partitions(items: int) -> int:
    return max(1, min(items, active_spark().parallelism))


def _distribute(items: list) -> RDD:
    return parallelize(items, _partitions(len(items)))


VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


def class_numbers(classes: Sequence[str] | Mapping[str, int] | None) -> dict[str, int]:
    """Convert a list of class names, or a dict, to a dict of class ids keyed by class name."""
    if classes is None:
        classes = VOC_CLASSES
    if isinstance(classes, Mapping):
        return dict(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise UsageError(
            f"classes must be a list of names, or a dict of name to number: {classes!r}",
            code="argument-type",
            argument="classes",
        )
    return {name: number for number, name in enumerate(classes)}


def voc_images(root: str, splits: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Return the image and annotation paths of all items of the splits in a ``VOCdevkit``."""
    records = []
    for split in splits:
        if not isinstance(split, list | tuple) or len(split) != 2:
            raise UsageError(
                f'A split must be a pair of year and name, e.g. (2007, "trainval"), got {split!r}',
                code="argument-value",
                argument="split",
            )
        year, name = split
        folder = f"{root.rstrip('/')}/VOC{year}"
        listed = f"{folder}/ImageSets/Main/{name}.txt"
        if not is_file(listed):
            raise UsageError(
                f"There is no split {name!r} of VOC{year}: no file {listed!r}",
                code="path-missing",
                path=listed,
            )
        for line in open_text(listed):
            if line:
                number = line.split()[0]
                records.append(
                    (f"{folder}/JPEGImages/{number}.jpg", f"{folder}/Annotations/{number}.xml")
                )
    return records


def _number(element: ElementTree.Element, path: str) -> float:
    """Return the number at an XML path; raise TypeError if it is missing."""
    return float(cast("str", element.findtext(path)))


def voc_boxes(annotation: str, numbers: Mapping[str, int]) -> np.ndarray:
    """Read the objects in an annotation file as a float32 array of shape (objects, 6)."""
    try:
        tree = ElementTree.fromstring(read_bytes(annotation))
        width, height = (_number(tree, f"size/{side}") for side in ("width", "height"))
        rows = []
        for item in tree.iter("object"):
            number = numbers.get((item.findtext("name") or "").strip())
            if number is None:
                continue
            box = [_number(item, f"bndbox/{n}") for n in ("xmin", "ymin", "xmax", "ymax")]
            scaled = [value / side for value, side in zip(box, [width, height] * 2, strict=True)]
            rows.append([*scaled, number, int(item.findtext("difficult") or 0)])
    except (ElementTree.ParseError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"{annotation!r} is not a PASCAL VOC annotation: {error}",
            code="file-format",
            path=annotation,
        ) from error
    return np.array(rows, dtype=np.float32).reshape(-1, 6)


def voc_records(
    root: str,
    splits: Iterable[tuple[int, str]],
    classes: Sequence[str] | Mapping[str, int] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and the objects of every image of PASCAL VOC splits."""
    numbers = class_numbers(classes)
    for image, annotation in voc_images(root, splits):
        yield image, voc_boxes(annotation, numbers)


def coco_records(root: str, split: str) -> list[tuple[str, np.ndarray]]:
    """Return the path and objects (float32, shape (objects, 5)) of every image of a COCO split.

    Classes are numbered from 0 in the order of their ``category_id``.
    """
    root = root.rstrip("/")
    annotations = _single_file(f"{root}/annotations", f"instances_{split}", ".json")
    folder = _images_of(root, posixpath.basename(annotations)[len("instances_") : -len(".json")])
    try:
        content = json.loads(read_bytes(annotations))
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
        raise UsageError(
            f"{annotations!r} has no COCO annotations: {error!r}",
            code="file-format",
            path=annotations,
        ) from error


def _single_file(folder: str, start: str, end: str) -> str:
    """Return the directory's only file whose name starts with `start` and ends with `end`."""
    names = [posixpath.basename(path) for path in listdir(folder)]
    fitting = [name for name in names if name.startswith(start) and name.endswith(end)]
    exact = [name for name in fitting if name == start + end]
    if len(exact or fitting) != 1:
        raise UsageError(
            f"{folder!r} must have exactly one file {start}*{end}, but has {fitting or names}",
            code="path-missing",
            path=folder,
        )
    return f"{folder}/{(exact or fitting)[0]}"


def _images_of(root: str, split: str) -> str:
    names = {posixpath.basename(path) for path in listdir(root)}
    if split in names:
        return f"{root}/{split}"
    if "images" in names and f"{root}/images/{split}" in listdir(f"{root}/images"):
        return f"{root}/images/{split}"
    raise UsageError(
        f"There is no image directory {split!r} in {root!r} or {root}/images",
        code="path-missing",
        path=root,
    )
