"""All layers of Keras, and an ``Embedding`` whose gradients stay sparse."""

import importlib

_OWN = {"Embedding": "bigdl.nano.tf.keras.layers.embedding"}


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OWN:
        return getattr(importlib.import_module(_OWN[name]), name)
    layers = importlib.import_module("keras.layers")
    try:
        return getattr(layers, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__():
    return sorted({*globals(), *_OWN, *dir(importlib.import_module("keras.layers"))})
