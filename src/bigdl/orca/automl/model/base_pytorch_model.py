"""Models of PyTorch in a search."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.automl.model.base import Builder, Model, batch_size_of, figures_of
from bigdl.orca.automl.model.rows import Creator, Rows
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

    def build(self, config, *, epochs=1, use_gpu=False):
        return PytorchBaseModel(self, config, use_gpu=use_gpu)

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


class PytorchBaseModel(Model):
    """A model of PyTorch in training.

    Parameters
    ----------
    builder : PytorchModelBuilder
    config : dict
        ``batch_size`` (default 32) cuts arrays; ``shuffle`` (default True) says whether their rows
        are shuffled.
    """

    def __init__(
        self, builder: PytorchModelBuilder, config: Mapping[str, Any], *, use_gpu: bool = False
    ):
        import torch

        from bigdl.orca.learn.pytorch.steps import step_for

        self.config = config
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
        self._step = step_for(self.model, criterion)
        self._loaders: dict[int, Any] = {}

    def fit_epoch(self, data, epoch):
        self.model.train()
        batches = 0
        for batch in self._batches(data, epoch):
            _, _, loss = self._step.forward(batch, batches)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            batches += 1
        if not batches:
            raise UsageError("The training data has no rows")

    def figures(self, data, metrics):
        import torch

        self.model.eval()
        outputs, targets = [], []
        with torch.no_grad():
            for batch in self._batches(data, None):
                output, target, _ = self._step.evaluate(batch, len(outputs), need_output=True)
                outputs.append(_listed(output))
                targets.append(_listed(target))
        if not outputs:
            raise UsageError("The validation data has no rows")
        return figures_of(_joined(targets), _joined(outputs), metrics)

    def weights(self):
        return _saved(self.model.state_dict())

    def state(self):
        return _saved({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state):
        import torch

        found = torch.load(io.BytesIO(state), map_location=self._device)
        self.model.load_state_dict(found["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(found["optimizer"])
        # the moments are of the other trial, the learning rate is this one's
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _batches(self, data, epoch: int | None) -> Iterator[tuple]:
        """Batches of tensors ``(*features, target)``; without an epoch in order."""
        if isinstance(data, Rows):
            yield from self._of_rows(data, epoch)
            return
        for batch in self._loader(data):
            features_and_target = _checked(batch)
            yield tuple(_moved(each, self._device) for each in features_and_target)

    def _of_rows(self, rows: Rows, epoch):
        import torch

        from bigdl.orca.data.feeds.batches import permutation

        size, count = batch_size_of(self.config), len(rows)
        shuffle = epoch is not None and self.config.get("shuffle", True)
        order = permutation(count, self.config.get("seed", 0), epoch, 0) if shuffle else None
        if len(rows.targets) != 1:
            targets = tuple(rows.targets)
        else:
            (targets,) = rows.targets

        def part(array, start):
            stop = min(start + size, count)
            # a copy in both cases: arrays that processes share cannot be written to
            taken = array[start:stop].copy() if order is None else array[order[start:stop]]
            return torch.from_numpy(taken).to(self._device)

        for start in range(0, count, size):
            target = (
                tuple(part(each, start) for each in targets)
                if isinstance(targets, tuple)
                else part(targets, start)
            )
            yield *(part(each, start) for each in rows.features), target

    def _loader(self, data: Creator):
        import torch

        if id(data) not in self._loaders:
            loader = data.make(dict(self.config))
            if not isinstance(loader, torch.utils.data.DataLoader):
                raise UsageError(
                    "The function given as data must return a torch DataLoader, it returned "
                    f"{type(loader).__name__}"
                )
            self._loaders[id(data)] = loader
        return self._loaders[id(data)]


def _checked(batch) -> list:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise UsageError(
            f"The batches of a DataLoader must be (*features, target), got {type(batch).__name__}"
        )
    *features, target = batch
    if len(features) == 1 and isinstance(features[0], list | tuple):
        features = features[0]
    return [*features, target]


def _moved(value, device):
    if isinstance(value, list | tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if hasattr(value, "to") else value


def _listed(value) -> list:
    values = value if isinstance(value, list | tuple) else [value]
    return [each.detach().cpu().numpy() for each in values]


def _joined(batches: list[list]) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def _saved(state) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
