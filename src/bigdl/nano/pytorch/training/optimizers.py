"""Fused optimizers, aligned memory layouts and scaled learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    pass

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_SCALE = "lr_scale"
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # keys of optimizers and cyclic schedules


def fuse(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """Switch an optimizer to its fused implementation.

    Parameters
    ----------
    optimizer : Optimizer
        Changed only if PyTorch has a fused implementation of its class, the user has not selected
        another implementation, and its parameters are dense floats on the CPU or a GPU.
    module : Module
        Module that is trained; its embeddings may have sparse gradients.

    Returns
    -------
    bool
        True if the optimizer uses the fused implementation.
    """
    if type(optimizer) not in _FUSED or _has_sparse_gradients(module):
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    if any(_chosen(group) for group in groups) or not _is_plain(optimizer):
        return False
    for group in groups:
        group["fused"] = True
    return True


def align_layouts(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copy gradients and optimizer states to the memory layout of their parameters.

    Fused implementations compute by memory position. If states have another layout, e.g. from a
    checkpoint or an earlier layout of the module, they mix up elements.
    """
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if _differs(value, parameter):
                    state[name] = _laid_out(value, parameter)
            if _differs(parameter.grad, parameter):
                parameter.grad = _laid_out(parameter.grad, parameter)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _differs(value: object, parameter: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.layout == parameter.layout == torch.strided
        and value.stride() != parameter.stride()
    )


def _laid_out(value: Any, parameter: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return other.copy_(value)


def _chosen(group: Mapping[str, Any]) -> bool:
    named = any(group.get(name) is not None for name in ("fused", "foreach"))
    return named or bool(group.get("differentiable")) or isinstance(group["lr"], torch.Tensor)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the fused implementation supports all parameters of an optimizer."""
    parameters = _parameters(optimizer)
    devices = {each.device.type for each in parameters}
    if devices == {"cuda"}:  # existing step counters would have to move to the GPU
        possible = type(optimizer) is not torch.optim.Adagrad and not optimizer.state
    else:
        possible = devices == {"cpu"}
    return possible and all(
        each.layout == torch.strided and each.dtype in (torch.float32, torch.float64)
        for each in parameters
    )


def _has_sparse_gradients(module: nn.Module) -> bool:
    return any(getattr(part, "sparse", False) for part in module.modules())


def scale_rates(optimizers: Iterable[torch.optim.Optimizer], factor: int) -> None:
    """Multiply the learning rates of all parameter groups by a factor.

    With N processes the batch is N times as large, and the rate grows with it (Goyal et al.,
    Accurate, Large Minibatch SGD, 2017). The parameter group and thus checkpoints keep the factor,
    so a rate is not scaled twice.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            ratio = factor / group.get(_SCALE, 1)
            if ratio == 1:
                continue
            group[_SCALE] = factor
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * ratio


def scale_schedule(scheduler: object, factor: int) -> None:
    """Multiply a scheduler's base and maximum learning rates by a factor."""
    for name in ("base_lrs", "max_lrs"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_schedule(inner, factor)


def warmup_factor(step: int, length: int, processes: int) -> float:
    """Return the warm-up factor of a learning rate: ``1 / processes`` at step 0, 1 at `length`."""
    start = 1 / processes
    return min(1.0, (1 - start) * step / length + start)


class LearningRateRamp:
    """Learning-rate warm-up of an optimizer in several processes, for a custom training loop.

    The rate grows linearly from the user's rate to `processes` times that rate within `max_step`
    steps. The scaled rate applies during ``step()`` only, so schedulers see the user's rate.

    The optimizer gets the attributes ``cur_step``, ``max_step``, ``cur_lr_ratio`` and
    ``max_lr_ratio``.

    Parameters
    ----------
    optimizer : Optimizer
    processes : int
    max_step : int
    """

    def __init__(self, optimizer: torch.optim.Optimizer, processes: int, max_step: int = 1000):
        self._rates: list[Any] = []
        vars(optimizer).update(
            cur_step=0, max_step=max_step, cur_lr_ratio=1.0, max_lr_ratio=processes
        )
        optimizer.register_step_pre_hook(self._raise_rates)
        optimizer.register_step_post_hook(self._restore_rates)

    def _raise_rates(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * optimizer.cur_lr_ratio

    def _restore_rates(self, optimizer: Any, args: object, kwargs: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        optimizer.cur_step = min(optimizer.cur_step + 1, optimizer.max_step)
        grown = (optimizer.max_lr_ratio - 1) * optimizer.cur_step / optimizer.max_step
        optimizer.cur_lr_ratio = grown + 1
