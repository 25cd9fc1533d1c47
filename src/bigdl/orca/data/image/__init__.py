"""Functions that read images into XShards, and image datasets in Parquet files."""

from __future__ import annotations

from typing import NoReturn

from bigdl.common.errors import UsageError
from bigdl.orca.data.image.parquet_dataset import (
    ParquetDataset,
    read_parquet,
    write_from_directory,
    write_mnist,
    write_parquet,
    write_voc,
)
from bigdl.orca.data.image.preprocessing import (
    read_coco,
    read_images,
    read_images_pil,
    read_images_spark,
    read_voc,
)

__all__ = [
    "ParquetDataset",
    "read_coco",
    "read_images",
    "read_images_pil",
    "read_images_spark",
    "read_parquet",
    "read_tfrecord",
    "read_voc",
    "write_from_directory",
    "write_mnist",
    "write_parquet",
    "write_tfrecord",
    "write_voc",
]


def write_tfrecord(format: str, output_path: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise UsageError: removed, because it needed TensorFlow 1; the error names a replacement.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca.data.image import write_tfrecord
    >>> try:
    ...     write_tfrecord("mnist", "mnist.tfrecord")
    ... except UsageError as error:
    ...     print(error)
    write_tfrecord is no more available: it needed TensorFlow 1; use
    bigdl.orca.data.image.write_parquet("image_folder", …) instead
    """
    _refuse("write_tfrecord", 'bigdl.orca.data.image.write_parquet("image_folder", …)')


def read_tfrecord(format: str, path: str, *args: object, **kwargs: object) -> NoReturn:
    """Raise UsageError: removed, because it needed TensorFlow 1; the error names a replacement.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca.data.image import read_tfrecord
    >>> try:
    ...     read_tfrecord("mnist", "mnist.tfrecord")
    ... except UsageError as error:
    ...     print(error)
    read_tfrecord is no more available: it needed TensorFlow 1; use tf.data.TFRecordDataset, or
    bigdl.orca.data.image.read_parquet("tf_dataset", …) instead
    """
    readers = 'tf.data.TFRecordDataset, or bigdl.orca.data.image.read_parquet("tf_dataset", …)'
    _refuse("read_tfrecord", readers)


def _refuse(name: str, instead: str) -> NoReturn:
    raise UsageError(
        f"{name} is no more available: it needed TensorFlow 1; use {instead} instead",
        code="name-dropped",
        method=name,
    )
