"""Evaluation of a Keras model: its figures are those of the rows of all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.common.memory import tuned_allocator
from bigdl.orca.learn.tf2.data import Assembly
from bigdl.orca.learn.tf2.fit_settings import EvaluationSettings
from bigdl.orca.learn.tf2.opening import build_for, check_end, open_rows
from bigdl.orca.learn.tf2.parts import Packed
from bigdl.orca.learn.tf2.running import merge_metrics
from bigdl.orca.learn.tf2.runtime import seed_keras
from bigdl.orca.learn.tf2.state import array_of, put_weights, tensor_of
from bigdl.orca.learn.tf2.steps import steps_of
from bigdl.training.batches import exchange
from bigdl.training.evaluation import evaluated
from bigdl.training.failure import FailurePolicy

__all__ = ["EvaluateProgram", "evaluate_batches", "figures_of", "numbers_of", "run_evaluation"]


def evaluate_batches(model, steps, batches, sync, callbacks=None) -> dict[str, float]:
    """The figures of a model over the batches of all workers; a collective.

    Parameters
    ----------
    model : keras.Model
    steps : TensorFlowSteps or TorchSteps
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


def figures_of(model, logs: dict, rows: int, sync, initial: list) -> dict[str, float]:
    """The figures of an epoch, merged over the workers; a collective.

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
    found = numbers_of(model.get_metrics_result())
    names = exchange(sync, sorted(logs))
    names = next((each for each in names if each), [])
    if not names or set(names) <= set(found):
        return found
    own = numbers_of(logs)
    everyone = sync.all_gather([float(rows), *(own.get(name, 0.0) for name in names)])
    total = sum(row[0] for row in everyone) or 1.0
    return {
        name: sum(row[0] * row[1 + i] for row in everyone) / total for i, name in enumerate(names)
    }


def numbers_of(logs: dict) -> dict[str, Any]:
    """Figures as Python numbers (or lists of them)."""

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
        from bigdl.orca.learn.tf2.callbacks import WorkerCallbacks

        settings = self.settings
        seed_keras(self.seed)
        model = parts.build(training=True)
        sync.start()
        data = open_rows(worker, worker.shard, settings, self.config, sync)
        check_end(data, "evaluation", "num_steps", settings.num_steps)
        known = exchange(sync, data.known)
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
        found = WorkerCallbacks(callbacks, model, sync.rank)
        batches = data.batches(assembly, settings.batch_size, sync.world_size, settings.num_steps)
        return evaluate_batches(model, steps_of(model), batches, sync, found.list)


def run_evaluation(job, weights: bytes, policy: FailurePolicy) -> dict:
    """Run an EvaluateProgram until it has ended or the policy gives up.

    Parameters
    ----------
    job : Job
        Of the engine; closed at the end.
    weights : bytes
        Empty for a model that is built by the workers.
    """
    from bigdl.runtime.jobs import NoRows

    with job:
        try:
            return evaluated(job, weights or None, policy)
        except NoRows:
            raise UsageError("The data to evaluate has no rows") from None
