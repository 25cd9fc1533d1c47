"""Known kinds of image data as a :class:`ParquetDataset`, and the way back into a training."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.data.file import is_file, listdir, read_bytes
from bigdl.orca.data.image.dataset import ParquetDataset
from bigdl.orca.data.image.reader import read_parquet
from bigdl.orca.data.image.utils import DType, FeatureType, SchemaField
from bigdl.orca.data.image.voc import voc_records

__all__ = [
    "ParquetDataset",
    "read_parquet",
    "write_from_directory",
    "write_mnist",
    "write_parquet",
    "write_voc",
]


def write_parquet(format: str, output_path: str, *args: Any, **kwargs: Any) -> None:
    """Write a known kind of data as a :class:`ParquetDataset`.

    Parameters
    ----------
    format : {"mnist", "image_folder", "voc"}
    output_path : str
    *args, **kwargs
        Of :func:`write_mnist`, :func:`write_from_directory` or :func:`write_voc`.
    """
    writers = {"mnist": write_mnist, "image_folder": write_from_directory, "voc": write_voc}
    if format not in writers:
        raise UsageError(f"format must be one of {', '.join(writers)}, got {format!r}")
    writers[format](*args, output_path=output_path, **kwargs)


def write_mnist(image_file: str, label_file: str, output_path: str, **kwargs: Any) -> None:
    """Write the files of MNIST, which are unpacked idx files, as a :class:`ParquetDataset`.

    The columns are ``image``, uint8 of shape (rows, columns, 1), and ``label``, uint8 of shape ().

    Parameters
    ----------
    image_file, label_file : str
    output_path : str
    **kwargs
        Of :meth:`ParquetDataset.write`.
    """
    images, labels = _idx(image_file, 2051, 3), _idx(label_file, 2049, 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{image_file!r} has {len(images)} images, but {label_file!r} {len(labels)} labels"
        )
    images = images[..., np.newaxis]
    schema = {
        "image": SchemaField(FeatureType.NDARRAY, DType.UINT8, images.shape[1:]),
        "label": SchemaField(FeatureType.NDARRAY, DType.UINT8, ()),
    }
    records = ({"image": i, "label": n} for i, n in zip(images, labels, strict=True))
    ParquetDataset.write(output_path, records, schema, **kwargs)


def _idx(path: str, magic: int, ndim: int) -> np.ndarray:
    data = read_bytes(path)
    head = 4 + 4 * ndim
    found, *shape = struct.unpack(f">{1 + ndim}I", data[:head].ljust(head, b"\0"))
    if found != magic:
        advice = "; unpack it first" if data[:2] == b"\x1f\x8b" else ""
        raise UsageError(f"{path!r} has the magic number {found}, not {magic} of MNIST{advice}")
    values = np.frombuffer(data, np.uint8, offset=head)
    if values.size != np.prod(shape):
        raise UsageError(f"{path!r} says to hold {shape} values, but there are {values.size}")
    return values.reshape(shape)


def write_from_directory(
    directory: str,
    label_map: Mapping[str, int],
    output_path: str,
    shuffle: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> None:
    """Write images that lie in one directory per label as a :class:`ParquetDataset`.

    The columns are ``image`` (the bytes of the file), ``label`` (int), ``image_id`` (its path)
    and ``label_str``.

    Parameters
    ----------
    directory : str
        Directory of the directories.
    label_map : dict of str to int
        Number of each label; other directories are left out.
    output_path : str
    shuffle : bool, default True
        Mix the images; else they are in the order of their paths.
    seed : int, optional
        Makes the mixture the same each time.
    **kwargs
        Of :meth:`ParquetDataset.write`.
    """
    if not isinstance(label_map, Mapping) or not label_map:
        raise UsageError(f"label_map must be a dict of label to number, got {label_map!r}")
    folders = {path.rpartition("/")[2]: path for path in listdir(directory)}
    missing = [label for label in label_map if label not in folders]
    if missing:
        raise UsageError(f"{directory!r} has no directory {missing[0]!r} of label_map")
    found = [
        (path, label) for label in label_map for path in listdir(folders[label]) if is_file(path)
    ]
    found.sort()
    if shuffle:
        random.Random(seed).shuffle(found)
    schema = {
        "image": SchemaField(FeatureType.IMAGE, DType.BYTES, ()),
        "label": SchemaField(FeatureType.SCALAR, DType.INT32, ()),
        "image_id": SchemaField(FeatureType.SCALAR, DType.STRING, ()),
        "label_str": SchemaField(FeatureType.SCALAR, DType.STRING, ()),
    }
    records = (
        {"image": path, "label": label_map[label], "image_id": path, "label_str": label}
        for path, label in found
    )
    ParquetDataset.write(output_path, records, schema, **kwargs)


def write_voc(
    voc_root_path: str,
    splits_names: list[tuple[int, str]],
    output_path: str,
    classes: list[str] | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> None:
    """Write images and boxes of PASCAL VOC as a :class:`ParquetDataset`.

    The columns are ``image`` (the bytes of the file), ``label`` (float32, a row ``xmin, ymin,
    xmax, ymax, class, difficult`` per object, with the box in fractions of the image) and
    ``image_id`` (its path).

    Parameters
    ----------
    voc_root_path : str
        The directory ``VOCdevkit``.
    splits_names : list of (int, str)
        Years and splits, e.g. ``[(2007, "trainval")]``.
    output_path : str
    classes : list of str or dict of str to int, optional
        Names of the classes, or their numbers; default: the 20 of VOC.
    **kwargs
        Of :meth:`ParquetDataset.write`.
    """
    schema = {
        "image": SchemaField(FeatureType.IMAGE, DType.BYTES, ()),
        "label": SchemaField(FeatureType.NDARRAY, DType.FLOAT32, (-1, 6)),
        "image_id": SchemaField(FeatureType.SCALAR, DType.STRING, ()),
    }
    ParquetDataset.write(
        output_path, _voc_rows(voc_root_path, splits_names, classes), schema, **kwargs
    )


def _voc_rows(root, splits, classes) -> Iterator[dict]:
    for path, boxes in voc_records(root, splits, classes):
        yield {"image": path, "label": boxes, "image_id": path}
