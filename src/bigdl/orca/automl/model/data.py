"""The data of a search: what users pass, and the arrays or loaders that trials take of it."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import as_feed, kind_of, names_of
from bigdl.runtime.shards.batches import permutation
from bigdl.runtime.shards.columns import Leaf
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import LoaderShard, Shard, Spool
from bigdl.runtime.shards.values import columns_of, named_by_shard
from bigdl.runtime.task import read_input
from bigdl.training.batches import LoaderBatches, TensorShard, as_loader, spooled
from bigdl.training.keras.data import is_dataset

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from bigdl.runtime.worker import Worker

_BATCH_SIZE = 32
_DISTRIBUTED = ("Spark DataFrame", "SparkXShards", "path", "RayXShards", "Ray Dataset")


@dataclass
class Rows:
    """Arrays of as many rows; all trials of a machine share their memory.

    Attributes
    ----------
    features, targets : dict of str to ndarray
        By the names of their columns.
    """

    features: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


class _ArrayShard(Shard):
    """Rows with the face of a spool's shard."""

    def __init__(self, rows: Rows):
        columns = {**rows.features, **rows.targets}
        self.arrays = list(columns.values())
        leaves = [Leaf(k, None, a.dtype.name, a.shape[1:]) for k, a in columns.items()]
        self.rows, self.fingerprint = len(rows), 0
        self.spool = Spool("", "", self.rows, leaves, columns=list(columns))


class RowsPart(TensorShard):
    """The rows that one of several workers takes of those that all of them have.

    Worker `r` of `n` takes the rows `r`, `r + n`, ... of the order of an epoch, so the batches of
    all workers together are those of one worker.

    Parameters
    ----------
    shard : Shard
    feature_cols, label_cols : sequence of str, optional
    worker : Worker
    """

    def __init__(
        self,
        shard: Shard,
        feature_cols: Sequence[str] | None,
        label_cols: Sequence[str] | None,
        worker: Worker,
    ):
        with warnings.catch_warnings():
            # arrays that processes share are only read
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            super().__init__(shard, feature_cols, label_cols)
        self._count, self._part = self.rows, slice(worker.rank, None, worker.world_size)
        self.rows = len(range(self._count)[self._part])

    def window(self, memory: int) -> int:
        """Return 0: rows are shuffled all together."""
        return 0

    def order(self, shuffle: bool, seed: int, epoch: int, *_: Any) -> np.ndarray | None:
        """Return the places of this worker's rows in an epoch; None for all rows as they are."""
        if shuffle:
            return permutation(self._count, seed, epoch)[self._part]
        return None if self.rows == self._count else np.arange(self._count)[self._part]

    def in_order(self, batch_size: int) -> Any:
        """Return the places of this worker's rows in an evaluation."""
        return self.order(False, 0, 0)


class LoaderPart(LoaderBatches):
    """The part of a worker in a DataLoader; see :class:`RowsPart`."""

    def __init__(self, loader: DataLoader, worker: Worker):
        super().__init__(loader, worker.rank, worker.world_size)
        worker.at_exit(self.close)
        self._whole = LoaderBatches(loader, 0, 1)

    def batch(self, start: int, stop: int, order: Any = None) -> list:
        """Return a batch as ``[*features, target]``."""
        batch = super().batch(start, stop, order)
        if not isinstance(batch, list) or len(batch) < 2:
            raise UsageError(
                "The batches of a DataLoader must be (*features, target), got "
                f"{type(batch).__name__}"
            )
        *features, target = batch
        if len(features) == 1 and isinstance(features[0], list | tuple):
            features = list(features[0])
        return [*features, target]

    def _indices(self, shuffle, seed, epoch):
        if self._size == 1:
            return super()._indices(shuffle, seed, epoch)
        return self._whole._indices(shuffle, seed, epoch)[self._rank :: self._size]


def opened(data: Any) -> Any:
    """Return data as the process of a trial needs it: rows are mapped, others stay as they are."""
    return data.open() if isinstance(data, SavedRows | RayRows) else data


def of_config(data: Any, config: dict[str, Any]) -> Any:
    """Return rows as they are, and what a function makes of a configuration.

    Returns
    -------
    Rows, torch.utils.data.DataLoader or tf.data.Dataset
    """
    if isinstance(data, Rows):
        return data
    made = data(dict(config)) if callable(data) else data
    if is_dataset(made):
        return made
    from torch.utils.data import DataLoader, Dataset

    if not isinstance(made, DataLoader | Dataset):
        raise UsageError(
            "The function given as data must return a torch DataLoader, or of Keras a "
            f"tf.data.Dataset of (x, y), it returned {type(made).__name__}"
        )
    return as_loader(made, config, batch_size_of(config))


def batch_size_of(config: Mapping[str, Any], data: Any = None) -> int:
    """Return the number of rows of a batch: that of a loader, or what a configuration asks for."""
    size = getattr(data, "batch_size", None) or config.get("batch_size", _BATCH_SIZE)
    return check_positive("batch_size of a configuration", size)


