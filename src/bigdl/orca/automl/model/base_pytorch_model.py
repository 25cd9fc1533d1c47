"""Models of PyTorch in a search."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import Builder, Model, figures_of, part_of
from bigdl.orca.automl.model.pytorch_batches import (
    Batch,
    CommonNumbers,
    batches_of_loader,
    batches_of_rows,
    loader_of,
)
from bigdl.orca.automl.model.rows import Rows
from bigdl.orca.automl.pytorch_utils import optimizer_creator, validate_pytorch_loss

__all__ = ["PytorchBaseModel", "PytorchModelBuilder"]


class PytorchModelBuilder(Builder):
    """Makes a model of PyTorch with its optimizer and loss.

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
        For anything else.
    """

    floats = "float32"
    takes_workers = True

    def __init__(self, model_creator: Callable, optimizer_creator, loss_creator):
        import torch

        if isinstance(model_creator, torch.nn.Module) or not callable(model_creator):
            raise UsageError(
                "model_creator must be a function of the configuration that returns an nn.Module, "
                f"got {type(model_creator).__name__}"
            )
        self.model_creator = model_creator
        self.optimizer_creator = _optimizer_creator(optimizer_creator)
        self.loss_creator = validate_pytorch_loss(loss_creator)

    def build(self, config, *, epochs=1, use_gpu=False, sync=None):
        return PytorchBaseModel(self, config, use_gpu=use_gpu, sync=sync)

    def seed(self, seed):
        import torch

        torch.manual_seed(seed)

    def default_metric(self, make_config):
        raise UsageError(
            "You must input a valid metric value for fit_eval.; pass metric='accuracy', say"
        )

    def load(self, config, weights):
        import torch

        model = self.module(config)
        model.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu"))
        return model.eval()

    def module(self, config):
        """The user's model of a configuration."""
        import torch

        model = self.model_creator(config)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                "You must create a torch model in model_creator; it returned "
                f"{type(model).__name__}"
            )
        return model


_optimizer_creator = optimizer_creator  # a parameter has the name of the function


@dataclass(frozen=True)
class _Alone:
    """The worker of a trial that has no other one."""

    rank: int = 0
    world_size: int = 1


