"""The data of a search, from what users give to what trials take."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.rows import Creator, RayRows, Rows, SavedRows
from bigdl.orca.data.feeds import as_feed, kind_of, names_of
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.values import columns_of, named_by_shard

__all__ = ["trial_data"]

_DISTRIBUTED = ("Spark DataFrame", "SparkXShards", "path", "RayXShards", "Ray Dataset")


def trial_data(
    data: Any,
    feature_cols=None,
    label_cols=None,
    *,
    name: str,
    on_ray: bool,
    floats: str | None,
    keep: Callable[[Any], None] = lambda closer: None,
) -> Rows | Creator | RayRows | SavedRows:
    """Data as the trials of a search take it.

    Parameters
    ----------
    data : object
        Arrays or a pandas frame of the driver; Spark DataFrames, XShards, Parquet files and
        datasets of Ray; a DataLoader, or a function ``f(config)``.
    feature_cols, label_cols : str or sequence of str, optional
        Columns of frames.
    name : str
        For messages.
    on_ray : bool
        Whether rows that are not the driver's go to Ray's object store, or to files of this
        machine.
    floats : str, optional
        dtype of floating values; default: their own.
    keep : callable
        Is given what has to be closed after the search.

    Raises
    ------
    UsageError
        For data of another kind, and for rows that cannot become arrays.
    """
    kind = kind_of(data)
    if kind in _DISTRIBUTED:
        features, labels = names_of(feature_cols), names_of(label_cols)
        config = {"dtype": floats} if floats else {}
        feed = as_feed(data, features, labels, config, name=name)
        return _on_ray(feed) if on_ray else _on_this_machine(feed, keep)
    if kind == "array":
        return _rows(data, names_of(feature_cols), names_of(label_cols), floats, name)
    if callable(data) and not isinstance(data, type):
        return Creator(data)
    if kind == "DataLoader":
        return Creator(_Given(data))
    raise UsageError(
        f"{name} must be a tuple (x, y) of arrays, a pandas or Spark DataFrame with feature_cols "
        "and label_cols, XShards, Parquet files, a DataLoader, or a function of the configuration "
        f"that returns one, got {kind}"
    )


class _Given:
    """A loader that is the same for every configuration."""

    def __init__(self, loader):
        self.loader = loader

    def __call__(self, config):
        return self.loader


def _rows(data, features, labels, floats, name) -> Rows:
    if _is_tensors(data):
        data = tuple(data.tensors)
    try:
        columns = columns_of(data, features, labels, floats)
    except SourceError as error:
        raise UsageError(f"{name}: {error}") from None
    found = {column: values for column, key, values in columns if key is None}
    if len(found) < len(columns):
        raise UsageError(f"{name}: the features of a search cannot be a dict; pass a list of them")
    return _of_columns(found, features, labels, name)


def _is_tensors(data):
    return type(data).__name__ == "TensorDataset" and hasattr(data, "tensors")


def _of_columns(found: dict[str, np.ndarray], features, labels, name) -> Rows:
    if not features:
        features, labels = named_by_shard(list(found))
    if not labels:
        raise UsageError(f"{name} has no targets; pass (x, y), or label_cols with a frame")
    if not len(found[features[0]]):
        raise UsageError(f"{name} has no rows")
    x, y = ([np.ascontiguousarray(found[each]) for each in each] for each in (features, labels))
    return Rows(x, y, list(features))


def _on_ray(feed) -> RayRows:
    """Rows in Ray's object store, put there once, past the driver."""
    import ray

    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.data.feeds.on_ray import prepare_on_ray

    ingest = prepare_on_ray(feed, RayCluster.of_program(), 1)
    try:
        named = list(feed.feature_cols or ()), list(feed.label_cols or ())
        reference = ray.remote(_read).remote(ingest.reader, *named, feed.name)
        return RayRows(_checked(reference))
    finally:
        ingest.close()


def _checked(reference):
    """Wait for rows, so that what is wrong with them is said before a trial begins."""
    import ray

    try:
        ray.wait([reference], fetch_local=False)
        ray.get(ray.remote(_look).remote([reference]))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SourceError | UsageError):
            raise UsageError(str(cause)) from None
        raise
    return reference


def _look(references):
    """The error of an object, if it is one."""
    import ray

    ray.get(references)


def _on_this_machine(feed, keep) -> SavedRows:
    """Rows in files of this machine, written by one worker of the Spark that runs on it."""
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.engines.spark import SparkEngine

    if feed.kind in ("RayXShards", "Ray Dataset"):
        raise UsageError(f"{feed.name} is a {feed.kind}; pass backend='ray' to search on Ray")
    cluster = SparkCluster.from_active()
    if not cluster.is_local:
        raise UsageError(
            f"{feed.name} is a {feed.kind} of a cluster, but backend='local' searches on this "
            "machine; pass backend='ray' with init_ray_on_spark=True"
        )
    folder = tempfile.TemporaryDirectory(prefix="bigdl-rows-")
    keep(folder.cleanup)
    named = list(feed.feature_cols or ()), list(feed.label_cols or ())
    path, name = os.path.join(folder.name, "rows"), feed.name

    def write(worker):
        rows = _of_shard(worker.shard, *named, name)
        SavedRows.save(rows, Path(path))
        return [len(rows.features), len(rows.targets), list(rows.names)]

    features, targets, names = SparkEngine(cluster).run(write, feed, num_workers=1)[0]
    return SavedRows(
        [Path(path, f"x{i}.npy") for i in range(features)],
        [Path(path, f"y{i}.npy") for i in range(targets)],
        names,
    )


def _read(reader, features, labels, name) -> Rows:
    """The rows of an ingest for one worker; runs in a task of Ray."""
    from bigdl.runtime.shards.shard import SpoolWriter

    with tempfile.TemporaryDirectory(prefix="bigdl-rows-") as folder:

        def open_spool(part, specs):
            return SpoolWriter(folder, os.getpid(), f"{part}-0", specs)

        open_spool.place, open_spool.world_size = 0, 1
        (shard,) = reader(iter(()), open_spool).values()
        return _of_shard(shard, features, labels, name)


def _of_shard(shard, features, labels, name) -> Rows:
    found = {column: shard.column(column) for column in shard.names}
    if any(isinstance(values, dict) for values in found.values()):
        raise UsageError(f"{name}: the features of a search cannot be maps; select their values")
    return _of_columns(found, features, labels, name)
