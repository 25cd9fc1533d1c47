"""A worker's input as batches that a Keras model takes: ``(x, y)`` or ``(x, y, weights)``.

Rows are read again and again; one time is a *pass*.  ``seek`` goes to a batch of a pass, and
``next`` gives this worker's part of the following one, on all ranks together.  An epoch is one
pass, or, with ``steps_per_epoch``, so many batches of one pass after the other.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bigdl.common.errors import UsageError
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.runtime.shards.texts import TEXT
from bigdl.training.batches import (
    BatchLayout,
    open_batches,
    open_loader,
    plan_batches,
    shuffle_memory,
)

if TYPE_CHECKING:
    from bigdl.training.keras.evaluation import EvaluationSettings
    from bigdl.training.keras.loop import KerasFitSettings

__all__ = [
    "Assembly",
    "ColumnRows",
    "Part",
    "Rows",
    "build_for",
    "is_dataset",
    "open_data",
    "with_class_weight",
    "zero_row",
]


@dataclass(frozen=True)
class Assembly:
    """Makes the arguments of a training step from the columns of a batch.

    Attributes
    ----------
    names : sequence of str or None
        Of the feature columns; a model whose input is a dict gets them by name.
    by_name : bool
        Whether it is such a model.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    class_weight : dict of int to float, optional
    outputs : sequence of str, optional
        Of a model whose output is a dict, the keys that the target columns belong to.
    """

    names: Sequence[str] | None = None
    by_name: bool = False
    weighted: bool = False
    class_weight: dict[int, float] | None = None
    outputs: Sequence[str] | None = None

    @classmethod
    def of(cls, model, names, labels=None, *, weighted=False, class_weight=None) -> Assembly:
        """Return the assembly for a model and the columns that it is given."""
        by_name = bool(names) and isinstance(_structure_of(model, "input"), dict)
        output, outputs = _structure_of(model, "output"), None
        if isinstance(output, dict):
            targets = list(labels or ())[: -1 if weighted else None]
            outputs = targets if set(targets) == set(output) else list(output)
        return cls(names, by_name, weighted, class_weight, outputs)

    def inputs(self, features: Sequence) -> Any:
        """Return ``x`` of the feature columns."""
        if self.by_name:
            return dict(zip(self.names or (), features, strict=True))
        return features[0] if len(features) == 1 else tuple(features)

    def __call__(self, columns: Sequence) -> tuple:
        """Return the batch of the feature columns and the target, or a tuple of targets."""
        if isinstance(columns, dict):
            raise UsageError(
                "The loader gives batches that are dicts; let it give (inputs, targets), where the "
                "inputs may be a dict"
            )
        *features, target = columns
        weights = None
        if self.weighted:
            *targets, weights = target
            target = targets[0] if len(targets) == 1 else tuple(targets)
        if self.outputs and isinstance(target, tuple) and len(target) == len(self.outputs):
            # Keras would take a tuple for that of the keys in alphabetical order
            target = dict(zip(self.outputs, target, strict=True))
        batch: tuple = (self.inputs(features), target)
        batch = batch if weights is None else (*batch, weights)
        return batch if self.class_weight is None else with_class_weight(batch, self.class_weight)


def _structure_of(model, name: str):
    """Return a functional model's ``input`` or ``output``; None of one that is not built yet."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None


def with_class_weight(batch: tuple, table: dict[int, float]) -> tuple:
    """Return a batch whose rows weigh what their class does, besides their own weight.

    Classes are whole numbers, or the largest entry of a one-hot row; one without an entry weighs 1.
    """
    import numpy as np
    import torch

    if len(batch) < 2:
        raise UsageError("class_weight needs targets")
    x, y, *weights = batch
    if isinstance(y, dict | list | tuple):
        raise UsageError("class_weight is for models of one output; use weights of the rows")
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    known = {int(label): float(weight) for label, weight in table.items()}
    factors = np.vectorize(lambda label: known.get(int(label), 1.0), otypes=["float32"])(labels)
    if weights:
        factors = factors * np.asarray(weights[0]).reshape(factors.shape)
    return x, y, torch.from_numpy(np.ascontiguousarray(factors, "float32"))


