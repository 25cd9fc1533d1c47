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

import sys
import zlib
from collections.abc import Iterator
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.data import with_class_weight
from bigdl.orca.learn.tf2.sources import Part
from bigdl.training.batches import BatchLayout

__all__ = ["DatasetGraph", "DatasetRows", "StreamSource", "is_dataset", "shipped_dataset"]

_SEED = 1  # of shuffles that have none: the same on all workers


def is_dataset(made: Any) -> bool:
    """Whether something is a ``tf.data.Dataset``."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(made, tf.data.Dataset)


# -- on the driver --------------------------------------------------------------------------------


def shipped_dataset(dataset, name: str) -> DatasetGraph:
    """A dataset as a function that makes it again in a worker.

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
    return DatasetGraph(_with_seeds(graph), dataset.element_spec, is_off)


def _with_seeds(graph: bytes) -> bytes:
    """Let every shuffle of a pipeline do the same wherever the graph is loaded.

    Newer kinds of the operation keep their seeds outside of the graph, where loading it finds
    others, and a seed of (0, 0) means a random one.
    """
    import tensorflow as tf

    found = tf.compat.v1.GraphDef.FromString(graph)
    nodes = {node.name: node for node in found.node}
    for node in found.node:
        if not node.op.startswith("ShuffleDataset"):
            continue
        node.op = "ShuffleDataset"
        del node.input[4:]
        seeds = [nodes[name] for name in node.input[2:4]]
        values = [int(tf.make_ndarray(seed.attr["value"].tensor)) for seed in seeds]
        if not any(values):
            for seed in seeds:
                seed.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_SEED, tf.int64))
    return found.SerializeToString()


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


class DatasetRows:
    """A dataset with the face of :class:`~bigdl.orca.learn.tf2.opening.ColumnRows`.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Of batches ``(x, y)`` or ``(x, y, weights)``.
    sync : GradientSync

    Attributes
    ----------
    is_endless : bool
        Whether it tells that it has no end; of many datasets that is not known.
    """

    types = None

    def __init__(self, dataset, sync):
        import tensorflow as tf

        spec = dataset.element_spec
        if not isinstance(spec, tuple) or len(spec) not in (2, 3):
            raise UsageError(
                "The elements of a tf.data.Dataset must be (x, y) or (x, y, weights) to fit or "
                f"evaluate, they are {spec}"
            )
        if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec)):
            raise UsageError(
                "The tf.data.Dataset gives single rows; end it with .batch(batch_size)"
            )
        self._dataset, self._sync = dataset, sync
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self._is_shared = policy != tf.data.experimental.AutoShardPolicy.OFF
        self.is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        self.known = {
            "rows": 1,
            "fingerprint": 0,
            "drop_last": False,
            "window": 0,
            "types": None,
        }

    def example(self, types, assembly) -> tuple:
        """A batch of one row of zeros."""
        import tensorflow as tf

        def zeros(spec):
            shape = [1, *(1 if n is None else n for n in spec.shape[1:])]
            return tf.zeros(shape, spec.dtype)

        return tf.nest.map_structure(zeros, self._dataset.element_spec)

    def plan(self, settings, everyone) -> tuple[None, BatchLayout]:
        """The batches are cut already."""
        own = {"rows": [], "fingerprint": [], "shuffle": settings.shuffle}
        return None, BatchLayout(
            seed=settings.seed, batch_size=settings.batch_size, drop_last=settings.drop_last, **own
        )

    def take_types(self, types, training) -> None:
        """Values have the types that the dataset gives them."""

    def source(self, plan, assembly, settings, rank, window) -> StreamSource:
        """The batches of a training."""
        weights = settings.class_weight
        return StreamSource(self._dataset, self._sync, self._is_shared, weights)

    def batches(self, assembly, batch_size, world_size, most) -> Iterator[tuple[tuple, int]]:
        """Pairs of batch and number of rows, of this worker's part."""
        for index, batch in enumerate(self._dataset):
            if most is not None and index >= most:
                break
            own, rows = _own_part(batch, self._sync, self._is_shared)
            if rows:
                yield own, rows


class StreamSource:
    """The batches of a dataset, one after the other; see :mod:`bigdl.orca.learn.tf2.sources`.

    Parameters
    ----------
    dataset : tf.data.Dataset
    sync : GradientSync
    is_shared : bool
        Whether all workers read the same batches.
    class_weight : dict, optional
    """

    steps = None

    def __init__(self, dataset, sync, is_shared: bool, class_weight: dict | None):
        self._dataset, self._sync = dataset, sync
        self._is_shared, self._class_weight = is_shared, class_weight
        self._passes = 0  # that were begun
        self._place: tuple[int, int] | None = None
        self._iterator: Iterator = iter(())
        self._is_checked = False

    def seek(self, number: int, step: int) -> None:
        """Go to a batch of a pass; batches beyond its end belong to the following ones."""
        if self._place == (number, step):
            return
        while self._passes < number:  # a dataset counts the times that it was shuffled
            self._begin()
        self._begin()
        for _ in range(step):
            self._read(wrap=True)
        self._place = number, step

    def next(self, *, wrap: bool) -> Part:
        """The next batch; at the end of a pass the first of the next one, or nothing."""
        batch = self._read(wrap)
        own, rows, total = None, 0, 0
        if batch is not None:
            own, rows = _own_part(batch, self._sync, self._is_shared)
            total = _rows(batch)
        if self._is_shared:
            if not self._is_checked:
                self._check_equal(batch)
        else:
            total = int(sum(row[0] for row in self._sync.all_gather([float(rows)])))
        number, step = self._place or (0, 0)
        self._place = number, step + 1
        if not rows:
            return Part(None, 0, total)
        if self._class_weight is not None:
            own = with_class_weight(own, self._class_weight)
        return Part(own, rows, total)

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
        print_of = 0
        for leaf in tf.nest.flatten(batch):
            values = np.asarray(leaf.numpy())
            if values.dtype == object:  # texts
                values = values.astype("S")
            print_of = zlib.crc32(values.tobytes(), print_of)
        everyone = self._sync.all_gather([float(print_of)])
        if any(row != everyone[0] for row in everyone):
            raise UsageError(
                "The workers read different rows from the tf.data.Dataset; give its shuffle a "
                'seed, or take a part by config["rank"] and config["size"] and set '
                "options.experimental_distribute.auto_shard_policy to AutoShardPolicy.OFF"
            )


def _own_part(batch, sync, is_shared) -> tuple[Any, int]:
    import tensorflow as tf

    rows = _rows(batch)
    if not is_shared:
        return batch, rows
    low, high = (rows * rank // sync.world_size for rank in (sync.rank, sync.rank + 1))
    return tf.nest.map_structure(lambda leaf: leaf[low:high], batch), high - low


def _rows(batch) -> int:
    import tensorflow as tf

    return int(tf.shape(tf.nest.flatten(batch)[0])[0])
