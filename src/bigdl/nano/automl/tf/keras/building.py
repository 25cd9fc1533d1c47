"""Keras models of trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.automl.hpo.auto import AutoObject
from bigdl.nano.automl.tf.names import original

__all__ = ["build_model", "functional", "holds_layers", "is_layer", "sequential"]


def is_layer(value: Any) -> bool:
    """Whether a value is a layer of Keras, or something that becomes one."""
    keras = require("keras", "tf")
    return isinstance(value, (keras.layers.Layer, keras.KerasTensor))


def holds_layers(value: Any) -> bool:
    """Whether something holds layers that exist already, which trials must not share."""
    keras = require("keras", "tf")
    seen: set[int] = set()

    def holds(part: Any) -> bool:
        if id(part) in seen:
            return False
        seen.add(id(part))
        if isinstance(part, AutoObject):
            return holds(list(part.args)) or holds(part.kwargs)
        if isinstance(part, keras.KerasTensor):
            history = getattr(part, "_keras_history", None)
            return history is not None and type(history.operation).__name__ != "InputLayer"
        if isinstance(part, dict):
            return any(map(holds, part.values()))
        if isinstance(part, (list, tuple)):
            return any(map(holds, part))
        return isinstance(part, keras.layers.Layer)

    return holds(value)


def sequential(stack: list[Any], name: str | None, cloned: bool) -> Any:
    """A stack of layers."""
    return _cloned(original("Sequential")(stack, name=name), cloned)


def functional(inputs: Any, outputs: Any, name: str | None, cloned: bool) -> Any:
    """A graph of layers."""
    return _cloned(original("Model")(inputs=inputs, outputs=outputs, name=name), cloned)


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


def _cloned(model: Any, wanted: bool) -> Any:
    """The model, or one with the same weights that is trained in its place."""
    if not wanted:
        return model
    clone = require("keras", "tf").models.clone_model(model)
    if model.built:
        clone.set_weights(model.get_weights())
    return clone


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
