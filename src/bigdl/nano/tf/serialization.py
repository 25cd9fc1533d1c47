"""Pickling of Keras models for other processes, and copies of compile arguments.

Classes defined in a script or notebook are pickled with the model; see
:mod:`bigdl.runtime.keras_objects`.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import as_usage_error
from bigdl.runtime.keras_objects import KerasArchive, KerasConfig
from bigdl.runtime.serialization import dumps_by_value, value_pickler

T = TypeVar("T")

_OF_TRAINING = ("optimizer", "run_eagerly", "jit_compile", "steps_per_execution")


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return a model's ``compile`` arguments, or an empty dict if it was not compiled."""
    config = getattr(model, "_compile_config", None)
    if not getattr(model, "compiled", False) or config is None:
        return {}
    return dict(config.config)


def compiled_like(model: keras.Model, original: object) -> keras.Model:
    """Compile `model` for evaluation like `original`, with copies of its losses and metrics."""
    arguments = compile_arguments(original)
    if arguments:
        arguments_to_copy = {
            key: value for key, value in arguments.items() if key not in _OF_TRAINING
        }
        model.compile(**copied(arguments_to_copy))
    return model


def copied(value: T) -> T:
    """Return nested arguments with copies of Keras losses, metrics and optimizers."""

    def copy(each: object) -> object:
        return KerasConfig.of(each).made() if isinstance(each, _OBJECTS) else each

    return keras.tree.map_structure(copy, value)


_OBJECTS = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class PackedModel:
    """A Keras model in a picklable format, for transfer to other processes.

    Attributes
    ----------
    content : bytes
        The model's :class:`~bigdl.runtime.keras_objects.KerasArchive`, pickled by value.
    """

    content: bytes


def packed(model: keras.Model, compiled: bool = True) -> PackedModel:
    """Convert a model to a :class:`PackedModel`, which other processes can unpickle.

    Parameters
    ----------
    model : keras.Model
    compiled : bool
        True to include losses, metrics, and the optimizer with its state.

    Raises
    ------
    UsageError
        If a part of the model cannot be serialized.
    """
    advice = "; implement get_config in its classes, so that Keras can rebuild them"
    with as_usage_error(
        f"{type(model).__name__} cannot be sent to another process", advice, code="model-copy"
    ):
        return PackedModel(dumps_by_value(KerasArchive.of(model, compiled=compiled)))


def unpacked(content: PackedModel) -> keras.Model:
    """Create a Keras model from a :class:`PackedModel`.

    Raises
    ------
    UsageError
        If Keras cannot build it from its configuration.
    """
    sentence = "Keras cannot rebuild the model from its configuration"
    advice = "; implement get_config in its classes, so that Keras can rebuild them"
    with as_usage_error(sentence, advice, code="model-copy"):
        return pickle.loads(content.content).made()


def dumps(value: object) -> bytes:
    """Pickle functions with the objects they refer to, and datasets as their elements."""
    buffer = io.BytesIO()
    _KerasPickler(buffer).dump(value)
    return buffer.getvalue()


class _KerasPickler(value_pickler()):  # type: ignore[misc]  # a dynamic class
    def reducer_override(self, value: object) -> object:
        if isinstance(value, tf.data.Dataset):
            return _dataset, (list(value.as_numpy_iterator()), value.element_spec)
        return super().reducer_override(value)


def _dataset(elements: list, spec: object) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)


def is_of_keras(value: object) -> bool:
    """Return True for a class or function of Keras, TensorFlow, NumPy or ``builtins``."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "tensorflow", "builtins", "numpy")


def put_state(
    optimizer: keras.optimizers.Optimizer, state: list[np.ndarray], model: keras.Model
) -> None:
    """Assign the values of an optimizer's variables; an empty list keeps the initial state."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, state, strict=False):
        variable.assign(value)
