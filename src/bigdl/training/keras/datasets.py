"""``tf.data`` as input: every worker has the whole pipeline and takes a part of its batches.

A function ``creator(config, batch_size)`` is called in every worker with the global batch size; a
dataset travels as the graph that TensorFlow makes of it.  Both must give batches.

*shared* (the rule)
    Worker r of N takes the r-th part of each batch, so the batches are those of one process,
    whatever N is.  All workers must read the same rows: they run the function under one seed, so
    ``shuffle`` without a seed of its own does the same on all of them.  That the first batches are
    equal is checked.
*sharded by the user*
    With ``experimental_distribute.auto_shard_policy = OFF`` a worker takes all that its pipeline
    gives; the function finds ``rank`` and ``size`` in `config`.  A batch of the training is then
    the batches of all workers together, and one whose rows end first goes on without.

An epoch is one pass over the dataset, or ``steps_per_epoch`` batches; a dataset that tells that it
has no end is refused without the latter.  To go on from a checkpoint, the batches that were seen
are read again and dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.training.batches import BatchLayout
from bigdl.training.keras.data import Part, Rows, with_class_weight

__all__ = ["DatasetGraph", "DatasetRows", "check_elements", "shipped_dataset", "with_seeds"]

_SEED = 1  # of shuffles that have none: the same on all workers


# -- on the driver --------------------------------------------------------------------------------


def shipped_dataset(dataset: Any, name: str) -> DatasetGraph:
    """Return a dataset as a function that makes it again in a worker.

    Raises
    ------
    UsageError
        If it depends on what cannot leave this process.
    """
    import tensorflow as tf

    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=2,  # fail
            strip_device_assignment=True,
        ).numpy()
    except tf.errors.OpError as error:
        raise UsageError(
            f"The dataset given as {name} cannot be shipped to the workers, since it runs Python "
            "code or depends on state of this process (from_generator, py_function, a lookup "
            "table); pass a function (config, batch_size) that makes it instead"
        ) from error
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_off = policy == tf.data.experimental.AutoShardPolicy.OFF
    return DatasetGraph(with_seeds(graph, _SEED), dataset.element_spec, is_off)


def with_seeds(graph: bytes, seed: int) -> bytes:
    """Give a pipeline's shuffles the same seeds wherever it is loaded; `seed` for those without.

    Newer kinds of the operation keep their seeds outside of the graph, where loading it finds
    others, and a seed of (0, 0) means a random one.
    """
    import tensorflow as tf

    definition = tf.compat.v1.GraphDef.FromString(graph)
    nodes = {node.name: node for node in definition.node}
    for node in definition.node:
        if not node.op.startswith("ShuffleDataset"):
            continue
        node.op = "ShuffleDataset"
        del node.input[4:]
        seeds = [nodes[name] for name in node.input[2:4]]
        values = [int(tf.make_ndarray(each.attr["value"].tensor)) for each in seeds]
        if not any(values):
            for each in seeds:
                each.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(seed, tf.int64))
    return definition.SerializeToString()


class DatasetGraph:
    """The graph of a dataset, which a worker calls like a function of the user's."""

    def __init__(self, graph: bytes, spec: Any, is_off: bool):
        self._graph, self._spec, self._is_off = graph, spec, is_off

    def __call__(self, config, batch_size):
        import tensorflow as tf

        variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph)
        dataset = tf.data.experimental.from_variant(variant, self._spec)
        if not self._is_off:
            return dataset
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)


# -- in a worker ----------------------------------------------------------------------------------


def check_elements(dataset: Any) -> None:
    """Refuse a dataset whose elements are no batches ``(x, y)`` or ``(x, y, weights)``."""
    import tensorflow as tf

    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise UsageError(
            "The elements of a tf.data.Dataset must be (x, y) or (x, y, weights) to fit or "
            f"evaluate, they are {spec}"
        )
    if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec)):
        raise UsageError("The tf.data.Dataset gives single rows; end it with .batch(batch_size)")


