"""Decorators of models whose arguments may be search spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError, require
from bigdl.nano.automl.hpo.auto import AutoObject, lazily_constructed

__all__ = ["plmodel", "tfmodel"]


def plmodel(**defaults: Any) -> Callable[[type], type]:
    """Decorate a LightningModule, or any module of PyTorch, for ``Trainer.search``.

    Parameters
    ----------
    **defaults
        Arguments for models that are constructed without them: values or spaces.

    Returns
    -------
    callable
        Returns the class itself. Constructed with spaces, it gives an
        :class:`~bigdl.nano.automl.hpo.space.AutoObject`, of which ``Trainer.search`` makes the best
        model.

    Raises
    ------
    UsageError
        If the class is not a module of PyTorch.
    """

    def decorate(cls: type) -> type:
        module = require("torch", "nano").nn.Module
        if not (isinstance(cls, type) and issubclass(cls, module)):
            raise UsageError(f"hpo.plmodel decorates a LightningModule or nn.Module, not {cls!r}")
        return lazily_constructed(cls, defaults, AutoObject)

    return decorate


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
        from bigdl.nano.automl.tf.keras.models import SearchableClass
        from bigdl.nano.automl.tf.wrapping import makes_layers

        cls.__init__ = makes_layers(cls.__init__)
        return lazily_constructed(cls, defaults, SearchableClass)

    return decorate
