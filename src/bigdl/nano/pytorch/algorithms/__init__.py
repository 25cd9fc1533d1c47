"""Algorithms that change what a training step computes; for ``Trainer(algorithms=[...])``."""

from bigdl.nano.pytorch.algorithms.selective_backprop import SelectiveBackprop

__all__ = ["SelectiveBackprop"]
