"""Search spaces, and decorators that let classes and functions take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.objects import args, func, lazily_constructed, obj, plmodel

__all__ = ["args", "func", "obj", "plmodel", "space", "tfmodel"]


def tfmodel(**defaults: Any) -> Callable[[type], type]:
    """Decorate a subclass of ``keras.Model``, so that it can be searched.

    Parameters
    ----------
    **defaults
        Arguments for models that are constructed without them: values or spaces.

    Returns
    -------
    callable
        Returns the class itself. Constructed with spaces, it gives an object with ``compile``,
        ``search``, ``fit`` and all else of :class:`bigdl.nano.automl.tf.keras.Model`.

    Raises
    ------
    UsageError
        If the class is not a Keras model.
    """

    def decorate(cls: type) -> type:
        keras = require("keras", "tf")
        if not (isinstance(cls, type) and issubclass(cls, keras.Model)):
            raise UsageError(f"hpo.tfmodel decorates a subclass of keras.Model, not {cls!r}")
        from bigdl.nano.automl.tf.keras import SearchableClass
        from bigdl.nano.automl.tf.substitutes import with_real_layers

        changed: Any = cls
        changed.__init__ = with_real_layers(changed.__init__)
        return lazily_constructed(cls, defaults, SearchableClass)

    return decorate