class DatasetRows(Rows):
    """The batches of a ``tf.data.Dataset``.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Of batches ``(x, y)`` or ``(x, y, weights)``.
    sync : GradientSync
    """

    def __init__(self, dataset: Any, sync: Any):
        import tensorflow as tf

        self._dataset, self._sync = dataset, sync
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self._is_shared = policy != tf.data.experimental.AutoShardPolicy.OFF
        self.is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        self.known = {"rows": 1, "fingerprint": 0, "drop_last": False, "window": 0, "types": None}
        self._class_weight: dict | None = None
        self._passes = 0  # that were begun
        self._place: tuple[int, int] | None = None
        self._iterator: Iterator = iter(())
        self._is_checked = False

    def example(self, types, assembly):
        import tensorflow as tf

        def zeros(spec):
            shape = [1, *(1 if n is None else n for n in spec.shape[1:])]
            return tf.zeros(shape, spec.dtype)

        return tf.nest.map_structure(zeros, self._dataset.element_spec)

    def plan(self, settings, everyone):
        return BatchLayout(
            seed=settings.seed,
            batch_size=settings.batch_size,
            rows=[],
            fingerprint=[],
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
        )

    def start(self, assembly, settings, rank, window):
        self._class_weight = settings.class_weight

    def batches(self, assembly, batch_size, world_size, limit):
        for batch in self._dataset if limit is None else self._dataset.take(limit):
            part, rows = self._part(batch)
            if rows:
                yield part, rows

    def seek(self, number, step):
        if self._place == (number, step):
            return
        while self._passes < number:  # a dataset counts the times that it was shuffled
            self._begin()
        self._begin()
        for _ in range(step):
            self._read(wrap=True)
        self._place = number, step

    def next(self, *, wrap):
        batch = self._read(wrap)
        part, rows, total = None, 0, 0
        if batch is not None:
            part, rows = self._part(batch)
            total = _rows(batch)
        if not self._is_shared:
            total = int(sum(row[0] for row in self._sync.all_gather([float(rows)])))
        elif not self._is_checked:
            self._check_equal(batch)
        number, step = self._place or (0, 0)
        self._place = number, step + 1
        if not rows:
            return Part(None, 0, total)
        if self._class_weight is not None:
            part = with_class_weight(part, self._class_weight)
        return Part(part, rows, total)

    def _begin(self):
        self._iterator = iter(self._dataset)
        self._passes += 1
        self._is_checked = False

    def _read(self, wrap):
        batch = next(self._iterator, None)
        if batch is None and wrap:
            self._begin()
            batch = next(self._iterator, None)
        return batch

    def _check_equal(self, batch):
        """Refuse rows that differ between the workers: some would be read twice, others never."""
        import numpy as np
        import tensorflow as tf

        self._is_checked = True
        checksum = 0
        for leaf in tf.nest.flatten(batch):
            values = np.asarray(leaf.numpy())
            if values.dtype == object:  # texts
                values = values.astype("S")
            checksum = zlib.crc32(values.tobytes(), checksum)
        everyone = self._sync.all_gather([float(checksum)])
        if any(row != everyone[0] for row in everyone):
            raise UsageError(
                "The workers read different rows from the tf.data.Dataset; give its shuffle a "
                'seed, or take a part by config["rank"] and config["size"] and set '
                "options.experimental_distribute.auto_shard_policy to AutoShardPolicy.OFF"
            )

    def _part(self, batch) -> tuple[Any, int]:
        """Return this worker's part of a batch and its number of rows."""
        import tensorflow as tf

        rows, rank, size = _rows(batch), self._sync.rank, self._sync.world_size
        if not self._is_shared:
            return batch, rows
        low, high = rows * rank // size, rows * (rank + 1) // size
        return tf.nest.map_structure(lambda leaf: leaf[low:high], batch), high - low


def _rows(batch) -> int:
    import tensorflow as tf

    return int(tf.shape(tf.nest.flatten(batch)[0])[0])
