"""Keras models in trials, trained one epoch at a time by the Estimator's training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.metrics import Evaluator
from bigdl.orca.automl.model.data import TrialRows, batch_size_of, of_config, part_of
from bigdl.orca.automl.trial import (
    Builder,
    SearchMetric,
    TrialJob,
    TrialModel,
    as_list,
    compute_metrics,
    concatenate_batches,
)
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.training.keras.data import (
    ColumnRows,
    DatasetRows,
    check_elements,
    is_dataset,
)
from bigdl.training.keras.loop import KerasFit, KerasFitSettings
from bigdl.training.keras.state import dump_optimizers, dump_weights, put_optimizers, put_weights
from bigdl.training.position import Position, StoppingCriterion

if TYPE_CHECKING:
    from bigdl.runtime.worker import Worker

_MODES = {"loss": "min", "acc": "max", "auc": "max"}


class KerasModelBuilder(Builder):
    """Builder of compiled Keras models.

    Parameters
    ----------
    model_creator : callable
        ``f(config)`` returns a compiled model.

    Raises
    ------
    UsageError
        If `model_creator` is not a function.
    """

    takes_workers = True

    def __init__(self, model_creator: Callable):
        if isinstance(model_creator, type) or not callable(model_creator):
            raise UsageError(
                "model_creator must be a function of the configuration that returns a compiled "
                f"Keras model, got {type(model_creator).__name__}",
                code="argument-type",
                argument="model_creator",
            )
        self.model_creator = model_creator

    def build(self, config, job, worker):
        return _KerasTrial(self, config, job, worker)

    def load(self, config, weights):
        model = self.compiled(config)
        put_weights(model, weights)
        return model

    def default_metric(self, make_config):
        """Return the first metric of the model's ``compile`` call, or ``"loss"`` if it has none."""
        model = self.compiled(make_config())
        metric = (model.get_compile_config() or {}).get("metrics")
        while isinstance(metric, list | tuple) and metric:
            metric = metric[0]
        if isinstance(metric, Mapping) and isinstance(
            metric.get("config"), Mapping
        ):  # a metric object
            metric = metric["config"].get("name")
        return metric if metric and isinstance(metric, str) else "loss"

    def knows(self, metric):
        if metric.lower() in Evaluator.metrics_func:
            return False, None
        return True, _MODES.get(metric)

    def compiled(self, config):
        """Create the user's model from a configuration and check that it is compiled."""
        model = self.model_creator(dict(config))
        if not getattr(model, "compiled", False):
            raise UsageError(
                "You must create a compiled model in model_creator; call model.compile(...) before "
                f"it is returned, got {type(model).__name__}",
                code="model-type",
            )
        return model


class _KerasTrial(TrialModel):
    """Keras model of one trial, trained epoch by epoch.

    Parameters
    ----------
    builder : KerasModelBuilder
    config : dict
        ``batch_size`` (default 32) is the number of rows in a batch of arrays; ``shuffle`` (default
        True) shuffles their rows.
    job : TrialJob
    worker : Worker
    """

    def __init__(
        self, builder: KerasModelBuilder, config: dict[str, Any], job: TrialJob, worker: Worker
    ):
        train, self._validation = (
            of_config(worker.shards[k], config) for k in ("data", "validation")
        )
        worker.shards = {"data": train}  # Keras evaluates the validation data itself
        rows = train if isinstance(train, TrialRows) else TrialRows({}, {})
        size = batch_size_of(config, train)
        settings = KerasFitSettings(
            stop_at=StoppingCriterion(epochs=job.epochs),
            batch_size=size,
            seed=job.seed,
            shuffle=bool(config.get("shuffle", True)),
            checkpoint_trigger=None,
            feature_cols=list(rows.features),
            label_cols=list(rows.targets),
            verbose=0,
        )
        sync = TorchDistributedSync(worker)
        # has the interface of bigdl.orca.learn.tf2.parts.KerasParts
        parts = SimpleNamespace(build=lambda training: builder.compiled(config))

        def open_shard(shard, model):
            if is_dataset(shard):
                check_elements(shard)
                return DatasetRows(shard, sync)
            return ColumnRows(part_of(shard, worker), config, worker)

        fit = KerasFit(worker, sync, parts, settings, (), config, open_shard=open_shard)
        fit.hooks.begin_fit()
        self._fit, self.model, self._sync, self._batch_size = fit, fit.model, sync, size
        self._metrics = job.goal.metrics

    def epoch(self):
        self._fit.epochs.run_epoch()
        if self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
        values = self._compute_metrics() if self._sync.rank == 0 else [0.0] * len(self._metrics)
        return self._sync.all_gather(values)[0]

    def weights(self):
        return dump_weights(self.model)

    def state(self):
        parts = dump_weights(self.model), dump_optimizers(self.model)
        return {"parts": parts, "position": self._fit.state.position.to_json()}

    def restore(self, state):
        rate = float(np.asarray(self.model.optimizer.learning_rate))
        for put, data in zip((put_weights, put_optimizers), state["parts"], strict=True):
            put(self.model, data)
        # keep this trial's learning rate; the restored moments are of the other trial
        with contextlib.suppress(TypeError):  # a schedule, which depends on the step count
            self.model.optimizer.learning_rate = rate
        self._fit.state.position = Position.of(state["position"])

    # -- metrics of the validation data ------------------------------------------------------------

    def _compute_metrics(self) -> list[float]:
        known = Evaluator.metrics_func
        compiled = [m for m in self._metrics if m.function is None and m.name not in known]
        results = self._evaluate(compiled) if compiled else {}
        others = [metric for metric in self._metrics if metric not in compiled]
        if others:
            values = compute_metrics(*self._predict(), others)
            results.update(zip((m.name for m in others), values, strict=True))
        return [float(results[metric.name]) for metric in self._metrics]

    def _evaluate(self, metrics: Sequence[SearchMetric]) -> dict[str, float]:
        arguments: dict[str, Any] = {"x": self._validation}
        if isinstance(self._validation, TrialRows):
            arguments = dict(zip("xy", self._arrays(self._validation), strict=True))
            arguments["batch_size"] = self._batch_size
        results = self.model.evaluate(**arguments, verbose=0, return_dict=True)
        for metric in metrics:
            if metric.name not in results:
                raise UsageError(
                    f"The model has no metric {metric.name!r}; it was compiled with "
                    f"{', '.join(results)}",
                    code="name-unknown",
                    metric=metric.name,
                    allowed=list(results),
                )
        return results

    def _predict(self) -> tuple[list, list]:
        """Return targets and predictions of the validation data, in the same order."""
        if isinstance(self._validation, TrialRows):
            x, _ = self._arrays(self._validation)
            outputs = as_list(self.model.predict(x, self._batch_size, verbose=0))
            return list(self._validation.targets.values()), outputs
        batches = [
            (as_list(y), as_list(self.model.predict_on_batch(x))) for x, y, *_ in self._validation
        ]
        if not batches:
            raise UsageError("The validation data has no rows", code="data-empty")
        targets, outputs = (concatenate_batches(each) for each in zip(*batches, strict=True))
        return targets, outputs

    def _arrays(self, rows: TrialRows) -> tuple:
        """Return all inputs and targets in the structure that the model expects."""
        targets = tuple(rows.targets.values())
        return self._fit.rows.assembly(
            [*rows.features.values(), targets[0] if len(targets) == 1 else targets]
        )
