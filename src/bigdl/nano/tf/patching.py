"""Functions that replace Keras classes with Nano's classes and restore them."""

from collections.abc import Iterator
from typing import Any

from bigdl.common.checks import check_choice
from bigdl.nano.attribute_patch import AttributePatch

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]

_replaced = AttributePatch()


def patch_tensorflow(precision: str = "float32") -> None:
    """Replace Keras' ``Model``, ``Sequential``, ``Embedding`` and ``Adam`` with Nano's classes.

    Later look-ups in ``keras`` or ``tf.keras`` return the replacements; ``SparseAdam`` replaces
    ``Adam``. A second call has no further effect.

    Parameters
    ----------
    precision : {"float32", "mixed_bfloat16"}
        The global dtype policy from now on.

    Raises
    ------
    UsageError
        If the precision is another.

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.tf import patch_tensorflow, unpatch_tensorflow
    >>> patch_tensorflow()
    >>> keras.Sequential, keras.optimizers.Adam().name
    (<class 'bigdl.nano.tf.keras.models.Sequential'>, 'SparseAdam')
    >>> unpatch_tensorflow()
    """
    _set_policy(precision)
    if not _replaced.active:
        for module, name, value in _replacements():
            _replaced.set(module, name, value)


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

    Examples
    --------
    >>> import keras
    >>> from bigdl.nano.tf import patch_tensorflow, unpatch_tensorflow
    >>> patch_tensorflow(precision="mixed_bfloat16")
    >>> unpatch_tensorflow()
    >>> keras.Sequential, keras.config.dtype_policy().name
    (<class 'keras.src.models.sequential.Sequential'>, 'float32')
    """
    _set_policy(precision)
    _replaced.undo()


def _set_policy(precision: str) -> None:
    check_choice("precision", precision, ("float32", "mixed_bfloat16"))
    import keras

    keras.config.set_dtype_policy(precision)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the module, the name and the replacement of each patched class."""
    import keras
    import tensorflow as tf

    from bigdl.nano.tf.keras.layers import Embedding
    from bigdl.nano.tf.keras.models import Model, Sequential
    from bigdl.nano.tf.optimizers import SparseAdam

    for home in (keras, tf.keras):  # both may share modules
        for module in (home, home.models):
            yield module, "Model", Model
            yield module, "Sequential", Sequential
        yield home.layers, "Embedding", Embedding
        yield home.optimizers, "Adam", SparseAdam
