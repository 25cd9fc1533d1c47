"""Inputs of ``fit`` and ``evaluate``: one class per kind, and the function that chooses."""

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
    "is_path",
    "kind_of",
    "names_of",
    "register_feed",
]

ON_RAY = ("RayXShards", "Ray Dataset")
"""The kinds of input that only ``backend="ray"`` takes."""


def as_feed(
    data: Any,
    feature_cols: str | Sequence[str] | None = None,
    label_cols: str | Sequence[str] | None = None,
    config: dict | None = None,
    *,
    name: str | None = None,
    framework: str | None = None,
) -> Feed:
    """Return the Feed that belongs to an input of ``fit``, ``evaluate`` or ``Engine.run``.

    Parameters
    ----------
    data : pyspark.sql.DataFrame, SparkXShards, str, arrays, pandas.DataFrame, DataLoader, \
RayXShards, ray.data.Dataset or Feed
        A string, or a list of them, is the path of Parquet files, or of a Delta Lake or Iceberg
        table (:func:`~bigdl.orca.data.lake_tables.open_table`); arrays are an ndarray or a tuple,
        list or dict of them (:mod:`bigdl.runtime.shards.values`). A torch ``Dataset`` or a
        function ``creator(config, batch_size)`` stands for a ``DataLoader``.
    feature_cols, label_cols : str or sequence of str, optional
        Columns for the model and targets; of a loader, keys of batches that are dicts.
    config : dict, optional
    name : str, optional
        What messages call the input, e.g. ``"validation_data"``.
    framework : str, optional
        Of the model: ``"keras"`` also takes a ``tf.data.Dataset`` and a Dataset of Orca.

    Raises
    ------
    UsageError
        For an input of another kind, or rows that cannot become tensors.

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
            f"RayXShards or a Ray Dataset; got {kind_of(data)}",
            code="data-type",
            argument=name,
        )
    feed.check()
    return feed


def feed_of(
    data: Any,
    feature_cols: str | Sequence[str] | None = None,
    label_cols: str | Sequence[str] | None = None,
    config: dict | None = None,
    *,
    name: str | None = None,
    framework: str | None = None,
) -> Feed | None:
    """Return the Feed of an input, its rows unchecked; None for an input of no kind.

    The arguments are those of :func:`as_feed`.
    """
    if isinstance(data, Feed):
        return data
    make: Callable[..., Feed] | None = _registered(data)
    if make is None:
        kind = _kind(data, framework)
        if kind is None:
            return None
        make = getattr(import_module(kind.module), kind.feed)
    return make(data, names_of(feature_cols), names_of(label_cols), config, name=name)


def kind_of(data: Any, framework: str | None = None) -> str:
    """Return the name of an input's type, for messages and to compare two inputs."""
    if isinstance(data, Feed):
        return data.kind
    registered = _registered(data)
    if registered is not None:
        return registered.kind
    kind = _kind(data, framework)
    return f"{type(data).__module__}.{type(data).__qualname__}" if kind is None else kind.name


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


# -- inputs of other packages ---------------------------------------------------------------------


def _checked(name: str, feed: object) -> type[Feed]:
    if not (isinstance(feed, type) and issubclass(feed, Feed)):
        raise UsageError(
            f"A feed should be a class over bigdl.orca.data.feeds.Feed, but got {feed!r} for "
            f"{name!r}",
            code="argument-type",
            argument="feed",
        )
    return feed


FEEDS = Registry[type[Feed]]("bigdl.feeds", "a feed", _checked)
"""The Feeds of other packages, by the full names of the types that they are for."""

_OWN = frozenset(
    ["bigdl", "builtins", "collections", "numpy", "pandas", "pyarrow", "pyspark", "ray", "torch"]
)
"""Packages whose types BigDL reads by itself, so that no entry point is looked for."""


def _registered(data: object) -> type[Feed] | None:
    """Return the Feed that is registered for the type of an input, or for a base of it."""
    for cls in type(data).__mro__:
        name = full_name(cls)
        may_be_offered = cls.__module__.partition(".")[0] not in _OWN
        if (may_be_offered or FEEDS.is_registered(name)) and (feed := FEEDS.get(name)) is not None:
            return feed
    return None


