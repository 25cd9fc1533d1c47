"""Keras optimizers, with an Adam that updates only the rows of sparse gradients."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from keras.optimizers import *  # noqa: F403

    from bigdl.nano.tf.optimizers.sparse_adam import SparseAdam as SparseAdam

_NANO_OPTIMIZERS = {"SparseAdam": "bigdl.nano.tf.optimizers.sparse_adam"}

__getattr__, __dir__ = lazy_names(__name__, _NANO_OPTIMIZERS, "keras.optimizers")
