"""BigDL 2.x's import path of the estimators in :mod:`bigdl.orca.learn.nnframes`."""

from bigdl.orca.learn.nnframes import NNClassifier, NNClassifierModel, NNEstimator, NNModel

__all__ = ["NNClassifier", "NNClassifierModel", "NNEstimator", "NNModel"]
