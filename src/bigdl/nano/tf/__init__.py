"""Nano for TensorFlow and Keras: the same model, faster."""

import importlib

_HOMES = {
    "patch_tensorflow": "bigdl.nano.tf.patching",
    "unpatch_tensorflow": "bigdl.nano.tf.patching",
}

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
