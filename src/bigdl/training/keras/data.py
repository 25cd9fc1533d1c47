"""A worker's input as batches that a Keras model takes: ``(x, y)`` or ``(x, y, weights)``.

Rows are read again and again; one time is a *pass*.  ``parts`` yields this worker's parts of the
batches of a pass, on all ranks together.  An epoch is one pass, or, with ``steps_per_epoch``, so
many batches of one pass after the other.

A function ``creator(config, batch_size)`` is called in every worker with the global batch size; a
``tf.data.Dataset`` travels as the graph that TensorFlow makes of it.  Both must give batches.

*shared* (the rule)
    Worker r of N takes the r-th part of each batch, so the batches are those of one process,
    whatever N is.  All workers must read the same rows: they run the function under one seed, so
    ``shuffle`` without a seed of its own does the same on all of them.  That the first batches are
    equal is checked.
*sharded by the user*
    With ``experimental_distribute.auto_shard_policy = OFF`` a worker takes all that its pipeline
    gives; the function finds ``rank`` and ``size`` in `config`.  A batch of the training is then
    the batches of all workers together, and one whose rows end first goes on without.

A dataset that tells that it has no end is refused without ``steps_per_epoch``.  To go on from a
checkpoint, the batches that were seen are read again and dropped.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
from bigdl.training.position import RunSettings
from bigdl.training.remaining_rows import RemainingBatches

keras = LazyModule("keras", "tf")
tf = LazyModule("tensorflow", "tf")


@dataclass
class KerasEvaluationSettings(BatchSettings):
    """The arguments of ``evaluate``, or what ``fit`` says of its validation."""

    def assembly(self, model: Any, class_weight: dict[int, float] | None = None) -> BatchArguments:
        """Return what makes the batches of a model."""
        return BatchArguments.of(
            model, self.feature_cols, self.label_cols, self.weighted, class_weight
        )


@dataclass(frozen=True)
class BatchArguments:
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
        Names of the model's outputs that the target columns belong to, in the columns' order.
    order : sequence of str, optional
        Names of the model's outputs in its order; None of a model that returns a dict or has one
        output without a name.
    takes_any : bool
        Whether the model's own training step takes batches of any form.
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
        model: Any,
        names: Sequence[str] | None,
        labels: Sequence[str] | None = None,
        weighted: bool = False,
        class_weight: dict[int, float] | None = None,
    ) -> BatchArguments:
        """Return the assembly for a model and the columns that it is given."""
        by_name = bool(names) and isinstance(_structure_of(model, "input"), dict)
        own = list(_names_of_outputs(model) or ())
        targets = list(labels or ())[: -1 if weighted else None]
        outputs = targets if own and set(targets) == set(own) else own
        order = None if isinstance(_structure_of(model, "output"), dict) else own
        any_form = has_own_step(model, "train_step")
        loose = not targets or outputs is not targets
        return cls(names, by_name, weighted, class_weight, outputs or None, order, any_form, loose)

    def inputs(self, features: Sequence[Any]) -> Any:
        """Return ``x`` of the feature columns."""
        if self.by_name:
            return dict(zip(self.names or (), features, strict=True))
        return features[0] if len(features) == 1 else tuple(features)

    def __call__(self, columns: Any) -> Any:
        """Return the batch of the feature columns and the target, or a tuple of targets."""
        if isinstance(columns, dict):
            if self.takes_any:
                return columns
            raise UsageError(
                "The loader gives batches that are dicts, which only a model with a train_step of "
                "its own takes; let it give (inputs, targets), where both may be dicts",
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
        """Raise what an error of the first step may mean for targets that have no names."""
        if self.is_by_position and self.outputs is not None and len(self.outputs) > 1:
            raise UsageError(
                "The training step failed on targets that were given without names, so that they "
                f"belong to the model's outputs in the order {', '.join(map(repr, self.outputs))}; "
                f"give them as a dict by these names if that is another order ({one_line(error)})",
                code="model-output",
                columns=list(self.outputs),
            ) from error

    def _of_outputs(self, target: Any) -> Any:
        """Return targets in the structure of the model's outputs, to which their names belong."""
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
            # Keras would take a tuple for that of the keys in alphabetical order
            return target
        if set(target) != set(self.order):
            missing = ", ".join(repr(name) for name in self.order if name not in target)
            raise UsageError(
                f"The targets lack {missing}, which the model returns", code="model-output"
            )
        parts = tuple(target[name] for name in self.order)
        return parts[0] if len(parts) == 1 else parts


def _names_of_outputs(model: Any) -> list[str] | None:
    """Return the names of a functional model's outputs, by which targets may be given."""
    output = _structure_of(model, "output")
    if isinstance(output, dict):
        return list(output)
    names = None if output is None else _structure_of(model, "output_names")
    return list(names) if names and len(set(names)) == len(names) else None


