"""Data in the forms that Keras takes, in one form."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bigdl.common.errors import UsageError

__all__ = ["as_dataset"]


def as_dataset(x: Any, y: Any = None, batch_size: int | None = None) -> tf.data.Dataset:
    """Rows of ``x`` and ``y`` as a ``tf.data.Dataset`` of ``(x, y)``, or of ``x`` alone.

    Parameters
    ----------
    x : array, tensor, nest of them, or tf.data.Dataset
    y : array, tensor, nest of them, or tf.data.Dataset, optional
        Of the same kind as `x`.
    batch_size : int, optional
        Rows of an element; by default elements are single rows, and those of a dataset stay.

    Returns
    -------
    tf.data.Dataset

    Raises
    ------
    UsageError
        If `x` and `y` are of different kinds or have different numbers of rows.
    """
    both = (x,) if y is None else (x, y)
    are_datasets = [isinstance(each, tf.data.Dataset) for each in both]
    if len(set(are_datasets)) > 1:
        kinds = " and ".join(type(each).__name__ for each in both)
        raise UsageError(f"x and y must both be arrays or both be datasets, got {kinds}")
    if are_datasets[0]:
        dataset = x if y is None else tf.data.Dataset.zip((x, y))
    else:
        rows = sorted({len(leaf) for leaf in tf.nest.flatten(both)})
        if len(rows) > 1:
            raise UsageError(f"x and y must have as many rows, got {rows}")
        dataset = tf.data.Dataset.from_tensor_slices(both if y is not None else x)
    return dataset if batch_size is None else dataset.batch(batch_size)
