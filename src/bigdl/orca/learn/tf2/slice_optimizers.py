"""Optimizers of Keras that update one slice of the flat vector.

Those of torch differ in small things: where epsilon is added, what a velocity is multiplied by, how
weights decay.  These compute what ``apply`` of Keras does, in the same order and in float32; the
step counts from ``group["iteration"]``, which the driver says.  What Keras limits by the norm of
whole weights is told by `norms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["SGD", "Adagrad", "Adam", "KerasSlice", "RMSprop"]


class KerasSlice(torch.optim.Optimizer, ABC):
    """What all optimizers of Keras have in common.

    Its groups have ``learning_rate``, ``iteration``, ``clipnorm``, ``weight_decay`` and
    ``ema_momentum`` (None where there is none), ``ema_overwrite_frequency``, and what the update
    itself needs.

    Attributes
    ----------
    elementwise : bool
        Tells the parameter layer that it may be cut.
    norms : sequence of (float, float) or None
        See :class:`bigdl.orca.parameter_layer.lars.LARS`.
    """

    elementwise = True
    norms: Sequence[tuple[float, float]] | None = None

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        """One update of the weights that have a gradient."""
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group, number)
                if group["ema_momentum"] is not None:
                    self._average(weight, group)
                number += 1

    def _step(self, weight, group, number):
        gradient, most, decay = weight.grad, group["clipnorm"], group["weight_decay"]
        if most is not None and self.norms is not None:
            gradient = gradient * most / max(self.norms[number][1], most)
        if decay is not None:
            weight.sub_(weight * decay * group["learning_rate"])
        self.update(weight, gradient, self.state[weight], group)

    def _average(self, weight, group):
        iteration, often = group["iteration"], group["ema_overwrite_frequency"]
        momentum = group["ema_momentum"] if iteration else 0.0
        average = _slot(self.state[weight], "average", weight)
        average.mul_(momentum).add_(weight * (1 - momentum))
        if often and (iteration + 1) % often == 0:
            weight.copy_(average)

    @abstractmethod
    def update(self, weight, gradient, state: dict, group: dict) -> None:
        """Change one weight and its state."""


def _slot(state, name, weight, initial=0.0):
    """A tensor of the state, made when it is needed first."""
    if name not in state:
        state[name] = torch.full_like(weight, initial)
    return state[name]


class SGD(KerasSlice):
    """``keras.optimizers.SGD``: velocities are those of the weights, with the learning rate in."""

    def update(self, weight, gradient, state, group):
        moved = gradient * group["learning_rate"]
        momentum = group["momentum"]
        if momentum == 0:
            weight.sub_(moved)
            return
        velocity = _slot(state, "momentum", weight)
        velocity.mul_(momentum).sub_(moved)
        weight.add_(velocity * momentum - moved if group["nesterov"] else velocity)


class Adam(KerasSlice):
    """``keras.optimizers.Adam`` and ``AdamW``: epsilon is the "epsilon hat" of the paper."""

    def update(self, weight, gradient, state, group):
        first, second = group["beta_1"], group["beta_2"]
        mean = _slot(state, "momentum", weight)
        mean.add_((gradient - mean) * (1 - first))
        square = _slot(state, "velocity", weight)
        square.add_((gradient.square() - square) * (1 - second))
        if group["amsgrad"]:
            largest = _slot(state, "velocity_hat", weight)
            square = torch.maximum(largest, square, out=largest)
        rate = _corrected(group["learning_rate"], first, second, group["iteration"] + 1)
        weight.sub_(mean * rate / (square.sqrt() + group["epsilon"]))


def _corrected(rate: float, first: float, second: float, step: int) -> float:
    """The learning rate of Adam in a step; in float32, where 1 - beta is rough."""
    one, count = np.float32(1), np.float32(step)
    first_left = one - np.power(np.float32(first), count)
    second_left = one - np.power(np.float32(second), count)
    return float(np.float32(rate) * np.sqrt(second_left) / first_left)


class Adagrad(KerasSlice):
    """``keras.optimizers.Adagrad``: epsilon is below the root."""

    def update(self, weight, gradient, state, group):
        total = _slot(state, "accumulator", weight, group["initial_accumulator_value"])
        total.add_(gradient.square())
        weight.sub_(gradient * group["learning_rate"] / (total + group["epsilon"]).sqrt())


class RMSprop(KerasSlice):
    """``keras.optimizers.RMSprop``: epsilon is below the root."""

    def update(self, weight, gradient, state, group):
        rho = group["rho"]
        square = _slot(state, "velocity", weight)
        square.mul_(rho).add_(gradient.square() * (1 - rho))
        below = square + group["epsilon"]
        if group["centered"]:
            mean = _slot(state, "average_gradient", weight)
            mean.mul_(rho).add_(gradient * (1 - rho))
            below = square - mean.square() + group["epsilon"]
        moved = gradient * group["learning_rate"] / below.sqrt()
        if group["momentum"] > 0:
            velocity = _slot(state, "momentum", weight)
            moved = velocity.mul_(group["momentum"]).add_(moved)
        weight.sub_(moved)
