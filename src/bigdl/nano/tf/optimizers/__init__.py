"""All optimizers of Keras, and an Adam that updates the rows of sparse gradients only."""

import importlib

_OWN = {"SparseAdam": "bigdl.nano.tf.optimizers.sparse_adam"}


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OWN:
        return getattr(importlib.import_module(_OWN[name]), name)
    try:
        return getattr(importlib.import_module("keras.optimizers"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__():
    return sorted({*globals(), *_OWN, *dir(importlib.import_module("keras.optimizers"))})