def has_own_step(model: Any, name: str) -> bool:
    """Return True if a model has a ``train_step`` or ``test_step`` other than that of Keras."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def check_step(model: Any, rows: Any, name: str) -> None:
    """Refuse batches that are no ``(x, y)`` for a model that trains or tests as Keras does.

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
        f"model without a {name} of its own, they are {spec}",
        code="data-structure",
    )


def _is_pair(spec: Any) -> bool:
    return isinstance(spec, tuple) and len(spec) in (2, 3)


def _structure_of(model: Any, name: str) -> Any:
    """Return a functional model's ``input`` or ``output``; None of one that is not built yet."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return None


def with_class_weight(batch: tuple[Any, ...], table: dict[int, float]) -> tuple[Any, ...]:
    """Return a batch whose rows weigh what their class does, besides their own weight.

    Classes are whole numbers, or the largest entry of a one-hot row; one without an entry weighs 1.
    """
    import torch

    if not isinstance(batch, tuple) or len(batch) < 2:
        raise UsageError(
            "class_weight needs batches (x, y)", code="data-structure", argument="class_weight"
        )
    x, y, *weights = batch
    if isinstance(y, dict | list | tuple):
        raise UsageError(
            "class_weight is for models of one output; use weights of the rows",
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
        Of this worker.
    total : int
        Of all workers; 0 at the end of a pass.
    """

    batch: Any
    rows: int
    total: int


