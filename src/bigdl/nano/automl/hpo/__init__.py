"""Search spaces, and decorators for classes and functions that take them as arguments."""

from collections.abc import Callable
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.automl.hpo import space
from bigdl.nano.searchable import args, class_decorator, func, obj, plmodel

__all__ = ["args", "func", "obj", "plmodel", "space", "tfmodel"]


def tfmodel(**defaults: Any) -> Callable[[type], type]:
    """Decorate a ``keras.Model`` subclass so that its arguments can be search spaces.

    Parameters
    ----------
    **defaults
        Default arguments of the model: values or spaces.

    Returns
    -------
    callable
        Decorator that returns the class. Constructed with spaces, the class returns an object with
        the methods of :class:`bigdl.nano.automl.tf.keras.Model`, e.g. ``search`` and ``fit``.

    Raises
    ------
    UsageError
        If the class is not a Keras model.

    Examples
    --------
    >>> import keras
    >>> import bigdl.nano.automl.hpo as hpo
    >>> from bigdl.nano.automl.hpo import space
    >>> @hpo.tfmodel()
    ... class Classifier(keras.Model):
    ...     def __init__(self, units):
    ...         super().__init__()
    ...         self.hidden = keras.layers.Dense(units, activation="relu")
    ...         self.scores = keras.layers.Dense(2, activation="softmax")
    ...
    ...     def call(self, x):
    ...         return self.scores(self.hidden(x))
    >>> model = Classifier(units=space.Categorical(8, 16))  # with compile, search and fit
    >>> type(model).__name__
    'SearchableClass'
    >>> Classifier(8).hidden.units  # without a space, an ordinary model
    8
    """
    from bigdl.nano.automl.tf.keras import SearchableClass
    from bigdl.nano.automl.tf.substitutes import with_real_layers

    model = require("keras", "tf").Model
    usage = "hpo.tfmodel decorates a subclass of keras.Model"
    decorate = class_decorator(usage, model, defaults, SearchableClass)

    def with_layers(cls: type) -> type:
        changed: Any = decorate(cls)
        changed.__init__ = with_real_layers(changed.__init__)
        return changed

    return with_layers
