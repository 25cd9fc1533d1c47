"""Batches that only one process can make, in a file that all of them read.

A record of the file is a tensor; so many records as a batch has tensors are a batch. Batches are
written one by one from Python, not by ``tf.data.Dataset.save``, which could not be interrupted.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from bigdl.common.errors import UsageError

__all__ = ["MOST_BATCHES", "batches_of", "read_batches", "write_batches"]

MOST_BATCHES = 65_536
"""So many batches are read of data whose end nobody knows."""


def write_batches(batches: Iterator, folder: Path, spec: Any = None) -> tuple[str, Any]:
    """Write nested tensors.

    Parameters
    ----------
    batches : iterator of nested tensors
        Of the same structure. Tensors are cast to the dtypes of the first batch; where a dimension
        is not always the same, its length is left open.
    folder : Path
        Where the file is made.
    spec : nested tf.TypeSpec, optional
        What all batches are; by default it is found out.

    Returns
    -------
    path : str
    spec : nested tf.TypeSpec

    Raises
    ------
    UsageError
        If a batch is not like the first one, or all of them take more than half of the free space.
    """
    file, path = tempfile.mkstemp(dir=folder)
    os.close(file)
    room = shutil.disk_usage(folder).free // 2
    told, written = spec is not None, 0
    with tf.io.TFRecordWriter(path) as writer:
        for batch in batches:
            if not told:
                spec = _spec_of(batch) if spec is None else _widened(spec, batch)
            for record in _records(batch, spec):
                writer.write(record)
                written += len(record)
            if written > room:
                raise UsageError(
                    "The batches are written to a file before the training begins, and take more "
                    f"than half of the free space of {folder}, {room >> 20} MiB; pass fewer "
                    "steps, a tf.data.Dataset that runs no Python, or set TMPDIR to a larger disk"
                )
    return path, spec


def read_batches(path: str, spec: Any) -> tf.data.Dataset:
    """The dataset of what :func:`write_batches` wrote."""
    parts = tf.nest.flatten(spec, expand_composites=True)

    def batch(records: Any) -> Any:
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(records[place], part.dtype), part.shape)
            for place, part in enumerate(parts)
        ]
        return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)

    records = tf.data.TFRecordDataset(path).batch(len(parts), drop_remainder=True)
    return records.map(batch, num_parallel_calls=1)


def batches_of(batches: Iterator, limit: int | None, argument: str) -> Iterator:
    """The first batches, so many as are needed.

    Parameters
    ----------
    batches : iterator
    limit : int or None
        None takes all of them, which must have an end.
    argument : str
        Of ``fit``, that gives a limit.

    Raises
    ------
    UsageError
        If there seems to be no end; Keras itself would go on for ever.
    """
    if limit is not None:
        yield from itertools.islice(batches, limit)
        return
    yield from itertools.islice(batches, MOST_BATCHES)
    if next(batches, None) is not None:
        raise UsageError(
            f"The data have no end that can be seen after {MOST_BATCHES} batches; pass {argument}"
        )


def _records(batch: Any, spec: Any) -> Iterator[bytes]:
    parts = tf.nest.flatten(spec, expand_composites=True)
    leaves = tf.nest.flatten(batch, expand_composites=True)
    for leaf, part in zip(leaves, parts, strict=True):
        tensor = tf.convert_to_tensor(leaf)
        if tensor.dtype != part.dtype:
            tensor = tf.cast(tensor, part.dtype)
        yield tf.io.serialize_tensor(tensor).numpy()


def _spec_of(batch: Any) -> Any:
    """What batches like this one are; they may have more rows or fewer."""

    def part(value: Any) -> tf.TensorSpec:
        tensor = tf.convert_to_tensor(value)
        return tf.TensorSpec([None, *tensor.shape[1:]][: tensor.shape.rank], tensor.dtype)

    return tf.nest.map_structure(part, batch)


def _widened(spec: Any, batch: Any) -> Any:
    """What both the batches so far and another one are."""
    other = _spec_of(batch)
    try:
        return tf.nest.map_structure(_common, spec, other)
    except (TypeError, ValueError) as error:
        raise UsageError(
            "The batches must be nested alike, of tensors with as many dimensions, but after "
            f"{_said(spec)} there is {_said(other)}"
        ) from error


def _common(one: tf.TensorSpec, other: tf.TensorSpec) -> tf.TensorSpec:
    shape = [a if a == b else None for a, b in zip(one.shape, other.shape, strict=True)]
    if (one.dtype == tf.string) != (other.dtype == tf.string):
        raise TypeError("text and numbers")
    return tf.TensorSpec(shape, one.dtype)


def _said(spec: Any) -> str:
    return str(tf.nest.map_structure(lambda part: f"{part.dtype.name}{list(part.shape)}", spec))
