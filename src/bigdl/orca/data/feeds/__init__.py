"""Inputs of ``fit`` and ``evaluate``: one class per kind, and the function that chooses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.feed import Feed, Ingest

__all__ = ["ON_RAY", "Feed", "Ingest", "as_feed", "is_path", "kind_of", "names_of"]

ON_RAY = ("RayXShards", "Ray Dataset")
"""The kinds of input that only ``backend="ray"`` takes."""


def as_feed(data, feature_cols=None, label_cols=None, config=None, *, name=None) -> Feed:
    """The Feed that belongs to an input.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, str, arrays, pandas.DataFrame, DataLoader, \
RayXShards, ray.data.Dataset or Feed
        A string, or a list of them, is the path of Parquet files; arrays are an ndarray or a tuple,
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
    """
    if isinstance(data, Feed):
        return data
    for _, is_of_kind, make in _KINDS:
        if is_of_kind(data):
            return make(data, names_of(feature_cols), names_of(label_cols), config, name)
    given = f"{type(data).__module__}.{type(data).__qualname__}"
    raise UsageError(
        f"{name or 'data'} must be a Spark DataFrame, SparkXShards, a path of Parquet files, numpy "
        "arrays, a pandas DataFrame, a torch DataLoader or Dataset, or a function (config, "
        f"batch_size) that returns one; with Ray also RayXShards or a Ray Dataset; got {given}"
    )


def kind_of(data: Any) -> str:
    """What an input is, for messages and to tell whether two are alike."""
    if isinstance(data, Feed):
        return data.kind
    given = f"{type(data).__module__}.{type(data).__qualname__}"
    return next((kind for kind, is_of_kind, _ in _KINDS if is_of_kind(data)), given)


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


def _is_spark_frame(data: Any) -> bool:
    if not any(c.__module__.startswith("pyspark.sql.") for c in type(data).__mro__):
        return False
    from bigdl.orca.data.feeds.spark_dataframe import is_connect

    return hasattr(data, "mapInArrow") or is_connect(data)


def _spark_frame(data, features, labels, config, name):
    from bigdl.orca.data.feeds.spark_dataframe import SparkDataFrameFeed

    return SparkDataFrameFeed(data, features, labels, config, name=name)


def _is_xshards(data: Any) -> bool:
    from bigdl.orca.data.xshards import SparkXShards

    return isinstance(data, SparkXShards)


def _xshards(data, features, labels, config, name):
    from bigdl.orca.data.feeds.xshards import XShardsFeed

    return XShardsFeed(data, features, labels, config, name=name)


def is_path(data: Any) -> bool:
    """Whether an input is a path, or a list of them."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | os.PathLike) for each in data)
    return isinstance(data, str | os.PathLike)


def _parquet(data, features, labels, config, name):
    from bigdl.orca.data.feeds.parquet import ParquetFeed

    return ParquetFeed(data, features, labels, config, name=name)


def _is_in_memory(data: Any) -> bool:
    from bigdl.runtime.shards.values import is_frame

    return (
        hasattr(data, "__array_interface__")
        or isinstance(data, dict | list | tuple)
        or is_frame(data)
    )


def _in_memory(data, features, labels, config, name):
    from bigdl.orca.data.feeds.in_memory import ArrayFeed

    return ArrayFeed(data, features, labels, config, name=name)


def _is_tensors(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(data) is torch.utils.data.TensorDataset


def _tensors(data, features, labels, config, name):
    from bigdl.orca.data.feeds.in_memory import ArrayFeed

    return ArrayFeed(tuple(data.tensors), config=config, keep_dtypes=True, name=name)


def _is_loader(data: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(
        data, torch.utils.data.DataLoader | torch.utils.data.Dataset
    ):
        return True
    return callable(data) and not isinstance(data, type)


def _loader(data, features, labels, config, name):
    from bigdl.orca.data.feeds.loader import LoaderFeed

    return LoaderFeed(data, features, labels, config, name=name)


def _is_ray_xshards(data: Any) -> bool:
    return any(c.__module__ == "bigdl.orca.data.xshards.ray" for c in type(data).__mro__)


def _ray_xshards(data, features, labels, config, name):
    from bigdl.orca.data.feeds.on_ray import RayXShardsFeed

    return RayXShardsFeed(data, features, labels, config, name=name)


def _is_ray_dataset(data: Any) -> bool:
    from bigdl.orca.data.ray_exchange import is_ray_dataset

    return is_ray_dataset(data)


def _ray_dataset(data, features, labels, config, name):
    from bigdl.orca.data.feeds.on_ray import RayDatasetFeed

    return RayDatasetFeed(data, features, labels, config, name=name)


_KINDS = (
    ("Spark DataFrame", _is_spark_frame, _spark_frame),
    ("SparkXShards", _is_xshards, _xshards),
    ("path", is_path, _parquet),
    ("array", _is_in_memory, _in_memory),
    ("array", _is_tensors, _tensors),
    ("RayXShards", _is_ray_xshards, _ray_xshards),
    ("Ray Dataset", _is_ray_dataset, _ray_dataset),
    ("DataLoader", _is_loader, _loader),
)
