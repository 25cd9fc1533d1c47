"""Conversion of a search's input data to the arrays or loaders of trials."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.common.private_folders import scratch_folder
from bigdl.orca.data.feeds import ON_RAY, as_feed, input_type_of
from bigdl.runtime.shards.batches import permutation
from bigdl.runtime.shards.columns import ArraySpec
from bigdl.runtime.shards.feed import SourceError
from bigdl.runtime.shards.shard import Shard, Spool
from bigdl.runtime.shards.values import columns_of, is_frame, structured_columns
from bigdl.runtime.task import read_input
from bigdl.training.batches import LoaderBatches, Pass, TensorShard, as_loader, spooled
from bigdl.training.keras.data import is_dataset

if TYPE_CHECKING:
    import ray
    import tensorflow as tf
    from torch.utils.data import DataLoader

    from bigdl.runtime.worker import Worker

_BATCH_SIZE = 32
_PIECE = 8 << 20  # bytes of one message with rows
_DISTRIBUTED = ("Spark DataFrame", "SparkXShards", "path", *ON_RAY)


@dataclass
class TrialRows:
    """Feature and target arrays of equal length, in memory that all trials of a machine share.

    Attributes
    ----------
    features, targets : dict of str to ndarray
        Arrays by column name.
    categories : dict of str to pandas.Index
        Categories of the categorical features. Their arrays hold indices into it, or -1 for a
        missing value.
    """

    features: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]
    categories: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


class ArrayShard(Shard):
    """Rows in memory with the interface of a shard that is stored on disk."""

    def __init__(self, rows: TrialRows):
        columns = {**rows.features, **rows.targets}
        self.arrays = list(columns.values())
        leaves = [ArraySpec(k, None, a.dtype.name, a.shape[1:]) for k, a in columns.items()]
        self.rows, self.fingerprint = len(rows), 0
        self.spool = Spool("", "", self.rows, leaves, columns=list(columns))


class RowsPart(TensorShard):
    """One worker's share of the rows, of which every worker holds a complete copy.

    Worker `r` of `n` takes the rows `r`, `r + n`, ... of an epoch's order, so the workers' batches
    together equal the batches of a single worker.

    Parameters
    ----------
    worker : Worker
    shard : Shard
    *columns : sequence of str
        Features and labels; by default those that the shard defines.
    """

    def __init__(self, worker: Worker, shard: Shard, *columns: Sequence[str] | None):
        with warnings.catch_warnings():
            # arrays in shared memory are read-only
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            super().__init__(shard, *(columns or (None, None)))
        self._count, self._part = self.rows, slice(worker.rank, None, worker.world_size)
        self.rows = len(range(self._count)[self._part])

    def window(self, memory: int) -> int:
        """Return 0 for the shuffle window, so that all rows are shuffled together."""
        return 0

    def order(self, of: Pass) -> np.ndarray | None:
        """Return the row indices of this worker in an epoch, or None for all rows in order."""
        if of.shuffle:
            return permutation(self._count, of.seed, of.number)[self._part]
        return None if self.rows == self._count else np.arange(self._count)[self._part]

    def ids_from(self, order: object, start: int) -> None:
        """Return None, because a trial restarts if the number of workers changes."""

    def in_order(self, batch_size: int) -> Any:  # an ndarray or None, as :meth:`order`
        """Return the row indices of this worker in an evaluation."""
        return self.order(Pass(False, 0, 0))


class LoaderPart(LoaderBatches):
    """One worker's share of the batches of a DataLoader; see :class:`RowsPart`."""

    def __init__(self, loader: DataLoader, worker: Worker):
        super().__init__(loader, worker.rank, worker.world_size)
        worker.at_exit(self.close)
        self._whole = LoaderBatches(loader, 0, 1)

    def batch(self, start: int, stop: int, order: Any = None) -> list:  # order: of the base class
        """Return a batch as ``[*features, target]``."""
        batch = super().batch(start, stop, order)
        if not isinstance(batch, list) or len(batch) < 2:
            raise UsageError(
                "The batches of a DataLoader must be (*features, target), got "
                f"{type(batch).__name__}",
                code="data-structure",
            )
        *features, target = batch
        if len(features) == 1 and isinstance(features[0], list | tuple):
            features = list(features[0])
        return [*features, target]

    def _indices(self, shuffle, seed, epoch):
        return self._whole._indices(shuffle, seed, epoch)[self._rank :: self._size]


def of_config(data: object, config: dict[str, Any]) -> TrialRows | DataLoader | tf.data.Dataset:
    """Return rows unchanged, or the loader or dataset that a function creates from a configuration.

    Returns
    -------
    TrialRows, torch.utils.data.DataLoader or tf.data.Dataset
    """
    if isinstance(data, TrialRows):
        return data
    result = data(dict(config)) if callable(data) else data
    if is_dataset(result):
        return result
    from torch.utils.data import DataLoader, Dataset

    if not isinstance(result, DataLoader | Dataset):
        raise UsageError(
            "The function passed as data must return a torch DataLoader, or for Keras a "
            f"tf.data.Dataset of (x, y), but it returned {type(result).__name__}",
            code="function-result",
            argument="data",
        )
    return as_loader(result, config, batch_size_of(config))


