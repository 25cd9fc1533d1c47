"""A worker's input as batches for a Keras model: ``(x, y)`` or ``(x, y, weights)``.

A *pass* reads all rows once.  ``parts`` yields this worker's parts of the batches of a pass; all
ranks iterate together.  An epoch is one pass, or ``steps_per_epoch`` batches of consecutive passes.

Every worker calls a function ``creator(config, batch_size)`` with the global batch size.  A
``tf.data.Dataset`` is sent to the workers as a TensorFlow graph.  Both must yield batches.

*shared* (the default)
    Worker r of N takes the r-th part of each batch, so the batches equal those of one process.  All
    workers must read the same rows: they run the function under one seed, so a ``shuffle`` without
    a seed shuffles alike on all of them.  The first batches are checked to be equal.
*sharded by the user*
    With ``experimental_distribute.auto_shard_policy = OFF`` a worker takes all batches of its
    pipeline; `config` has ``rank`` and ``size`` for the function.  A global batch then consists of
    one batch of each worker.  Workers whose rows are exhausted take part without rows.

An endless dataset needs ``steps_per_epoch``.  A resume from a checkpoint reads the finished batches
again and drops them.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cloudpickle
import numpy as np

from bigdl.common.errors import LazyModule, UsageError, one_line
from bigdl.runtime.shards.batches import BatchPlan
from bigdl.runtime.shards.shard import LoaderShard
from bigdl.runtime.shards.texts import TEXT
from bigdl.training.batches import (
    BatchLayout,
    BatchSettings,
    BatchSource,
    deal_streams,
    plan_batches,
    shuffle_memory,
    zero_column,
)
from bigdl.training.keras.backends import KerasBatch
from bigdl.training.position import RunSettings
from bigdl.training.remaining_rows import RemainingBatches
from bigdl.training.table_rows import in_table_order

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from bigdl.common.types import Tensor, Tensors
    from bigdl.runtime.collectives.base import GradientSync
    from bigdl.runtime.shards.shard import Shard
    from bigdl.runtime.worker import Worker
else:
    keras = LazyModule("keras", "tf")
    tf = LazyModule("tensorflow", "tf")


@dataclass
class KerasEvaluationSettings(BatchSettings):
    """Arguments of ``evaluate``, or of the validation of ``fit``."""

    def assembly(
        self, model: keras.Model, class_weight: dict[int, float] | None = None
    ) -> BatchArguments:
        """Return the function that builds a model's batches from columns."""
        return BatchArguments.of(
            model, self.feature_cols, self.label_cols, self.weighted, class_weight
        )


