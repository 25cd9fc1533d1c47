"""Models of PyTorch in a search.

Each worker of a trial takes its part of every batch: all of them go through the same batches in the
same order, so that several make the update of one.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import Builder, Model, as_list, concatenated, figures_of, part_of
from bigdl.orca.automl.model.data import Batch, Rows
from bigdl.orca.automl.pytorch_utils import optimizer_creator, validate_pytorch_loss

__all__ = ["PytorchModelBuilder"]


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
        return _PytorchModel(self, config, use_gpu=use_gpu, sync=sync)

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
        """Return the user's model of a configuration."""
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
    """Rank and world size of a trial of one worker."""

    rank: int = 0
    world_size: int = 1


class _PytorchModel(Model):
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

        super().__init__(config)
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
        self._numbers = _CommonRandomState() if self._is_shared else None
        if self._is_shared:
            self._join_workers()

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
        """Return figures of the first worker, for which each predicts its share of the batches."""
        import torch

        rank, size = self._sync.rank, self._sync.world_size
        self.model.eval()
        results: list = []
        with torch.no_grad():
            for index, batch in enumerate(self._batches(data, None)):
                if index % size == rank:
                    rows = batch.take(0, batch.rows)
                    output, target, _ = self._step.evaluate(rows, index, need_output=True)
                    results.append(
                        [[each.cpu() for each in as_list(part)] for part in (target, output)]
                    )
        values = [0.0] * len(metrics)
        every = self._gathered(results)
        if rank == 0:
            if not every:
                raise UsageError("The validation data has no rows")
            values = figures_of(*map(concatenated, zip(*every, strict=True)), metrics)
        return self._sync.all_gather(values)[0]

    def weights(self):
        return _dumped(self.model.state_dict())

    def state(self):
        return _dumped({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state):
        import torch

        from bigdl.orca.learn.pytorch.loop import Buffers

        loaded = torch.load(io.BytesIO(state), map_location=self._device)
        self.model.load_state_dict(loaded["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(loaded["optimizer"])
        # the moments are of the other trial, the learning rate is this one's
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._buffers = Buffers(self.model, self._sync)

    def _join_workers(self):
        """Begin with the first worker's model, and draw other random numbers than it does."""
        import torch

        rank = self._sync.rank
        state = self._sync.broadcast(self.state() if rank == 0 else None)
        if rank:
            self.restore(state)
            torch.manual_seed(torch.initial_seed() + rank)

    @property
    def _is_shared(self) -> bool:
        """True if other workers train the same model."""
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
        """True if the loss of a batch may be divided by something else than its rows."""
        from bigdl.orca.learn.pytorch.forward import counts_unevenly

        return counts_unevenly(self._step.criterion)

    def _gathered(self, results: list) -> list | None:
        """Return the results for all batches, in their order, on the first worker."""
        import torch

        if not self._is_shared:
            return results
        every = self._sync.gather(_dumped(results))
        if every is None:
            return None
        parts = [torch.load(io.BytesIO(each), map_location="cpu") for each in every]
        return [
            part[index] for index in range(len(parts[0])) for part in parts if index < len(part)
        ]

    def _batches(self, data, epoch: int | None) -> Iterator[Batch]:
        """Batches of tensors; without an epoch in order."""
        if not isinstance(data, Rows):
            return _batches_of_loader(
                self.loader_of(data, _check_loader), self._device, self._numbers
            )

        def tensors(features: list, targets: list) -> tuple:
            x, y = (
                tuple(torch.from_numpy(each).to(self._device) for each in part)
                for part in (features, targets)
            )
            return *x, y[0] if len(y) == 1 else y

        def batch(arrays: Batch) -> Batch:
            return Batch(arrays.rows, lambda start, stop: tensors(*arrays.take(start, stop)))

        import torch

        return map(batch, data.batches(self.config, epoch))


def _dumped(state) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# Batches ------------------------------------------------------------------------------------------


def _batches_of_loader(
    loader, device, numbers: _CommonRandomState | None = None
) -> Iterator[Batch]:
    """Yield the batches of a DataLoader.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
    device : torch.device
    numbers : _CommonRandomState, optional
        What several workers draw from, each of which goes through the whole loader.
    """
    drawn = contextlib.nullcontext if numbers is None else numbers.drawn
    with drawn():
        batches = iter(loader)
    while True:
        with drawn():
            batch = next(batches, None)
        if batch is None:
            return
        yield _of_loader(_checked(batch), device)


def _of_loader(values: list, device) -> Batch:
    rows = _rows_of(values)

    def take(start, stop):
        whole = start == 0 and stop == rows
        return tuple(_moved(each if whole else _cut(each, start, stop), device) for each in values)

    return Batch(rows, take)


class _CommonRandomState:
    """Random numbers that all workers draw alike, beside the ones that each draws by itself.

    Those of the moment when it is made, which must be the same on all workers.
    """

    def __init__(self):
        self._state = _state()

    @contextlib.contextmanager
    def drawn(self):
        """Draw from them for the time of the block."""
        before = _state()
        _set_state(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _set_state(before)


def _state() -> tuple:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_state(state) -> None:
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _checked(batch) -> list:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise UsageError(
            f"The batches of a DataLoader must be (*features, target), got {type(batch).__name__}"
        )
    *features, target = batch
    if len(features) == 1 and isinstance(features[0], list | tuple):
        features = list(features[0])
    return [*features, target]


def _rows_of(value) -> int:
    while isinstance(value, list | tuple) and value:
        value = value[-1]
    return len(value) if getattr(value, "ndim", 0) else 1


def _cut(value, start, stop):
    if isinstance(value, list | tuple):
        return tuple(_cut(each, start, stop) for each in value)
    return value[start:stop] if getattr(value, "ndim", 0) else value


def _moved(value, device):
    if isinstance(value, list | tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value


def _check_loader(loader: Any) -> None:
    import torch

    if not isinstance(loader, torch.utils.data.DataLoader):
        raise UsageError(
            "The function given as data must return a torch DataLoader, it returned "
            f"{type(loader).__name__}"
        )
