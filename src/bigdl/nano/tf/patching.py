"""Nano's classes in the places of Keras', on request."""

from __future__ import annotations

from typing import Any

from bigdl.common.checks import check_choice

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]

_replaced: list[tuple[Any, str, Any]] = []


def patch_tensorflow(precision: str = "float32") -> None:
    """Put Nano's ``Model``, ``Sequential``, ``Embedding`` and ``SparseAdam`` in Keras' places.

    Programs that look them up in ``keras`` or ``tf.keras`` afterwards get them, ``SparseAdam`` in
    the place of ``Adam``. Done twice, it is done once.

    Parameters
    ----------
    precision : {"float32", "mixed_bfloat16"}
        The global dtype policy from now on.

    Raises
    ------
    UsageError
        If the precision is another.
    """
    _set_policy(precision)
    if not _replaced:
        for module, name, value in _replacements():
            _replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)


def unpatch_tensorflow(precision: str = "float32") -> None:
    """Undo :func:`patch_tensorflow`.

    Parameters
    ----------
    precision : {"float32", "mixed_bfloat16"}
        The global dtype policy from now on.

    Raises
    ------
    UsageError
        If the precision is another.
    """
    _set_policy(precision)
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


def _set_policy(precision: str) -> None:
    check_choice("precision", precision, ("float32", "mixed_bfloat16"))
    import keras

    keras.config.set_dtype_policy(precision)


def _replacements() -> list[tuple[Any, str, Any]]:
    import keras
    import tensorflow as tf

    from bigdl.nano.tf.keras.layers import Embedding
    from bigdl.nano.tf.keras.models import Model, Sequential
    from bigdl.nano.tf.optimizers import SparseAdam

    # Both homes may share a module: what is replaced last is put back first.
    return [
        replacement
        for home in (keras, tf.keras)
        for replacement in (
            (home, "Model", Model),
            (home, "Sequential", Sequential),
            (home.models, "Model", Model),
            (home.models, "Sequential", Sequential),
            (home.layers, "Embedding", Embedding),
            (home.optimizers, "Adam", SparseAdam),
        )
    ]