def zero_row(inputs: list, targets: list) -> list:
    """Return one row of zeros or empty texts of columns as :class:`TensorShard` tells them."""
    import numpy as np
    import torch

    def column(leaves):
        arrays = {
            key: np.zeros((1, *shape), dtype)
            if dtype == TEXT
            else torch.zeros((1, *shape), dtype=getattr(torch, dtype))
            for key, dtype, shape in leaves
        }
        return arrays.get(None, arrays)

    features = [column(leaves) for leaves in inputs]
    labels = [column(leaves) for leaves in targets]
    return [*features, labels[0] if len(labels) == 1 else tuple(labels)]


class Part(NamedTuple):
    """A worker's part of a global batch.

    Attributes
    ----------
    batch : tuple or None
        ``(x, y)`` or ``(x, y, weights)``; None without rows.
    rows : int
        Of this worker.
    total : int
        Of all workers; 0 at the end of a pass.
    """

    batch: Any
    rows: int
    total: int


class Rows(ABC):
    """An input of one worker, for training or evaluation.

    Attributes
    ----------
    known : dict
        Facts that the workers exchange: ``rows``, ``fingerprint``, ``drop_last``, ``window``, and
        ``types``, which :class:`TensorShard` knows of inputs and targets.
    is_endless : bool
        True of an input that tells that it has no end.
    steps : int or None
        Batches of a pass, where that is known once :meth:`plan` was called.
    """

    known: dict
    is_endless = False
    steps: int | None = None

    @abstractmethod
    def example(self, types: list | None, assembly: Assembly) -> tuple:
        """Return a batch of one row, of zeros where the types of the columns are known."""

    @abstractmethod
    def plan(self, settings: KerasFitSettings, everyone: list[dict]) -> BatchLayout:
        """Cut the rows of all workers into batches."""

    def take_types(self, types: list | None, training: Rows) -> None:  # noqa: B027 - few can
        """Give out numbers in the dtypes that they have in the training data."""

    @abstractmethod
    def start(self, assembly: Assembly, settings: KerasFitSettings, rank: int, window: int) -> None:
        """Prepare for training; `window` rows are shuffled at a time, 0 for all."""

    @abstractmethod
    def seek(self, number: int, step: int) -> None:
        """Go to a batch of a pass; batches beyond its end belong to the following ones."""

    @abstractmethod
    def next(self, *, wrap: bool) -> Part:
        """Return the next batch; at the end of a pass the first of the next one, or nothing."""

    @abstractmethod
    def batches(
        self, assembly: Assembly, batch_size: int | None, world_size: int, limit: int | None
    ) -> Iterator[tuple[tuple, int]]:
        """Yield batch and number of rows, of this worker's rows in their order."""

    def check_end(self, what: str, argument: str, limit: int | None) -> None:
        """Refuse to read rows to their end that have none.

        Parameters
        ----------
        what : str
            For the message.
        argument, limit
            Name and value of what limits the number of batches.
        """
        if limit is None and self.is_endless:
            raise UsageError(
                f"The tf.data.Dataset of the {what} data repeats for ever; pass {argument}=, or "
                "end it by .take or by .repeat with a number"
            )


