"""Keras activations."""

from bigdl.nano.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, "keras.activations")
