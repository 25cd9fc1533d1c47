"""What one Keras model has, for another object."""

from __future__ import annotations

from typing import Any

import keras

from bigdl.common.stand_ins import actual
from bigdl.nano.tf.serialization import compiled_like

__all__ = ["patch_attrs", "patch_compiled", "patch_compiled_and_attrs"]


def patch_attrs(target: Any, source: keras.Model) -> Any:
    """Set the public attributes and methods that a user has given a model on another object.

    What the object has already stays.

    Parameters
    ----------
    target : object
    source : keras.Model

    Returns
    -------
    object
        `target`.
    """
    source = actual(source)
    classes = [each for each in type(source).__mro__ if not _is_of_a_library(each)]
    names = set(vars(source)).union(*map(vars, classes))
    for name in sorted(names - set(dir(keras.Model()))):
        if not name.startswith("_") and not hasattr(target, name):
            setattr(target, name, getattr(source, name))
    return target


def patch_compiled(target: keras.Model, source: keras.Model) -> keras.Model:
    """Compile a model for evaluation as another was, with losses and metrics of its own.

    Parameters
    ----------
    target : keras.Model
    source : keras.Model
        One that was not compiled leaves `target` as it is.

    Returns
    -------
    keras.Model
        `target`.
    """
    return compiled_like(target, actual(source))


def patch_compiled_and_attrs(target: keras.Model, source: keras.Model) -> keras.Model:
    """:func:`patch_compiled` and :func:`patch_attrs`."""
    return patch_attrs(patch_compiled(target, source), source)


def _is_of_a_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("keras", "tensorflow", "builtins")
