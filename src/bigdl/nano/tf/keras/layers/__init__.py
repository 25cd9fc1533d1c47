"""Keras layers, with an ``Embedding`` whose gradients stay sparse."""

from bigdl.nano.lazy_names import lazy_names

_NANO_LAYERS = {"Embedding": "bigdl.nano.tf.keras.layers.embedding"}

__getattr__, __dir__ = lazy_names(__name__, _NANO_LAYERS, "keras.layers")
