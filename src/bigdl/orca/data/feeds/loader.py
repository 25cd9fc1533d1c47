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

import functools
import os
from typing import Any, NoReturn

from bigdl.common.errors import UsageError
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.serialization import pickled_by_value
from bigdl.runtime.shards.feed import Feed, InputPlan, RowPredictor, not_predicted
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
        self.source = source

    @functools.cached_property
    def _payload(self) -> bytes:
        source = self.shippable()
        is_function = callable(source) and not hasattr(source, "__getitem__")
        what = "function" if is_function else type(source).__name__
        return pickled_by_value(
            source,
            f"The {what} given as {self.name or 'data'} cannot be shipped to the workers",
            "pass a function (config, batch_size) that makes the loader in the worker instead",
        )

    def shippable(self) -> Any:
        """Return the source in a form that can be pickled."""
        return self.source

    def check(self) -> None:
        self._payload  # noqa: B018 - is made, and kept

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
    """A ``tf.data.Dataset``, which travels as its graph; for models of Keras."""

    def shippable(self) -> Any:
        from bigdl.training.keras.data import shipped_dataset

        return shipped_dataset(self.source, self.name or "data")

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> NoReturn:
        raise UsageError(
            "Only XShards or Spark DataFrame are supported for predict, besides numpy arrays, "
            "pandas DataFrames and paths of Parquet files, got a tf.data.Dataset; use "
            "get_model().predict for it",
            code="data-type",
        )
