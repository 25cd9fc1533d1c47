"""Nested values of modules; see :mod:`bigdl.nano.acceleration.structure`."""

from bigdl.nano.acceleration.structure import TENSOR, Structure, flatten

__all__ = ["TENSOR", "Structure", "flatten"]
