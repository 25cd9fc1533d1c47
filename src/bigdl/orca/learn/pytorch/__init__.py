"""PyTorch models on distributed data."""

from bigdl.common.errors import require

require("torch", "orca")  # the modules of this package are about nothing else

from bigdl.orca.learn.pytorch.estimator import (  # noqa: E402
    Estimator,
    PyTorchEstimator,
    TrainingOperator,
)

__all__ = ["Estimator", "PyTorchEstimator", "TrainingOperator"]
