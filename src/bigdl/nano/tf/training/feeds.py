"""Data feeds of a multi-process fit: arrays, datasets and Python generators.

A feed is pickled to each process, which takes its share of every batch. The batches and their order
are the same in all processes. Batches that only the caller's process can compute are written to a
file that all processes read. A record of the file is a tensor, and a batch is one record for each
of its tensors. Python writes them one by one, since ``tf.data.Dataset.save`` cannot be interrupted.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, as_usage_error
from bigdl.nano.acceleration.structure import flatten
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.keras.data import DatasetGraph, DatasetRows, with_seeds

if TYPE_CHECKING:
    from bigdl.common.types import Tensors

MAX_BATCHES = 65_536
"""Largest number of batches read from data of unknown length."""

# Operations that a graph cannot run in another process.
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


class FeedRows(DatasetRows):
    """Batches of a data feed, from which one training process takes its share of the rows.

    Parameters
    ----------
    dataset : tf.data.Dataset
    sync : GradientSync
    row : tuple
        A batch of one row.
    arrays : tuple, optional
        Nested arrays; the elements of the dataset are indices of their rows.

    Attributes
    ----------
    elements_are_batches : bool
        True if an element that is no tuple is passed unchanged, as Keras does for models with a
        custom step; False if it is the inputs of a batch.
    """

    elements_are_batches = False

    def __init__(
        self, dataset: tf.data.Dataset, sync: GradientSync, row: tuple, arrays: tuple | None = None
    ):
        super().__init__(dataset, sync)
        self.spec = None  # accept any element as a batch, possibly of inputs only
        self._row, self._arrays = row, arrays

    def __len__(self) -> int:
        return len(self._dataset)

    def example(self, types, assembly):
        is_tuple = self._arrays is not None or isinstance(self._dataset.element_spec, tuple)
        return self._row if is_tuple or not self.elements_are_batches else self._row[0]

    def _check_equal(self, batch):
        """Do nothing; rows can differ between processes because of random operations."""

    def _part(self, batch):
        part, rows = super()._part(batch)
        if self._arrays is None:
            return (part if isinstance(part, tuple) or self.elements_are_batches else (part,)), rows
        leaves, structure = flatten(self._arrays)
        return structure.rebuild([leaf[part.numpy()] for leaf in leaves]), rows


@dataclass
class KerasArrayFeed:
    """Data feed that batches the rows of in-memory arrays.

    Attributes
    ----------
    arrays
        ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` of nested ndarrays.
    batch_size : int
        Number of rows of a batch, over all processes.
    shuffle : bool
    steps : int or None
        ``steps_per_epoch`` of ``fit``.
    """

    arrays: tuple
    batch_size: int
    shuffle: bool
    steps: int | None = None

    @property
    def row(self) -> tuple:
        """A batch of one row with the structure that a train step takes."""
        leaves, structure = flatten(self.arrays)
        return structure.rebuild([leaf[:1] for leaf in leaves])

    def open(self, sync: GradientSync, seed: int) -> FeedRows:
        """Open the feed in one training process and return its batches."""
        rows = len(flatten(self.arrays)[0][0])
        dataset = tf.data.Dataset.range(rows)
        if self.shuffle:
            tf.random.set_seed(seed)
            dataset = dataset.shuffle(rows, seed=seed)
        if self.steps is not None:
            dataset = dataset.repeat()
        opened = FeedRows(dataset.batch(self.batch_size), sync, self.row, self.arrays)
        opened.steps = math.ceil(rows / self.batch_size)
        return opened


@dataclass
class KerasDatasetFeed:
    """Data feed of a ``tf.data.Dataset``, sent to processes as a graph or as a file of batches.

    Attributes
    ----------
    content : bytes or str
        The serialized graph, or the path of the file.
    spec
        Element spec.
    row : tuple
        A batch of one row, as a train step takes it.
    steps : int or None
        ``steps_per_epoch`` of ``fit``; None if an epoch is one pass over the dataset.
    """

    content: bytes | str
    spec: Any
    row: tuple
    steps: int | None = None

    def open(self, sync: GradientSync, seed: int) -> FeedRows:
        """Open the feed in one training process and return its batches."""
        if isinstance(self.content, str):
            dataset = read_batches(self.content, self.spec)
        else:
            dataset = DatasetGraph(with_seeds(self.content, seed), self.spec, False)(None, None)
        return FeedRows(dataset, sync, self.row)


Feed = KerasArrayFeed | KerasDatasetFeed
"""Any feed of batches."""


def feed_of(
    x: object,
    y: object = None,
    sample_weight: object = None,
    *,
    folder: Path,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    steps_argument: str = "steps_per_epoch",
) -> Feed:
    """Return the data feed for the arguments `x`, `y` and `sample_weight` of ``fit``.

    Parameters
    ----------
    x, y, sample_weight, batch_size, steps, shuffle
        Arguments of ``keras.Model.fit``.
    epochs : int
        Number of passes over the data.
    folder : Path
        Folder for batches that only this process can compute; it must outlive the feed.
    steps_argument : str
        Name of the argument `steps` in ``fit``, for errors.

    Raises
    ------
    UsageError
        If the type of the data is not supported, or they are no batches; if they need a number of
        steps because they do not end, which is assumed after :data:`MAX_BATCHES`.
    """
    if steps is not None:
        steps = check_positive(steps_argument, steps)
    is_stream = isinstance(x, (keras.utils.PyDataset, tf.data.Dataset))
    if not is_stream and flatten(x)[0]:
        return _array_feed(x, y, sample_weight, batch_size, steps, shuffle)
    if y is not None or sample_weight is not None:
        raise UsageError(
            "x is a dataset or a generator, which contains targets and weights; do not pass y and "
            "sample_weight",
            code="argument-conflict",
            argument="y",
        )
    if isinstance(x, tf.data.Dataset):
        return _dataset_feed(x, steps, epochs, folder, steps_argument)
    if isinstance(x, keras.utils.PyDataset):
        steps = steps or x.num_batches
        x = _batches_in_order(x)
    if not isinstance(x, Iterator):
        raise UsageError(
            "x must hold arrays, or be a tf.data.Dataset, a keras.utils.PyDataset or a generator, "
            f"not a {type(x).__name__}",
            code="data-type",
            argument="x",
        )
    limit = None if steps is None else steps * epochs
    return _spooled(map(_as_element, _limited(x, limit, steps_argument)), None, steps, folder)


def _array_feed(x, y, sample_weight, batch_size, steps, shuffle) -> KerasArrayFeed:
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight needs y", code="argument-missing", argument="y")
    arrays = tuple(_as_arrays(each) for each in (x, y, sample_weight) if each is not None)
    rows = {len(leaf) for leaf in flatten(arrays)[0]}
    if len(rows) != 1 or not next(iter(rows)):
        raise UsageError(
            f"x and y must have the same number of rows, but have {sorted(rows)}", code="data-shape"
        )
    if not batch_size:
        batch_size = math.ceil(rows.pop() / steps) if steps else 32
    return KerasArrayFeed(arrays, int(batch_size), bool(shuffle), steps)


def _dataset_feed(dataset, steps, epochs, folder, steps_argument) -> Feed:
    with as_usage_error("The dataset cannot be sent", code="model-copy"):
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=1
        ).numpy()
    batches = dataset.cardinality()
    if steps is None and batches == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            f"The dataset has no end; pass {steps_argument}",
            code="data-endless",
            argument=steps_argument,
        )
    if not _runs_python(graph):
        return KerasDatasetFeed(graph, dataset.element_spec, _first_row(dataset), steps)
    if steps is not None:
        limit, dataset = steps * epochs, dataset.repeat()
    else:
        limit = None if batches == tf.data.UNKNOWN_CARDINALITY else int(batches)
    elements = _limited(iter(dataset), limit, steps_argument)
    return _spooled(elements, dataset.element_spec, steps, folder)


def _runs_python(content: bytes) -> bool:
    graph = tf.compat.v1.GraphDef.FromString(content)
    nodes = itertools.chain(graph.node, *(f.node_def for f in graph.library.function))
    return any(node.op in _PYTHON for node in nodes)


def _spooled(batches, spec, steps, folder) -> KerasDatasetFeed:
    """Write all batches to a file, and return a feed that reads the file."""
    path, spec = write_batches(batches, folder, spec)
    if spec is None:
        raise UsageError("The generator yields nothing; give at least one batch", code="data-empty")
    return KerasDatasetFeed(path, spec, _first_row(read_batches(path, spec)), steps)


def _first_row(dataset: tf.data.Dataset) -> tuple:
    for element in dataset.take(1):
        batch = element if isinstance(element, tuple) else (element,)
        leaves, structure = flatten(batch)
        if any(not leaf.shape.rank for leaf in leaves):
            raise UsageError(
                "The dataset must yield batches; call batch() on it", code="data-structure"
            )
        return structure.rebuild([leaf[:1].numpy() for leaf in leaves])
    raise UsageError("The dataset holds no batch; give at least one", code="data-empty")


def _as_element(batch: object) -> object:
    parts = list(batch) if isinstance(batch, tuple) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    # A list in an element of a dataset would become one tensor.
    return keras.tree.lists_to_tuples(_as_arrays(tuple(parts)))


def _batches_in_order(data: keras.utils.PyDataset) -> Iterator:
    """Yield the batches of a PyDataset repeatedly."""
    while True:
        for index in itertools.count() if data.num_batches is None else range(data.num_batches):
            yield data[index]
        data.on_epoch_end()


def _as_arrays(value: object) -> object:
    leaves, structure = flatten(value)
    if not leaves:
        return np.asarray(value)
    return structure.rebuild([np.asarray(leaf) for leaf in leaves])


# -- batches in a file ---------------------------------------------------------------------------


def write_batches(batches: Iterator, folder: Path, spec: object = None) -> tuple[str, Any]:
    """Write nested tensors to a file.

    Parameters
    ----------
    batches : iterator of nested tensors
        Batches of the same structure. Tensors are cast to the dtypes of the first batch; sizes may
        differ.
    folder : Path
        Folder of the new file.
    spec : nested tf.TypeSpec, optional
        Spec of all batches. Default: derived from the first one.

    Returns
    -------
    path : str
    spec : nested tf.TypeSpec

    Raises
    ------
    UsageError
        If a batch differs from the first one, or the batches take more than half of the free space.
    """
    file, path = tempfile.mkstemp(dir=folder)
    os.close(file)
    space = shutil.disk_usage(folder).free // 2
    is_known, written = spec is not None, 0
    with tf.io.TFRecordWriter(path) as writer:
        for batch in batches:
            if not is_known:
                this = _spec_of(batch)
                spec = this if spec is None else spec
                if _structure_of(this) != _structure_of(spec):
                    raise UsageError(
                        "All batches must have the same nesting and ranks, but after "
                        f"{_structure_of(spec)} there is {_structure_of(this)}",
                        code="data-structure",
                    )
            for record in _records(batch, spec):
                writer.write(record)
                written += len(record)
            if written > space:
                raise UsageError(
                    "The batches are written to a file before the training begins, and take more "
                    f"than half of the free space of {folder}, {space >> 20} MiB; pass fewer "
                    "steps, a tf.data.Dataset that runs no Python, or set TMPDIR to a larger disk",
                    code="data-size",
                    path=str(folder),
                )
    return path, spec


def read_batches(path: str, spec: object) -> tf.data.Dataset:
    """Return a dataset of the batches in a file written by :func:`write_batches`."""
    parts = tf.nest.flatten(spec, expand_composites=True)

    def batch(records: Sequence[tf.Tensor]) -> Tensors:
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(records[index], part.dtype), part.shape)
            for index, part in enumerate(parts)
        ]
        return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)

    records = tf.data.TFRecordDataset(path).batch(len(parts), drop_remainder=True)
    return records.map(batch, num_parallel_calls=1)


def _limited(batches: Iterator, limit: int | None, argument: str) -> Iterator:
    """Yield at most `limit` batches; without a limit, raise an error if the data do not end."""
    yield from itertools.islice(batches, MAX_BATCHES if limit is None else limit)
    if limit is None and next(batches, None) is not None:
        raise UsageError(
            f"The data have not ended after {MAX_BATCHES} batches; pass {argument}",
            code="data-endless",
            argument=argument,
        )


def _records(batch: object, spec: object) -> Iterator[bytes]:
    parts = tf.nest.flatten(spec, expand_composites=True)
    leaves = tf.nest.flatten(batch, expand_composites=True)
    for leaf, part in zip(leaves, parts, strict=True):
        yield tf.io.serialize_tensor(tf.cast(leaf, part.dtype)).numpy()


def _spec_of(batch: object) -> object:
    """Return the spec of a batch, in which every size is dynamic."""

    def part(value: object) -> tf.TensorSpec:
        tensor = tf.convert_to_tensor(value)
        return tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype)

    return tf.nest.map_structure(part, batch)


def _structure_of(spec: object) -> object:
    """Return the nesting, types and ranks that all batches must share."""

    def form(part: tf.TensorSpec) -> str:
        return f"{'text' if part.dtype == tf.string else 'numbers'}[{part.shape.rank}]"

    return tf.nest.map_structure(form, spec)
