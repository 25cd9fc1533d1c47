"""Registry of acceleration methods, shared by PyTorch and Keras.

A :class:`~bigdl.nano.acceleration.method.Method` is one way to make a model faster. It declares
its requirements and builds an accelerated model from the user's model and a sample of its input.
The accelerated model can save and load itself. ``optimize`` tries the methods of the registry;
``trace`` and ``quantize`` select one.
"""

from bigdl.nano.acceleration.accuracy import AccuracyGoal
from bigdl.nano.acceleration.method import (
    BuildOptions,
    Method,
    find_method,
    methods,
    register_method,
)
from bigdl.nano.acceleration.precision import PRECISIONS, Precision, WeightOptions

__all__ = [
    "PRECISIONS",
    "AccuracyGoal",
    "BuildOptions",
    "Method",
    "Precision",
    "WeightOptions",
    "find_method",
    "methods",
    "register_method",
]
