"""Data of a fit on the way to several processes.

A feed is pickled to each process and makes the dataset of its shares there. Batches, and their
order, are the same in all of them.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.structure import flatten, is_tensor
from bigdl.nano.tf.training.group import Group
from bigdl.nano.tf.training.shares import Share, share_of
from bigdl.nano.tf.training.spool import batches_of, read_batches, write_batches

__all__ = ["ArrayFeed", "DatasetFeed", "Feed", "feed_of"]

# What a graph cannot do in another process.
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


class Feed(abc.ABC):
    """Rows in batches.

    Attributes
    ----------
    steps : int or None
        ``steps_per_epoch`` for ``fit``; None where a dataset ends with an epoch.
    """

    steps: int | None

    @abc.abstractmethod
    def shares(self, group: Group, seed: int) -> tf.data.Dataset:
        """The dataset of one process's :class:`Share` of each batch."""

    @abc.abstractmethod
    def some_rows(self) -> Any:
        """A batch of few rows, as a train step takes it."""


@dataclass
class ArrayFeed(Feed):
    """Arrays.

    Attributes
    ----------
    arrays
        ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` of nested ndarrays.
    batch_size : int
        Rows of a batch of all processes.
    shuffle : bool
    steps : int or None
    """

    arrays: tuple
    batch_size: int
    shuffle: bool
    steps: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(flatten(self.arrays)[0][0])

    def shares(self, group: Group, seed: int) -> tf.data.Dataset:
        leaves, structure = flatten(self.arrays)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves]
        rows = self.rows

        def taken(indices: Any) -> Share:
            count = tf.shape(indices)[0]
            first, last, mine = share_of(count, group)
            chosen = [tf.gather(tensor, indices[first:last]) for tensor in tensors]
            return Share(mine, count, structure.rebuild(chosen))

        dataset = tf.data.Dataset.range(rows)
        if self.shuffle:
            dataset = dataset.shuffle(rows, seed=seed)
        if self.steps is not None:
            dataset = dataset.repeat()
        dataset = dataset.batch(self.batch_size).map(taken, num_parallel_calls=1)
        return dataset.prefetch(2)

    def some_rows(self) -> Any:
        leaves, structure = flatten(self.arrays)
        return structure.rebuild([leaf[:1] for leaf in leaves])


@dataclass
class DatasetFeed(Feed):
    """A ``tf.data.Dataset`` of batches, as a graph or as a file of them.

    Every process reads all of it and takes its rows of each batch.

    Attributes
    ----------
    content : bytes or str
        The graph, or the file's path.
    spec
        Of the elements.
    weights : dict or None
        Weight of each class.
    first
        The first batch.
    steps : int or None
    """

    content: Any
    spec: Any
    weights: dict | None
    first: Any
    steps: int | None = None

    def shares(self, group: Group, seed: int) -> tf.data.Dataset:
        def taken(*element: Any) -> Share:
            batch = _weighted(element, self.weights)
            leaves, structure = flatten(batch)
            count = tf.shape(leaves[0])[0]
            first, last, mine = share_of(count, group)
            return Share(mine, count, structure.rebuild([leaf[first:last] for leaf in leaves]))

        return self._dataset(seed).map(taken, num_parallel_calls=1).prefetch(2)

    def some_rows(self) -> Any:
        leaves, structure = flatten(self.first)
        return structure.rebuild([leaf[:1] for leaf in leaves])

    def _dataset(self, seed: int) -> tf.data.Dataset:
        if isinstance(self.content, str):
            return read_batches(self.content, self.spec)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=_seeded(self.content, seed))
        return tf.data.experimental.from_variant(variant, structure=self.spec)


def feed_of(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    epochs: int,
    shuffle: bool,
    class_weight: Mapping | None,
    folder: Path,
    steps_argument: str = "steps_per_epoch",
) -> Feed:
    """The feed of what ``fit`` was given.

    Parameters
    ----------
    x, y, sample_weight, batch_size, steps, shuffle, class_weight
        As of ``keras.Model.fit``.
    epochs : int
        How often the data are gone through.
    folder : Path
        Where elements are put that only this process can make; it outlives the feed.
    steps_argument : str
        What `steps` is called in ``fit``.

    Raises
    ------
    UsageError
        If the data are of another kind, or are not batches; if they are to be gone through to their
        end and have none: such data of Python's are given up after
        :data:`~bigdl.nano.tf.training.spool.MOST_BATCHES`.
    """
    steps = _checked(steps, steps_argument)
    if _is_nest(x):
        return _array_feed(x, y, sample_weight, batch_size, steps, shuffle, class_weight)
    if y is not None or sample_weight is not None:
        raise UsageError(
            "x is a dataset or a generator, which holds targets and weights itself; leave y and "
            "sample_weight out"
        )
    weights = (
        {int(key): float(value) for key, value in class_weight.items()} if class_weight else None
    )
    if isinstance(x, tf.data.Dataset):
        return _dataset_feed(x, steps, epochs, weights, folder, steps_argument)
    if isinstance(x, keras.utils.PyDataset):
        steps = steps or x.num_batches
        x = _batches_in_order(x)
    if not isinstance(x, Iterator):
        raise UsageError(
            "x must hold arrays, or be a tf.data.Dataset, a keras.utils.PyDataset or a generator, "
            f"not a {type(x).__name__}"
        )
    limit = None if steps is None else steps * epochs
    batches = map(_as_element, batches_of(x, limit, steps_argument))
    return _spooled(batches, None, steps, weights, folder)


def _checked(steps: Any, argument: str) -> int | None:
    if steps is None:
        return None
    try:
        number = operator.index(steps)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{argument} must be an int of at least 1, but it is {steps!r}")
    return number


