"""A worker's input, opened, and the model built to fit it."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.data import Assembly, made_up
from bigdl.orca.learn.tf2.sources import PlannedSource
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.runtime.shards.texts import TEXT
from bigdl.training.batches import (
    BatchLayout,
    open_batches,
    open_loader,
    plan_batches,
    shuffle_memory,
)

__all__ = ["ColumnRows", "build_for", "check_end", "open_columns", "open_rows"]


def open_rows(worker, shard, settings, config: dict, sync):
    """What a verb reads batches from.

    Parameters
    ----------
    worker : Worker
    shard : Shard or LoaderShard
    settings : EvaluationSettings
        ``batch_size``, ``feature_cols`` and ``label_cols`` of the input.
    config : dict
        For a function that makes a dataset.
    sync : GradientSync

    Returns
    -------
    ColumnRows or bigdl.orca.learn.tf2.datasets.DatasetRows
    """
    if isinstance(shard, LoaderShard):
        from bigdl.orca.learn.tf2.datasets import DatasetRows, is_dataset

        made = _made(shard, settings, config, worker)
        if is_dataset(made):
            return DatasetRows(made, sync)
        return ColumnRows(_opened(made, shard, settings, config, worker), config, worker)
    features, labels = settings.feature_cols, settings.label_cols
    data = open_batches(shard, features, labels, worker, config, settings.batch_size)
    return ColumnRows(data, config, worker)


def check_end(rows, what: str, argument: str, given: int | None) -> None:
    """Refuse to read rows to their end that have none.

    Parameters
    ----------
    rows : ColumnRows or DatasetRows
    what : str
        For the message.
    argument, given
        Name and value of what limits the number of batches.
    """
    if given is None and rows.is_endless:
        raise UsageError(
            f"The tf.data.Dataset of the {what} data repeats for ever; pass {argument}=, or end it "
            "by .take or by .repeat with a number"
        )


def open_columns(shard, settings, config: dict, place):
    """The same for who must reach rows by number.

    Parameters
    ----------
    shard, settings, config
        See :func:`open_rows`.
    place : Worker or bigdl.orca.learn.layer_fit.replica.ReplicaWorker

    Returns
    -------
    TensorShard or bigdl.training.loading.LoaderBatches

    Raises
    ------
    UsageError
        For a dataset.
    """
    if not isinstance(shard, LoaderShard):
        features, labels = settings.feature_cols, settings.label_cols
        return open_batches(shard, features, labels, place, config, settings.batch_size)
    from bigdl.orca.learn.tf2.datasets import is_dataset

    made = _made(shard, settings, config, place)
    if is_dataset(made):
        raise UsageError(
            "backend='bigdl' reads rows by number, and a tf.data.Dataset can only be read from its "
            "beginning; pass a DataFrame, XShards, arrays or a torch DataLoader, or use "
            "backend='spark'"
        )
    return _opened(made, shard, settings, config, place)


def _made(shard, settings, config, worker):
    """What the function given as data makes in this worker."""
    import cloudpickle

    made = cloudpickle.loads(shard.payload())
    if callable(made) and not hasattr(made, "__getitem__"):
        given = {**config, "rank": worker.rank, "size": worker.world_size}
        made = made(given, settings.batch_size)
    return made


def _opened(made, shard, settings, config, worker):
    """The batches of a loader."""
    loader = _loader(made, config, max(1, (settings.batch_size or 1) // worker.world_size))
    return open_loader(loader, shard, settings.feature_cols, settings.label_cols, worker)


def _loader(made, config, batch_size):
    from torch.utils.data import DataLoader, Dataset

    from bigdl.training.loading import as_loader

    if not isinstance(made, DataLoader | Dataset):
        raise UsageError(
            "The function given as data must return a tf.data.Dataset or a torch DataLoader, it "
            f"returned {type(made).__name__}"
        )
    return as_loader(made, config, batch_size)


class ColumnRows:
    """Rows that can be reached by number.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    config : dict
        ``shuffle_memory``: bytes that shuffled rows may take.
    worker : Worker

    Attributes
    ----------
    rows : int
    types : list or None
        What :class:`TensorShard` knows of inputs and targets.
    """

    is_endless = False

    def __init__(self, data: Any, config: dict, worker):
        self.data, self.rows = data, data.rows
        self.types = None if data.inputs is None else [data.inputs, data.targets]
        self.known = {
            "rows": data.rows,
            "fingerprint": data.fingerprint,
            "drop_last": bool(data.drop_last),
            "window": data.window(shuffle_memory(config, worker.threads)),
            "types": self.types,
        }

    def example(self, types: list | None, assembly: Assembly) -> tuple:
        """A batch of one row, of zeros where the types of the columns are known."""
        if types is not None:
            return assembly(made_up(*types))
        if not self.rows:
            raise UsageError(
                "The loader has fewer samples than there are workers; use fewer workers"
            )
        return assembly(self.data.batch(0, 1))

    def plan(self, settings, everyone: list[dict]) -> tuple[BatchPlan, BatchLayout]:
        """The cut of all workers' rows into batches."""
        return plan_batches(settings, everyone)

    def take_types(self, types: list | None, training: ColumnRows) -> None:
        """Give out numbers in the dtypes that they have in the training data."""
        self.data.take_types(*(types or (None, None)), training.data)

    def source(self, plan: BatchPlan, assembly: Assembly, settings, rank: int, window: int):
        """The batches of a training."""
        return PlannedSource(self.data, plan, assembly, settings, rank, window)

    def batches(self, assembly: Assembly, batch_size: int, world_size: int, most: int | None):
        """Pairs of batch and number of rows, of this worker's rows in their order."""
        local = max(1, batch_size // world_size)
        order = self.data.in_order(local)
        for index, start in enumerate(range(0, self.rows, local)):
            if most is not None and index >= most:
                break
            stop = min(start + local, self.rows)
            yield assembly(self.data.batch(start, stop, order)), stop - start


def build_for(model, batch: tuple) -> None:
    """Make all variables of a model, its metrics and its optimizer, as ``fit`` of Keras does.

    Parameters
    ----------
    model : keras.Model
    batch : tuple
        A batch that it takes.
    """
    import keras
    import numpy as np

    def array(value):
        if value is None:
            return None
        if getattr(value, "dtype", None) == "string":  # a tensor of TensorFlow
            return value
        value = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        return keras.ops.convert_to_tensor(value) if value.dtype.kind == TEXT else value

    _check_texts(model, batch[0])
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(array, batch))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"The model does not take rows of this form: {text[:600]}") from error


def _check_texts(model, inputs: Any) -> None:
    """Refuse texts for an input of numbers and the other way round, if a model tells its inputs."""
    import keras

    try:
        takes = model.inputs
    except (AttributeError, ValueError):  # not built yet
        return
    given = keras.tree.flatten(inputs)
    if takes is None or len(takes) != len(given):
        return
    for place, value in zip(takes, given, strict=True):
        are_texts = value.dtype == "string" or getattr(value.dtype, "kind", None) == TEXT
        if are_texts and place.dtype != "string":
            raise UsageError(
                f"The model's input '{place.name}' takes {place.dtype} and the data has texts for "
                "it; encode them as numbers first, or let the model look them up"
            )
        if not are_texts and place.dtype == "string":
            raise UsageError(
                f"The model's input '{place.name}' takes texts and the data has {value.dtype} for "
                "it; give it a column of texts"
            )
