"""What the user hands to the Estimator, checked on the driver and built in the worker.

Model, optimizer, loss and scheduler come as *creators* (functions of ``config``) or as instances.
Instances travel together in one pickle, so an optimizer keeps pointing at its model's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["Built", "ModelParts", "is_lightning"]

# keys of config that go to the loader which Orca itself builds
LOADER_KEYS = ("shuffle", "drop_last")


@dataclass
class Built:
    """The parts, alive in one process."""

    model: Any
    optimizer: Any = None
    criterion: Any = None
    scheduler: Any = None


@dataclass
class ModelParts:
    """The arguments of ``Estimator.from_torch`` that make up a model."""

    model: Any = None
    optimizer: Any = None
    loss: Any = None
    scheduler_creator: Callable | None = None
    config: dict = field(default_factory=dict)

    def check(self) -> None:
        """Refuse on the driver what cannot work in a worker."""
        import torch

        if "batch_size" in self.config:
            raise UsageError(
                "config must not hold batch_size; pass batch_size to fit, evaluate or predict"
            )
        if self.model is not None and not (
            isinstance(self.model, torch.nn.Module) or callable(self.model)
        ):
            raise UsageError(
                "model must be an nn.Module or a function model(config) that returns one, got "
                f"{type(self.model).__name__}"
            )
        if isinstance(self.loss, type):
            raise UsageError(
                f"loss must be an instance or a function, got the class {self.loss.__name__}; "
                f"write loss={self.loss.__name__}()"
            )
        if self.loss is not None and not callable(self.loss):
            raise UsageError(
                "loss must be a torch.nn loss, a function loss(config) that returns one, or a "
                f"function of (output, target), got {type(self.loss).__name__}"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._check_optimizer_instance()
        elif isinstance(self.optimizer, type):
            raise UsageError(
                f"optimizer must be an instance or a function, got the class "
                f"{self.optimizer.__name__}; write optimizer=lambda model, config: "
                f"{self.optimizer.__name__}(model.parameters(), ...)"
            )
        elif self.optimizer is not None and not callable(self.optimizer):
            raise UsageError(
                "optimizer must be a torch optimizer or a function optimizer(model, config) that "
                f"returns one, got {type(self.optimizer).__name__}"
            )
        if self.scheduler_creator is not None and not callable(self.scheduler_creator):
            raise UsageError("scheduler_creator must be a function of (optimizer, config)")

    def _check_optimizer_instance(self):
        import torch

        if not isinstance(self.model, torch.nn.Module):
            raise UsageError(
                "An optimizer instance belongs to a model instance; with a model creator pass a "
                "function optimizer(model, config)"
            )
        own = {id(p) for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            if any(id(p) not in own for p in group["params"]):
                raise UsageError(
                    "The optimizer holds parameters that are not the model's; make it from "
                    "model.parameters() of the same model"
                )

    def build_model(self):
        """A model of its own: a deep copy of an instance, or what the creator returns."""
        import copy

        import torch

        if isinstance(self.model, torch.nn.Module):
            return copy.deepcopy(self.model)
        model = self.model(self.config)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"The model creator must return an nn.Module, it returned {type(model).__name__}"
            )
        return model

    def build(self, *, training: bool) -> Built:
        """All parts, in a worker. Instances are used as they came, in this process' own copy."""
        import torch

        model = self.model if isinstance(self.model, torch.nn.Module) else self.build_model()
        built = Built(model, criterion=self.build_loss())
        if training:
            self._build_optimizer(built)
            if built.optimizer is None:
                raise UsageError("fit needs an optimizer; pass optimizer= to Estimator.from_torch")
            if built.criterion is None and not is_lightning(model):
                raise UsageError("fit needs a loss; pass loss= to Estimator.from_torch")
        return built

    def build_loss(self):
        import torch

        if self.loss is None or isinstance(self.loss, torch.nn.Module):
            criterion = self.loss
        elif _required_arguments(self.loss) == 1:
            criterion = self.loss(self.config)
        else:
            criterion = self.loss
        if getattr(criterion, "reduction", None) == "none":
            raise UsageError(
                "The loss has reduction='none'; training needs one number, use 'mean' or 'sum'"
            )
        return criterion

    def _build_optimizer(self, built):
        import torch

        if isinstance(self.optimizer, torch.optim.Optimizer):
            built.optimizer = self.optimizer
        elif self.optimizer is not None:
            built.optimizer = self.optimizer(built.model, self.config)
            if not isinstance(built.optimizer, torch.optim.Optimizer):
                raise UsageError(
                    "The optimizer creator must return a torch optimizer, it returned "
                    f"{type(built.optimizer).__name__}"
                )
        elif is_lightning(built.model):
            built.optimizer, built.scheduler = _configured(built.model)
        if self.scheduler_creator is not None:
            built.scheduler = self.scheduler_creator(built.optimizer, self.config)


def is_lightning(model) -> bool:
    """Whether a model is a LightningModule, without importing Lightning."""
    return any(
        c.__name__ == "LightningModule" and c.__module__.split(".")[0] in _LIGHTNING
        for c in type(model).__mro__
    )


_LIGHTNING = ("pytorch_lightning", "lightning", "lightning_fabric")


def _configured(module):
    """Optimizer and epoch scheduler of a LightningModule's ``configure_optimizers``."""
    found = module.configure_optimizers()
    scheduler = None
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        optimizers, schedulers = found
        if len(schedulers) > 1:
            raise UsageError("A LightningModule with several schedulers is not supported")
        scheduler = schedulers[0] if schedulers else None
        found = optimizers
    elif isinstance(found, dict):
        scheduler, found = found.get("lr_scheduler"), found["optimizer"]
    if isinstance(found, list | tuple):
        if len(found) != 1:
            raise UsageError("A LightningModule with several optimizers is not supported")
        found = found[0]
    if isinstance(scheduler, dict):
        if scheduler.get("interval", "epoch") != "epoch":
            raise UsageError("A scheduler of a LightningModule must have the interval 'epoch'")
        scheduler = scheduler["scheduler"]
    return found, scheduler


def _required_arguments(function) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )
