"""Nano for TensorFlow and Keras: the same model, faster."""

from bigdl.nano.lazy_names import lazy_names

_HOMES = {
    "patch_tensorflow": "bigdl.nano.tf.patching",
    "unpatch_tensorflow": "bigdl.nano.tf.patching",
}

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
