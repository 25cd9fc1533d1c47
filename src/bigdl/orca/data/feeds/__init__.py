"""Feeds, which convert the inputs of ``fit`` and ``predict`` for workers, and their registry."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from bigdl.common.errors import UsageError
from bigdl.common.plugins import Registry, full_name
from bigdl.orca.data.lake_tables import is_table_object
from bigdl.runtime.shards.feed import Feed, InputPlan

__all__ = [
    "ON_RAY",
    "Feed",
    "InputPlan",
    "as_feed",
    "feed_of",
    "input_type_of",
    "is_path",
    "names_of",
    "register_feed",
]

ON_RAY = ("RayXShards", "Ray Dataset")
"""Input types that only ``backend="ray"`` supports."""


def as_feed(
    data: object,
    feature_cols: str | Sequence[str] | None = None,
    label_cols: str | Sequence[str] | None = None,
    config: dict | None = None,
    *,
    name: str | None = None,
    framework: str | None = None,
) -> Feed:
    """Check an input of ``fit``, ``evaluate`` or ``Engine.run`` and return its Feed.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, str, arrays, pandas.DataFrame, DataLoader, \
RayXShards, ray.data.Dataset or Feed
        A string, or a list of them, is the path of Parquet files, or of a Delta Lake or Iceberg
        table (:func:`~bigdl.orca.data.lake_tables.open_table`); arrays are an ndarray or a tuple,
        list or dict of them (:mod:`bigdl.runtime.shards.values`). A torch ``Dataset`` or a
        function ``creator(config, batch_size)`` may replace a ``DataLoader``.
    feature_cols, label_cols : str or sequence of str, optional
        Feature and target columns; for a loader, keys of batches that are dicts.
    config : dict, optional
        Options of the conversion, such as ``"dtype"``.
    name : str, optional
        Name of the input in messages, e.g. ``"validation_data"``.
    framework : str, optional
        Framework of the model; ``"keras"`` also supports ``tf.data.Dataset`` and Orca's Dataset.

    Raises
    ------
    UsageError
        If the input type is not supported, or the rows cannot be converted to tensors.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.feeds import as_feed
    >>> from bigdl.orca.engine import LocalEngine
    >>> feed = as_feed((np.zeros((10, 3)), np.ones(10)))
    >>> LocalEngine().run(lambda worker: worker.shard.rows, feed, num_workers=2)
    [5, 5]
    """
    feed = feed_of(data, feature_cols, label_cols, config, name=name, framework=framework)
    if feed is None:
        raise UsageError(
            f"{name or 'data'} must be a Spark DataFrame, SparkXShards, a path of Parquet files or "
            "of a Delta or Iceberg table, numpy arrays, a pandas DataFrame, a torch DataLoader or "
            "Dataset, or a function (config, batch_size) that returns one; with Ray also "
            f"RayXShards or a Ray Dataset; got {input_type_of(data)}",
            code="data-type",
            argument=name,
        )
    feed.check()
    return feed


def feed_of(
    data: object,
    feature_cols: str | Sequence[str] | None = None,
    label_cols: str | Sequence[str] | None = None,
    config: dict | None = None,
    *,
    name: str | None = None,
    framework: str | None = None,
) -> Feed | None:
    """Return the Feed of an input without checking its rows, or None for an unknown type.

    Takes the same arguments as :func:`as_feed`.
    """
    if isinstance(data, Feed):
        return data
    feed_class: Callable[..., Feed] | None = _registered(data)
    if feed_class is None:
        input_type = _input_type(data, framework)
        if input_type is None:
            return None
        feed_class = getattr(import_module(input_type.module), input_type.feed)
    return feed_class(data, names_of(feature_cols), names_of(label_cols), config, name=name)


def input_type_of(data: object, framework: str | None = None) -> str:
    """Return the name of an input's type, for messages and for comparing two inputs."""
    if isinstance(data, Feed):
        return data.kind
    registered = _registered(data)
    if registered is not None:
        return registered.kind
    input_type = _input_type(data, framework)
    if input_type is None:
        return f"{type(data).__module__}.{type(data).__qualname__}"
    return input_type.name


def names_of(columns: str | Sequence[str] | None) -> list:
    """Return column names as a list."""
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    try:
        return list(columns)
    except TypeError:  # e.g. a Spark Column, which the feed rejects
        return [columns]


# -- inputs of other packages ---------------------------------------------------------------------


def _check_feed_class(name: str, feed: object) -> type[Feed]:
    if not (isinstance(feed, type) and issubclass(feed, Feed)):
        raise UsageError(
            f"A feed must be a subclass of bigdl.orca.data.feeds.Feed, got {feed!r} for {name!r}",
            code="argument-type",
            argument="feed",
        )
    return feed


FEEDS = Registry[type[Feed]]("bigdl.feeds", "a feed", _check_feed_class)
"""Feeds of other packages, by the full name of their input type."""

_BUILT_IN = frozenset(
    ["bigdl", "builtins", "collections", "numpy", "pandas", "pyarrow", "pyspark", "ray", "torch"]
)
"""Packages whose types BigDL supports itself, without searching entry points."""


