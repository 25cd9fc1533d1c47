"""The registry of acceleration methods, which PyTorch and Keras share.

A :class:`~bigdl.nano.acceleration.method.Method` is one way to make a model faster. It says what
it needs, builds an accelerated model from the user's model and a sample of its input, and the
accelerated model knows how it is saved and loaded. ``optimize`` walks the registry; ``trace`` and
``quantize`` look one method up.
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
