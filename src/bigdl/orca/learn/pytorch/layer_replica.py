"""A copy of a PyTorch model in a rank of the parameter layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.batch_columns import BatchColumns
from bigdl.orca.learn.pytorch.data import TensorShard, open_batches
from bigdl.orca.learn.pytorch.device import precision_of
from bigdl.orca.learn.pytorch.fit_settings import FitSettings
from bigdl.orca.learn.pytorch.parts import ModelParts
from bigdl.orca.learn.pytorch.state import load_into, seed_everything
from bigdl.orca.learn.pytorch.steps import counts_unevenly, step_for
from bigdl.orca.sync.parameter_layer.buffers import changed
from bigdl.orca.sync.parameter_layer.plan import Step
from bigdl.orca.sync.parameter_layer.rank import Contribution

__all__ = ["ReplicaProgram", "TorchReplica", "trained_parameters"]


def trained_parameters(optimizer) -> list:
    """The parameters of an optimizer, in the order of the flat vector."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass
class _Place:
    """What a loader wants to know of its worker."""

    rank: int
    world_size: int
    closers: list[Callable[[], None]] = field(default_factory=list)

    def at_exit(self, close: Callable[[], None]) -> None:
        self.closers.append(close)


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
        See :class:`~.layer_options.LayerOptions`.
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

        self._program, self._settings, self._rank = program, program.settings, rank
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
        self._place = _Place(rank, program.ranks)
        config = program.parts.config
        self._data = open_batches(
            shards["data"],
            settings.feature_cols,
            settings.label_cols,
            self._place,
            config,
            settings.batch_size,
        )
        if program.sampling == "window" and not isinstance(self._data, TensorShard):
            raise UsageError(
                "sampling='window' needs rows that are side by side, and a DataLoader is read "
                "sample by sample; leave sampling= out or pass arrays"
            )
        # a replica that is made again elsewhere shuffles alike: free memory must not matter
        memory = config.get("shuffle_memory")
        self._window = 0 if memory is None else self._data.window(memory)
        self._order: tuple[int, Any] = (-1, None)

    def describe(self) -> dict:
        data = self._data
        return {
            "rows": data.rows,
            "fingerprint": data.fingerprint,
            "drop_last": bool(data.drop_last),
            "window": self._window,
            "inputs": data.inputs,
        }

    def close(self) -> None:
        """End what the data has started."""
        while self._place.closers:
            self._place.closers.pop()()

    def compute(
        self, step: Step, weights: np.ndarray, buffers: Mapping[int, np.ndarray]
    ) -> Contribution:
        started = time.perf_counter()
        start, stop = step.ranges[self._rank]
        rows = stop - start
        if not rows:
            return Contribution(record={"loss": 0.0, "counted": 0.0})
        batch = self._batch(step, start, stop)
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

    def _batch(self, step, start, stop):
        settings = self._settings
        if step.epoch != self._order[0]:
            order = self._data.order(
                settings.shuffle, settings.seed, step.epoch, self._rank, self._window, tuple
            )
            self._order = step.epoch, order
        order = self._order[1]
        if self._program.sampling == "exact":
            return self._data.batch(start, stop, order)
        rows = self._data.rows
        key = [settings.seed, step.epoch, step.number, self._rank]
        first = int(np.random.default_rng(key).integers(rows))
        places = (first + np.arange(stop - start)) % rows
        if order is not None:
            whole = order if isinstance(order, np.ndarray) else order[0:rows]
            places = whole[places]
        return self._data.batch(0, stop - start, places)

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
