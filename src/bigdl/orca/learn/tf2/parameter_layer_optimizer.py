"""Keras optimizers for the parameter layer: one for the driver, others for weight slices.

Torch optimizers differ from those of Keras in details: where epsilon is added, how the velocity is
scaled, and how weights decay. The optimizers here compute the same as ``apply`` of Keras, in the
same order and in float32. The driver sends the step number as ``group["iteration"]``, and the norms
of whole weights, which Keras clips by, as `norms`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.parameter_layer.lars import SliceOptimizer
from bigdl.training.keras.state import array_of, tensor_of, to_variable

_AVERAGE = "_model_variables_moving_average"


class KerasSliceOptimizer(SliceOptimizer):
    """Base class of Keras-equivalent optimizers that update slices of the flat weight vector.

    Parameter groups have ``learning_rate``, ``iteration``, ``clipnorm``, ``weight_decay`` and
    ``ema_momentum`` (None if unset), ``ema_overwrite_frequency``, and the hyperparameters in
    `numbers`.

    Attributes
    ----------
    elementwise : bool
        True: the parameter layer may slice parameters.
    numbers : tuple of str
        Attributes of the Keras optimizer that the update depends on.
    slots : tuple of str
        Attributes of the Keras optimizer that hold the state of every weight.
    """

    elementwise = True
    numbers: tuple[str, ...]
    slots: tuple[str, ...]

    def _update(self, parameter, group, norms):
        gradient, most, decay = parameter.grad, group["clipnorm"], group["weight_decay"]
        if most is not None and norms is not None:
            gradient = gradient * most / max(norms[1], most)
        if decay is not None:
            parameter.sub_(parameter * decay * group["learning_rate"])
        self.update(parameter, gradient, self.state[parameter], group)

    def _end_step(self, parameter, group):
        if group["ema_momentum"] is None:
            return
        iteration, often = group["iteration"], group["ema_overwrite_frequency"]
        momentum = group["ema_momentum"] if iteration else 0.0
        average = _slot(self.state[parameter], _AVERAGE, parameter)
        average.mul_(momentum).add_(parameter * (1 - momentum))
        if often and (iteration + 1) % often == 0:
            parameter.copy_(average)

    @abstractmethod
    def update(self, weight, gradient, state: dict, group: dict) -> None:
        """Update one weight slice and its state."""


def _slot(state, name, weight, initial=0.0):
    """Return the optimizer state tensor `name` of a weight, creating it on first use."""
    if name not in state:
        state[name] = torch.full_like(weight, initial)
    return state[name]


class KerasSGD(KerasSliceOptimizer):
    """``keras.optimizers.SGD`` on slices; the velocity includes the learning rate."""

    numbers = ("momentum", "nesterov")
    slots = ("momentums",)

    def update(self, weight, gradient, state, group):
        moved = gradient * group["learning_rate"]
        momentum = group["momentum"]
        if momentum == 0:
            weight.sub_(moved)
            return
        velocity = _slot(state, "momentums", weight)
        velocity.mul_(momentum).sub_(moved)
        weight.add_(velocity * momentum - moved if group["nesterov"] else velocity)


class KerasAdam(KerasSliceOptimizer):
    """``keras.optimizers.Adam`` on slices; epsilon is the "epsilon hat" of the paper."""

    numbers = ("beta_1", "beta_2", "epsilon", "amsgrad")
    slots = ("_momentums", "_velocities", "_velocity_hats")

    def update(self, weight, gradient, state, group):
        first, second = group["beta_1"], group["beta_2"]
        mean = _slot(state, "_momentums", weight)
        mean.add_((gradient - mean) * (1 - first))
        square = _slot(state, "_velocities", weight)
        square.add_((gradient.square() - square) * (1 - second))
        if group["amsgrad"]:
            largest = _slot(state, "_velocity_hats", weight)
            square = torch.maximum(largest, square, out=largest)
        rate = _bias_corrected(group["learning_rate"], first, second, group["iteration"] + 1)
        weight.sub_(mean * rate / (square.sqrt() + group["epsilon"]))


def _bias_corrected(rate: float, first: float, second: float, step: int) -> float:
    """Return Adam's bias-corrected learning rate of a step, in float32 as Keras computes it."""
    one, count = np.float32(1), np.float32(step)
    first_left = one - np.power(np.float32(first), count)
    second_left = one - np.power(np.float32(second), count)
    return float(np.float32(rate) * np.sqrt(second_left) / first_left)


