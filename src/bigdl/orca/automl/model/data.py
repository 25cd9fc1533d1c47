"""The data of a search: what users pass, and the arrays or loaders that trials take of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import batch_size_of
from bigdl.orca.data.feeds import as_feed, kind_of, names_of
from bigdl.runtime.shards.batches import permutation
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.values import columns_of, named_by_shard

__all__ = ["Batch", "Creator", "RayRows", "Rows", "SavedRows", "opened", "trial_data"]

_DISTRIBUTED = ("Spark DataFrame", "SparkXShards", "path", "RayXShards", "Ray Dataset")


@dataclass(frozen=True)
class Batch:
    """Rows of a batch, before they are made.

    Attributes
    ----------
    rows : int
    take : callable
        ``take(start, stop)`` gives some of its rows, as the framework takes them.
    """

    rows: int
    take: Callable[[int, int], tuple]


@dataclass
class Rows:
    """Arrays of as many rows; all trials of a machine share their memory.

    Attributes
    ----------
    features, targets : list of ndarray
    names : list of str
        Of the features.
    """

    features: list[np.ndarray]
    targets: list[np.ndarray]
    names: Sequence[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.features[0])

    def batches(self, config: Mapping[str, Any], epoch: int | None) -> Iterator[Batch]:
        """Cut the rows into batches, which take ``(features, targets)`` as lists of new arrays.

        Parameters
        ----------
        config : dict
            ``batch_size``, ``shuffle`` and ``seed``.
        epoch : int, optional
            Which the order depends on; None keeps it.
        """
        size, count = batch_size_of(config), len(self)
        order = None
        if epoch is not None and config.get("shuffle", True):
            order = permutation(count, config.get("seed", 0), epoch, 0)

        def batch(first: int) -> Batch:
            def take(start: int, stop: int) -> tuple:
                places: Any = slice(first + start, first + stop)
                places = places if order is None else order[places]
                # copies: arrays that processes share cannot be written to
                return tuple(
                    [np.array(a[places]) for a in p] for p in (self.features, self.targets)
                )

            return Batch(min(size, count - first), take)

        return map(batch, range(0, count, size))


@dataclass
class Creator:
    """A function ``f(config)`` of the user that makes what the framework reads."""

    function: Callable[[dict], Any]


@dataclass
class SavedRows:
    """Rows as files of this machine, which every process maps.

    Attributes
    ----------
    features, targets : list of Path
    names : list of str
    """

    features: list[Path]
    targets: list[Path]
    names: Sequence[str]

    @classmethod
    def save(cls, rows: Rows, folder: Path) -> SavedRows:
        """Write rows into a new folder."""
        folder.mkdir()

        def written(role, arrays):
            paths = [folder / f"{role}{i}.npy" for i in range(len(arrays))]
            for path, array in zip(paths, arrays, strict=True):
                np.save(path, array, allow_pickle=False)
            return paths

        return cls(written("x", rows.features), written("y", rows.targets), rows.names)

    def open(self) -> Rows:
        """Return the rows, mapped."""
        x, y = ([np.load(path, mmap_mode="r") for path in p] for p in (self.features, self.targets))
        return Rows(x, y, self.names)


@dataclass
class RayRows:
    """Rows in Ray's object store.

    Attributes
    ----------
    reference : ray.ObjectRef
        Of :class:`Rows`.
    """

    reference: Any

    def open(self) -> Rows:
        """Return the rows, in the memory that all processes of a node share."""
        import ray

        return ray.get(self.reference)


def opened(data: Any) -> Any:
    """Return data as a trial uses it."""
    return data.open() if hasattr(data, "open") else data


def trial_data(
    data: Any,
    feature_cols=None,
    label_cols=None,
    *,
    name: str,
    on_ray: bool,
    floats: str | None,
    on_close: Callable[[Any], None] = lambda closer: None,
) -> Rows | Creator | RayRows | SavedRows:
    """Return data as the trials of a search take it.

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
        Put rows that are not the driver's into Ray's object store, else into files of this
        machine.
    floats : str, optional
        dtype of floating values; default: their own.
    on_close : callable
        Is called with a function that has to be called after the search.

    Raises
    ------
    UsageError
        For data of another kind, and for rows that cannot become arrays.
    """
    input_type = kind_of(data)
    if input_type in _DISTRIBUTED:
        features, labels = names_of(feature_cols), names_of(label_cols)
        config = {"dtype": floats} if floats else {}
        feed = as_feed(data, features, labels, config, name=name)
        return _on_ray(feed) if on_ray else _on_this_machine(feed, on_close)
    if input_type == "array":
        return _rows(data, names_of(feature_cols), names_of(label_cols), floats, name)
    if callable(data) and not isinstance(data, type):
        return Creator(data)
    if input_type == "DataLoader":
        return Creator(_Constant(data))
    raise UsageError(
        f"{name} must be a tuple (x, y) of arrays, a pandas or Spark DataFrame with feature_cols "
        "and label_cols, XShards, Parquet files, a DataLoader, or a function of the configuration "
        f"that returns one, got {input_type}"
    )


class _Constant:
    """A function of a loader that is the same for every configuration."""

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
    arrays = {column: values for column, key, values in columns if key is None}
    if len(arrays) < len(columns):
        raise UsageError(f"{name}: the features of a search cannot be a dict; pass a list of them")
    return _of_columns(arrays, features, labels, name)


def _is_tensors(data):
    return type(data).__name__ == "TensorDataset" and hasattr(data, "tensors")


def _of_columns(columns: dict[str, np.ndarray], features, labels, name) -> Rows:
    if not features:
        features, labels = named_by_shard(list(columns))
    if not labels:
        raise UsageError(f"{name} has no targets; pass (x, y), or label_cols with a frame")
    if not len(columns[features[0]]):
        raise UsageError(f"{name} has no rows")
    x, y = ([np.ascontiguousarray(columns[name]) for name in names] for names in (features, labels))
    return Rows(x, y, list(features))


def _on_ray(feed) -> RayRows:
    """Put rows into Ray's object store, once and past the driver."""
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
    """Raise the error of an object that is one."""
    import ray

    ray.get(references)


def _on_this_machine(feed, on_close) -> SavedRows:
    """Write rows to files of this machine, by one worker of the Spark that runs on it."""
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
    on_close(folder.cleanup)
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
    """Return the rows of an ingest for one worker; runs in a task of Ray."""
    from bigdl.runtime.shards.shard import SpoolWriter

    with tempfile.TemporaryDirectory(prefix="bigdl-rows-") as folder:

        def spool(part, specs):
            return SpoolWriter(folder, os.getpid(), f"{part}-0", specs)

        open_spool: Any = spool  # a function with attributes
        open_spool.place, open_spool.world_size = 0, 1
        (shard,) = reader(iter(()), open_spool).values()
        return _of_shard(shard, features, labels, name)


def _of_shard(shard, features, labels, name) -> Rows:
    arrays = {column: shard.column(column) for column in shard.names}
    if any(isinstance(values, dict) for values in arrays.values()):
        raise UsageError(f"{name}: the features of a search cannot be maps; select their values")
    return _of_columns(arrays, features, labels, name)