def batch_size_of(config: Mapping[str, Any], data: object = None) -> int:
    """Return the loader's batch size if the data has one, else the configuration's batch size."""
    size = getattr(data, "batch_size", None) or config.get("batch_size", _BATCH_SIZE)
    return check_positive("batch_size of a configuration", size)


def part_of(data: TrialRows | DataLoader, worker: Worker) -> RowsPart | LoaderPart:
    """Return a worker's share of the trial data.

    An iterable-style loader is first read to its end.
    """
    if isinstance(data, TrialRows):
        return RowsPart(worker, ArrayShard(data), list(data.features), list(data.targets))
    from torch.utils.data import IterableDataset

    if not isinstance(data.dataset, IterableDataset):
        return LoaderPart(data, worker)
    folder = scratch_folder("rows")
    worker.at_exit(folder.cleanup)
    shard, _ = spooled(data, folder.name, None, None)
    return RowsPart(worker, shard)


def trial_data(
    name: str,
    data: Any,
    *,
    columns: tuple[list, list],
    backend: str,
    floats: str | None,
    on_close: Callable[[Any], Any],
    nulls_are_missing: bool = False,
    takes_categories: bool = False,
) -> object:
    """Convert the user's data to TrialRows; return a loader or a function unchanged.

    Parameters
    ----------
    name : str
        Argument name for messages.
    data : object
        Arrays or a pandas frame of the driver; Spark DataFrames, XShards, Parquet files and
        datasets of Ray; a DataLoader, or a function ``f(config)``.
    columns : tuple of (features, labels)
        Names of columns of frames.
    backend : {"ray", "spark", "local"}
        Ray loads distributed rows into its object store; the others write them to files of this
        machine, which ``"spark"`` copies to each machine of the search.
    floats : str, optional
        Dtype to which floating-point values are converted, by default unchanged.
    on_close : callable
        Registers a cleanup function to call after the search.
    nulls_are_missing : bool
        Convert nulls of features to NaN, which the model treats as missing.
    takes_categories : bool
        Keep categorical pandas features as categories.

    Returns
    -------
    TrialRows, ray.ObjectRef of TrialRows, torch.utils.data.DataLoader or callable

    Raises
    ------
    UsageError
        If the type of data is not supported, or rows cannot be converted to arrays.
    """
    input_type = input_type_of(data)
    if input_type in _DISTRIBUTED:
        config: dict[str, Any] = {"dtype": floats} if floats else {}
        config["nulls_are_missing"] = nulls_are_missing
        feed = as_feed(data, *columns, config, name=name)
        if backend == "ray":
            return _on_ray(feed)
        return _on_this_machine(feed, on_close, from_cluster=backend == "spark")
    if input_type == "DataLoader":  # or a function
        return data
    if input_type != "array":
        raise UsageError(
            f"{name} must be a tuple (x, y) of arrays, a pandas or Spark DataFrame with "
            "feature_cols and label_cols, XShards, Parquet files, a DataLoader, or a function of "
            f"the configuration that returns one, got {input_type}",
            code="data-type",
            argument=name,
        )
    if type(data).__name__ == "TensorDataset":
        data = tuple(data.tensors)
    categories: dict[str, Any] = {}
    if takes_categories:
        data, columns = _with_names(data, *columns)
        data, categories = _as_codes(data, columns[0])
    try:
        missing = columns[0] or () if nulls_are_missing else ()
        arrays = columns_of(data, *columns, floats, missing=missing)
    except SourceError as error:
        raise error.with_message(f"{name}: {error}") from None
    rows = _rows({n: v if key is None else {key: v} for n, key, v in arrays}, *columns, name)
    rows.categories = categories
    return rows


def _with_names(data: object, features: list, labels: list) -> tuple[Any, tuple[list, list]]:
    """Convert a frame and its targets to named columns; return other data unchanged."""
    if features or not isinstance(data, tuple | list) or len(data) != 2:
        return data, (features, labels)
    x, y = data
    if not is_frame(x) or not len(x.columns) or not x.columns.is_unique or not hasattr(y, "shape"):
        return data, (features, labels)
    target = "y"
    while target in x.columns:
        target += "_"
    return {**{name: x[name] for name in x.columns}, target: y}, (list(x.columns), [target])


def _as_codes(data: Any, features: list) -> tuple[Any, dict[str, Any]]:
    """Replace pandas categories with integer codes; return the data and the categories."""
    if not is_frame(data) and not isinstance(data, dict):
        return data, {}
    series = {name: data[name] for name in features or () if name in data}
    categorical = {name: each.cat for name, each in series.items() if is_category(each)}
    if categorical:
        data = data.copy(deep=False) if is_frame(data) else dict(data)
        for name, each in categorical.items():
            data[name] = each.codes.to_numpy().astype("int32")
    return data, {name: each.categories for name, each in categorical.items()}


