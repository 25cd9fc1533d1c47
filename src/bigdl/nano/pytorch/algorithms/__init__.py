"""Algorithms that reduce the work of training steps, for ``Trainer(algorithms=[...])``."""

from bigdl.nano.pytorch.algorithms.selective_backprop import SelectiveBackprop

__all__ = ["SelectiveBackprop"]
