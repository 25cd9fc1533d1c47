"""Orca's Dataset: a ``tf.data`` pipeline over the rows of XShards (BigDL 2.x API)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.orca.data.feeds.xshards import XShardsFeed
from bigdl.orca.data.xshards import SparkXShards
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.shards.feed import RowPredictor, RowSampler

if TYPE_CHECKING:
    from bigdl.common.types import Tensors

__all__ = ["Dataset"]


class Dataset:
    """Rows of XShards with TensorFlow functions that are applied to each row.

    Create it with :meth:`from_tensor_slices` or :meth:`from_feature_table` and pass it as `data` to
    the Keras Estimator.  It is evaluated lazily.

    Parameters
    ----------
    shards : SparkXShards
        Shards of arrays with equal numbers of rows, or of tuples or dicts of such arrays.
    functions : sequence of callable
        Functions that are applied to each row.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data import XShards
    >>> from bigdl.orca.data.tf.data import Dataset
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = XShards.partition({"x": np.arange(4.0), "y": np.arange(4)}, num_shards=2)
    >>> dataset = Dataset.from_tensor_slices(rows).map(lambda row: (row["x"] * 10, row["y"]))
    >>> [x.tolist() for x, y in dataset.get_xshards().collect()]  # or pass it to fit
    [[0.0, 10.0], [20.0, 30.0]]
    """

    def __init__(self, shards: SparkXShards, functions: tuple[Callable, ...] = ()):
        self._shards, self._functions = shards, functions

    @staticmethod
    def from_tensor_slices(xshards: SparkXShards) -> Dataset:
        """Create a Dataset of the rows of XShards, whose shards are arrays, tuples or dicts.

        Raises
        ------
        UsageError
            If `xshards` is not a SparkXShards.
        """
        if not isinstance(xshards, SparkXShards):
            raise UsageError(
                f"only datasets created from XShards are supported, got {type(xshards).__name__}",
                code="data-type",
                argument="xshards",
            )
        return Dataset(xshards)

    @staticmethod
    def from_feature_table(tbl) -> Dataset:
        """Create a Dataset of a FeatureTable's rows, each a dict of its columns."""
        frame = getattr(tbl, "df", None)
        if frame is None or not hasattr(frame, "mapInArrow"):
            raise UsageError(
                f"from_feature_table needs a FeatureTable of Friesian, got {type(tbl).__name__}",
                code="data-type",
                argument="tbl",
            )
        return Dataset(_columns_of(frame))

    def map(self, map_func: Callable) -> Dataset:
        """Apply a TensorFlow function to every row.

        The function is applied once per row, not in every epoch.

        Parameters
        ----------
        map_func : callable
            Function of an element, or of its parts if elements are tuples.
        """
        if not callable(map_func):
            raise UsageError(
                f"map needs a function of a row, got {type(map_func).__name__}",
                code="argument-type",
                argument="map_func",
            )
        return Dataset(self._shards, (*self._functions, map_func))

    def get_xshards(self) -> SparkXShards:
        """Apply all functions to the rows and return the results as XShards."""
        if not self._functions:
            return self._shards
        functions = self._functions
        return self._shards.transform_shard(lambda shard: _apply_to_rows(shard, functions))


class DatasetFeed(XShardsFeed):
    """Feed of a :class:`Dataset` with elements ``(x, y)``; for predictions, x alone is allowed.

    The elements determine the names of the columns.
    """

    def __init__(self, dataset, feature_cols=None, label_cols=None, config=None, *, name=None):
        super().__init__(dataset.get_xshards(), None, None, config, name=name)

    def labelled(self) -> SparkXShards:
        return self.shards.transform_shard(_as_xy)

    def predict(self, predictor: RowPredictor, cluster: Cluster) -> SparkXShards:
        return XShardsFeed(self.shards.transform_shard(_as_x)).predict(predictor, cluster)

    def sample(self, sampler: RowSampler, partitions: int, cluster: Cluster) -> list:
        return XShardsFeed(self.shards.transform_shard(_as_x)).sample(sampler, partitions, cluster)


def _columns_of(frame) -> SparkXShards:
    """Convert the partitions of a DataFrame to dicts of arrays."""
    from bigdl.orca.data.xshards.frames import frames_of

    return SparkXShards.lazy(frames_of(frame)).transform_shard(_arrays)


def _arrays(frame) -> dict[str, np.ndarray]:
    """Convert the columns of a pandas frame to arrays with dtypes for TensorFlow."""
    return {name: _array(frame[name].to_numpy()) for name in frame.columns}


def _array(values: np.ndarray) -> np.ndarray:
    if values.dtype == object and len(values) and not isinstance(values[0], str):
        cells = [cell.toArray() if hasattr(cell, "toArray") else cell for cell in values]
        values = np.stack([np.asarray(cell) for cell in cells])
    return values.astype("float32") if values.dtype == "float64" else values


def _apply_to_rows(shard: object, functions) -> Tensors:
    """Apply functions to the rows of a shard."""
    tf = require("tensorflow", "tf")
    dataset = tf.data.Dataset.from_tensor_slices(shard)
    for function in functions:
        dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    rows = int(dataset.cardinality())
    batch = next(iter(dataset.batch(max(1, rows))), None)
    if batch is None:
        spec = dataset.batch(1).element_spec
        batch = tf.nest.map_structure(lambda s: tf.zeros([0, *s.shape[1:]], s.dtype), spec)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), batch)


def _as_xy(element):
    if isinstance(element, dict) and set(element) == {"x", "y"}:
        return element
    if isinstance(element, tuple | list) and len(element) == 2:
        return {"x": element[0], "y": element[1]}
    raise UsageError(
        "Elements of the Dataset must be (x, y) for fit and evaluate; use map to create them",
        code="data-structure",
    )


def _as_x(element):
    if isinstance(element, tuple | list) and len(element) == 2:
        element = element[0]
    return element if isinstance(element, dict) and "x" in element else {"x": element}
