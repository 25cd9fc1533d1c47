"""Keras models for other processes, and what they were compiled with.

Keras writes a model as its configuration and its weights, and finds classes by name when it reads
them. Classes and functions of a script or a notebook have no such name in another process, so they
are pickled by value, and so is what the model was compiled with.
"""

import inspect
import io
import pickle
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from bigdl.nano.acceleration.quiet import refusing
from bigdl.runtime.serialization import value_pickler
from bigdl.training.keras.state import array_of

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
    """Return nested arguments with new Keras objects of the same configuration."""

    def copy(each: Any) -> Any:
        if not isinstance(each, _OBJECTS):
            return each
        with keras.saving.custom_object_scope(functions_of(each)):
            return type(each).from_config(each.get_config())

    return keras.tree.map_structure(copy, value)


def functions_of(value: Any) -> dict[str, Any]:
    """Return functions that nested Keras objects were made of, by the names of configurations."""
    functions = [
        each
        for made in keras.tree.flatten(value)
        if hasattr(made, "get_config")
        for each in vars(made).values()
        if inspect.isfunction(each)
    ]
    return _by_names(functions)


def _by_names(objects: Iterable[Any]) -> dict[str, Any]:
    """Return classes and functions by the names that files and configurations call them."""
    names: dict[str, Any] = {}
    for each in objects:
        names |= {keras.saving.get_registered_name(each): each, each.__name__: each}
    return names


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
    advice = "; give its classes a get_config that Keras can rebuild them from"
    with refusing(f"{type(model).__name__} cannot be sent to another process", advice):
        # As Keras pickles models, but for the classes, which it takes for known everywhere.
        saved = model.__reduce__()[1][0].getvalue()
        arguments = compile_arguments(model) if compiled else {}
        content = None
        if arguments:
            chosen = {key: arguments[key] for key in _COMPILED}
            content = dumps((chosen, PackedOptimizer(model.optimizer)))
        objects = {**functions_of(arguments), **custom_objects(model)}
        return PackedModel(saved, cloudpickle.dumps(objects), content)


def unpacked(content: PackedModel) -> Any:
    """Return the model that was packed.

    Raises
    ------
    UsageError
        If Keras cannot build it from its configuration.
    """
    objects = pickle.loads(content.objects)
    sentence = "Keras cannot rebuild the model from its configuration"
    advice = "; give its classes a get_config that they can be rebuilt from"
    with keras.saving.custom_object_scope(objects):
        with refusing(sentence, advice), tempfile.TemporaryDirectory(prefix="bigdl-keras-") as home:
            path = Path(home, "model.keras")
            path.write_bytes(content.model)
            # The file is the caller's own, so lambdas in it are as safe as the rest of the program.
            model = keras.saving.load_model(path, compile=False, safe_mode=False)
        if content.compiled is not None:
            arguments, optimizer = pickle.loads(content.compiled)
            # It was wrapped for its loss scale when the user compiled, if it had to be.
            model.compile(optimizer.made(model), **arguments, auto_scale_loss=False)
    return model


def dumps(value: Any) -> bytes:
    """Pickle functions and what they refer to, ``tf.function`` and Keras objects among it.

    A ``tf.function`` is traced anew where it arrives, and without XLA, which cannot call Python.
    Of a ``tf.data.Dataset`` the elements are pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(value_pickler()):  # type: ignore[misc]  # a class that is made
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, tf.types.experimental.PolymorphicFunction):
            options = {
                "input_signature": value.input_signature,
                "autograph": getattr(value, "_autograph", True),
                "reduce_retracing": getattr(value, "_reduce_retracing", False),
            }
            return partial(tf.function, **options), (value.python_function,)
        if isinstance(value, (keras.losses.Loss, keras.metrics.Metric)):
            return type(value).from_config, (value.get_config(),)
        if isinstance(value, tf.data.Dataset):
            return _dataset, (list(value.as_numpy_iterator()), value.element_spec)
        return super().reducer_override(value)


def _dataset(elements: list, spec: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)


def custom_objects(model: Any) -> dict[str, Any]:
    """Return classes and functions of a model that are not Keras', by their names in files."""
    objects: list[Any] = []
    for layer in model._flatten_layers():
        # Methods that Keras has wrapped hold the layer, and are no parts of a configuration.
        functions = (
            each
            for each in vars(layer).values()
            if inspect.isfunction(each) and not hasattr(each, "__wrapped__")
        )
        objects += [type(layer), *functions]
    return _by_names(each for each in objects if not is_of_keras(each))


def is_of_keras(value: Any) -> bool:
    """Return True for a class or function of Keras, or of what Keras stands on."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("keras", "tensorflow", "builtins", "numpy")


class PackedOptimizer:
    """An optimizer that is made again where it arrives."""

    def __init__(self, optimizer: Any):
        self._cls, self._config = type(optimizer), optimizer.get_config()
        self._state = [array_of(each) for each in optimizer.variables] if optimizer.built else []

    def made(self, model: Any) -> Any:
        """Return the optimizer, for the model in this process."""
        optimizer = self._cls.from_config(self._config)
        if model.built:
            put_state(optimizer, self._state, model)
        return optimizer


def put_state(optimizer: Any, state: list[np.ndarray], model: Any) -> None:
    """Give the optimizer of a model the values of its variables; none leaves it as it begins."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, state, strict=False):
        variable.assign(value)
