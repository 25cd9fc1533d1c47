"""PyTorch models in trials, trained one epoch at a time by the Estimator's training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl import pytorch_utils
from bigdl.orca.automl.model.data import batch_size_of, of_config, part_of
from bigdl.orca.automl.trial import (
    Builder,
    SearchMetric,
    TrialModel,
    as_list,
    compute_metrics,
    concatenate_batches,
)
from bigdl.orca.learn.metrics.metric import TorchMetric
from bigdl.orca.learn.pytorch.loop import FitSettings, TorchFit
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.training.position import Position, StoppingCriterion
from bigdl.training.state import dumps, loads

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from bigdl.orca.automl.model.data import LoaderPart, RowsPart, TrialRows
    from bigdl.runtime.worker import Worker


class PytorchModelBuilder(Builder):
    """Builder of PyTorch models with optimizer and loss.

    Parameters
    ----------
    model_creator : callable
        ``f(config)`` returns an ``nn.Module``.
    optimizer_creator : str or callable
        Name in ``torch.optim``, or ``f(model, config)``.
    loss_creator : str, nn.Module or callable
        Name in ``torch.nn``, a loss, or ``f(config)``.

    Raises
    ------
    UsageError
        If an argument has another type or an unknown name.
    """

    floats = "float32"
    takes_workers = True

    def __init__(self, model_creator: Callable, optimizer_creator, loss_creator):
        import torch

        if isinstance(model_creator, torch.nn.Module) or not callable(model_creator):
            raise UsageError(
                "model_creator must be a function of the configuration that returns an nn.Module, "
                f"got {type(model_creator).__name__}",
                code="argument-type",
                argument="model_creator",
            )
        self.model_creator = model_creator
        self.optimizer_creator = pytorch_utils.optimizer_creator(optimizer_creator)
        self.loss_creator = pytorch_utils.validate_pytorch_loss(loss_creator)

    def build(self, config, job, worker):
        parts = ModelParts(self.module, self.optimizer_creator, self.loss_creator, config=config)
        worker.shards = {k: of_config(data, config) for k, data in worker.shards.items()}
        settings = _TrialFitSettings(
            stop_at=StoppingCriterion(epochs=job.epochs),
            batch_size=batch_size_of(config, worker.shards["data"]),
            seed=job.seed,
            feature_cols=(),
            label_cols=(),
            shuffle=bool(config.get("shuffle", True)),
            checkpoint_trigger=None,
            metrics=[_Predictions(job.goal.metrics)],
        )
        return _TorchTrial(TorchFit(worker, TorchDistributedSync(worker), parts, settings))

    def default_metric(self, make_config):
        raise UsageError(
            "You must input a valid metric value for fit_eval.; pass metric='accuracy', say",
            code="argument-missing",
            argument="metric",
        )

    def load(self, config, weights):
        model = self.module(config)
        model.load_state_dict(loads(weights))
        return model.eval()

    def module(self, config):
        """Create the user's model from a configuration and check its type."""
        import torch

        model = self.model_creator(config)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                "You must create a torch model in model_creator; it returned "
                f"{type(model).__name__}",
                code="model-type",
            )
        return model


@dataclass
class _TrialFitSettings(FitSettings):
    """Fit settings of a trial whose workers all hold the complete data and split it."""

    def open_batches(
        self, shard: TrialRows | DataLoader, worker: Worker, config: dict, made: object = None
    ) -> RowsPart | LoaderPart:
        return part_of(shard, worker)


class _TorchTrial(TrialModel):
    """PyTorch model that a trial trains.

    Parameters
    ----------
    fit : TorchFit
    """

    def __init__(self, fit: TorchFit):
        self._fit = fit

    def epoch(self):
        self._fit.epochs.run_epoch()
        return self._fit.state.position.history[-1][f"val_{_Predictions.NAME}"]

    def weights(self):
        return dumps(self._fit.built.model.state_dict())

    def state(self):
        position = self._fit.state.position.to_json()
        return {"files": self._fit.built.files(), "position": position}

    def restore(self, state):
        built = self._fit.built
        rates = [group["lr"] for group in built.optimizer.param_groups]
        built.load(state["files"])
        # keep this trial's learning rate; the restored moments are of the other trial
        for group, rate in zip(built.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._fit.state.position = Position.of(state["position"])
        self._fit.step.running.restart()


class _Predictions(TorchMetric):
    """Metric that collects all targets and predictions and computes the search metrics.

    Parameters
    ----------
    metrics : sequence of SearchMetric
    """

    NAME = "search_metrics"
    reductions = {"batches": "cat", "sizes": "cat"}  # noqa: RUF012 - class attribute of TorchMetric

    def __init__(self, metrics: Sequence[SearchMetric]):
        self._metrics = metrics
        super().__init__(self.NAME)

    def __deepcopy__(self, memo: dict) -> _Predictions:
        return _Predictions(self._metrics)

    def update(self, preds, targets):
        self._batches.append((as_list(targets), as_list(preds)))

    def reset(self):
        self._batches: list = []
        self._workers: list = []

    def state(self):
        import torch

        both = zip(*self._batches, strict=True)  # targets and predictions of all batches
        arrays = [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in both]
        data = dumps(arrays)
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return {"batches": packed, "sizes": torch.tensor([len(data)])}

    def load_state(self, state):
        parts = state["batches"].split(state["sizes"].tolist())
        self._workers = [arrays for part in parts if (arrays := loads(part.numpy().tobytes()))]

    def compute(self):
        import torch

        counts = [len(targets[0]) for targets, _ in self._workers]
        # worker r of n has evaluated the rows r, r + n, ...
        row_indices = [np.arange(count) * len(counts) + rank for rank, count in enumerate(counts)]
        order = np.argsort(np.concatenate(row_indices), kind="stable")
        both = zip(*self._workers, strict=True)
        y_true, y_pred = (
            [array[order] for array in concatenate_batches(workers)] for workers in both
        )
        values = compute_metrics(y_true, y_pred, self._metrics)
        return torch.tensor(values, dtype=torch.float64)
