"""A copy of a PyTorch model in a rank of the parameter layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bigdl.orca.learn.data.tensors import open_batches
from bigdl.orca.learn.device import precision_of
from bigdl.orca.learn.layer_fit.rows import LayerRows, Place
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.steps import counts_unevenly, step_for
from bigdl.orca.learn.state import load_into, seed_everything
from bigdl.orca.sync.parameter_layer.buffers import changed
from bigdl.orca.sync.parameter_layer.plan import Step
from bigdl.orca.sync.parameter_layer.rank import Contribution

__all__ = ["ReplicaProgram", "TorchReplica", "trained_parameters"]


def trained_parameters(optimizer) -> list:
    """The parameters of an optimizer, in the order of the flat vector."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass
class ReplicaProgram:
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


class TorchReplica:
    """Computes gradients of one rank's rows: a ``Replica`` of the parameter layer.

    Parameters
    ----------
    program : ReplicaProgram
    rank : int
    shards : dict of str to Shard
    """

    def __init__(self, program: ReplicaProgram, rank: int, shards: dict):
        import torch

        self._settings, self._rank = program.settings, rank
        seed_everything(self._settings.seed)  # creators may draw what is no weight
        built = program.parts.build(training=True)
        load_into(built.model, program.model)
        self._model, self._criterion = built.model, built.criterion
        self._parameters = trained_parameters(built.optimizer)
        self._buffers = list(built.model.buffers())
        self._initial = [buffer.numpy().copy() for buffer in self._buffers]
        settings = self._settings
        columns = BatchColumns(settings.feature_cols, settings.label_cols)
        self._kind = step_for(
            built.model, built.criterion, weighted=settings.weighted, columns=columns
        )
        self._is_uneven = settings.weighted or counts_unevenly(built.criterion)
        self._precision = precision_of(settings.precision, torch.device("cpu"))
        self._place = Place(rank, program.ranks)
        config = program.parts.config
        data = open_batches(
            shards["data"],
            settings.feature_cols,
            settings.label_cols,
            self._place,
            config,
            settings.batch_size,
        )
        memory = config.get("shuffle_memory")
        self._rows = LayerRows(data, settings, rank, program.sampling, memory)

    def describe(self) -> dict:
        return self._rows.describe()

    def close(self) -> None:
        """End what the data has started."""
        self._place.close()

    def compute(
        self, step: Step, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        started = time.perf_counter()
        start, stop = step.ranges[self._rank]
        rows = stop - start
        if not rows:
            return Contribution(record={"loss": 0.0, "counted": 0.0})
        batch = self._rows.batch(step, start, stop)
        fetched = time.perf_counter()
        before = self._load(weights, buffers)
        mixed = np.random.SeedSequence([self._settings.seed, step.epoch, step.number])
        seed_everything(int(mixed.generate_state(1)[0]), self._rank + 1)
        with self._precision():
            output, target, loss = self._kind.forward(batch, step.number)
        counted = float(rows)
        if self._is_uneven:
            counted = float(self._kind.denominator(output, target, rows))
        forwarded = time.perf_counter()
        if counted:  # the loss of a batch of ignored labels is nan
            loss.backward()
        gradient, absent = self._gradient()
        record = {
            "loss": loss.item() if counted else 0.0,
            "counted": counted,
            "fetch_s": fetched - started,
            "forward_s": forwarded - fetched,
            "backward_s": time.perf_counter() - forwarded,
        }
        after = [buffer.numpy() for buffer in self._buffers]
        return Contribution(gradient, counted, rows, absent, changed(before, after), record)

    def _load(self, weights, buffers) -> list[np.ndarray]:
        """Bring the model where the step begins; returns the buffers as they are there."""
        import torch

        self._model.train()
        start = 0
        with torch.no_grad():
            for parameter in self._parameters:
                part = weights[start : start + parameter.numel()]
                parameter.copy_(torch.from_numpy(part).reshape(parameter.shape))
                start += parameter.numel()
            before = [buffers.get(i, kept) for i, kept in enumerate(self._initial)]
            for buffer, values in zip(self._buffers, before, strict=True):
                buffer.copy_(torch.from_numpy(np.array(values)))
        self._model.zero_grad(set_to_none=True)
        return before

    def _gradient(self):
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
