"""Keras' layers, functions and optimizers, taking search spaces.

What stands for a layer class makes lazy layers, whatever their arguments are: a lazy layer may be
called with the result of another one, so a graph that has a space somewhere is lazy as a whole.
Only in the constructor of a model, which runs when everything is chosen, they are real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from bigdl.nano.automl.hpo.auto import AutoObject
from bigdl.nano.automl.hpo.lazy import holds_spaces

__all__ = ["LazyClass", "LazyLayer", "LazyLayerClass", "lazy_function", "makes_layers"]

_is_chosen = ContextVar("is_chosen", default=False)


class LazyClass:
    """Stands for a class: constructed with spaces it gives a lazy object, else one of the class.

    Parameters
    ----------
    cls : type
    """

    def __init__(self, cls: type):
        self._cls = cls
        functools.update_wrapper(self, cls, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if holds_spaces(list(args)) or holds_spaces(kwargs):
            return AutoObject(self._cls, *args, **kwargs)
        return self._cls(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._cls, name)

    def __instancecheck__(self, instance: Any) -> bool:
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
    """Stands for a class of layers: it gives lazy layers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_chosen.get():
            return super().__call__(*args, **kwargs)
        return LazyLayer(self._cls, *args, **kwargs)


class LazyLayer(AutoObject):
    """A layer that is made when its arguments have been chosen; called, it gives a lazy tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> AutoObject:
        return AutoObject(_called, self, *args, **kwargs)


def lazy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that, called with something lazy, gives a lazy result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if holds_spaces(list(args)) or holds_spaces(kwargs):
            return AutoObject(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def makes_layers(constructor: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a model, in which layers are real ones."""

    @functools.wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> None:
        token = _is_chosen.set(True)
        try:
            constructor(*args, **kwargs)
        finally:
            _is_chosen.reset(token)

    return construct


def _called(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)