def part_of(data: Rows | DataLoader, worker: Worker) -> RowsPart | LoaderPart:
    """Return the part of a worker in the data of a trial; an iterable loader is read to its end."""
    if isinstance(data, Rows):
        return RowsPart(_ArrayShard(data), list(data.features), list(data.targets), worker)
    from torch.utils.data import IterableDataset

    if not isinstance(data.dataset, IterableDataset):
        return LoaderPart(data, worker)
    folder = tempfile.TemporaryDirectory(prefix="bigdl-rows-")
    worker.at_exit(folder.cleanup)
    shard, _ = spooled(data, LoaderShard(Spool(folder.name, "", 0)), None, None)
    return RowsPart(shard, None, None, worker)


@dataclass
class SavedRows:
    """Rows as files of this machine, which every process maps.

    Attributes
    ----------
    folder : Path
    features, targets : list of str
        Names of the columns.
    """

    folder: Path
    features: list[str]
    targets: list[str]

    @classmethod
    def save(cls, rows: Rows, folder: Path) -> SavedRows:
        """Write rows into a new folder."""
        folder.mkdir()
        for number, array in enumerate((*rows.features.values(), *rows.targets.values())):
            np.save(folder / f"{number}.npy", array, allow_pickle=False)
        return cls(folder, list(rows.features), list(rows.targets))

    def open(self) -> Rows:
        """Return the rows, mapped."""
        files = (np.load(self.folder / f"{i}.npy", mmap_mode="r") for i in itertools.count())
        features = dict(zip(self.features, files, strict=False))
        return Rows(features, dict(zip(self.targets, files, strict=False)))


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


def trial_data(
    data: Any,
    feature_cols=None,
    label_cols=None,
    *,
    name: str,
    on_ray: bool,
    floats: str | None,
    on_close: Callable[[Any], Any],
) -> Any:
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

    Returns
    -------
    Rows, SavedRows, RayRows, torch.utils.data.DataLoader or callable
    """
    input_type = kind_of(data)
    if input_type in _DISTRIBUTED:
        features, labels = names_of(feature_cols), names_of(label_cols)
        config = {"dtype": floats} if floats else {}
        feed = as_feed(data, features, labels, config, name=name)
        return _on_ray(feed) if on_ray else _on_this_machine(feed, on_close)
    if input_type == "array":
        return _rows(data, names_of(feature_cols), names_of(label_cols), floats, name)
    if input_type == "DataLoader":  # or a function
        return data
    raise UsageError(
        f"{name} must be a tuple (x, y) of arrays, a pandas or Spark DataFrame with feature_cols "
        "and label_cols, XShards, Parquet files, a DataLoader, or a function of the configuration "
        f"that returns one, got {input_type}"
    )


def _rows(data, features, labels, floats, name) -> Rows:
    if type(data).__name__ == "TensorDataset":
        data = tuple(data.tensors)
    try:
        columns = columns_of(data, features, labels, floats)
    except SourceError as error:
        raise UsageError(f"{name}: {error}") from None
    arrays = {column: values for column, key, values in columns if key is None}
    if len(arrays) < len(columns):
        raise UsageError(f"{name}: the features of a search cannot be a dict; pass a list of them")
    return _of_columns(arrays, features, labels, name)


def _of_columns(columns: dict[str, np.ndarray], features, labels, name) -> Rows:
    if not features:
        features, labels = named_by_shard(list(columns))
    if not labels:
        raise UsageError(f"{name} has no targets; pass (x, y), or label_cols with a frame")
    if not len(columns[features[0]]):
        raise UsageError(f"{name} has no rows")
    x, y = ({n: np.ascontiguousarray(columns[n]) for n in names} for names in (features, labels))
    return Rows(x, y)


def _on_ray(feed) -> RayRows:
    """Put rows into Ray's object store, once and past the driver."""
    import ray

    from bigdl.orca.cluster.ray import RayCluster
    from bigdl.orca.data.feeds.on_ray import prepare_on_ray

    ingest = prepare_on_ray(feed, RayCluster.of_program(), 1)
    try:
        named = list(feed.feature_cols or ()), list(feed.label_cols or ())
        read: Any = ray.remote(_read).options(num_returns=2)
        rows, problem = read.remote(ingest.reader, *named, feed.name)
        message = ray.get(problem)  # before a trial begins
        if message is not None:
            raise UsageError(message)
        return RayRows(rows)
    finally:
        ingest.close()


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
        saved = SavedRows.save(_of_shard(worker.shard, *named, name), Path(path))
        return [saved.features, saved.targets]

    return SavedRows(Path(path), *SparkEngine(cluster).run(write, feed, num_workers=1)[0])


def _read(reader, features, labels, name) -> tuple[Rows | None, str | None]:
    """Return the rows of an ingest for one worker, or what is wrong with them; a task of Ray."""
    spec = SimpleNamespace(reader=reader, job=os.getpid(), active_jobs=(), world_size=1)
    with tempfile.TemporaryDirectory(prefix="bigdl-rows-") as folder:
        try:
            (shard,) = read_input(spec, iter(()), 0, folder).values()
            return _of_shard(shard, features, labels, name), None
        except (SourceError, UsageError) as error:
            return None, str(error)


def _of_shard(shard, features, labels, name) -> Rows:
    arrays = {column: shard.column(column) for column in shard.names}
    if any(isinstance(values, dict) for values in arrays.values()):
        raise UsageError(f"{name}: the features of a search cannot be maps; select their values")
    return _of_columns(arrays, features, labels, name)
