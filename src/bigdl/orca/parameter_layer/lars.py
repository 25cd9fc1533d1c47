"""LARS and the base class of optimizers that update one parameter, or a part of it, at a time.

LARS has a learning rate for every layer (You, Gitman, Ginsburg 2017, arXiv:1708.03888).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch


class SliceOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimizers that update one parameter, or a part of it, at a time.

    Parameters
    ----------
    params : iterable
    **defaults : float
        Default options of the parameter groups.

    Attributes
    ----------
    norms : sequence of (float, float) or None
        Norms of each whole parameter and of its gradient, in the order of the groups, if this
        optimizer has only parts of the parameters.
    """

    norms: Sequence[tuple[float, float]] | None = None

    def __init__(self, params: Iterable, **defaults: float):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        norms = iter(self.norms or itertools.repeat(None))
        for group in self.param_groups:
            for parameter, norms_of_parameter in zip(group["params"], norms, strict=False):
                if parameter.grad is not None:
                    self._update(parameter, group, norms_of_parameter)
                self._end_step(parameter, group)
        return loss

    @abstractmethod
    def _update(
        self, parameter: torch.Tensor, group: dict, norms: tuple[float, float] | None
    ) -> None:
        """Update a parameter; for a slice, `norms` may hold the norms of the whole parameter."""

    def _end_step(self, parameter: torch.Tensor, group: dict) -> None:
        """Update state that changes in every step, even without a gradient."""


class LARS(SliceOptimizer):
    """SGD with momentum that scales each layer's rate by weight norm divided by gradient norm.

    Parameters
    ----------
    params : iterable
    lr : float
    momentum : float
    weight_decay : float
    trust : float
        Trust coefficient, which scales the ratio of the norms.
    eps : float

    Attributes
    ----------
    needs_norms : bool
        True: the parameter layer sets `norms` before every step.
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
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, eps=eps
        )

    def _update(self, parameter, group, norms):
        gradient, decay = parameter.grad, group["weight_decay"]
        if norms is None:
            norms = [float(tensor.double().norm()) for tensor in (parameter, gradient)]
        norm, gradient_norm = norms
        rate = group["lr"]
        if norm > 0 and gradient_norm > 0:
            rate *= group["trust"] * norm / (gradient_norm + decay * norm + group["eps"])
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(gradient + decay * parameter, alpha=rate)
        parameter.sub_(velocity)
