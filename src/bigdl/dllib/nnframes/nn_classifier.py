"""The import path that programs for BigDL 2.x use."""

from bigdl.orca.learn.nnframes import NNClassifier, NNClassifierModel, NNEstimator, NNModel

__all__ = ["NNClassifier", "NNClassifierModel", "NNEstimator", "NNModel"]