class ColumnRows:
    """Rows of one worker that can be reached by number, for training or evaluation.

    Parameters
    ----------
    data : TensorShard or LoaderBatches
    config : dict
        ``shuffle_memory``: bytes that shuffled rows may take.
    worker : Worker

    Attributes
    ----------
    known : dict
        Facts that the workers exchange, see :meth:`~bigdl.training.batches.BatchSource.facts`.
    is_endless : bool
        True of an input that tells that it has no end.
    steps : int or None
        Batches of a pass, where that is known once :meth:`plan` was called.
    """

    known: dict[str, Any]
    is_endless = False
    steps: int
    _current: tuple[BatchPlan, Any] | None = None  # batches and order of the pass that is read

    def __init__(self, data: BatchSource, config: dict[str, Any], worker: Any):
        self._data = data
        self.known = data.facts(data.window(shuffle_memory(config, worker.threads)))

    def example(self, types: list[Any] | None, assembly: BatchArguments) -> tuple[Any, ...]:
        """Return a batch of one row, of zeros where the types of the columns are known."""
        if types is not None:
            inputs, targets = ([zero_column(each, 1) for each in columns] for columns in types)
            target = targets[0] if len(targets) == 1 else tuple(targets)
            return cast("tuple[Any, ...]", assembly([*inputs, target]))
        if not self._data.rows:
            raise UsageError(
                "The loader has fewer samples than there are workers; use fewer workers",
                code="data-empty",
            )
        return cast("tuple[Any, ...]", assembly(self._data.batch(0, 1)))

    def plan(self, settings: RunSettings, everyone: list[dict[str, Any]]) -> BatchLayout:
        """Cut the rows of all workers into batches."""
        self._plan, batches = plan_batches(settings, everyone)
        self.steps = self._plan.steps
        return batches

    def take_types(self, types: list[Any] | None, training: Any) -> None:
        """Give out numbers in the dtypes that they have in the training data."""
        self._data.take_types(types, training._data)

    def start(
        self, assembly: BatchArguments, settings: RunSettings, rank: int, window: int
    ) -> None:
        """Prepare for training; `window` rows are shuffled at a time, 0 for all."""
        self._assembly, self._settings, self._rank = assembly, settings, rank
        self._window = window

    @property
    def source(self) -> BatchSource:
        """The rows themselves."""
        return self._data

    def steps_of_pass(self, rest: RemainingBatches | None, number: int) -> int:
        """Batches of a pass; `rest` has those that are left of one."""
        return self._plan_of_pass(rest, number).steps

    def _plan_of_pass(self, rest: RemainingBatches | None, number: int) -> BatchPlan:
        return rest if rest is not None and rest.epoch == number else self._plan

    def ids_from(self, step: int) -> np.ndarray | None:
        """Ids of this worker's rows from a batch on of the pass that is being read."""
        if self._current is None:
            return None
        plan, order = self._current
        return self._data.ids_from(order, plan.batch(step, self._rank)[0])

    def parts(
        self, number: int, step: int, *, wrap: bool, rest: RemainingBatches | None = None
    ) -> Iterator[WorkerBatch]:
        """Yield this worker's parts from a batch of a pass on, to the end of the pass.

        With `wrap` those of the passes after it follow, and a `step` beyond the end of the pass
        belongs to them.
        """
        settings, rank, window = self._settings, self._rank, self._window
        if wrap:
            number, step = number + step // self.steps, step % self.steps
        while True:
            plan = self._plan_of_pass(rest, number)
            order = self._data.order_of_pass(plan, settings, number, rank, window, step)
            self._current = plan, order
            for place in range(step, plan.steps):
                start, stop, total = plan.batch(place, rank)
                rows = stop - start
                batch = self._assembly(self._data.batch(start, stop, order)) if rows else None
                yield WorkerBatch(batch, rows, total)
            if not wrap:
                return
            number, step = number + 1, 0

    def batches(
        self, assembly: BatchArguments, batch_size: int | None, world_size: int, limit: int | None
    ) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield batch and number of rows, of this worker's rows in their order."""
        size = max(1, (batch_size or 1) // world_size)
        for rows, batch in itertools.islice(self._data.in_batches(size), limit):
            yield assembly(batch), rows


def check_end(data: Rows, what: str, argument: str, limit: int | None) -> None:
    """Refuse to read rows to their end that have none.

    Parameters
    ----------
    data : ColumnRows or DatasetRows
    what : str
        For the message.
    argument, limit
        Name and value of what limits the number of batches.
    """
    if limit is None and data.is_endless:
        raise UsageError(
            f"The tf.data.Dataset of the {what} data repeats for ever; pass {argument}=, or "
            "end it by .take or by .repeat with a number",
            code="data-endless",
            argument=argument,
        )


def open_rows(
    worker: Any, shard: Any, settings: KerasEvaluationSettings, config: dict[str, Any], sync: Any
) -> Rows:
    """Return the rows of a shard.

    Parameters
    ----------
    worker : Worker
    shard : Shard or LoaderShard
    settings : KerasEvaluationSettings
        ``batch_size``, ``feature_cols`` and ``label_cols`` of the input.
    config : dict
        For a function that makes a dataset.
    sync : GradientSync

    Returns
    -------
    ColumnRows or DatasetRows
    """
    data = open_data(worker, shard, settings, config)
    deal_streams([data], sync, lambda text: print(text, flush=True))
    if not is_dataset(data):
        return ColumnRows(data, config, worker)
    check_elements(data)
    return DatasetRows(data, sync)


def open_data(
    worker: Any, shard: Any, settings: KerasEvaluationSettings, config: dict[str, Any]
) -> Any:
    """Return the data of a shard.

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
        place = {"rank": worker.rank, "size": worker.world_size}
        made = made({**config, **place}, settings.batch_size)
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


def is_dataset(data: Any) -> bool:
    """Return True for a ``tf.data.Dataset``; does not import TensorFlow."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(data, tf.data.Dataset)


def build_for(model: Any, batch: tuple[Any, ...]) -> None:
    """Make all variables of a model, its metrics and its optimizer, as ``fit`` of Keras does.

    Parameters
    ----------
    model : keras.Model
    batch : tuple
        A batch that it takes.
    """

    def array(value: Any) -> Any:
        if value is None:
            return None
        if getattr(value, "dtype", None) == "string":  # a tensor of TensorFlow
            return value
        value = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        return keras.ops.convert_to_tensor(value) if value.dtype.kind == TEXT else value

    if not isinstance(batch, tuple) and model.built:  # for a step of its own
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return
    _check_texts(model, inputs_of(batch))
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(array, batch))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        cause = str(error).rpartition("Exception encountered:")[2]  # after advice of Keras
        shown = one_line(type(error)(cause.replace("\033[1m", "").replace("\033[0m", "")))
        raise UsageError(
            f"The model does not take rows of this form: {shown}", code="model-input"
        ) from error


def inputs_of(batch: Any) -> Any:
    """Return what a batch has for the model; all of one that is no tuple."""
    return batch[0] if isinstance(batch, tuple) else batch


def _check_texts(model: Any, inputs: Any) -> None:
    """Refuse texts for an input of numbers and the other way round, if a model tells its inputs."""
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
                "it; encode them as numbers first, or let the model look them up",
                code="data-dtype",
                column=place.name,
            )
        if not are_texts and place.dtype == "string":
            raise UsageError(
                f"The model's input '{place.name}' takes texts and the data has {value.dtype} for "
                "it; give it a column of texts",
                code="data-dtype",
                column=place.name,
            )


# -- tf.data: every worker has the whole pipeline and takes a part of its batches ------------------

_SEED = 1  # of shuffles that have none: the same on all workers


# -- on the driver --------------------------------------------------------------------------------


