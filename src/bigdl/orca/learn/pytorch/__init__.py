"""PyTorch models on distributed data."""

from bigdl.orca.learn.pytorch.estimator import Estimator, PyTorchEstimator, TrainingOperator

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]
