"""The import path that programs for BigDL 2.x use."""

from bigdl.orca.learn.nnframes import NNImageReader

__all__ = ["NNImageReader"]
