"""Keras that computes with JAX: its steps, and gradients that leave a compiled step and come back.

The workers do not form a ``jax.distributed``: its programs want as many rows on every process (with
others they wait for ever), it takes SIGTERM to itself, and a process joins once, before it computes
anything, while tasks of Spark and actors of Ray come back for the next fit.  A step is compiled for
one process, and calls the GradientSync of the other backends where it hands the gradients to the
optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["JaxSteps", "called_back", "intercept_stateless", "limit_threads"]

_TRAINED = ("trainable_variables", "non_trainable_variables")


def limit_threads(threads: int | None) -> None:
    """Let XLA have so many threads; before JAX computes for the first time in this process."""
    if threads is not None:
        # the only thing that the CPU client asks for the size of its pools
        os.environ.setdefault("NPROC", str(threads))


class JaxSteps:
    """Steps as JAX compiles them, one for every number of rows.

    They are those that ``fit`` of Keras makes, so a model with a ``train_step(state, data)`` of its
    own is trained as it says.
    """

    def __init__(self, model):
        self._model = model

    def train(self, batch) -> dict:
        model = self._model
        model.make_train_function()
        optimizer = () if model.optimizer is None else model.optimizer.variables
        return self._run(model.train_function, batch, optimizer, model.metrics_variables)

    def test(self, batch) -> dict:
        model = self._model
        model.make_test_function()
        return self._run(model.test_function, batch, model.metrics_variables)

    def predict(self, inputs):
        return self._model.predict_on_batch(_map(_array, inputs))

    def _run(self, function, batch, *more: Sequence) -> dict:
        import jax

        groups = [*(getattr(self._model, name) for name in _TRAINED), *more]
        # the memory of the old state is given to the new one
        state = tuple([variable.value for variable in group] for group in groups)
        logs, state = function(state, iter([_map(_array, batch)]))
        jax.block_until_ready(state)  # gradients are on their way until then
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        return logs


def intercept_stateless(optimizer, reduce: Callable[[Sequence, Sequence], list]) -> None:
    """Let `reduce` see the gradients that an optimizer is to apply in a compiled step.

    One that scales the loss looks at the gradients before it calls its ``apply``, so this is done a
    call further out.
    """
    base = type(optimizer).stateless_apply

    def stateless_apply(optimizer_variables, grads, trainable_variables):
        grads = reduce(list(grads), list(trainable_variables))
        return base(optimizer, optimizer_variables, grads, trainable_variables)

    object.__setattr__(optimizer, "stateless_apply", stateless_apply)


def called_back(function: Callable[..., list], tensors: Sequence) -> list:
    """The arrays that a function makes of tensors of a compiled step; they have the same forms."""
    import jax
    from jax.experimental import io_callback

    forms = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    # ordered: a step with two optimizers meets the others in the same order on all ranks
    return io_callback(
        lambda *given: function(*map(np.asarray, given)), forms, *tensors, ordered=True
    )


def _map(function, value):
    import keras

    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), value)


def _array(value: Any) -> np.ndarray:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