@dataclass(frozen=True)
class BatchArguments:
    """Function that builds the arguments of a training step from a batch's columns.

    Attributes
    ----------
    names : sequence of str or None
        Names of the feature columns; a model whose input is a dict gets them by name.
    by_name : bool
        Whether the model's input is a dict.
    weighted : bool
        Whether the last label column holds the weights of the rows.
    class_weight : dict of int to float, optional
    outputs : sequence of str, optional
        Names of the model's outputs that the target columns belong to, in the columns' order.
    order : sequence of str, optional
        Names of the model's outputs in its order; None for a model that returns a dict or has one
        output without a name.
    takes_any : bool
        Whether the model overrides ``train_step``, so that batches may have any structure.
    is_by_position : bool
        Whether the targets have no names.
    """

    names: Sequence[str] | None = None
    by_name: bool = False
    weighted: bool = False
    class_weight: dict[int, float] | None = None
    outputs: Sequence[str] | None = None
    order: Sequence[str] | None = None
    takes_any: bool = False
    is_by_position: bool = False

    @classmethod
    def of(
        cls,
        model: keras.Model,
        names: Sequence[str] | None,
        labels: Sequence[str] | None = None,
        weighted: bool = False,
        class_weight: dict[int, float] | None = None,
    ) -> BatchArguments:
        """Build the batch arguments for a model and its columns."""
        by_name = bool(names) and isinstance(_structure_of(model, "input"), dict)
        names_of_model = list(_names_of_outputs(model) or ())
        targets = list(labels or ())[: -1 if weighted else None]
        is_same = bool(names_of_model) and set(targets) == set(names_of_model)
        outputs = targets if is_same else names_of_model
        order = None if isinstance(_structure_of(model, "output"), dict) else names_of_model
        any_form = has_own_step(model, "train_step")
        loose = not targets or outputs is not targets
        return cls(names, by_name, weighted, class_weight, outputs or None, order, any_form, loose)

    def inputs(self, features: Sequence[Any]) -> Tensors:
        """Build the model's input ``x`` from the feature columns."""
        if self.by_name:
            return dict(zip(self.names or (), features, strict=True))
        return features[0] if len(features) == 1 else tuple(features)

    def __call__(self, columns: Any) -> KerasBatch:
        """Build a batch from feature columns and a target, or a tuple of targets."""
        if isinstance(columns, dict):
            if self.takes_any:
                return columns
            raise UsageError(
                "The loader yields batches that are dicts, which only a model with a custom "
                "train_step takes; let it yield (inputs, targets), where both may be dicts",
                code="data-structure",
            )
        *features, target = columns
        weights = None
        if self.weighted:
            *targets, weights = target
            target = targets[0] if len(targets) == 1 else tuple(targets)
        if self.outputs is not None:
            target = self._of_outputs(target)
        batch: tuple[Any, ...] = (self.inputs(features), target)
        batch = batch if weights is None else (*batch, weights)
        return batch if self.class_weight is None else with_class_weight(batch, self.class_weight)

    def check_order(self, error: Exception) -> None:
        """Raise an error that names the order of unnamed targets as the likely cause of `error`."""
        if self.is_by_position and self.outputs is not None and len(self.outputs) > 1:
            raise UsageError(
                "The training step failed on targets without names, which are assigned to the "
                f"model's outputs in the order {', '.join(map(repr, self.outputs))}; pass them as "
                f"a dict by these names if their order differs ({one_line(error)})",
                code="model-output",
                columns=list(self.outputs),
            ) from error

    def _of_outputs(self, target: object) -> object:
        """Arrange targets by name in the structure of the model's outputs."""
        outputs = cast("Sequence[str]", self.outputs)
        if isinstance(target, dict):
            unknown = sorted(set(target) - set(outputs), key=str)
            if unknown:
                raise UsageError(
                    f"The targets have {', '.join(map(repr, unknown))}, which the model does not "
                    f"return; its outputs are {', '.join(map(repr, outputs))}",
                    code="model-output",
                )
        elif isinstance(target, tuple | list) and len(target) == len(outputs):
            target = dict(zip(outputs, target, strict=True))
        elif len(outputs) > 1:
            return target
        if self.order is None or not isinstance(target, dict):
            # Keras would match a tuple to the keys in alphabetical order
            return target
        if set(target) != set(self.order):
            missing = ", ".join(repr(name) for name in self.order if name not in target)
            raise UsageError(
                f"The targets lack {missing}, which the model returns", code="model-output"
            )
        parts = tuple(target[name] for name in self.order)
        return parts[0] if len(parts) == 1 else parts


def _names_of_outputs(model: keras.Model) -> list[str] | None:
    """Return the output names of a functional model, or None."""
    output = _structure_of(model, "output")
    if isinstance(output, dict):
        return list(output)
    names = None if output is None else _structure_of(model, "output_names")
    return list(names) if names and len(set(names)) == len(names) else None


def has_own_step(model: keras.Model, name: str) -> bool:
    """Return True if a model overrides ``train_step`` or ``test_step`` of Keras."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def check_step(model: keras.Model, rows: object, name: str) -> None:
    """Raise an error if the model's step needs ``(x, y)`` batches but the dataset yields others.

    Parameters
    ----------
    model : keras.Model
    rows : ColumnRows or DatasetRows
    name : str
        ``"train_step"`` or ``"test_step"``.
    """
    spec = getattr(rows, "spec", None)
    if spec is None or _is_pair(spec) or has_own_step(model, name):
        return
    raise UsageError(
        "The elements of a tf.data.Dataset must be (x, y) or (x, y, weights) to fit or evaluate a "
        f"model without a custom {name}, they are {spec}",
        code="data-structure",
    )


def _is_pair(spec: object) -> bool:
    return isinstance(spec, tuple) and len(spec) in (2, 3)


def _structure_of(model: keras.Model, name: str) -> Any:  # as the model's functions return it
    """Return a model's ``input``, ``output`` or ``output_names``; None before it is built."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None


