"""Functions that create PyTorch optimizers and losses by name or from user functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["DEFAULT_LR", "LR_NAME", "optimizer_creator", "validate_pytorch_loss"]

LR_NAME = "lr"
"""Name of the learning rate in configurations."""

DEFAULT_LR = 1e-3
"""Learning rate of optimizers given by name, if the configuration has none."""


def optimizer_creator(optimizer: str | Callable) -> Callable:
    """Return a function that creates an optimizer from a model and a configuration.

    Parameters
    ----------
    optimizer : str or callable
        Name of a class of ``torch.optim``, or ``optimizer(model, config)``.

    Raises
    ------
    UsageError
        If `optimizer` is neither.
    """
    import torch

    if isinstance(optimizer, str):
        optimizer_class = _class_by_name(
            "optimizer", torch.optim, optimizer, torch.optim.Optimizer, "Adam"
        )
        return functools.partial(_create_optimizer, optimizer_class)
    if isinstance(optimizer, type) or not callable(optimizer):
        raise UsageError(
            "optimizer must be a valid torch optimizer name or a function (model, config) that "
            f"returns an optimizer, got {optimizer!r}",
            code="argument-type",
            argument="optimizer",
        )
    return optimizer


def _create_optimizer(
    make: Callable, model: torch.nn.Module, config: Mapping[str, Any]
) -> Optimizer:
    """Create an optimizer with the configuration's learning rate."""
    return make(model.parameters(), lr=config.get(LR_NAME, DEFAULT_LR))


def validate_pytorch_loss(loss) -> Callable:
    """Return a function that creates a loss from a configuration.

    Parameters
    ----------
    loss : str, torch.nn.Module or callable
        Name of a loss of ``torch.nn``, a loss, or ``loss(config)``.

    Raises
    ------
    UsageError
        If `loss` is none of these.
    """
    import torch

    if isinstance(loss, str):
        loss_class = _class_by_name("loss", torch.nn, loss, torch.nn.modules.loss._Loss, "MSELoss")
        return lambda config: loss_class()
    if isinstance(loss, torch.nn.Module):
        return lambda config: loss
    if isinstance(loss, type) or not callable(loss):
        raise UsageError(
            "loss must be a valid torch loss name, an instance of a loss or a function of the "
            f"configuration that returns one, got {loss!r}",
            code="argument-type",
            argument="loss",
        )
    return loss


def _class_by_name(
    what: str, module: object, name: str, base: type, example: str
) -> Callable[..., Any]:
    """Return a module's class by name, checked against a base class."""
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)) or cls is base:
        raise UsageError(
            f"Must provide a valid torch {what} name, such as {example!r}, got {name!r}",
            code="name-unknown",
            argument=what,
        )
    return cls
