"""Keras models for other processes, and what they were compiled with.

How classes of a script or a notebook travel with a model, :mod:`bigdl.runtime.keras_objects` says.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bigdl.common.errors import as_usage_error
from bigdl.runtime.keras_objects import KerasArchive, KerasConfig
from bigdl.runtime.serialization import dumps_by_value, value_pickler

_OF_TRAINING = ("optimizer", "run_eagerly", "jit_compile", "steps_per_execution")


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Arguments of the ``compile`` that a model was given; empty if it was not compiled."""
    config = getattr(model, "_compile_config", None)
    if not getattr(model, "compiled", False) or config is None:
        return {}
    return dict(config.config)


def compiled_like(model: keras.Model, original: object) -> keras.Model:
    """Compile a model for evaluation as another was, with losses and metrics of its own."""
    arguments = compile_arguments(original)
    if arguments:
        wanted = {key: value for key, value in arguments.items() if key not in _OF_TRAINING}
        model.compile(**copied(wanted))
    return model


def copied(value: object) -> Any:
    """Return nested arguments with new Keras objects of the same configuration."""

    def copy(each: object) -> object:
        return KerasConfig.of(each).made() if isinstance(each, _OBJECTS) else each

    return keras.tree.map_structure(copy, value)


_OBJECTS = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class PackedModel:
    """A model for other processes, which can be pickled.

    Attributes
    ----------
    content : bytes
        Its :class:`~bigdl.runtime.keras_objects.KerasArchive`, pickled by value.
    """

    content: bytes


def packed(model: keras.Model, compiled: bool = True) -> PackedModel:
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
    advice = "; give its classes a get_config that Keras can rebuild them from"
    with as_usage_error(
        f"{type(model).__name__} cannot be sent to another process", advice, code="model-copy"
    ):
        return PackedModel(dumps_by_value(KerasArchive.of(model, compiled=compiled)))


def unpacked(content: PackedModel) -> keras.Model:
    """Return the model that was packed.

    Raises
    ------
    UsageError
        If Keras cannot build it from its configuration.
    """
    sentence = "Keras cannot rebuild the model from its configuration"
    advice = "; give its classes a get_config that they can be rebuilt from"
    with as_usage_error(sentence, advice, code="model-copy"):
        return pickle.loads(content.content).made()


def dumps(value: object) -> bytes:
    """Pickle functions and what they refer to; of a ``tf.data.Dataset`` its elements."""
    buffer = io.BytesIO()
    _KerasPickler(buffer).dump(value)
    return buffer.getvalue()


class _KerasPickler(value_pickler()):  # type: ignore[misc]  # a class that is made
    def reducer_override(self, value: object) -> object:
        if isinstance(value, tf.data.Dataset):
            return _dataset, (list(value.as_numpy_iterator()), value.element_spec)
        return super().reducer_override(value)


def _dataset(elements: list, spec: object) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)


def is_of_keras(value: object) -> bool:
    """Return True for a class or function of Keras, or of what Keras stands on."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "tensorflow", "builtins", "numpy")


def put_state(
    optimizer: keras.optimizers.Optimizer, state: list[np.ndarray], model: keras.Model
) -> None:
    """Give the optimizer of a model the values of its variables; none leaves it as it begins."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, state, strict=False):
        variable.assign(value)
