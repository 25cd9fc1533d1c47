"""Inputs of ``fit`` and ``evaluate``: one class per kind, and the function that chooses."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.tables import is_table_object
from bigdl.runtime.shards.feed import Feed, InputPlan

__all__ = ["ON_RAY", "Feed", "InputPlan", "as_feed", "is_path", "kind_of", "names_of"]

ON_RAY = ("RayXShards", "Ray Dataset")
"""The kinds of input that only ``backend="ray"`` takes."""


def as_feed(data, feature_cols=None, label_cols=None, config=None, *, name=None) -> Feed:
    """The Feed that belongs to an input.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, str, arrays, pandas.DataFrame, DataLoader, \
RayXShards, ray.data.Dataset or Feed
        A string, or a list of them, is the path of Parquet files, or of a Delta Lake or Iceberg
        table (:func:`~bigdl.orca.data.tables.open_table`); arrays are an ndarray or a tuple,
        list or dict of them (:mod:`bigdl.runtime.shards.values`). A torch ``Dataset`` or a
        function ``creator(config, batch_size)`` stands for a ``DataLoader``.
    feature_cols, label_cols : str or sequence of str, optional
        Columns for the model and targets; of a loader, keys of batches that are dicts.
    config : dict, optional
    name : str, optional
        What messages call the input, e.g. ``"validation_data"``.

    Raises
    ------
    UsageError
        For an input of another kind.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.feeds import as_feed
    >>> from bigdl.orca.engine import LocalEngine
    >>> feed = as_feed((np.zeros((10, 3)), np.ones(10)))
    >>> LocalEngine().run(lambda worker: worker.shard.rows, feed, num_workers=2)
    [5, 5]
    """
    if isinstance(data, Feed):
        return data
    for _, is_of_kind, module, cls in _KINDS:
        if is_of_kind(data):
            make = getattr(import_module(f"{__name__}.{module}"), cls)
            return make(data, names_of(feature_cols), names_of(label_cols), config, name=name)
    raise UsageError(
        f"{name or 'data'} must be a Spark DataFrame, SparkXShards, a path of Parquet files or "
        "of a Delta or Iceberg table, numpy arrays, a pandas DataFrame, a torch DataLoader or "
        "Dataset, or a function (config, batch_size) that returns one; with Ray also RayXShards or "
        "a Ray Dataset; got "
        f"{kind_of(data)}",
        code="data-type",
        argument=name,
    )


def kind_of(data: Any) -> str:
    """Return the name of an input's type, for messages and to compare two inputs."""
    if isinstance(data, Feed):
        return data.kind
    given = f"{type(data).__module__}.{type(data).__qualname__}"
    return next((kind for kind, is_of_kind, *_ in _KINDS if is_of_kind(data)), given)


def names_of(columns: str | Sequence[str] | None) -> list:
    """Names of columns as a list."""
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    try:
        return list(columns)
    except TypeError:  # e.g. a Column, which the feed refuses
        return [columns]


# -- the kinds of input, and how each becomes a Feed ---------------------------------------------


def is_path(data: Any) -> bool:
    """Return True if an input is a path, or a list of them."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | os.PathLike) for each in data)
    return isinstance(data, str | os.PathLike)


def _is_in_memory(data: Any) -> bool:
    from bigdl.runtime.shards.values import is_frame

    return (
        hasattr(data, "__array_interface__")
        or isinstance(data, dict | list | tuple)
        or is_frame(data)
    )


def _is_loader(data: Any) -> bool:
    is_torch = _is_a("torch.utils.data", "DataLoader", "Dataset")
    return is_torch(data) or (callable(data) and not isinstance(data, type))


def _is_a(package: str, *names: str) -> Callable[[Any], bool]:
    """Return a test of an object's class that does not import it."""
    return lambda data: any(
        c.__name__ in names and c.__module__.startswith(package) for c in type(data).__mro__
    )


def _is_tensors(data: Any) -> bool:
    cls = type(data)  # not of a subclass, which may read its rows in its own way
    return cls.__name__ == "TensorDataset" and cls.__module__.startswith("torch.utils.data")


_KINDS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    # name, test, module and class of the Feed
    (
        "Spark DataFrame",
        _is_a("pyspark.sql.", "DataFrame"),
        "spark_dataframe",
        "SparkDataFrameFeed",
    ),
    ("SparkXShards", _is_a("bigdl.orca.data.xshards", "SparkXShards"), "xshards", "XShardsFeed"),
    ("path", is_path, "parquet", "ParquetFeed"),
    ("path", is_table_object, "parquet", "ParquetFeed"),
    ("array", _is_in_memory, "in_memory", "ArrayFeed"),
    ("array", _is_tensors, "in_memory", "ArrayFeed"),
    ("RayXShards", _is_a("bigdl.orca.data.xshards", "RayXShards"), "xshards", "RayXShardsFeed"),
    ("Ray Dataset", _is_a("ray.data", "Dataset"), "xshards", "RayDatasetFeed"),
    ("DataLoader", _is_loader, "loader", "LoaderFeed"),
)