def register_feed(cls: type, feed: type[Feed]) -> type[Feed]:
    """Register the Feed of a type of input, so that ``fit``, ``evaluate`` and ``predict`` take it.

    It is also for subclasses of the type, and comes before the kinds of input that BigDL knows. A
    package that a program need not import offers its Feed by an entry point of the group
    ``bigdl.feeds``, under the full name of the type, such as ``mypackage.readers.Lines``.

    Parameters
    ----------
    cls : type
        Of the input.
    feed : type
        A class over :class:`Feed`, made as ``feed(data, feature_cols, label_cols, config, name=)``.

    Returns
    -------
    type
        The Feed.

    Raises
    ------
    UsageError
        If another Feed is registered for the type, or it is no class of Feeds.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.orca.data.feeds import as_feed, kind_of, register_feed
    >>> from bigdl.orca.data.feeds.in_memory import ArrayFeed
    >>> class Lines(str):
    ...     pass
    >>> class LinesFeed(ArrayFeed):
    ...     kind = "Lines"
    ...     def __init__(self, data, feature_cols, label_cols, config, *, name=None):
    ...         rows = np.array([line.split() for line in data.splitlines()], "float32")
    ...         super().__init__((rows[:, :-1], rows[:, -1]), config=config, name=name)
    >>> feed = register_feed(Lines, LinesFeed)
    >>> kind_of(Lines("1 2 3")), as_feed(Lines("1 2 3")).kind
    ('Lines', 'Lines')
    """
    if not isinstance(cls, type):
        raise UsageError(
            f"register_feed expects the type of an input, but got {cls!r}",
            code="argument-type",
            argument="cls",
        )
    return FEEDS.register(full_name(cls), feed)


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


class Kind(NamedTuple):
    """A kind of input: its name, the test of an object, module and class of its Feed."""

    name: str
    is_kind: Callable[[Any], bool]
    module: str
    feed: str
    framework: str | None = None  # whose models alone take it


def _kind(data: Any, framework: str | None) -> Kind | None:
    """Return the kind of an input, if a model of the framework takes it."""
    kinds = (kind for kind in KINDS if kind.framework in (None, framework))
    return next((kind for kind in kinds if kind.is_kind(data)), None)


_FRAME, _SHARDS, _RAY_SHARDS = (
    _is_a("pyspark.sql.", "DataFrame"),
    _is_a("bigdl.orca.data.xshards", "SparkXShards"),
    _is_a("bigdl.orca.data.xshards", "RayXShards"),
)
_TF_DATA = _is_a("tensorflow.python.data", "DatasetV2")
_ORCA_DATA = _is_a("bigdl.orca.data.tf.data", "Dataset")
KINDS = (
    Kind("tf.data.Dataset", _TF_DATA, f"{__name__}.loader", "TensorFlowFeed", "keras"),
    Kind("Orca Dataset", _ORCA_DATA, "bigdl.orca.data.tf.data", "DatasetFeed", "keras"),
    Kind("Spark DataFrame", _FRAME, f"{__name__}.spark_dataframe", "SparkDataFrameFeed"),
    Kind("SparkXShards", _SHARDS, f"{__name__}.xshards", "XShardsFeed"),
    Kind("path", is_path, f"{__name__}.parquet", "ParquetFeed"),
    Kind("array", _is_in_memory, f"{__name__}.in_memory", "ArrayFeed"),
    Kind("path", is_table_object, f"{__name__}.parquet", "ParquetFeed"),
    Kind("array", _is_tensors, f"{__name__}.in_memory", "ArrayFeed"),
    Kind("RayXShards", _RAY_SHARDS, f"{__name__}.xshards", "RayXShardsFeed"),
    Kind("Ray Dataset", _is_a("ray.data", "Dataset"), f"{__name__}.xshards", "RayDatasetFeed"),
    Kind("DataLoader", _is_loader, f"{__name__}.loader", "LoaderFeed"),
)
