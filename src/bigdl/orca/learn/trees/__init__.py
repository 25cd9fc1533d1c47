"""Gradient boosted trees on data that is larger than the memory of the workers."""

from bigdl.orca.learn.trees.lightgbm import LGBMEstimator
from bigdl.orca.learn.trees.xgboost import XGBEstimator

__all__ = ["LGBMEstimator", "XGBEstimator"]
