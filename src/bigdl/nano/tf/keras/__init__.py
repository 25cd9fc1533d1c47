"""Keras models with multi-process training, and their accelerated inference."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from keras import Input as Input

    from bigdl.nano.tf.inference.optimizer import InferenceOptimizer as InferenceOptimizer
    from bigdl.nano.tf.keras.models import Model as Model
    from bigdl.nano.tf.keras.models import Sequential as Sequential
    from bigdl.nano.tf.training.processes import nano as nano
    from bigdl.nano.tf.training.processes import nano_bf16 as nano_bf16
    from bigdl.nano.tf.training.processes import nano_multiprocessing as nano_multiprocessing
    from bigdl.nano.tf.training.processes import (
        nano_multiprocessing_loss as nano_multiprocessing_loss,
    )

_HOMES = {
    "InferenceOptimizer": "bigdl.nano.tf.inference.optimizer",
    "Input": "keras",
    "Model": "bigdl.nano.tf.keras.models",
    "Sequential": "bigdl.nano.tf.keras.models",
    "nano": "bigdl.nano.tf.training.processes",
    "nano_bf16": "bigdl.nano.tf.training.processes",
    "nano_multiprocessing": "bigdl.nano.tf.training.processes",
    "nano_multiprocessing_loss": "bigdl.nano.tf.training.processes",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
