"""Names of ``bigdl.nano.tf`` that stand for search-aware things while HPO is enabled."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.automl.tf.wrapping import LazyClass, LazyLayerClass, lazy_function

__all__ = ["exchange", "original", "restore"]

_MISSING = object()
_changed: list[tuple[ModuleType, str, Any]] = []


def exchange() -> None:
    """Put what takes search spaces in the places of Keras' own."""
    for module, name, value in _substitutes():
        _changed.append((module, name, vars(module).get(name, _MISSING)))
        setattr(module, name, value)


def restore() -> None:
    """Undo :func:`exchange`."""
    while _changed:
        module, name, before = _changed.pop()
        if before is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, before)


def original(name: str) -> Any:
    """What is called so in ``bigdl.nano.tf.keras`` while HPO is not enabled."""
    home = importlib.import_module("bigdl.nano.tf.keras")
    for module, changed, before in _changed:
        if (module, changed) == (home, name):
            return home.__getattr__(name) if before is _MISSING else before
    return getattr(home, name)


def _substitutes() -> Iterator[tuple[ModuleType, str, Any]]:
    keras = require("keras", "tf")
    layers = importlib.import_module("bigdl.nano.tf.keras.layers")
    for name, value in _public(layers):
        if inspect.isclass(value) and issubclass(value, keras.layers.Layer):
            yield layers, name, LazyLayerClass(value)
        elif inspect.isfunction(value):
            yield layers, name, lazy_function(value)
    activations = importlib.import_module("bigdl.nano.tf.keras.activations")
    for name, value in _public(activations):
        if inspect.isfunction(value):
            yield activations, name, lazy_function(value)
    optimizers = importlib.import_module("bigdl.nano.tf.optimizers")
    for name, value in _public(optimizers):
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer):
            yield optimizers, name, LazyClass(value)
    yield from _models(keras)
    yield importlib.import_module("bigdl.nano.tf"), "cast", lazy_function(keras.ops.cast)


def _models(keras: Any) -> Iterator[tuple[ModuleType, str, Any]]:
    from bigdl.nano.automl.tf.keras import Model, Sequential

    home = importlib.import_module("bigdl.nano.tf.keras")
    yield home, "Input", lazy_function(keras.Input)
    yield home, "Sequential", Sequential
    yield home, "Model", Model


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    return ((name, getattr(module, name)) for name in list(names))