def _registered(data: object) -> type[Feed] | None:
    """Return the Feed that is registered for the input's class or one of its base classes."""
    for cls in type(data).__mro__:
        name = full_name(cls)
        may_be_offered = cls.__module__.partition(".")[0] not in _BUILT_IN
        if (may_be_offered or FEEDS.is_registered(name)) and (feed := FEEDS.get(name)) is not None:
            return feed
    return None


def register_feed(cls: type, feed: type[Feed]) -> type[Feed]:
    """Register the Feed of an input type, so that ``fit``, ``evaluate`` and ``predict`` accept it.

    The Feed also applies to subclasses of the type, and takes precedence over the input types of
    BigDL. Without an import, a package can provide its Feed through an entry point in the group
    ``bigdl.feeds``, with the full name of the type, such as ``mypackage.readers.Lines``.

    Parameters
    ----------
    cls : type
        Class of the input.
    feed : type
        Subclass of :class:`Feed`, called as ``feed(data, feature_cols, label_cols, config,
        name=)``.

    Returns
    -------
    type
        The registered `feed`.

    Raises
    ------
    UsageError
        If another Feed is registered for the type, or `feed` is not a subclass of Feed.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.feeds import as_feed, input_type_of, register_feed
    >>> from bigdl.orca.data.feeds.in_memory import ArrayFeed
    >>> class Lines(str):
    ...     pass
    >>> class LinesFeed(ArrayFeed):
    ...     kind = "Lines"
    ...     def __init__(self, data, feature_cols, label_cols, config, *, name=None):
    ...         rows = np.array([line.split() for line in data.splitlines()], "float32")
    ...         super().__init__((rows[:, :-1], rows[:, -1]), config=config, name=name)
    >>> feed = register_feed(Lines, LinesFeed)
    >>> input_type_of(Lines("1 2 3")), as_feed(Lines("1 2 3")).kind
    ('Lines', 'Lines')
    """
    if not isinstance(cls, type):
        raise UsageError(
            f"cls must be the class of an input, got {cls!r}",
            code="argument-type",
            argument="cls",
        )
    return FEEDS.register(full_name(cls), feed)


# -- input types and their Feeds ------------------------------------------------------------------


def is_path(data: object) -> bool:
    """Return True if an input is a path or a list of paths."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, str | os.PathLike) for each in data)
    return isinstance(data, str | os.PathLike)


def _is_in_memory(data: object) -> bool:
    from bigdl.runtime.shards.values import is_frame

    return (
        hasattr(data, "__array_interface__")
        or isinstance(data, dict | list | tuple)
        or is_frame(data)
    )


def _is_loader(data: object) -> bool:
    is_torch = _is_a("torch.utils.data", "DataLoader", "Dataset")
    return is_torch(data) or (callable(data) and not isinstance(data, type))


def _is_a(package: str, *names: str) -> Callable[[Any], bool]:
    """Return a predicate that tests an object's class by name, without importing the class."""
    return lambda data: any(
        c.__name__ in names and c.__module__.startswith(package) for c in type(data).__mro__
    )


def _is_tensors(data: object) -> bool:
    cls = type(data)  # excludes subclasses, which may override how rows are read
    return cls.__name__ == "TensorDataset" and cls.__module__.startswith("torch.utils.data")


class InputType(NamedTuple):
    """Input type: name, predicate, and module and class of its Feed."""

    name: str
    matches: Callable[[Any], bool]
    module: str
    feed: str
    framework: str | None = None  # the only framework that supports it


def _input_type(data: object, framework: str | None) -> InputType | None:
    """Return the first input type that matches the data and that the framework supports."""
    input_types = (each for each in INPUT_TYPES if each.framework in (None, framework))
    return next((each for each in input_types if each.matches(data)), None)


_SPARK_FRAME, _SPARK_SHARDS, _RAY_SHARDS = (
    _is_a("pyspark.sql.", "DataFrame"),
    _is_a("bigdl.orca.data.xshards", "SparkXShards"),
    _is_a("bigdl.orca.data.xshards", "RayXShards"),
)
_TF_DATA = _is_a("tensorflow.python.data", "DatasetV2")
_ORCA_DATA = _is_a("bigdl.orca.data.tf.data", "Dataset")
INPUT_TYPES = (
    InputType("tf.data.Dataset", _TF_DATA, f"{__name__}.loader", "TensorFlowFeed", "keras"),
    InputType("Orca Dataset", _ORCA_DATA, "bigdl.orca.data.tf.data", "DatasetFeed", "keras"),
    InputType("Spark DataFrame", _SPARK_FRAME, f"{__name__}.spark_dataframe", "SparkDataFrameFeed"),
    InputType("SparkXShards", _SPARK_SHARDS, f"{__name__}.xshards", "XShardsFeed"),
    InputType("path", is_path, f"{__name__}.parquet", "ParquetFeed"),
    InputType("array", _is_in_memory, f"{__name__}.in_memory", "ArrayFeed"),
    InputType("path", is_table_object, f"{__name__}.parquet", "ParquetFeed"),
    InputType("array", _is_tensors, f"{__name__}.in_memory", "ArrayFeed"),
    InputType("RayXShards", _RAY_SHARDS, f"{__name__}.xshards", "RayXShardsFeed"),
    InputType("Ray Dataset", _is_a("ray.data", "Dataset"), f"{__name__}.xshards", "RayDatasetFeed"),
    InputType("DataLoader", _is_loader, f"{__name__}.loader", "LoaderFeed"),
)
