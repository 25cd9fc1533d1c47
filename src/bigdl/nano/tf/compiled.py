"""What a Keras model was compiled with, for another model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras

__all__ = ["compile_arguments", "compiled_like", "copied", "functions_of"]

_OF_TRAINING = ("optimizer", "run_eagerly", "jit_compile", "steps_per_execution")


def compile_arguments(model: Any) -> dict[str, Any]:
    """Arguments of the ``compile`` that a model was given; empty if it was not compiled."""
    config = getattr(model, "_compile_config", None)
    if not getattr(model, "compiled", False) or config is None:
        return {}
    return dict(config.config)


def compiled_like(model: Any, original: Any) -> Any:
    """Compile a model for evaluation as another was, with losses and metrics of its own."""
    arguments = compile_arguments(original)
    if arguments:
        wanted = {key: value for key, value in arguments.items() if key not in _OF_TRAINING}
        model.compile(**copied(wanted))
    return model


def copied(value: Any) -> Any:
    """A copy of nested arguments in which Keras objects are new ones of the same configuration."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(each) for each in value]
    if isinstance(value, (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)):
        with keras.saving.custom_object_scope(functions_of(value)):
            return type(value).from_config(value.get_config())
    return value


def functions_of(value: Any) -> dict[str, Any]:
    """Functions that nested Keras objects were made of, by the names that configurations use."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return {name: each for part in value for name, each in functions_of(part).items()}
    if not hasattr(value, "get_config"):
        return {}
    found = [each for each in vars(value).values() if inspect.isfunction(each)]
    named = {keras.saving.get_registered_name(each): each for each in found}
    return named | {each.__name__: each for each in found}
