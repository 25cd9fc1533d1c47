"""Keras models for other processes, and what they were compiled with.

Keras writes a model as its configuration and its weights, and finds classes by name when it reads
them. Classes and functions of a script or a notebook have no such name in another process, so they
are pickled by value, and so is what the model was compiled with.
"""

from __future__ import annotations

import inspect
import io
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import UsageError, one_line

__all__ = [
    "PackedModel",
    "compile_arguments",
    "compiled_like",
    "copied",
    "custom_objects",
    "dumps",
    "packed",
    "unpacked",
]


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


_OBJECTS = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)
_COMPILED = (
    *("loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly"),
    "steps_per_execution",
)


@dataclass(frozen=True)
class PackedModel:
    """A model as bytes, which can be pickled.

    Attributes
    ----------
    model : bytes
        As Keras writes it.
    objects : bytes
        Classes and functions by their names, pickled by value.
    compiled : bytes or None
        Arguments of ``compile``, pickled.
    """

    model: bytes
    objects: bytes
    compiled: bytes | None


@dataclass(frozen=True)
class _Recipe:
    """A Keras object as what makes it again."""

    cls: type[Any]
    config: dict
    variables: tuple = ()

    def made(self) -> Any:
        return self.cls.from_config(self.config)


def packed(model: Any, compiled: bool = True) -> PackedModel:
    """Pack a model for another process.

    Parameters
    ----------
    model : keras.Model
    compiled : bool
        Whether losses, metrics, and the optimizer with its state are packed too.

    Raises
    ------
    UsageError
        If something cannot be written or pickled.
    """
    try:
        buffer = io.BytesIO()
        # As Keras pickles models, but for the classes, which it takes for known everywhere.
        saved = model.__reduce__()[1][0]
        buffer.write(saved.getvalue())
        arguments = compile_arguments(model) if compiled else {}
        content = None
        if arguments:
            chosen = {key: _recipes(arguments[key]) for key in _COMPILED}
            chosen["optimizer"] = _optimizer_recipe(model.optimizer)
            content = cloudpickle.dumps(chosen)
        objects = {**functions_of(arguments), **custom_objects(model)}
        return PackedModel(buffer.getvalue(), cloudpickle.dumps(objects), content)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be sent to another process: {one_line(error)}; give "
            "its classes a get_config that Keras can rebuild them from"
        ) from error


def unpacked(content: PackedModel) -> Any:
    """Return the model that was packed.

    Raises
    ------
    UsageError
        If Keras cannot build it from its configuration.
    """
    objects = pickle.loads(content.objects)
    try:
        # The file is the caller's own, so lambdas in it are as safe as the rest of the program.
        with keras.saving.custom_object_scope(objects):
            model = _loaded(content.model)
    except Exception as error:
        raise UsageError(
            f"Keras cannot rebuild the model from its configuration: {one_line(error)}; give its "
            "classes a get_config that they can be rebuilt from"
        ) from error
    if content.compiled is not None:
        with keras.saving.custom_object_scope(objects):
            _compile(model, pickle.loads(content.compiled))
    return model


def dumps(value: Any) -> bytes:
    """Pickle functions and what they refer to, ``tf.function`` and Keras objects among it.

    A ``tf.function`` is traced anew where it arrives, and without XLA, which cannot call Python.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type(_graph_function)):
            options = {
                "input_signature": value.input_signature,
                "autograph": getattr(value, "_autograph", True),
                "reduce_retracing": getattr(value, "_reduce_retracing", False),
            }
            return _traced, (value.python_function, options)
        if isinstance(value, (keras.losses.Loss, keras.metrics.Metric)):
            return _Recipe.made, (_Recipe(type(value), value.get_config()),)
        return super().reducer_override(value)


def _traced(function: Any, options: dict) -> Any:
    return tf.function(function, **options)


@tf.function
def _graph_function() -> None:
    """Tells what a ``tf.function`` is an object of."""


def custom_objects(model: Any) -> dict[str, Any]:
    """Classes and functions of a model that are not Keras', by the names that files call them."""
    found: dict[str, Any] = {}
    for layer in model._flatten_layers():
        # Methods that Keras has wrapped hold the layer, and are no parts of a configuration.
        functions = [
            each
            for each in vars(layer).values()
            if inspect.isfunction(each) and not hasattr(each, "__wrapped__")
        ]
        named: tuple[Any, ...] = (type(layer), *functions)
        for each in named:
            if not _is_of_keras(each):
                found[keras.saving.get_registered_name(each)] = each
                found[each.__name__] = each
    return found


def _loaded(content: bytes) -> Any:
    with tempfile.TemporaryDirectory(prefix="bigdl-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        return keras.saving.load_model(path, compile=False, safe_mode=False)


def _is_of_keras(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "tensorflow", "builtins", "numpy")


def _recipes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _recipes(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_recipes(each) for each in value]
    if isinstance(value, _OBJECTS):
        return _Recipe(type(value), value.get_config())
    return value


def _made(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _made(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_made(each) for each in value]
    return value.made() if isinstance(value, _Recipe) else value


def _optimizer_recipe(optimizer: Any) -> _Recipe:
    state = tuple(np.asarray(v) for v in optimizer.variables) if optimizer.built else ()
    return _Recipe(type(optimizer), optimizer.get_config(), state)


def _compile(model: Any, arguments: dict[str, Any]) -> None:
    recipe = arguments["optimizer"]
    # The optimizer was wrapped for its loss scale when the user compiled, if it had to be.
    model.compile(**{key: _made(each) for key, each in arguments.items()}, auto_scale_loss=False)
    if recipe.variables and model.built:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, recipe.variables, strict=True):
            variable.assign(value)
