"""PyTorch models on distributed data."""

from bigdl.orca.learn.pytorch.estimator import Estimator, PyTorchEstimator
from bigdl.orca.learn.pytorch.pytorch_estimator import TrainingOperator

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]
