"""Gradient boosted trees of XGBoost on data that is larger than the memory of the workers."""

from bigdl.orca.learn.trees.estimator import XGBEstimator

__all__ = ["XGBEstimator"]