class KerasAdamW(KerasAdam):
    """``keras.optimizers.AdamW`` on slices, with the group's weight decay."""


class KerasAdagrad(KerasSliceOptimizer):
    """``keras.optimizers.Adagrad`` on slices; epsilon is added under the square root."""

    numbers = ("epsilon", "initial_accumulator_value")
    slots = ("_accumulators",)

    def update(self, weight, gradient, state, group):
        total = _slot(state, "_accumulators", weight, group["initial_accumulator_value"])
        rate, epsilon = group["learning_rate"], group["epsilon"]
        if gradient.is_sparse:  # the touched rows of a table
            rows, values = gradient.indices()[0], gradient.values()
            total.index_add_(0, rows, values.square())
            weight.index_add_(0, rows, values * -rate / (total[rows] + epsilon).sqrt())
            return
        total.add_(gradient.square())
        weight.sub_(gradient * rate / (total + epsilon).sqrt())


class KerasRMSprop(KerasSliceOptimizer):
    """``keras.optimizers.RMSprop`` on slices; epsilon is added under the square root."""

    numbers = ("rho", "momentum", "epsilon", "centered")
    slots = ("_velocities", "_momentums", "_average_gradients")

    def update(self, weight, gradient, state, group):
        rho = group["rho"]
        square = _slot(state, "_velocities", weight)
        square.mul_(rho).add_(gradient.square() * (1 - rho))
        below = square + group["epsilon"]
        if group["centered"]:
            mean = _slot(state, "_average_gradients", weight)
            mean.mul_(rho).add_(gradient * (1 - rho))
            below = square - mean.square() + group["epsilon"]
        moved = gradient * group["learning_rate"] / below.sqrt()
        if group["momentum"] > 0:
            velocity = _slot(state, "_momentums", weight)
            moved = velocity.mul_(group["momentum"]).add_(moved)
        weight.sub_(moved)


_CLASSES: dict[str, type[KerasSliceOptimizer]] = {
    "SGD": KerasSGD,
    "Adam": KerasAdam,
    "AdamW": KerasAdamW,
    "Adagrad": KerasAdagrad,
    "RMSprop": KerasRMSprop,
}
"""Classes that update slices, by the name of the Keras class."""


