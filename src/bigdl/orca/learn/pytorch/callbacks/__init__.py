"""Callbacks of the PyTorch Estimator."""

from bigdl.orca.learn.pytorch.callbacks.base import Callback

__all__ = ["Callback"]
