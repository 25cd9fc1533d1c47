"""Names of BigDL 2.x for TFRecord files, which needed TensorFlow 1."""

from __future__ import annotations

from typing import Any, NoReturn

from bigdl.common.errors import UsageError

__all__ = ["read_tfrecord", "write_tfrecord"]


def write_tfrecord(format: str, output_path: str, *args: Any, **kwargs: Any) -> NoReturn:
    """No more available; the error says what takes its place."""
    raise UsageError(
        "write_tfrecord is no more available: it needed TensorFlow 1; use "
        'bigdl.orca.data.image.write_parquet("image_folder", …) instead'
    )


def read_tfrecord(format: str, path: str, *args: Any, **kwargs: Any) -> NoReturn:
    """No more available; the error says what takes its place."""
    raise UsageError(
        "read_tfrecord is no more available: it needed TensorFlow 1; use "
        'tf.data.TFRecordDataset, or bigdl.orca.data.image.read_parquet("tf_dataset", …) instead'
    )
