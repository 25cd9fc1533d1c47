"""A copy of a PyTorch model in a rank of the parameter layer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from bigdl.orca.learn.layer_fit.replica import LayerReplica
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.state import load_into
from bigdl.orca.learn.pytorch.steps import counts_unevenly, step_for
from bigdl.orca.parameter_layer.rank import Contribution
from bigdl.training.device import precision_of
from bigdl.training.state import seed_everything
from bigdl.training.tensors import open_batches

__all__ = ["TorchReplica", "TorchReplicaProgram", "trained_parameters"]


def trained_parameters(optimizer) -> list:
    """The parameters of an optimizer, in the order of the flat vector."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass
class TorchReplicaProgram:
    """Makes replicas; shipped to the ranks.

    Attributes
    ----------
    parts : ModelParts
    settings : FitSettings
    model : bytes
        State dict at the start; parameters are replaced in every step, other things are not.
    ranks : int
    sampling : str
        See :class:`~bigdl.orca.learn.layer_fit.options.LayerOptions`.
    """

    parts: ModelParts
    settings: FitSettings
    model: bytes
    ranks: int
    sampling: str = "exact"

    def __call__(self, rank: int, shards: dict) -> TorchReplica:
        return TorchReplica(self, rank, shards)


class TorchReplica(LayerReplica):
    """A copy of a PyTorch model, and the rows of its rank.

    Parameters
    ----------
    program : TorchReplicaProgram
    rank : int
    shards : dict of str to Shard
    """

    def __init__(self, program: TorchReplicaProgram, rank: int, shards: dict):
        import torch

        super().__init__(program, rank)
        settings, config = self._settings, program.parts.config
        seed_everything(settings.seed)  # creators may draw what is no weight
        built = program.parts.build(training=True)
        load_into(built.model, program.model)
        self._model, self._criterion = built.model, built.criterion
        self._parameters = trained_parameters(built.optimizer)
        self._buffers = list(built.model.buffers())
        self._initial = [buffer.numpy().copy() for buffer in self._buffers]
        columns = BatchColumns(settings.feature_cols, settings.label_cols)
        self._kind = step_for(
            built.model, built.criterion, weighted=settings.weighted, columns=columns
        )
        self._is_uneven = settings.weighted or counts_unevenly(built.criterion)
        self._precision = precision_of(settings.precision, torch.device("cpu"))
        data = open_batches(
            shards["data"],
            settings.feature_cols,
            settings.label_cols,
            self._place,
            config,
            settings.batch_size,
        )
        self._read(data, config)

    def _put(self, weights, running):
        import torch

        self._model.train()
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                part = weights[start : start + parameter.numel()]
                parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
                start += parameter.numel()
            for buffer, values in zip(self._buffers, running, strict=True):
                buffer.copy_(torch.from_numpy(np.array(values)))
        self._model.zero_grad(set_to_none=True)

    def _running(self):
        return [buffer.numpy() for buffer in self._buffers]

    def _gradient(self, batch, rows, step, began):
        with self._precision():
            output, target, loss = self._kind.forward(batch, step.number)
        counted = float(rows)
        if self._is_uneven:
            counted = float(self._kind.denominator(output, target, rows))
        forwarded = time.perf_counter()
        if counted:  # the loss of a batch of ignored labels is nan
            loss.backward()
        vector, absent = self._flat()
        record = {
            "loss": loss.item() if counted else 0.0,
            "forward_s": forwarded - began,
            "backward_s": time.perf_counter() - forwarded,
        }
        return Contribution(vector, counted, rows, absent, record=record)

    def _flat(self):
        """The flat gradient, and the parameters that have none."""
        found, absent = np.empty(sum(p.numel() for p in self._parameters), np.float32), []
        start = 0
        for number, parameter in enumerate(self._parameters):
            stop = start + parameter.numel()
            if parameter.grad is None:
                absent.append(number)
                found[start:stop] = 0
            else:
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                found[start:stop] = dense.detach().reshape(-1).numpy()
            start = stop
        return found, absent
