"""LARS: a learning rate for every layer (You, Gitman, Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose steps are scaled, per parameter, by its norm over its gradient's.

    Parameters
    ----------
    params : iterable
    lr : float
    momentum : float
    weight_decay : float
    trust : float
        The trust coefficient.
    eps : float

    Attributes
    ----------
    needs_norms : bool
        Tells the parameter layer to set `norms` before every step.
    norms : sequence of (float, float) or None
        Norm of each parameter and of its gradient, in the order of the groups, where the tensors
        of this optimizer are only parts of them; None computes them.
    """

    needs_norms = True

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        eps: float = 1e-8,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
        }
        super().__init__(params, defaults)
        self.norms: Sequence[tuple[float, float]] | None = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, number)
                number += 1
        return loss

    def _update(self, parameter, group, number):
        gradient, decay = parameter.grad, group["weight_decay"]
        if self.norms is None:
            norm, gradient_norm = (float(t.double().norm()) for t in (parameter, gradient))
        else:
            norm, gradient_norm = self.norms[number]
        rate = group["lr"]
        if norm > 0 and gradient_norm > 0:
            rate *= group["trust"] * norm / (gradient_norm + decay * norm + group["eps"])
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(gradient + decay * parameter, alpha=rate)
        parameter.sub_(velocity)