def is_category(column: object) -> bool:
    """Return True for a categorical pandas Series, without importing pandas."""
    return hasattr(column, "isna") and getattr(column, "dtype", None) == "category"


def _rows(columns: Mapping[str, Any], features, labels, name) -> TrialRows:
    """Convert named columns to TrialRows; without feature names, derive them from the columns."""
    if any(isinstance(values, dict) for values in columns.values()):
        raise UsageError(
            f"{name}: the features of a search cannot be a dict or a map; pass a list of them, or "
            "select the values",
            code="data-structure",
            argument=name,
        )
    if not features:
        features, labels = structured_columns(list(columns))
    if not labels:
        raise UsageError(
            f"{name} has no targets; pass (x, y), or label_cols with a frame",
            code="data-structure",
            argument=name,
        )
    if not len(columns[features[0]]):
        raise UsageError(f"{name} has no rows", code="data-empty", argument=name)
    x, y = ({n: np.ascontiguousarray(columns[n]) for n in names} for names in (features, labels))
    return TrialRows(x, y)


def _rows_of_shard(shard: Shard, *names: object) -> TrialRows:
    return _rows({column: shard.column(column) for column in shard.names}, *names)


def _on_ray(feed) -> ray.ObjectRef:
    """Load rows into Ray's object store once, without passing through the driver."""
    import ray

    from bigdl.orca.cluster.ray import RayCluster

    plan = feed.prepare(RayCluster.of_program(), 1)
    try:
        read: Any = ray.remote(_read).options(num_returns=2)
        names = feed.feature_cols, feed.label_cols, feed.name
        rows, failure = read.remote(plan.reader, *names)
        error = ray.get(failure)  # raise before the first trial starts
        if error is not None:
            raise error.with_message(str(error))
        return rows
    finally:
        plan.close()


def _read(reader, *names: object) -> tuple[TrialRows | None, UsageError | None]:
    """Read all rows of a feed's input plan in a Ray task; return the rows or the error."""
    spec = SimpleNamespace(reader=reader, job=os.getpid(), active_jobs=(), world_size=1)
    with scratch_folder("rows") as folder:
        try:
            (shard,) = read_input(spec, iter(()), 0, folder).values()
            return _rows_of_shard(shard, *names), None
        except UsageError as error:
            return None, error


def _on_this_machine(feed, on_close, *, from_cluster: bool) -> TrialRows:
    """Write rows to local files with one worker of Spark, and memory-map them.

    With `from_cluster`, the worker may be on another machine and sends the rows.
    """
    from bigdl.orca.cluster.connect import active_spark
    from bigdl.orca.engines.spark import SparkEngine

    if feed.kind in ON_RAY:
        raise UsageError(
            f"{feed.name} is a {feed.kind}; pass backend='ray' to search on Ray",
            code="data-type",
            argument=feed.name,
        )
    if not active_spark().is_local and not from_cluster:
        raise UsageError(
            f"{feed.name} is a {feed.kind} on a cluster, but backend='local' searches on this "
            "machine only; pass backend='spark', or backend='ray' with init_ray_on_spark=True",
            code="data-type",
            argument=feed.name,
        )
    directory = scratch_folder("rows")
    on_close(directory.cleanup)
    folder = directory.name
    names = feed.feature_cols, feed.label_cols, feed.name

    def send(worker):
        rows = _rows_of_shard(worker.shard, *names)
        for index, array in enumerate([*rows.features.values(), *rows.targets.values()]):
            doc = {"index": index, "dtype": array.dtype.str, "shape": array.shape}
            worker.send("array", doc, b"")
            content = array.reshape(-1).view(np.uint8)
            for start in range(0, len(content), _PIECE):
                piece = content[start : start + _PIECE].tobytes()
                worker.send("piece", {"index": index}, piece)
        return [list(rows.features), list(rows.targets)]

    arrays: list[np.ndarray] = []
    written = 0

    def receive(event, value):
        nonlocal written
        if event != "message":
            return
        doc, data = value
        if doc["topic"] == "array":
            arguments = {"mode": "w+", "dtype": doc["dtype"], "shape": tuple(doc["shape"])}
            arrays.append(np.lib.format.open_memmap(f"{folder}/{doc['index']}.npy", **arguments))
            written = 0
        else:
            content = arrays[-1].reshape(-1).view(np.uint8)
            content[written : written + len(data)] = np.frombuffer(data, np.uint8)
            written += len(data)

    with SparkEngine().open(send, feed, 1) as job:
        columns = job.attempt(on_event=receive)[0]
    for array in arrays:
        array.flags.writeable = False
    remaining = iter(arrays)
    x, y = ({n: next(remaining) for n in names} for names in columns)
    return TrialRows(x, y)