def shipped_dataset(dataset: Any, name: str) -> DatasetGraph:
    """Return a dataset as a function that makes it again in a worker.

    Raises
    ------
    UsageError
        If it depends on what cannot leave this process.
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
            "table); pass a function (config, batch_size) that makes it instead",
            code="data-type",
            argument=name,
        ) from error
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_off = policy == tf.data.experimental.AutoShardPolicy.OFF
    return DatasetGraph(with_seeds(graph, _SEED), dataset.element_spec, is_off)


def with_seeds(graph: bytes, seed: int) -> bytes:
    """Give a pipeline's shuffles the same seeds wherever it is loaded; `seed` for those without.

    Newer kinds of the operation keep their seeds outside of the graph, where loading it finds
    others, and a seed of (0, 0) means a random one.
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
    """The graph of a dataset, which a worker calls like a function of the user's."""

    def __init__(self, graph: bytes, spec: Any, is_off: bool):
        self._graph, self._spec, self._is_off = graph, spec, is_off

    def __call__(self, config: object, batch_size: object) -> Any:
        variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph)
        dataset = tf.data.experimental.from_variant(variant, self._spec)
        if not self._is_off:
            return dataset
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)


# -- in a worker ----------------------------------------------------------------------------------


def check_elements(dataset: Any) -> None:
    """Refuse a dataset whose elements are no batches."""
    if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            "The tf.data.Dataset gives single rows; end it with .batch(batch_size)",
            code="data-structure",
        )


class DatasetRows:
    """The batches of a ``tf.data.Dataset``, in the place of :class:`ColumnRows`.

    Parameters
    ----------
    dataset : tf.data.Dataset
        Of batches ``(x, y)`` or ``(x, y, weights)``, or of any form for a model whose own step
        takes it.
    sync : GradientSync

    Attributes
    ----------
    spec : nested tf.TypeSpec
        Of the batches.
    """

    def __init__(self, dataset: Any, sync: Any):
        self._dataset, self._sync = dataset, sync
        self.spec = dataset.element_spec
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self._is_shared = policy != tf.data.experimental.AutoShardPolicy.OFF
        self.is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        self.known: dict[str, Any]
        self.known = {"rows": 1, "fingerprint": 0, "drop_last": False, "window": 0, "types": None}
        self.steps: int | None = None
        self._class_weight: dict[int, float] | None = None
        self._passes = 0  # that were begun

    def example(self, types: Any, assembly: BatchArguments) -> Any:
        def zeros(spec: Any) -> Any:
            shape = [1, *(1 if n is None else n for n in spec.shape[1:])]
            return tf.zeros(shape, spec.dtype)

        return tf.nest.map_structure(zeros, self._dataset.element_spec)

    def plan(self, settings: RunSettings, everyone: Any) -> BatchLayout:
        return BatchLayout.of(settings, [])

    def take_types(self, types: Any, training: Any) -> None:
        """Leave the tensors as the pipeline makes them."""

    def start(self, assembly: BatchArguments, settings: Any, rank: int, window: int) -> None:
        self._class_weight = settings.class_weight

    def batches(
        self, assembly: BatchArguments, batch_size: Any, world_size: int, limit: int | None
    ) -> Iterator[tuple[Any, int]]:
        for batch in self._dataset if limit is None else self._dataset.take(limit):
            part, rows = self._part(batch)
            if rows:
                yield part, rows

    @property
    def source(self) -> BatchSource:
        raise TypeError("a dataset cannot be read by number")

    def steps_of_pass(self, rest: RemainingBatches | None, number: int) -> int | None:
        return self.steps

    def ids_from(self, step: int) -> None:
        """Return None: batches of a dataset have no ids."""

    def parts(
        self, number: int, step: int, *, wrap: bool, rest: RemainingBatches | None = None
    ) -> Iterator[WorkerBatch]:
        while self._passes < number:  # a dataset counts the times that it was shuffled
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
        """Yield the batches of a pass (or of all from it on) and True for the first of a pass."""
        is_first = False
        while not is_first:  # as it is after a pass without rows
            self._passes += 1
            is_first = True
            for batch in self._dataset:
                yield batch, is_first
                is_first = False
            if not wrap:
                return

    def _check_equal(self, batch: Any) -> None:
        """Refuse rows that differ between the workers: some would be read twice, others never."""
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

    def _part(self, batch: Any) -> tuple[Any, int]:
        """Return this worker's part of a batch and its number of rows."""
        rows, rank, size = _rows(batch), self._sync.rank, self._sync.world_size
        if not self._is_shared:
            return batch, rows
        low, high = rows * rank // size, rows * (rank + 1) // size
        return tf.nest.map_structure(lambda leaf: leaf[low:high], batch), high - low


def _rows(batch: Any) -> int:
    return int(tf.shape(tf.nest.flatten(batch)[0])[0])


Rows = ColumnRows | DatasetRows
