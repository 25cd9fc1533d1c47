"""Evaluation of a Keras model: its figures are those of the rows of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.runtime.collectives.base import GradientSync
from bigdl.training.batches import all_gather_json
from bigdl.training.keras.backends import Packed, seed_keras, steps_of
from bigdl.training.keras.callbacks import WorkerCallbacks
from bigdl.training.keras.data import (
    Assembly,
    ColumnRows,
    Rows,
    build_for,
    is_dataset,
    open_data,
)
from bigdl.training.keras.state import array_of, merge_metrics, put_weights, tensor_of

__all__ = [
    "EvaluateProgram",
    "EvaluationSettings",
    "evaluate_batches",
    "figures_of",
    "numbers_of",
    "open_rows",
]


@dataclass(frozen=True)
class EvaluationSettings:
    """The arguments of ``evaluate``, or what ``fit`` says of its validation.

    Attributes
    ----------
    batch_size : int or None
        Rows of a batch over all workers together; None for a function that does without.
    feature_cols, label_cols : sequence of str or None
        With `weighted` the last label column holds the weights of the rows.
    num_steps : int, optional
        Batches of each worker at most.
    """

    batch_size: int | None
    feature_cols: Sequence[str] | None
    label_cols: Sequence[str] | None
    num_steps: int | None = None
    weighted: bool = False


def open_rows(
    worker: Any, shard: Any, settings: EvaluationSettings, config: dict, sync: Any
) -> Rows:
    """Return the :class:`Rows` of a shard.

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
    Rows
    """
    data = open_data(worker, shard, settings, config)
    if not is_dataset(data):
        return ColumnRows(data, config, worker)
    from bigdl.training.keras.datasets import DatasetRows, check_elements

    check_elements(data)
    return DatasetRows(data, sync)


def evaluate_batches(
    model: Any, steps: Any, batches: Iterable, sync: GradientSync, callbacks: Any = None
) -> dict[str, float]:
    """Return the figures of a model over the batches of all workers; a collective.

    Parameters
    ----------
    model : keras.Model
    steps : Steps or WorkerSteps
    batches : iterable of (batch, rows)
        Of this worker.
    sync : GradientSync
    callbacks : keras.callbacks.CallbackList, optional
    """
    model.reset_metrics()
    initial = [tensor_of(v) for v in model.metrics_variables]
    if callbacks is not None:
        callbacks.on_test_begin()
    logs, rows = {}, 0
    for index, (batch, rows_of_batch) in enumerate(batches):
        if callbacks is not None:
            callbacks.on_test_batch_begin(index)
        logs, rows = steps.test(batch), rows + rows_of_batch
        if callbacks is not None:
            callbacks.on_test_batch_end(index, numbers_of(logs))
    figures = figures_of(model, logs, rows, sync, initial)
    if callbacks is not None:
        callbacks.on_test_end(figures)
    return figures


def figures_of(
    model: Any, logs: dict, rows: int, sync: GradientSync, initial: list
) -> dict[str, float]:
    """Return the figures of an epoch, merged over the workers; a collective.

    A model whose step returns figures of its own instead of its metrics has means of them.

    Parameters
    ----------
    model : keras.Model
    logs : dict
        What the last step of this worker returned.
    rows : int
        That this worker has seen.
    sync : GradientSync
    initial : list of tensor
        See :func:`merge_metrics`.
    """
    merge_metrics(model, sync, initial)
    metrics = numbers_of(model.get_metrics_result())
    names: list[str] = next((each for each in all_gather_json(sync, sorted(logs)) if each), [])
    if not names or set(names) <= set(metrics):
        return metrics
    figures = numbers_of(logs)
    everyone = sync.all_gather([float(rows), *(figures.get(name, 0.0) for name in names)])
    total = sum(row[0] for row in everyone) or 1.0
    return {
        name: sum(row[0] * row[1 + i] for row in everyone) / total for i, name in enumerate(names)
    }


def numbers_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as Python numbers (or lists of them)."""

    def number(value):
        array = array_of(value)
        return array.item() if array.ndim == 0 else array.tolist()

    return {name: number(value) for name, value in logs.items()}


@dataclass
class EvaluateProgram:
    """An evaluation, as shipped to the workers.

    Attributes
    ----------
    packed : Packed
        The parts of the model, and the callbacks.
    """

    packed: Packed
    config: dict
    settings: EvaluationSettings
    seed: int
    sync: Any

    def __call__(self, worker):
        parts, callbacks = self.packed.unpack(self.config, worker.threads)
        with tuned_allocator():
            return self._evaluate(worker, self.sync(worker), parts, callbacks)

    def _evaluate(self, worker, sync, parts, callbacks):
        settings = self.settings
        seed_keras(self.seed)
        model = parts.build(training=True)
        sync.start()
        data = open_rows(worker, worker.shard, settings, self.config, sync)
        data.check_end("evaluation", "num_steps", settings.num_steps)
        known = all_gather_json(sync, data.known)
        if not sum(each["rows"] for each in known):
            raise UsageError("The data to evaluate has no rows")
        assembly = Assembly.of(
            model, settings.feature_cols, settings.label_cols, weighted=settings.weighted
        )
        types = next((each["types"] for each in known if each["types"]), None)
        build_for(model, data.example(types, assembly))
        weights = sync.broadcast(worker.state() if sync.rank == 0 else None)
        if weights:
            put_weights(model, weights)
        hooks = WorkerCallbacks(callbacks, model, sync.rank).list
        batches = data.batches(assembly, settings.batch_size, sync.world_size, settings.num_steps)
        return evaluate_batches(model, steps_of(model), batches, sync, hooks)
