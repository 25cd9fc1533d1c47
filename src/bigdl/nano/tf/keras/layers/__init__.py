"""All layers of Keras, and an ``Embedding`` whose gradients stay sparse."""

from bigdl.nano.lazy_names import lazy_names

_OWN = {"Embedding": "bigdl.nano.tf.keras.layers.embedding"}

__getattr__, __dir__ = lazy_names(__name__, _OWN, "keras.layers")
