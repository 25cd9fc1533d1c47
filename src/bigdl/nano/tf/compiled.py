"""What a Keras model was compiled with, for another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

__all__ = ["compile_arguments", "compiled_like", "copied"]

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
        return type(value).from_config(value.get_config())
    return value