def with_class_weight(batch: tuple[Any, ...], table: dict[int, float]) -> tuple[Any, ...]:
    """Multiply the sample weights of a batch by the weights of the rows' classes.

    Classes are integers, or the largest entry of a one-hot row; classes not in the table weigh 1.
    """
    import torch

    if not isinstance(batch, tuple) or len(batch) < 2:
        raise UsageError(
            "class_weight needs batches (x, y)", code="data-structure", argument="class_weight"
        )
    x, y, *weights = batch
    if isinstance(y, dict | list | tuple):
        raise UsageError(
            "class_weight is for models of one output; use sample weights",
            code="argument-conflict",
            argument="class_weight",
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    known = {int(label): float(weight) for label, weight in table.items()}
    factors = np.vectorize(lambda label: known.get(int(label), 1.0), otypes=["float32"])(labels)
    if weights:
        factors = factors * np.asarray(weights[0]).reshape(factors.shape)
    return x, y, torch.from_numpy(np.ascontiguousarray(factors, "float32"))


class WorkerBatch(NamedTuple):
    """A worker's part of a global batch.

    Attributes
    ----------
    batch : tuple or None
        ``(x, y)`` or ``(x, y, weights)``; None without rows.
    rows : int
        Rows of this worker.
    total : int
        Rows of all workers; 0 at the end of a pass.
    """

    batch: Any
    rows: int
    total: int


class ColumnRows:
    """Indexable rows of one worker, for training or evaluation.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    config : dict
        ``shuffle_memory``: memory limit for shuffled rows, in bytes.
    worker : Worker

    Attributes
    ----------
    known : dict
        Facts that the workers exchange, see :meth:`~bigdl.training.batches.BatchSource.facts`.
    is_endless : bool
        True if the input declares that it has no end.
    steps : int or None
        Batches of a pass, if known after :meth:`plan`.
    """

    known: dict[str, Any]
    is_endless = False
    steps: int
    _current: tuple[BatchPlan, Any] | None = None  # batches and order of the current pass

    def __init__(self, data: BatchSource, config: dict[str, Any], worker: Worker):
        self._data = data
        self.known = data.facts(data.window(shuffle_memory(config, worker.threads)))

    def example(self, types: list[Any] | None, assembly: BatchArguments) -> KerasBatch:
        """Return a one-row batch of zeros and empty texts if `types` are known, else a real row."""
        if types is not None:
            inputs, targets = ([zero_column(each, 1) for each in columns] for columns in types)
            target = targets[0] if len(targets) == 1 else tuple(targets)
            return assembly([*inputs, target])
        if not self._data.rows:
            raise UsageError(
                "The loader has fewer samples than there are workers; use fewer workers",
                code="data-empty",
            )
        return assembly(self._data.batch(0, 1))

    def plan(self, settings: RunSettings, everyone: list[dict[str, Any]]) -> BatchLayout:
        """Plan the batches of all workers."""
        self._plan, batches = plan_batches(settings, everyone)
        self.steps = self._plan.steps
        return batches

    def take_types(self, types: list[Any] | None, training: Any) -> None:
        """Convert columns to the dtypes of the training data."""
        self._data.take_types(types, training._data)

    def start(
        self, assembly: BatchArguments, settings: RunSettings, rank: int, window: int
    ) -> None:
        """Prepare for training, with a shuffle window of `window` rows (0 for all rows)."""
        self._assembly, self._settings, self._rank = assembly, settings, rank
        self._window = window

    @property
    def source(self) -> BatchSource:
        """The underlying batch source."""
        return self._data

    def steps_of_pass(self, remaining: RemainingBatches | None, number: int) -> int:
        """Return the number of batches of a pass, or of its `remaining` batches after a resume."""
        return self._plan_of_pass(remaining, number).steps

    def _plan_of_pass(self, remaining: RemainingBatches | None, number: int) -> BatchPlan:
        return remaining if remaining is not None and remaining.epoch == number else self._plan

    def ids_from(self, step: int) -> np.ndarray | None:
        """Return the ids of this worker's rows from batch `step` to the end of a pass, or None."""
        if self._current is None:
            return None
        plan, order = self._current
        return self._data.ids_from(order, plan.batch(step, self._rank)[0])

    def parts(
        self, number: int, step: int, *, wrap: bool, remaining: RemainingBatches | None = None
    ) -> Iterator[WorkerBatch]:
        """Yield this worker's parts of the batches of a pass, starting at batch `step`.

        With `wrap` the following passes are read, too, and `step` may exceed the length of a pass.
        """
        settings, rank, window = self._settings, self._rank, self._window
        if wrap:
            number, step = number + step // self.steps, step % self.steps
        while True:
            plan = self._plan_of_pass(remaining, number)
            order = self._data.order_of_pass(plan, settings, number, rank, window, step)
            self._current = plan, order
            for index in range(step, plan.steps):
                start, stop, total = plan.batch(index, rank)
                rows = stop - start
                batch = self._assembly(self._data.batch(start, stop, order)) if rows else None
                yield WorkerBatch(batch, rows, total)
            if not wrap:
                return
            number, step = number + 1, 0

    def batches(
        self, assembly: BatchArguments, batch_size: int | None, world_size: int, limit: int | None
    ) -> Iterator[tuple[KerasBatch, int]]:
        """Yield each batch of this worker's rows, in order, and its number of rows."""
        size = max(1, (batch_size or 1) // world_size)
        for rows, batch in itertools.islice(self._data.in_batches(size), limit):
            yield assembly(batch), rows


def check_end(data: Rows, what: str, argument: str, limit: int | None) -> None:
    """Raise an error if an endless dataset would be read without a limit.

    Parameters
    ----------
    data : ColumnRows or DatasetRows
    what : str
        Purpose of the data, for the message.
    argument, limit
        Name and value of the argument that limits the number of batches.
    """
    if limit is None and data.is_endless:
        raise UsageError(
            f"The tf.data.Dataset of the {what} data repeats forever; pass {argument}=, or "
            "end it by .take or by .repeat with a number",
            code="data-endless",
            argument=argument,
        )


def open_rows(
    worker: Worker,
    shard: Shard | LoaderShard,
    settings: KerasEvaluationSettings,
    config: dict[str, Any],
    sync: GradientSync,
    *,
    is_training: bool = False,
) -> Rows:
    """Open the rows of a shard.

    Parameters
    ----------
    worker : Worker
    shard : Shard or LoaderShard
    settings : KerasEvaluationSettings
        ``batch_size``, ``feature_cols`` and ``label_cols`` of the input.
    config : dict
        Argument of a function that creates a dataset.
    sync : GradientSync
    is_training : bool
        Whether a fit reads the rows, so that a table is read in its global order.

    Returns
    -------
    ColumnRows or DatasetRows
    """
    data = open_data(worker, shard, settings, config)
    deal_streams([data], sync, lambda text: print(text, flush=True))
    if not is_dataset(data):
        if is_training:
            data = in_table_order(data, shard, settings, sync)
        return ColumnRows(data, config, worker)
    check_elements(data)
    return DatasetRows(data, sync)


def open_data(
    worker: Worker,
    shard: Shard | LoaderShard,
    settings: KerasEvaluationSettings,
    config: dict[str, Any],
) -> BatchSource | tf.data.Dataset:
    """Open the data of a shard.

    Parameters
    ----------
    worker : Worker or bigdl.orca.parameter_layer.fit.replica.ParameterLayerReplica
    shard, settings, config
        See :func:`open_rows`.

    Returns
    -------
    TensorShard, bigdl.training.batches.LoaderBatches or tf.data.Dataset
    """
    if not isinstance(shard, LoaderShard):
        return settings.open_batches(shard, worker, config)
    from torch.utils.data import DataLoader, Dataset

    made = cloudpickle.loads(shard.payload())
    if callable(made) and not hasattr(made, "__getitem__"):
        ranks = {"rank": worker.rank, "size": worker.world_size}
        made = made({**config, **ranks}, settings.batch_size)
    if is_dataset(made):
        return made
    if not isinstance(made, DataLoader | Dataset):
        raise UsageError(
            "The function given as data must return a tf.data.Dataset or a torch DataLoader, it "
            f"returned {type(made).__name__}",
            code="function-result",
            argument="data",
        )
    return settings.open_batches(shard, worker, config, made)


def is_dataset(data: object) -> bool:
    """Return True for a ``tf.data.Dataset``, without importing TensorFlow."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(data, tf.data.Dataset)


def build_for(model: keras.Model, batch: KerasBatch) -> None:
    """Build all variables of a model, its metrics and its optimizer, as Keras ``fit`` does.

    Parameters
    ----------
    model : keras.Model
    batch : tuple
        An example batch.
    """

    def array(value: Any) -> Tensor | None:
        if value is None:
            return None
        if getattr(value, "dtype", None) == "string":  # a tensor of TensorFlow
            return cast("tf.Tensor", value)
        array: np.ndarray = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        return keras.ops.convert_to_tensor(array) if array.dtype.kind == TEXT else array

    if not isinstance(batch, tuple) and model.built:  # for a custom step
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return
    _check_texts(model, inputs_of(batch))
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(array, batch))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        cause = str(error).rpartition("Exception encountered:")[2]  # skip the advice of Keras
        shown = one_line(type(error)(cause.replace("\033[1m", "").replace("\033[0m", "")))
        raise UsageError(
            f"The model does not accept these rows: {shown}", code="model-input"
        ) from error


def inputs_of(batch: Tensors) -> Tensors:
    """Return the model inputs of a batch: the first item of a tuple, else the whole batch."""
    return batch[0] if isinstance(batch, tuple) else batch


def _check_texts(model: keras.Model, inputs: Tensors) -> None:
    """Raise an error if the data has text where the model takes numbers, or vice versa."""
    try:
        expected = model.inputs
    except (AttributeError, ValueError):  # not built yet
        return
    leaves = keras.tree.flatten(inputs)
    if expected is None or len(expected) != len(leaves):
        return
    for tensor, value in zip(expected, leaves, strict=True):
        are_texts = value.dtype == "string" or getattr(value.dtype, "kind", None) == TEXT
        if are_texts and tensor.dtype != "string":
            raise UsageError(
                f"The model's input '{tensor.name}' takes {tensor.dtype} and the data has text for "
                "it; encode it as numbers first, or let the model look it up",
                code="data-dtype",
                column=tensor.name,
            )
        if not are_texts and tensor.dtype == "string":
            raise UsageError(
                f"The model's input '{tensor.name}' takes text and the data has {value.dtype} for "
                "it; pass a text column",
                code="data-dtype",
                column=tensor.name,
            )


# -- tf.data: every worker has the whole pipeline and takes a part of its batches ------------------

_SEED = 1  # for shuffles without a seed: the same on all workers


# -- on the driver --------------------------------------------------------------------------------


def shipped_dataset(dataset: tf.data.Dataset, name: str) -> DatasetGraph:
    """Convert a dataset to a picklable function that rebuilds it in a worker.

    Raises
    ------
    UsageError
        If the dataset depends on state of this process.
    """
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=2,  # fail
            strip_device_assignment=True,
        ).numpy()
    except tf.errors.OpError as error:
        raise UsageError(
            f"The dataset given as {name} cannot be shipped to the workers, since it runs Python "
            "code or depends on state of this process (from_generator, py_function, a lookup "
            "table); pass a function (config, batch_size) that creates it instead",
            code="data-type",
            argument=name,
        ) from error
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_off = policy == tf.data.experimental.AutoShardPolicy.OFF
    return DatasetGraph(with_seeds(graph, _SEED), dataset.element_spec, is_off)


def with_seeds(graph: bytes, seed: int) -> bytes:
    """Fix the shuffle seeds in a pipeline's graph; shuffles without a seed get `seed`.

    Newer shuffle operations keep their seeds outside of the graph, so a loaded graph would have
    different ones. A seed of (0, 0) means a random seed.
    """
    definition = tf.compat.v1.GraphDef.FromString(graph)
    nodes = {node.name: node for node in definition.node}
    for node in definition.node:
        if not node.op.startswith("ShuffleDataset"):
            continue
        node.op = "ShuffleDataset"
        del node.input[4:]
        seeds = [nodes[name] for name in node.input[2:4]]
        values = [int(tf.make_ndarray(each.attr["value"].tensor)) for each in seeds]
        if not any(values):
            for each in seeds:
                each.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(seed, tf.int64))
    return bytes(definition.SerializeToString())


class DatasetGraph:
    """Serialized graph of a dataset, callable like a user's dataset function."""

    def __init__(self, graph: bytes, spec: tf.TypeSpec, is_off: bool):
        self._graph, self._spec, self._is_off = graph, spec, is_off

    def __call__(self, config: object, batch_size: object) -> tf.data.Dataset:
        variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph)
        dataset = tf.data.experimental.from_variant(variant, self._spec)
        if not self._is_off:
            return dataset
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)


