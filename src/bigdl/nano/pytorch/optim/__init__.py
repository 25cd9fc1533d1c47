"""Optimizers."""

from bigdl.nano.pytorch.optim.sparse_adam import SparseAdam

__all__ = ["SparseAdam"]
