"""Distributed training, evaluation and prediction of PyTorch models."""

from bigdl.common.errors import require

require("torch", "orca")  # every module of this package needs torch

from bigdl.orca.learn.pytorch.estimator import (  # noqa: E402
    Estimator,
    PyTorchEstimator,
    TrainingOperator,
)

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]
