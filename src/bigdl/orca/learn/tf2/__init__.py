"""Keras models on a cluster (API of BigDL 2.x)."""

from bigdl.orca.learn.tf2.estimator import Estimator

__all__ = ["Estimator"]