# -- in a worker ----------------------------------------------------------------------------------


def check_elements(dataset: tf.data.Dataset) -> None:
    """Raise an error if a dataset's elements are single rows instead of batches."""
    if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            "The tf.data.Dataset yields single rows; end it with .batch(batch_size)",
            code="data-structure",
        )


class DatasetRows:
    """Batches of a ``tf.data.Dataset``, with the interface of :class:`ColumnRows`.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Batches ``(x, y)`` or ``(x, y, weights)``, or of any structure for a model with a custom
        step.
    sync : GradientSync

    Attributes
    ----------
    spec : nested tf.TypeSpec
        Element spec of the batches.
    """

    def __init__(self, dataset: tf.data.Dataset, sync: GradientSync):
        self._dataset, self._sync = dataset, sync
        self.spec = dataset.element_spec
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self._is_shared = policy != tf.data.experimental.AutoShardPolicy.OFF
        self.is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        self.known: dict[str, Any]
        self.known = {"rows": 1, "fingerprint": 0, "drop_last": False, "window": 0, "types": None}
        self.steps: int | None = None
        self._class_weight: dict[int, float] | None = None
        self._passes = 0  # passes that were started

    def example(self, types: object, assembly: BatchArguments) -> KerasBatch:
        def zeros(spec: tf.TensorSpec) -> tf.Tensor:
            shape = [1, *(1 if n is None else n for n in spec.shape[1:])]
            return tf.zeros(shape, spec.dtype)

        batch: KerasBatch = tf.nest.map_structure(zeros, self._dataset.element_spec)
        return batch

    def plan(self, settings: RunSettings, everyone: object) -> BatchLayout:
        return BatchLayout.of(settings, [])

    def take_types(self, types: object, training: object) -> None:
        """Do nothing, since a pipeline determines its dtypes."""

    def start(
        self, assembly: BatchArguments, settings: Any, rank: int, window: int
    ) -> None:  # settings: of the fit
        self._class_weight = settings.class_weight

    def batches(
        self, assembly: BatchArguments, batch_size: object, world_size: int, limit: int | None
    ) -> Iterator[tuple[Any, int]]:
        for batch in self._dataset if limit is None else self._dataset.take(limit):
            part, rows = self._part(batch)
            if rows:
                yield part, rows

    @property
    def source(self) -> BatchSource:
        raise TypeError("a dataset cannot be read by index")

    def steps_of_pass(self, remaining: RemainingBatches | None, number: int) -> int | None:
        return self.steps

    def ids_from(self, step: int) -> None:
        """Return None, since batches of a dataset have no row ids."""

    def parts(
        self, number: int, step: int, *, wrap: bool, remaining: RemainingBatches | None = None
    ) -> Iterator[WorkerBatch]:
        while self._passes < number:  # the shuffle order depends on the number of iterations
            iter(self._dataset)
            self._passes += 1
        batches = itertools.islice(self._read(wrap), step, None)
        is_checked = False
        for batch, is_first in itertools.chain(batches, itertools.repeat((None, False))):
            part, rows = (None, 0) if batch is None else self._part(batch)
            if not self._is_shared:
                total = int(sum(row[0] for row in self._sync.all_gather([float(rows)])))
            else:
                total = 0 if batch is None else _rows(batch)
            if not total:
                return
            if self._is_shared and (is_first or not is_checked):
                self._check_equal(batch)
                is_checked = True
            if part is not None and rows and self._class_weight is not None:
                part = with_class_weight(part, self._class_weight)
            yield WorkerBatch(part if rows else None, rows, total)

    def _read(self, wrap: bool) -> Iterator[tuple[Any, bool]]:
        """Yield each batch and whether it is the first of its pass; read more passes if `wrap`."""
        is_first = False
        while not is_first:  # still True after a pass without rows
            self._passes += 1
            is_first = True
            for batch in self._dataset:
                yield batch, is_first
                is_first = False
            if not wrap:
                return

    def _check_equal(self, batch: Tensors) -> None:
        """Raise an error if the workers read different rows."""
        checksum = 0
        for leaf in tf.nest.flatten(batch):
            values = np.asarray(leaf.numpy())
            if values.dtype == object:  # texts
                values = values.astype("S")
            checksum = zlib.crc32(values.tobytes(), checksum)
        everyone = self._sync.all_gather([float(checksum)])
        if any(row != everyone[0] for row in everyone):
            raise UsageError(
                "The workers read different rows from the tf.data.Dataset; give its shuffle a "
                'seed, or take a part by config["rank"] and config["size"] and set '
                "options.experimental_distribute.auto_shard_policy to AutoShardPolicy.OFF",
                code="data-order",
            )

    def _part(self, batch: Tensors) -> tuple[Any, int]:
        """Return this worker's part of a batch and its number of rows."""
        rows, rank, size = _rows(batch), self._sync.rank, self._sync.world_size
        if not self._is_shared:
            return batch, rows
        low, high = rows * rank // size, rows * (rank + 1) // size
        return tf.nest.map_structure(lambda leaf: leaf[low:high], batch), high - low


def _rows(batch: Tensors) -> int:
    return int(tf.shape(tf.nest.flatten(batch)[0])[0])


Rows = ColumnRows | DatasetRows
