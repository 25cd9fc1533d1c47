"""Multilayer perceptron for numbers and categories, and its training in the process of a trial."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bigdl.orca.automl.model.base_pytorch_model import PytorchModelBuilder
from bigdl.orca.automl.model.data import TrialRows
from bigdl.orca.automl.table.columns import REGRESSION
from bigdl.orca.automl.trial import SearchGoal, SearchMetric, TrialJob, TrialRun
from bigdl.training.state import loads

if TYPE_CHECKING:
    from bigdl.orca.automl.table.model import TrainingRows

_EPOCHS, _PATIENCE = 200, 16
_PREDICTED_ROWS = 1 << 16
_BATCHES = 20  # of an epoch of a small table, which has batches of 32 to 256 rows

Inputs = dict[str, np.ndarray]


class TableNetwork(nn.Module):
    """Multilayer perceptron with an embedding for each category column.

    Parameters
    ----------
    shape : dict
        ``numbers``, the number of numeric inputs; ``categories``, the number of categories of each
        column; ``units``, ``layers``, ``dropout`` and ``outputs``.
    """

    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        self.numbers = shape["numbers"]
        widths = [min(32, round(1.6 * count**0.56) + 1) for count in shape["categories"]]
        counts = [count + 1 for count in shape["categories"]]
        self.embeddings = nn.ModuleList(map(nn.Embedding, counts, widths))
        width, layers = shape["numbers"] + sum(widths), []
        for _ in range(shape["layers"]):
            layers += [nn.Linear(width, shape["units"]), nn.LayerNorm(shape["units"]), nn.SiLU()]
            layers.append(nn.Dropout(shape["dropout"]))
            width = shape["units"]
        self.layers = nn.Sequential(*layers, nn.Linear(width, shape["outputs"]))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute class scores of shape ``(n, classes)``, or values of shape ``(n,)``."""
        parts = [inputs[0]] if self.numbers else []
        if len(self.embeddings):
            codes = inputs[-1]
            parts += [each(codes[:, i]) for i, each in enumerate(self.embeddings)]
        outputs = self.layers(torch.cat(parts, dim=1))
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs


def train_network(
    shape: dict[str, Any],
    config: dict[str, Any],
    train: tuple[Inputs, np.ndarray],
    held_out: tuple[Inputs, np.ndarray],
    data: TrainingRows,
) -> dict[str, torch.Tensor]:
    """Train a network with the Estimator's loop, and return the weights of its best epoch.

    Parameters
    ----------
    shape : dict
        See :class:`TableNetwork`; a regression also has ``center`` and ``scale`` of its targets.
    config : dict
        ``lr`` and ``weight_decay``.
    train, held_out : tuple of (dict of ndarray, ndarray)
        Inputs and targets; training stops if the loss on `held_out` does not improve.
    data : TrainingRows
        Settings.
    """
    is_regression = data.settings.task == REGRESSION

    def rows_of(inputs: Inputs, y: np.ndarray) -> TrialRows:
        scaled = (y - shape["center"]) / shape["scale"]
        return TrialRows(inputs, {"y": scaled.astype(np.float32) if is_regression else y})

    metric = SearchMetric("loss", "min", _squared_error if is_regression else _cross_entropy)
    builder = PytorchModelBuilder(
        functools.partial(_create, shape),
        _optimizer,
        "MSELoss" if is_regression else "CrossEntropyLoss",
    )
    job = TrialJob(
        builder,
        rows_of(*train),
        rows_of(*held_out),
        SearchGoal([metric]),
        _EPOCHS,
        data.settings.seed,
    )
    batch_size = int(np.clip(2 ** round(np.log2(max(1, len(data.y) / _BATCHES))), 32, 256))
    weights, without_improvement = b"", 0
    with closing(TrialRun(job, {**config, "batch_size": batch_size})) as run:
        while without_improvement < _PATIENCE:
            step = run.step()
            without_improvement = 0 if step.is_best else without_improvement + 1
            if step.is_best or not weights:
                weights = run.model.weights()
            if step.is_last or data.is_late:
                break
    best: dict[str, torch.Tensor] = loads(weights)
    return best


def outputs_of(network: TableNetwork, inputs: Inputs) -> np.ndarray:
    """Return the outputs of a network for all rows, in float64."""
    tensors = [torch.from_numpy(each) for each in inputs.values()]
    with torch.inference_mode():
        batches = zip(*(each.split(_PREDICTED_ROWS) for each in tensors), strict=True)
        parts = [network(*batch) for batch in batches]
    return torch.cat(parts).double().numpy()


def _create(shape: dict[str, Any], config: dict[str, Any]) -> TableNetwork:
    return TableNetwork(shape)


def _optimizer(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"]
    )


def _squared_error(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    return float(np.mean((y_true - y_pred) ** 2))


def _cross_entropy(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    scores = y_pred.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    normalizers = np.log(np.exp(scores).sum(axis=1))
    return float(np.mean(normalizers - scores[np.arange(len(y_true)), y_true]))
