"""Distributed training, evaluation and prediction of Keras models (API of BigDL 2.x)."""

from bigdl.orca.learn.tf2.estimator import Estimator, KerasEstimator

__all__ = ["Estimator", "KerasEstimator"]