class PytorchBaseModel(Model):
    """A model of PyTorch in training.

    Parameters
    ----------
    builder : PytorchModelBuilder
    config : dict
        ``batch_size`` (default 32) cuts arrays; ``shuffle`` (default True) says whether their rows
        are shuffled.
    sync : GradientSync, optional
        Of a trial of several workers, which has started.  Batches are those of all workers
        together, and so are their updates.
    """

    def __init__(
        self,
        builder: PytorchModelBuilder,
        config: Mapping[str, Any],
        *,
        use_gpu: bool = False,
        sync=None,
    ):
        import torch

        from bigdl.orca.learn.pytorch.forward import forward_for
        from bigdl.orca.learn.pytorch.loop import Buffers, Update, may_be_sparse
        from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync

        self.config = config
        self._sync = TorchDistributedSync(_Alone()) if sync is None else sync
        self._device = torch.device("cuda" if use_gpu and torch.cuda.is_available() else "cpu")
        self.model = builder.module(config).to(self._device)
        self.optimizer = builder.optimizer_creator(self.model, config)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                "The optimizer creator must return a torch optimizer, it returned "
                f"{type(self.optimizer).__name__}"
            )
        criterion = builder.loss_creator(config)
        if not callable(criterion):
            raise UsageError(
                f"The loss creator must return a loss, it returned {type(criterion).__name__}"
            )
        self._step = forward_for(self.model, criterion)
        sparse = may_be_sparse(self.model)
        self._update = Update(self._sync, self.optimizer, sparse, sums=self._step.sums)
        self._buffers = Buffers(self.model, self._sync)
        self._loaders: dict[int, Any] = {}
        self._numbers = CommonNumbers() if self._is_shared else None
        if self._is_shared:
            self._become_one_of_several()

    def fit_epoch(self, data, epoch):
        self.model.train()
        batches = 0
        for batch in self._batches(data, epoch):
            self._train(batch, batches)
            batches += 1
        if not batches:
            raise UsageError("The training data has no rows")
        if self._is_shared:
            self._buffers.merge()

    def figures(self, data, metrics):
        """A worker predicts every so-many-th batch; the first one computes the metrics of all."""
        import torch

        rank, size = self._sync.rank, self._sync.world_size
        self.model.eval()
        found = []
        with torch.no_grad():
            for index, batch in enumerate(self._batches(data, None)):
                if index % size == rank:
                    given = batch.take(0, batch.rows)
                    output, target, _ = self._step.evaluate(given, index, need_output=True)
                    found.append((_listed(target), _listed(output)))
        values = [0.0] * len(metrics)
        every = self._gathered(found)
        if rank == 0:
            if not every:
                raise UsageError("The validation data has no rows")
            values = figures_of(*map(_joined, zip(*every, strict=True)), metrics)
        return self._sync.all_gather(values)[0]

    def weights(self):
        return _saved(self.model.state_dict())

    def state(self):
        return _saved({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state):
        import torch

        from bigdl.orca.learn.pytorch.loop import Buffers

        found = torch.load(io.BytesIO(state), map_location=self._device)
        self.model.load_state_dict(found["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(found["optimizer"])
        # the moments are of the other trial, the learning rate is this one's
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._buffers = Buffers(self.model, self._sync)

    def _become_one_of_several(self):
        """Begin with the first worker's model, and draw other random numbers than it does."""
        import torch

        rank = self._sync.rank
        state = self._sync.broadcast(self.state() if rank == 0 else None)
        if rank:
            self.restore(state)
            torch.manual_seed(torch.initial_seed() + rank)

    @property
    def _is_shared(self) -> bool:
        """Whether other workers train the same model."""
        return self._sync.world_size > 1

    def _train(self, batch: Batch, index: int):
        """One update from a batch, of which this worker computes its part."""
        start, stop = part_of(batch.rows, self._sync.rank, self._sync.world_size)
        rows = stop - start
        self._update.begin()
        output = target = loss = None
        if rows:
            output, target, loss = self._step.forward(batch.take(start, stop), index)
        counted, total = float(rows), float(batch.rows)
        if self._is_shared and self._is_uneven:
            counted = self._step.denominator(output, target, rows) if rows else 0.0
            total = sum(each for (each,) in self._sync.all_gather([counted]))
        self._update.add(loss, counted, total)
        self._update.step()
        self._buffers.rows += rows

    @property
    def _is_uneven(self) -> bool:
        """Whether the loss of a batch may be divided by something else than its rows."""
        from bigdl.orca.learn.pytorch.forward import counts_unevenly

        return counts_unevenly(self._step.criterion)

    def _gathered(self, found: list) -> list | None:
        """The results for all batches, in their order, on the first worker."""
        import torch

        if not self._is_shared:
            return found
        every = self._sync.gather(_saved(found))
        if every is None:
            return None
        parts = [torch.load(io.BytesIO(each), map_location="cpu") for each in every]
        return [
            part[index] for index in range(len(parts[0])) for part in parts if index < len(part)
        ]

    def _batches(self, data, epoch: int | None) -> Iterator[Batch]:
        """Batches of tensors; without an epoch in order."""
        if isinstance(data, Rows):
            return batches_of_rows(data, self.config, epoch, self._device)
        if id(data) not in self._loaders:
            self._loaders[id(data)] = loader_of(data, self.config)
        return batches_of_loader(self._loaders[id(data)], self._device, self._numbers)


def _listed(value) -> list:
    values = value if isinstance(value, list | tuple) else [value]
    return [each.detach().cpu() for each in values]


def _joined(batches) -> list[np.ndarray]:
    """Tensors of all batches, as arrays."""
    return [
        np.concatenate([each.numpy() for each in parts]) for parts in zip(*batches, strict=True)
    ]


def _saved(state) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
