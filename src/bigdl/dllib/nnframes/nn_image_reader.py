"""BigDL 2.x's import path of ``NNImageReader`` in :mod:`bigdl.orca.learn.nnframes`."""

from bigdl.orca.learn.nnframes import NNImageReader

__all__ = ["NNImageReader"]
