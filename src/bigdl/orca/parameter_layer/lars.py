"""Optimizers that update one parameter at a time, or a part of it; and LARS.

LARS has a learning rate for every layer (You, Gitman, Ginsburg 2017, arXiv:1708.03888).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class SliceOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that looks at one parameter, or at one part of it, at a time.

    Parameters
    ----------
    params : iterable
    **defaults : float
        Of what the groups leave open.

    Attributes
    ----------
    norms : sequence of (float, float) or None
        Norm of each parameter and of its gradient, in the order of the groups, where the tensors
        of this optimizer are only parts of them.
    """

    norms: Sequence[tuple[float, float]] | None = None

    def __init__(self, params: Iterable, **defaults: float):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of the parameters that have a gradient."""
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
    def _update(self, parameter: torch.Tensor, group: dict, norms: Any) -> None:
        """Change a parameter; `norms` are None where it is a whole one."""

    def _end_step(self, parameter: torch.Tensor, group: dict) -> None:
        """Do what belongs to a step even without a gradient."""


class LARS(SliceOptimizer):
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
