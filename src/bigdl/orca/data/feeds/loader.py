"""DataLoaders, Datasets and functions that make them, as input.

What travels is the loader itself or the function, never its rows: every worker has the whole
loader and takes a part of it.

*map-style data* is read live in every epoch, so random augmentation stays random. The rows of an
epoch are those that the loader's sampler gives; worker r of N takes number r, r + N, r + 2N, ...
of them, without padding or dropping. A loader that reads in order or that shuffles is cut like any
other input (the shuffle is a permutation of (seed, epoch)); another sampler (weighted, a subset,
one of the user's) is asked once per epoch on every worker under one seed of (seed, epoch), so that
all of them get the same list.

*iterable data* is read once by every worker to its end into a spool, and shuffled from there. Each
worker reads its own loader: one that does not know its rank gives every worker the same rows. Its
elements must be numbers and arrays of equal shapes.

The order, and so the batches, do not depend on how many processes load: every batch is made under
a seed of its own.
"""

import os
from typing import Any

from bigdl.runtime.cluster import Cluster
from bigdl.runtime.serialization import pickled_by_value
from bigdl.runtime.shards.feed import Feed, InputPlan
from bigdl.runtime.shards.shard import LOADER_FILE, LoaderShard


class LoaderFeed(Feed):
    """A ``DataLoader``, a ``Dataset`` or a function ``creator(config, batch_size)``.

    Parameters
    ----------
    source : DataLoader, Dataset or callable
        A function is called in every worker and returns a DataLoader or Dataset.
    feature_cols, label_cols : sequence of str, optional
        Keys of the model's inputs and the targets, where batches are dicts.
    config : dict, optional
        For the function.
    name : str, optional

    Raises
    ------
    UsageError
        If it cannot be pickled.
    """

    kind = "DataLoader"

    def __init__(self, source: Any, feature_cols=None, label_cols=None, config=None, *, name=None):
        self.name = name
        self.feature_cols = tuple(feature_cols) if feature_cols else None
        self.label_cols = tuple(label_cols) if label_cols else None
        is_function = callable(source) and not hasattr(source, "__getitem__")
        what = "function" if is_function else type(source).__name__
        self._payload = pickled_by_value(
            source,
            f"The {what} given as {name or 'data'} cannot be shipped to the workers",
            "pass a function (config, batch_size) that makes the loader in the worker instead",
        )

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        payload = self._payload

        def read(batches, open_spool):
            writer = open_spool(name, [])
            with open(os.path.join(writer.path, LOADER_FILE), "wb") as file:
                file.write(payload)
            return {name: LoaderShard(writer.finish())}

        return InputPlan(None, read)
