"""Replacements for Keras layers, functions and optimizers, which accept search spaces.

The replacement of a layer class always creates lazy layers: a lazy layer may be called with the
result of another one, so that a graph with one search space is lazy as a whole. Only the
constructor of a subclassed model, which runs once all spaces are chosen, creates real layers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.searchable import AutoObject, called, func

__all__ = ["substitutes", "with_real_layers"]

_is_chosen = ContextVar("is_chosen", default=False)


def substitutes(models: Mapping[str, type]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield ``(module, name, replacement)`` for each name to replace in ``bigdl.nano.tf``.

    Parameters
    ----------
    models : mapping of str to type
        Searchable replacements of ``Model`` and ``Sequential`` by name.
    """
    keras = require("keras", "tf")
    for path in ("keras.layers", "keras.activations", "optimizers"):
        module = importlib.import_module(f"bigdl.nano.tf.{path}")
        for name, value in _public(module):
            if inspect.isfunction(value):
                yield module, name, func()(value)
            elif inspect.isclass(value) and issubclass(value, keras.layers.Layer):
                yield module, name, LazyLayerClass(value)
            elif inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer):
                yield module, name, LazyClass(value)
    home = importlib.import_module("bigdl.nano.tf.keras")
    yield home, "Input", func()(keras.Input)
    yield from ((home, name, model) for name, model in models.items())
    yield importlib.import_module("bigdl.nano.tf"), "cast", func()(keras.ops.cast)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    return ((name, getattr(module, name)) for name in list(names))


class LazyClass:
    """Replacement for a class; calls with search spaces return a lazy object.

    Parameters
    ----------
    cls : type
    """

    def __init__(self, cls: type):
        self._cls = cls
        functools.update_wrapper(self, cls, updated=())

    def __call__(self, *args: object, **kwargs: object) -> object:
        return called(self._cls, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # an attribute of the class
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._cls, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._cls)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._cls)

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self._cls,)

    def __reduce__(self) -> tuple:
        return type(self), (self._cls,)

    def __repr__(self) -> str:
        return repr(self._cls)


class LazyLayerClass(LazyClass):
    """Replacement for a layer class; calls return lazy layers."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        if _is_chosen.get():
            return super().__call__(*args, **kwargs)
        return LazyLayer(self._cls, *args, **kwargs)


class LazyLayer(AutoObject):
    """A layer that is created once its arguments are chosen; calls return lazy tensors."""

    def __call__(self, *args: object, **kwargs: object) -> AutoObject:
        return AutoObject(operator.call, self, *args, **kwargs)


def with_real_layers(constructor: Callable[..., None]) -> Callable[..., None]:
    """Wrap a model's constructor so that it creates real layers instead of lazy ones."""

    @functools.wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> None:
        token = _is_chosen.set(True)
        try:
            constructor(*args, **kwargs)
        finally:
            _is_chosen.reset(token)

    return construct
