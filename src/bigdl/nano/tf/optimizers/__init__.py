"""All optimizers of Keras, and an Adam that updates the rows of sparse gradients only."""

from bigdl.nano.lazy_names import lazy_names

_OWN = {"SparseAdam": "bigdl.nano.tf.optimizers.sparse_adam"}

__getattr__, __dir__ = lazy_names(__name__, _OWN, "keras.optimizers")
