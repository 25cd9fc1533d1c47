"""PyTorch models on distributed data."""

from bigdl.orca.learn.pytorch.estimator import Estimator, PyTorchEstimator

__all__ = ["Estimator", "PyTorchEstimator"]
