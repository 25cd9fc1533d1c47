"""All optimizers of Keras, and an Adam that updates the rows of sparse gradients only."""

from typing import TYPE_CHECKING

from bigdl.nano.lazy_names import lazy_names

if TYPE_CHECKING:
    from keras.optimizers import *  # noqa: F403

    from bigdl.nano.tf.optimizers.sparse_adam import SparseAdam as SparseAdam

_OWN = {"SparseAdam": "bigdl.nano.tf.optimizers.sparse_adam"}

__getattr__, __dir__ = lazy_names(__name__, _OWN, "keras.optimizers")
