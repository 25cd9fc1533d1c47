"""Keras models that train in several processes, and their accelerated inference."""

import importlib

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.tf.inference.optimizer",
    "Input": "keras",
    "Model": "bigdl.nano.tf.keras.models",
    "Sequential": "bigdl.nano.tf.keras.models",
    "nano": "bigdl.nano.tf.training.loops",
    "nano_bf16": "bigdl.nano.tf.training.loops",
    "nano_multiprocessing": "bigdl.nano.tf.training.loops",
    "nano_multiprocessing_loss": "bigdl.nano.tf.training.loops",
}

__all__ = [
    "InferenceOptimizer",
    "Input",
    "Model",
    "Sequential",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
