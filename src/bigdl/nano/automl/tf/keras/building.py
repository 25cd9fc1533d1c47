"""Keras models of trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import require

__all__ = ["build_model", "is_layer"]


def is_layer(value: Any) -> bool:
    """Whether a value is a layer of Keras, or something that becomes one."""
    keras = require("keras", "tf")
    return isinstance(value, (keras.layers.Layer, keras.KerasTensor))


def build_model(made: Mapping[str, Any]) -> Any:
    """The model of a trial, compiled.

    Parameters
    ----------
    made : mapping
        Its ``model``, and the arguments of ``compile``, with all spaces chosen.

    Returns
    -------
    keras.Model
        It shares no weights, optimizer or metric with that of another trial.
    """
    model, arguments = made["model"], made["compile"]
    if arguments:
        model.compile(**{name: _fresh(value) for name, value in arguments.items()})
    return model


def _fresh(value: Any) -> Any:
    """A copy of what training changes."""
    keras = require("keras", "tf")
    if isinstance(value, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return type(value).from_config(value.get_config())
    if type(value) in (list, tuple):
        return type(value)(_fresh(each) for each in value)
    if type(value) is dict:
        return {name: _fresh(each) for name, each in value.items()}
    return value
