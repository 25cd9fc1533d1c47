"""The state of a Keras model as bytes and back, loadable by torch with ``weights_only=True``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.training.state import dumps, loads

__all__ = [
    "array_of",
    "dump_optimizers",
    "dump_weights",
    "optimizers_of",
    "put_optimizers",
    "put_weights",
    "seed_states",
    "tensor_of",
    "to_variable",
]


def array_of(value) -> np.ndarray:
    """A variable or tensor of any backend, or a number, as an array."""
    value = getattr(value, "value", value)  # of a variable of Keras
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def tensor_of(variable):
    """A copy of a variable as a tensor of torch, on the CPU."""
    import torch

    array = np.array(array_of(variable))
    if array.dtype.name == "bfloat16":  # numpy has no such type of its own
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_variable(variable, tensor) -> None:
    """Set a variable to the value of a tensor."""
    import torch

    variable.assign((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy())


def dump_weights(model) -> bytes:
    """The weights of a model, in its own order."""
    return dumps({"weights": [tensor_of(weight) for weight in model.weights]})


def put_weights(model, data: bytes, what: str = "weights") -> None:
    """Load what :func:`dump_weights` gave into a model that has its variables.

    Raises
    ------
    UsageError
        If they are those of another model.
    """
    _put(model.weights, loads(data)["weights"], what, "model")


def optimizers_of(model) -> list:
    """The compiled optimizer, and those that a model with a training step of its own holds."""
    import keras

    found = [model.optimizer, *vars(model).values()]
    kept = {id(each): each for each in found if isinstance(each, keras.optimizers.Optimizer)}
    return list(kept.values())


def dump_optimizers(model) -> bytes:
    """The states of all optimizers of a model."""
    states = [[tensor_of(v) for v in optimizer.variables] for optimizer in optimizers_of(model)]
    return dumps({"optimizers": states})


def put_optimizers(model, data: bytes) -> None:
    """Load what :func:`dump_optimizers` gave into optimizers that have their variables."""
    states = loads(data)["optimizers"]
    for optimizer, values in zip(optimizers_of(model), states, strict=False):
        _put(optimizer.variables, values, "optimizer's state", "optimizer")


def _put(variables: Sequence, values: Sequence, what, whose):
    own = [tuple(v.shape) for v in variables]
    given = [tuple(v.shape) for v in values]
    if own != given:
        i = next(
            (i for i, pair in enumerate(zip(own, given, strict=False)) if len(set(pair)) > 1),
            min(len(own), len(given)),
        )
        has, got = (str(s[i]) if i < len(s) else "nothing" for s in (own, given))
        raise UsageError(
            f"The {what} do not fit the {whose}: of {len(own)} variables, number {i} has shape "
            f"{has} in the {whose} and {got} there ({len(given)} variables)"
        )
    for variable, value in zip(variables, values, strict=True):
        to_variable(variable, value)


def seed_states(model) -> list:
    """The variables that the random layers of a model draw their numbers from."""
    weights = {id(weight) for weight in model.weights}
    return [v for v in model.variables if id(v) not in weights]
