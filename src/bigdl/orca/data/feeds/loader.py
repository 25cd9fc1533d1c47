"""Feeds of DataLoaders, Datasets and functions that create them.

The loader or function is sent to the workers, never its rows: every worker has the whole loader and
reads a part of it.

*Map-style data* is read again in every epoch, so random augmentation stays random. The loader's
sampler determines the rows of an epoch; worker r of N takes the rows r, r + N, r + 2N, ... without
padding or dropping. A loader with sequential or random sampling is split like any other input (the
shuffle is a permutation of (seed, epoch)). Any other sampler (weighted, a subset, a user's) runs
once per epoch on every worker with one seed of (seed, epoch), so all workers get the same indices.

*Iterable data* is read once to its end by every worker into a spool, and shuffled from there. Each
worker has a copy of the loader, so a loader that ignores the rank gives every worker the same rows.
The elements must be numbers and arrays of equal shapes.

The order of batches does not depend on the number of loading processes, because every batch has a
separate seed.
"""

from __future__ import annotations

import functools
import os
from typing import NoReturn

from bigdl.common.errors import UsageError
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.serialization import pickled_by_value
from bigdl.runtime.shards.feed import Feed, InputPlan, RowPredictor, not_predicted
from bigdl.runtime.shards.shard import LOADER_FILE, LoaderShard


class LoaderFeed(Feed):
    """Feed of a ``DataLoader``, a ``Dataset`` or a function ``creator(config, batch_size)``.

    Parameters
    ----------
    source : DataLoader, Dataset or callable
        A function is called in every worker and returns a DataLoader or Dataset.
    feature_cols, label_cols : sequence of str, optional
        Keys of features and targets, if batches are dicts.
    config : dict, optional
        Argument of the function.
    name : str, optional
        Name of the input in messages.

    Raises
    ------
    UsageError
        If the source cannot be pickled.
    """

    kind = "DataLoader"

    def __init__(
        self, source: object, feature_cols=None, label_cols=None, config=None, *, name=None
    ):
        self.name = name
        self.feature_cols = tuple(feature_cols) if feature_cols else None
        self.label_cols = tuple(label_cols) if label_cols else None
        self.source = source

    @functools.cached_property
    def _payload(self) -> bytes:
        source = self.shippable()
        is_function = callable(source) and not hasattr(source, "__getitem__")
        what = "function" if is_function else type(source).__name__
        return pickled_by_value(
            source,
            f"The {what} passed as {self.name or 'data'} cannot be sent to the workers",
            "pass a function (config, batch_size) that creates the loader in the worker",
        )

    def shippable(self) -> object:
        """Return the source in a picklable form."""
        return self.source

    def check(self) -> None:
        self._payload  # noqa: B018 - computes and caches it

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> NoReturn:
        raise not_predicted(type(self.source).__name__)

    def prepare(self, cluster: Cluster, num_workers: int, *, name: str = "data") -> InputPlan:
        payload = self._payload

        def read(batches, open_spool):
            writer = open_spool(name, [])
            with open(os.path.join(writer.path, LOADER_FILE), "wb") as file:
                file.write(payload)
            return {name: LoaderShard(writer.finish())}

        return InputPlan(None, read)


class TensorFlowFeed(LoaderFeed):
    """Feed of a ``tf.data.Dataset`` for Keras models; workers receive the Dataset's graph."""

    def shippable(self) -> object:
        from bigdl.training.keras.data import shipped_dataset

        return shipped_dataset(self.source, self.name or "data")

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> NoReturn:
        raise UsageError(
            "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
            "pandas DataFrames and paths of Parquet files, got a tf.data.Dataset; call "
            "get_model().predict",
            code="data-type",
        )