def _array_feed(x, y, sample_weight, batch_size, steps, shuffle, class_weight) -> ArrayFeed:
    arrays = tuple(_as_arrays(each) for each in (x, y, sample_weight) if each is not None)
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight needs y")
    leaves = flatten(arrays)[0]
    rows = {len(leaf) for leaf in leaves}
    if len(rows) != 1 or not next(iter(rows)):
        raise UsageError(f"x and y must hold as many rows each, but they hold {sorted(rows)}")
    if class_weight:
        if sample_weight is not None:
            raise UsageError("class_weight and sample_weight cannot both be given")
        arrays = (*arrays, _class_weights(arrays[1], class_weight))
    if not batch_size:
        batch_size = math.ceil(rows.pop() / steps) if steps else 32
    return ArrayFeed(arrays, int(batch_size), bool(shuffle), steps)


def _dataset_feed(dataset, steps, epochs, weights, folder, steps_argument) -> Feed:
    try:
        variant = dataset._variant_tensor
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
        content = graph.numpy()
    except tf.errors.OpError as error:
        raise UsageError(f"The dataset cannot be sent: {one_line(error)}") from error
    batches = dataset.cardinality()
    if steps is None and batches == tf.data.INFINITE_CARDINALITY:
        raise UsageError(f"The dataset has no end; pass {steps_argument}")
    if not _runs_python(content):
        first = _first_of(dataset, weights)
        return DatasetFeed(content, dataset.element_spec, weights, first, steps)
    if steps is not None:
        limit, dataset = steps * epochs, dataset.repeat()
    else:
        limit = None if batches == tf.data.UNKNOWN_CARDINALITY else int(batches)
    elements = batches_of(iter(dataset), limit, steps_argument)
    return _spooled(elements, dataset.element_spec, steps, weights, folder)


def _spooled(batches, spec, steps, weights, folder) -> DatasetFeed:
    """A feed of batches that are made now, once."""
    path, spec = write_batches(batches, folder, spec)
    if spec is None:
        raise UsageError("The generator yields nothing; give at least one batch")
    first = _first_of(read_batches(path, spec), weights)
    return DatasetFeed(path, spec, weights, first, steps)


def _first_of(dataset: tf.data.Dataset, weights: dict | None) -> Any:
    for element in dataset.take(1):
        batch = _weighted(element if isinstance(element, tuple) else (element,), weights)
        leaves, structure = flatten(batch)
        if any(not leaf.shape.rank for leaf in leaves):
            raise UsageError("The dataset must yield batches; call batch() on it")
        return structure.rebuild([leaf.numpy() for leaf in leaves])
    raise UsageError("The dataset holds no batch; give at least one")


def _as_element(batch: Any) -> Any:
    parts = list(batch) if isinstance(batch, tuple) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    # In an element of a dataset a list would be one tensor.
    return keras.tree.lists_to_tuples(_as_arrays(tuple(parts)))


def _batches_in_order(data: Any) -> Iterator:
    """Batches of a PyDataset, over and over."""
    while True:
        for index in itertools.count() if data.num_batches is None else range(data.num_batches):
            yield data[index]
        data.on_epoch_end()


def _is_nest(x: Any) -> bool:
    if isinstance(x, (keras.utils.PyDataset, tf.data.Dataset)):
        return False
    leaves, _ = flatten(x)
    return bool(leaves)


def _as_arrays(value: Any) -> Any:
    leaves, structure = flatten(value)
    if not leaves:
        return np.asarray(value)
    return structure.rebuild([np.asarray(leaf) for leaf in leaves])


def _class_weights(y: Any, class_weight: Mapping) -> np.ndarray:
    if not is_tensor(y):
        raise UsageError("class_weight is for models with a single output")
    classes = y.argmax(-1) if y.ndim > 1 and y.shape[-1] > 1 else y.reshape(len(y))
    return np.array([class_weight.get(int(each), 1.0) for each in classes], np.float32)


def _weighted(element: tuple, weights: dict | None) -> tuple:
    """An element with the weights of its classes."""
    if weights is None:
        return element
    if len(element) != 2:
        raise UsageError("class_weight needs a dataset of (x, y)")
    x, y = element
    y = tf.convert_to_tensor(y)
    several = y.shape.rank is not None and y.shape.rank > 1 and y.shape[-1] != 1
    classes = tf.argmax(y, -1) if several else tf.reshape(y, [-1])
    table = [weights.get(each, 1.0) for each in range(max(weights) + 1)]
    beyond = tf.cast(classes, tf.int64) >= len(table)
    found = tf.gather(table, tf.where(beyond, tf.zeros_like(classes), classes))
    return x, y, tf.where(beyond, tf.ones_like(found), found)


def _graph_of(content: bytes) -> Any:
    from tensorflow.core.framework import graph_pb2

    graph = graph_pb2.GraphDef()
    graph.ParseFromString(content)
    return graph


def _runs_python(content: bytes) -> bool:
    graph = _graph_of(content)
    nodes = itertools.chain(graph.node, *(f.node_def for f in graph.library.function))
    return any(node.op in _PYTHON for node in nodes)


def _seeded(content: bytes, seed: int) -> bytes:
    """The graph with a seed for what shuffles without one, so that all processes agree."""
    graph = _graph_of(content)
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if "SeedGenerator" not in node.op and not node.op.startswith("Shuffle"):
            continue
        constants = [
            nodes[name.split(":")[0]] for name in node.input if name.split(":")[0] in nodes
        ]
        seeds = [
            each
            for each in constants
            if each.op == "Const"
            and list(each.attr["value"].tensor.int64_val) in ([], [0])
            and each.attr["value"].tensor.dtype == tf.int64.as_datatype_enum
        ]
        for place, each in enumerate(seeds):
            each.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(seed + place, tf.int64))
    return graph.SerializeToString()