class KerasParameterLayerOptimizer:
    """Driver-side optimizer that computes no updates but counts steps for its schedule.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Optimizer of a compiled model.
    weights : list of keras.Variable
        Trained weights, in the order of the flat vector.

    Raises
    ------
    UsageError
        If the optimizer does not support slices of weights.

    Attributes
    ----------
    sliced : type
        The class that updates slices.
    groups : tuple of int
        Index into :meth:`hyper` for every weight.
    clamp, norm, slack, needs_norms, is_by_row
        See :class:`~bigdl.orca.parameter_layer.fit.loop.DriverModel`.
    """

    slack = 0.0
    is_by_row = False

    def __init__(self, optimizer, weights: list):
        _check_trainable(weights)
        self.sliced, self._optimizer = _slice_class_of(optimizer), optimizer
        if not optimizer.built:
            optimizer.build(weights)
        self.groups = tuple(0 if self._decays(weight) else 1 for weight in weights)
        # Keras uses the first of the three clipping options that is set
        self._clipnorm = _positive(optimizer.clipnorm)
        self.norm = None if self._clipnorm else _positive(optimizer.global_clipnorm)
        most = None if self._clipnorm or self.norm else _positive(optimizer.clipvalue)
        self.clamp = None if most is None else (-most, most)
        self.needs_norms = self._clipnorm is not None
        slots = [*self.sliced.slots, *([_AVERAGE] if optimizer.use_ema else ())]
        variables = {name: getattr(optimizer, name, None) for name in slots}
        self._slots = {name: held for name, held in variables.items() if held}

    def _decays(self, weight) -> bool:
        import keras

        if self._optimizer.weight_decay is None:
            return False
        # Keras compares names with those of the wrapped TensorFlow variables
        is_inner = keras.backend.backend() == "tensorflow"
        return self._optimizer._use_weight_decay(weight.value if is_inner else weight)

    def hyper(self) -> tuple[dict, ...]:
        """Return the next step's hyperparameters as two dicts, with and without weight decay."""
        optimizer = self._optimizer
        is_averaged = optimizer.use_ema
        both = {
            "learning_rate": float(np.float32(array_of(optimizer.learning_rate))),
            "iteration": self.iteration,
            "clipnorm": self._clipnorm,
            "ema_momentum": float(optimizer.ema_momentum) if is_averaged else None,
            "ema_overwrite_frequency": optimizer.ema_overwrite_frequency,
            **{name: getattr(optimizer, name) for name in self.sliced.numbers},
        }
        return {**both, "weight_decay": optimizer.weight_decay}, {**both, "weight_decay": None}

    def updates_rows(self, widths: Sequence[int]) -> bool:
        """Return True if the next step only changes embedding rows that have a gradient."""
        changing = ("use_ema", "momentum", "weight_decay")
        changes_all = any(getattr(self._optimizer, name, None) for name in changing)
        return self.sliced in (KerasSGD, KerasAdagrad) and not (changes_all or self.needs_norms)

    @property
    def iteration(self) -> int:
        """Number of steps so far."""
        return int(array_of(self._optimizer.iterations))

    def pass_step(self) -> None:
        """Advance the step count, which determines the scheduled learning rate."""
        self._optimizer.iterations.assign(self.iteration + 1)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the state tensors of every weight by its index."""
        state: dict[int, dict] = {}
        for name, held in self._slots.items():
            for number, variable in enumerate(held):
                state.setdefault(number, {})[name] = tensor_of(variable)
        return state

    def put_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the state from the result of :meth:`state`."""
        for number, values in state.items():
            for name, tensor in values.items():
                to_variable(self._slots[name][number], tensor)


def _slice_class_of(optimizer) -> type[KerasSliceOptimizer]:
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if name not in _CLASSES or not module.startswith("keras."):
        raise UsageError(
            f"{name} cannot be cut in slices; backend='bigdl' trains with {', '.join(_CLASSES)} of "
            "Keras, so use one of them, or backend='spark'",
            code="optimizer-unsupported",
            allowed=list(_CLASSES),
        )
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise UsageError(
            "gradient_accumulation_steps is not supported with backend='bigdl'; pass a batch_size "
            f"that is {steps} times as large for the same update",
            code="optimizer-unsupported",
            argument="gradient_accumulation_steps",
        )
    return _CLASSES[name]


def _positive(limit) -> float | None:
    return float(limit) if limit and limit > 0 else None


def _check_trainable(weights) -> None:
    """Raise an error for weights that the parameter layer cannot hold or update."""
    if not weights:
        raise UsageError(
            "The model has no trainable weights; there is nothing to fit", code="model-unsupported"
        )
    others = sorted({str(w.dtype) for w in weights if w.dtype != "float32"})
    if others:
        raise UsageError(
            "backend='bigdl' only trains float32 weights, but the model has "
            f"{', '.join(others)}; convert it, or use backend='spark'",
            code="model-unsupported",
        )
    bound = [w.path for w in weights if getattr(w, "constraint", None) is not None]
    if bound:
        raise UsageError(
            f"{', '.join(bound)} has a constraint, which needs whole weights, but backend="
            "'bigdl' updates slices of them; remove it, or use backend='spark'",
            code="model-unsupported",
        )
    if any(getattr(w, "overwrite_with_gradient", False) for w in weights):
        raise UsageError(
            "backend='bigdl' does not support 8-bit training; use another dtype policy, or "
            "backend='spark'",
            code="model-unsupported",
        )
