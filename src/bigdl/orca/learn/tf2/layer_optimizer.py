"""The optimizer of a Keras model as the parameter layer knows it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2 import slice_optimizers as sliced
from bigdl.orca.learn.tf2.state import array_of, tensor_of, to_variable

__all__ = ["LayerOptimizer", "check_trainable"]

_AVERAGE = {"average": "_model_variables_moving_average"}


@dataclass(frozen=True)
class _Kind:
    """How an optimizer of Keras is cut.

    Attributes
    ----------
    sliced : type
    numbers : tuple of str
        Attributes that the update depends on.
    slots : dict of str to str
        Names of the state, and the attributes that hold a variable of it for every weight.
    """

    sliced: type
    numbers: tuple[str, ...]
    slots: Mapping[str, str]


_ADAM = _Kind(
    sliced.Adam,
    ("beta_1", "beta_2", "epsilon", "amsgrad"),
    {"momentum": "_momentums", "velocity": "_velocities", "velocity_hat": "_velocity_hats"},
)
_KINDS = {
    "SGD": _Kind(sliced.SGD, ("momentum", "nesterov"), {"momentum": "momentums"}),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": _Kind(
        sliced.Adagrad,
        ("epsilon", "initial_accumulator_value"),
        {"accumulator": "_accumulators"},
    ),
    "RMSprop": _Kind(
        sliced.RMSprop,
        ("rho", "momentum", "epsilon", "centered"),
        {
            "velocity": "_velocities",
            "momentum": "_momentums",
            "average_gradient": "_average_gradients",
        },
    ),
}


class LayerOptimizer:
    """The driver's own optimizer; it makes no steps, but it counts them for its schedule.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        That of a compiled model.
    weights : list of keras.Variable
        What it trains, in the order of the flat vector.

    Raises
    ------
    UsageError
        If it cannot be cut in slices.

    Attributes
    ----------
    sliced : type
        The class that updates slices.
    groups : tuple of int
        The entry of :meth:`hyper` for every weight.
    clamp, norm, with_norms
        See :class:`bigdl.orca.parameter_layer.plan.LayerPlan`.
    """

    def __init__(self, optimizer, weights: list):
        self._kind = _kind_of(optimizer)
        self._optimizer = optimizer
        if not optimizer.built:
            optimizer.build(weights)
        self.sliced = self._kind.sliced
        self.groups = tuple(0 if self._decays(weight) else 1 for weight in weights)
        # of the three ways to limit gradients Keras takes the first that is there
        self._clipnorm = _positive(optimizer.clipnorm)
        self.norm = None if self._clipnorm else _positive(optimizer.global_clipnorm)
        most = None if self._clipnorm or self.norm else _positive(optimizer.clipvalue)
        self.clamp = None if most is None else (-most, most)
        self.with_norms = self._clipnorm is not None
        slots = {**self._kind.slots, **(_AVERAGE if optimizer.use_ema else {})}
        self._slots = {
            name: held for name, where in slots.items() if (held := getattr(optimizer, where, None))
        }

    def _decays(self, weight) -> bool:
        import keras

        if self._optimizer.weight_decay is None:
            return False
        # names are compared with those of TensorFlow's own variables
        is_inner = keras.backend.backend() == "tensorflow"
        return self._optimizer._use_weight_decay(weight.value if is_inner else weight)

    def hyper(self) -> tuple[dict, ...]:
        """Numbers of the next step: of the weights that decay, and of the others."""
        optimizer = self._optimizer
        is_averaged = optimizer.use_ema
        both = {
            "learning_rate": float(np.float32(array_of(optimizer.learning_rate))),
            "iteration": self.iteration,
            "clipnorm": self._clipnorm,
            "ema_momentum": float(optimizer.ema_momentum) if is_averaged else None,
            "ema_overwrite_frequency": optimizer.ema_overwrite_frequency,
            **{name: getattr(optimizer, name) for name in self._kind.numbers},
        }
        return {**both, "weight_decay": optimizer.weight_decay}, {**both, "weight_decay": None}

    @property
    def iteration(self) -> int:
        """Steps so far."""
        return int(array_of(self._optimizer.iterations))

    def pass_step(self) -> None:
        """Count a step; a schedule looks at that."""
        self._optimizer.iterations.assign(self.iteration + 1)

    def state(self) -> dict[int, dict[str, Any]]:
        """The state of every weight by its number, as tensors."""
        found: dict[int, dict] = {}
        for name, held in self._slots.items():
            for number, variable in enumerate(held):
                found.setdefault(number, {})[name] = tensor_of(variable)
        return found

    def put_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """The inverse of :meth:`state`."""
        for number, values in state.items():
            for name, tensor in values.items():
                to_variable(self._slots[name][number], tensor)


def _kind_of(optimizer) -> _Kind:
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if name not in _KINDS or not module.startswith("keras."):
        raise UsageError(
            f"{name} cannot be cut in slices; backend='bigdl' trains with {', '.join(_KINDS)} of "
            "Keras, so use one of them, or backend='spark'"
        )
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise UsageError(
            "gradient_accumulation_steps does not go with backend='bigdl'; pass a batch_size that "
            f"is {steps} times as large, which is the same update"
        )
    return _KINDS[name]


def _positive(limit) -> float | None:
    return float(limit) if limit and limit > 0 else None


def check_trainable(weights) -> None:
    """Refuse weights that the parameter layer cannot hold or update."""
    if not weights:
        raise UsageError("The model has no trainable weights; there is nothing to fit")
    others = sorted({str(w.dtype) for w in weights if w.dtype != "float32"})
    if others:
        raise UsageError(
            "backend='bigdl' trains weights of float32, the model has some of "
            f"{', '.join(others)}; convert it, or use backend='spark'"
        )
    bound = [w.path for w in weights if getattr(w, "constraint", None) is not None]
    if bound:
        raise UsageError(
            f"{', '.join(bound)} has a constraint, which looks at whole weights, and backend="
            "'bigdl' updates slices of them; leave it out, or use backend='spark'"
        )
    if any(getattr(w, "overwrite_with_gradient", False) for w in weights):
        raise UsageError(
            "backend='bigdl' does not train in 8 bits; use another dtype policy, or backend='spark'"
        )