class ColumnRows(Rows):
    """Rows that can be reached by number.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    config : dict
        ``shuffle_memory``: bytes that shuffled rows may take.
    worker : Worker
    """

    def __init__(self, data: Any, config: dict, worker: Any):
        self._data = data
        self.known = {
            "rows": data.rows,
            "fingerprint": data.fingerprint,
            "drop_last": bool(data.drop_last),
            "window": data.window(shuffle_memory(config, worker.threads)),
            "types": None if data.inputs is None else [data.inputs, data.targets],
        }
        self._pass, self._step = 0, 0
        self._order: Any = None

    def example(self, types, assembly):
        if types is not None:
            return assembly(zero_row(*types))
        if not self._data.rows:
            raise UsageError(
                "The loader has fewer samples than there are workers; use fewer workers"
            )
        return assembly(self._data.batch(0, 1))

    def plan(self, settings, everyone):
        self._plan, batches = plan_batches(settings, everyone)
        self.steps = self._plan.steps
        return batches

    def take_types(self, types, training):
        self._data.take_types(*(types or (None, None)), training._data)

    def start(self, assembly, settings, rank, window):
        self._assembly, self._rank = assembly, rank
        self._shuffling = settings.shuffle, settings.seed, window

    def seek(self, number, step):
        self._pass, self._step = number + step // self.steps, step % self.steps
        self._open_pass()

    def next(self, *, wrap):
        if self._step == self.steps:
            if not wrap:
                return Part(None, 0, 0)
            self._pass, self._step = self._pass + 1, 0
            self._open_pass()
        start, stop, total = self._plan.batch(self._step, self._rank)
        self._step += 1
        if start == stop:
            return Part(None, 0, total)
        columns = self._data.batch(start, stop, self._order)
        return Part(self._assembly(columns), stop - start, total)

    def _open_pass(self):
        shuffle, seed, window = self._shuffling
        plan, steps = copy.copy(self._plan), range(self._step, self.steps)
        ranges = lambda: (plan.batch(step, self._rank)[:2] for step in steps)  # noqa: E731
        self._order = self._data.order(shuffle, seed, self._pass, self._rank, window, ranges)

    def batches(self, assembly, batch_size, world_size, limit):
        data, size = self._data, max(1, batch_size // world_size)
        order = data.in_order(size)
        for start in range(0, data.rows, size)[:limit]:
            stop = min(start + size, data.rows)
            yield assembly(data.batch(start, stop, order)), stop - start


def open_data(worker: Any, shard: Any, settings: EvaluationSettings, config: dict) -> Any:
    """Return the data of a shard.

    Parameters
    ----------
    worker : Worker or bigdl.orca.learn.layer_fit.replica.Place
    shard, settings, config
        See :func:`open_rows`.

    Returns
    -------
    TensorShard, bigdl.training.batches.LoaderBatches or tf.data.Dataset
    """
    features, labels, size = settings.feature_cols, settings.label_cols, settings.batch_size
    if not isinstance(shard, LoaderShard):
        return open_batches(shard, features, labels, worker, config, cast("int", size))
    import cloudpickle
    from torch.utils.data import DataLoader, Dataset

    from bigdl.training.batches import as_loader

    made = cloudpickle.loads(shard.payload())
    if callable(made) and not hasattr(made, "__getitem__"):
        made = made({**config, "rank": worker.rank, "size": worker.world_size}, size)
    if is_dataset(made):
        return made
    if not isinstance(made, DataLoader | Dataset):
        raise UsageError(
            "The function given as data must return a tf.data.Dataset or a torch DataLoader, it "
            f"returned {type(made).__name__}"
        )
    loader = as_loader(made, config, max(1, (size or 1) // worker.world_size))
    return open_loader(loader, shard, features, labels, worker)


def is_dataset(data: Any) -> bool:
    """Return True for a ``tf.data.Dataset``; does not import TensorFlow."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(data, tf.data.Dataset)


def build_for(model: Any, batch: tuple) -> None:
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


def _check_texts(model: Any, inputs: Any) -> None:
    """Refuse texts for an input of numbers and the other way round, if a model tells its inputs."""
    import keras

    try:
        takes = model.inputs
    except (AttributeError, ValueError):  # not built yet
        return
    leaves = keras.tree.flatten(inputs)
    if takes is None or len(takes) != len(leaves):
        return
    for place, value in zip(takes, leaves, strict=True):
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
